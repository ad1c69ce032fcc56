"""Moves layers to other stages while training runs.

CN115454655A announces a move, prepares it, and sends the weights of moving layers in threads and on
connections of their own, while both stages compute. A move has a *cut-over*, a turn of its stages
(a step, or a minibatch): before it the layers are the old owners', and from it on the new owners'.
A forward uses exactly the version of the weights that it would have used without the move. With the
last version come the optimizer's state, which the patent does not mention, and the layers' other
state. The old owner frees nothing before the new one has acknowledged that it has everything.

Between two steps nothing is in flight: a layer has one version, in one memory. The old owner sends
it as soon as it has taken its optimizer step, while the stages before it are still at their last
backwards. The cut-over is the next step. As user code may run in between, the old owner compares
then what it has sent with what it has. In the step, a call of a layer waits for that layer only;
what is not needed before the step's end comes after all layers.

In an asynchronous pipeline, which never drains, minibatches from before the cut-over go on at the
old owner, and their updates too. It sends its newest weights before each of its forwards, until its
last update is among them; each version has its own memory. The cut-over is the first minibatch of
an update, so the gradients of one update all belong to one owner.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from lightning_pipeshift.devices.streams import Event, record_event
from lightning_pipeshift.model.parameters.uses import flat_weights_forgotten, hold, other_state
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.lane import Subject
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.transfers import (
    GRADIENT,
    Incoming,
    Message,
    MessageKind,
    Outgoing,
    Transfer,
    memory_like,
    transfers_of,
)
from lightning_pipeshift.runtime.ownership.weight_versions import InFlight, WeightVersions
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What

# Versions between two steps: while user code may change the weights, and that of the step.
_EARLY, _FINAL = 0, 1


class Turn(NamedTuple):
    """The next step of a stage; in an asynchronous schedule, its next forward.

    Args:
        number: counts them.
        update: the number of the update that its gradient is part of.
        ends_update: whether it is the last one of that update.
        keeps_gradients: whether gradients from before a step are still needed.
    """

    number: int
    update: int = 0
    ends_update: bool = True
    keeps_gradients: bool = False


class Moving(NamedTuple):
    """The layers that take memory of a stage because they move.

    Args:
        run: those that run here besides the stage's own, while minibatches are in flight.
        leaving: those that the stage still holds, and another one owns already.
        copied: those of which it holds the weights in addition, as they will move.
    """

    run: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()


class Migration:
    """One stage's part in a change of owners, from its announcement to its end. Every stage of the
    virtual machine makes one, at the same turn.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
        optimizers: the same ones on every stage.
        threads: their threads send and receive.
        in_flight: the minibatches in flight; ``None`` between two steps.
    """

    def __init__(
        self,
        holdings: Holdings,
        stage_of: Sequence[int],
        optimizers: Sequence[Optimizer],
        threads: Threads,
        in_flight: InFlight | None = None,
    ) -> None:
        self._holdings, self._stage_of = holdings, list(stage_of)
        self._optimizers, self._in_flight = optimizers, in_flight
        self._device = device = holdings.channels.device
        self.begin: int | None = None
        """The cut-over, when it is known."""
        self.update = sys.maxsize
        """The version of the weights at the new owners' first update, likewise."""
        self.has_begun = self.is_over = False
        """Whether the new owners own their layers, and whether the old ones have freed them."""
        self.sent_bytes = 0
        """The bytes of the weights that this stage has sent of minibatches in flight."""
        self.exposed_seconds = 0.0
        """How long training has waited for the move on this stage so far."""
        self.recorder: Recorder | None = None
        """Takes notes of training's waits."""
        self._outgoing, self._incoming = transfers_of(holdings, stage_of)
        self._awaited: dict[int, None] = {}
        """The layers that a step has not waited for yet."""
        # Of the optimizer's state some may stay in host memory: see :meth:`Holdings.settle`.
        state_device = torch.device("cpu") if in_flight is None else device
        unpin = None if in_flight is None else in_flight.versions.unpin
        for incoming in self._incoming if in_flight is None else ():
            for place, parameter in enumerate(incoming.parameters):
                incoming.memory[place] = memory_like(parameter, device)
        ready, bulk = self._mark(), holdings.channels.bulk
        moves, receipts = Subject.MOVES, Subject.RECEIPTS
        self._work: list[Future[None]] = []
        for outgoing in self._outgoing:
            send = partial(outgoing.send, bulk(moves), bulk(receipts), device, unpin)
            self._work.append(threads.submit(send))
        for incoming in self._incoming:
            args = bulk(moves), bulk(receipts), device, state_device, ready
            self._work.append(threads.submit(partial(incoming.receive, *args)))

    @property
    def _versions(self) -> WeightVersions:
        """The weights of minibatches in flight."""
        assert self._in_flight is not None
        return self._in_flight.versions

    @property
    def moving(self) -> Moving:
        """The layers that take memory on this stage because they move."""
        if self.is_over:
            return Moving()
        if self._in_flight is not None:
            transfers = (*self._outgoing, *self._incoming)
            return Moving(run=frozenset().union(*(each.needed_by for each in transfers)))
        leaving = frozenset(layer for each in self._outgoing for layer in each.layers)
        if self.has_begun:
            return Moving(leaving=leaving)
        return Moving(copied=leaving.union(*(each.layers for each in self._incoming)))

    @property
    def transfer_seconds(self) -> float:
        """The seconds that this stage has spent on receiving, in threads, while training ran."""
        return sum(incoming.seconds for incoming in self._incoming)

    def is_over_by(self, turn: Turn) -> bool:
        """Whether the move has surely ended on every stage: the same answer on all of them, without
        a message. With a cut-over ``c``, the last minibatch on the old owners is ``c - 1``, and
        ``N`` stages have run its backward before their turns for minibatch ``c + N - 1``.
        """
        if self._in_flight is None or self.begin is None:
            return self.is_over
        last = self.begin + self._in_flight.num_stages - 1
        return turn.number >= last and turn.update > self.update

    # --- the old owner ---

    def send_newest(self, number: int) -> None:
        """Sends the weights as they are now, to the new owners that need them. Called after an
        update.

        Args:
            number: of the next turn.
        """
        if self._in_flight is None:
            for outgoing in self._outgoing:
                if outgoing.version < _EARLY:
                    self._hand_over(outgoing, *outgoing.weights(_EARLY, may_change=True))
            return
        versions, _, earliest, _ = self._in_flight
        newest = min(versions.num_updates, self.update)
        for outgoing in self._outgoing:
            first = earliest - max(0, self._holdings.stage - outgoing.peer)
            # With two versions, the new owner needs the one that the next update makes old.
            is_urgent = versions.delays and self.begin is not None
            if outgoing.version >= newest or (number < first and not is_urgent):
                continue
            weights = {
                place: parameter.data
                for place, parameter in enumerate(outgoing.parameters)
                if outgoing.version < 0 or parameter.requires_grad
            }
            outgoing.version = newest
            self.sent_bytes += sum(weight.nbytes for weight in weights.values())
            message = Message(MessageKind.WEIGHTS, newest, weights)
            if newest == self.update:
                state = outgoing.optimizer_state(self._optimizers)
                message = message._replace(kind=MessageKind.LAST, values=state)
            # The optimizer changes a copy until they are sent.
            versions.pin(weights.values())
            self._hand_over(outgoing, message)

    def end_action(self, action: Action) -> None:
        """Called when the action of a minibatch in flight has ended: the old owner's last forward
        may be over.
        """
        if action.kind is Kind.FORWARD and action.microbatch + 1 == self.begin:
            for outgoing in self._outgoing:
                if self._has_state(outgoing):
                    self._hand_over(outgoing, outgoing.state(self._holdings))

    def _has_state(self, transfer: Transfer) -> bool:
        """Whether the new owner waits for layers' other state. It would be late if there is none,
        as it would have to wait for the old owner's last forward.
        """
        layers = self._holdings.layers
        return any(other_state(layers[layer][0]) for layer in transfer.layers)

    def _send_rest(self, outgoing: Outgoing, keeps_gradients: bool) -> None:
        """Sends what the new owner lacks, now that nothing of it changes any more."""
        outgoing.drop_unsent()
        rest = outgoing.optimizer_state(self._optimizers)
        for place, parameter in enumerate(outgoing.parameters):
            if parameter.grad is not None and keeps_gradients:
                rest[place, GRADIENT, ""] = parameter.grad
            if self._holdings.stage not in self._holdings.holders_of(parameter):
                # From now on the gradient is on its way.
                parameter.grad = None
        state, final = outgoing.state(self._holdings), outgoing.weights(_FINAL, may_change=False)
        self._hand_over(outgoing, state, *final, Message(MessageKind.LAST, _FINAL, values=rest))

    def _hand_over(self, outgoing: Outgoing, *messages: Message) -> None:
        """Lets the thread send messages, with the values that are computed by then."""
        outgoing.put(self._mark(), *messages)

    def _mark(self) -> Event:
        """Records the end of the work queued so far, whose results threads may then read."""
        return record_event(self._device)

    # --- a stage's turn ---

    def before_turn(self, turn: Turn) -> bool:
        """Prepares the stage for its next turn: in an asynchronous pipeline, waits for the weights
        of its forward. Returns whether the turn is the cut-over.
        """
        if self.is_over:
            return False
        if self._in_flight is None:
            self.begin = turn.number
            with self._exposed():
                self._begin_step(turn.keeps_gradients)
            return True
        if self.begin is None and turn.ends_update and turn.number + 1 >= self._in_flight.earliest:
            self.begin, self.update = turn.number + 1, turn.update + 1
        self.send_newest(turn.number)
        if self.begin is None or turn.number < self.begin:
            return False
        if not self.has_begun:
            self._begin_in_flight()
        for incoming in self._incoming:
            self._install(incoming, self._version_for(incoming.peer, turn, self._in_flight))
        transfers = (*self._outgoing, *self._incoming)
        if all(each.uses(self.update) for each in transfers) and all(x.done() for x in self._work):
            self.finish()
        return turn.number == self.begin

    def _begin_step(self, keeps_gradients: bool) -> None:
        """Gives the tensors that are to arrive their memory: only their values are missing."""
        holdings, is_common = self._holdings, self._holdings.is_common
        holdings.place(self._stage_of)
        with torch.no_grad(), flat_weights_forgotten(holdings.root):
            for incoming in self._incoming:
                self._awaited |= dict.fromkeys(sorted(incoming.needed_by))
                for place, parameter in enumerate(incoming.parameters):
                    hold(parameter, incoming.memory[place])
                    parameter.grad = None
                modules = [holdings.layers[layer][0] for layer in incoming.layers]
                for buffer in [buffer for module in modules for buffer in module.buffers()]:
                    # Before the step: in it they have another class.
                    if is_common is not None and buffer.is_meta and not is_common(buffer):
                        hold(buffer, memory_like(buffer, self._device))
        self.has_begun = True
        for outgoing in self._outgoing:
            self._send_rest(outgoing, keeps_gradients)

    @property
    def awaited(self) -> list[int]:
        """The layers that are on their way to this stage in a step."""
        return list(self._awaited)

    def await_layer(self, layer: int) -> None:
        """Returns when a layer has arrived and can run, in a step.

        Args:
            layer: its number.

        Raises:
            StageFailedError: the old owner ended before it had sent the layer.
        """
        self._awaited.pop(layer, None)
        for incoming in self._incoming:
            if layer in incoming.needed_by:
                self._await(incoming, partial(incoming.has_layer, layer, _FINAL))
                if layer in incoming.layers:
                    incoming.give_state(self._holdings, layer)

    def _version_for(self, source: int, turn: Turn, in_flight: InFlight) -> int:
        """How many updates are in the weights that a forward on this stage uses."""
        versions = in_flight.versions
        if versions.delays:
            # The first update at the new owner changes weights that no forward of that update has
            # used, unless the pipeline was empty when the update began.
            is_first = turn.update == self.update != versions.began_anew_with
            return self.update - is_first
        is_behind = source < self._holdings.stage
        done = in_flight.newest(source, turn.number) if is_behind else versions.num_updates
        return min(done, self.update)

    def _begin_in_flight(self) -> None:
        self.has_begun = True
        self._holdings.place(self._stage_of, keeps_old=True)
        for incoming in self._incoming:
            if self._has_state(incoming):
                self._await(incoming, incoming.has_state)
                for layer in incoming.layers:
                    incoming.give_state(self._holdings, layer)
        self._follow()

    def _follow(self) -> None:
        leaving = {id(x) for outgoing in self._outgoing for x in outgoing.parameters}
        self._versions.follow(
            use.parameter for use in self._holdings.held if id(use.parameter) not in leaving
        )

    def _install(self, incoming: Incoming, version: int) -> None:
        if incoming.uses(version):
            return
        self._await(incoming, lambda: version in incoming.versions)
        weights = incoming.take_weights(version)
        with torch.no_grad(), flat_weights_forgotten(self._holdings.root):
            for parameter, values in weights:
                hold(parameter, values)
        if incoming.version < 0:
            # They are real parameters from now on.
            self._follow()
        incoming.version = version
        if self._versions.delays and version < self.update == self._versions.num_updates:
            # This stage is ahead: its next forwards use the weights before its newest.
            self._versions.set_before(weights)
        if version == self.update:
            incoming.give_optimizer_state(self._optimizers, self._device)

    def withhold(self, late: LateUpdates, tag: Any) -> None:
        """Called before an update of this stage: lets that of parameters wait whose last weights
        have not come into use yet.

        Args:
            late: the updates that wait.
            tag: what belongs to the update.
        """
        for incoming in self._incoming if self.has_begun else ():
            if not self._versions.delays and not incoming.uses(self.update):
                late.withhold(incoming.parameters, partial(incoming.uses, self.update), tag)
            elif self._versions.num_updates >= self.update:
                self._install(incoming, self.update)

    # --- what has arrived ---

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        """Context that counts its duration as time that training waits."""
        recorder, begin = self.recorder, time.perf_counter()
        yield
        end = time.perf_counter()
        self.exposed_seconds += end - begin
        if recorder is not None:
            recorder.add(What.MOVES, "layers that move", begin, end)

    def _await(self, incoming: Incoming, is_there: Callable[[], bool]) -> None:
        with self._exposed():
            incoming.await_until(is_there)

    # --- the end ---

    def settle(self, number: int) -> None:
        """Called when the pipeline is empty: ends the move, if it has begun.

        Args:
            number: of the next minibatch.
        """
        self.send_newest(number)
        if self.has_begun:
            for incoming in self._incoming:
                self._install(incoming, self.update)
            self.finish()

    def finish(self) -> None:
        """Waits until everything has arrived, here and at the new owners, when these own their
        layers; then frees the tensors that have moved away.

        Raises:
            StageFailedError: another stage ended before that.
        """
        for layer in self.awaited:
            # A layer that this step has not called.
            self.await_layer(layer)
        if self.is_over:
            return
        with self._exposed():
            for work in self._work:
                work.result()
            if self._in_flight is not None:
                self._holdings.place(self._stage_of)
                self._follow()
            else:
                for incoming in self._incoming:
                    incoming.give_optimizer_state(self._optimizers, self._device)
            self._holdings.settle(self._optimizers)
        self.is_over = True
        for incoming in self._incoming:
            incoming.forget()

    def abandon(self) -> None:
        """Gives up the move, unless the new owners own their layers already: then nothing more is
        handed over, as the run is at its end.
        """
        for outgoing in self._outgoing:
            outgoing.end(cancels=not self.has_begun)

    def cancel(self) -> None:
        """Gives up a move that has not begun on all stages, and returns when no transfer is in
        progress.
        """
        self.abandon()
        for work in self._work if not self.has_begun else ():
            work.result()
