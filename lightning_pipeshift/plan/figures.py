"""Makes a profile, and the devices' speeds, of what the ranks have measured of the model.

Each rank measures on its own device: before training every layer, for a guess, and in training its
own layers. What a layer would take on a device that never ran it follows from both: the guess
there, times how far the device's own layers are from their guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from lightning_pipeshift.plan.cluster import Cluster
from lightning_pipeshift.plan.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.saved_tensors import SavedTensor

Times = tuple[float, float]
"""Forward and backward, in seconds."""

_ALIKE: Final = 0.03
"""Devices of a kind whose speeds differ by less are counted as equal: it is noise."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank has measured. Layers are by index.

    Args:
        guesses: forward and backward of every layer, tried one by one before training.
        times: those of its own layers in training; empty before.
        earlier: those of the layers that it owned when it last owned any: what is known of a stage
            that was drained.
        extra: what a forward and a backward of its stage take besides layers; ``None`` before
            training.
        outside_seconds: from the end of its stage's part of a step to the begin of the next one.
        saved_bytes: what layers save for a microbatch.
        tensors: the same, one by one.
        input_bytes: what they are called with.
        optimizer_bytes: what the optimizer keeps for its own layers.
        is_last: whether it runs the code after the last layer.
        held_bytes: what of its device's memory the model takes already, before it is shared out.
        budget_bytes: what it may take of its device's memory, if there is a word on that.
        host_bytes: what it may take of its host's memory for swapped tensors.
        host_bandwidth: how fast they get there, in bytes per second, and back.
    """

    guesses: Mapping[int, Times] = field(default_factory=dict)
    times: Mapping[int, Times] = field(default_factory=dict)
    earlier: Mapping[int, Times] = field(default_factory=dict)
    extra: Times | None = None
    outside_seconds: float | None = None
    saved_bytes: Mapping[int, int] = field(default_factory=dict)
    tensors: Mapping[int, tuple[SavedTensor, ...]] = field(default_factory=dict)
    input_bytes: Mapping[int, int] = field(default_factory=dict)
    optimizer_bytes: Mapping[int, int] = field(default_factory=dict)
    is_last: bool = False
    held_bytes: int = 0
    budget_bytes: int = 0
    host_bytes: int = 0
    host_bandwidth: float = 0.0


def profile_of(
    layers: Sequence[LayerProfile],
    cluster: Cluster,
    figures: Sequence[RankFigures],
    samples: float,
    microbatches: int,
) -> tuple[Profile, Cluster]:
    """The profile, and the cluster with each device's speed relative to its kind.

    Args:
        layers: what is known without measuring; bytes that were measured replace those.
        cluster: the machines.
        figures: by rank.
        samples: of a microbatch.
        microbatches: of a step.
    """
    guessed = {
        kind: _guess(layers, [figures[rank] for rank in _ranks_of(cluster, kind)])
        for kind in cluster.kinds
    }
    # How many times its guess a device takes, on what it has measured: in training where it has.
    ratios = [
        _ratio(mine.times or mine.earlier or mine.guesses, guessed[device.kind])
        for mine, device in zip(figures, cluster.devices, strict=True)
    ]
    kinds, speeds = {}, [device.speed for device in cluster.devices]
    for kind in cluster.kinds:
        known = {rank: ratio for rank in _ranks_of(cluster, kind) if (ratio := ratios[rank])}
        usual = median(known.values()) if known else 1.0
        for rank, ratio in known.items():
            speed = usual / ratio
            speeds[rank] = 1.0 if abs(speed - 1) < _ALIKE else speed
        table = [(f * usual, b * usual) for f, b in guessed[kind]]
        for layer in range(len(layers)):
            found = [
                tuple(seconds * speeds[rank] for seconds in times)
                for rank in known
                if (times := figures[rank].times.get(layer)) is not None
            ]
            if found:
                table[layer] = (median(f for f, _ in found), median(b for _, b in found))
        action, tail = _extras(figures, known, speeds)
        kinds[kind] = KindProfile(
            tuple(f for f, _ in table), tuple(b for _, b in table), *action, *tail
        )
    outside = [mine.outside_seconds for mine in figures if mine.outside_seconds is not None]
    profile = Profile(
        layers=tuple(_with_bytes(layer, index, figures) for index, layer in enumerate(layers)),
        kinds=kinds,
        samples=samples,
        microbatches=microbatches,
        # The stage that ends last waits for nobody before it begins anew.
        step_seconds=min(outside) if outside else 0.0,
    )
    devices = tuple(
        replace(
            device,
            speed=speed,
            memory_bytes=mine.budget_bytes or device.memory_bytes,
            # What the model takes now is there for what it will take.
            free_bytes=device.free_bytes + mine.held_bytes
            if device.free_bytes and not mine.budget_bytes
            else 0,
            host_bytes=mine.host_bytes,
            host_bandwidth=mine.host_bandwidth,
        )
        for device, speed, mine in zip(cluster.devices, speeds, figures, strict=True)
    )
    return profile, replace(cluster, devices=devices)


def _ranks_of(cluster: Cluster, kind: str) -> list[int]:
    return [rank for rank, device in enumerate(cluster.devices) if device.kind == kind]


def _guess(layers: Sequence[LayerProfile], figures: Sequence[RankFigures]) -> list[Times]:
    """The middle of the ranks' guesses; for a layer that nobody could try, one in proportion to its
    parameters.
    """
    found: dict[int, Times] = {}
    for layer in range(len(layers)):
        tried = [mine.guesses.get(layer) or mine.times.get(layer) for mine in figures]
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


def _ratio(times: Mapping[int, Times], guess: Sequence[Times]) -> float | None:
    taken = sum(f + b for f, b in times.values())
    expected = sum(sum(guess[layer]) for layer in times)
    return taken / expected if taken and expected else None


def _extras(
    figures: Sequence[RankFigures], ranks: Iterable[int], speeds: Sequence[float]
) -> tuple[Times, Times]:
    """What an action takes besides layers, and what the code after the last layer adds to it."""
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
        optimizer_bytes=most("optimizer_bytes"),
    )
