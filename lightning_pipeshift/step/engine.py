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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.model.measuring.timing import Timer
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.liveness.stalls import tells
from lightning_pipeshift.step.later_gradients import LaterGradients
from lightning_pipeshift.step.suspendable import Flight, SuspendableMicrobatch, words_of
from lightning_pipeshift.step.suspension import ThreadState, kept, seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.backward import run_part
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.saves import Saves
from lightning_pipeshift.values.value import run_by


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
        self._later, self._puts_off = LaterGradients(), False
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
        self._puts_off = any(action.kind is Kind.WEIGHTS for action in flight.todo)
        flight.finish_gradients = self._later.compute_all
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
                self._compute_due(flight)
                ready = self._ready(live)
                if ready is None and not todo and leaves_some and self._may_begin(live):
                    break
                if ready is not None:
                    self.num_suspended += 1
                    self._advance(ready, flight, tails)
                elif todo and todo[0].kind is Kind.FORWARD and self._may_begin(live):
                    self._advance(begin(todo.popleft().microbatch, outside), flight, tails)
                elif self._run_backward(flight) or self._compute_left(flight):
                    continue
                elif todo or live:
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

    @tells("action", lambda own: words_of(Kind.BACKWARD, own.get("microbatch")))
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
            if flight.live or at or self._later.first is not None:
                return False
        action = todo[at]
        del todo[at]
        del done[microbatch.order]
        is_last = not any(one.kind is Kind.BACKWARD for one in todo)
        if is_last and self._before_last_backward is not None:
            while self._compute_left(flight):
                pass
            self._before_last_backward()
        self._core.computes = first is None
        if self._puts_off:
            microbatch.put_off = partial(self._later.backward, microbatch)
        with self._around(action), self._core.trained_as(microbatch.flags), run_by(microbatch):
            if microbatch.root is not None:
                microbatch.backward(microbatch.root)
        microbatch.root = microbatch.put_off = None
        if microbatch.saves is not None:
            microbatch.saves.end_backward()
            microbatch.saves = None
        return True

    def _compute_due(self, flight: Flight) -> None:
        """Computes the gradients of weights that may not be left for longer."""
        todo = flight.todo
        while todo and todo[0].kind is Kind.WEIGHTS:
            number = todo[0].microbatch
            if Action(Kind.BACKWARD, number) in todo:
                return
            first = self._later.first
            if first is not None and first.order == number:
                self._compute_left(flight)
            else:
                # Its backward has left nothing.
                todo.popleft()

    def _compute_left(self, flight: Flight) -> bool:
        """Computes the gradients of weights that the oldest backward has left for later. Returns
        whether there were any.
        """
        first = self._later.first
        if first is None:
            return False
        action, self._core.computes = Action(Kind.WEIGHTS, first.order), True
        flight.todo.remove(action)
        with self._around(action), run_by(first):
            run_part(first, partial(self._later.compute, first))
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
