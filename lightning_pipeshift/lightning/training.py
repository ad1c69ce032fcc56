"""Training: the pipeline's steps, and the hooks of Lightning's loop around them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_pipeshift.compat.lightning_private import combined_loader_of, skips_backward
from lightning_pipeshift.lightning.checks import check_backward
from lightning_pipeshift.lightning.loop_gradients import LoopGradients
from lightning_pipeshift.lightning.optimizers import (
    check_known,
    only_clips_by_norm,
    why_all_gradients,
    why_state_stays,
)
from lightning_pipeshift.lightning.over_stages import loss_scale_of
from lightning_pipeshift.lightning.patches import HOOKS, NO_LOSS, Adjustments
from lightning_pipeshift.lightning.run_tables import lanes_table, stages_table
from lightning_pipeshift.lightning.steps import StepContext, are_results_used, is_hook_used
from lightning_pipeshift.model.parameters.optimizer_trial import check_updates
from lightning_pipeshift.model.tensors.microbatch import size_or_one, split
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.model.user_state.logs import say_again
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.step.checksum import (
    require_same_lengths,
    require_same_lengths_over_replicas,
)
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.synchronous import SynchronousPipeline
from lightning_pipeshift.step.training_batch import Accumulation, TrainingBatch, UserStep
from lightning_pipeshift.timeline.recording import What
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.program import OUTSIDE
from lightning_pipeshift.values.value import Value, run_by, running


def _weighed(result: Any) -> Any:
    """A step's result; ``None`` if its ``weight`` is 0."""
    if isinstance(result, Mapping) and result.get("weight") is not None:
        return result if float(result["weight"]) else None
    return result


class TrainingSteps:
    """The training steps of one run on one rank, and its :attr:`gradients` outside of them.

    Args:
        trainer: the Trainer.
        pipeline: this rank's pipeline.
        context: that of a step.
        hosts: the name of each rank's host.
        say: shows a message to the user at once.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        pipeline: SynchronousPipeline,
        context: StepContext,
        hosts: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        self._context = context
        self._hosts = hosts
        self._say = say
        self.gradients = self._gradients_of(trainer, pipeline)
        pipeline.late_updates.make = self.gradients.update_late
        self._num_steps = 0
        self._num_losses = 0
        self._accumulates = False
        self._is_plain = False
        self._leaves_late = False
        # A Trainer keeps those of an earlier training, whose state stays where it is.
        trains = trainer.state.fn == TrainerFn.FITTING
        pipeline.find_optimizers = lambda: trainer.optimizers if trains else ()
        if trains:
            takes_number = is_param_in_hook_signature(
                trainer.lightning_module.training_step, "batch_idx", min_args=2
            )
            pipeline.user_step = self._step_of((0,) if takes_number else ())

    def begin(self) -> None:
        """Compares the length of the data over the ranks."""
        length, pipeline = self._trainer.num_training_batches, self._pipeline
        require_same_lengths([length], "training", pipeline.channels)
        require_same_lengths_over_replicas(length, pipeline.replicas)
        if max(pipeline.replicas.topology.stages_per_vm) > 1:
            check_updates(self._trainer.optimizers, pipeline.channels.device)
        pipeline.planning.model.state_stays = stays = why_state_stays(self._trainer.optimizers)
        if pipeline.memory is not None and not stays and not self.steps_itself:
            pipeline.memory.take_steps_of(self._trainer.optimizers)
        if pipeline.replicas.count > 1 and not self.steps_itself:
            reason = why_all_gradients(self._trainer)
            self._leaves_late = not reason and pipeline.settings.overlap_updates
            pipeline.planning.model.overlaps_updates = self._leaves_late
            pipeline.needs_norms = only_clips_by_norm(self._trainer)
            if reason:
                self._say(f"the optimizer waits until all gradients are summed: {reason}.")

    # --- the step ---

    def run(self, batch: Any, *rest: Any) -> Any:
        """Runs one training step.

        Args:
            batch: the batch.
            rest: the step's other arguments.

        Returns:
            the step's result, with the loss of the whole batch; :data:`NO_LOSS` if there is none.
        """
        trainer, pipeline = self._trainer, self._pipeline
        step = self._step_of(rest)
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if not self._num_steps:
            self._check_samples(batch)
        self._is_plain = pipeline.begins_plain_step(batch, step, number)
        if self._is_plain:
            result = pipeline.plain_training_step(batch, step, number)
            if self._pipeline.is_automatic:
                result = _weighed(result)
        elif not self._pipeline.is_automatic:
            result = self._by_hand(self._given(batch, step, number))
        else:
            check_backward(trainer.lightning_module)
            if pipeline.holdings is not None:
                check_known(trainer.optimizers, pipeline.root, pipeline.holdings.knows)
            result = self._pipelined(self._given(batch, step, number))
        if not self._num_steps:
            self._show_stages()
        while pipeline.messages:
            self._say(pipeline.messages.pop(0))
        self._num_steps += 1
        has_loss = result is not None and result is not NO_LOSS
        self._num_losses += has_loss or not self._pipeline.is_automatic
        return result

    def _check_samples(self, batch: Any) -> None:
        """Warns if a batch that is cut into microbatches has another number of samples than the
        DataLoader says: what is cut may be something else.
        """
        pipeline, loop = self._pipeline, self._trainer.fit_loop
        stages_per_vm = pipeline.replicas.topology.stages_per_vm
        loaders = combined_loader_of(loop).flattened
        expected = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
        size = size_or_one(batch)
        is_short = size < (expected or 0) and loop.epoch_loop.batch_progress.is_last_batch
        if expected in (None, size) or is_short:
            return
        if pipeline.is_automatic and pipeline.settings.num_microbatches(stages_per_vm) > 1:
            rank_zero_warn(
                f"PipeShift: the DataLoader makes batches of {expected} samples, and this batch is"
                f" cut into microbatches as one of {size}: that is the first dimension of its"
                " first tensor. If the model takes that dimension as the samples, all is well. If"
                " not (the batch is a list with one tensor for each sample, for example), let"
                " `collate_fn` stack the samples, or set `microbatches=1`."
            )

    def _by_hand(self, given: TrainingBatch) -> Any:
        """Runs a step that calls ``backward`` and the optimizers itself."""
        with self._context():
            report = self._pipeline.manual_step(given)
        self._log_again(report)
        return to_device(report.result, self._pipeline.channels.device)

    def _step_of(self, rest: Sequence[Any]) -> UserStep:
        """The user's step, in the user's precision, with its arguments after the batch."""

        def run(root: Any, part: Any, *rest: Any) -> Any:
            with self._trainer.precision_plugin.train_step_context():
                return root.training_step(part, *rest)

        return UserStep(run, tuple(rest))

    def measure(self, batch: Any, *rest: Any) -> Measured | None:
        """Measures the machines and the model without training: the result is on the first rank.
        Every rank calls this, before the first batch, with the arguments of :meth:`run`.
        """
        pipeline = self._pipeline
        number = pipeline.settings.num_microbatches(pipeline.replicas.topology.stages_per_vm)
        part = split(batch, number)[0][0]
        with self._context():
            return pipeline.planned.measure(
                pipeline.key("train", 0), self._step_of(rest), part, pipeline.user_step
            )

    def _pipelined(self, given: TrainingBatch) -> Any:
        with self._context():
            report = self._pipeline.training_step(given)
        # The code that has asked for it may have run on the last stage only.
        self._trainer.should_stop |= report.stops
        self._log_again(report)
        return self._result_of(report)

    def _given(self, batch: Any, step: UserStep, number: int) -> TrainingBatch:
        """A batch, with all that Lightning's loop says of it."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        return TrainingBatch(
            batch=batch,
            batch_idx=epoch_loop.batch_idx,
            step=step,
            step_number=number,
            num_accumulated=trainer.accumulate_grad_batches,
            scale=loss_scale_of(trainer.precision_plugin),
            optimizers=trainer.optimizers,
            wants_result=are_results_used(trainer, "train_step"),
            is_last_batch=bool(epoch_loop.batch_progress.is_last_batch),
            accumulation=Accumulation(
                has_begun=bool(epoch_loop.batch_idx % trainer.accumulate_grad_batches),
                goes_on=self._accumulates,
            ),
            keeps_gradients=self._keeps_gradients(epoch_loop.batch_idx),
            stops=lambda: bool(trainer.should_stop),
            skips_backward=skips_backward(trainer),
            leaves_late=self._leaves_late and not self._accumulates,
        )

    def _log_again(self, report: Report) -> None:
        module, pipeline = self._trainer.lightning_module, self._pipeline
        # The logged values are already those of all virtual machines.
        synchronised = False if pipeline.replicas.count > 1 else None
        say_again(report.logs, module.log, module, pipeline.channels.device, synchronised)

    def _result_of(self, report: Report) -> Any:
        if report.loss is None:
            return NO_LOSS
        loss = to_device(report.loss, self._pipeline.channels.device)
        return {**report.result, "loss": loss} if isinstance(report.result, Mapping) else loss

    def _keeps_gradients(self, batch_idx: int) -> bool:
        """Whether Lightning will not zero the gradients after the step, or user code may read them
        before.
        """
        trainer = self._trainer
        return bool(
            batch_idx % trainer.accumulate_grad_batches
            or is_overridden("optimizer_zero_grad", trainer.lightning_module)
            or is_hook_used(trainer, "on_before_zero_grad")
        )

    def _show_stages(self) -> None:
        """Shows a table of the stages with their layers, if the Trainer prints a summary of the
        model.
        """
        pipeline = self._pipeline
        is_asked = any(
            isinstance(callback, ModelSummary)
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
        )
        if not is_asked or not pipeline.planned.has_plan or pipeline.channels.num_stages == 1:
            return
        self._say(stages_table(pipeline.plan, pipeline.replicas.topology, self._hosts))

    # --- as AsynchronousTraining does otherwise ---

    _gradients_of = LoopGradients
    """Makes :attr:`gradients`, given the Trainer and the pipeline."""
    value_hooks = HOOKS
    """The names of the hooks in which parameters are values."""
    steps_itself = False
    """Whether ``run`` makes the optimizer's steps, instead of Lightning's loop."""

    @property
    def leaves_backward(self) -> bool:
        """Whether the user's step calls Lightning's own backward."""
        return not self._pipeline.is_automatic

    def adjust(self, adjustments: Adjustments) -> None:
        """Makes Lightning's loop end what is under way before validation and at its end. What user
        code has kept, it may use at an epoch's end on one rank.
        """
        settle, finish = self._pipeline.settle_values, self._pipeline.late_updates.finish
        self._log_values(adjustments)

        def end_epoch() -> None:
            finish()
            settle()

        adjustments.drain_before_validation(self._trainer, finish, end_epoch)

    def _log_values(self, adjustments: Adjustments) -> None:
        is_alone = self._pipeline.is_by_itself
        adjustments.log_values(self._trainer.lightning_module, _tensor_of if is_alone else _read)
        if not is_alone:
            adjustments.show_values(self._trainer, self.value_hooks, self.gradients.hook)

    @purpose("a checkpoint's gathering")
    def drain(self, is_resumable: bool = False) -> None:
        """Ends all batches that are under way. Every rank calls this after the same batch.

        Args:
            is_resumable: whether a run may be resumed from the state after it. One that goes on
                without a break then has to compute the same as one that is resumed.
        """
        self._pipeline.late_updates.finish()
        self._pipeline.settle_values()

    # --- the hooks of Lightning's loop ---

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Context of the steps that no optimizer step follows."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(self, loss: Tensor, plain: Callable[[], Tensor]) -> Tensor:
        """Adds the step's gradients to the parameters' own, and returns the loss. A single device
        computes them only now.

        Args:
            loss: the step's.
            plain: Lightning's own backward.
        """
        if self._is_plain:
            with (
                run_by(None),
                self._pipeline.section("[PipeShift] backward", What.ACTION, "B0"),
            ):
                return plain()
        return self.gradients.hand_over(loss)

    # --- the end ---

    def end(self) -> None:
        """Makes the virtual machines' running statistics equal. Warns if no step had a loss."""
        if self._num_steps and not self._num_losses:
            rank_zero_warn(
                f"PipeShift: `training_step` returned None in all {self._num_steps} steps of this"
                " run, so nothing was learned. Return the loss, or a dict with 'loss'."
            )
        self._pipeline.match_replicas(parameters_too=False)
        if lanes := self._pipeline.channels.traffic:
            self._say(lanes_table(lanes))


def _tensor_of(value: Tensor) -> Tensor | None:
    return value.account.tensor if isinstance(value, Value) else value


def _read(value: Tensor) -> Any:
    """A value that is logged in a step is gathered at the step's end; outside, it is read."""
    program = running()
    is_outside = isinstance(program, Microbatch) and program.turn == OUTSIDE
    return value.item() if is_outside else value
