"""What the raw figures that the ranks found of their machines come to.

Short measurements are noisy, and the order and grouping of devices depend on what they give. So
figures that are close become the same figure: two like machines don't look different because one of
them was interrupted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_pipeshift.errors import some_of
from lightning_pipeshift.plan.cluster import FREE, Cluster, Device, Link

SAME_SPEED: Final = 0.75
"""Devices of one kind at this part of the fastest's rate, or above, count as equally fast."""

SAME_BANDWIDTH: Final = 1 / 1.5
SAME_LATENCY: Final = 1 / 3
"""The same for links. What two processes measure on one busy host varies by nearly so much."""

UNSTEADY: Final = 3.0
"""A median this many times the best says that something else ran."""

SLOW: Final = 0.5
"""Below this part of its kind's median rate, a device is worth a note."""

Pair = tuple[int, int]
"""Two ranks, the lower first."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank has found of its own device.

    Args:
        device: its host and kind.
        processor: names what computes. Ranks with the same one are equally fast, whatever each
            of them sees in a short while.
        operations: floating-point operations in a slice.
        best_seconds: what the fastest slice took.
        median_seconds: what slices took in the median.
        pool: names the memory that it draws on. Ranks with the same one share it.
        memory_bytes: what the pool has.
        free_bytes: what is free of that.
    """

    device: Device
    processor: str
    operations: float
    best_seconds: float
    median_seconds: float
    pool: str
    memory_bytes: int
    free_bytes: int

    @property
    def rate(self) -> float:
        """Floating-point operations per second, undisturbed."""
        return self.operations / self.best_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks have found together.

    Args:
        cluster: the devices and their links. A device's speed is relative to the fastest of its
            kind: how kinds compare is for the layers themselves to say, measured on each.
        rates: floating-point operations per second, by rank; a first guess until then. Equal for
            devices of equal kind and speed.
        notes: what a person may want to look into, in words.
    """

    cluster: Cluster
    rates: tuple[float, ...]
    notes: tuple[str, ...]


def assess(found: Sequence[Found], links: Mapping[Pair, Link]) -> Measured:
    """What every rank's figures come to.

    Args:
        found: by rank.
        links: the pairs that were measured.
    """
    processors = ranks_by([each.processor for each in found])
    rates = [0.0] * len(found)
    for ranks in processors.values():
        for rank in ranks:
            rates[rank] = max(found[one].rate for one in ranks)
    kinds = ranks_by([each.device.kind for each in found])
    notes = tuple(_notes(found, rates, processors, kinds))
    speeds = [1.0] * len(found)
    for ranks in kinds.values():
        levels = levelled([rates[rank] for rank in ranks], SAME_SPEED)
        for rank, level in zip(ranks, levels, strict=True):
            rates[rank], speeds[rank] = level, level / max(levels)

    pools = ranks_by([each.pool for each in found])
    devices = []
    for each, speed in zip(found, speeds, strict=True):
        # Looked at one after the other, equal ranks see a little more or less.
        sharers = pools[each.pool]
        memory_bytes = min(found[rank].memory_bytes for rank in sharers) // len(sharers)
        free_bytes = min(found[rank].free_bytes for rank in sharers) // len(sharers)
        devices.append(
            # A device with 0 free bytes would be one of which nothing is known.
            replace(
                each.device,
                speed=speed,
                memory_bytes=memory_bytes,
                free_bytes=max(free_bytes, 1) if memory_bytes else 0,
            )
        )
    return Measured(_cluster(tuple(devices), links), tuple(rates), notes)


def ranks_by(names: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each name."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return ranks


def levelled(values: Sequence[float], ratio: float) -> list[float]:
    """Each value as the highest of its level. A level reaches from the highest value that is in
    none yet down to ``ratio`` of it: interruptions only make a figure lower than it should be.
    """
    level: dict[float, float] = {}
    top = 0.0
    for value in sorted(values, reverse=True):
        if not level or value < ratio * top:
            top = value
        level[value] = top
    return [level[value] for value in values]


def _cluster(devices: tuple[Device, ...], measured: Mapping[Pair, Link]) -> Cluster:
    """A cluster that says of each link no more than how it differs from the usual."""
    hosts = [device.host for device in devices]
    links: dict[Pair, Link] = {}
    usual: dict[bool, Link] = {}
    for is_inside in (True, False):
        pairs = [pair for pair in measured if (hosts[pair[0]] == hosts[pair[1]]) is is_inside]
        bandwidths = levelled([measured[pair].bandwidth for pair in pairs], SAME_BANDWIDTH)
        quickness = levelled(
            [1 / max(measured[pair].latency_seconds, 1e-9) for pair in pairs], SAME_LATENCY
        )
        for pair, bandwidth, quick in zip(pairs, bandwidths, quickness, strict=True):
            links[pair] = Link(1 / quick, bandwidth)
        usual[is_inside] = statistics.mode(links[pair] for pair in pairs) if pairs else FREE
    inside, outside = usual[True], usual[False]

    between: dict[tuple[str, str], list[Link]] = {}
    for (one, other), link in links.items():
        a, b = hosts[one], hosts[other]
        between.setdefault((b, a) if (b, a) in between else (a, b), []).append(link)
    of_hosts = {
        (a, b): link
        for (a, b), some in between.items()
        if (link := statistics.mode(some)) != (inside if a == b else outside)
    }
    cluster = Cluster(devices, inside, outside, of_hosts)
    of_ranks = {pair: link for pair, link in links.items() if link != cluster.link(*pair)}
    return replace(cluster, ranks=of_ranks)


def _notes(
    found: Sequence[Found],
    rates: Sequence[float],
    processors: Mapping[str, Sequence[int]],
    kinds: Mapping[str, Sequence[int]],
) -> Iterator[str]:
    for ranks in processors.values():
        device = found[ranks[0]].device
        # The rest of the host's name tells containers and clones apart, and no person.
        name = f"{'ranks' if len(ranks) > 1 else 'rank'} {some_of([str(rank) for rank in ranks])}"
        name += f" on host {device.host.partition('/')[0]} ({device.kind})"
        best = min(found[rank].best_seconds for rank in ranks)
        median = statistics.median(found[rank].median_seconds for rank in ranks)
        if median > UNSTEADY * best:
            yield (
                f"{name}: the same computation took {1e3 * best:.2f} ms at best and"
                f" {1e3 * median:.2f} ms in the median; another job may run there, or more ranks"
                " than it has cores"
            )
        usual = statistics.median_high(rates[rank] for rank in kinds[device.kind])
        if rates[ranks[0]] < SLOW * usual:
            yield (
                f"{name}: computes at {rates[ranks[0]] / usual:.0%} of the median of its kind;"
                " another job may run there, it may be throttled (heat, power), or it has fewer"
                " cores than the others"
            )
