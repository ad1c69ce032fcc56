"""Measures how long each layer's forward takes, before training, on this stage's device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_pipeshift.model.gate import Gate
from lightning_pipeshift.model.parameters import Slot, slots_of, substituted
from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.streams import Streams
from lightning_pipeshift.model.trees import flatten

_REPEATS = 3


class Stopwatch:
    """Times every layer once while a flow is recorded.

    Each layer runs by itself on made-up inputs of the recorded shapes, so no other layer has to be
    here, and nothing in the model changes. Layers of the same class, shapes and inputs are timed
    once.

    Args:
        device: where to run.
        streams: to keep the random state as it is.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.seconds: dict[int, float] = {}
        self._device = device
        self._streams = streams
        self._known: dict[Any, float | None] = {}

    def observe(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Times the layer on inputs like these; a layer that refuses made-up inputs is left out."""
        leaves, rebuild = flatten((args, kwargs))
        signature = (
            type(gate.layer),
            tuple((name, tuple(p.shape)) for name, p in gate.layer.named_parameters()),
            tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves),
        )
        if signature not in self._known:
            self._known[signature] = self._time(gate, leaves, rebuild)
        seconds = self._known[signature]
        if seconds is not None:
            self.seconds[gate.index] = self.seconds.get(gate.index, 0.0) + seconds

    def _time(self, gate: Gate, leaves: Sequence[Any], rebuild: Any) -> float | None:
        slots = slots_of(gate.layer)
        best = float("inf")
        try:
            with (
                self._streams.switched("measure", gate.index),
                torch.no_grad(),
                # What watches the step while it is followed takes longer than small operations do,
                # and must not take the measuring for the user's code.
                _disable_current_modes(),
                torch._C.DisableTorchFunction(),
                substituted(slots, self._here(slots)),
            ):
                for _ in range(_REPEATS):
                    args, kwargs = rebuild([self._made_up(leaf) for leaf in leaves])
                    self._wait()
                    start = time.perf_counter()
                    gate.original(*args, **kwargs)
                    self._wait()
                    best = min(best, time.perf_counter() - start)
        except Exception:
            # Any error says only that this layer needs real inputs; the planner goes by its
            # parameters instead.
            return None
        return best

    def _here(self, slots: Sequence[Slot]) -> dict[int, Tensor]:
        return {
            id(tensor): self._stand_in(tensor, slot.is_buffer)
            for slot in slots
            if (tensor := slot.get()) is not None
        }

    def _stand_in(self, tensor: Tensor, is_buffer: bool) -> Tensor:
        if tensor.is_meta:
            # Nobody holds the whole model: any numbers take as long as the layer's own.
            return self._numbers(tensor)
        # Buffers are copied: a layer may write to its running statistics.
        return tensor.detach().to(self._device, copy=is_buffer)

    def _made_up(self, leaf: Any) -> Any:
        if not isinstance(leaf, Placeholder):
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        return self._numbers(leaf)

    def _numbers(self, like: Tensor) -> Tensor:
        if like.dtype.is_floating_point or like.dtype.is_complex:
            return torch.randn(like.shape, device=self._device).to(like.dtype)
        return torch.zeros(like.shape, dtype=like.dtype, device=self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
