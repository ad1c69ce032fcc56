"""Measures the time and memory of each layer, before training, on this stage's device.

This gives a first estimate, for the plan of the first steps. Training itself is measured later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import dispatch_modes_disabled, without_torch_function
from lightning_pipeshift.devices.properties import generators_of
from lightning_pipeshift.devices.streams import synchronize
from lightning_pipeshift.model.measuring.live_bytes import LiveBytes
from lightning_pipeshift.model.parameters.gradients import like_a_result
from lightning_pipeshift.model.parameters.uses import Slot, slots_of, substituted
from lightning_pipeshift.model.random.random_streams import drawing_from, stream_seed
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.recompute import LayerCall
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.model.tensors.trees import Rebuild, address_of, leaves_of
from lightning_pipeshift.model.user_state.preserve import ObjectState
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor

_REPEATS = 3


class Unknown(NamedTuple):
    """Stands for a tensor of which no rank has the values yet."""

    shape: torch.Size
    dtype: torch.dtype


class Figures(NamedTuple):
    """Time and memory of one layer for a microbatch.

    Args:
        forward_seconds: its forward.
        backward_seconds: its backward, 0 where it was not measured.
        tensors: the saved tensors of its forward.
        input_bytes: the size of its inputs.
        working_bytes: the memory that it takes for a moment in addition, forward or backward.
    """

    forward_seconds: float
    backward_seconds: float = 0.0
    tensors: tuple[SavedTensor, ...] = ()
    input_bytes: int = 0
    working_bytes: int = 0

    def plus(self, other: Figures) -> Figures:
        """The sum of two calls."""
        return Figures(
            self.forward_seconds + other.forward_seconds,
            self.backward_seconds + other.backward_seconds,
            self.tensors,
            self.input_bytes + other.input_bytes,
            max(self.working_bytes, other.working_bytes),
        )


class Stopwatch:
    """Times layers, each by itself on synthetic inputs: no other layer has to be on this stage, and
    nothing in the model changes. Layers of the same class, shapes and kinds of inputs are timed
    once.

    Args:
        device: where to run.
        trains: whether to measure backwards too.
        held: tensors that are in use anyway, in addition to parameters and buffers: the batch.
    """

    def __init__(
        self,
        device: torch.device,
        trains: bool = False,
        held: Iterable[Any] = (),
    ) -> None:
        self.figures: dict[int, Figures] = {}
        self._trains = trains
        self._device = device
        self._addresses = frozenset(address_of(leaf) for leaf in held if isinstance(leaf, Tensor))
        self._known: dict[Any, Figures | None] = {}

    def observe_call(self, gate: NamedLayer, leaves: Sequence[Any], rebuild: Rebuild) -> None:
        """Times the layer on inputs like these, unless it fails on synthetic inputs.

        Args:
            gate: that of the layer.
            leaves: of the arguments.
            rebuild: builds arguments of such leaves.
        """
        signature = (
            type(gate.layer),
            tuple((name, tuple(p.shape)) for name, p in gate.layer.named_parameters()),
            tuple(
                # A layer's output requires a gradient, and then more is saved for the backward.
                (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x)
                for x in leaves
            ),
        )
        if signature not in self._known:
            figures = self._time(gate, leaves, rebuild, self._trains)
            if figures is None and self._trains:
                figures = self._time(gate, leaves, rebuild, False)
            self._known[signature] = figures
        figures = self._known[signature]
        if figures is not None:
            before = self.figures.get(gate.index)
            self.figures[gate.index] = figures if before is None else before.plus(figures)

    def _time(
        self, gate: NamedLayer, leaves: Sequence[Any], rebuild: Any, trains: bool
    ) -> Figures | None:
        slots = slots_of(gate.layer)
        forward = backward = float("inf")
        observer = Observer(self._device)
        try:
            with (
                drawing_from(generators_of(self._device), True, stream_seed("measure", gate.index)),
                torch.set_grad_enabled(trains),
                # The user's modes must not record the measurement.
                dispatch_modes_disabled(),
                without_torch_function(),
                substituted(slots, self._here(slots, trains)),
            ):
                for repeat in range(_REPEATS):
                    inputs = [self._random_like(leaf, trains) for leaf in leaves]
                    args, kwargs = rebuild(inputs)
                    # A layer may add to its arguments: a cache of keys and values.
                    before = ObjectState(args, kwargs)
                    # Counting takes time; the best of several runs excludes it.
                    run: Callable[[], Any] = partial(gate.run, *args, **kwargs)
                    # The last run, when the device is warm: each operation is timed.
                    if repeat == _REPEATS - 1:
                        batch = map(address_of, self._of_batch(leaves, inputs))
                        table = SavedTable(left_out=batch, device=self._device)
                        call = LayerCall(gate, gate.run, table, observer)
                        run = partial(call.run, args, kwargs)
                    try:
                        output, seconds = self._seconds(run)
                    finally:
                        before.put_back()
                    forward = min(forward, seconds)
                    ends = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.grad_fn]
                    seconds = 0.0
                    if ends:
                        ones = [torch.ones_like(end) for end in ends]
                        _, seconds = self._seconds(partial(torch.autograd.backward, ends, ones))
                    backward = min(backward, seconds)
                observer.end()
                tensors = tuple(observer.of_layers.get(gate.index, ())) if trains else ()
                working = self._working_bytes(gate, leaves, rebuild, slots) if trains else 0
        except Exception:
            # Any error only means that this layer needs real inputs; the planner estimates its time
            # from its parameters instead.
            return None
        return Figures(
            forward,
            backward,
            tensors,
            observer.of_inputs.get(gate.index, 0),
            max(0, working - sum(tensor.num_bytes for tensor in tensors)),
        )

    def _working_bytes(
        self, gate: NamedLayer, leaves: Sequence[Any], rebuild: Any, slots: Sequence[Slot]
    ) -> int:
        """The peak memory of a forward and backward of the layer, without its parameters, buffers,
        accumulated gradients, and the batch.
        """
        inputs: Any = [self._random_like(leaf, True) for leaf in leaves]
        there = [x for slot in slots if (x := slot.get()) is not None]
        gradients = [x.grad for x in there if x.grad is not None]
        live = LiveBytes(self._device, [*there, *gradients, *self._of_batch(leaves, inputs)])
        with live:
            live.note(inputs)
            args, kwargs = rebuild(inputs)
            before = ObjectState(args, kwargs)
            try:
                output: Any = gate.run(*args, **kwargs)
            finally:
                before.put_back()
            # As in a step: from here on only the graph keeps memory alive.
            del inputs, args, kwargs, before
            ends: Any = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.grad_fn]
            end: Any = _Ones.apply(*ends) if ends else None  # type: ignore[no-untyped-call]
            del output, ends
            if end is not None:
                end.backward(end.detach())
        return live.peak_bytes

    def _of_batch(self, leaves: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor]:
        """The synthetic inputs in the place of tensors that are in use anyway."""
        return [
            number
            for leaf, number in zip(leaves, inputs, strict=True)
            if isinstance(leaf, Tensor) and address_of(leaf) in self._addresses
        ]

    def _seconds(self, run: Callable[[], Any]) -> tuple[Any, float]:
        synchronize(self._device)
        start = time.perf_counter()
        result = run()
        synchronize(self._device)
        return result, time.perf_counter() - start

    def _here(self, slots: Sequence[Slot], trains: bool) -> dict[int, Tensor]:
        found = {}
        for slot in slots:
            tensor = slot.get()
            if tensor is not None:
                stand_in = self._stand_in(tensor, slot.is_buffer)
                if trains and tensor.requires_grad:
                    stand_in.requires_grad_()
                found[id(tensor)] = stand_in
        return found

    def _stand_in(self, tensor: Tensor, is_buffer: bool) -> Tensor:
        if tensor.is_meta:
            # No rank holds the whole model. Random values take as long to compute with as the
            # layer's own.
            return self._numbers(tensor)
        # Buffers are copied: a layer may write to its running statistics.
        return tensor.detach().to(self._device, copy=is_buffer)

    def _random_like(self, leaf: Any, trains: bool) -> Any:
        if not isinstance(leaf, Unknown):
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        numbers = self._numbers(leaf)
        if trains and (numbers.is_floating_point() or numbers.is_complex()):
            # Like the output of an earlier layer: no leaf, so that this one may write to it.
            return like_a_result(numbers)
        return numbers

    def _numbers(self, like: Tensor | Unknown) -> Tensor:
        if like.dtype.is_floating_point or like.dtype.is_complex:
            return torch.randn(like.shape, device=self._device).to(like.dtype)
        return torch.zeros(like.shape, dtype=like.dtype, device=self._device)


class _Ones(torch.autograd.Function):
    """Gives each tensor a gradient of ones, in memory that only the backward holds: as the next
    layer would.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.made_as = [(x.shape, x.dtype, x.device) for x in tensors]
        return torch.zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(torch.ones(s, dtype=d, device=at) for s, d, at in ctx.made_as)
