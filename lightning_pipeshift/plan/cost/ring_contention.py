"""Models how virtual machines delay each other's messages: rings wait for each other, NICs are
shared.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link

_ROUNDING: Final = 1e-9


def crowded(cluster: Cluster, ranks: Sequence[Sequence[int]]) -> Cluster:
    """The cluster with the bandwidth that each boundary gets if all virtual machines send at once.

    Virtual machines run in step, so messages in the same direction out of one host share its NIC,
    and each gets a part of it. A payload and a gradient out of the same host are sent at different
    times, and do not share it.

    Args:
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
    """
    hosts = [device.host for device in cluster.devices]
    ways = [
        (one, other)
        for machine in ranks
        for one, other in pairwise(machine)
        if hosts[one] != hosts[other]
    ]
    payloads = Counter(hosts[one] for one, _ in ways)
    gradients = Counter(hosts[other] for _, other in ways)
    if max([*payloads.values(), *gradients.values()], default=0) < 2:
        return cluster
    nic_rates = _nic_rates(cluster, {*payloads, *gradients})
    narrowed: dict[tuple[int, int], Link] = {}
    made: dict[tuple[Link, float], Link] = {}
    for one, other in ways:
        link = cluster.link(one, other)
        rate = min(
            link.bandwidth,
            nic_rates[hosts[one]] / payloads[hosts[one]],
            nic_rates[hosts[other]] / gradients[hosts[other]],
        )
        if rate < link.bandwidth:
            if (link, rate) not in made:
                made[link, rate] = replace(link, bandwidth=rate)
            narrowed[min(one, other), max(one, other)] = made[link, rate]
    return replace(cluster, ranks={**cluster.ranks, **narrowed}) if narrowed else cluster


def ring_ends(
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    cuts: Sequence[Cut],
    gradient_bytes: Sequence[int],
    ready: Sequence[float],
) -> list[float]:
    """The time at which each layer's ring is complete, in seconds since the step started, if rings
    run in the order in which they start.

    A ring (CN112528108B) sends 2 (m - 1) / m of the bytes over each of its m links, at the speed of
    the slowest. A device sends for one ring after another, and so does a host's NIC.

    Args:
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        cuts: one for each of them.
        gradient_bytes: of each layer.
        ready: when the last virtual machine has the layer's gradient.
    """
    ring_of = {layer: ring for layers, ring in _rings(cluster, ranks, cuts) for layer in layers}
    count = len(ranks)
    device_free = np.zeros(cluster.num_ranks)
    nic_free = np.zeros(cluster.num_ranks)  # there are at most as many hosts as ranks
    ends = list(ready)
    for layer in sorted(range(len(ready)), key=lambda layer: (ready[layer], -layer)):
        if not gradient_bytes[layer]:
            continue
        ring = ring_of[layer]
        over_each_link = 2 * (count - 1) * gradient_bytes[layer] / count
        begin = max(ready[layer], float(device_free[ring.members].max()))
        if len(ring.hosts):
            begin = max(begin, float(nic_free[ring.hosts].max()))
            nic_free[ring.hosts] = begin + over_each_link * ring.host_seconds
        # A small ring's links are idle while its messages are in transit: other rings use them.
        device_free[ring.members] = begin + over_each_link / ring.rate
        ends[layer] = begin + 2 * (count - 1) * ring.latency_seconds + over_each_link / ring.rate
    return ends


class Transfer(NamedTuple):
    """A part of a layer's gradient.

    Args:
        layer: its number.
        lane: on which it travels, 0 for the most urgent one.
        num_bytes: its size.
    """

    layer: int
    lane: int
    num_bytes: float


class RingNetwork:
    """Rings whose more urgent messages go first, for many simulations.

    The network carries a more urgent lane first. Within a lane each device sends for the first
    layer first, and the devices of a host share its NIC equally. Whatever capacity these leave goes
    to less urgent rings. A change of what is sent takes effect at once.

    Args:
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        cuts: one for each of them.
    """

    def __init__(
        self, cluster: Cluster, ranks: Sequence[Sequence[int]], cuts: Sequence[Cut]
    ) -> None:
        rings = list(_rings(cluster, ranks, cuts))
        self._ring_of = {layer: n for n, (layers, _) in enumerate(rings) for layer in layers}
        count = len(ranks)
        passes = 2 * (count - 1) / count
        self._seconds_per_byte = [passes / ring.rate for _, ring in rings]
        self._latency = [2 * (count - 1) * ring.latency_seconds for _, ring in rings]
        # What a ring at full speed uses of each device and each NIC.
        self._resources = [
            np.concatenate([ring.members, cluster.num_ranks + ring.hosts]) for _, ring in rings
        ]
        self._uses = [
            np.concatenate(
                [
                    np.ones(len(ring.members)),
                    [ring.rate * seconds if seconds else 0.0 for seconds in ring.host_seconds],
                ]
            )
            for _, ring in rings
        ]
        self._num_resources = 2 * cluster.num_ranks  # there are at most as many hosts as ranks
        self._speeds: dict[tuple[tuple[int, int], ...], list[float]] = {}

    def ends(self, transfers: Sequence[Transfer], ready: Sequence[float]) -> list[float]:
        """The time at which each layer's sum is complete.

        Args:
            transfers: the parts of all gradients.
            ready: when the last virtual machine has each layer's gradient.
        """
        ends = list(ready)
        coming = sorted(transfers, key=lambda one: -ready[one.layer])
        # By ring, the transfers in progress: the most urgent first, with what is left of it.
        waiting: list[list[tuple[int, int, int]]] = [[] for _ in self._resources]
        left: list[float] = []
        now = 0.0
        while coming or any(waiting):
            heads = sorted((*queue[0][:2], ring) for ring, queue in enumerate(waiting) if queue)
            order = tuple((lane, ring) for lane, _, ring in heads)
            speeds = self._speeds_of(order)
            moment = ready[coming[-1].layer] if coming else math.inf
            completes = []
            for (_, ring), speed in zip(order, speeds, strict=True):
                if speed > 0:
                    end = now + left[waiting[ring][0][2]] / speed
                    completes.append((end, ring))
                    moment = min(moment, end)
            for (_, ring), speed in zip(order, speeds, strict=True):
                left[waiting[ring][0][2]] -= (moment - now) * speed
            for end, ring in completes:
                if end <= moment:
                    _, layer, _ = heapq.heappop(waiting[ring])
                    ends[layer] = max(ends[layer], end + self._latency[ring])
            now = max(now, moment)
            while coming and ready[coming[-1].layer] <= now:
                one = coming.pop()
                ring = self._ring_of[one.layer]
                if one.num_bytes:
                    heapq.heappush(waiting[ring], (one.lane, one.layer, len(left)))
                    left.append(one.num_bytes * self._seconds_per_byte[ring])
        return ends

    def _speeds_of(self, order: tuple[tuple[int, int], ...]) -> list[float]:
        """The speed of each ring, as a fraction of its full one.

        Args:
            order: the lane and the ring, the most urgent first.
        """
        if order not in self._speeds:
            capacity = np.ones(self._num_resources)
            speeds: list[float] = []
            for _, group in groupby(order, key=lambda one: one[0]):
                rings = [ring for _, ring in group]
                sharers = np.zeros(self._num_resources)
                for ring in rings:
                    sharers[self._resources[ring]] += 1
                found = [self._possible(ring, capacity / np.maximum(sharers, 1)) for ring in rings]
                for ring, speed in zip(rings, found, strict=True):
                    capacity[self._resources[ring]] -= speed * self._uses[ring]
                for place, ring in enumerate(rings):
                    more = min(1.0 - found[place], self._possible(ring, capacity))
                    capacity[self._resources[ring]] -= more * self._uses[ring]
                    found[place] += more
                speeds += found
            # What is left after rounding is no capacity.
            self._speeds[order] = [speed if speed > _ROUNDING else 0.0 for speed in speeds]
        return self._speeds[order]

    def _possible(self, ring: int, capacity: NDArray[np.float64]) -> float:
        uses = self._uses[ring]
        is_used = uses > 0
        free = capacity[self._resources[ring]][is_used] / uses[is_used]
        return float(np.clip(free.min(initial=1.0), 0.0, 1.0))


def ring_seconds_per_byte(
    cluster: Cluster, ranks: Sequence[Sequence[int]]
) -> tuple[tuple[float, ...], ...]:
    """The seconds that each stage of each virtual machine would take to send a byte of gradients
    around its ring.

    Computed before the model is cut: as if all stages had equally many layers, so that a ring goes
    through the same part of every pipeline.
    """
    count, deepest = len(ranks), max(map(len, ranks))
    hosts = [device.host for device in cluster.devices]
    # The members of each ring, as many rings as the deepest has stages.
    rings = [[machine[s * len(machine) // deepest] for machine in ranks] for s in range(deepest)]
    ways = [
        (s, one, other)
        for s, members in enumerate(rings)
        for one, other in zip(members, [*members[1:], members[0]], strict=True)
    ]
    leaving = Counter(hosts[one] for _, one, other in ways if hosts[one] != hosts[other])
    nic_rates = _nic_rates(cluster, leaving)
    slowest = [0.0] * deepest
    for s, one, other in ways:
        seconds = 1 / cluster.link(one, other).bandwidth
        if hosts[one] != hosts[other]:
            seconds = max(seconds, leaving[hosts[one]] / nic_rates[hosts[one]])
        slowest[s] = max(slowest[s], seconds)
    passes = 2 * (count - 1) / count
    return tuple(
        tuple(
            passes * max(slowest[s] for s in range(deepest) if s * len(machine) // deepest == stage)
            for stage in range(len(machine))
        )
        for machine in ranks
    )


class _Ring(NamedTuple):
    """The properties that determine a ring's speed: the same for all layers with the same
    owners.
    """

    members: NDArray[np.intp]
    rate: float
    """The rate of its slowest link, in bytes per second."""
    latency_seconds: float
    hosts: NDArray[np.intp]
    """The hosts from which it sends to another host, by number."""
    host_seconds: NDArray[np.float64]
    """The seconds for which the NIC of each is busy per byte on every link."""


def _rings(
    cluster: Cluster, ranks: Sequence[Sequence[int]], cuts: Sequence[Cut]
) -> Iterator[tuple[range, _Ring]]:
    """The layers that have the same owners, and their ring."""
    names = [device.host for device in cluster.devices]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(names))}
    nic_rates = _nic_rates(cluster, numbers)
    bounds_of = {cut: cut.bounds for cut in set(cuts)}
    for begin, end in pairwise(sorted({b for bounds in bounds_of.values() for b in bounds})):
        stage = {cut: bisect_right(bounds, begin) - 1 for cut, bounds in bounds_of.items()}
        members = [machine[stage[cut]] for machine, cut in zip(ranks, cuts, strict=True)]
        links, leaves = [], Counter[str]()
        for one, other in zip(members, [*members[1:], members[0]], strict=True):
            links.append(cluster.link(one, other))
            if names[one] != names[other]:
                leaves[names[one]] += 1
        busy = [number / nic_rates[host] for host, number in leaves.items()]
        yield (
            range(begin, end),
            _Ring(
                np.array(members),
                rate=min([link.bandwidth for link in links] + [1 / b for b in busy if b]),
                latency_seconds=max(link.latency_seconds for link in links),
                hosts=np.array([numbers[host] for host in leaves], dtype=np.intp),
                host_seconds=np.array(busy),
            ),
        )


def _nic_rates(cluster: Cluster, hosts: Iterable[str]) -> dict[str, float]:
    """The bandwidth of each host's NIC, in bytes per second: that of the fastest link out of it.

    Links with unknown bandwidth are ignored, unless there is no other."""
    fastest: dict[str, float] = {}
    ways = [(a, b, link) for (a, b), link in cluster.hosts.items()]
    ways += [
        (cluster.devices[one].host, cluster.devices[other].host, link)
        for (one, other), link in cluster.ranks.items()
    ]
    for a, b, link in ways:
        if a != b and math.isfinite(link.bandwidth):
            fastest[a] = max(fastest.get(a, 0.0), link.bandwidth)
            fastest[b] = max(fastest.get(b, 0.0), link.bandwidth)
    other = cluster.outside.bandwidth
    if math.isinf(other):
        return {host: fastest.get(host, other) for host in hosts}
    return {host: max(fastest.get(host, other), other) for host in hosts}
