"""The model in numbers: the measured time and memory of each layer.

They are measured in the first steps of training itself (NUDT: of l samples, the first a are the
profile and the other l - a train under the plan; no sample is wasted). All numbers are per
microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.plan.schedule.schedules import MOST_MICROBATCHES


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The costs of one layer.

    Args:
        name: in the model.
        parameter_bytes: its parameters.
        gradient_bytes: the gradients that are sent between virtual machines: those of its trained
            parameters.
        optimizer_bytes: the optimizer's state for it.
        payload_bytes: the values that cross the boundary after it, forward.
        payload_gradient_bytes: the gradients that cross it backward.
        saved_bytes: the tensors that its forward, and the code around it, saves for the backward,
            without parameters and the batch.
        input_bytes: the inputs that are saved instead if it is recomputed.
        tensors: the tensors in ``saved_bytes``, one by one; empty if they are not known.
        joins_next: whether the next layer has to be on the same stage: this layer, or one before
            it, is called again with results of a layer after it.
        waiting_bytes: the part of ``parameter_bytes`` that may be in host memory while it waits.
        working_bytes: what it takes for a moment while it runs, forward or backward, beyond what it
            saves: temporary results, its input and output, and gradients on their way.
        buffer_bytes: its buffers (running statistics, masks).
        update_bytes: the optimizer's temporary results, while it updates these parameters.
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
    waiting_bytes: int = 0
    working_bytes: int = 0
    buffer_bytes: int = 0
    update_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError("a layer with an empty name; use its name in the model")
        for name in self.__slots__:
            if name in ("name", "tensors", "joins_next"):
                continue
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
    def outside_bytes(self) -> int:
        """The part of ``saved_bytes`` that recomputing the layer does not restore; it is among
        ``input_bytes``, too.
        """
        return sum(tensor.num_bytes for tensor in self.tensors if tensor.is_outside)

    @property
    def static_bytes(self) -> int:
        """The bytes that its owner holds permanently."""
        return self.weights_bytes() + self.gradient_bytes + self.optimizer_bytes

    def weights_bytes(self, wait: bool = False) -> int:
        """Its parameters and buffers.

        Args:
            wait: whether those that may wait in host memory are there.
        """
        return self.parameter_bytes + self.buffer_bytes - (self.waiting_bytes if wait else 0)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Parameters and buffers that do not belong to exactly one layer.

    Args:
        layers: those whose modules have them, in call order.
        sent_bytes: those of them whose gradients are sent, where stages share them.
        num_bytes: their values.
        is_trained: whether they have gradients.
        everywhere: whether every stage holds them, as code between layers uses them.
    """

    layers: tuple[int, ...]
    sent_bytes: int = 0
    num_bytes: int = 0
    is_trained: bool = True
    everywhere: bool = False


def shared_bytes(
    layers: Sequence[LayerProfile],
    shared: Iterable[SharedWeights],
    own: Collection[int],
    on_host: Collection[int] = (),
) -> float:
    """The bytes that a stage holds permanently for shared weights in addition to what all of its
    layers hold, each counted by itself; negative if several of them have the same weights.

    A stage has one copy of their values and of the optimizer's state, but a gradient for each
    layer, and one for the code between layers. The state of each is assumed to be in proportion to
    the gradients of its layers.

    Args:
        layers: all of the model.
        shared: the shared weights.
        own: the layers of the stage.
        on_host: the layers whose optimizer state is in host memory.
    """
    moved = set(on_host).intersection(own)
    return float(
        _shared_bytes(
            layers,
            shared,
            lambda users: len(set(own).intersection(users)),
            lambda users: len(moved.intersection(users)),
        )
    )


def _shared_bytes(
    layers: Sequence[LayerProfile],
    shared: Iterable[SharedWeights],
    num_of: Callable[[tuple[int, ...]], Any],
    num_on_host: Callable[[tuple[int, ...]], int] = lambda _: 0,
) -> Any:
    """For one stage or many: ``num_of`` returns how many of some layers a stage has, or an array
    for many stages.
    """
    found: Any = 0.0
    for each in shared:
        users = [layers[n] for n in each.layers] or layers
        trained = each.num_bytes if each.is_trained else 0
        state = sum(layer.optimizer_bytes for layer in users) * (
            trained / max(1, sum(layer.gradient_bytes for layer in users))
        )
        num, moved = num_of(each.layers), num_on_host(each.layers)
        copies = np.minimum(num + each.everywhere, 1)
        found = found + (copies - num) * each.num_bytes + each.everywhere * trained
        # The layers that have it on the host have it all there.
        found = found + (copies * (moved == 0) - (num - moved)) * state
    return found


@dataclass(frozen=True, slots=True)
class KindProfile:
    """The seconds of the layers on one kind of device, at speed 1.

    Args:
        forward: of each layer, in call order.
        backward: of each layer.
        action_forward: of a stage's forward in addition to its layers.
        action_backward: of a stage's backward in addition to its layers.
        tail_forward: of the code after the last layer (the loss, the logs).
        tail_backward: of its backward.
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
                        f"a profile contains {seconds} in {name}; seconds are finite and at least 0"
                    )


@dataclass(frozen=True)
class Profile:
    """The measurements of a model.

    Args:
        layers: in call order.
        kinds: for each kind of device on which the layers were measured.
        samples: of the microbatch to which seconds and bytes belong: the largest of a step.
        microbatches: how many microbatches a step had.
        batch_samples: of all of them; 0 if all had ``samples``.
        step_seconds: of a step outside its actions (the loop, the data, the logs).
        optimizer_seconds_per_byte: of the optimizer, for each byte of a stage's gradients.
        num_accumulated: how many batches make an update, at least.
        num_gradients: how many copies of its gradients a stage holds: 2 if they are added up over
            batches, as a batch's own are computed apart.
        shared: the weights that several layers use, or code between layers.
        overlaps_updates: whether each layer is updated when its own gradient is summed over virtual
            machines, while the next step begins.
        state_stays: why the optimizer's state cannot be in host memory between two steps, in words;
            empty if it can.
        batch_bytes: a microbatch's part of the batch, which is on each stage's device.
        updates_at_once: whether the optimizer's temporary results for all layers live at once.
    """

    layers: tuple[LayerProfile, ...]
    kinds: dict[str, KindProfile] = field(default_factory=dict)
    samples: Annotated[float, Field(gt=0)] = 1.0
    microbatches: Annotated[int, Field(gt=0, le=MOST_MICROBATCHES)] = 1
    step_seconds: Annotated[float, Field(ge=0)] = 0.0
    optimizer_seconds_per_byte: Annotated[float, Field(ge=0)] = 0.0
    num_accumulated: Annotated[int, Field(gt=0)] = 1
    num_gradients: Annotated[int, Field(gt=0)] = 1
    shared: tuple[SharedWeights, ...] = ()
    overlaps_updates: bool = False
    state_stays: str = ""
    batch_bytes: Annotated[int, Field(ge=0)] = 0
    updates_at_once: bool = False
    batch_samples: Annotated[float, Field(ge=0)] = 0.0

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
    def num_samples(self) -> float:
        """The samples of a virtual machine's batch."""
        return self.batch_samples or self.samples * self.microbatches

    @property
    def payload_bytes(self) -> list[int]:
        """The bytes that cross each boundary, including the one before the first layer (0)."""
        return [0, *(layer.payload_bytes for layer in self.layers)]

    @cached_property
    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """The numbers of all layers, by the name of their field or property."""
        names = [name for name in LayerProfile.__slots__ if name not in ("name", "tensors")]
        return {
            name: np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64)
            for name in (*names, "static_bytes", "outside_bytes")
        }

    @cached_property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        """(2, L) for each kind: the forward and the backward of each layer, at speed 1."""
        return {kind: np.array([t.forward, t.backward]) for kind, t in self.kinds.items()}

    @cached_property
    def possible_cuts(self) -> frozenset[int] | None:
        """The boundaries that may be cut; ``None``: all."""
        inner = range(1, self.num_layers)
        possible = frozenset(b for b in inner if not self.layers[b - 1].joins_next)
        return None if len(possible) == len(inner) else possible

    @property
    def static_bytes(self) -> float:
        """The bytes that a virtual machine holds permanently, at least."""
        held = sum(layer.static_bytes for layer in self.layers)
        return held + float(self.shared_bytes[0, -1])

    @cached_property
    def shared_bytes(self) -> NDArray[np.float64]:
        """(L + 1, L + 1): as :func:`shared_bytes` for the layers from b to e, at ``[b, e]``;
        undefined if e is less than b.
        """
        ends = np.arange(self.num_layers + 1)

        def num_of(users: Sequence[int]) -> Any:
            before = np.searchsorted(users, ends)
            return before[None, :] - before[:, None]

        found: NDArray[np.float64] = np.zeros((len(ends), len(ends)))
        found += _shared_bytes(self.layers, self.shared, num_of)
        return found

    def update_bytes(self, layers: Sequence[int], by_layer: bool = False) -> int:
        """The memory that an update of some layers takes for a moment.

        Args:
            layers: the layers.
            by_layer: whether they are updated one after the other.
        """
        sizes = [0, *(self.layers[layer].update_bytes for layer in layers)]
        return sum(sizes) if self.updates_at_once and not by_layer else max(sizes)

    def kind_of(self, device: Device) -> KindProfile:
        """The seconds of the layers on devices of a kind, at speed 1.

        Raises PlanError if the kind was never measured."""
        times = self.kinds.get(device.kind)
        if times is None:
            known = ", ".join(map(repr, self.kinds)) or "none"
            raise PlanError(
                f"the profile has no measurements of the kind {device.kind!r} (host "
                f"{device.host!r}): it has {known}. Measure it, or give the device a "
                "measured kind and a `speed` relative to that"
            )
        return times

    def times_on(self, device: Device) -> KindProfile:
        """The same at the speed of the device."""
        return scaled(self.kind_of(device), 1 / device.speed)


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
