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

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.model.parameters.uses import flat_weights_forgotten, hold, other_state
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.transfers import (
    Message,
    MessageKind,
    Transfer,
    Transfers,
)
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions

Withheld = tuple[list[nn.Parameter], Callable[[], bool]]
"""Parameters that cannot be updated yet, and whether they can be now."""


class LiveMigration(Transfers):
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
        newest: Callable[[int, int], int],
    ) -> None:
        device = holdings.channels.device
        super().__init__(holdings, stage_of, optimizers, threads, device)
        self.earliest = earliest
        self.begin: int | None = None
        """The cut-over, when it is known."""
        self.update = sys.maxsize
        """The number of the first update of the new owners, likewise."""
        self._versions = versions
        self._newest = newest
        self.sent_bytes = 0
        """The bytes of the weights that this stage has sent."""
        self._is_placed = False
        self._start_threads()

    # --- the old owner ---

    def end_action(self, action: Action) -> None:
        """Called when an action has ended: the old owner's last forward may be over."""
        if action.kind is not Kind.FORWARD or action.microbatch + 1 != self.begin:
            return
        for outgoing in self._outgoing:
            layers = self._layers_with_state(outgoing)
            self._hand_over(outgoing, *map(self._state_message, layers))

    def _layers_with_state(self, transfer: Transfer) -> list[int]:
        """The layers for whose state the new owner waits: all, if one of them has any. Otherwise it
        would have to wait for the old owner's last forward, and be late.
        """
        layers = self._holdings.layers
        has_any = any(other_state(layers[layer][0]) for layer in transfer.layers)
        return transfer.layers if has_any else []

    def _hand_over(self, outgoing: Transfer, *messages: Message) -> None:
        for message in messages:
            # The optimizer changes a copy until they are sent.
            self._versions.pin(message.weights.values())
        super()._hand_over(outgoing, *messages)

    def _send_one(self, lane: Lane, outgoing: Transfer, message: Message, *ready: Any) -> None:
        super()._send_one(lane, outgoing, message, *ready)
        self._versions.unpin(message.weights.values())

    def send_newest(self, minibatch: int) -> None:
        """Sends the weights as they are now to the new owners, if they need this version.

        Args:
            minibatch: the next one.
        """
        newest = min(self._versions.num_updates, self.update)
        for outgoing in self._outgoing:
            first = self.earliest - max(0, self._holdings.stage - outgoing.peer)
            # With two versions, the new owner needs the one that the next update makes old.
            is_urgent = self._versions.delays and self.begin is not None
            if outgoing.version >= newest or (minibatch < first and not is_urgent):
                continue
            weights = {
                place: parameter.data
                for place, parameter in outgoing.parameters.items()
                if outgoing.version < 0 or parameter.requires_grad
            }
            outgoing.version = newest
            self.sent_bytes += sum(weight.nbytes for weight in weights.values())
            message = Message(MessageKind.WEIGHTS, newest, weights)
            if newest == self.update:
                state = self._optimizer_state_of(outgoing)
                message = message._replace(kind=MessageKind.LAST, values=state)
            self._hand_over(outgoing, message)

    # --- a stage's turn ---

    def before_turn(self, minibatch: int, update: int, ends_update: bool) -> None:
        """Prepares the stage for its next forward.

        Args:
            minibatch: its number.
            update: the number of the update that its gradient is part of.
            ends_update: whether it is the last one of that update.
        """
        if self.begin is None and ends_update and minibatch + 1 >= self.earliest:
            self.begin, self.update = minibatch + 1, update + 1
        self.send_newest(minibatch)
        if self.begin is None or minibatch < self.begin:
            return
        if not self._has_begun:
            self._begin()
        for incoming in self._incoming:
            self._install(incoming, self._version_for(incoming.peer, minibatch, update))
        self._free_if_acknowledged()

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
        for incoming in self._incoming:
            for layer in self._layers_with_state(incoming):
                self._await(incoming, partial(incoming.state.__contains__, layer))
                self._take_state(incoming, layer)
        self._follow()

    def _follow(self) -> None:
        leaving = {id(p) for outgoing in self._outgoing for p in outgoing.parameters.values()}
        self._versions.follow(
            use.parameter for use in self._holdings.held if id(use.parameter) not in leaving
        )

    def _install(self, incoming: Transfer, version: int) -> None:
        if incoming.version >= version:
            return
        versions = incoming.versions
        self._await(incoming, lambda: version in versions)
        weights: dict[int, Tensor] = {}
        with self._has_changed:
            for older in sorted(known for known in versions if known <= version):
                # Weights that are not trained come with the first version only.
                weights |= versions.pop(older)
        self._keep_for_compute(weights.values())
        with torch.no_grad(), flat_weights_forgotten(self._holdings.root):
            for place, values in weights.items():
                hold(incoming.parameters[place], values)
        if incoming.version < 0:
            # They are real parameters from now on.
            self._follow()
        incoming.version = version
        if self._versions.delays and version < self.update == self._versions.num_updates:
            # This stage is ahead: its next forwards use the weights before its newest.
            self._versions.set_before(
                (incoming.parameters[place], values) for place, values in weights.items()
            )
        if version == self.update:
            self._take_optimizer_state(incoming)

    def withheld(self) -> list[Withheld]:
        """Called before an update of this stage. Returns the parameters whose last weights have not
        come into use yet, with what tells whether they have: their update has to wait.
        """
        found: list[Withheld] = []
        for incoming in self._incoming if self._has_begun else ():
            if incoming.version >= self.update:
                continue
            if not self._versions.delays:
                parameters = list(incoming.parameters.values())
                found.append((parameters, partial(self._is_last, incoming)))
            elif self._versions.num_updates >= self.update:
                self._install(incoming, self.update)
        return found

    def _is_last(self, incoming: Transfer) -> bool:
        """Whether the last weights have come into use."""
        return incoming.version >= self.update

    # --- the end ---

    @property
    def layers(self) -> frozenset[int]:
        """The layers that come to this stage or leave it; empty when the move is over."""
        transfers = [*self._outgoing, *self._incoming] if not self._is_placed else ()
        return frozenset(
            layer for transfer in transfers for move in transfer.moves for layer in move.layers
        )

    def _free_if_acknowledged(self) -> None:
        transfers = [*self._outgoing, *self._incoming]
        if self._is_placed or any(each.version < self.update for each in transfers):
            return
        if all(work.done() for work in self._work or ()):
            self._place()

    def _place(self) -> None:
        for work in self._work or ():
            work.result()
        self._is_placed = True
        self._holdings.place(self._stage_of)
        self._holdings.settle(self._optimizers)
        self._follow()

    def finish(self) -> None:
        """Waits until the layers are at their new owners, when these have begun to use them."""
        if not self._is_placed:
            self._place()

    def settle(self, minibatch: int) -> None:
        """Called when the pipeline is empty: ends the move, if it has begun.

        Args:
            minibatch: the next one.
        """
        self.send_newest(minibatch)
        if self._has_begun:
            for incoming in self._incoming:
                self._install(incoming, self.update)
            self.finish()
