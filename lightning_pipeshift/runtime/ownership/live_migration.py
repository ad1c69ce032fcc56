"""Moves layers between the stages of an asynchronous pipeline, which never drains for it.

CN115454655A: minibatches before the cut-over keep the old structure, forward and backward, and
later ones have the new structure. The old owner goes on to update the layers until its last
minibatch has returned, so the new owner gets their weights again and again: the old owner sends its
newest before each of its forwards, in a thread and on a connection of its own. The new owner uses
for each forward the version that the old owner would have used, until the last update of the old
owner is among them: so which weights a forward uses does not depend on the speed of either. The
last version comes with the optimizer's state, which the patent does not mention. The old owner
frees nothing before the new owner has acknowledged it.

A cut-over is the first minibatch of an update, so the gradients of one update all belong to one
owner.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.devices.streams import Event, record_event, side_stream
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.parameters.uses import (
    flat_weights_forgotten,
    hold,
    other_state,
    take_other_state,
)
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdate
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import TensorMove, moves_of
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What

# The lane of the new owners' acknowledgements: two stages may each get layers of the other.
_ANSWERS = 4

OptimizerState = dict[tuple[int, int, str], Any]
"""By the index of a parameter among those that one stage sends to another, that of the optimizer,
and a name.
"""


class _Kind(enum.Enum):
    """The kind of a message from the old owner."""

    STATE = "the layers' state other than parameters"
    WEIGHTS = "a version of the weights"
    LAST_WEIGHTS = "the last version, and the optimizer's state"
    CANCELLED = "the layers stay where they are"


@dataclass(frozen=True)
class _Message:
    kind: _Kind
    version: int = -1
    """How many updates are in the weights."""
    weights: Mapping[int, Tensor] = field(default_factory=dict)
    """By the index of a parameter among those that one stage sends to another."""
    values: Any = None
    ready: Event | None = None
    """Occurs when the device has computed the values."""


@dataclass
class _Outgoing:
    """The tensors that one stage sends to another.

    Args:
        first: the first minibatch before whose forward weights are sent.
        moves: the tensors.
        messages: for the thread that sends.
        sent: the last version that was handed to it.
    """

    first: int
    moves: list[TensorMove]
    messages: SimpleQueue[_Message | None] = field(default_factory=SimpleQueue)
    sent: int = -1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters among the tensors."""
        return [move.parameter for move in self.moves if move.parameter is not None]


@dataclass
class _Incoming:
    """The tensors that one stage gets from another, as far as they have arrived.

    Args:
        source: the old owner.
        moves: the tensors.
    """

    source: int
    moves: list[TensorMove]
    versions: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    optimizer_state: OptimizerState | None = None
    state: dict[tuple[int, str, str], Any] | None = None
    error: BaseException | None = None
    late: list[LateUpdate] = field(default_factory=list)
    """Updates that wait for the last version of the weights."""
    installed: int = -1
    """The version of the weights that the parameters have; -1 for none."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters among the tensors."""
        return [move.parameter for move in self.moves if move.parameter is not None]


class LiveMigration:
    """One stage's part in a change of owners, from its announcement to its end. Every stage of the
    virtual machine makes one, before the same minibatch.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
        optimizers: the same ones on every stage.
        threads: their threads send and receive.
        earliest: the first minibatch that may be the cut-over; the cut-over is the next one that
            begins an update.
        versions: the stage's weights.
        deferred: see :meth:`Holdings.settle`.
        newest: returns how many updates are in the weights that another stage uses in the forward
            of a minibatch.
    """

    def __init__(
        self,
        holdings: Holdings,
        stage_of: Sequence[int],
        optimizers: Sequence[Optimizer],
        threads: Threads,
        earliest: int,
        versions: WeightVersions,
        deferred: DeferredInit,
        newest: Callable[[int, int], int],
    ) -> None:
        self._holdings = holdings
        self._stage_of = stage_of
        self._optimizers = optimizers
        self.earliest = earliest
        self.begin: int | None = None
        """The cut-over, when it is known."""
        self.update = sys.maxsize
        """The number of the first update of the new owners, likewise."""
        self._versions = versions
        self._deferred = deferred
        self._newest = newest
        self.exposed_seconds = 0.0
        """How long training has waited for the move on this stage."""
        self.recorder: Recorder | None = None
        """Takes notes of these waits."""
        self.transfer_seconds = 0.0
        """How long this stage has been receiving weights, beside training."""
        self.sent_bytes = 0
        """The bytes of the weights that this stage has sent."""
        self._has_changed = threading.Condition()
        self._has_begun = self._is_placed = False
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        here = holdings.stage
        for move in moves_of(holdings, stage_of):
            if move.source == here:
                first = earliest - max(0, here - move.target)
                found = self._outgoing.setdefault(move.target, _Outgoing(first, []))
                found.moves.append(move)
            else:
                self._incoming.setdefault(move.source, _Incoming(move.source, [])).moves.append(
                    move
                )
        self._work: list[Future[None]] = [
            threads.submit(partial(self._send, to, outgoing))
            for to, outgoing in self._outgoing.items()
        ]
        self._work += [
            threads.submit(partial(self._receive, incoming)) for incoming in self._incoming.values()
        ]

    # --- in threads ---

    @torch.no_grad()
    def _send(self, to: int, outgoing: _Outgoing) -> None:
        channels = self._holdings.channels
        lane, device = channels.bulk(), channels.device
        while (message := outgoing.messages.get()) is not None:
            lane.send_object((message.kind, message.version, list(message.weights)), to)
            with side_stream(device, "moves"):
                if message.ready is not None:
                    message.ready.wait()
                for weight in message.weights.values():
                    lane.send_tensor(weight, to)
                if message.values is not None:
                    lane.send_values(message.values, to)
            self._versions.unpin(message.weights.values())
            lane.settle()
            if message.kind is _Kind.LAST_WEIGHTS:
                channels.bulk(_ANSWERS).receive_object(to)
            if message.kind in (_Kind.LAST_WEIGHTS, _Kind.CANCELLED):
                return

    @torch.no_grad()
    def _receive(self, incoming: _Incoming) -> None:
        try:
            self._take_in(incoming)
        except BaseException as error:
            with self._has_changed:
                incoming.error = error
                self._has_changed.notify_all()
            raise

    def _take_in(self, incoming: _Incoming) -> None:
        channels, source = self._holdings.channels, incoming.source
        lane, device = channels.bulk(), channels.device
        weights: dict[int, Tensor] = {}
        while True:
            kind, version, places = lane.receive_object(source)
            if kind is _Kind.CANCELLED:
                return
            values: dict[Any, Any] = {}
            begin = time.perf_counter()
            with side_stream(device, "moves"):
                for place in places:
                    like = incoming.parameters[place]
                    buffer = host_buffer(tuple(like.shape), like.dtype)
                    lane.receive_into(buffer, source)
                    weights[place] = buffer.to(device)
                if kind is not _Kind.WEIGHTS:
                    values = {
                        name: value.to(device) if isinstance(value, Tensor) else value
                        for name, value in lane.receive_values(source)
                    }
            self.transfer_seconds += time.perf_counter() - begin
            with self._has_changed:
                if kind is _Kind.STATE:
                    incoming.state = values
                else:
                    incoming.versions[version] = [weights[place] for place in sorted(weights)]
                if kind is _Kind.LAST_WEIGHTS:
                    incoming.optimizer_state = values
                self._has_changed.notify_all()
            if kind is _Kind.LAST_WEIGHTS:
                answers = channels.bulk(_ANSWERS)
                answers.send_object(None, source)
                answers.settle()
                return

    # --- the old owner ---

    def end_action(self, action: Action) -> None:
        """Called when an action has ended: the old owner's last forward may be over."""
        if action.kind is not Kind.FORWARD or action.microbatch + 1 != self.begin:
            return
        for outgoing in self._outgoing.values():
            layers = self._layers_with_state(outgoing.moves)
            if not layers:
                continue
            state = {
                (layer, *path): value.clone() if isinstance(value, Tensor) else value
                for layer in layers
                for path, value in self._holdings.state_of(self._holdings.layers[layer][0]).items()
            }
            self._hand_over(outgoing, _Message(_Kind.STATE, values=state))

    def _hand_over(self, outgoing: _Outgoing, message: _Message) -> None:
        self._versions.pin(message.weights.values())
        ready = record_event(self._holdings.device)
        outgoing.messages.put(
            _Message(message.kind, message.version, message.weights, message.values, ready)
        )

    def send_newest(self, minibatch: int) -> None:
        """Sends the weights as they are now to the new owners, if they need this version.

        Args:
            minibatch: the next one.
        """
        newest = min(self._versions.num_updates, self.update)
        for outgoing in self._outgoing.values():
            # With two versions, the new owner needs the one that the next update makes old.
            is_urgent = self._versions.delays and self.begin is not None
            if outgoing.sent >= newest or (minibatch < outgoing.first and not is_urgent):
                continue
            parameters, is_first = outgoing.parameters, outgoing.sent < 0
            outgoing.sent = newest
            weights = {
                place: parameter.data
                for place, parameter in enumerate(parameters)
                if is_first or parameter.requires_grad
            }
            self.sent_bytes += sum(weight.nbytes for weight in weights.values())
            if newest < self.update:
                self._hand_over(outgoing, _Message(_Kind.WEIGHTS, newest, weights))
                continue
            state = {
                (place, index, name): value
                for place, parameter in enumerate(parameters)
                for index, optimizer in enumerate(self._optimizers)
                for name, value in optimizer.state.get(parameter, {}).items()
            }
            self._hand_over(outgoing, _Message(_Kind.LAST_WEIGHTS, newest, weights, state))

    # --- a stage's turn ---

    def before_turn(self, minibatch: int, update: int, ends_update: bool) -> list[LateUpdate]:
        """Prepares the stage for its next forward.

        Args:
            minibatch: its number.
            update: the number of the update that its gradient is part of.
            ends_update: whether it is the last one of that update.

        Returns:
            updates that are to be made before it.
        """
        if self.begin is None and ends_update and minibatch + 1 >= self.earliest:
            self.begin, self.update = minibatch + 1, update + 1
        self.send_newest(minibatch)
        if self.begin is None or minibatch < self.begin:
            return []
        if not self._has_begun:
            self._begin()
        for incoming in self._incoming.values():
            self._install(incoming, self._version_for(incoming.source, minibatch, update))
        self._free_if_acknowledged()
        return self._take_late()

    def _version_for(self, source: int, minibatch: int, update: int) -> int:
        """How many updates are in the weights that a forward on this stage uses."""
        done = self._versions.num_updates
        if self._versions.delays:
            # Its first update is made to weights that no forward of that update uses, unless the
            # pipeline has begun anew with it.
            is_first = update == self.update != self._versions.began_anew_with
            return self.update - is_first
        if source < self._holdings.stage:
            done = self._newest(source, minibatch)
        return min(done, self.update)

    def _begin(self) -> None:
        self._has_begun = True
        self._holdings.place(self._stage_of, keeps_old=True)
        for incoming in self._incoming.values():
            if not self._layers_with_state(incoming.moves):
                continue
            self._await(incoming, partial(_has_state, incoming))
            by_layer: dict[int, dict[tuple[str, str], Any]] = {}
            for (layer, owner, name), value in (incoming.state or {}).items():
                by_layer.setdefault(layer, {})[owner, name] = value
            for layer, state in by_layer.items():
                module, _ = self._holdings.layers[layer]
                with torch.no_grad(), flat_weights_forgotten(module):
                    take_other_state(module, state)
        self._follow()

    def _follow(self) -> None:
        leaving = {id(move.parameter) for out in self._outgoing.values() for move in out.moves}
        self._versions.follow(
            use.parameter for use in self._holdings.held if id(use.parameter) not in leaving
        )

    def _install(self, incoming: _Incoming, version: int) -> None:
        if incoming.installed >= version:
            return
        self._await(incoming, lambda: version in incoming.versions)
        weights = incoming.versions[version]
        for older in [known for known in incoming.versions if known <= version]:
            del incoming.versions[older]
        with torch.no_grad(), flat_weights_forgotten(self._holdings.root):
            for parameter, values in zip(incoming.parameters, weights, strict=True):
                hold(parameter, values)
        if incoming.installed < 0:
            # They are real parameters from now on.
            self._follow()
        incoming.installed = version
        if self._versions.delays and version < self.update == self._versions.num_updates:
            # This stage is ahead: its next forwards use the weights before its newest.
            self._versions.set_before(incoming.parameters, weights)
        if version == self.update:
            assert incoming.optimizer_state is not None
            for (place, index, name), value in incoming.optimizer_state.items():
                parameter = incoming.parameters[place]
                self._optimizers[index].state[parameter][name] = value

    def _await(self, incoming: _Incoming, is_there: Callable[[], bool]) -> None:
        begin = time.perf_counter()
        with self._has_changed:
            self._has_changed.wait_for(lambda: is_there() or incoming.error is not None)
        end = time.perf_counter()
        self.exposed_seconds += end - begin
        if self.recorder is not None:
            self.recorder.add(What.MOVES, "layers that move", begin, end)
        if not is_there():
            assert incoming.error is not None
            raise incoming.error

    def _layers_with_state(self, moves: Sequence[TensorMove]) -> list[int]:
        layers = [move.layers[0] for move in moves if move.parameter is None]
        return [layer for layer in layers if other_state(self._holdings.layers[layer][0])]

    def withhold(self, tag: Any) -> None:
        """Called before an update of this stage: takes the gradients of layers whose last weights
        have not come into use yet.

        Args:
            tag: what belongs to the update.
        """
        if not self._has_begun:
            return
        for incoming in self._incoming.values():
            if incoming.installed >= self.update:
                continue
            if self._versions.delays:
                if self._versions.num_updates >= self.update:
                    self._install(incoming, self.update)
                continue
            gradients = [(p, p.grad) for p in incoming.parameters if p.grad is not None]
            for parameter, _ in gradients:
                parameter.grad = None
            if gradients:
                incoming.late.append(LateUpdate(tag, gradients))

    def _take_late(self) -> list[LateUpdate]:
        found = []
        for incoming in self._incoming.values():
            if incoming.installed >= self.update:
                late, incoming.late = incoming.late, []
                found += late
        return found

    # --- the end ---

    @property
    def layers(self) -> frozenset[int]:
        """The layers that come to this stage or leave it; empty when the move is over."""
        if self._is_placed:
            return frozenset()
        moves = [move for outgoing in self._outgoing.values() for move in outgoing.moves]
        moves += [move for incoming in self._incoming.values() for move in incoming.moves]
        return frozenset(layer for move in moves for layer in move.layers)

    def _free_if_acknowledged(self) -> None:
        versions = [outgoing.sent for outgoing in self._outgoing.values()]
        versions += [incoming.installed for incoming in self._incoming.values()]
        if self._is_placed or any(version < self.update for version in versions):
            return
        if all(work.done() for work in self._work):
            self._place()

    def _place(self) -> None:
        for work in self._work:
            work.result()
        self._is_placed = True
        self._holdings.place(self._stage_of)
        self._holdings.settle(self._optimizers, final=True, deferred=self._deferred)
        self._follow()

    def finish(self) -> None:
        """Waits until the layers are at their new owners, when these have begun to use them."""
        if not self._is_placed:
            self._place()

    def settle(self, minibatch: int) -> list[LateUpdate]:
        """Called when the pipeline is empty: ends the move, if it has begun.

        Args:
            minibatch: the next one.

        Returns:
            updates that are still to be made.
        """
        self.send_newest(minibatch)
        if not self._has_begun:
            return []
        for incoming in self._incoming.values():
            self._install(incoming, self.update)
        self.finish()
        return self._take_late()

    def abandon(self) -> None:
        """Gives up a move that has not begun: no layer changes its owner."""
        for outgoing in self._outgoing.values():
            outgoing.messages.put(None if self._has_begun else _Message(_Kind.CANCELLED))

    def cancel(self) -> None:
        """Gives up a move that has not begun on all stages, and returns when no transfer is in
        progress.
        """
        self.abandon()
        for work in self._work if not self._has_begun else ():
            work.result()


def _has_state(incoming: _Incoming) -> bool:
    return incoming.state is not None
