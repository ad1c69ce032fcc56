"""The model in numbers: the measured time and memory of each layer.

They are measured in the first steps of training itself (NUDT: of l samples, the first a are the
profile and the other l - a train under the plan; no sample is wasted). All figures are per
microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one layer costs.

    Args:
        name: in the model.
        parameter_bytes: its parameters.
        gradient_bytes: those of its gradients, which travel between virtual machines: what is
            trained of the parameters.
        optimizer_bytes: what the optimizer keeps for it.
        payload_bytes: what crosses the boundary behind it, forward.
        payload_gradient_bytes: what crosses it backward.
        saved_bytes: what its forward keeps for its backward, and the code around it, parameters and
            the batch left out.
        input_bytes: what is kept instead where it is recomputed.
        tensors: what is in ``saved_bytes``, one by one; empty where that is not known.
        joins_next: whether the next layer has to be on the same stage: this layer, or one before
            it, is called again with what a layer behind it has computed.
    """

    name: str
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    payload_bytes: int = 0
    payload_gradient_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    tensors: tuple[SavedTensor, ...] = ()
    joins_next: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError("a layer with an empty name; use its name in the model")
        for name in self.__slots__[1:-2]:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(
                    f"layer {self.name!r}: field {name!r} is {value}; "
                    "it must be finite and at least 0"
                )
        total = sum(tensor.num_bytes for tensor in self.tensors)
        if self.tensors and total != self.saved_bytes:
            raise PlanError(
                f"layer {self.name!r}: its {len(self.tensors)} tensors have {total} bytes together,"
                f" and saved_bytes is {self.saved_bytes}; both say the same, or tensors is empty"
            )

    @property
    def static_bytes(self) -> int:
        """What its owner holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class KindProfile:
    """What the layers take on one kind of device, at speed 1, in seconds.

    Args:
        forward: of each layer, in call order.
        backward: of each layer.
        action_forward: what a stage does in a forward besides its layers.
        action_backward: the same in a backward.
        tail_forward: what the code after the last layer takes (the loss, what is logged).
        tail_backward: its backward.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    action_forward: float = 0.0
    action_backward: float = 0.0
    tail_forward: float = 0.0
    tail_backward: float = 0.0

    def __post_init__(self) -> None:
        if len(self.forward) != len(self.backward):
            raise PlanError(
                f"a profile of {len(self.forward)} forwards and {len(self.backward)} backwards;"
                " every layer has one of each"
            )
        for name in self.__slots__:
            value = getattr(self, name)
            for seconds in value if isinstance(value, tuple) else (value,):
                if not (math.isfinite(seconds) and seconds >= 0):
                    raise PlanError(
                        f"a profile with {seconds} among {name}; seconds are finite and at least 0"
                    )


@dataclass(frozen=True)
class Profile:
    """What was measured of a model.

    Args:
        layers: in call order.
        kinds: for each kind of device on which the layers were measured.
        samples: how many samples a microbatch had.
        microbatches: how many microbatches a step had.
        step_seconds: what a step takes besides its actions (the loop, the data, the logs).
        optimizer_seconds_per_byte: what the optimizer takes for each byte of a stage's gradients.
    """

    layers: tuple[LayerProfile, ...]
    kinds: dict[str, KindProfile] = field(default_factory=dict)
    samples: float = 1.0
    microbatches: int = 1
    step_seconds: float = 0.0
    optimizer_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a profile of 0 layers; it needs at least 1")
        for kind, times in self.kinds.items():
            if len(times.forward) != len(self.layers):
                raise PlanError(
                    f"a profile of {len(self.layers)} layers has {len(times.forward)} for the kind"
                    f" {kind!r}; it needs one for each layer"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def payload_bytes(self) -> list[int]:
        """What crosses each boundary, that in front of the first layer (nothing) among them."""
        return [0, *(layer.payload_bytes for layer in self.layers)]

    @property
    def possible_cuts(self) -> frozenset[int] | None:
        """The boundaries that may be cut; ``None``: all."""
        inner = range(1, self.num_layers)
        possible = frozenset(b for b in inner if not self.layers[b - 1].joins_next)
        return None if len(possible) == len(inner) else possible

    def times_on(self, device: Device) -> KindProfile:
        """What the layers take on a device, its speed counted in.

        Raises PlanError where its kind was never measured."""
        times = self.kinds.get(device.kind)
        if times is None:
            known = ", ".join(map(repr, self.kinds)) or "none"
            raise PlanError(
                f"nothing is known of the kind {device.kind!r} (host {device.host!r}): the profile"
                f" has {known}. Measure it, or give the device a measured kind and a `speed`"
                " relative to that"
            )
        return scaled(times, 1 / device.speed)


def scaled(times: KindProfile, factor: float) -> KindProfile:
    """The times of a device that takes ``factor`` times as long."""
    if factor == 1:
        return times

    def all_of(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * factor for value in values)

    return KindProfile(
        all_of(times.forward),
        all_of(times.backward),
        times.action_forward * factor,
        times.action_backward * factor,
        times.tail_forward * factor,
        times.tail_backward * factor,
    )
