"""The step of one microbatch, which is suspended where it waits for another stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.plan.schedule.actions import Action, Kind, num_chunks_of
from lightning_pipeshift.runtime.comm.messages import Key, Message, Place
from lightning_pipeshift.runtime.comm.messages import Kind as Carries
from lightning_pipeshift.runtime.liveness.stalls import tells
from lightning_pipeshift.step.suspension import ThreadState, seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.backward import Part
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import run_by, running, user_line


class SuspendableMicrobatch(Microbatch):
    """A microbatch whose step is suspended where it waits.

    Args:
        core: what all microbatches share.
        run_number: of the run of a schedule.
        step: the number of the step, for the random streams.
        turn: the microbatch's number in the run.
        body: runs the user's step.
        outside: the state of the thread while no step runs.
        tails: watches what the steps use, if any of them may run ahead.
        flight: the microbatches that are under way.
        order: its place among all that may be under way; ``None``: its turn.
    """

    def __init__(
        self,
        core: Core,
        run_number: int,
        step: int,
        turn: int,
        body: Callable[[Any], Any],
        outside: ThreadState,
        tails: Tails | None,
        flight: Flight,
        order: int | None = None,
    ) -> None:
        super().__init__(core, run_number, step, turn)
        self.order = turn if order is None else order
        self.result: Any = None
        self.root: Any = None
        """Where the backward begins: this microbatch's part of the loss; ``None`` to skip it."""
        self.parts: list[Part] | None = None
        """The parts of this stage's backward that are still to come, the next one last; ``None``
        before it begins."""
        self.chunk = -1
        """The latest chunk of this stage's layers that the step has come to; -1 in front of all."""
        self.is_done = False
        self.flags: dict[torch.Tensor, bool] = {}
        """Of the parameters that were frozen or thawed: whether the backward trains them."""
        self.waits_for: tuple[Key, Place] | None = None
        """While it is suspended: the message that it waits for; ``None`` if it waits for the end of
        all earlier steps."""
        self.latest_wait: tuple[Key, Place] | None = None
        """The message of the latest stage that the step has needed here, if that is a later one."""
        self.level, self.used, self.changed = 0, set[str](), set[str]()
        self._tails, self._flight = tails, flight
        self._stalled_at = ""
        self._waits_for_backwards, self._may_suspend = False, True
        self._engine, self._outside = getcurrent(), outside
        self._greenlet = greenlet(partial(self._step_through, body))
        self._greenlet.gr_context = copy_context()
        self._stream = core.seed, step, turn

    @tells("action", lambda own: words_of(Kind.FORWARD, own["self"]))
    def _step_through(self, body: Callable[[Any], Any]) -> None:
        seed_generators(self.core.device, "step", *self._stream)
        with run_by(self):
            self.result = body(self)
        self.note_generators()
        self.flags = {x: x.requires_grad for x in self.core.switched}
        if self._tails is not None:
            self._tails.end_step()
        if self.saves is not None:
            self.saves.end_forward([*self.ends_of(self.root), *self.plain([self.root])])
        self.is_done = True

    def advance(self) -> None:
        """Runs the step up to its end or to its next wait."""
        self._greenlet.switch()

    def read_number(self, value: torch.Tensor) -> Any:
        """See :class:`Program`: what torch keeps for its thread there cannot be put aside."""
        self._may_suspend = False
        try:
            return super().read_number(value)
        finally:
            self._may_suspend = True

    def receive(self, key: Key, place: Place) -> Message:
        """Waits for a message; other microbatches run meanwhile."""
        is_in_step = getcurrent() is self._greenlet and not self.is_in_backward
        is_in_step &= self._may_suspend
        latest = self.stage if self.latest_wait is None else self.latest_wait[0].source
        if is_in_step and key.source > latest:
            self.latest_wait = key, place
        if is_in_step and not torch.is_inference_mode_enabled() and not self._has(key):
            self._suspend((key, place))
        if self.is_in_backward and self.timer is not None:
            self.timer.waits()
        message = super().receive(key, place)
        if self.is_in_backward:
            self.core.computes = True
        if is_in_step and self._tails is not None and self._may_be_passed(key):
            self._tails.next_part(self)
        return message

    def _suspend(self, waits_for: tuple[Key, Place] | None) -> None:
        self.waits_for = waits_for
        state = ThreadState(self.core.device)
        self._outside.restore()
        with run_by(None):
            self._engine.switch()
        state.restore()
        self.waits_for = None

    def _may_be_passed(self, key: Key) -> bool:
        """Whether later microbatches' steps may begin while this one waits for a message: a read of
        a later stage's, so that the last stage runs all steps in their order. Where stages have
        several chunks of layers, also any value: what other stages compute meanwhile takes long.
        """
        if key.kind is Carries.VALUE:
            return self._flight.num_chunks > 1
        return key.kind in (Carries.READ, Carries.TOLD) and key.source > self.stage

    @property
    def may_be_passed(self) -> bool:
        """Whether later microbatches' steps may begin now, where this one is suspended."""
        return self.waits_for is not None and self._may_be_passed(self.waits_for[0])

    def _has(self, key: Key) -> bool:
        return self.mailbox.has(key) and self._is_next(key)

    def _is_next(self, key: Key) -> bool:
        """Whether all earlier steps are behind the part that ends with a message: parts of the same
        number run in the order of the microbatches.
        """
        level = self.level + self._may_be_passed(key)
        return all(one.level >= level for at, one in self._flight.live.items() if at < self.order)

    def can_go_on(self) -> bool:
        """Whether it need not be suspended any longer."""
        if self.waits_for is None:
            return not self.is_ahead() and not (self._waits_for_backwards and self._is_early())
        return self._has(self.waits_for[0])

    def is_ahead(self) -> bool:
        """Whether an earlier microbatch's step is suspended."""
        return any(at < self.order for at in self._flight.live)

    def _is_early(self) -> bool:
        """Whether the backward of an earlier microbatch is still to come."""
        return any(at < self.order for at in self._flight.done)

    def begins_backward(self) -> None:
        """See :class:`Microbatch`. Stages wait in backwards, and so run all of them in one order:
        those of earlier microbatches are over before a step runs one of its own.
        """
        if not self.has_later_backward or getcurrent() is not self._greenlet:
            return
        if self._flight.is_asynchronous:
            raise LayerError(
                f"The step runs a backward over several stages ({user_line()}), and with an"
                " asynchronous schedule those of earlier batches come later. Use schedule='1f1b',"
                " or compute the gradient inside of one layer."
            )
        if self.is_ahead() or self._is_early():
            self._waits_for_backwards = True
            self._suspend(None)
            self._waits_for_backwards = False

    def finish_gradients(self) -> None:
        """See :class:`Microbatch`. The schedule's own backwards look after that themselves."""
        self._flight.finish_gradients()

    def followers(self) -> Iterable[SuspendableMicrobatch]:
        """The later microbatches' steps that have begun."""
        return (one for at, one in self._flight.live.items() if at > self.order)

    def stall(self, name: str) -> None:
        """Waits until the steps of all earlier microbatches have ended.

        Args:
            name: of the attribute because of which it has to; "" for the end of the step.

        Raises:
            LayerError: it cannot be suspended here.
        """
        if running() is not self or torch.is_inference_mode_enabled():
            raise LayerError(
                f"The step uses `{name}` ({user_line()}) in inference mode, where it cannot wait"
                " for the step before. Use `torch.no_grad()`, or use it outside of inference mode."
            )
        self._stalled_at = name and f"`{name}` ({user_line()})"
        self._suspend(None)

    def writes_placed(self) -> None:
        """See :class:`Calls`."""
        if self._tails is not None:
            self._tails.forbid(
                "writes to a parameter or a buffer of a layer", "Do it between steps"
            )

    def enters_layer(self, number: int) -> None:
        """See :class:`Microbatch`."""
        if self._flight.num_chunks > 1:
            # Of the chunk that it comes to, it may wait for the input.
            self._flight.passed_chunks(self)
            self.chunk = max(self.chunk, self.core.chunks.get(number, -1))
        if self._tails is not None and self._tails.current is not None:
            if self._stalled_at:
                self._tails.say_early_wait(self._stalled_at)
            self._tails.use_layer(number)


class Flight:
    """The microbatches that are under way on one rank, by their places in the order.

    Args:
        row: the forwards and backwards that are to be run.
        is_asynchronous: whether a backward may come later than the end of the run.
    """

    def __init__(self, row: Iterable[Action] = (), is_asynchronous: bool = False) -> None:
        self.is_asynchronous = is_asynchronous
        self.finish_gradients: Callable[[], None] = lambda: None
        """Computes the gradients that backwards have left for later."""
        self.todo = deque(row)
        self.num_chunks = num_chunks_of([(*self.todo,)])
        """Of this stage's layers."""
        self.live: dict[int, SuspendableMicrobatch] = {}
        """Those whose step is suspended."""
        self.done: dict[int, SuspendableMicrobatch] = {}
        """Those whose backward is still to come."""

    def place_of(self, suspended: SuspendableMicrobatch) -> int:
        """The place in :attr:`todo` of the chunk for whose input a suspended step waits; -1 if that
        is the first one, or it waits for something else.
        """
        own = (
            at
            for at, action in enumerate(self.todo if self.num_chunks > 1 else ())
            if action.kind is Kind.FORWARD
            and action.microbatch == suspended.order
            and action.chunk <= suspended.chunk
        )
        return next(own, -1)

    def passed_chunks(self, microbatch: SuspendableMicrobatch) -> None:
        """A step has run a chunk of this stage's layers, or has ended."""
        for action in tuple(self.todo if self.num_chunks > 1 else ()):
            is_own = action.kind is Kind.FORWARD and action.microbatch == microbatch.order
            if is_own and (action.chunk <= microbatch.chunk or microbatch.is_done):
                self.todo.remove(action)


def words_of(kind: Kind, microbatch: Microbatch | None) -> str | None:
    """What a stage does, for messages about stages that wait for it."""
    if microbatch is None:
        return None
    return f"{kind.properties.words} of microbatch {microbatch.turn}"


tells("layer", lambda own: own["self"].core.names[own["number"]])(Microbatch.layer)
