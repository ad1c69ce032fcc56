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
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link


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


class Rings:
    """The rings of all layers, one after the other on each device.

    A ring (CN112528108B) sends 2 (m - 1) / m of the bytes over each of its m links, at the speed of
    the slowest. A device sends for one ring after another, and so does a host's NIC: for the one
    that is ready first, and of several that wait for it, that of the first layer, whose next
    forward comes first. (The lanes of a real network can interrupt a less urgent ring; here it
    completes first.)

    Args:
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        cuts: one for each of them.
    """

    def __init__(
        self, cluster: Cluster, ranks: Sequence[Sequence[int]], cuts: Sequence[Cut]
    ) -> None:
        self._rings = list(_rings(cluster, ranks, cuts))
        self._num_ranks = cluster.num_ranks
        self._count = len(ranks)

    def ends(self, gradient_bytes: Sequence[int], ready: Sequence[float]) -> list[float]:
        """The time at which each layer's ring is complete, in seconds since the step started.

        Args:
            gradient_bytes: of each layer.
            ready: when the last virtual machine has the layer's gradient.
        """
        device_free = np.zeros(self._num_ranks)
        nic_free = np.zeros(self._num_ranks)  # there are at most as many hosts as ranks
        ends = list(ready)
        waiting = [[n for n in layers if gradient_bytes[n]] for layers, _ in self._rings]

        def next_layer(number: int) -> tuple[float, int, int]:
            """When a layer of a ring can begin, the layer, and the ring's number."""
            ring = self._rings[number][1]
            begin = max(
                float(device_free[ring.members].max()),
                float(nic_free[ring.hosts].max(initial=0.0)),
                min(ready[layer] for layer in waiting[number]),
            )
            return begin, next(n for n in waiting[number] if ready[n] <= begin), number

        queue = [next_layer(number) for number, layers in enumerate(waiting) if layers]
        heapq.heapify(queue)
        while queue:
            begin, layer, number = next_layer(queue[0][2])
            if begin > queue[0][0]:
                # Another ring has taken its devices or its NIC meanwhile.
                heapq.heapreplace(queue, (begin, layer, number))
                continue
            ring, around = self._rings[number][1], 2 * (self._count - 1)
            over_each_link = around * gradient_bytes[layer] / self._count
            nic_free[ring.hosts] = begin + over_each_link * ring.host_seconds
            # A small ring's links are idle while its messages are in transit: other rings use them.
            device_free[ring.members] = begin + over_each_link / ring.rate
            ends[layer] = begin + around * ring.latency_seconds + over_each_link / ring.rate
            waiting[number].remove(layer)
            if waiting[number]:
                heapq.heapreplace(queue, next_layer(number))
            else:
                heapq.heappop(queue)
        return ends


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
