"""One virtual machine's pipeline before it is cut: the costs of every layer on every stage.

A workload is computed from profile, cluster and order of the ranks, but contains only numbers per
stage and layer. All solvers take it as their input, so that they can be compared with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.layer_memory import LayerMemory, batches_held
from lightning_pipeshift.plan.cost.simulator import Clock, Costs, Timeline, clock, simulate
from lightning_pipeshift.plan.cost.sums import LongNumbers, Numbers, running_sums
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, recomputing_stages

Sharers = tuple[tuple[int, ...], frozenset[int]]
"""The layers that share a parameter, and the stages that have some of them."""

Places = NDArray[np.intp]

ROUNDING: Final = 1 + 1e-9
"""Sums depend on their order by rounding: a difference of less than this factor is none."""

AT_ONCE: Final = 512
"""Many cuts are timed in one pass, but at most this many: each takes memory for every action."""


@dataclass(frozen=True, eq=False)
class Workload:
    """The costs of each of L layers on each of S stages, per microbatch.

    Args:
        forward: (S, L) seconds.
        backward: (S, L) seconds; in an asynchronous pipeline with the update that follows.
        forward_extra: (S,) seconds of a forward in addition to its layers; on the last stage with
            the code after the last layer.
        backward_extra: (S,) likewise.
        payload_seconds: (S - 1, L + 1): the transfer over the link after a stage, if the model is
            cut before layer b.
        gradient_seconds: (S - 1, L + 1): the transfer of the gradients back.
        static_bytes: (L,) held permanently.
        optimizer_bytes: (L,) the part of it that is the optimizer's state.
        waiting_bytes: (L,) the part of it that is weights which may wait in host memory.
        weight_bytes: (L,) of each further version of its trained weights.
        sent_bytes: (2, L) of weights that several layers share: of the first of these layers, and
            of the others.
        saved_bytes: (L,) held for a microbatch in flight.
        input_bytes: (L,) held for it instead if the layer is recomputed.
        outside_bytes: (L,) the part of both that recomputation does not restore: what code around
            the layer saves.
        momentary_bytes: (L,) held in addition while the layer runs.
        payload_bytes: (L + 1,) the values that cross the boundary before layer b; 0 at the ends of
            the model.
        shared_bytes: (L + 1, L + 1) held permanently for shared weights by a stage with the layers
            from b to e in addition to what each layer holds, at ``[b, e]``; negative if several
            layers have the same ones.
        usable_bytes: (S,) the memory of the stage's device; infinite if it is not known.
        schedule: by name.
        microbatches: of a step; 1 in an asynchronous pipeline, which does not split a batch.
        sizes: of each microbatch, relative to their mean, the larger first; one entry if all are
            equal. Everything else here is for one of mean size, but ``momentary_bytes``.
        once_seconds: (3, S) the part of a forward, a backward and a transfer after a stage that
            does not depend on the size of the microbatch.
        num_accumulated: how many minibatches make an update of an asynchronous pipeline.
        batch_bytes: a microbatch's part of the batch.
        allowed: the boundaries that may be cut; ``None``: all.
        sharers: the same stages have to have these layers, or one stage all of them if that is so
            now.
    """

    forward: Numbers
    backward: Numbers
    forward_extra: Numbers
    backward_extra: Numbers
    payload_seconds: Numbers
    gradient_seconds: Numbers
    static_bytes: Numbers
    optimizer_bytes: Numbers
    waiting_bytes: Numbers
    weight_bytes: Numbers
    sent_bytes: Numbers
    saved_bytes: Numbers
    input_bytes: Numbers
    outside_bytes: Numbers
    momentary_bytes: Numbers
    payload_bytes: Numbers
    shared_bytes: Numbers
    usable_bytes: Numbers
    schedule: str = "1f1b"
    microbatches: int = 1
    sizes: tuple[float, ...] = (1.0,)
    once_seconds: Numbers = field(default_factory=lambda: np.zeros((3, 1)))
    num_accumulated: int = 1
    batch_bytes: float = 0.0
    allowed: frozenset[int] | None = None
    sharers: tuple[Sharers, ...] = ()

    @property
    def num_stages(self) -> int:
        return int(self.forward.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.forward.shape[1])

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline does not drain between two batches, so that its pace counts."""
        return self.schedule in ASYNCHRONOUS

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The peak number of microbatches of which each stage holds activations."""
        if self.is_asynchronous:
            return batches_held(self.schedule, self.num_stages, 1)
        return clock(self.schedule, self.num_stages, self.microbatches).peak_in_flight

    @cached_property
    def memory(self) -> LayerMemory:
        """The memory that each stage needs for its layers, for any cut."""
        return LayerMemory.of(self)

    def fits(self, cut: Cut) -> bool:
        """Whether every stage has enough memory for a cut, without moves of saved tensors."""
        held = self.memory.peak_bytes(cut)
        return all(need <= usable for need, usable in zip(held, self.usable_bytes, strict=True))

    @property
    def recomputing(self) -> frozenset[int]:
        """The stages on which recomputation frees memory."""
        return recomputing_stages(self.schedule, self.num_stages, self.microbatches)

    def everything_recomputed(self, counts: Sequence[int]) -> Cut:
        """The cut under which all layers are recomputed where that frees memory."""
        cut = Cut(tuple(counts))
        bounds = cut.bounds
        layers = (layer for s in self.recomputing for layer in range(*bounds[s : s + 2]))
        return Cut(cut.counts, frozenset(layers))

    # The costs of a cut.

    def costs(self, cut: Cut, size: float = 1.0) -> Costs:
        """Returns the costs of a cut, for a microbatch of a size relative to the mean."""
        columns = self._columns(self._bounds([cut]), self._recomputed([cut]), size)
        table = [tuple(map(float, field[:, 0])) for field in columns]
        forward, backward, payload, gradient, again = table
        return Costs(forward, backward, payload, gradient, again if any(again) else ())

    def costs_by_size(self, cut: Cut) -> list[Costs]:
        """The costs of a cut for each different size of its microbatches, the larger first."""
        return [self.costs(cut, size) for size in dict.fromkeys(self.sizes)]

    def columns(self, bounds: Places, recomputed: Numbers) -> list[Numbers]:
        """The fields of :class:`Costs` for many cuts: a row for each stage or boundary of each size
        of microbatches, the larger first, and a column for each cut.

        Args:
            bounds: (S + 1, N), the stages' ends.
            recomputed: (S, N), the seconds of the layers that each stage recomputes.
        """
        sizes = dict.fromkeys(self.sizes)
        by_size = [self._columns(bounds, recomputed, size) for size in sizes]
        return [np.concatenate(each) for each in zip(*by_size, strict=True)]

    def _columns(self, bounds: Places, recomputed: Numbers, size: float) -> tuple[Numbers, ...]:
        stages = np.arange(self.num_stages)[:, None]
        begins, ends, links = bounds[:-1], bounds[1:], stages[:-1]
        # A stage without layers runs none of the user's code: it forwards the payload.
        runs = (begins < ends) | (stages == self.num_stages - 1)
        forward_once, backward_once, message_once = self.once_seconds[..., None]

        def sized(seconds: Numbers, once: Numbers) -> Numbers:
            return seconds if size == 1 else size * seconds + (1 - size) * once

        def sums(ends_of: LongNumbers, extra: Numbers, once: Numbers) -> Numbers:
            layers = np.asarray(ends_of[stages, ends] - ends_of[stages, begins], float)
            return sized(layers + extra[:, None] * runs, once * runs)

        def sent(seconds: Numbers) -> Numbers:
            crossing: Numbers = seconds[links, ends[:-1]]
            return sized(crossing, message_once[: len(links)] * (crossing > 0))

        # Recomputation: in actions of its own, or in the middle of the backward.
        waits = np.array([[stage in self.recomputing] for stage in range(self.num_stages)])
        again = size * recomputed
        return (
            sums(self._forward_ends, self.forward_extra, forward_once),
            sums(self._backward_ends, self.backward_extra, backward_once)
            + np.where(waits, 0.0, again),
            sent(self.payload_seconds),
            sent(self.gradient_seconds),
            np.where(waits, again, 0.0),
        )

    def _recomputed(self, cuts: Sequence[Cut]) -> Numbers:
        """(S, N): the seconds of the layers that each stage recomputes."""
        found: Numbers = np.zeros((self.num_stages, len(cuts)))
        for number, cut in enumerate(cuts):
            spared = dict(cut.spared)
            for stage, (begin, end) in enumerate(pairwise(cut.bounds) if cut.recompute else ()):
                found[stage, number] = sum(
                    self.forward[stage, layer] * (1 - spared.get(layer, 0.0))
                    for layer in range(begin, end)
                    if layer in cut.recompute
                )
        return found

    @cached_property
    def _forward_ends(self) -> LongNumbers:
        return running_sums(self.forward)

    @cached_property
    def _backward_ends(self) -> LongNumbers:
        return running_sums(self.backward)

    def is_allowed(self, cut: Cut) -> bool:
        """Whether each stage may have its layers."""
        bounds = cut.bounds
        return bool(self.possible_ranges[range(self.num_stages), bounds[:-1], bounds[1:]].all())

    @cached_property
    def possible_ranges(self) -> NDArray[np.bool_]:
        """(S, L + 1, L + 1): whether stage s may have the layers from b to e, at ``[s, b, e]``."""
        num_ends = self.num_layers + 1
        ends = np.full((self.num_stages, num_ends), self.allowed is None)
        ends[:, [0, -1, *sorted(self.allowed or ())]] = True
        # The end of the last stage is no cut.
        ends[-1] = True
        possible: NDArray[np.bool_] = np.tri(num_ends, dtype=bool).T & ends[:, None, :]
        for layers, stages in self.sharers:
            before = np.searchsorted(sorted(layers), np.arange(num_ends))
            num_inside = before[None, :] - before[:, None]
            if len(stages) == 1:
                possible &= (num_inside == 0) | (num_inside == len(layers))
            else:
                has_some = np.array([stage in stages for stage in range(self.num_stages)])
                possible &= (num_inside > 0) == has_some[:, None, None]
        return possible

    def clock_for(self, recomputes: bool) -> Clock:
        """The clock of the schedule, with recomputation or without.

        A recomputation that takes no time has no effect: one clock is enough for all cuts.
        """
        again = self.recomputing if recomputes else frozenset()
        num_larger = self.sizes.count(self.sizes[0]) if len(self.sizes) > 1 else None
        return clock(self.schedule, self.num_stages, self.microbatches, again, num_larger)

    def timeline(self, cut: Cut) -> Timeline:
        """The times of a cut's actions."""
        costs = self.costs_by_size(cut)
        return simulate(self.clock_for(bool(costs[0].recomputing_stages)), *costs)

    def step_seconds(self, cuts: Sequence[Cut]) -> list[float]:
        """The simulated time of a step, or of a minibatch in an asynchronous pipeline, for each of
        many cuts.
        """
        if not cuts:
            return []
        found: list[float] = self.timed(
            self.columns(self._bounds(cuts), self._recomputed(cuts))
        ).tolist()
        return found

    def timed(self, columns: Sequence[Numbers]) -> Numbers:
        """The simulated time of a step or minibatch for each of many columns of costs; these may
        be of other orders of the devices.
        """
        simulated = self.clock_for(bool(columns[-1].any())).step_seconds
        num_cuts = columns[0].shape[1]
        return np.concatenate(
            [
                simulated([np.ascontiguousarray(each[:, at : at + AT_ONCE]) for each in columns])
                for at in range(0, num_cuts, AT_ONCE)
            ]
        )

    def _bounds(self, cuts: Sequence[Cut]) -> NDArray[np.intp]:
        """The cuts' bounds, a column for each. Raises PartitionError for a cut of other layers or
        stages.
        """
        counts = [cut.counts for cut in cuts]
        bounds = np.zeros((self.num_stages + 1, len(cuts)), dtype=np.intp)
        if all(len(row) == self.num_stages for row in counts):
            np.cumsum(counts, axis=1, out=bounds[1:].T)
        for number in np.flatnonzero(bounds[-1] != self.num_layers):
            raise PartitionError(
                f"a cut {list(counts[number])} for {self.num_layers} layers on {self.num_stages}"
                " stages; one count for each stage, and all add up to the layers"
            )
        return bounds
