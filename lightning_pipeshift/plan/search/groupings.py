"""Groups devices into virtual machines: the few groupings worth trying.

There are too many groupings of ranks to try them all, but few have an advantage: a payload is sent
for every microbatch and a gradient once a step, so a virtual machine may lie inside a host, or span
hosts so that its gradients remain inside one; stages may be of all kinds, so that all virtual
machines are equally fast, or of one kind, so that no stage waits for a slower one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise, permutations

from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.inputs.shares import shared_out
from lightning_pipeshift.plan.inputs.topology import filled, host_order

Groups = tuple[tuple[int, ...], ...]
"""The ranks of each virtual machine, in the order of the hosts."""


def candidate_counts(devices: Sequence[Device], effort: Effort = USUAL) -> tuple[int, ...]:
    """How many virtual machines to try, the fewest first.

    The divisors of the number of devices; of many devices, those that make pipelines of about 1, 2,
    4, ... stages. Devices on several hosts, or of several kinds, may also make one virtual machine
    for each host, or as many as there are devices of a kind; and a few different devices any
    number.
    """
    num_ranks = len(devices)
    divisors = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
    kinds = Counter((device.kind, device.speed) for device in devices)
    if num_ranks <= effort.stages:
        counts = set(divisors)
    else:
        depths = [1 << exponent for exponent in range(effort.stages.bit_length())]
        counts = {_near(num_ranks / depth, divisors) for depth in depths}
    counts.add(len({device.host for device in devices}))
    if len(kinds) > 1 and num_ranks <= effort.few_ranks:
        counts |= set(range(1, num_ranks + 1))
    elif 1 < len(kinds) <= effort.few_ranks and num_ranks <= effort.stages:
        counts |= {math.gcd(*kinds.values()), *kinds.values()}
    return tuple(sorted(count for count in counts if num_ranks <= count * effort.stages))


def _near(count: float, divisors: Sequence[int]) -> int:
    """The nearest divisor if it is near, otherwise the count itself, which divides unevenly."""
    nearest = min(divisors, key=lambda divisor: abs(math.log(divisor / count)))
    return nearest if abs(math.log2(nearest / count)) <= 0.5 else math.ceil(count)


def groupings(
    cluster: Cluster,
    count: int,
    powers: Sequence[float],
    alike: Sequence[int],
    depths: Sequence[int] | None = None,
    effort: Effort = USUAL,
) -> tuple[Groups, ...]:
    """Groupings of all ranks into ``count`` virtual machines.

    All groupings if these are few; otherwise the first of: one device of each kind in every virtual
    machine, or more of each (NUDT, "distributed parallel training method and system for
    heterogeneous computing clusters"), if the counts allow; whole hosts, and parts of a host;
    across the hosts; equal devices; equal compute power in each, with equal depths and without.

    Args:
        cluster: the machines.
        count: how many virtual machines, at most the number of ranks.
        powers: the speed of each rank.
        alike: by rank, see :func:`~lightning_pipeshift.plan.search.orders.interchangeable`.
        depths: how many stages each virtual machine has, if that is fixed.
        effort: the limits of the search.
    """
    num_ranks = cluster.num_ranks
    in_order = host_order(cluster.devices)
    found: dict[tuple[tuple[int, ...], ...], Groups] = {}

    def add(groups: Groups) -> None:
        if depths is not None:
            fitting = _of_depths(groups, depths)
            if fitting is None:
                return
            groups = fitting
        # Virtual machines of interchangeable devices are the same, in any order.
        key = [tuple(sorted(alike[rank] for rank in ranks)) for ranks in groups]
        found.setdefault(tuple(key if depths is not None else sorted(key)), groups)

    if num_ranks <= effort.few_ranks:
        for number, groups in enumerate(_every(in_order, count)):
            # Of equal devices the same ones are found again and again.
            if len(found) > effort.groupings_each or number >= 256 * effort.groupings_each:
                break
            for order in permutations(groups) if depths is not None else (groups,):
                add(order)
        else:
            if len(found) <= effort.groupings_each:
                return tuple(found.values())
        found.clear()
    for groups in _with_reasons(cluster, in_order, count, powers, depths, effort.stages):
        add(groups)
    return tuple(found.values())


def ring_order(
    cluster: Cluster, machines: Sequence[Sequence[int]], most: int = USUAL.stages
) -> Groups:
    """The virtual machines in their order in the rings.

    A ring runs at the speed of its slowest link. So this returns the cycle whose slowest link is
    the fastest, and among these the one with the least total time; of equal ones, the first in the
    given order. All cycles are tried up to 7 virtual machines; beyond that, segments of the cycle
    are reversed while that helps (2-opt). More than ``most`` stay in the order of the hosts.
    """
    count = len(machines)
    if not (cluster.hosts or cluster.ranks) or not 4 <= count <= most:
        # A host's virtual machines are neighbours already, or should be.
        return tuple(map(tuple, machines))
    apart = [[_apart(cluster, one, other) for other in machines] for one in machines]
    if len({apart[a][b] for a in range(count) for b in range(count) if a != b}) == 1:
        return tuple(map(tuple, machines))

    def cost(cycle: Sequence[int]) -> tuple[float, float]:
        links = [apart[a][b] for a, b in pairwise([*cycle, cycle[0]])]
        return max(links), math.fsum(links)

    best = tuple(range(count))
    if count <= 7:
        best = min((best[:1] + rest for rest in permutations(best[1:])), key=cost)
    else:
        least, improved = cost(best), True
        while improved:
            improved = False
            for i in range(1, count - 1):
                for j in range(i + 2, count + 1):
                    turned = best[:i] + best[i:j][::-1] + best[j:]
                    if (found := cost(turned)) < least:
                        best, least, improved = turned, found, True
    return tuple(tuple(machines[vm]) for vm in best)


def _apart(cluster: Cluster, one: Sequence[int], other: Sequence[int]) -> float:
    """Seconds per byte between two virtual machines, over the slowest link of their rings."""
    deepest = max(len(one), len(other))
    return max(
        1
        / cluster.link(
            one[place * len(one) // deepest], other[place * len(other) // deepest]
        ).bandwidth
        for place in range(deepest)
    )


def _with_reasons(
    cluster: Cluster,
    in_order: Sequence[int],
    count: int,
    powers: Sequence[float],
    depths: Sequence[int] | None,
    most_ranks: int,
) -> Iterator[Groups]:
    devices = cluster.devices
    even = list(depths) if depths is not None else shared_out(len(in_order), [1.0] * count)
    kinds: dict[tuple[str, float], list[int]] = {}
    for rank in in_order:
        kinds.setdefault((devices[rank].kind, devices[rank].speed), []).append(rank)
    place = {rank: number for number, rank in enumerate(in_order)}

    def sorted_up(machines: Sequence[Sequence[int]]) -> Groups:
        # In the pipeline a host's devices are neighbours, so that few boundaries cross hosts; and
        # in a ring a host's virtual machines are neighbours.
        in_host_order = [tuple(sorted(machine, key=place.__getitem__)) for machine in machines]
        return tuple(sorted(in_host_order, key=lambda machine: place[machine[0]]))

    # One of each kind, or more of each, if the counts allow.
    yield sorted_up(filled(devices, even))
    # Whole hosts, or parts of a host.
    yield sorted_up(_dealt(in_order, even))
    hosts: dict[str, list[int]] = {}
    for rank in in_order:
        hosts.setdefault(devices[rank].host, []).append(rank)
    is_small = len(in_order) <= most_ranks
    if depths is None and is_small and 1 < len(hosts) <= count:
        yield sorted_up(_shared_out(list(hosts.values()), count))
    # Across the hosts: gradients stay inside.
    yield sorted_up([in_order[vm::count] for vm in range(count)])
    # Equal devices.
    if len(kinds) > 1:
        yield sorted_up(_dealt([rank for ranks in kinds.values() for rank in ranks], even))
        if depths is None and is_small and len(kinds) <= count:
            yield sorted_up(_shared_out(list(kinds.values()), count))
    # Equally fast.
    if len(set(powers)) > 1:
        fastest = sorted(in_order, key=lambda rank: -powers[rank])
        yield sorted_up(_balanced(fastest, powers, even))
        if depths is None and is_small:
            yield sorted_up(_balanced(fastest, powers, [len(in_order)] * count))


def _dealt(ranks: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
    """Assigns the ranks in their order, to one virtual machine after another."""
    left = iter(ranks)
    return [[next(left) for _ in range(depth)] for depth in depths]


def _shared_out(sets: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Virtual machines, each from one of the sets, in proportion to the sets' sizes."""
    machines: list[list[int]] = []
    for ranks, number in zip(sets, shared_out(count, [len(s) for s in sets]), strict=True):
        # A set that is too small for its virtual machines leaves some to the largest sets.
        machines += _dealt(ranks, shared_out(len(ranks), [1.0] * min(number, len(ranks))))
    while len(machines) < count:
        largest = max(machines, key=len)
        machines[machines.index(largest)] = largest[: len(largest) // 2]
        machines.append(largest[len(largest) // 2 :])
    return machines


def _balanced(
    fastest: Sequence[int], powers: Sequence[float], rooms: Sequence[int]
) -> list[list[int]]:
    """Assigns each rank, the fastest first, to the virtual machine that is the slowest so far: the
    usual greedy rule (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """
    machines: list[list[int]] = [[] for _ in rooms]
    slowest = [(0.0, vm) for vm in range(len(rooms))]
    for rank in fastest:
        total, vm = heappop(slowest)
        machines[vm].append(rank)
        if len(machines[vm]) < rooms[vm]:
            heappush(slowest, (total + powers[rank], vm))
    return machines


def _every(ranks: Sequence[int], count: int) -> Iterator[Groups]:
    """Yields all partitions of the ranks into ``count`` groups."""
    if not ranks:
        if not count:
            yield ()
        return
    if count < 1 or len(ranks) < count:
        return
    for groups in _every(ranks[:-1], count - 1):
        yield (*groups, (ranks[-1],))
    for groups in _every(ranks[:-1], count):
        for place, group in enumerate(groups):
            yield (*groups[:place], (*group, ranks[-1]), *groups[place + 1 :])


def _of_depths(groups: Groups, depths: Sequence[int]) -> Groups | None:
    """The groups in an order in which they have these depths; ``None`` if there is none."""
    by_depth: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_depth.setdefault(len(group), []).append(group)
    if sorted(map(len, groups)) != sorted(depths):
        return None
    return tuple(by_depth[depth].pop(0) for depth in depths)
