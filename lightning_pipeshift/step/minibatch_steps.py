"""The steps of the minibatches in flight on one stage: each may be suspended where it waits, and go
on in a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.errors import LayerError, some_of
from lightning_pipeshift.model.measuring.timing import Timer
from lightning_pipeshift.model.random.random_streams import stream_seed
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions
from lightning_pipeshift.step.minibatch_reports import UnderWay
from lightning_pipeshift.step.suspendable import Flight, SuspendableMicrobatch
from lightning_pipeshift.step.suspension import ThreadState
from lightning_pipeshift.values.program import DIGEST_MASK
from lightning_pipeshift.values.value import versions_in

if TYPE_CHECKING:
    from lightning_pipeshift.step.asynchronous import AsynchronousPipeline


class MinibatchSteps:
    """Runs the steps of minibatches.

    Args:
        pipeline: this rank's.
    """

    def __init__(self, pipeline: AsynchronousPipeline) -> None:
        self._pipeline = pipeline
        self._flight = Flight(is_asynchronous=True)
        self.under_way: dict[int, UnderWay] = {}
        """By the minibatch's number."""
        self.timers: dict[int, Timer] = {}
        """By minibatch in flight."""
        self.begins: UnderWay | None = None
        """The minibatch whose call this is."""
        self.leaves_tails = False
        """Whether the part of a step behind a read may run in a later call. Not where code of the
        user's runs between the calls, which has to find what each step has done."""
        self.in_call: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        """Context of a part of a step in a later call, given the tag of its minibatch; ``None`` for
        steps in no call."""
        self._versions: WeightVersions | None = None
        """While minibatches run."""
        # Of the steps since the pipeline was empty. All stages add it to their program's digest at
        # the same time.
        self._digest = 0

    def run(self, row: Row, ahead: Row) -> None:
        """Runs a stage's turn: see :class:`Minibatches`."""
        self._pipeline.planned.in_memory.begin_row((*row, *ahead))
        self._flight.todo.extend(row)
        self._go_on(self.leaves_tails and row[0].kind is Kind.FORWARD)

    def end(self) -> None:
        """Runs the rest of the steps that are suspended."""
        if self._flight.live and self._versions is None:
            with self.in_call(None):
                self._go_on(leaves_some=False)

    def _go_on(self, leaves_some: bool) -> None:
        """Runs what is to be run, and the steps that have begun."""
        values, flight, tails = self._pipeline.values, self._flight, self._pipeline.values.tails
        arm = None
        if backward := next((one for one in flight.todo if one.kind is Kind.BACKWARD), None):
            one = self.under_way[backward.microbatch]
            if one.minibatch.sums is not None and not one.given.accumulation.has_begun:
                # Its gradients are summed over the virtual machines.
                arm = one.minibatch.sums.arm
        newest = self.under_way[max(self.under_way)]
        seed = stream_seed("train", newest.given.step_number)
        versions = self._versions = self._pipeline.minibatches.versions
        watching = nullcontext() if tails is None else tails.watching(bool(flight.live), stays=True)
        try:
            with values.running(), watching:
                values.engine.go_on(flight, seed, self._begin, arm, tails, leaves_some)
        except BaseException as error:
            # What is suspended must not go on.
            self._flight = Flight(is_asynchronous=True)
            values.leave_tails()
            found = versions.explained(error) if isinstance(error, RuntimeError) else None
            if found is None:
                raise
            raise found from error
        finally:
            self._versions = None

    def _begin(self, number: int, outside: ThreadState) -> SuspendableMicrobatch:
        """The microbatch of a minibatch."""
        pipeline = self._pipeline
        one, values = self.under_way[number], pipeline.values
        given, batch = one.given, one.minibatch.batch

        def body(microbatch: SuspendableMicrobatch) -> None:
            result, logs = values.logged(given.step, batch, 0)
            if microbatch.is_ahead():
                microbatch.stall("")
            losses = one.minibatch.losses
            losses.add(result, logs, pipeline.channels.device)
            (outcome,) = losses.outcomes
            if not given.wants_result:
                outcome.result = None
            pipeline.reports.send_results(one, values.gathering)
            loss = outcome.loss
            if loss is not None and loss.requires_grad:
                microbatch.root = losses.weighed(0, given, pipeline.replicas.count)

        seed = stream_seed("train", given.step_number)
        values.core.step_number = given.step_number
        microbatch = one.microbatch = SuspendableMicrobatch(
            values.core, one.run, seed, 0, body, outside, values.tails, self._flight, number
        )
        microbatch.has_later_backward = True
        microbatch.timer = self.timers.get(number)
        microbatch.saves = pipeline.planned.in_memory.saves(
            pipeline.plan, number, batch, is_first=True
        )
        return microbatch

    @contextmanager
    def around(self, action: Action, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Context of an action.

        Args:
            action: it.
            inner: what all pipelines do around it.
        """
        versions = self._versions
        if versions is None:
            with inner:
                yield
            return
        one, moves = self.under_way[action.microbatch], self._pipeline.changes.migration
        is_later = action.kind is Kind.FORWARD and one is not self.begins
        with self.in_call(one.minibatch.tag) if is_later else nullcontext(), inner:
            versions.begin_action(action)
            try:
                with self._without_writes() if action.kind is Kind.FORWARD else nullcontext():
                    yield
            finally:
                versions.end_action(action)
            if moves is not None and one.microbatch.is_done:
                moves.end_action(action)

    @contextmanager
    def _without_writes(self) -> Iterator[None]:
        """Context of a forward. Raises LayerError if it writes to a trained parameter."""
        before = self._writes()
        yield
        if (now := self._writes()) != before:
            changed = [name for name, writes in now.items() if writes != before[name]]
            raise LayerError(
                f"The step writes to {some_of(list(map(repr, changed)))}, which is trained."
                " With an asynchronous schedule earlier minibatches in flight need its old"
                " values, and updates of them follow. Write to it in the `step` of a"
                ' subclass of your optimizer, or pass `schedule="1f1b"`.'
            )

    def _writes(self) -> dict[str, int]:
        """How often each trained parameter of this stage has been written to."""
        held = [use for use in self._pipeline.held.held if use.parameter.requires_grad]
        with without_torch_function_of_subclasses():
            writes: Iterable[int] = versions_in(use.parameter for use in held)
        return {use.name: count for use, count in zip(held, writes, strict=True)}

    def finish(self, number: int) -> None:
        """Lets go of a minibatch whose backward has run."""
        self.timers.pop(number, None)
        one = self.under_way.pop(number)
        # What a stage sends it does not change before the backward, when the others have got it.
        channels = self._pipeline.channels
        self._pipeline.values.core.mailbox.finish(one.run, all_but=8 * channels.num_stages)
        self._digest = (self._digest * 31 + one.microbatch.digest) & DIGEST_MASK
        one.microbatch.release()

    def are_over(self) -> None:
        """Called when the pipeline is empty."""
        self.timers.clear()
        core = self._pipeline.values.core
        core.digest, self._digest = (core.digest * 31 + self._digest) & DIGEST_MASK, 0
