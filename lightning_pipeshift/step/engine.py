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
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.model.measuring.timing import Timer
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.liveness.stalls import tells
from lightning_pipeshift.step.later_gradients import LaterGradients, is_watched
from lightning_pipeshift.step.suspendable import Flight, SuspendableMicrobatch, words_of
from lightning_pipeshift.step.suspension import ThreadState, kept, seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.backward import Part, begin_backward, end_backward, run_part
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gradients import Way
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
            microbatch.graphs.is_divided = flight.num_chunks > 1 and not is_watched(microbatch)
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
                # Where stages have several chunks of layers, a step may go on with the next one
                # behind what comes before it in the row.
                place = len(todo) if ready is None else flight.place_of(ready)
                if place >= 0 and self._begins_forward(flight):
                    action = todo.popleft()
                    self._advance(begin(action.microbatch, outside), action, flight, tails)
                elif place >= 0 and self._run_backward(flight, place):
                    continue
                elif ready is not None:
                    self.num_suspended += 1
                    action = Action(Kind.FORWARD, ready.order, max(0, ready.chunk))
                    self._advance(ready, action if place < 0 else todo[place], flight, tails)
                elif not self._compute_left(flight) and (todo or live):
                    self._wait(flight)

    def _begins_forward(self, flight: Flight) -> bool:
        """Whether the next action is the forward of another microbatch, which may begin."""
        first = next(iter(flight.todo), None)
        is_new = first is not None and first.kind is Kind.FORWARD and not first.chunk
        return is_new and self._may_begin(flight.live)

    def _advance(
        self,
        microbatch: SuspendableMicrobatch,
        action: Action,
        flight: Flight,
        tails: Tails | None,
    ) -> None:
        self._core.computes = False
        with self._around(action):
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
            flight.passed_chunks(microbatch)
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

    def _backwards(self, flight: Flight) -> Iterator[tuple[int, SuspendableMicrobatch, Part, bool]]:
        """The parts of backwards that may come next, the next one of each microbatch: its place
        among the actions, and whether it is the very first. Others come before parts of earlier
        microbatches that compute no gradient of the same layers, so that each gradient is summed in
        the order of the microbatches.
        """
        places: dict[int, int] = {}
        for at, action in enumerate(flight.todo):
            if action.kind is Kind.BACKWARD:
                places.setdefault(action.microbatch, at)
        computed = set[int]()
        for before, number in enumerate(sorted(places)):
            is_first = not before
            microbatch = flight.done.get(number)
            if microbatch is None:
                return
            *others, part = self._parts(microbatch)
            # What is called before the last backward looks at each gradient as it comes.
            is_whole = self._before_last_backward is not None and number == max(places)
            if is_first or not (part.keys is None or is_whole or computed & part.keys):
                yield places[number], microbatch, part, is_first
            for each in (*others, part):
                if each.keys is None:
                    return
                computed |= each.keys

    def _parts(self, microbatch: SuspendableMicrobatch) -> list[Part]:
        if microbatch.parts is None:
            microbatch.parts = []
            if microbatch.root is not None:
                with run_by(microbatch):
                    microbatch.parts = begin_backward(microbatch, microbatch.root)
            # This stage has no part in it, or it ends what has begun here.
            microbatch.parts = microbatch.parts or [Part([], [], (None,), frozenset())]
        return microbatch.parts

    def _run_backward(self, flight: Flight, before: int) -> bool:
        """Runs a part of a backward that is in front of a place among the actions, if its gradients
        are there: the oldest, also before forwards that cannot go on, if the first one is there or
        nothing else can run; while it waits for that, its layers that have to run again before it.
        Returns whether it did anything.
        """
        first, ready = None, []
        for at, microbatch, part, is_first in self._backwards(flight):
            if at < before and not self._missing(part, is_first):
                ready.append((at, microbatch, part))
            elif at < before and is_first:
                first = at, microbatch, part
        if ready:
            _, microbatch, part = min(ready, key=itemgetter(0))
            self._run_part(flight, microbatch, part)
            return True
        if first is None:
            return False
        at, microbatch, part = first
        if microbatch.saves is not None and microbatch.saves.may_recompute:
            self._recompute(microbatch, microbatch.saves)
            return True
        if flight.live or at or self._later.first is not None or part.keys is not None:
            return False
        self._run_part(flight, microbatch, part)
        return True

    def _missing(self, part: Part, is_first: bool) -> list[Way]:
        """The gradients that have to come before a part of a backward runs: of the first one, only
        that which it waits for first. In others a stage must not wait: in those that it waits for,
        another stage may wait for what comes before them.
        """
        has = self._core.mailbox.has
        ways = part.ways[:1] if is_first else part.ways
        return [way for way in ways if way is not None and not has(way.key)]

    @tells("action", lambda own: words_of(Kind.BACKWARD, own.get("microbatch")))
    def _run_part(self, flight: Flight, microbatch: SuspendableMicrobatch, part: Part) -> None:
        """Runs the next part of a microbatch's backward."""
        order = microbatch.order
        assert microbatch.parts is not None
        del microbatch.parts[-1]
        backwards = [each for each in flight.todo if each.kind is Kind.BACKWARD]
        own = [each for each in backwards if each.microbatch == order]
        # One action remains until all parts have run, and none behind that.
        for each in own[:-1][:1] if microbatch.parts else own:
            flight.todo.remove(each)
        if len(own) == len(backwards) and self._before_last_backward is not None:
            while self._compute_left(flight):
                pass
            self._before_last_backward()
            self._before_last_backward = None
        self._core.computes = part.ways[0] is None
        run = partial(torch.autograd.backward, part.roots, part.gradients)
        if self._puts_off:
            run = partial(self._later.backward, microbatch, part.roots, part.gradients)
        with self._around(own[0]), self._core.trained_as(microbatch.flags), run_by(microbatch):
            if part.roots:
                run_part(microbatch, run)
            if microbatch.parts:
                return
            if microbatch.root is not None:
                end_backward(microbatch, microbatch.root)
        del flight.done[order]
        microbatch.root = None
        if microbatch.saves is not None:
            microbatch.saves.end_backward()
            microbatch.saves = None

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

    @tells("action", lambda own: words_of(Kind.BACKWARD, own.get("microbatch")))
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
        waits = []
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
        for at, _, part, is_first in self._backwards(flight):
            missing = self._missing(part, is_first)
            if not missing:
                return
            waits += [(flight.todo[at], (way.key, way.place)) for way in missing]
        self.waits_for, (_, place) = waits[0]
        try:
            self._core.mailbox.wait_for_any([key for _, (key, _) in waits], place)
        finally:
            self.waits_for = None


def _part_of_mean(num_microbatches: int, result: Any, _: int) -> Any:
    return None if result is None else result / num_microbatches
