"""The simulator's prediction of a whole plan: all virtual machines, their rings, and memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_model import Footprint, Footprints, links_of, sparing
from lightning_pipeshift.plan.cost.memory_timeline import Links
from lightning_pipeshift.plan.cost.overlap import gradients_ready, overlapped
from lightning_pipeshift.plan.cost.pace import steady_pace
from lightning_pipeshift.plan.cost.ring_contention import Rings, crowded
from lightning_pipeshift.plan.cost.simulator import Costs, Timeline, columns
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Swap


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


@dataclass(frozen=True, eq=False)
class Pipelines:
    """The virtual machines of a run, each with a cut of the model.

    Hundreds of equal virtual machines take little longer than one if they have the same
    :class:`Workload` object and equal cuts: each distinct pair is simulated once.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order: see :func:`workload_of`.
        workloads: one for each virtual machine; if several share a NIC, made with the links
            that :func:`~lightning_pipeshift.plan.cost.ring_contention.crowded` leaves them.
        cuts: one for each of them.
    """

    profile: Profile
    cluster: Cluster
    ranks: Sequence[Sequence[int]]
    workloads: Sequence[Workload]
    cuts: Sequence[Cut]

    def predicted(self, swaps: Sequence[Sequence[Swap]] = ()) -> Prediction:
        """The time and memory of a step, or of a minibatch in an asynchronous pipeline.

        Args:
            swaps: the saved tensors that each virtual machine swaps; empty if none does.
        """
        swapped = [tuple(each) for each in swaps] or [()] * len(self.cuts)
        cuts = [sparing(self.profile, *each) for each in zip(self.cuts, swapped, strict=True)]
        # The links between stages take long to list, and only swaps use them.
        links_left = crowded(self.cluster, self.ranks) if any(swapped) else self.cluster
        made: dict[Hashable, tuple[Costs, Footprint]] = {}
        found = []
        for workload, cut, moved, machine in zip(
            self.workloads, cuts, swapped, self.ranks, strict=True
        ):
            is_moving = moved or cut.optimizer_on_host or cut.weights_on_host
            links = links_of(links_left, machine) if is_moving else Links()
            key = id(workload), cut, moved, links.key
            if key not in made:
                footprint = Footprints(self.profile, workload, links).of(cut, moved)
                made[key] = workload.costs(cut), footprint
            found.append(made[key])
        footprints = [footprint for _, footprint in found]
        timelines = [footprint.timeline for footprint in footprints]
        computed, summed = replace(self, cuts=cuts)._step_seconds(timelines)
        late = max(each.seconds for each in footprints) - max(
            timeline.step_seconds for timeline in timelines
        )
        return Prediction(
            costs=tuple(costs for costs, _ in found),
            step_seconds=summed + late + self.seconds_between,
            exposed_seconds=summed - computed,
            memory_bytes=tuple(
                tuple(_of_ranks(machine, footprint.peak_bytes).values())
                for machine, footprint in zip(self.ranks, footprints, strict=True)
            ),
        )

    @property
    def simulated_seconds(self) -> float:
        """The step time of :meth:`predicted` without swaps, at a fraction of the cost."""
        made = {(id(workload), cut): workload.timeline(cut) for workload, cut in self._distinct}
        timelines = [
            made[id(workload), cut] for workload, cut in zip(self.workloads, self.cuts, strict=True)
        ]
        return self._step_seconds(timelines)[1] + self.seconds_between

    def _step_seconds(self, timelines: Sequence[Timeline]) -> tuple[float, float]:
        """The time of a step or minibatch, without rings and with them.

        Args:
            timelines: of each virtual machine.
        """
        if self._is_pace:
            return self._paces()
        computed = max(timeline.step_seconds for timeline in timelines)
        if len(self.ranks) == 1:
            return computed, computed
        if self.profile.overlaps_updates:
            return computed, max(computed, self.overlapping_seconds - self.seconds_between)
        return computed, max([computed, *self.rings(timelines)])

    def rings(self, timelines: Sequence[Timeline]) -> list[float]:
        """The time at which each layer's ring is complete, in seconds since the step started.

        A layer's gradient is ready on its owner in the middle of the last backward there, the
        stage's last action, which passes the later layers first.

        Args:
            timelines: of each virtual machine.
        """
        ready = {
            (id(workload), cut): gradients_ready(
                workload, _bounds(cut), [float(row.ends[-1]) for row in timeline.computed]
            )
            for workload, cut, timeline in zip(self.workloads, self.cuts, timelines, strict=True)
        }
        return self._ring_ends(list(ready.values()))

    @property
    def overlapping_seconds(self) -> float:
        """The time of a step that overlaps with the sums of the steps before: each layer is updated
        when its own gradient is summed.
        """
        ends = partial(self._rings.ends, self.gradient_bytes)
        return overlapped(self._distinct, ends, self.seconds_between)

    # Parts.

    @cached_property
    def gradient_bytes(self) -> list[int]:
        """Of each layer."""
        return [layer.gradient_bytes for layer in self.profile.layers]

    @cached_property
    def seconds_between(self) -> float:
        """The time of a step or minibatch outside its actions and rings: the optimizer, unless it
        steps after each backward, the loop, the data.
        """
        if self._is_pace:
            return self.profile.step_seconds
        gradients = list(accumulate(self.gradient_bytes, initial=0))
        held = {cut: [gradients[e] - gradients[b] for b, e in _bounds(cut)] for cut in self.cuts}
        most = max(
            num_bytes / self.cluster.devices[rank].speed
            for machine, cut in zip(self.ranks, self.cuts, strict=True)
            for rank, num_bytes in _of_ranks(machine, held[cut]).items()
        )
        return self.profile.step_seconds + self.profile.optimizer_seconds_per_byte * most

    @cached_property
    def _distinct(self) -> list[tuple[Workload, Cut]]:
        pairs = zip(self.workloads, self.cuts, strict=True)
        return list({(id(workload), cut): (workload, cut) for workload, cut in pairs}.values())

    @cached_property
    def _rings(self) -> Rings:
        return Rings(self.cluster, self.ranks, self.cuts)

    @property
    def _is_pace(self) -> bool:
        return self.workloads[0].is_asynchronous

    def _paces(self) -> tuple[float, float]:
        """The time of a minibatch in asynchronous pipelines, without rings and with them.

        A stage's next forward needs the update of its last backward, so it waits for its rings. In
        ``async-2bw`` it does not need it: an update has at least as many minibatches as there are
        stages, and its rings run during the next one.
        """
        costs = [workload.costs(cut) for workload, cut in self._distinct]
        computed = max(float(steady_pace(columns(each))) for each in costs)
        if len(self.ranks) == 1:
            return computed, computed
        # In seconds since the stages' backwards began, as if all of them began at once.
        ends = self._ring_ends(
            [
                gradients_ready(workload, _bounds(cut), each.backward_seconds)
                for (workload, cut), each in zip(self._distinct, costs, strict=True)
            ]
        )
        if self.workloads[0].schedule == "async-2bw":
            return computed, max(computed, max(ends) / max(map(len, self.ranks)))
        summed = computed
        for (_, cut), each in zip(self._distinct, costs, strict=True):
            ring_ends = [max(ends[begin:end], default=0.0) for begin, end in _bounds(cut)]
            backward = tuple(map(max, each.backward_seconds, ring_ends))
            longer = replace(each, backward_seconds=backward)
            summed = max(summed, float(steady_pace(columns(longer))))
        return computed, summed

    def _ring_ends(self, ready: Sequence[Numbers]) -> list[float]:
        """The time at which each layer's ring is complete, given in ``ready`` the times at which
        virtual machines have each layer's gradient: one entry for each distinct one; none of one
        virtual machine.
        """
        if not ready:
            return []
        last = np.maximum.reduce(ready).tolist()
        return self._rings.ends(self.gradient_bytes, last)


def _of_ranks(ranks: Sequence[int], of_stages: Sequence[float]) -> dict[int, float]:
    """The sums over the chunks of layers of each rank."""
    found = dict.fromkeys(ranks, 0.0)
    for rank, each in zip(ranks, of_stages, strict=True):
        found[rank] += each
    return found


def _bounds(cut: Cut) -> list[tuple[int, int]]:
    return list(pairwise(cut.bounds))
