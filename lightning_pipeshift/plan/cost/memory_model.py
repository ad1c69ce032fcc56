"""The time and memory of a virtual machine's plan, with each saved tensor separately."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.layer_memory import passing_bytes, window_bytes
from lightning_pipeshift.plan.cost.memory_timeline import (
    HOST,
    Effects,
    LayerLoad,
    Links,
    Moments,
    Moved,
    Part,
    StageTrace,
    effects,
    moments_of,
    traces,
)
from lightning_pipeshift.plan.cost.simulator import Timeline
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import LayerProfile, Profile, shared_bytes
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT, SavedTensor, Swap

LENDING_SECONDS: Final = 3e-4
"""The time of a swap to another stage in addition to the link's own: threads wake up at both ends,
and announce the tensor."""

_MOST_TIMELINES, _MOST_EFFECTS = 256, 1024
"""The numbers of cached timelines, up to 1 MB each, and effects of stages, some 100 KB each."""


@dataclass(frozen=True)
class Footprint:
    """The time and memory of a plan. Tuples are per stage.

    Args:
        timeline: of the step.
        traces: of the saved tensors.
        static_bytes: memory held permanently, and memory reserved for messages, batches, and what
            runs.
        update_bytes: memory that the optimizer's step needs in addition, while no saved tensor is
            held and no layer runs: for its temporary results, and for optimizer state and weights
            from the host.
        update_seconds: by which moving them then delays a step, on average.
        batches_bytes: the part of ``static_bytes`` for batches.
        momentary_bytes: the part of it for what a layer takes for a moment.
    """

    timeline: Timeline
    traces: tuple[StageTrace, ...]
    static_bytes: tuple[float, ...]
    update_bytes: tuple[float, ...]
    update_seconds: float = 0.0
    batches_bytes: tuple[float, ...] = ()
    momentary_bytes: tuple[float, ...] = ()

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The peak memory of each stage."""
        return tuple(
            static + max(trace.peak_bytes, update)
            for static, trace, update in zip(
                self.static_bytes, self.traces, self.update_bytes, strict=True
            )
        )

    @property
    def seconds(self) -> float:
        """The seconds of the step, or of a minibatch, with all that moves."""
        return self.timeline.step_seconds + self.late_seconds + self.update_seconds

    @property
    def late_seconds(self) -> float:
        """The seconds by which swaps delay the step, at most.

        Of an asynchronous pipeline, by which they make a minibatch longer. A stage with n
        minibatches in flight begins with minibatch k + n after its backward of k, which waits for
        the swaps of k. So one delay lasts for n minibatches.
        """
        is_step = self.timeline.is_one_step
        return max(
            max(0.0, trace.late_seconds) / (1 if is_step else num_in_flight)
            for trace, num_in_flight in zip(self.traces, self.timeline.peak_in_flight, strict=True)
        )


def tensors_of(layer: LayerProfile) -> tuple[SavedTensor, ...]:
    """Returns the tensors that a layer saves; a single one if only the total size is known."""
    if layer.tensors or not layer.saved_bytes:
        return layer.tensors
    return (SavedTensor(0, layer.saved_bytes),)


def links_of(cluster: Cluster, ranks: Sequence[int]) -> Links:
    """The links for swaps, from stage to stage and to each one's host.

    On one host, blocks are copied directly from device to device. The bandwidth is not measured: it
    is at least that to the host's memory, through which copies go between devices without a direct
    link.
    """

    def rate(rank: int, peer: int) -> float:
        one, other = cluster.devices[rank], cluster.devices[peer]
        direct = min(one.host_bandwidth, other.host_bandwidth) if one.host == other.host else 0.0
        return max(direct, cluster.link(rank, peer).bandwidth)

    between = {
        (stage, other): (
            LENDING_SECONDS + cluster.link(rank, peer).latency_seconds,
            rate(rank, peer),
        )
        for stage, rank in enumerate(ranks)
        for other, peer in enumerate(ranks)
        if other != stage
    }
    devices = [cluster.devices[rank] for rank in ranks]
    copying = tuple((device.copy_seconds, device.copy_seconds_per_byte) for device in devices)
    to_host = tuple(device.host_bandwidth for device in devices)
    return Links(between, to_host, copying if any(map(any, copying)) else ())


def sparing(profile: Profile, cut: Cut, swaps: Sequence[Swap]) -> Cut:
    """The cut, whose recomputed layers do not run what computed the tensors that they do not
    drop.
    """
    parts: dict[int, float] = {}
    for swap in swaps:
        if swap.layer in cut.recompute:
            for tensor in profile.layers[swap.layer].tensors:
                if tensor.number in swap.tensors and tensor.spares:
                    parts[swap.layer] = parts.get(swap.layer, 0.0) + tensor.spares
    spared = frozenset((layer, min(1.0, part)) for layer, part in parts.items())
    return cut if spared == cut.spared else replace(cut, spared=spared)


def parts_of(swap: Swap) -> tuple[Part, ...]:
    """Returns the stages that take each tensor, with their parts."""
    if not swap.stages:
        return ((HOST, 1.0),)
    shares = swap.shares or (1.0,) * len(swap.stages)
    return tuple(
        (stage, share / sum(shares)) for stage, share in zip(swap.stages, shares, strict=True)
    )


class Footprints:
    """The footprints of one virtual machine's plans; common parts are cached.

    Args:
        profile: of the model.
        workload: of the virtual machine.
        links: of the virtual machine.
    """

    def __init__(self, profile: Profile, workload: Workload, links: Links) -> None:
        self._profile = profile
        self._workload = workload
        self._links = links
        self._num_accumulated = profile.num_accumulated
        #: The bytes that each layer saves for a microbatch of the workload, by number.
        self.sizes = tuple(
            _sizes(layer, float(saved))
            for layer, saved in zip(profile.layers, workload.saved_bytes, strict=True)
        )
        self._timelines: dict[Hashable, Timeline] = {}
        self._moments: dict[Hashable, Moments] = {}
        self._effects: dict[Hashable, Effects] = {}
        self._loads: dict[Hashable, LayerLoad] = {}
        self._traces: dict[Hashable, StageTrace] = {}

    def of(self, cut: Cut, swaps: Sequence[Swap] = ()) -> Footprint:
        """The footprint of a cut with its recomputation and swaps."""
        workload, cut = self._workload, sparing(self._profile, cut, swaps)
        by_layer: dict[int, list[Swap]] = {}
        for swap in swaps:
            by_layer.setdefault(swap.layer, []).append(swap)
        # Only copies that take time from the compute change the times of actions.
        copied = [swap for swap in swaps if not swap.stays and not swap.stages]
        timed = cut, tuple(copied) if self._links.copying else ()
        if timed not in self._timelines:
            if len(self._timelines) >= _MOST_TIMELINES:
                self._timelines.clear()
                self._moments.clear()
            self._timelines[timed] = self._with_copies(*timed).timeline(cut)
        timeline = self._timelines[timed]
        spared = dict(cut.spared)
        found = []
        for stage, (begin, end) in enumerate(pairwise(cut.bounds)):
            moved = tuple(s for layer in range(begin, end) for s in by_layer.get(layer, ()))
            key = (stage, timed, moved)
            if key not in self._effects:
                if len(self._effects) >= _MOST_EFFECTS:
                    self._effects.clear()
                    self._traces.clear()
                loads = [
                    self._load(
                        stage,
                        layer,
                        spared.get(layer, 0.0) if layer in cut.recompute else None,
                        tuple(by_layer.get(layer, ())),
                    )
                    for layer in range(begin, end)
                ]
                # A stage without layers holds the payload that it forwards.
                loads = loads or [LayerLoad(begin, 0.0, 0.0)]
                loads[-1] = replace(loads[-1], sent_bytes=round(workload.payload_bytes[end]))
                if (timed, stage) not in self._moments:
                    row, sizes = timeline.computed[stage], workload.sizes
                    self._moments[timed, stage] = moments_of(row, loads, sizes)
                moments = self._moments[timed, stage]
                self._effects[key] = effects(stage, moments, loads, self._links)
            found.append(self._effects[key])
        batches = tuple(workload.memory.batches_bytes.tolist())
        updates = [self._update_bytes(range(*ends)) for ends in pairwise(cut.bounds)]
        # In an asynchronous pipeline minibatches are in flight during an update.
        in_flight = workload.is_asynchronous
        momentary = tuple(
            float(max(workload.memory.most_momentary_bytes[ends], update if in_flight else 0.0))
            for ends, update in zip(pairwise(cut.bounds), updates, strict=True)
        )
        static = [
            float(sum(workload.memory.fixed_bytes[stage, begin:end]))
            + float(workload.shared_bytes[begin, end])
            + workload.sizes[0] * float(passing_bytes(*workload.payload_bytes[[begin, end]]))
            + batches[stage]
            + momentary[stage]
            for stage, (begin, end) in enumerate(pairwise(cut.bounds))
        ]
        whole = Footprint(
            timeline,
            tuple(traces(found, self._traces)),
            tuple(static),
            tuple(max(0.0, u - free) for u, free in zip(updates, momentary, strict=True)),
            batches_bytes=batches,
            momentary_bytes=momentary,
        )
        is_moved = cut.optimizer_on_host or cut.weights_on_host
        return self._with_moved(cut, whole) if is_moved else whole

    def _update_bytes(self, layers: range) -> int:
        return self._profile.update_bytes(layers, self._profile.overlaps_updates)

    def _with_moved(self, cut: Cut, found: Footprint) -> Footprint:
        """The footprint with some layers' optimizer state or weights in host memory."""
        profile, workload, timeline = self._profile, self._workload, found.timeline
        static, traces_, updates, end = list(found.static_bytes), list(found.traces), [], 0.0
        for stage, (begin, last) in enumerate(pairwise(cut.bounds)):
            state, weights = (
                np.where([layer in on_host for layer in range(begin, last)], sizes[begin:last], 0.0)
                for sizes, on_host in (
                    (workload.optimizer_bytes, cut.optimizer_on_host),
                    (workload.waiting_bytes, cut.weights_on_host),
                )
            )
            sizes, window = state + weights, window_bytes([size for size in weights if size])
            static[stage] += window - float(sizes.sum()) - workload.shared_bytes[begin, last]
            static[stage] += shared_bytes(
                profile.layers, profile.shared, range(begin, last), cut.optimizer_on_host
            )
            on_host = traces_[stage].host_bytes + float(sizes.sum())
            traces_[stage] = replace(traces_[stage], host_bytes=on_host)
            # In an update the memory of weights in the forward and backward is free.
            comes = float(sizes.max(initial=0.0)) - window
            taken = profile.update_bytes(range(begin, last), by_layer=True)
            free = found.momentary_bytes[stage]
            updates.append(max(0.0, max(0.0, comes) + taken - free))
            ended = timeline.computed[stage].ends[-1] if timeline.computed[stage] else 0.0
            end = max(end, ended + self._exposed_seconds(stage, sizes))
        late = max(0.0, end - timeline.end_seconds) / self._num_accumulated
        return replace(
            found,
            traces=tuple(traces_),
            static_bytes=tuple(static),
            update_bytes=tuple(updates),
            update_seconds=late,
        )

    def _with_copies(self, cut: Cut, copied: Sequence[Swap]) -> Workload:
        """The workload with the time that layers wait for their weights from the host, and with
        what copies of saved tensors take from the compute. A layer's weights are prefetched from
        the beginning of the one that used its own before.

        Args:
            cut: the owners of the layers.
            copied: the swaps to the host that take time from the compute.
        """
        if not cut.weights_on_host and not copied:
            return self._workload
        forward, backward = self._workload.forward.copy(), self._workload.backward.copy()
        owners = np.repeat(np.arange(len(cut.counts)), cut.counts).tolist()
        for swap in copied:
            sizes = [self.sizes[swap.layer].get(number, 0) for number in swap.tensors]
            where = owners[swap.layer], swap.layer
            taken = self._links.compute_seconds(where[0], sum(map(bool, sizes)), sum(sizes))
            # It leaves in the forward, and comes back for the backward.
            forward[where] += taken
            backward[where] += taken
        for stage, (begin, end) in enumerate(pairwise(cut.bounds)):
            moved = [layer for layer in range(begin, end) if layer in cut.weights_on_host]
            weights = self._workload.waiting_bytes[moved]
            if weights.sum() <= window_bytes(list(weights)):
                continue
            self._add_waits(stage, cut.weights_on_host, forward, range(begin, end))
            self._add_waits(stage, cut.weights_on_host, backward, range(begin, end)[::-1])
        return replace(self._workload, forward=forward, backward=backward)

    def _add_waits(
        self, stage: int, moved: Collection[int], seconds: Numbers, order: Sequence[int]
    ) -> None:
        """Adds the waits of one action to the seconds of its layers.

        Args:
            stage: the stage.
            moved: the layers whose weights come from the host.
            seconds: (S, L) of the layers.
            order: the stage's layers in the action's order.
        """
        computed = {layer: float(seconds[stage, layer]) for layer in order}
        # The first one's are prefetched in the action before, while its last one runs.
        places = [place for place, layer in enumerate(order) if layer in moved]
        for place, earlier in zip(places, [places[-1] - len(order), *places], strict=False):
            layer = order[place]
            hidden = math.fsum(computed[order[other]] for other in range(earlier, place))
            size = float(self._workload.waiting_bytes[layer])
            waits = self._links.seconds(stage, HOST, size) - hidden
            seconds[stage, layer] += max(waits, self._links.compute_seconds(stage, 1, size))

    def _exposed_seconds(self, stage: int, sizes: Numbers) -> float:
        """By how many seconds an optimizer step gets longer, at most, if tensors of these sizes
        come from the host and return: both directions overlap, but for the first and the last
        layer.
        """
        moved = [float(size) for size in sizes if size]
        seconds = [self._links.seconds(stage, HOST, size) for size in moved]
        taken = 2 * self._links.compute_seconds(stage, len(moved), sum(moved))
        return max(math.fsum(seconds) + max(seconds, default=0.0), taken)

    def _load(
        self, stage: int, index: int, spared: float | None, swaps: tuple[Swap, ...]
    ) -> LayerLoad:
        """Returns the memory and the seconds of a layer; cached.

        Args:
            stage: its owner.
            index: the layer.
            spared: the part of its forward that a recomputation does not run again; ``None`` if it
                is not recomputed.
            swaps: of its tensors.
        """
        key = stage, index, spared, swaps
        if key in self._loads:
            return self._loads[key]
        forward = float(self._workload.forward[stage, index])
        backward = float(self._workload.backward[stage, index])
        sizes = self.sizes[index]
        named = {swap: sum(sizes.get(number, 0) for number in swap.tensors) for swap in swaps}
        kept = sum(sizes.values()) - sum(named.values())
        again = inputs = 0.0
        if spared is not None:
            if stage not in self._workload.recomputing:
                backward += forward * (1 - spared)
            numbers = {number for swap in swaps for number in swap.tensors if number >= FRONT}
            moved_outside = sum(sizes.get(number, 0) for number in numbers)
            # They are part of both.
            outside = float(self._workload.outside_bytes[index]) - moved_outside
            inputs = float(self._workload.input_bytes[index]) - moved_outside
            again, kept = kept - outside, 0.0
            if not again:
                inputs, kept = 0.0, outside
        kept += sum(size for swap, size in named.items() if swap.stays)
        self._loads[key] = LayerLoad(
            index,
            forward,
            backward,
            kept_bytes=round(kept),
            again_bytes=round(again),
            input_bytes=round(inputs),
            moved=tuple(
                Moved(round(size), parts_of(swap))
                for swap, size in named.items()
                if size and not swap.stays
            ),
        )
        return self._loads[key]


def _sizes(layer: LayerProfile, saved_bytes: float) -> dict[int, float]:
    # The workload's microbatches may be of another size than the measured ones.
    fraction = saved_bytes / layer.saved_bytes if layer.saved_bytes else 1.0
    return {tensor.number: fraction * tensor.num_bytes for tensor in tensors_of(layer)}
