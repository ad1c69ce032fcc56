"""Chooses which of a virtual machine's devices is which stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product

from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.partition.orders import Order, distinct_orders, num_orders

Orders = tuple[Order, ...]
"""The orders of all virtual machines."""


def compute_power(profile: Profile, cluster: Cluster, rank: int) -> float:
    """The number of microbatches that a device would train per second, if it had the whole
    model.
    """
    times = profile.times_on(cluster.devices[rank])
    seconds = math.fsum(times.forward) + math.fsum(times.backward)
    return 1 / seconds if seconds else 1.0


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
        starts: orders of all virtual machines to start from.
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
            # Neighbours first.
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
