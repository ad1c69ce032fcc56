"""What the simulator says of a whole plan: all virtual machines, their rings, and the memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.action import Kind
from lightning_pipeshift.plan.cluster import Cluster, Link
from lightning_pipeshift.plan.profile import Profile
from lightning_pipeshift.plan.simulator import Costs, Timeline, simulate
from lightning_pipeshift.plan.workload import Cut, Workload


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is expected to be. Tuples of tuples are per virtual machine and stage.

    Args:
        costs: of each virtual machine's microbatches.
        step_seconds: from one step's begin to the next one's.
        exposed_seconds: how long the last virtual machine waits for gradients of the others, with
            nothing left to compute.
        memory_bytes: the peak of each stage.
    """

    costs: tuple[Costs, ...]
    step_seconds: float
    exposed_seconds: float = 0.0
    memory_bytes: tuple[tuple[float, ...], ...] = ()


def predict(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
) -> Prediction:
    """What a step takes and holds.

    Hundreds of equal virtual machines take little longer than one where they are given the same
    :class:`Workload` object and equal cuts: each distinct pair is simulated once.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        workloads: one for each virtual machine; made with the links that :func:`crowded` leaves
            them, where several of them share a NIC.
        cuts: one for each of them.
    """
    costs: list[Costs] = []
    timelines: list[Timeline] = []
    held: list[tuple[float, ...]] = []
    first: dict[tuple[int, Cut], int] = {}
    for vm, (workload, cut) in enumerate(zip(workloads, cuts, strict=True)):
        like = first.setdefault((id(workload), cut), vm)
        if like == vm:
            costs.append(workload.costs(cut))
            timelines.append(simulate(workload.clock_of(cut), costs[vm]))
            held.append(workload.memory_bytes(cut))
        else:
            costs.append(costs[like])
            timelines.append(timelines[like])
            held.append(held[like])
    computed = max(timelines[vm].step_seconds for vm in first.values())
    summed = computed
    if len(ranks) > 1:
        ends = rings(profile, cluster, ranks, workloads, cuts, timelines)
        summed = max([computed, *ends])
    return Prediction(
        costs=tuple(costs),
        step_seconds=summed + _besides(profile, cluster, ranks, cuts),
        exposed_seconds=summed - computed,
        memory_bytes=tuple(held),
    )


def rings(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
    timelines: Sequence[Timeline],
) -> list[float]:
    """When each layer's ring is complete, in seconds since the step began.

    A layer's gradient is ready on its owner in the middle of the last backward there, which passes
    the later layers first. Its ring (CN112528108B) carries 2 (m - 1) / m of the bytes over each of
    its m links, at the pace of the slowest; a device sends for one ring after the other, and so
    does a host's NIC.
    """
    ready = {
        (id(workload), cut): _ready(workload, cut, _last_backwards(timeline))
        for workload, cut, timeline in zip(workloads, cuts, timelines, strict=True)
    }
    return _ring_ends(profile, cluster, ranks, cuts, list(ready.values()))


def estimated_seconds(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
) -> float:
    """The step of :func:`predict` in closed form, for a first look at many plans.

    What :meth:`Workload.estimate` leaves out of the pipeline is left out here.
    """
    computed: dict[tuple[int, Cut], float] = {}
    ready = []
    for workload, cut in zip(workloads, cuts, strict=True):
        if (id(workload), cut) in computed:
            continue
        seconds = computed[id(workload), cut] = workload.estimate(cut)
        if len(ranks) > 1:
            # Stage 0 ends last, and each of the others a backward and a message before the next.
            costs = workload.costs(cut)
            back = zip(costs.backward_seconds, costs.gradient_seconds, strict=False)
            before = accumulate((compute + message for compute, message in back), initial=0.0)
            ready.append(_ready(workload, cut, [seconds - earlier for earlier in before]))
    ends = _ring_ends(profile, cluster, ranks, cuts, ready) if len(ranks) > 1 else []
    return max([*computed.values(), *ends]) + _besides(profile, cluster, ranks, cuts)


def _besides(
    profile: Profile, cluster: Cluster, ranks: Sequence[Sequence[int]], cuts: Sequence[Cut]
) -> float:
    """What a step takes besides its actions and its rings: the optimizer, the loop, the data."""
    gradients = list(accumulate((layer.gradient_bytes for layer in profile.layers), initial=0))
    most = max(
        (gradients[end] - gradients[begin]) / cluster.devices[rank].speed
        for machine, cut in zip(ranks, cuts, strict=True)
        for rank, (begin, end) in zip(machine, pairwise(cut.bounds), strict=True)
    )
    return profile.step_seconds + profile.optimizer_seconds_per_byte * most


def _ring_ends(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    cuts: Sequence[Cut],
    ready: Sequence[NDArray[np.float64]],
) -> list[float]:
    """When each layer's ring is complete, where ``ready`` says when virtual machines have its
    gradient: one entry for each that differs from the others.
    """
    begins: list[float] = np.maximum.reduce(ready).tolist()
    ring_of = {layer: ring for layers, ring in _rings(cluster, ranks, cuts) for layer in layers}
    count = len(ranks)
    free: dict[Hashable, float] = {}
    ends = list(begins)
    for layer in sorted(range(profile.num_layers), key=lambda layer: (begins[layer], -layer)):
        num_bytes = profile.layers[layer].gradient_bytes
        if not num_bytes:
            continue
        ring = ring_of[layer]
        over_each_link = 2 * (count - 1) * num_bytes / count
        users = (*ring.members, *ring.leaves)
        begin = max(begins[layer], max(free.get(user, 0.0) for user in users))
        ends[layer] = begin + 2 * (count - 1) * ring.latency_seconds + over_each_link / ring.rate
        # A small ring's links rest while its messages are on their way: others use them.
        for member in ring.members:
            free[member] = begin + over_each_link / ring.rate
        for host, num_links in ring.leaves.items():
            free[host] = begin + num_links * over_each_link / ring.nic_rates[host]
    return ends


class _Ring(NamedTuple):
    """What a ring's pace depends on: the same for all layers with the same owners."""

    members: tuple[int, ...]
    rate: float
    """Of its slowest link, in bytes per second."""
    latency_seconds: float
    leaves: dict[str, int]
    """The hosts that it leaves, and over how many links each."""
    nic_rates: dict[str, float]


def _rings(
    cluster: Cluster, ranks: Sequence[Sequence[int]], cuts: Sequence[Cut]
) -> Iterator[tuple[range, _Ring]]:
    """The layers that have the same owners, and their ring."""
    nic_rates = _nic_rates(cluster, (rank for machine in ranks for rank in machine))
    distinct = set(cuts)
    bounds = sorted({bound for cut in distinct for bound in cut.bounds})
    for begin, end in pairwise(bounds):
        stage = {cut: bisect_right(cut.bounds, begin) - 1 for cut in distinct}
        members = tuple(machine[stage[cut]] for machine, cut in zip(ranks, cuts, strict=True))
        hosts = [cluster.devices[rank].host for rank in members]
        ways = list(zip(range(len(members)), [*range(1, len(members)), 0], strict=True))
        links = [cluster.link(members[a], members[b]) for a, b in ways]
        leaves = Counter(hosts[a] for a, b in ways if hosts[a] != hosts[b])
        shared = [nic_rates[host] / num_links for host, num_links in leaves.items()]
        yield (
            range(begin, end),
            _Ring(
                members,
                rate=min([link.bandwidth for link in links] + shared),
                latency_seconds=max(link.latency_seconds for link in links),
                leaves=dict(leaves),
                nic_rates=nic_rates,
            ),
        )


def _ready(workload: Workload, cut: Cut, ends: Sequence[float]) -> NDArray[np.float64]:
    """When each layer's gradient is there, where ``ends`` says when each stage's last backward
    ends: it passes the later layers first.
    """
    ready = np.zeros(workload.num_layers)
    for stage, moment in enumerate(ends):
        own = slice(cut.bounds[stage], cut.bounds[stage + 1])
        after = np.cumsum(workload.backward[stage, own])
        ready[own] = moment - np.concatenate([[0.0], after[:-1]])[: len(after)]
    return ready


def _last_backwards(timeline: Timeline) -> list[float]:
    """When each stage's last backward ends."""
    return [
        max(
            (span.end for span in row if span.action.kind is Kind.BACKWARD),
            default=timeline.step_seconds,
        )
        for row in timeline.rows
    ]


def crowded(cluster: Cluster, ranks: Sequence[Sequence[int]]) -> Cluster:
    """The cluster as the boundaries find it when all virtual machines send at once.

    Virtual machines run in step, so what they send in the same direction out of one host meets in
    its NIC, and each gets its part of it. A payload and a gradient out of the same host belong to
    different moments, and are not counted against each other.

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
    nic_rates = _nic_rates(cluster, (rank for way in ways for rank in way))
    narrowed: dict[tuple[int, int], Link] = {}
    for one, other in ways:
        link = cluster.link(one, other)
        rate = min(
            link.bandwidth,
            nic_rates[hosts[one]] / payloads[hosts[one]],
            nic_rates[hosts[other]] / gradients[hosts[other]],
        )
        if rate < link.bandwidth:
            narrowed[min(one, other), max(one, other)] = replace(link, bandwidth=rate)
    return replace(cluster, ranks={**cluster.ranks, **narrowed})


def _nic_rates(cluster: Cluster, ranks: Iterator[int]) -> dict[str, float]:
    """What each host's NIC carries, in bytes per second: as much as the fastest way out of it.

    A way of which nothing is known tells nothing of the NIC either, unless it is the only one."""
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
    used = {cluster.devices[rank].host for rank in ranks}
    return {
        host: max(fastest.get(host, 0.0), other)
        if math.isfinite(other)
        else fastest.get(host, other)
        for host in used
    }
