"""Sends layers to their new owners while steps run.

CN115454655A announces a move, prepares it, and sends the weights of moving layers in threads and on
connections of their own, while both stages compute. In a synchronous schedule:

1. The move is prepared during a whole step: the targets of all tensors, and memory for them.
2. As soon as a stage has taken its optimizer step, it sends the weights: the stages before it are
   still at their last backwards.
3. The new owner owns the layer from the next step on. A call of the layer waits only for that
   layer's weights, and they arrive in the order in which they are needed. The old owner compares
   the values it has sent with the present ones, as user code may have run in between.
4. Optimizer states, which the patent does not mention, and gradients from before the step are not
   needed before its end: they are sent after the weights. The old owner frees nothing before the
   new owner has acknowledged that it has everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.model.parameters.uses import flat_weights_forgotten, give_gradient, hold
from lightning_pipeshift.runtime.comm.lane import layout_of
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.transfers import (
    Message,
    MessageKind,
    Transfer,
    Transfers,
)

# Versions of the weights: those that user code may still change, and those of the next step.
_EARLY = 0
_FINAL = 1
# In place of the index of an optimizer: a gradient from before the step.
_GRADIENT = -1


class Migration(Transfers):
    """One stage's part in a change of owners between two steps.

    Every stage of the virtual machine makes one, at the beginning of the same step, and calls its
    methods in their order: :meth:`start`, :meth:`begin` as the next step begins, and
    :meth:`finish` as it ends. In between it listens to the stage's actions and layers.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
        optimizers: the same ones on every stage.
        threads: their threads wait for other stages.
    """

    def __init__(
        self,
        holdings: Holdings,
        stage_of: Sequence[int],
        optimizers: Sequence[Optimizer],
        threads: Threads,
    ) -> None:
        # Of the optimizer's state some may stay in host memory: see :meth:`Holdings.settle`.
        host = torch.device("cpu")
        super().__init__(holdings, stage_of, optimizers, threads, host)
        stages = [(stage, stage_of[layer]) for layer, (_, stage) in enumerate(holdings.layers)]
        here = holdings.stage
        self.leaving = frozenset(
            layer for layer, (old, new) in enumerate(stages) if old == here != new
        )
        """The layers that this stage gives away."""
        self.changing = self.leaving | {
            layer for layer, (old, new) in enumerate(stages) if old != here == new
        }
        """The layers that this stage gives away or gets."""
        for incoming in self._incoming:
            for place, parameter in incoming.parameters.items():
                incoming.memory[place] = self._buffer_like(parameter)
        self._awaited: dict[int, list[Transfer]] = {}
        """By layer that has not arrived, the transfers that it waits for."""

    def _buffer_like(self, like: Tensor) -> Tensor:
        if self._device.type == "cpu" and like.is_contiguous():
            return host_buffer(tuple(like.shape), like.dtype)
        return torch.empty_strided(
            like.shape, layout_of(like), dtype=like.dtype, device=self._device
        )

    def start(self) -> None:
        """Starts to send the weights. Called when they are those of the next step, unless user code
        changes them.
        """
        if self._work is not None:
            return
        with self._exposed():
            self._start_threads()
            for outgoing in self._outgoing:
                self._hand_over(
                    outgoing,
                    *(
                        Message(MessageKind.WEIGHTS, _EARLY, {place: parameter})
                        for place, parameter in outgoing.parameters.items()
                    ),
                )

    def _weights_to_send(self, outgoing: Transfer, message: Message) -> Mapping[int, Tensor]:
        found = {}
        for place, parameter in message.weights.items():
            values = parameter.detach()
            if message.number == _EARLY:
                copied = outgoing.memory[place] = self._buffer_like(values)
                found[place] = copied.copy_(values)
            elif place not in outgoing.memory or not _same_bits(outgoing.memory.pop(place), values):
                found[place] = values
        return found

    def begin(self, keeps_gradients: bool) -> None:
        """Begins the step in which the layers change their owners.

        Args:
            keeps_gradients: whether gradients from before the step are still needed.
        """
        self.start()
        with self._exposed():
            self._holdings.place(self._stage_of)
            self._make_place()
            self._has_begun = True
            for outgoing in self._outgoing:
                self._send_the_rest(outgoing, keeps_gradients)

    def _make_place(self) -> None:
        """Gives the tensors that are to arrive their memory: only their values are missing."""
        is_common = self._holdings.is_common
        with torch.no_grad(), flat_weights_forgotten(self._holdings.root):
            for incoming in self._incoming:
                for place, parameter in incoming.parameters.items():
                    hold(parameter, incoming.memory[place])
                    parameter.grad = None
                modules = [self._holdings.layers[layer][0] for layer in incoming.layers]
                for buffer in [buffer for module in modules for buffer in module.buffers()]:
                    # Before the step: in it they have another class.
                    if is_common is not None and buffer.is_meta and not is_common(buffer):
                        hold(buffer, self._buffer_like(buffer))
                for layer in {layer for move in incoming.moves for layer in move.layers}:
                    self._awaited.setdefault(layer, []).append(incoming)

    def _send_the_rest(self, outgoing: Transfer, keeps_gradients: bool) -> None:
        """Sends what the new owner lacks, now that nothing of it changes any more."""
        self._drop_unsent(outgoing)
        rest = self._optimizer_state_of(outgoing)
        for place, parameter in outgoing.parameters.items():
            if parameter.grad is not None and keeps_gradients:
                rest[place, _GRADIENT, ""] = parameter.grad
            if self._holdings.stage not in self._holdings.holders_of(parameter):
                # From now on the gradient is on its way.
                parameter.grad = None
        messages = [
            self._state_message(move.layers[0])
            if move.parameter is None
            else Message(MessageKind.WEIGHTS, _FINAL, {place: move.parameter})
            for place, move in enumerate(outgoing.moves)
        ]
        last = Message(MessageKind.LAST, _FINAL, values=rest)
        self._hand_over(outgoing, *messages, last)

    def _drop_unsent(self, outgoing: Transfer) -> None:
        with suppress(Empty):
            while True:
                outgoing.messages.get_nowait()

    def abandon(self) -> None:
        """See :class:`Transfers`. Values that were already sent are discarded."""
        for outgoing in self._outgoing if not self._has_begun else ():
            self._drop_unsent(outgoing)
        super().abandon()

    @property
    def awaited(self) -> list[int]:
        """The layers that are on their way to this stage."""
        return list(self._awaited)

    def await_layer(self, layer: int) -> None:
        """Returns when a layer has arrived and can run.

        Args:
            layer: its number.

        Raises:
            StageFailedError: the old owner ended before it had sent the layer.
        """
        for incoming in self._awaited.pop(layer, ()):
            self._await(incoming, partial(incoming.has_layer, layer, _FINAL))
            if layer in incoming.state:
                self._take_state(incoming, layer)

    def finish(self) -> None:
        """Waits until everything has arrived, here and at the new owners; then frees the tensors
        that have moved away.

        Raises:
            StageFailedError: another stage ended before that.
        """
        for layer in list(self._awaited):
            # A layer that this step has not called.
            self.await_layer(layer)
        with self._exposed():
            for work in self._work or ():
                work.result()
            for incoming in self._incoming:
                for place, parameter in incoming.parameters.items():
                    gradient = incoming.optimizer_state.pop((place, _GRADIENT, ""), None)
                    if gradient is not None:
                        give_gradient(parameter, gradient.to(self._device))
                self._take_optimizer_state(incoming)
            self._holdings.settle(self._optimizers)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors are bitwise equal; a NaN is equal to itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if flat[0].numel() % 8 == 0:
        # Eight bytes at a time.
        flat = [tensor.view(torch.int64) for tensor in flat]
    return torch.equal(*flat)
