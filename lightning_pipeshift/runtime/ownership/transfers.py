"""Sends the tensors of layers to their new owners, in threads and on connections of their own.

Both kinds of moves use it: those between two steps (:mod:`.migration`), and those in an
asynchronous pipeline (:mod:`.live_migration`). Weights are sent in numbered versions, in the order
in which they are needed, and the new owner waits for the version that it needs. With the last
version comes the optimizer's state. The old owner frees nothing before the new owner has
acknowledged that it has everything.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.devices.streams import Event, keep_for_stream, record_event, side_stream
from lightning_pipeshift.model.parameters.uses import flat_weights_forgotten, take_other_state
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What

# The lane of the new owners' acknowledgements: two stages may each get layers of the other.
_ANSWERS = 4

OptimizerState = dict[tuple[int, int, str], Any]
"""By the place of a parameter (see :class:`Transfer`), the index of an optimizer, and a name."""


class MessageKind(enum.Enum):
    """The kind of a message from the old owner."""

    STATE = "a layer's state other than parameters"
    WEIGHTS = "weights of some version"
    LAST = "the last weights, and the optimizer's state"
    CANCELLED = "the layers stay where they are"


class Message(NamedTuple):
    """A message from the old owner to the new one.

    Args:
        kind: its kind.
        number: the version of the weights; for a layer's state, the layer.
        weights: by place (see :class:`Transfer`).
        values: what is sent after the weights, by name.
    """

    kind: MessageKind
    number: int = -1
    weights: Mapping[int, Tensor] = {}
    values: Mapping[Any, Any] | None = None


class MovedTensor(NamedTuple):
    """A parameter, or a layer's other state, that changes its stage.

    Args:
        layers: those of the new stage that need it, in call order.
        parameter: the parameter; ``None`` for a layer's other state.
    """

    layers: list[int]
    parameter: nn.Parameter | None


class Transfer:
    """The tensors that one stage sends to another, as far as they have been sent or have arrived.

    Args:
        peer: the other stage.
        moves: the tensors, in the order in which they are needed. The index of one is its *place*:
            the same on both stages.
    """

    def __init__(self, peer: int, moves: list[MovedTensor]) -> None:
        self.peer = peer
        self.moves = moves
        self.parameters = {
            place: move.parameter for place, move in enumerate(moves) if move.parameter is not None
        }
        """By place."""
        self.layers = [move.layers[0] for move in moves if move.parameter is None]
        """Those that change their owner."""
        self.version = -1
        """The last version of the weights that the old owner has handed to its thread, or that the
        new owner uses; -1 for none.
        """
        self.memory: dict[int, Tensor] = {}
        """By place: for the old owner, copies of weights that it has sent and that may change; for
        the new one, the memory for its weights, if not each version has its own.
        """
        self.messages: SimpleQueue[tuple[Message, Event | None] | None] = SimpleQueue()
        """For the thread that sends: each with an event that occurs when the device has computed
        the values, if they are any; ``None`` ends the thread.
        """
        # What has arrived.
        self.versions: dict[int, dict[int, Tensor]] = {}
        """The weights, by version and place."""
        self.state: dict[int, dict[tuple[str, str], Any]] = {}
        """By layer, its state other than parameters."""
        self.optimizer_state: OptimizerState = {}
        self.error: BaseException | None = None
        """Why nothing more arrives."""

    def has_layer(self, layer: int, version: int) -> bool:
        """Whether everything that a layer needs of this has arrived.

        Args:
            layer: its number.
            version: that of the weights.
        """
        arrived = self.versions.get(version, {})
        return all(
            layer in self.state if move.parameter is None else place in arrived
            for place, move in enumerate(self.moves)
            if layer in move.layers
        )


def transfers_of(
    holdings: Holdings, stage_of: Sequence[int]
) -> tuple[list[Transfer], list[Transfer]]:
    """Returns the transfers from this stage to others, and those from others to this stage.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
    """
    uses, here = holdings.uses, holdings.stage
    found: list[tuple[int, int, int, int, MovedTensor]] = []
    places = zip(holdings.all_holders(), holdings.all_holders(stage_of), strict=True)
    for number, ((source, *others), new) in enumerate(places):
        parameter = uses[number].parameter if number < len(uses) else None
        for to in new:
            if to in (source, *others) or here not in (source, to):
                continue
            layers = [number - len(uses)]
            if parameter is not None:
                layers = [layer for layer in uses[number].layers if stage_of[layer] == to]
            found.append((min(layers), number, source, to, MovedTensor(layers, parameter)))
    moves: dict[tuple[int, int], list[MovedTensor]] = {}
    for _, _, source, to, move in sorted(found, key=itemgetter(0, 1)):
        moves.setdefault((source, to), []).append(move)
    return (
        [Transfer(to, each) for (source, to), each in moves.items() if source == here],
        [Transfer(source, each) for (source, to), each in moves.items() if to == here],
    )


class Transfers:
    """One stage's part in a change of owners.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
        optimizers: the same ones on every stage.
        threads: their threads send and receive.
        state_device: where the optimizer's state is to be when it has arrived.
    """

    def __init__(
        self,
        holdings: Holdings,
        stage_of: Sequence[int],
        optimizers: Sequence[Optimizer],
        threads: Threads,
        state_device: torch.device,
    ) -> None:
        self._holdings = holdings
        self._stage_of = list(stage_of)
        self._optimizers = optimizers
        self._threads = threads
        self._device = holdings.channels.device
        self._state_device = state_device
        self.exposed_seconds = 0.0
        """How long training has waited for the move on this stage so far."""
        self.transfer_seconds = 0.0
        """The seconds that this stage has spent on receiving, in threads, while training ran."""
        self.recorder: Recorder | None = None
        """Takes notes of training's waits."""
        self._has_begun = False
        """Whether the new owners own their layers."""
        self._has_changed = threading.Condition()
        self._work: list[Future[None]] | None = None
        self._outgoing, self._incoming = transfers_of(holdings, stage_of)

    def _start_threads(self) -> None:
        """Begins to send what is handed over, and to receive."""
        ready = self._mark()
        self._work = [
            *(self._threads.submit(partial(self._send, self._lanes(), t)) for t in self._outgoing),
            *(
                self._threads.submit(partial(self._receive, self._lanes(), t, ready))
                for t in self._incoming
            ),
        ]

    def _lanes(self) -> tuple[Lane, Lane]:
        """A thread's lanes, for what moves and for answers. Their stages are those of before the
        move.
        """
        channels = self._holdings.channels
        return channels.bulk(), channels.bulk(_ANSWERS)

    def _mark(self) -> Event:
        """Records the end of the work queued so far, whose results threads may then read."""
        return record_event(self._device)

    # --- in threads ---

    def _send(self, lanes: tuple[Lane, Lane], outgoing: Transfer) -> None:
        lane, answers = lanes
        # The main thread may run user code that sees parameters as values.
        with torch.no_grad(), without_torch_function_of_subclasses():
            kind = MessageKind.WEIGHTS
            while kind in (MessageKind.WEIGHTS, MessageKind.STATE):
                item = outgoing.messages.get()
                if item is None:
                    return
                kind = item[0].kind
                self._send_one(lane, outgoing, *item)
                # It may be long until the next one: what was sent is not kept until then.
                del item
        lane.settle()
        if kind is MessageKind.LAST:
            answers.receive_object(outgoing.peer)

    def _send_one(
        self, lane: Lane, outgoing: Transfer, message: Message, ready: Event | None
    ) -> None:
        to = outgoing.peer
        with side_stream(self._device, "moves"):
            if ready is not None:
                ready.wait()
            weights = self._weights_to_send(outgoing, message)
            places = {place: place in weights for place in message.weights}
            lane.send_object((message.kind, message.number, places), to)
            for weight in weights.values():
                lane.send_tensor(weight, to)
            if message.values is not None:
                lane.send_values(message.values, to)

    def _weights_to_send(self, outgoing: Transfer, message: Message) -> Mapping[int, Tensor]:
        """Those of a message's weights that the new owner does not have, in the sending thread."""
        return message.weights

    def _receive(self, lanes: tuple[Lane, Lane], incoming: Transfer, ready: Event) -> None:
        try:
            with torch.no_grad(), without_torch_function_of_subclasses():
                self._take_in(lanes, incoming, ready)
        except BaseException as error:
            with self._has_changed:
                incoming.error = error
                self._has_changed.notify_all()
            raise

    def _take_in(self, lanes: tuple[Lane, Lane], incoming: Transfer, ready: Event) -> None:
        (lane, answers), source = lanes, incoming.peer
        kind = MessageKind.WEIGHTS
        while kind is not MessageKind.LAST:
            kind, number, places = lane.receive_object(source)
            if kind is MessageKind.CANCELLED:
                return
            begin = time.perf_counter()
            with side_stream(self._device, "moves"):
                ready.wait()
                weights = {
                    place: self._receive_weight(lane, incoming, place)
                    if is_sent
                    else incoming.memory[place]
                    for place, is_sent in places.items()
                }
                values: dict[Any, Any] = {}
                if kind is not MessageKind.WEIGHTS:
                    is_state = kind is MessageKind.STATE
                    device = self._device if is_state else self._state_device
                    values = {
                        name: value.to(device) if isinstance(value, Tensor) else value
                        for name, value in lane.receive_values(source)
                    }
            self.transfer_seconds += time.perf_counter() - begin
            # Copies from memory that is not pinned are complete by now.
            with self._has_changed:
                if kind is MessageKind.STATE:
                    incoming.state[number] = values
                else:
                    incoming.versions.setdefault(number, {}).update(weights)
                if kind is MessageKind.LAST:
                    incoming.optimizer_state = values
                self._has_changed.notify_all()
        answers.send_object(None, source)
        answers.settle()

    def _receive_weight(self, lane: Lane, incoming: Transfer, place: int) -> Tensor:
        buffer = incoming.memory.get(place)
        if buffer is None:
            return lane.receive_tensor(incoming.parameters[place], incoming.peer).to(self._device)
        if buffer.device.type == "cpu" and buffer.is_contiguous():
            lane.receive_into(buffer, incoming.peer)
        else:
            buffer.copy_(lane.receive_tensor(buffer, incoming.peer))
        return buffer

    # --- where the stage computes ---

    def _hand_over(self, outgoing: Transfer, *messages: Message) -> None:
        """Lets the thread send messages, with the values that are computed by then."""
        ready = self._mark()
        for message in messages:
            outgoing.messages.put((message, ready))

    def _state_message(self, layer: int) -> Message:
        """The state of a layer other than parameters, as it is now."""
        module, _ = self._holdings.layers[layer]
        state = {
            path: value.clone() if isinstance(value, Tensor) else value
            for path, value in self._holdings.state_of(module).items()
        }
        return Message(MessageKind.STATE, layer, values=state)

    def _optimizer_state_of(self, outgoing: Transfer) -> OptimizerState:
        return {
            (place, index, name): value
            for place, parameter in outgoing.parameters.items()
            for index, optimizer in enumerate(self._optimizers)
            for name, value in optimizer.state.get(parameter, {}).items()
        }

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        """Context that counts its duration as time that training waits."""
        recorder, begin = self.recorder, time.perf_counter()
        yield
        end = time.perf_counter()
        self.exposed_seconds += end - begin
        if recorder is not None:
            recorder.add(What.MOVES, "layers that move", begin, end)

    def _await(self, incoming: Transfer, is_there: Callable[[], bool]) -> None:
        """Returns when something has arrived.

        Raises:
            StageFailedError: the old owner ended before it had sent it.
        """
        with self._exposed(), self._has_changed:
            self._has_changed.wait_for(lambda: is_there() or incoming.error is not None)
        if not is_there():
            assert incoming.error is not None
            raise incoming.error

    def _keep_for_compute(self, values: Iterable[Any]) -> None:
        """Called before the compute uses values that have arrived. A thread has allocated their
        memory on a stream of its own, which may otherwise reuse it while the compute still needs
        it.
        """
        for value in values:
            if isinstance(value, Tensor):
                keep_for_stream(value)

    def _take_state(self, incoming: Transfer, layer: int) -> None:
        """Gives a layer its state other than parameters."""
        module, _ = self._holdings.layers[layer]
        state = incoming.state.pop(layer)
        self._keep_for_compute(state.values())
        with torch.no_grad(), flat_weights_forgotten(module):
            take_other_state(module, state)

    def _take_optimizer_state(self, incoming: Transfer) -> None:
        self._keep_for_compute(incoming.optimizer_state.values())
        for (place, index, name), value in incoming.optimizer_state.items():
            self._optimizers[index].state[incoming.parameters[place]][name] = value

    # --- the end ---

    def abandon(self) -> None:
        """Gives up the move, unless the new owners own their layers already: then nothing more is
        handed over, as the run is at its end.
        """
        for outgoing in self._outgoing:
            cancelled = Message(MessageKind.CANCELLED), None
            outgoing.messages.put(None if self._has_begun else cancelled)

    def cancel(self) -> None:
        """Gives up a move that has not begun on all stages, and returns when no transfer is in
        progress.
        """
        self.abandon()
        for work in (self._work or ()) if not self._has_begun else ():
            work.result()
