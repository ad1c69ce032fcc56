"""Inputs of an autograd graph that are no leaves, and whose gradient is stored in a box.

So code may modify such a tensor in place; it is neither a view nor a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import storage_use_count

# Inputs that make autograd record the functions below, which have no other differentiable input.
_anchors: dict[torch.device, Tensor] = {}


class GradientBox:
    """Holds the gradient of a tensor that was passed to user code, after the backward."""

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

    def take(self, gradient: Tensor | None) -> None:
        """Called in the backward, once for each graph that uses the tensor."""
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


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else refers to a tensor's memory, so that it may be written to.

    Args:
        tensor: one to which only the caller refers.
    """
    if tensor.requires_grad or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    return not tensor.is_inference() and storage_use_count(storage) <= 2


def added(total: Tensor, part: Tensor) -> Tensor:
    """The sum of two gradients; in the memory of the first one, if it is alone there."""
    return total.add_(part) if is_alone(total) else total + part
