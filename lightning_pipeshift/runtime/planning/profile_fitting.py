"""Makes a profile, and the devices' speeds, from the ranks' measurements of the model.

Each rank measures on its own device: before training every layer, for an estimate, and in training
its own layers. The time of a layer on a device that has never trained it follows from both: the
estimate on that device, times the ratio of measured to estimated times of the device's own layers;
or, if it has none, that of the other devices'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, cast

from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor

Times = tuple[float, float]
"""Forward and backward, in seconds."""

_ALIKE: Final = 0.03
"""The largest relative difference of the speeds of equal devices of a kind: such a difference is
noise.
"""


@dataclass(frozen=True)
class RankFigures:
    """The measurements of one rank. Layers are by index.

    Args:
        estimates: forward and backward of every layer, tried one by one before training.
        times: those of its own layers in training; empty before.
        error: their relative standard error.
        ran: on a CPU, in which part of the time of the forwards of layers its thread ran: not all,
            if something holds it back, such as a CPU quota, or if the layers wait.
        earlier: those of the layers that it owned before some were taken from it. It counts as no
            faster than by these; empty if it has been measured again since.
        slowdown: the time of a short computation by that, relative to the time before training.
        extra: the time of a forward and a backward of its stage outside of layers; ``None`` before
            training.
        outside_seconds: from the end of its stage's part of a step to the start of the next one.
        saved_bytes: of the tensors that layers save for a microbatch.
        tensors: these tensors, one by one.
        input_bytes: of the layers' inputs.
        working_bytes: what layers take for a moment.
        optimizer_bytes: of the optimizer's state for its own layers.
        is_last: whether it runs the code after the last layer.
        held_bytes: the device memory that the model takes before its layers are distributed.
        budget_bytes: the device memory that it may take, if there is a limit.
        host_bytes: the memory of its host that it may take for swapped tensors.
        host_bandwidth: the bandwidth to the host and back, in bytes per second.
        copy_seconds: see :class:`~lightning_pipeshift.plan.inputs.cluster.Device`.
        copy_seconds_per_byte: likewise.
        waited_seconds: how long its compute has waited in a step for swapped tensors.
    """

    estimates: Mapping[int, Times] = field(default_factory=dict)
    times: Mapping[int, Times] = field(default_factory=dict)
    error: float = 0.0
    ran: float | None = None
    earlier: Mapping[int, Times] = field(default_factory=dict)
    slowdown: float | None = None
    extra: Times | None = None
    outside_seconds: float | None = None
    saved_bytes: Mapping[int, int] = field(default_factory=dict)
    tensors: Mapping[int, tuple[SavedTensor, ...]] = field(default_factory=dict)
    input_bytes: Mapping[int, int] = field(default_factory=dict)
    working_bytes: Mapping[int, int] = field(default_factory=dict)
    optimizer_bytes: Mapping[int, int] = field(default_factory=dict)
    is_last: bool = False
    held_bytes: int = 0
    budget_bytes: int = 0
    host_bytes: int = 0
    host_bandwidth: float = 0.0
    copy_seconds: float = 0.0
    copy_seconds_per_byte: float = 0.0
    waited_seconds: float = 0.0

    @property
    def without_moves(self) -> RankFigures:
        """The same with the times of layers without what the plan in force adds to them (waits for
        what moves, operations that run again): never more than before training.
        """
        least = {
            layer: tuple(map(min, times, self.estimates.get(layer, times)))
            for layer, times in self.times.items()
        }
        return replace(self, times=cast(dict[int, Times], least))


def profile_of(
    model: Profile,
    cluster: Cluster,
    figures: Sequence[RankFigures],
) -> tuple[Profile, Cluster]:
    """The profile, and the cluster with each device's speed relative to its kind.

    Args:
        model: what needs no measurement; measured bytes replace those in it.
        cluster: the machines.
        figures: by rank.
    """
    layers = model.layers
    estimated = {
        kind: _estimated(layers, [figures[rank] for rank in _ranks_of(cluster, kind)])
        for kind in cluster.kinds
    }
    ratios = _ratios(figures, [estimated[device.kind] for device in cluster.devices])
    kinds, speeds = {}, [device.speed for device in cluster.devices]
    for kind in cluster.kinds:
        known = {rank: ratio for rank in _ranks_of(cluster, kind) if (ratio := ratios[rank])}
        usual = median(known.values()) if known else 1.0
        for rank, ratio in known.items():
            speed = usual / ratio
            speeds[rank] = 1.0 if abs(speed - 1) < _ALIKE else speed
        table = [(f * usual, b * usual) for f, b in estimated[kind]]
        # A rank may count as slower than its own layers show: these are no cheaper than others.
        scales = {
            rank: speeds[rank] * ratio / (_ratio(figures[rank].times, estimated[kind]) or ratio)
            for rank, ratio in known.items()
        }
        for layer in range(len(layers)):
            found = [
                tuple(seconds * scale for seconds in times)
                for rank, scale in scales.items()
                if (times := figures[rank].times.get(layer)) is not None
            ]
            if found:
                table[layer] = (median(f for f, _ in found), median(b for _, b in found))
        action, tail = _extras(figures, known, speeds)
        kinds[kind] = KindProfile(
            tuple(f for f, _ in table), tuple(b for _, b in table), *action, *tail
        )
    outside = [mine.outside_seconds for mine in figures if mine.outside_seconds is not None]
    profile = replace(
        model,
        layers=tuple(_with_bytes(layer, index, figures) for index, layer in enumerate(layers)),
        kinds=kinds,
        # The stage that ends last does not wait for other stages before its next step.
        step_seconds=min(outside) if outside else 0.0,
    )
    devices = tuple(
        replace(
            device,
            speed=speed,
            memory_bytes=mine.budget_bytes or device.memory_bytes,
            # The memory that the model takes now will be available to the plan.
            free_bytes=device.free_bytes + mine.held_bytes
            if device.free_bytes and not mine.budget_bytes
            else 0,
            host_bytes=mine.host_bytes,
            host_bandwidth=mine.host_bandwidth,
            copy_seconds=mine.copy_seconds,
            copy_seconds_per_byte=mine.copy_seconds_per_byte,
        )
        for device, speed, mine in zip(cluster.devices, speeds, figures, strict=True)
    )
    return profile, replace(cluster, devices=devices)


def estimates_by_kind(figures: Sequence[RankFigures], kinds: Sequence[int]) -> dict[int, Times]:
    """Estimates of the layers' times by the first measurements in training, where there were none
    before: layers of one kind take equally long, so ranks that have some of a kind can be compared.

    Args:
        figures: by rank.
        kinds: of each layer, a number.

    Returns:
        the times of the layers that were measured, on a rank of usual speed.
    """
    by_kind: dict[int, list[Times]] = {}
    for mine in figures:
        of_rank: dict[int, list[Times]] = {}
        for layer, times in mine.times.items():
            of_rank.setdefault(kinds[layer], []).append(times)
        for kind, found in of_rank.items():
            by_kind.setdefault(kind, []).append(_middle(found))
    shared = {kind: _middle(found) for kind, found in by_kind.items() if len(found) > 1}
    estimates: dict[int, Times] = {}
    for mine in figures:
        common = {n: times for n, times in mine.times.items() if kinds[n] in shared}
        expected = sum(sum(shared[kinds[layer]]) for layer in common)
        slower = sum(f + b for f, b in common.values()) / expected if expected else 1.0
        for layer, (forward, backward) in mine.times.items():
            own = forward / (slower or 1.0), backward / (slower or 1.0)
            estimates[layer] = shared.get(kinds[layer], own)
    return estimates


def _middle(found: Sequence[Times]) -> Times:
    return median(f for f, _ in found), median(b for _, b in found)


def _ranks_of(cluster: Cluster, kind: str) -> list[int]:
    return [rank for rank, device in enumerate(cluster.devices) if device.kind == kind]


def _estimated(layers: Sequence[LayerProfile], figures: Sequence[RankFigures]) -> list[Times]:
    """The median of the ranks' estimates; for a layer that no rank could measure, one in proportion
    to its parameters.
    """
    found: dict[int, Times] = {}
    for layer in range(len(layers)):
        tried = [mine.estimates.get(layer) or mine.times.get(layer) for mine in figures]
        there = [times for times in tried if times is not None]
        if there:
            found[layer] = (median(f for f, _ in there), median(b for _, b in there))
    size = sum(layers[layer].parameter_bytes for layer in found)

    def per_byte(number: int) -> float:
        return sum(times[number] for times in found.values()) / size if size else 0.0

    forward, backward = per_byte(0), per_byte(1)
    return [
        found.get(n, (forward * layer.parameter_bytes, backward * layer.parameter_bytes))
        for n, layer in enumerate(layers)
    ]


def _ratios(
    figures: Sequence[RankFigures], estimated: Sequence[Sequence[Times]]
) -> list[float | None]:
    """The ratio of each rank's times to the estimates of its kind, by measurements in training if
    there are any.
    """
    before_training = [
        _ratio(mine.estimates, estimate) for mine, estimate in zip(figures, estimated, strict=True)
    ]
    trained = [
        max(_ratio(times, estimate) or 0.0 for times in (mine.times, mine.earlier))
        for mine, estimate in zip(figures, estimated, strict=True)
    ]
    # Times of a rank that is known to be slow may have its slowness in them.
    both = [
        there / before
        for mine, there, before in zip(figures, trained, before_training, strict=True)
        if there and before and not mine.slowdown
    ]
    usual = median(both or [1.0])

    def ratio(mine: RankFigures, there: float, before: float | None) -> float | None:
        if before and (mine.slowdown or not there):
            there = max(there, before * usual * (mine.slowdown or 1.0))
        return there or None

    return [ratio(*each) for each in zip(figures, trained, before_training, strict=True)]


def _ratio(times: Mapping[int, Times], estimate: Sequence[Times]) -> float | None:
    taken = sum(f + b for f, b in times.values())
    expected = sum(sum(estimate[layer]) for layer in times)
    return taken / expected if taken and expected else None


def _extras(
    figures: Sequence[RankFigures], ranks: Iterable[int], speeds: Sequence[float]
) -> tuple[Times, Times]:
    """The time of an action outside of layers, and the extra time of code after the last layer."""
    last: list[Times] = []
    others: list[Times] = []
    for rank in ranks:
        extra = figures[rank].extra
        if extra is not None:
            group = last if figures[rank].is_last else others
            group.append((speeds[rank] * extra[0], speeds[rank] * extra[1]))
    if not last and not others:
        return (0.0, 0.0), (0.0, 0.0)

    def middle(group: Sequence[Times]) -> Times:
        return median(f for f, _ in group), median(b for _, b in group)

    action = middle(others or last)
    end = middle(last or others)
    return action, (max(0.0, end[0] - action[0]), max(0.0, end[1] - action[1]))


def _with_bytes(layer: LayerProfile, index: int, figures: Sequence[RankFigures]) -> LayerProfile:
    # What has been measured in training replaces what was estimated before.
    figures = [mine for mine in figures if index in mine.times] or figures

    def most(name: str) -> int:
        found = [getattr(mine, name).get(index) for mine in figures]
        there = [size for size in found if size is not None]
        return max(there) if there else int(getattr(layer, name))

    return replace(
        layer,
        saved_bytes=most("saved_bytes"),
        tensors=max(
            (mine.tensors[index] for mine in figures if index in mine.tensors),
            key=lambda tensors: sum(tensor.num_bytes for tensor in tensors),
            default=layer.tensors,
        ),
        input_bytes=most("input_bytes"),
        working_bytes=most("working_bytes"),
        optimizer_bytes=most("optimizer_bytes"),
    )
