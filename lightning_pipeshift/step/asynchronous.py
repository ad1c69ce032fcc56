"""One rank's part in an asynchronous pipeline: it does not drain between two batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.tensors.microbatch import split
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.plan.schedule.asynchronous import require_deepest_first
from lightning_pipeshift.plan.schedule.cut_over import cut_over
from lightning_pipeshift.runtime.comm.messages import Key
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation
from lightning_pipeshift.runtime.ownership.changes import Changes
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration, Turn
from lightning_pipeshift.runtime.ownership.weight_versions import InFlight, WeightVersions
from lightning_pipeshift.step.asynchronous_engine import AsynchronousEngine
from lightning_pipeshift.step.checksum import require_same_end
from lightning_pipeshift.step.minibatch_reports import MinibatchReports, UnderWay
from lightning_pipeshift.step.minibatch_steps import MinibatchSteps
from lightning_pipeshift.step.minibatches import Finished, Minibatch, Minibatches
from lightning_pipeshift.step.notices import Notice, Notices
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.step.plan_checks import require_movable, require_one_holder
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.training_batch import TrainingBatch
from lightning_pipeshift.step.value_steps import ValueSteps
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import running


def _finish_all(sums: Aggregation) -> tuple[()]:
    sums.finish()
    return ()


class AsynchronousPipeline(Pipeline):
    """A :class:`Pipeline` whose batches are minibatches: several of them are in flight, each at
    another stage, and stages make their updates at different times.

    No rank asks another one in a step. What the first rank decides travels down the pipeline ahead
    of the payload of the minibatch from which it holds, and what other ranks report travels up with
    the gradients.

    A stage's call for minibatch ``k`` depends on calls for ``k`` and earlier ones of other stages
    only, so any stage may wait in a call for all others to come to it, and nothing deadlocks.

    A parameter that several stages hold is trained by the first of them, which sends it to the
    others in each minibatch, in its own version; they get the trained bytes in an empty pipeline.
    """

    _engine_class = AsynchronousEngine

    _updates_apart = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        require_deepest_first(self.replicas.topology.stages_per_vm)
        self._minibatches: Minibatches | None = None
        """Those in flight, from the first one on."""
        self._notices = Notices(self.replicas, self.channels, self.section)
        self.reports = MinibatchReports(
            self.replicas,
            self.channels,
            self._reporting,
            self.section,
            lambda: self._notices.asks_to_end,
        )
        self.changes = Changes(self._start_moving)
        self._asked: list[Plan] = []
        """The plans that were asked for since the last minibatch; those of the first rank count."""
        self._old_aggregations: list[Aggregation] = []
        """Those of minibatches that have begun before layers changed their owners."""
        self.steps = MinibatchSteps(self)

    # --- as a Pipeline ---

    @property
    def coming_plan(self) -> Plan:
        """See :class:`Pipeline`."""
        return self._asked[-1] if self._asked else super().coming_plan

    def _request(self, plan: Plan, at_once: bool) -> None:
        parts = [plan]
        if self.replicas.rank == 0 and not at_once:
            parts = self.planning.parts_here(self.changes.next or self.plan, plan)
        in_order = self._aggregation is not None and self._aggregation.in_order
        require_movable(parts, self.plan, self.vm, self.held, self.values.core, in_order)
        self._asked = parts

    def _connect(self, holdings: Holdings, known: Core | None) -> ValueSteps:
        values = super()._connect(holdings, known)
        # Other stages may wait for what a suspended step does.
        values.before_meeting = self.steps.end
        return values

    def _number_of(self, key: Key) -> int | None:
        return next((n for n, one in self.steps.under_way.items() if one.run == key.step), None)

    def release(self) -> None:
        """See :class:`Pipeline`."""
        for sums in self._old_aggregations:
            sums.close()
        super().release()

    def begins_plain_step(self, *_: Any) -> bool:
        """Whether a step is the user's own, without additions: never. ``TrainingSteps`` asks."""
        return False

    # --- minibatches ---

    def drain(self) -> Iterator[Finished]:
        """Runs the backwards of all minibatches in flight, one at a time. Every stage calls this
        after the same minibatch.
        """
        minibatches = self._minibatches
        if minibatches is None or minibatches.are_over:
            return
        while minibatches.oldest is not None:
            self._make_place_for_gradients(minibatches.oldest)
            finished = minibatches.end_one()
            assert finished is not None
            yield self._finish(finished)
        minibatches.end_one()
        self.planning.end_gathering()
        self.channels.settle()
        self.values.leave_tails()
        self._in_memory.end_row()
        self.steps.are_over()
        gathering = self.values.gathering
        gathering.end(*gathering.begin(None))

    def before_minibatch(self, batch: Any, batch_idx: int, ends_update: bool) -> None:
        """Called before ``begin_minibatch``. Makes updates for which layers have come.

        Args:
            batch: the minibatch.
            batch_idx: its index in the epoch.
            ends_update: whether the minibatch is the last one of its update.
        """
        if self.changes.last is not None or self.changes.moving.run:
            # This stage may wait for layers whose old owner waits for a suspended step of this one.
            self.steps.end()
        if self._minibatches is None:
            return
        self._take_notice(batch, batch_idx)
        versions = self._minibatches.versions
        turn = Turn(self._minibatches.next, versions.update, ends_update)
        plan = self.changes.before_turn(turn)
        self.changes.begin(turn)
        if plan is not None:
            self._come_into_force(plan)
            self.planned.follow_with_memory(self.changes)
        self.planned.follow_moves_with_memory(self.changes)
        self._make_late_updates()

    def _make_late_updates(self) -> None:
        self.late_updates.begin_step()
        self.late_updates.make_due()

    def _come_into_force(self, plan: Plan) -> None:
        """Puts a plan in force, from the next minibatch on. Minibatches in flight have their values
        and gradients where these are: only backwards are left of them.
        """
        require_one_holder(plan, self.plan, self.vm, self.values.core)
        self.planned.known_plan = plan
        if self._aggregation is not None:
            # Updates that have begun are summed over their own owners.
            self._old_aggregations.append(self._aggregation)
            uses = self.held.uses
            self._aggregation = self._gradient_sums.aggregation(uses, plan, is_new=False)
        self.planned.say_who_has_no_work(has_moved=True)
        # Times under the old plan do not hold for the new one.
        self.planning.profiler.begin_anew(for_good=self.planning.profiler.is_over)
        self.planning.decisions.came_into_force(plan, is_last=self.changes.last is None)
        self.values.place(self.planned.stage_of())

    def _take_notice(self, batch: Any, batch_idx: int) -> None:
        """Learns what the first rank has decided, before a minibatch from which on it holds."""
        own = self._notice() if self.replicas.rank == 0 else None
        notice = self._notices.take(own, self.minibatches.next, batch, batch_idx, self.asks_to_end)
        self._asked = []
        if notice.plans:
            self.changes.request(Plan.from_json(text) for text in notice.plans)
        if notice.decision is not None:
            self.planning.accept(notice.decision)
            if notice.refusal:
                self.planning.decisions.refuse(notice.refusal)
            elif not notice.decision.is_new and self.coming_plan is self.plan:
                self.planned.known_plan = Plan.from_json(notice.decision.plan)
        self.is_to_end = notice.ends

    def _notice(self) -> Notice:
        """The first rank's decisions since the last minibatch."""
        refusal = ""
        if self._outside.has_requests:
            requests = self._outside.take_requests()
            when = f"about {self.num_steps_done + 2}"
            self._outside.carry_out(requests, when, self.migrate, self.messages)
        ends = self.asks_to_end or self.reports.ends
        planning = self.planning
        decision = planning.take_decision(self.coming_plan) if planning.has_decided else None
        if decision is not None and decision.is_new:
            try:
                self.adopt(Plan.from_json(decision.plan))
            except PlanError as error:
                refusal = str(error)
        plans = [part.to_json() for part in self._asked]
        return Notice(plans, decision, refusal, ends, self.asks_to_end)

    def forget_older_weights(self) -> None:
        """Called after :meth:`finish_updates` where a run may be resumed: that run has the newest
        weights only, so this one goes on with them, too.
        """
        if self._minibatches is not None:
            self._minibatches.versions.begin_anew()

    def finish_updates(self) -> None:
        """Called when :meth:`drain` is over: ends the moves that have begun, and makes the updates
        that are still to be made.
        """
        if self._minibatches is None:
            return
        if self.changes.migration is not None:
            self.changes.migration.settle(self._minibatches.next)
        self.planned.follow_with_memory(self.changes)
        self._make_late_updates()

    @contextmanager
    def updating(self, minibatch: Minibatch | None) -> Iterator[None]:
        """Context of an optimizer's step in an asynchronous schedule.

        Args:
            minibatch: the last one of the update; ``None`` for one that was late.
        """
        migration = self.changes.migration
        if minibatch is not None and migration is not None:
            migration.withhold(self.late_updates, minibatch.tag)
        parameters = [use.parameter for use in self.held.held]
        with self.minibatches.versions.updating(parameters, counts=minibatch is not None):
            yield
        self.changes.weights_are_final(self.minibatches.next)

    def _start_moving(self, plan: Plan, turn: Turn) -> Migration:
        """Begins to move layers for a plan.

        Args:
            plan: the plan.
            turn: the one before which every stage calls this.
        """
        earliest = turn.number + 1
        # The same minibatch in all virtual machines, so that the owners of an update are known.
        for vm in range(self.replicas.count):
            stages = zip(self.plan.placement.stages(vm), plan.placement.stages(vm), strict=True)
            for source, target in stages:
                if source != target:
                    earliest = max(earliest, cut_over(turn.number, source, min(source, target)))
        num_stages, minibatches = max(self.replicas.topology.stages_per_vm), self.minibatches
        in_flight = InFlight(minibatches.versions, minibatches.newest_update, earliest, num_stages)
        stage_of, optimizers = plan.placement.stages(self.vm), self.planned.optimizers
        migration = Migration(self.held, stage_of, optimizers, self._threads, in_flight)
        migration.before_turn(turn)
        return migration

    @property
    def minibatches(self) -> Minibatches:
        """Those in flight, from the first one on."""
        assert self._minibatches is not None
        return self._minibatches

    @property
    def minibatches_in_flight(self) -> list[Minibatch]:
        """Those that wait for their backward on this stage, the oldest first."""
        return self._minibatches.in_flight if self._minibatches is not None else []

    @property
    def num_waiting_changes(self) -> int:
        """How many changes of owners have been asked for, and have not begun."""
        return self.changes.num_waiting + bool(self._asked)

    @property
    def num_weight_versions(self) -> int:
        """How many versions of its weights the stage holds."""
        return self._minibatches.versions.num_versions if self._minibatches is not None else 1

    def _make_minibatches(self) -> Minibatches:
        versions = WeightVersions(delays=self.settings.schedule == "async-2bw")
        versions.follow(use.parameter for use in self.held.held)
        stage, num_stages = self.channels.stage, self.channels.num_stages
        self._minibatches = Minibatches(self.steps, stage, num_stages, versions)
        return self._minibatches

    def _make_place_for_gradients(self, minibatch: Minibatch) -> None:
        self.held.gradients.give_back()
        self.held.gradients.set_aside(keep=not minibatch.begins_update)

    def _finish(self, minibatch: Minibatch) -> Finished:
        report = self.reports.report(self.steps.under_way[minibatch.number])
        require_same_end(minibatch.is_last_batch, report.is_last_batch, minibatch.batch_idx)
        sums = minibatch.sums
        with self.section("[PipeShift] sum gradients"):
            self.held.gradients.collect(
                report.correction,
                partial(_finish_all, sums) if sums is not None else None,
                joins=sums is not None and not minibatch.begins_update,
            )
        self._close_old_aggregations()
        self.steps.finish(minibatch.number)
        return Finished(minibatch, report)

    def _close_old_aggregations(self) -> None:
        """Closes those that no minibatch in flight needs any more."""
        needed = [minibatch.sums for minibatch in self.minibatches_in_flight]
        for old in list(self._old_aggregations):
            if old not in needed:
                old.close()
                self._old_aggregations.remove(old)

    def begin_minibatch(self, given: TrainingBatch, tag: Any = None) -> list[Finished]:
        """Runs the forward of a minibatch, and the backward that is due with it.

        Args:
            given: the batch.
            tag: what belongs to it for the caller.

        Returns:
            the minibatch of that backward, if there is one.
        """
        self._note_begin()
        if self._minibatches is None:
            # Later batches are compared by :meth:`before_minibatch`.
            self.meets()
            self.check_batch(given.batch, given.batch_idx)
        ((part, size),) = split(given.batch, 1)
        planning, profiler = self.planning, self.planning.profiler
        planning.model.note_samples(size)
        self.prepare(self.key("train", given.step_number), given.step, part)
        self.planned.optimizers = given.optimizers
        minibatches = self._minibatches or self._make_minibatches()
        core, outside = self.values.core, running()
        assert isinstance(outside, Microbatch)
        losses = self._reporting.losses([size], given.loss_scale, 1)
        core.note(outside)
        core.begin(0 if minibatches.are_over else self.channels.num_stages - 1)
        minibatch = Minibatch(
            number=minibatches.next,
            batch=part,
            losses=losses,
            batch_idx=given.batch_idx,
            is_last_batch=given.is_last_batch,
            stops=given.stops,
            begins_update=not given.accumulation.has_begun,
            ends_update=not given.accumulation.goes_on,
            sums=self._sums(given.accumulation),
            tag=tag,
        )
        steps = self.steps
        steps.begins = steps.under_way[minibatches.next] = UnderWay(
            given, minibatch, core.num_steps
        )
        if minibatches.turn_has_backward:
            self._make_place_for_gradients(minibatches.oldest or minibatch)
        if planning.measures and not profiler.is_over:
            steps.timers[minibatches.next] = profiler.timer
        profiler.begin_step()
        finished = minibatches.begin(minibatch)
        steps.begins = None
        self.values.begin_between()
        profiler.end_step()
        self.num_steps_done = planning.decisions.step = given.step_number + 1
        found = [] if finished is None else [self._finish(finished)]
        if self.changes.last is None and not self.plan.placement.owners:
            own = self.plan.placement.layers_of(self.vm, self.channels.stage)
            lag = max(self.replicas.topology.stages_per_vm)
            planning.after_step(self.plan, own, self.planned.layers, given.optimizers, lag)
        return found

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        with self.steps.around(action, super()._around(action)):
            yield

    def take_metrics(self, report: Report) -> None:
        """Gives this stage's metrics the values that a minibatch has given them."""
        self.reports.take_metrics(report, self.values.gathering)
