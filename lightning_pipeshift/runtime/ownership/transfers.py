"""Sends the tensors of layers to another stage, in threads and on connections of their own.

Weights are sent in numbered versions, in the order in which they are needed, and the new owner
waits for the version that it needs. With the last version comes the optimizer's state.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.devices.streams import Event, keep_for_stream, side_stream
from lightning_pipeshift.model.parameters.uses import (
    flat_weights_forgotten,
    give_gradient,
    take_other_state,
)
from lightning_pipeshift.runtime.comm.lane import Lane, layout_of
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.ownership.holdings import Holdings

Values = dict[tuple[Any, ...], Any]
"""The values that are sent besides weights, by name. The name of a layer's state is the layer and
the keys of :func:`other_state`; that of an optimizer's state is the place of the parameter, the
index of the optimizer, and the optimizer's own name.
"""

# In place of the index of an optimizer: a gradient from before a step.
GRADIENT = -1


class MessageKind(enum.Enum):
    """The kind of a message from the old owner."""

    STATE = "the layers' state other than parameters"
    WEIGHTS = "weights of some version"
    LAST = "the last weights, and the optimizer's state"
    CANCELLED = "the layers stay where they are"


class Message(NamedTuple):
    """A message from the old owner to the new one.

    Args:
        kind: its kind.
        version: that of the weights.
        weights: by place (see :class:`Transfer`).
        values: what is sent after the weights.
        may_change: whether the weights may change before they are sent again.
    """

    kind: MessageKind
    version: int = -1
    weights: Mapping[int, Tensor] = {}
    values: Values | None = None
    may_change: bool = False


class Transfer:
    """The tensors that one stage sends to another.

    Args:
        peer: the other stage.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.moved: list[tuple[list[int], nn.Parameter]] = []
        """The parameters, in the order in which they are needed, each behind the layers of the new
        stage that need it. The index of one is its *place*: the same on both stages.
        """
        self.layers: list[int] = []
        """Those that change their owner."""
        self.version = -1
        """The last version of the weights that the old owner has handed to its thread, or that the
        new owner uses; -1 for none.
        """

    def uses(self, version: int) -> bool:
        """Whether a version of the weights is in use, or a later one."""
        return self.version >= version

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, by place."""
        return [parameter for _, parameter in self.moved]

    @property
    def needed_by(self) -> set[int]:
        """The layers of the new stage that need anything of it."""
        return {*self.layers, *(layer for users, _ in self.moved for layer in users)}


class Outgoing(Transfer):
    """The tensors of layers that this stage sends to another one."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self._messages: SimpleQueue[tuple[Message, Event | None] | None] = SimpleQueue()
        """Each with an event that occurs when the device has computed the values, if they are any;
        ``None`` ends the thread.
        """
        self._copies: dict[int, Tensor] = {}
        """By place, weights that were sent and may have changed since."""

    def put(self, ready: Event, *messages: Message) -> None:
        """Lets the thread send messages, when an event has occurred."""
        for message in messages:
            self._messages.put((message, ready))

    def weights(self, version: int, may_change: bool) -> list[Message]:
        """Messages with the weights of a version, one by one in the order in which they are needed.

        Args:
            version: its number.
            may_change: as for :class:`Message`.
        """
        self.version, kind = version, MessageKind.WEIGHTS
        places = enumerate(self.parameters)
        return [Message(kind, version, {at: x}, may_change=may_change) for at, x in places]

    def state(self, holdings: Holdings) -> Message:
        """A message with the layers' state other than parameters, as it is now."""
        state = {
            (layer, *path): value.clone() if isinstance(value, Tensor) else value
            for layer in self.layers
            for path, value in holdings.state_of(holdings.layers[layer][0]).items()
        }
        return Message(MessageKind.STATE, values=state)

    def optimizer_state(self, optimizers: Sequence[Optimizer]) -> Values:
        """The optimizers' state of the parameters."""
        return {
            (place, index, name): value
            for place, parameter in enumerate(self.parameters)
            for index, optimizer in enumerate(optimizers)
            for name, value in optimizer.state.get(parameter, {}).items()
        }

    def drop_unsent(self) -> None:
        """Forgets the messages that the thread has not begun to send."""
        with suppress(Empty):
            while True:
                self._messages.get_nowait()

    def end(self, cancels: bool) -> None:
        """Lets the thread end.

        Args:
            cancels: whether the new owner is told that the layers stay here. Otherwise it is not
                told anything more.
        """
        if cancels:
            self.drop_unsent()
        self._messages.put((Message(MessageKind.CANCELLED), None) if cancels else None)

    # --- in a thread ---

    def send(
        self,
        lane: Lane,
        receipts: Lane,
        device: torch.device,
        unpin: Callable[[Iterable[Tensor]], None] | None,
    ) -> None:
        """Sends what is handed over, and waits for the receipt.

        Args:
            lane: the thread's.
            receipts: likewise, for the receipt.
            device: the stage's.
            unpin: is given the weights of each message when they have been sent.
        """
        # The main thread may run user code that sees parameters as values.
        with torch.no_grad(), without_torch_function_of_subclasses():
            kind = MessageKind.WEIGHTS
            while kind in (MessageKind.WEIGHTS, MessageKind.STATE):
                item = self._messages.get()
                if item is None:
                    return
                kind = item[0].kind
                with side_stream(device, "moves"):
                    self._send(lane, *item)
                if unpin is not None:
                    unpin(item[0].weights.values())
                # It may be long until the next one: what was sent is not kept until then.
                del item
        lane.settle()
        if kind is MessageKind.LAST:
            receipts.receive_object(self.peer)

    def _send(self, lane: Lane, message: Message, ready: Event | None) -> None:
        if ready is not None:
            ready.wait()
        lacking: dict[int, Tensor] = {}
        for place, weight in message.weights.items():
            values, sent = weight.detach(), self._copies.pop(place, None)
            if message.may_change:
                lacking[place] = copied = memory_like(values, values.device)
                self._copies[place] = copied.copy_(values)
            elif sent is None or not _same_bits(sent, values):
                lacking[place] = values
        places = {place: place in lacking for place in message.weights}
        lane.send_object((message.kind, message.version, places), self.peer)
        for weight in lacking.values():
            lane.send_tensor(weight, self.peer)
        if message.values is not None:
            lane.send_values(message.values, self.peer)


class Incoming(Transfer):
    """The tensors of layers that this stage receives from another one."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.memory: dict[int, Tensor] = {}
        """By place, the memory for weights, if not each version has its own."""
        self.versions: dict[int, dict[int, Tensor]] = {}
        """The weights, by version and place."""
        self.state: Values | None = None
        """The layers' state other than parameters."""
        self.optimizer_state: Values = {}
        self.seconds = 0.0
        """How long the thread has received."""
        self._has_changed = threading.Condition()
        self._error: BaseException | None = None
        """Why nothing more arrives."""

    def has_layer(self, layer: int, version: int) -> bool:
        """Whether everything that a layer needs of this has arrived.

        Args:
            layer: its number.
            version: that of the weights.
        """
        arrived = self.versions.get(version, {})
        return (layer not in self.layers or self.has_state()) and all(
            place in arrived for place, (users, _) in enumerate(self.moved) if layer in users
        )

    def has_state(self) -> bool:
        """Whether the layers' state other than parameters has arrived."""
        return self.state is not None

    def await_until(self, is_there: Callable[[], bool]) -> None:
        """Returns when something has arrived.

        Raises:
            StageFailedError: the old owner ended before it had sent it.
        """
        with self._has_changed:
            self._has_changed.wait_for(lambda: is_there() or self._error is not None)
        if not is_there():
            assert self._error is not None
            raise self._error

    def take_weights(self, version: int) -> list[tuple[nn.Parameter, Tensor]]:
        """The weights of a version that has arrived, with their parameters."""
        found: dict[int, Tensor] = {}
        with self._has_changed:
            for older in sorted(known for known in self.versions if known <= version):
                # Weights that are not trained come with the first version only.
                found |= self.versions.pop(older)
        _keep_for_compute(found.values())
        return [(self.moved[place][1], values) for place, values in found.items()]

    def give_state(self, holdings: Holdings, layer: int) -> None:
        """Gives a layer its state other than parameters, which has arrived."""
        assert self.state is not None
        module, _ = holdings.layers[layer]
        state = {(at, name): x for (of, at, name), x in self.state.items() if of == layer}
        _keep_for_compute(state.values())
        with torch.no_grad(), flat_weights_forgotten(module):
            take_other_state(module, state)

    def give_optimizer_state(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Gives optimizers their state, which has come with the last weights, and parameters their
        gradients, on a device.
        """
        _keep_for_compute(self.optimizer_state.values())
        for (place, index, name), value in self.optimizer_state.items():
            _, parameter = self.moved[place]
            if index == GRADIENT:
                give_gradient(parameter, value.to(device))
            else:
                optimizers[index].state[parameter][name] = value

    def forget(self) -> None:
        """Lets go of what has arrived."""
        self.memory, self.versions, self.state, self.optimizer_state = {}, {}, None, {}

    # --- in a thread ---

    def receive(
        self,
        lane: Lane,
        receipts: Lane,
        device: torch.device,
        state_device: torch.device,
        ready: Event,
    ) -> None:
        """Receives everything, and sends a receipt.

        Args:
            lane: the thread's.
            receipts: likewise, for the receipt.
            device: the stage's.
            state_device: where the optimizer's state is to be.
            ready: occurs when nothing uses the memory for it any more.
        """
        try:
            with torch.no_grad(), without_torch_function_of_subclasses():
                if self._takes_all(lane, device, state_device, ready):
                    receipts.send_object(None, self.peer)
                    receipts.settle()
        except BaseException as error:
            with self._has_changed:
                self._error = error
                self._has_changed.notify_all()
            raise

    def _takes_all(
        self, lane: Lane, device: torch.device, state_device: torch.device, ready: Event
    ) -> bool:
        """Receives everything; returns whether the move was not cancelled."""
        kind = MessageKind.WEIGHTS
        while kind is not MessageKind.LAST:
            kind, version, places = lane.receive_object(self.peer)
            if kind is MessageKind.CANCELLED:
                return False
            begin = time.perf_counter()
            values: Values = {}
            with side_stream(device, "moves"):
                ready.wait()
                weights = {
                    at: self._receive_weight(lane, at, device) if is_sent else self.memory[at]
                    for at, is_sent in places.items()
                }
                if kind is not MessageKind.WEIGHTS:
                    there = device if kind is MessageKind.STATE else state_device
                    for name, value in lane.receive_values(self.peer):
                        values[name] = value.to(there) if isinstance(value, Tensor) else value
            self.seconds += time.perf_counter() - begin
            # Copies from memory that is not pinned are complete by now.
            with self._has_changed:
                if kind is MessageKind.STATE:
                    self.state = values
                else:
                    self.versions.setdefault(version, {}).update(weights)
                    self.optimizer_state |= values
                self._has_changed.notify_all()
        return True

    def _receive_weight(self, lane: Lane, place: int, device: torch.device) -> Tensor:
        buffer = self.memory.get(place)
        if buffer is None:
            _, parameter = self.moved[place]
            return lane.receive_tensor(parameter, self.peer).to(device)
        if buffer.device.type == "cpu" and buffer.is_contiguous():
            lane.receive_into(buffer, self.peer)
        else:
            buffer.copy_(lane.receive_tensor(buffer, self.peer))
        return buffer


def transfers_of(
    holdings: Holdings, stage_of: Sequence[int]
) -> tuple[list[Outgoing], list[Incoming]]:
    """Returns the transfers from this stage to others, and those from others to this stage.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
    """
    uses, here = holdings.uses, holdings.stage
    outgoing: dict[int, Outgoing] = {}
    incoming: dict[int, Incoming] = {}
    holders = zip(holdings.all_holders(), holdings.all_holders(stage_of), strict=True)
    for number, (before, after) in enumerate(holders):
        source = before[0]
        for to in (to for to in after if to not in before and here in (source, to)):
            transfer: Transfer = (
                outgoing.setdefault(to, Outgoing(to))
                if source == here
                else incoming.setdefault(source, Incoming(source))
            )
            if number < len(uses):
                users = [layer for layer in uses[number].layers if stage_of[layer] == to]
                transfer.moved.append((users, uses[number].parameter))
            else:
                transfer.layers.append(number - len(uses))
    for transfer in (*outgoing.values(), *incoming.values()):
        transfer.moved.sort(key=lambda moved: min(moved[0]))
    return list(outgoing.values()), list(incoming.values())


def memory_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory on a device for the values of a tensor, in its layout."""
    if device.type == "cpu" and tensor.is_contiguous():
        return host_buffer(tuple(tensor.shape), tensor.dtype)
    return torch.empty_strided(tensor.shape, layout_of(tensor), dtype=tensor.dtype, device=device)


def _keep_for_compute(values: Iterable[Any]) -> None:
    """Called before the compute uses values that have arrived. A thread has allocated their memory
    on a stream of its own, which may otherwise reuse it while the compute still needs it.
    """
    for value in values:
        if isinstance(value, Tensor):
            keep_for_stream(value)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one place are bitwise equal; a NaN is equal to itself."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if flat[0].numel() % 8 == 0:
        # Eight bytes at a time.
        flat = [tensor.view(torch.int64) for tensor in flat]
    return torch.equal(*flat)
