"""Where a value's gradient leaves a stage, and where it arrives.

A value that was sent with its gradient has one node of autograd at each end. A token, a tensor
without a meaning, runs through all nodes of a microbatch at a stage: so one call of the engine
reaches them all, and autograd runs them, and everything between them, in the reverse order of the
program.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import apply_function
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key, Message, Place


class Letters(Protocol):
    """What sends and receives for a microbatch."""

    mailbox: Mailbox

    def receive(self, key: Key, place: Place) -> Message:
        """Waits for a message."""


class Way(NamedTuple):
    """How a gradient travels.

    Args:
        letters: sends or receives it.
        key: of its message.
        place: of the operation that used the value, in the program.
        to: the stage that it goes to.
    """

    letters: Letters
    key: Key
    place: Place
    to: int


class _FromLater(torch.autograd.Function):
    """The end of a link: what later consumers, at another stage, give comes from there."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, link: Tensor, way: Way) -> Tensor:
        ctx.way, ctx.dtype, ctx.shape, ctx.device = way, link.dtype, link.shape, link.device
        ctx.set_materialize_grads(False)
        return token.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        message = ctx.way.letters.receive(ctx.way.key, ctx.way.place)
        gradient = None
        if message.data is not None:
            gradient = message.tensor(ctx.dtype, ctx.shape, ctx.device)
        return gradients[0], gradient, None


class _ToEarlier(torch.autograd.Function):
    """The begin of a link: its sum goes to the consumers before it, at another stage."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, holder: list[Tensor], way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        ctx.set_materialize_grads(False)
        # The tensor is in a list, and so no view of an input: the consumers may write to it.
        return token.new_zeros(()), holder[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        way: Way = ctx.way
        way.letters.mailbox.send(way.to, way.key, way.place, gradients[1])
        return gradients[0], None, None


def gradient_from_later(token: Tensor, link: Tensor, way: Way) -> Tensor:
    """Ends a link; returns the new token."""
    new: Tensor = apply_function.__get__(None, _FromLater)(token, link, way)
    return new


def gradient_to_earlier(token: Tensor, tensor: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Begins a link with a tensor that was received; returns the new token, and the link."""
    found: tuple[Tensor, Tensor] = apply_function.__get__(None, _ToEarlier)(
        token, [tensor.detach()], way
    )
    return found
