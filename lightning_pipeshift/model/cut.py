"""Where a stage's autograd graph begins: at received payloads, and at shared parameters.

Both hand out a tensor whose gradient goes into a box instead of into a leaf. Such a tensor is no
leaf, so user code may modify it in place; it is no view and no copy either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.model.parameters import ParameterUse, Segment

# What makes autograd record the functions below, which take no tensor that needs a gradient.
_anchors: dict[torch.device, Tensor] = {}


class GradientBox:
    """Where the gradient of a handed-out tensor is found after the backward."""

    __slots__ = ("gradient", "source")

    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source
        self.gradient: Tensor | None = None

    def open(self) -> Tensor:
        """The tensor, to be used in a forward pass; once only."""
        assert self.source is not None
        anchor = _anchors.get(self.source.device)
        if anchor is None or anchor.is_inference():
            with torch.inference_mode(False):
                anchor = torch.zeros((), device=self.source.device, requires_grad=True)
            _anchors[self.source.device] = anchor
        tensor: Tensor = _Open.apply(anchor, self)  # type: ignore[no-untyped-call]
        return tensor

    def take(self, gradient: Tensor) -> None:
        """Called by the backward, once for each graph the tensor was used in."""
        self.gradient = gradient


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: GradientBox) -> Tensor:
        ctx.box = box
        source, box.source = box.source, None
        assert source is not None
        return source

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.box.take(gradients[0])
        return None, None


class _SegmentBox(GradientBox):
    __slots__ = ("key", "sums")

    def __init__(
        self, source: Tensor, sums: dict[tuple[str, Segment], Tensor], key: tuple[str, Segment]
    ) -> None:
        super().__init__(source)
        self.sums = sums
        self.key = key

    def take(self, gradient: Tensor) -> None:
        if self.key in self.sums:
            self.sums[self.key] = self.sums[self.key] + gradient
        else:
            self.sums[self.key] = gradient


class SharedParameters:
    """Collects the gradients of shared parameters for each segment apart.

    Args:
        uses: the shared parameters that this stage holds.
    """

    def __init__(self, uses: list[ParameterUse]) -> None:
        self.uses = uses
        self.sums: dict[tuple[str, Segment], Tensor] = {}
        self._by_segment: dict[Segment, list[ParameterUse]] = {}
        for use in uses:
            for segment in use.segments:
                self._by_segment.setdefault(segment, []).append(use)

    def enter(self, segment: Segment) -> None:
        """From here on, the forward pass is in ``segment``."""
        if not torch.is_grad_enabled():
            return
        for use in self._by_segment.get(segment, ()):
            if use.parameter.requires_grad:
                # `detach` shares memory and version counter, so autograd still notices a parameter
                # that changes.
                box = _SegmentBox(use.parameter.detach(), self.sums, (use.name, segment))
                alias = box.open()
                for slot in use.slots:
                    slot.put(alias)

    def restore(self) -> None:
        """Lets the model refer to the parameters themselves again."""
        for use in self.uses:
            for slot in use.slots:
                slot.put(use.parameter)

    def total(self, use: ParameterUse, start: Tensor | None) -> Tensor | None:
        """``start`` plus the gradients of this stage's segments, in order; ``None`` where there is
        neither.
        """
        for segment in use.segments:
            part = self.sums.get((use.name, segment))
            if part is not None:
                start = part if start is None else start + part
        return start
