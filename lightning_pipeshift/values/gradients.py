"""Where a value's gradient leaves a stage, and where it arrives.

A value that was sent with its gradient has one node of autograd at each end. A token, a tensor
without a meaning, runs through all nodes of a microbatch at a stage: so one call of the engine
reaches them all, and autograd runs them, and everything between them, in the reverse order of the
program. Values that no gradient connects are in graphs of their own, with a token each: see
:mod:`.graphs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import apply_function
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key, Message, Place


class Letters(Protocol):
    """What sends and receives for a microbatch."""

    mailbox: Mailbox

    def gradient_key(self, source: int, serial: int) -> Key:
        """That of a gradient's message in the backward that comes now.

        Args:
            source: the stage that sends it.
            serial: of the use of the value, in the program.
        """

    def receive(self, key: Key, place: Place) -> Message:
        """Waits for a message."""


class Way(NamedTuple):
    """How a gradient travels.

    Args:
        letters: sends or receives it.
        source: the stage that sends it.
        serial: of the use of the value, in the program.
        place: of the operation that used the value, in the program.
        to: the stage that it goes to.
    """

    letters: Letters
    source: int
    serial: int
    place: Place
    to: int

    @property
    def key(self) -> Key:
        """That of its message."""
        return self.letters.gradient_key(self.source, self.serial)


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


class _ToAll(torch.autograd.Function):
    """A use of a tensor that every stage has: its gradient goes to all of them."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, tensor: Tensor, ways: Sequence[Way]
    ) -> tuple[Tensor, Tensor]:
        ctx.ways = ways
        ctx.set_materialize_grads(False)
        return token.new_zeros(()), tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for way in ctx.ways:
            way.letters.mailbox.send(way.to, way.key, way.place, gradients[1])
        return *gradients, None


def gradient_to_all(token: Tensor, tensor: Tensor, ways: Sequence[Way]) -> tuple[Tensor, Tensor]:
    """Begins a use of a common tensor; returns the new token, and the tensor to use."""
    found: tuple[Tensor, Tensor] = apply_function.__get__(None, _ToAll)(token, tensor, ways)
    return found


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
