"""Chooses which of a virtual machine's devices is which stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise, product

from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.partition.orders import Order, distinct_orders, num_orders

Orders = tuple[Order, ...]
"""The orders of all virtual machines."""


def by_ratio(
    profile: Profile, cluster: Cluster, machine: Sequence[int], replicas: Sequence[Sequence[int]]
) -> Order:
    """The order by compute time over communication time, largest first.

    NUDT, "distributed parallel training method and system for heterogeneous computing clusters":
    stages should take equal time, so a device's share of the model is proportional to its compute
    power c_i; the gradients it must exchange are proportional to that share; with its bandwidth b_i
    this gives its communication time. Stage 0 finishes its backward last and has no later compute
    to overlap communication with, so it should have the least of it. As all compute times are
    equal, the order is that of the communication times c_i / b_i, the smallest first.

    Args:
        profile: of the model.
        cluster: the machines.
        machine: the virtual machine's ranks; ties keep the order in which they are given.
        replicas: the other virtual machines' ranks, in the order of the ring, starting with the
            next.
    """
    neighbours = [_kinds(cluster, ranks) for ranks in (*replicas[:1], *replicas[-1:])]
    known: dict[Hashable, float] = {}

    def communication(rank: int) -> float:
        device = cluster.devices[rank]
        key = rank if cluster.ranks else (device.host, device.kind, device.speed)
        if key not in known:
            power = compute_power(profile, cluster, rank)
            known[key] = power * _seconds_per_byte(cluster, rank, neighbours)
        return known[key]

    return tuple(sorted(machine, key=communication))


def compute_power(profile: Profile, cluster: Cluster, rank: int) -> float:
    """The number of microbatches that a device would train per second, if it had the whole
    model.
    """
    times = profile.times_on(cluster.devices[rank])
    seconds = math.fsum(times.forward) + math.fsum(times.backward)
    return 1 / seconds if seconds else 1.0


_Kinds = Mapping[str, Sequence[tuple[int, int]]]
"""A virtual machine's devices by kind: one rank on each host, and how many the host has."""


def _kinds(cluster: Cluster, ranks: Sequence[int]) -> _Kinds:
    first: dict[Hashable, int] = {}
    number: Counter[int] = Counter()
    for rank in ranks:
        device = cluster.devices[rank]
        # All ranks of a host have the same distance, unless links were measured for each.
        key = rank if cluster.ranks else (device.host, device.kind)
        number[first.setdefault(key, rank)] += 1
    kinds: dict[str, list[tuple[int, int]]] = {}
    for rank, count in number.items():
        kinds.setdefault(cluster.devices[rank].kind, []).append((rank, count))
    return kinds


def _seconds_per_byte(cluster: Cluster, rank: int, neighbours: Sequence[_Kinds]) -> float:
    """The slower of a device's two links to its neighbours in a ring.

    The neighbours depend on an order that is not known yet: devices of the same kind are assumed if
    there are any, otherwise the mean of all devices."""

    def to(kinds: _Kinds) -> float:
        alike = kinds.get(cluster.devices[rank].kind) or [
            pair for pairs in kinds.values() for pair in pairs
        ]
        total = math.fsum(count / cluster.link(rank, other).bandwidth for other, count in alike)
        return total / sum(count for _, count in alike)

    return max(map(to, neighbours), default=0.0)


def ranked_orders(
    machines: Orders,
    starts: Sequence[Orders],
    alike: Sequence[int],
    step_seconds: Callable[[Orders], float],
    estimate: Callable[[Orders], float],
    most: int = USUAL.orders,
) -> list[tuple[Orders, float]]:
    """Orders with their step times, the fastest first.

    All orders if there are few distinct ones. Otherwise the starts, and the best of them improved
    by swaps of stages while that helps.

    Args:
        machines: the ranks of each virtual machine, in the preferred order.
        starts: orders of all virtual machines to start from, such as the rule's.
        alike: for each rank, see :func:`interchangeable`.
        step_seconds: the simulated time of the orders of all virtual machines; infinite if they are
            not possible.
        estimate: an estimate of it at a fraction of the cost; it decides about swaps.
        most: the number of orders up to which all are tried.
    """
    tried: dict[Orders, float] = {}

    def attempt(orders: Orders) -> None:
        if orders not in tried:
            tried[orders] = step_seconds(orders)

    for start in (machines, *starts):
        attempt(start)
    named = [[alike[rank] for rank in machine] for machine in machines]
    if math.prod(map(num_orders, named)) <= most:
        for orders in product(*map(distinct_orders, machines, named)):
            attempt(orders)
    elif most:
        attempt(_climbed(min(tried, key=tried.__getitem__), alike, estimate, most))
    return sorted(tried.items(), key=lambda entry: entry[1])


def best_order(
    ranked: Sequence[tuple[Orders, float]], machines: Orders, worth: float = USUAL.worth_changing
) -> Orders:
    """The fastest order, or of those that are slower by less than the factor ``worth``, the one
    nearest to ``machines``.

    Args:
        ranked: orders with their step times, as of :func:`ranked_orders`.
        machines: the ranks of each virtual machine, in the preferred order.
    """
    limit = worth * min(seconds for _, seconds in ranked)
    within = [entry for entry in ranked if entry[1] <= limit]
    return min(within, key=lambda entry: (_num_out_of_order(entry[0], machines), entry[1]))[0]


def _climbed(
    orders: Orders, alike: Sequence[int], estimate: Callable[[Orders], float], most: int
) -> Orders:
    """The orders after swaps of two stages, each of which shortened the step.

    Equal virtual machines are swapped equally: otherwise their ring would be slower. Runs of
    interchangeable stages are swapped whole: swaps inside of them gain nothing."""
    best = orders
    seconds = estimate(best)
    left = most
    improved = True
    while improved and left > 0:
        improved = False
        runs = [_runs([alike[rank] for rank in order]) for order in best]
        for pattern in dict.fromkeys(map(tuple, runs)):
            pairs = [(i, j) for i in range(len(pattern)) for j in range(i + 1, len(pattern))]
            # Neighbours first: the rule's order is seldom far from the best.
            for i, j in sorted(pairs, key=lambda pair: pair[1] - pair[0]):
                if left <= 0:
                    break
                left -= 1
                changed = tuple(
                    _swapped(order, run, i, j) if tuple(run) == pattern else order
                    for order, run in zip(best, runs, strict=True)
                )
                found = estimate(changed)
                if found < seconds * (1 - 1e-9):
                    best, seconds, improved = changed, found, True
                    break
    return best


def _runs(alike: Sequence[int]) -> list[int]:
    return [0, *(place for place, (a, b) in enumerate(pairwise(alike), 1) if a != b)]


def _swapped(order: Order, begins: Sequence[int], one: int, other: int) -> Order:
    pieces = [order[a:b] for a, b in pairwise([*begins, len(order)])]
    pieces[one], pieces[other] = pieces[other], pieces[one]
    return tuple(rank for piece in pieces for rank in piece)


def _num_out_of_order(orders: Orders, machines: Orders) -> int:
    """The number of pairs of stages in the opposite order."""
    count = 0
    for order, machine in zip(orders, machines, strict=True):
        place = {rank: number for number, rank in enumerate(machine)}
        count += sum(place[a] > place[b] for i, a in enumerate(order) for b in order[i + 1 :])
    return count
