"""Gradients: how they are added up, and tensors that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import num_other_uses
from lightning_pipeshift.model.tensors.trees import WithoutMemory

Gradients = list[tuple[nn.Parameter, Tensor]]


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


# An input that makes autograd record the function above.
_anchor = torch.zeros((), requires_grad=True)


def like_a_result(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that needs a gradient and is no leaf, nor a view or a copy: a
    layer may write to it in place, as to the result of an earlier layer. Its gradient goes nowhere.
    """
    result: Tensor = _Result.apply(_anchor, tensor)  # type: ignore[no-untyped-call]
    return result


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else refers to a tensor's memory, so that it may be written to.

    Args:
        tensor: one to which only the caller refers.
    """
    if tensor.requires_grad or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_inference() and num_other_uses(tensor) <= 0


def take_gradients(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Returns the gradients of those parameters that have one, which then have none."""
    found = [(x, x.grad) for x in parameters if x.grad is not None]
    for parameter, _ in found:
        parameter.grad = None
    return found


def call_before_backward(results: Iterable[Any], function: Callable[[], None]) -> None:
    """Calls a function whenever a backward reaches one of the tensors among a layer's results.

    Args:
        results: tensors, maybe among other objects. Values of other stages, which a layer has got
            and returns without using them, have no node of autograd here.
        function: without arguments.
    """
    for result in results:
        if not isinstance(result, Tensor) or isinstance(result, WithoutMemory):
            continue
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(lambda _: function())
