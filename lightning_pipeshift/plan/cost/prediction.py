"""The simulator's prediction of a whole plan: all virtual machines, their rings, and memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from lightning_pipeshift.plan.cost.lanes import best_shares, equal_shares, lanes_by_share
from lightning_pipeshift.plan.cost.memory_model import Footprint, Footprints, links_of, sparing
from lightning_pipeshift.plan.cost.memory_timeline import Links
from lightning_pipeshift.plan.cost.overlap import (
    Machine,
    Overlapped,
    gradients_ready,
    overlapped,
)
from lightning_pipeshift.plan.cost.pace import steady_pace
from lightning_pipeshift.plan.cost.ring_contention import (
    RingNetwork,
    Transfer,
    crowded,
    ring_ends,
)
from lightning_pipeshift.plan.cost.simulator import Costs, Timeline, columns
from lightning_pipeshift.plan.cost.workload import Cut, Numbers, Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.schedule.actions import Kind


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time and memory of a step, or of a minibatch in an asynchronous pipeline.
    Tuples of tuples are per virtual machine and stage.

    Args:
        costs: of each virtual machine's microbatches.
        step_seconds: from the start of one step, or minibatch, to the start of the next.
        exposed_seconds: how long the last virtual machine waits for gradients of the others, after
            its own compute.
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
    swaps: Sequence[Sequence[Swap]] = (),
    lane_shares: Sequence[float] = (),
) -> Prediction:
    """Predicts the time and memory of a step, or of a minibatch in an asynchronous pipeline.

    Hundreds of equal virtual machines take little longer than one if they are given the same
    :class:`Workload` object and equal cuts: each distinct pair is simulated once.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        workloads: one for each virtual machine; if several share a NIC, made with the links
            that :func:`~lightning_pipeshift.plan.cost.ring_contention.crowded` leaves them.
        cuts: one for each of them.
        swaps: the saved tensors that each of them swaps; empty if none does.
        lane_shares: the part of all gradient bytes that each lane carries; empty for equal parts.
    """
    swapped = [tuple(each) for each in swaps] or [()] * len(cuts)
    cuts = [sparing(profile, cut, moved) for cut, moved in zip(cuts, swapped, strict=True)]
    # The links between stages take long to list, and only swaps use them.
    links_left = crowded(cluster, ranks) if any(swapped) else cluster
    made: dict[Hashable, tuple[Costs, Footprint]] = {}
    found = []
    for workload, cut, moved, machine in zip(workloads, cuts, swapped, ranks, strict=True):
        is_moving = moved or cut.optimizer_on_host or cut.weights_on_host
        links = links_of(links_left, machine) if is_moving else Links()
        key = id(workload), cut, moved, links.key
        if key not in made:
            footprint = Footprints(profile, workload, links).of(cut, moved)
            made[key] = workload.costs(cut), footprint
        found.append(made[key])
    footprints = [footprint for _, footprint in found]
    timelines = [footprint.timeline for footprint in footprints]
    computed, summed = _seconds(profile, cluster, ranks, workloads, cuts, timelines, lane_shares)
    late = max(each.seconds for each in footprints) - max(
        timeline.step_seconds for timeline in timelines
    )
    return Prediction(
        costs=tuple(costs for costs, _ in found),
        step_seconds=summed + late + _besides(profile, cluster, ranks, workloads, cuts),
        exposed_seconds=summed - computed,
        memory_bytes=tuple(footprint.peak_bytes for footprint in footprints),
    )


class LanePlanner:
    """Predicts steps by how their gradients are distributed over lanes, if each layer is updated
    when its own gradient is summed.

    Args:
        See :func:`predict`.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        ranks: Sequence[Sequence[int]],
        workloads: Sequence[Workload],
        cuts: Sequence[Cut],
    ) -> None:
        distinct = {(id(w), cut): Machine(w, cut) for w, cut in zip(workloads, cuts, strict=True)}
        self._machines = list(distinct.values())
        self._network = RingNetwork(cluster, ranks, cuts)
        self._between = _besides(profile, cluster, ranks, workloads, cuts)
        self.gradient_bytes = [layer.gradient_bytes for layer in profile.layers]

    def overlapped(self, shares: Sequence[float]) -> Overlapped:
        """The times of steps with given shares of the lanes."""
        transfers = [
            Transfer(layer, part.lane, (part.end - begin) * size)
            for layer, (parts, size) in enumerate(
                zip(lanes_by_share(self.gradient_bytes, shares), self.gradient_bytes, strict=True)
            )
            for part, begin in zip(parts, (0.0, *(part.end for part in parts)), strict=False)
        ]
        return overlapped(self._machines, partial(self._network.ends, transfers), self._between)

    def best_shares(self) -> tuple[float, ...]:
        """The shares with which a step is shortest."""
        return best_shares(self.gradient_bytes, lambda shares: self.overlapped(shares).step_seconds)


def simulated_seconds(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
) -> float:
    """The step time of :func:`predict` without swaps, at a fraction of the cost."""
    timed = {
        (id(workload), cut): (workload, cut) for workload, cut in zip(workloads, cuts, strict=True)
    }
    made = {key: workload.timeline(cut) for key, (workload, cut) in timed.items()}
    timelines = [made[id(workload), cut] for workload, cut in zip(workloads, cuts, strict=True)]
    _, summed = _seconds(profile, cluster, ranks, workloads, cuts, timelines)
    return summed + _besides(profile, cluster, ranks, workloads, cuts)


def _seconds(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
    timelines: Sequence[Timeline],
    lane_shares: Sequence[float] = (),
) -> tuple[float, float]:
    """The time of a step or minibatch, without rings and with them."""
    if workloads[0].objective.is_pace:
        return _paces(profile, cluster, ranks, workloads, cuts)
    computed = max(timeline.step_seconds for timeline in timelines)
    if len(ranks) == 1:
        return computed, computed
    if profile.overlaps_updates:
        planner = LanePlanner(profile, cluster, ranks, workloads, cuts)
        shares = lane_shares or equal_shares(planner.gradient_bytes)
        besides = _besides(profile, cluster, ranks, workloads, cuts)
        return computed, max(computed, planner.overlapped(shares).step_seconds - besides)
    return computed, max([computed, *rings(profile, cluster, ranks, workloads, cuts, timelines)])


def rings(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
    timelines: Sequence[Timeline],
) -> list[float]:
    """The time at which each layer's ring is complete, in seconds since the step started.

    A layer's gradient is ready on its owner in the middle of the last backward there, which passes
    the later layers first."""
    ready = {
        (id(workload), cut): gradients_ready(workload, _bounds(cut), _last_backwards(timeline))
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
    """The step time of :func:`predict` in closed form, for a first comparison of many plans.

    It omits the same parts of the pipeline as :meth:`Workload.estimate`.
    """
    if workloads[0].objective.is_pace:
        _, summed = _paces(profile, cluster, ranks, workloads, cuts)
        return summed + _besides(profile, cluster, ranks, workloads, cuts)
    computed: dict[tuple[int, Cut], float] = {}
    ready = []
    for workload, cut in zip(workloads, cuts, strict=True):
        if (id(workload), cut) in computed:
            continue
        seconds = computed[id(workload), cut] = workload.estimate(cut)
        if len(ranks) > 1:
            # Stage 0 ends last, and each other stage a backward and a message before the next.
            costs = workload.costs(cut)
            back = zip(costs.backward_seconds, costs.gradient_seconds, strict=False)
            before = accumulate((compute + message for compute, message in back), initial=0.0)
            ready.append(
                gradients_ready(workload, _bounds(cut), [seconds - earlier for earlier in before])
            )
    ends = _ring_ends(profile, cluster, ranks, cuts, ready) if len(ranks) > 1 else []
    return max([*computed.values(), *ends]) + _besides(profile, cluster, ranks, workloads, cuts)


def _paces(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
) -> tuple[float, float]:
    """The time of a minibatch in asynchronous pipelines, without rings and with them.

    A stage's next forward needs the update of its last backward, so it waits for its rings. In
    ``async-2bw`` it does not need it: an update has at least as many minibatches as there are
    stages, and its rings run during the next one.
    """
    distinct = {(id(w), cut): (w, cut) for w, cut in zip(workloads, cuts, strict=True)}
    costs = [workload.costs(cut) for workload, cut in distinct.values()]
    computed = max(float(steady_pace(columns(each))) for each in costs)
    if len(ranks) == 1:
        return computed, computed
    ready = [
        gradients_ready(workload, _bounds(cut), each.backward_seconds)
        for (workload, cut), each in zip(distinct.values(), costs, strict=True)
    ]
    # In seconds since the stages' backwards began, as if all of them began at once.
    ends = _ring_ends(profile, cluster, ranks, cuts, ready)
    if workloads[0].schedule == "async-2bw":
        return computed, max(computed, max(ends) / max(map(len, ranks)))
    summed = computed
    for (_, cut), each in zip(distinct.values(), costs, strict=True):
        ring_ends = [max(ends[begin:end], default=0.0) for begin, end in pairwise(cut.bounds)]
        backward = tuple(map(max, each.backward_seconds, ring_ends))
        longer = replace(each, backward_seconds=backward)
        summed = max(summed, float(steady_pace(columns(longer))))
    return computed, summed


def _besides(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    workloads: Sequence[Workload],
    cuts: Sequence[Cut],
) -> float:
    """The time of a step or minibatch outside its actions and rings: the optimizer, unless it steps
    after each backward, the loop, the data.
    """
    if workloads[0].objective.is_pace:
        return profile.step_seconds
    gradients = list(accumulate((layer.gradient_bytes for layer in profile.layers), initial=0))
    held = {
        cut: [gradients[end] - gradients[begin] for begin, end in pairwise(cut.bounds)]
        for cut in set(cuts)
    }
    most = max(
        num_bytes / cluster.devices[rank].speed
        for machine, cut in zip(ranks, cuts, strict=True)
        for rank, num_bytes in zip(machine, held[cut], strict=True)
    )
    return profile.step_seconds + profile.optimizer_seconds_per_byte * most


def _ring_ends(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    cuts: Sequence[Cut],
    ready: Sequence[Numbers],
) -> list[float]:
    """The time at which each layer's ring is complete, given in ``ready`` the times at which
    virtual machines have each layer's gradient: one entry for each distinct one.
    """
    sizes = [layer.gradient_bytes for layer in profile.layers]
    return ring_ends(cluster, ranks, cuts, sizes, np.maximum.reduce(ready).tolist())


def _bounds(cut: Cut) -> list[tuple[int, int]]:
    return list(pairwise(cut.bounds))


def _last_backwards(timeline: Timeline) -> list[float]:
    """The end of each stage's last backward."""
    return [
        max(
            (span.end for span in row if span.action.kind is Kind.BACKWARD),
            default=timeline.step_seconds,
        )
        for row in timeline.rows
    ]
