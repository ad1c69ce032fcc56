"""Runs the microbatches of a step in the order of a schedule.

The order is a wish. A forward that has to wait for another stage is suspended, and something else
runs meanwhile; a backward is not begun before its first gradient is there, as long as anything else
can run. In a fixed order stages would wait for each other where values flow backwards, from a later
stage to an earlier one.

Whatever the order, user code sees each microbatch's step run as a whole before the next one's:
with ``overlaps``, the part of a step behind a read may run later, which is right for steps that
change nothing there that the part before the read of a later microbatch sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.comm.messages import Key, Message, Place
from lightning_pipeshift.runtime.comm.messages import Kind as Carries
from lightning_pipeshift.step.suspension import ThreadState, kept, seed_generators
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import run_by


class SuspendableMicrobatch(Microbatch):
    """A microbatch whose step is suspended where it waits.

    Args:
        core: what all microbatches share.
        run_number: of the run of a schedule.
        step: the number of the step, for the random streams.
        turn: the microbatch's number in the run.
        body: runs the user's step.
        outside: the state of the thread while no step runs.
    """

    def __init__(
        self,
        core: Core,
        run_number: int,
        step: int,
        turn: int,
        body: Callable[[Any], Any],
        outside: ThreadState,
    ) -> None:
        super().__init__(core, run_number, step, turn)
        self.result: Any = None
        self.root: Any = None
        """The loss, divided by the number of microbatches; ``None`` to skip the backward."""
        self.is_done = False
        self.flags: dict[torch.Tensor, bool] = {}
        """Of the parameters that were frozen or thawed: whether the backward trains them."""
        self.waits_for: tuple[Key, Place] | None = None
        """While it is suspended: the message that it waits for."""
        self._engine, self._outside = getcurrent(), outside
        self._greenlet = greenlet(partial(self._step_through, body))
        self._stream = core.seed, step, turn

    def _step_through(self, body: Callable[[Any], Any]) -> None:
        seed_generators(self.core.device, "step", *self._stream)
        with run_by(self):
            self.result = body(self)
        self.note_generators()
        self.flags = {x: x.requires_grad for x in self.core.switched}
        self.is_done = True

    def advance(self) -> None:
        """Runs the step up to its end or to its next wait."""
        self._greenlet.switch()

    def receive(self, key: Key, place: Place) -> Message:
        """Waits for a message; other microbatches run meanwhile."""
        can_wait = getcurrent() is self._greenlet and not self.is_in_backward
        if can_wait and not torch.is_inference_mode_enabled() and not self.mailbox.has(key):
            self.waits_for = key, place
            state = ThreadState(self.core.device)
            self._outside.restore()
            with run_by(None):
                self._engine.switch()
            state.restore()
            self.waits_for = None
        return super().receive(key, place)


class Engine:
    """Runs steps on one rank.

    Args:
        core: the module's layers and their owners.
        overlaps: whether the part of a step behind a read may run later than parts of other
            microbatches' steps.
        around: makes the context of an action; of a forward that was suspended, of each part.
    """

    def __init__(
        self,
        core: Core,
        overlaps: bool = False,
        around: Callable[[Action], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._core, self._overlaps, self._around = core, overlaps, around
        self._before_last_backward: Callable[[], object] | None = None
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

        Returns:
            what the function returned for each microbatch; a value may be another stage's.
        """
        core = self._core
        core.begin()
        self._before_last_backward = before_last_backward
        find_root = root_of or partial(_part_of_mean, len(batches))
        todo = deque(row)
        with_backward = any(action.kind is Kind.BACKWARD for action in todo)
        live: dict[int, SuspendableMicrobatch] = {}
        done: dict[int, SuspendableMicrobatch] = {}
        everything: list[SuspendableMicrobatch] = []

        def advance(microbatch: SuspendableMicrobatch) -> None:
            with self._around(Action(Kind.FORWARD, microbatch.turn)):
                microbatch.advance()
            if microbatch.is_done:
                live.pop(microbatch.turn, None)
                done[microbatch.turn] = microbatch
            else:
                live[microbatch.turn] = microbatch

        def begin(turn: int) -> None:
            def body(microbatch: SuspendableMicrobatch) -> Any:
                result = function(batches[turn], turn)
                if with_backward:
                    # An operation of the program: every stage has a part in it.
                    microbatch.root = find_root(result, turn)
                if microbatch.root is None:
                    # No backward follows, and so no gradient comes.
                    microbatch.first_gradient = None
                return result

            microbatch = SuspendableMicrobatch(core, core.num_steps, step, turn, body, outside)
            microbatch.has_later_backward = with_backward
            everything.append(microbatch)
            advance(microbatch)

        with kept(core.device):
            outside = ThreadState(core.device)
            outside.restore()
            while todo or live:
                ready = self._ready(live)
                if ready is not None:
                    self.num_suspended += 1
                    advance(ready)
                elif todo and todo[0].kind is Kind.FORWARD and self._may_begin(live):
                    begin(todo.popleft().microbatch)
                elif not self._run_backward(todo, live, done):
                    self._wait(todo, live, done)
        core.end(everything)
        results = [microbatch.result for microbatch in everything]
        for microbatch in everything:
            # Nodes of autograd hold the microbatch. If it held tensors of theirs, too, this cycle
            # would never be freed.
            microbatch.result = microbatch.root = None
            microbatch.release()
        return results

    def _may_pass(self, suspended: SuspendableMicrobatch) -> bool:
        """Whether a later microbatch may go on while this one waits."""
        wait = suspended.waits_for
        return self._overlaps and wait is not None and wait[0].kind in (Carries.READ, Carries.TOLD)

    def _waits(self, live: dict[int, SuspendableMicrobatch]) -> Iterator[tuple[int, Key, Place]]:
        """The suspended microbatches that may go on, by their turns, and what they wait for: up to
        the first that no later one may pass.
        """
        for turn in sorted(live):
            wait = live[turn].waits_for
            assert wait is not None
            yield turn, *wait
            if not self._may_pass(live[turn]):
                return

    def _ready(self, live: dict[int, SuspendableMicrobatch]) -> SuspendableMicrobatch | None:
        """The first suspended microbatch whose message is there."""
        mailbox = self._core.mailbox
        return next((live[turn] for turn, key, _ in self._waits(live) if mailbox.has(key)), None)

    def _may_begin(self, live: dict[int, SuspendableMicrobatch]) -> bool:
        return all(map(self._may_pass, live.values()))

    def _run_backward(
        self,
        todo: deque[Action],
        live: dict[int, SuspendableMicrobatch],
        done: dict[int, SuspendableMicrobatch],
    ) -> bool:
        """Runs the oldest backward, also before forwards that cannot go on, if its first gradient
        is there or nothing else can run; returns whether it did.
        """
        at = next((at for at, one in enumerate(todo) if one.kind is Kind.BACKWARD), None)
        microbatch = None if at is None else done.get(todo[at].microbatch)
        if at is None or microbatch is None:
            return False
        first = microbatch.first_gradient
        if first is not None and not self._core.mailbox.has(first[0]) and (live or at):
            return False
        del todo[at]
        del done[microbatch.turn]
        is_last = not any(one.kind is Kind.BACKWARD for one in todo)
        if is_last and self._before_last_backward is not None:
            self._before_last_backward()
        if microbatch.root is not None:
            with self._core.trained_as(microbatch.flags), run_by(microbatch):
                microbatch.backward(microbatch.root)
        microbatch.root = None
        return True

    def _wait(
        self,
        todo: deque[Action],
        live: dict[int, SuspendableMicrobatch],
        done: dict[int, SuspendableMicrobatch],
    ) -> None:
        waits = [(key, place) for _, key, place in self._waits(live)]
        oldest = next((one.microbatch for one in todo if one.kind is Kind.BACKWARD), None)
        first = done[oldest].first_gradient if oldest in done else None
        if first is not None:
            waits.append(first)
        self._core.mailbox.wait_for_any([key for key, _ in waits], waits[0][1])


def _part_of_mean(num_microbatches: int, result: Any, _: int) -> Any:
    return None if result is None else result / num_microbatches
