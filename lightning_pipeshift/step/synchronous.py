"""One rank's part in a synchronous pipeline: a step's gradients are complete when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.tensors.microbatch import size_or_one, split
from lightning_pipeshift.model.user_state.logs import LoggedValue, merge_logs
from lightning_pipeshift.model.user_state.metrics import BatchMetrics
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.plan.schedule.schedules import forward_only, schedule_named
from lightning_pipeshift.runtime.comm.channels import PostedSum
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.ownership.changes import Changes
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration, Turn
from lightning_pipeshift.step.checksum import require_same_end
from lightning_pipeshift.step.losses import Losses
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.step.step_report import Report, merge_reports
from lightning_pipeshift.step.training_batch import WAIT, TrainingBatch, UserStep
from lightning_pipeshift.step.value_steps import ValueSteps
from lightning_pipeshift.step.votes import Votes
from lightning_pipeshift.timeline.recording import REPORT, What
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gathering import Prefetch, Structure
from lightning_pipeshift.values.value import run_by


class SynchronousPipeline(Pipeline):
    """A :class:`Pipeline` whose stages end each step together. Layers change their owners between
    two steps.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.changes = Changes(self._start_moving)
        self._votes = Votes(
            self.replicas.world,
            lambda: self.asks_to_end,
            lambda: self.planning.has_decided or self._outside.has_requests,
        )

    def _connect(self, holdings: Holdings, known: Core | None) -> ValueSteps:
        self._batch_metrics = BatchMetrics(self.root)
        return super()._connect(holdings, known)

    def begins_plain_step(self, batch: Any, step: UserStep, step_number: int) -> bool:
        """Whether the coming training step is the user's own, without additions: on one device, if
        the batch is not split, nothing is measured, and no layer is recomputed or moves. Makes the
        plan on the first batch, as the plan decides about recomputation.

        Args:
            batch: the whole batch.
            step: runs the user's ``training_step``.
            step_number: counts batches over the whole run.
        """
        stages_per_vm = self.replicas.topology.stages_per_vm
        if not self.settings.leaves_steps_whole(stages_per_vm):
            return False
        self.prepare(self.key("train", step_number), step, batch)
        return not self.plan.recomputed(self.vm) and self.changes.last is None

    def plain_training_step(self, batch: Any, step: UserStep, step_number: int) -> Any:
        """Runs the forward of a training step, after :meth:`begins_plain_step` returned ``True``.
        Lightning runs its backward.

        Returns:
            what the user's step returned.
        """
        self.meets()
        self._note_begin()
        result = self.plain_forward("train", step_number, step, batch)
        self.is_to_end = self.asks_to_end
        if self._outside.has_requests:
            self._open_mail()
        self.num_steps_done = step_number + 1
        return result

    @purpose("a training step")
    def training_step(self, given: TrainingBatch) -> Report:
        """Runs a whole training step, forwards and backwards, and saves its gradients for
        ``Strategy.backward``.

        Args:
            given: the batch.
        """
        number = self.settings.num_microbatches(self.replicas.topology.stages_per_vm)
        slices = split(given.batch, number)
        self.planning.model.note_samples(sum(size for _, size in slices))
        self._begin_step(given, slices[0][0])
        report = self._run_microbatches(given, slices)
        # Optimizers' state may arrive until now, and weights of layers that were not called.
        self._finish_change()
        if not given.skips_backward:
            self._collect_gradients(given, report)
        self._end_step(given)
        return report

    def _begin_step(self, given: TrainingBatch, part: Any) -> None:
        """Begins a training step.

        Args:
            given: the batch.
            part: its first microbatch.
        """
        self.meets()
        self._note_begin()
        self.late_updates.begin_step()
        self.channels.settle()
        self.check_batch(given.batch, given.batch_idx)
        self.prepare(self.key("train", given.step_number), given.step, part)
        self._votes.before_step()
        self.planned.optimizers = given.optimizers
        self._change_owners(given)
        self.planned.follow_moves_with_memory(self.changes)

    def _end_step(self, given: TrainingBatch) -> None:
        self._votes.after_step()
        self.changes.begin(Turn(given.step_number))
        if given.accumulation.goes_on:
            self.changes.weights_are_final(given.step_number + 1)
        self.planned.follow_moves_with_memory(self.changes)
        self.is_to_end = self._votes.are_for_end
        core = self.values.core
        if core.result_bytes and not self.planned.is_timed:
            self.planning.model.note_results(core.result_bytes, core.kinds)
        core.result_bytes.clear()
        if self.changes.last is None and self.plan.is_foreseen:
            own = self.plan.placement.layers_of(self.vm, self.channels.stage)
            self.planning.after_step(self.plan, own, self.planned.layers, given.optimizers)
        if self._votes.are_for_requests:
            self._open_mail()
        self.num_steps_done = self.planning.decisions.step = given.step_number + 1

    def _run_microbatches(self, given: TrainingBatch, slices: Sequence[tuple[Any, int]]) -> Report:
        sizes = [size for _, size in slices]
        losses = self._reporting.losses(sizes, given.loss_scale, self.plan.microbatches)
        sums = None if given.skips_backward else self._sums(given.accumulation)
        arm = sums.arm if sums is not None and not given.accumulation.has_begun else None
        row = schedule_named(self.plan.schedule)(self.channels.num_stages, len(slices))
        has_begun = False

        def begin_gradients(adds: bool) -> None:
            nonlocal has_begun
            if not has_begun:
                self._begin_gradients(given, adds)
            has_begun = True

        begun: list[tuple[Structure, PostedSum, Prefetch]] = []

        def root_of(found: tuple[Any, list[LoggedValue]], turn: int) -> Any:
            losses.add(*found, self.channels.device)
            if not given.wants_result:
                losses.outcomes[-1].result = None
            if losses.is_complete:
                if len(slices) > 1:
                    self._batch_metrics.end()
                # They travel while the backwards run.
                everything = list(losses.outcomes), given.is_last_batch
                begun.append(self.values.gathering.begin(everything))
            loss = losses.outcomes[turn].loss
            if loss is None or not loss.requires_grad or given.skips_backward:
                return None
            begin_gradients(losses.outcomes[turn].weight is None)
            return losses.weighed(turn, given, self.replicas.count)

        profiler = self.planning.profiler
        is_measured = self.planning.measures and not profiler.is_over
        if len(slices) > 1:
            self._batch_metrics.begin()
        profiler.begin_step()
        self._in_memory.begin_row(row[self.channels.stage])
        self.run_step(
            "train",
            given.step_number,
            [part for part, _ in slices],
            partial(self.values.logged, given.step),
            row[self.channels.stage],
            root_of,
            arm,
            profiler.timers(sizes) if is_measured else {},
            lambda turn: self._in_memory.saves(self.plan, turn, slices[turn][0], not turn),
        )
        profiler.end_step()
        self._in_memory.end_row()
        # Where there was no backward.
        self.late_updates.finish()
        if not given.skips_backward:
            begin_gradients(True)
            with self.section("[PipeShift] sum gradients"):
                self.held.gradients.sum_shared()
        return self._report(losses, given, *begun[0])

    def _begin_gradients(self, given: TrainingBatch, adds: bool) -> None:
        """Called before the first backward of a step.

        Args:
            given: its batch.
            adds: whether its gradients need no factor when the step is over. Then the backwards add
                to the gradients of earlier batches: other sums have other bits.
        """
        core, holdings = self.values.core, self.held
        adds = adds and given.accumulation.has_begun and self.replicas.count == 1
        stage = self.channels.stage
        with run_by(None):
            holdings.gradients.set_aside(given.keeps_gradients, adds)
            for use in holdings.gradients.shared if adds else ():
                # All stages that hold it have the sum: one goes on with it.
                if core.parameter_owners.get(use.parameter, stage) != stage:
                    use.parameter.grad = None

    def _collect_gradients(self, given: TrainingBatch, report: Report) -> None:
        sums = self._sums(given.accumulation)
        finish = partial(self._finish_sums, sums, given, report) if sums is not None else None
        joins = sums is not None and given.accumulation.has_begun
        with self.section("[PipeShift] sum gradients"):
            self.held.gradients.collect(report.correction, finish, joins)

    def _finish_sums(
        self, sums: Aggregation, given: TrainingBatch, report: Report
    ) -> list[nn.Parameter]:
        """Waits for sums over the virtual machines. Returns the parameters with a later sum."""
        has_loss = report.loss is not None and bool(report.correction)
        measure = self.held.gradients.measure_norms if self.needs_norms else None
        groups = sums.finish(given.leaves_late and has_loss, measure)
        # Those of several batches are corrected before they are summed.
        correction = 1.0 if given.accumulation.has_begun else report.correction
        self.late_updates.take(sums, groups, correction)
        return [parameter for group in groups for parameter in group.parameters]

    def _report(
        self,
        losses: Losses,
        given: TrainingBatch,
        everything: Structure,
        posted: PostedSum,
        prefetch: Prefetch,
    ) -> Report:
        """The report of a step, on every stage."""
        with self.section(WAIT, What.WAIT, REPORT):
            found, is_last_batch = self.values.gathering.end(everything, posted, prefetch)
        require_same_end(given.is_last_batch, is_last_batch, given.batch_idx)
        report = self._reporting.report(losses, found, is_last_batch)
        report.stops = given.stops()
        self.meets()
        return merge_reports(self.replicas.gather(report), self.vm)

    @purpose("a training step")
    def manual_step(self, given: TrainingBatch) -> Report:
        """Runs a training step that calls ``backward`` and the optimizers itself: with the whole
        batch, as one microbatch.
        """
        self._begin_step(replace(given, keeps_gradients=True), given.batch)
        row = forward_only(self.channels.num_stages, 1)[self.channels.stage]
        function = partial(self.values.logged, given.step)
        ((result, logged),) = self.run_step(
            "train", given.step_number, [given.batch], function, row
        )
        size = size_or_one(given.batch)
        logs = merge_logs([logged], [size], [float(size)])
        everything = result, logs, given.is_last_batch
        gathering = self.values.gathering
        result, logs, is_last_batch = gathering.end(*gathering.begin(everything))
        require_same_end(given.is_last_batch, is_last_batch, given.batch_idx)
        report = Report(result, logs, is_last_batch, size=size, stops=given.stops())
        self._end_step(given)
        return report

    # --- another plan ---

    def _request(self, plan: Plan, at_once: bool) -> None:
        # Owners change between two steps. No step waits for that: layers are sent while it runs.
        now = self.changes.next or self.plan
        self.changes.request([plan] if at_once else self.planning.parts_of(now, plan))

    def _start_moving(self, plan: Plan, _: Turn) -> Migration:
        """Prepares the move of layers for a plan."""
        # The stages that the new owners are now.
        now = self.replicas.topology.ranks[self.vm]
        stages = [now.index(rank) for rank in plan.ranks[self.vm]]
        stage_of = [stages[stage] for stage in plan.placement.stages(self.vm)]
        return Migration(self.held, stage_of, self.planned.optimizers, self._threads)

    def _put_in_force(self, plan: Plan) -> None:
        """Puts a plan in force, between two steps."""
        self._reorder(plan)
        self.planned.known_plan = plan
        self.planned.follow_with_memory(self.changes)
        if self._aggregation is not None:
            self._aggregation.close()
            self._aggregation = self._gradient_sums.aggregation(self.held.uses, plan, is_new=False)
        self.planning.decisions.came_into_force(plan, is_last=self.changes.last is None)
        self.values.place(self.planned.stage_of())

    def _change_owners(self, given: TrainingBatch) -> None:
        """Puts the plan in force whose layers have been prepared for it, between two steps."""
        if self.changes.last is not None:
            self.late_updates.finish()
        if self.changes.next is not None:
            self.values.match_holders()
        turn = Turn(given.step_number, keeps_gradients=given.keeps_gradients)
        plan, migration = self.changes.before_turn(turn), self.changes.migration
        if plan is None or migration is None:
            return
        self._put_in_force(plan)
        if not self.is_automatic or given.keeps_gradients:
            # The step itself updates the weights, or adds to the gradients.
            self._finish_change()
            return
        for layer in migration.awaited:
            self.values.core.await_before(layer, migration.await_layer)

    def _finish_change(self) -> None:
        migration = self.changes.migration
        if migration is not None and not migration.is_over:
            migration.finish()
            self.planned.say_who_has_no_work(has_moved=True)
            # Times under the old plan, and of this step, do not hold for the new plan.
            profiler = self.planning.profiler
            profiler.begin_anew(for_good=profiler.is_over)

    def _open_mail(self) -> None:
        """Carries out requests from other processes, and decisions of the first rank."""
        has_decided = self.planning.has_decided
        asked = (self._outside.take_requests(), has_decided)
        requests, has_decided = self.replicas.world.share_object(asked, source=0)
        when = f"from step {self.num_steps_done + 2}"
        self._outside.carry_out(requests, when, self.migrate, self.messages)
        if has_decided:
            decision = self.planning.announce(self.coming_plan)
            plan = Plan.from_json(decision.plan)
            if decision.is_new:
                try:
                    self.adopt(plan)
                except PlanError as error:
                    self.planning.decisions.refuse(str(error))
            elif self.changes.last is None:
                self.planned.known_plan = plan

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        if self.late_updates.is_pending:
            self._update_before(action)
        with super()._around(action):
            yield

    def _update_before(self, action: Action) -> None:
        """Makes late updates that are due anyway; before a backward, all: of layers that the step
        has not called, too.
        """
        with run_by(None):
            if action.kind is Kind.FORWARD:
                self.late_updates.make_due()
            else:
                self.late_updates.finish()
