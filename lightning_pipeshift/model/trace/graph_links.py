"""Placeholders that keep the autograd graph of a traced step in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.model.trace.placeholder import META, Origin, Placeholder, spec_of
from lightning_pipeshift.plan.inputs.flow import TensorSpec


class _Link(torch.autograd.Function):
    """Replaces a tensor's placeholder and keeps the autograd graph in one piece, so that it can be
    searched.
    """

    @staticmethod
    def forward(ctx: Any, old: Tensor, device: torch.device, origin: Origin) -> Placeholder:
        shadow = old.shadow.detach() if isinstance(old, Placeholder) else on_meta(old)
        return Placeholder(shadow, device, origin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def linked(old: Tensor, device: torch.device, origin: Origin) -> Placeholder:
    """A placeholder that replaces a tensor, with that tensor as its predecessor in the graph."""
    new: Placeholder = _Link.apply(old, device, origin)  # type: ignore[no-untyped-call]
    return new


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and type without values."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


class _Join(torch.autograd.Function):
    """A placeholder that depends on several tensors."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, device: torch.device, *sources: Tensor) -> Placeholder:
        return Placeholder(on_meta(like), device, Origin(()))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace has no backward")


def joined(like: Tensor, device: torch.device, sources: Sequence[Tensor]) -> Placeholder:
    """A placeholder like a tensor, with several tensors as its predecessors in the graph."""
    made: Placeholder = _Join.apply(like, device, *sources)  # type: ignore[no-untyped-call]
    return made


def described(tensor: Tensor) -> TensorSpec:
    """The shape and type of a tensor or of the value that a placeholder stands for."""
    return spec_of(tensor.shadow if isinstance(tensor, Placeholder) else tensor)
