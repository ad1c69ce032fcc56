"""What a receiver has to know of a tensor: its shape, its strides and its type."""

from __future__ import annotations

from itertools import accumulate

import torch

from lightning_pipeshift.plan.inputs.flow import TensorSpec


def dtype_named(name: str) -> torch.dtype:
    """The type with the name ``str(dtype)``."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype), name
    return dtype


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape, strides and type of a tensor.

    A tensor with gaps or overlaps (a slice, an expanded tensor) is sent without them, so its
    strides are those of a contiguous one.
    """
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not is_dense(shape, stride):
        stride = tuple(accumulate((1, *shape[:0:-1]), lambda step, size: step * max(size, 1)))[::-1]
    return TensorSpec(shape, stride if shape else (), str(tensor.dtype), tensor.itemsize)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape has neither gaps nor overlaps in its memory."""
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(stride, shape, strict=True) if size != 1
    ):
        if step != expected:
            return False
        expected *= size
    return True
