"""Runs the microbatches of a step in the order of a schedule.

The order is a wish. A forward that has to wait for another stage is suspended, and something else
runs meanwhile; a backward is not begun before its first gradient is there, as long as anything else
can run. In a fixed order stages would wait for each other where values flow backwards, from a later
stage to an earlier one.

Whatever the order, user code sees each microbatch's step run as a whole before the next one's. The
part of a step behind a read may run later than the begin of later microbatches' steps, if these use
nothing that it changes: :mod:`lightning_pipeshift.step.tails` sees to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.timing import Timer
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.messages import Key, Message, Place
from lightning_pipeshift.runtime.comm.messages import Kind as Carries
from lightning_pipeshift.runtime.liveness.stalls import tells
from lightning_pipeshift.step.suspension import ThreadState, kept, seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.saves import Saves
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
        """The loss, divided by the number of microbatches; ``None`` to skip the backward."""
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

    @tells("action", lambda own: _words_of(Kind.FORWARD, own["self"]))
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
        """Whether later microbatches' steps may begin while this one waits for a message: one of a
        later stage, so that the last stage runs all steps in their order.
        """
        return key.kind in (Carries.READ, Carries.TOLD) and key.source > self.stage

    @property
    def first_gradient(self) -> tuple[Key, Place] | None:
        """The gradient that this stage's backward waits for first; ``None`` if it can begin."""
        graph = self.graph_of(self.root)
        first = None if graph is None else graph.first
        return None if first is None else (first.key, first.place)

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
        self.todo = deque(row)
        self.live: dict[int, SuspendableMicrobatch] = {}
        """Those whose step is suspended."""
        self.done: dict[int, SuspendableMicrobatch] = {}
        """Those whose backward is still to come."""


class Engine:
    """Runs steps on one rank.

    Args:
        core: the module's layers and their owners.
        tails: says whether a step may begin while an earlier one waits for what it reads; ``None``:
            it may not.
        around: makes the context of an action; of a forward that was suspended, of each part.
    """

    def __init__(
        self,
        core: Core,
        tails: Tails | None = None,
        around: Callable[[Action], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._core, self._around = core, around
        self._tails = tails
        self._runs_ahead = False
        self._before_last_backward: Callable[[], object] | None = None
        self.waits_for: Action | None = None
        """While nothing can run: what would, if its message came."""
        self.num_suspended = 0
        """How often a step went on after it was suspended."""

    def run(
        self,
        step: int,
        batches: Sequence[Any],
        function: Callable[[Any, int], Any],
        row: Iterable[Action],
        root_of: Callable[[Any, int], Any] | None = None,
        before_last_backward: Callable[[], object] | None = None,
        timers: Mapping[int, Timer] = MappingProxyType({}),
        saves_of: Callable[[int], Saves | None] = lambda _: None,
        num_ahead: int = 1,
    ) -> list[Any]:
        """Runs a step. Every stage calls this, with its own row.

        Args:
            step: its number, for the random streams.
            batches: one for each microbatch.
            function: the user's step: ``(batch, number of the microbatch) -> loss``.
            row: this stage's forwards and backwards.
            root_of: what the backward begins with, given what the function returned, and the number
                of the microbatch; ``None`` to skip it. By default the part of the mean over all
                microbatches.
            before_last_backward: called on this stage before its last backward.
            timers: time the layers of some microbatches.
            saves_of: makes what keeps the tensors that autograd saves of a microbatch; ``None``:
                autograd does.
            num_ahead: how many runs a stage may be ahead of another one.

        Returns:
            what the function returned for each microbatch; a value may be another stage's.
        """
        core = self._core
        core.begin(num_ahead=num_ahead)
        find_root = root_of or partial(_part_of_mean, len(batches))
        flight = Flight(row)
        with_backward = any(action.kind is Kind.BACKWARD for action in flight.todo)
        everything: list[SuspendableMicrobatch] = []

        def begin(turn: int, outside: ThreadState) -> SuspendableMicrobatch:
            def body(microbatch: SuspendableMicrobatch) -> Any:
                result = function(batches[turn], turn)
                if microbatch.is_ahead():
                    microbatch.stall("")
                if with_backward:
                    # An operation of the program: every stage has a part in it.
                    microbatch.root = find_root(result, turn)
                return result

            microbatch = SuspendableMicrobatch(
                core, core.num_steps, step, turn, body, outside, tails, flight
            )
            microbatch.has_later_backward = with_backward
            microbatch.timer = timers.get(turn)
            microbatch.saves = saves_of(turn)
            everything.append(microbatch)
            return microbatch

        tails = self._tails if len(batches) > 1 else None
        with nullcontext() if tails is None else tails.watching():
            self.go_on(flight, step, begin, before_last_backward, tails)
        core.end(everything)
        results = [microbatch.result for microbatch in everything]
        for microbatch in everything:
            # Nodes of autograd hold the microbatch. If it held tensors of theirs, too, this cycle
            # would never be freed.
            microbatch.result = microbatch.root = None
            microbatch.release()
        return results

    def go_on(
        self,
        flight: Flight,
        step: int,
        begin: Callable[[int, ThreadState], SuspendableMicrobatch],
        before_last_backward: Callable[[], object] | None,
        tails: Tails | None = None,
        leaves_some: bool = False,
    ) -> None:
        """Runs the actions that are to be run, and ends the steps that have begun.

        Args:
            flight: the actions and the steps.
            step: the number of the step that comes now, for the random streams.
            begin: makes a microbatch, given its place in the order and the state of the thread
                while no step runs.
            before_last_backward: as for :meth:`run`.
            tails: watches the steps.
            leaves_some: whether steps that later ones may pass may be suspended at the end.
        """
        core, todo, live = self._core, flight.todo, flight.live
        self._before_last_backward = before_last_backward
        self._runs_ahead = tails is not None and tails.may_run_ahead
        with kept(core.device):
            # The generators' states are no longer the user's, and so short: see `host_state`.
            seed_generators(core.device, "between", core.seed, step)
            outside = ThreadState(core.device)
            outside.restore()
            while todo or live:
                ready = self._ready(live)
                if ready is None and not todo and leaves_some and self._may_begin(live):
                    break
                if ready is not None:
                    self.num_suspended += 1
                    self._advance(ready, flight, tails)
                elif todo and todo[0].kind is Kind.FORWARD and self._may_begin(live):
                    self._advance(begin(todo.popleft().microbatch, outside), flight, tails)
                elif not self._run_backward(flight):
                    self._wait(flight)

    def _advance(
        self, microbatch: SuspendableMicrobatch, flight: Flight, tails: Tails | None
    ) -> None:
        self._core.computes = False
        with self._around(Action(Kind.FORWARD, microbatch.order)):
            if tails is not None and tails.is_watching:
                tails.current = microbatch
            try:
                microbatch.advance()
            finally:
                if tails is not None:
                    tails.current = None
        if microbatch.is_done:
            flight.live.pop(microbatch.order, None)
            flight.done[microbatch.order] = microbatch
        else:
            flight.live[microbatch.order] = microbatch

    def _may_pass(self, suspended: SuspendableMicrobatch) -> bool:
        """Whether a later microbatch may go on while this one waits."""
        return self._runs_ahead and suspended.may_be_passed

    def _in_turn(self, live: dict[int, SuspendableMicrobatch]) -> Iterator[SuspendableMicrobatch]:
        """The suspended microbatches that may go on, up to the first that no later one may pass."""
        for turn in sorted(live):
            yield live[turn]
            if not self._may_pass(live[turn]):
                return

    def _ready(self, live: dict[int, SuspendableMicrobatch]) -> SuspendableMicrobatch | None:
        """The first suspended microbatch that can go on."""
        return next((one for one in self._in_turn(live) if one.can_go_on()), None)

    def _may_begin(self, live: dict[int, SuspendableMicrobatch]) -> bool:
        return all(map(self._may_pass, live.values()))

    @tells("action", lambda own: _words_of(Kind.BACKWARD, own.get("microbatch")))
    def _run_backward(self, flight: Flight) -> bool:
        """Runs the oldest backward, also before forwards that cannot go on, if its first gradient
        is there or nothing else can run; while it waits for that, its layers that have to run again
        before it. Returns whether it did anything.
        """
        todo, done = flight.todo, flight.done
        at = next((at for at, one in enumerate(todo) if one.kind is Kind.BACKWARD), None)
        microbatch = None if at is None else done.get(todo[at].microbatch)
        if at is None or microbatch is None:
            return False
        first = microbatch.first_gradient
        if first is not None and not self._core.mailbox.has(first[0]):
            if microbatch.saves is not None and microbatch.saves.may_recompute:
                self._recompute(microbatch, microbatch.saves)
                return True
            if flight.live or at:
                return False
        action = todo[at]
        del todo[at]
        del done[microbatch.order]
        is_last = not any(one.kind is Kind.BACKWARD for one in todo)
        if is_last and self._before_last_backward is not None:
            self._before_last_backward()
        self._core.computes = first is None
        with self._around(action), self._core.trained_as(microbatch.flags), run_by(microbatch):
            if microbatch.root is not None:
                microbatch.backward(microbatch.root)
        microbatch.root = None
        if microbatch.saves is not None:
            microbatch.saves.end_backward()
            microbatch.saves = None
        return True

    def _recompute(self, microbatch: SuspendableMicrobatch, saves: Saves) -> None:
        action, self._core.computes = Action(Kind.RECOMPUTE, microbatch.order), True
        with (
            self._around(action),
            self._core.trained_as(microbatch.flags),
            run_by(None),
            without_torch_function_of_subclasses(),
        ):
            saves.run_again()

    def _wait(self, flight: Flight) -> None:
        done, waits = flight.done, []
        for one in self._in_turn(flight.live):
            wait = one.waits_for
            if wait is None:
                continue
            if not self._core.mailbox.has(wait[0]):
                waits.append((Action(Kind.FORWARD, one.order), wait))
            elif one.can_go_on():
                # It came just now. Where an earlier microbatch has to go on first, it is no reason
                # to look again.
                return
        oldest = next((one for one in flight.todo if one.kind is Kind.BACKWARD), None)
        waiting = None if oldest is None else done.get(oldest.microbatch)
        if oldest is not None and waiting is not None and waiting.first_gradient is not None:
            waits.append((oldest, waiting.first_gradient))
        self.waits_for, (_, place) = waits[0]
        try:
            self._core.mailbox.wait_for_any([key for _, (key, _) in waits], place)
        finally:
            self.waits_for = None


def _part_of_mean(num_microbatches: int, result: Any, _: int) -> Any:
    return None if result is None else result / num_microbatches


def _words_of(kind: Kind, microbatch: Microbatch | None) -> str | None:
    if microbatch is None:
        return None
    return f"{kind.properties.words} of microbatch {microbatch.turn}"


tells("layer", lambda own: own["self"].core.names[own["number"]])(Microbatch._called)
