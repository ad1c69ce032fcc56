"""One virtual machine's pipeline before it is cut: the costs of every layer on every stage.

A workload is computed from profile, cluster and order of the ranks, but contains only numbers per
stage and layer. All solvers take it as their input, so that they can be compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.cost.pace import Objective, steady_pace
from lightning_pipeshift.plan.cost.simulator import Clock, Costs, Timeline, clock, simulate
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.schedule.asynchronous import (
    shared_copies,
    updates_per_backward,
    weight_versions,
)
from lightning_pipeshift.plan.schedule.schedules import recomputing_stages

Numbers = NDArray[np.float64]
LongNumbers = NDArray[np.longdouble]

Counts = tuple[int, ...]
"""The number of layers of each stage."""

Sharers = tuple[tuple[int, ...], frozenset[int]]
"""The layers that share a parameter, and the stages that have some of them."""

SENDS_UNDER_WAY: Final = 2
"""How many large values, and how many gradients, a stage with a memory plan may be sending at a
time: one more waits. See ``runtime.comm.mailbox.Mailbox.most_large``."""

ROUNDING: Final = 1 + 1e-9
"""Sums depend on their order by rounding: a difference of less than this factor is none."""

AT_ONCE: Final = 512
"""Many cuts are timed in one pass, but at most this many: each takes memory for every action."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A solution.

    Args:
        counts: the number of layers of each stage.
        recompute: the layers that are recomputed.
        optimizer_on_host: the layers whose optimizer state is in host memory between two steps.
        weights_on_host: the layers whose weights are in host memory while they wait.
        spared: of recomputed layers that do not drop all of their tensors, the layer and the part
            of its forward that does not run again.
    """

    counts: Counts
    recompute: frozenset[int] = frozenset()
    optimizer_on_host: frozenset[int] = frozenset()
    weights_on_host: frozenset[int] = frozenset()
    spared: frozenset[tuple[int, float]] = frozenset()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The stages' ends: stage s has the layers from ``bounds[s]`` to ``bounds[s + 1]``."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count)
        return tuple(ends)


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
    def in_flight(self) -> tuple[int, ...]:
        """The peak number of microbatches of which each stage holds activations."""
        if self.objective.is_pace:
            return batches_held(self.schedule, self.num_stages, 1)
        return clock(self.schedule, self.num_stages, self.microbatches).peak_in_flight

    @property
    def sizes_in_flight(self) -> Numbers:
        """(S,): the sizes of these microbatches together, relative to the mean size."""
        if len(self.sizes) == 1:
            return np.array(self.in_flight, dtype=np.float64)
        # The first ones are the largest.
        return np.array([math.fsum(self.sizes[:count]) for count in self.in_flight])

    @property
    def objective(self) -> Objective:
        """The measure of a cut: the lower, the faster."""
        return Objective.of(self.schedule, self.microbatches)

    @cached_property
    def fixed_bytes(self) -> Numbers:
        """(S, L): held for each layer on each stage regardless of the microbatches in flight."""
        pipeline = self.schedule, self.num_stages, self.num_accumulated
        stashed = np.array(self.num_versions)[:, None] - 1
        copies = np.array(shared_copies(*pipeline)) @ self.sent_bytes
        held: Numbers = self.static_bytes + stashed * self.weight_bytes + copies
        return held

    @property
    def num_versions(self) -> tuple[int, ...]:
        """The largest number of versions of its trained weights that each stage holds."""
        return weight_versions(self.schedule, self.num_stages, self.num_accumulated)

    @property
    def recomputing(self) -> frozenset[int]:
        """The stages on which recomputation frees memory."""
        return recomputing_stages(self.schedule, self.num_stages, self.microbatches)

    def everything_recomputed(self, counts: Sequence[int]) -> Cut:
        """The cut under which all layers are recomputed where that frees memory."""
        cut = Cut(tuple(counts))
        layers = {
            layer
            for stage in self.recomputing
            for layer in range(cut.bounds[stage], cut.bounds[stage + 1])
        }
        return Cut(cut.counts, frozenset(layers))

    # The costs of a cut.

    def costs(self, cut: Cut, size: float = 1.0) -> Costs:
        """Returns the costs of a cut, for a microbatch of a size relative to the mean."""
        table = [tuple(map(float, field[:, 0])) for field in self._columns([cut], size)]
        forward, backward, payload, gradient, again = table
        return Costs(forward, backward, payload, gradient, again if any(again) else ())

    def costs_by_size(self, cut: Cut) -> list[Costs]:
        """The costs of a cut for each different size of its microbatches, the larger first."""
        return [self.costs(cut, size) for size in dict.fromkeys(self.sizes)]

    def _columns(self, cuts: Sequence[Cut], size: float = 1.0) -> tuple[Numbers, ...]:
        """The fields of :class:`Costs` for many cuts: a row for each stage or boundary, a column
        for each cut; for a microbatch of a size relative to the mean.
        """
        bounds = self._bounds(cuts)
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

        # Seconds of recomputation: in actions of its own, or in the middle of the backward.
        again, inside = np.zeros((2, self.num_stages, len(cuts)))
        if any(cut.recompute for cut in cuts):
            chosen = np.zeros((len(cuts), self.num_layers))
            for number, cut in enumerate(cuts):
                chosen[number, list(cut.recompute)] = 1.0
                for layer, part in cut.spared:
                    chosen[number, layer] -= part
            layers = np.arange(self.num_layers)
            owners = (ends[:-1, :, None] <= layers).sum(axis=0)
            seconds = size * chosen * self.forward[owners, layers]
            at_bounds = np.take_along_axis(running_sums(seconds), bounds.T, axis=1)
            waits = np.array([[s in self.recomputing] for s in range(self.num_stages)])
            total = np.diff(at_bounds, axis=1).T
            again, inside = np.where(waits, total, 0.0), np.where(waits, 0.0, total)
        return (
            sums(self._forward_ends, self.forward_extra, forward_once),
            sums(self._backward_ends, self.backward_extra, backward_once) + inside,
            sent(self.payload_seconds),
            sent(self.gradient_seconds),
            again,
        )

    @cached_property
    def range_seconds(self) -> tuple[Numbers, Numbers]:
        """(S, L + 1, L + 1) each: a forward and a backward of stage s with the layers from b to e,
        at ``[s, b, e]``; undefined if e is less than b.
        """
        tables = []
        for layers, extra in (
            (self.forward, self.forward_extra),
            (self.backward, self.backward_extra),
        ):
            seconds = sums_of_ranges(layers) + extra[:, None, None]
            for stage in seconds[:-1]:
                # Without layers; see _columns.
                np.fill_diagonal(stage, 0.0)
            tables.append(seconds)
        return tables[0], tables[1]

    @cached_property
    def _forward_ends(self) -> LongNumbers:
        return running_sums(self.forward)

    @cached_property
    def _backward_ends(self) -> LongNumbers:
        return running_sums(self.backward)

    @cached_property
    def kept_bytes(self) -> Numbers:
        """(S, L): held for layer l by stage s, if it is not recomputed."""
        held: Numbers = self.fixed_bytes + self.sizes_in_flight[:, None] * self.saved_bytes
        return held

    @cached_property
    def freed_bytes(self) -> Numbers:
        """(S, L): by how much recomputing layer l lowers the peak of stage s; negative if it raises
        it.

        A recomputed layer holds its inputs for every microbatch in flight, and its saved tensors
        for the one whose backward is next.
        """
        in_flight, largest = self.sizes_in_flight[:, None], self.sizes[0]
        freed = (in_flight - largest) * self.saved_bytes - in_flight * self.input_bytes
        recomputes = np.array([[s in self.recomputing] for s in range(self.num_stages)])
        possible: Numbers = (freed + largest * self.outside_bytes) * recomputes
        return possible

    def memory_bytes(self, cut: Cut) -> tuple[float, ...]:
        """The peak memory of each stage: that of its layers, the activations in flight, messages,
        the batch, and what runs.

        This is what :class:`~lightning_pipeshift.plan.cost.memory_model.Footprints` finds in the
        timeline, if no tensor is swapped, all optimizer state is on the device, and every stage
        that recomputes does so in actions of its own.
        """
        held = self.kept_bytes.copy()
        again = sorted(cut.recompute)
        held[:, again] -= self.freed_bytes[:, again]
        return tuple(
            float(self.besides_bytes[s, begin, end] + held[s, begin:end].sum())
            for s, (begin, end) in enumerate(pairwise(cut.bounds))
        )

    @cached_property
    def message_bytes(self) -> Numbers:
        """(S, L + 1, L + 1): held for messages between stages by stage s with the layers from b to
        e, at ``[s, b, e]``: memory that is reserved, and for each microbatch in flight the payload
        that was sent, until the stage's backward begins.
        """
        in_flight = self.sizes_in_flight[:, None, None]
        received, sent = self.payload_bytes[:, None], self.payload_bytes
        held: Numbers = self.sizes[0] * passing_bytes(received, sent) + in_flight * sent
        return held

    @cached_property
    def batches_bytes(self) -> Numbers:
        """(S,): the parts of batches on each stage's device."""
        held = batches_held(self.schedule, self.num_stages, self.microbatches)
        return self.batch_bytes * np.array(held, dtype=np.float64)

    @cached_property
    def most_momentary_bytes(self) -> Numbers:
        """(L + 1, L + 1): the most that one of the layers from b to e takes for a moment, at ``[b,
        e]``.
        """
        most = np.zeros((self.num_layers + 1, self.num_layers + 1))
        each = np.triu(np.tile(self.momentary_bytes, (self.num_layers, 1)))
        np.maximum.accumulate(each, axis=1, out=most[:-1, 1:])
        return most

    @cached_property
    def besides_bytes(self) -> Numbers:
        """(S, L + 1, L + 1): held by stage s in addition to what its layers from b to e hold, at
        ``[s, b, e]``: for messages, its batches, shared weights, and the layer that runs.
        """
        held: Numbers = self.batches_bytes[:, None, None] + self.most_momentary_bytes
        return self.message_bytes + held + self.shared_bytes

    def fits(self, cut: Cut) -> bool:
        """Whether every stage has enough memory for it."""
        held = self.memory_bytes(cut)
        return all(need <= usable for need, usable in zip(held, self.usable_bytes, strict=True))

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

    def estimate(self, cut: Cut) -> float:
        """The time of a step in closed form: one microbatch through all stages and back, plus the
        slowest stage or link once for each other microbatch. Of an asynchronous pipeline the time
        of a minibatch, exactly.

        The exact solvers minimise this; the simulator then chooses among their best solutions. A
        recomputation counts in the slowest stage, and not in the first microbatch: there it fills
        idle time.
        """
        if self.objective.is_pace:
            return float(steady_pace([field[:, 0] for field in self._columns([cut])]))
        costs = self.costs(cut)
        slots = [f + b for f, b in zip(costs.forward_seconds, costs.backward_seconds, strict=True)]
        again = costs.recompute_seconds or (0.0,) * self.num_stages
        links = costs.payload_seconds + costs.gradient_seconds
        pace = max(*(slot + r for slot, r in zip(slots, again, strict=True)), *links, 0.0)
        return self.objective.seconds(sum(slots) + sum(links), pace)

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
        seconds: list[float] = []
        for begin in range(0, len(cuts), AT_ONCE):
            some = cuts[begin : begin + AT_ONCE]
            by_size = [self._columns(some, size) for size in dict.fromkeys(self.sizes)]
            columns = [np.concatenate(each) for each in zip(*by_size, strict=True)]
            seconds += self.clock_for(bool(columns[-1].any())).step_seconds(columns).tolist()
        return seconds

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

    def with_saved(self, part: float) -> Workload:
        """The same layers, as if they saved only a part of their tensors."""
        return replace(
            self, saved_bytes=part * self.saved_bytes, outside_bytes=part * self.outside_bytes
        )

    def smaller(self, factor: float) -> Workload:
        """The same layers, with microbatches of ``1 / factor`` of the size; only their memory."""
        names = ("saved_bytes", "input_bytes", "outside_bytes", "payload_bytes", "batch_bytes")
        sizes = {name: getattr(self, name) / factor for name in names}
        momentary = momentary_bytes(self.momentary_bytes, self.weight_bytes, 1 / factor)
        return replace(self, momentary_bytes=momentary, **sizes)

    def with_microbatches(self, microbatches: int, schedule: str | None = None) -> Workload:
        """The same layers in another schedule."""
        sizes = self.sizes if microbatches == self.microbatches else (1.0,)
        schedule = schedule or self.schedule
        return replace(self, microbatches=microbatches, sizes=sizes, schedule=schedule)


def relative_sizes(samples: float, microbatches: int) -> tuple[float, ...]:
    """The sizes of a batch's microbatches relative to their mean: the first ones have a sample
    more if the number does not divide the batch. One entry if all are equal.

    Args:
        samples: of the batch.
        microbatches: their number.
    """
    size, rest = divmod(round(samples), microbatches)
    if not rest or not size or abs(samples - round(samples)) > 1e-6:
        return (1.0,)
    counts = [size + 1] * rest + [size] * (microbatches - rest)
    return tuple(count * microbatches / round(samples) for count in counts)


def window_bytes(sizes: Sequence[float]) -> float:
    """The device's memory for the weights of a stage's layers that wait in host memory: those of
    the layer that runs, and of the one that is prefetched meanwhile.

    Args:
        sizes: of the weights of these layers, in call order.
    """
    return float(max(map(sum, pairwise(sizes)), default=sum(sizes)))


def passing_bytes(received: Any, sent: Any) -> Any:
    """The memory that a stage reserves for messages between stages: a payload and a gradient whose
    receives are posted during the compute on earlier ones, the gradient with which a backward
    began, which autograd holds until it ends, and gradients that it sends.

    Args:
        received: the payload that it receives, per microbatch; its gradient is at most as large.
        sent: the payload that it sends.
    """
    return (1 + SENDS_UNDER_WAY) * received + 2 * sent


def batches_held(schedule: str, num_stages: int, microbatches: int) -> tuple[int, ...]:
    """How many microbatches' parts of batches are on each stage's device: those of a step, or those
    of the minibatches in flight.
    """
    if Objective.of(schedule, microbatches).is_pace:
        return tuple(range(num_stages, 0, -1))
    return (microbatches,) * num_stages


def momentary_bytes(measured: Numbers, gradients: Numbers, share: float) -> Numbers:
    """(L,): what layers take for a moment with microbatches of another size, at most: the gradient
    of a parameter, which may be a part of it, is as large with any.

    Args:
        measured: (L,) with microbatches of the measured size.
        gradients: (L,) of all parameters of a layer.
        share: the size of a microbatch, relative to the measured size.
    """
    return np.minimum(max(1.0, share) * measured, share * measured + gradients)


def running_sums(table: Numbers) -> LongNumbers:
    """Cumulative sums before each boundary: (..., L) as (..., L + 1).

    In long doubles, so that differences of two of them are nearly exact: equal layers make equal
    stages.
    """
    sums = np.zeros((*table.shape[:-1], table.shape[-1] + 1), dtype=np.longdouble)
    np.cumsum(table, axis=-1, dtype=np.longdouble, out=sums[..., 1:])
    return sums


def sums_of_ranges(table: Numbers) -> Numbers:
    """(..., L) as (..., L + 1, L + 1): the sum from layer b to layer e, at ``[..., b, e]``.

    Negative, or undefined, if e is less than b."""
    sums = running_sums(table)
    ranges: Numbers = np.asarray(sums[..., None, :] - sums[..., :, None], float)
    return ranges


def crossing_bytes(profile: Profile, share: float) -> Numbers:
    """(2, L + 1): the bytes of a payload and of its gradient that cross each boundary. Boundary b
    is before layer b, so nothing crosses the first one.

    Args:
        profile: of the model.
        share: the size of a microbatch, relative to the measured size.
    """
    sizes = np.zeros((2, len(profile.layers) + 1))
    sizes[0, 1:] = [share * layer.payload_bytes for layer in profile.layers]
    sizes[1, 1:] = [share * layer.payload_gradient_bytes for layer in profile.layers]
    return sizes


def crossing_seconds(profile: Profile, link: Link, share: float) -> Numbers:
    """(2, L + 1): the seconds of a payload and of its gradient on a link, at each boundary; see
    :func:`crossing_bytes`.
    """
    sizes = crossing_bytes(profile, share)
    seconds: Numbers = np.where(sizes, link.latency_seconds + sizes / link.bandwidth, 0.0)
    return seconds


def workload_of(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[int],
    schedule: str,
    microbatches: int,
    samples: float | None = None,
    allowed: frozenset[int] | None = None,
) -> Workload:
    """The workload of a virtual machine.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: the virtual machine's, in stage order.
        schedule: by name.
        microbatches: of a step.
        samples: of a microbatch, on average; those of the profile's batch if ``None``. Times and
            bytes of activations are proportional to it; the cost of an action outside its layers is
            constant.
        allowed: the boundaries to choose from, of those that may be cut; ``None``: all of them.
    """
    possible = profile.possible_cuts
    if possible is not None:
        allowed = possible if allowed is None else allowed & possible
    times = [profile.times_on(cluster.devices[rank]) for rank in ranks]
    if samples is None:
        samples = profile.batch_samples / microbatches or profile.samples
    share = samples / profile.samples
    sizes = relative_sizes(samples * microbatches, microbatches)
    layers = profile.layers
    last = len(ranks) - 1

    def extra(name: str) -> Numbers:
        return np.array(
            [
                getattr(t, f"action_{name}") + share * (s == last) * getattr(t, f"tail_{name}")
                for s, t in enumerate(times)
            ]
        )

    payload, _ = crossing_bytes(profile, share)
    crossing = np.zeros((2, last, len(layers) + 1))
    once = np.zeros((3, len(ranks)))
    once[:2] = np.transpose([(t.action_forward, t.action_backward) for t in times])
    for stage, pair in enumerate(pairwise(ranks)):
        crossing[:, stage] = crossing_seconds(profile, cluster.link(*pair), share)
        once[2, stage] = cluster.link(*pair).latency_seconds

    updates = updates_per_backward(schedule, len(ranks), profile.num_accumulated)
    update = updates * profile.optimizer_seconds_per_byte
    gradients = np.array([layer.gradient_bytes for layer in layers], dtype=np.float64)
    speeds = np.array([cluster.devices[rank].speed for rank in ranks])
    sent = np.zeros((2, len(layers)))
    for each in profile.shared:
        for place, layer in enumerate(each.layers):
            sent[min(place, 1), layer] += each.sent_bytes

    def of_layers(name: str, factor: float = 1.0) -> Numbers:
        return np.array([factor * getattr(layer, name) for layer in layers], dtype=np.float64)

    return Workload(
        forward=share * np.array([t.forward for t in times]),
        backward=share * np.array([t.backward for t in times])
        + update * gradients / speeds[:, None],
        forward_extra=extra("forward"),
        backward_extra=extra("backward"),
        payload_seconds=crossing[0],
        gradient_seconds=crossing[1],
        static_bytes=of_layers("static_bytes") + (profile.num_gradients - 1) * gradients,
        optimizer_bytes=of_layers("optimizer_bytes"),
        waiting_bytes=of_layers("waiting_bytes"),
        # Gradients are as large as the weights that they are for.
        weight_bytes=gradients,
        sent_bytes=sent,
        saved_bytes=of_layers("saved_bytes", share),
        input_bytes=of_layers("input_bytes", share),
        outside_bytes=of_layers("outside_bytes", share),
        momentary_bytes=momentary_bytes(of_layers("working_bytes"), gradients, sizes[0] * share),
        payload_bytes=np.array([*payload[:-1], 0.0]),
        shared_bytes=profile.shared_bytes,
        usable_bytes=np.array([cluster.devices[rank].usable_bytes for rank in ranks]),
        schedule=schedule,
        microbatches=microbatches,
        sizes=sizes,
        once_seconds=once,
        num_accumulated=profile.num_accumulated,
        batch_bytes=share * profile.batch_bytes,
        allowed=allowed,
    )
