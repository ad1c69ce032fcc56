"""Orders of a virtual machine's stages, up to exchanges of equal devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from lightning_pipeshift.plan.inputs.cluster import Cluster, Device

Order = tuple[int, ...]
"""A virtual machine's ranks, in stage order."""


def interchangeable(cluster: Cluster) -> tuple[int, ...]:
    """For each rank, the first one that is interchangeable with it: a device of the same kind,
    speed and memory, with the same links to all others.
    """
    found: list[int] = []
    hosts: dict[str, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        hosts.setdefault(device.host, []).append(rank)
    seen: dict[Hashable, int] = {}
    for rank, device in enumerate(cluster.devices):
        # Most cases are decided without comparing links.
        key = rank if cluster.ranks else (device.host, *_worth(device))
        if key not in seen:
            firsts = dict.fromkeys(found)
            seen[key] = next((one for one in firsts if _alike(cluster, hosts, one, rank)), rank)
        found.append(seen[key])
    return tuple(found)


def _alike(cluster: Cluster, hosts: Mapping[str, Sequence[int]], one: int, other: int) -> bool:
    """Whether two ranks are interchangeable."""
    a, b = cluster.devices[one], cluster.devices[other]
    if _worth(a) != _worth(b):
        return False
    # Their own hosts first: if they differ, then there.
    thirds = [hosts[a.host], hosts[b.host]]
    if cluster.ranks or cluster.hosts:
        thirds += hosts.values()
    return all(
        cluster.link(one, third) == cluster.link(other, third)
        for ranks in thirds
        for third in ranks
        if third not in (one, other)
    )


def _worth(device: Device) -> tuple[str, float, float]:
    return device.kind, device.speed, device.usable_bytes


def pattern(alike: Sequence[int]) -> tuple[int, ...]:
    """Which ranks are interchangeable, without what they are: for each, the place of the first one
    that is interchangeable with it.

    Args:
        alike: for each rank of a virtual machine, see :func:`interchangeable`.
    """
    return tuple(map(alike.index, alike))


def num_orders(alike: Sequence[int]) -> int:
    """The number of orders that differ by more than interchangeable ranks.

    Args:
        alike: for each rank of a virtual machine, see :func:`interchangeable`.
    """
    same = math.prod(math.factorial(count) for count in Counter(alike).values())
    return math.factorial(len(alike)) // same


def distinct_orders(machine: Order, alike: Sequence[int]) -> Iterator[Order]:
    """All orders that differ by more than interchangeable ranks, which keep their order.

    Args:
        machine: a virtual machine's ranks.
        alike: for each of them, see :func:`interchangeable`.
    """
    if not machine:
        yield ()
    for place in [alike.index(name) for name in dict.fromkeys(alike)]:
        rest = machine[:place] + machine[place + 1 :]
        for order in distinct_orders(rest, [*alike[:place], *alike[place + 1 :]]):
            yield (machine[place], *order)
