"""Training on values: every stage runs the whole of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.compat.lightning_private import at_position, position_of
from lightning_pipeshift.lightning.asynchronous import AsynchronousTraining, Call
from lightning_pipeshift.lightning.optimizers import (
    GRADIENT_HOOKS,
    STEP_METHODS,
    with_options,
)
from lightning_pipeshift.lightning.patches import Adjustments
from lightning_pipeshift.lightning.steps import is_hook_used
from lightning_pipeshift.lightning.training import TrainingSteps
from lightning_pipeshift.model.execution.transfer import to_device
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.step.minibatches import Finished
from lightning_pipeshift.step.asynchronous import AsynchronousValuePipeline
from lightning_pipeshift.step.pipeline import ValuePipeline
from lightning_pipeshift.values.microbatch import OUTSIDE, Microbatch
from lightning_pipeshift.values.value import Value, run_by, running


class ValueTraining(TrainingSteps):
    """The training steps of a :class:`~lightning_pipeshift.step.pipeline.ValuePipeline`."""

    _pipeline: ValuePipeline

    def __init__(self, trainer: pl.Trainer, pipeline: ValuePipeline, *rest: Any) -> None:
        super().__init__(trainer, pipeline, *rest)
        # A Trainer keeps those of an earlier training, whose state stays where it is.
        trains = trainer.state.fn == TrainerFn.FITTING
        pipeline.find_optimizers = lambda: trainer.optimizers if trains else ()

    @property
    def _is_automatic(self) -> bool:
        return self._trainer.lightning_module.automatic_optimization

    def run(self, batch: Any, *rest: Any) -> Any:
        """Runs one training step: see :class:`TrainingSteps`."""
        if self._is_automatic or self._pipeline.runs_plain_steps:
            result = super().run(batch, *rest)
            self._num_losses += not self._is_automatic
            return result
        number = self._trainer.fit_loop.epoch_loop.total_batch_idx
        with self._context():
            report = self._pipeline.manual_step(self._given(batch, self._step_of(rest), number))
        self._log_again(report)
        self._num_steps += 1
        self._num_losses += 1
        return to_device(report.result, self._pipeline.channels.device)

    @property
    def leaves_backward(self) -> bool:  # type: ignore[override]
        """See :class:`TrainingSteps`."""
        return not self._is_automatic

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        step: Callable[[Callable[[], Any]], Any],
    ) -> Any:
        """See :class:`TrainingSteps`; in manual optimization, the user's step calls it."""
        if self._is_automatic:
            return super().optimizer_step(optimizer, closure, step)
        program = running()

        def in_step() -> Any:
            with run_by(program):
                return closure()

        assert isinstance(program, Microbatch)
        program.note("optimizer.step")
        try:
            with run_by(None):
                return step(in_step)
        finally:
            program.gradients = None

    @contextmanager
    def gradient_hooks(self) -> Iterator[None]:
        """Context of user code that may read and change gradients: as values, like in a step."""
        core, program = self._pipeline.core, running()
        is_alone = self._pipeline.channels.num_stages == 1
        if is_alone or core is None or not self._are_gradients_used or not self._is_automatic:
            with super().gradient_hooks():
                yield
            return
        assert isinstance(program, Microbatch)
        program.gradients, program.sets_gradients = None, False
        with core.seeing_parameters():
            yield
        if program.sets_gradients or any(map(_is_written, (program.gradients or {}).values())):
            # Only the first stage that holds a tied parameter has changed its gradient.
            with run_by(None):
                self.holdings.pass_shared_around()
        program.gradients = None

    def norms_of(self, parameters: list[Tensor], norm_type: float) -> Tensor:
        """See :class:`TrainingSteps`."""
        with run_by(None):
            return super().norms_of(parameters, norm_type)

    def adjust(self, adjustments: Adjustments) -> None:
        """See :class:`TrainingSteps`. What user code has kept, it may use at an epoch's end on one
        rank.
        """
        settle = self._pipeline.settle_values
        self._log_values(adjustments)
        adjustments.drain_before_validation(self._trainer, lambda: None, settle)

    def _log_values(self, adjustments: Adjustments) -> None:
        is_alone = self._pipeline.is_by_itself
        adjustments.log_values(self._trainer.lightning_module, _tensor_of if is_alone else _read)

    @purpose("a checkpoint's gathering")
    def drain(self, is_resumable: bool = False) -> None:
        """See :class:`TrainingSteps`."""
        self._pipeline.settle_values()


# User code between the calls of two steps, which may look at what steps have left.
_HOOKS_BETWEEN = "on_train_batch_start", "on_train_batch_end", *GRADIENT_HOOKS
_METHODS_BETWEEN = (
    *STEP_METHODS,
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
)


class AsynchronousValueTraining(AsynchronousTraining, ValueTraining):
    """:class:`AsynchronousTraining` on values."""

    _pipeline: AsynchronousValuePipeline

    def begin(self) -> None:
        """See :class:`AsynchronousTraining`."""
        super().begin()
        module = self._trainer.lightning_module
        is_seen = any(is_hook_used(self._trainer, hook) for hook in _HOOKS_BETWEEN)
        is_seen |= any(is_overridden(method, module) for method in _METHODS_BETWEEN)
        self._pipeline.leaves_tails = not is_seen
        self._pipeline.in_call = self._in_call

    def _call(self) -> Call:
        leaves = self._pipeline.leaves_tails
        return replace(super()._call(), position=position_of(self._trainer) if leaves else ())

    @contextmanager
    def _in_call(self, call: Call | None) -> Iterator[None]:
        """Context of a part of a step: the loop, and the optimizer's options, are those of its
        call.
        """
        if call is None:
            has_stopped = self._trainer.should_stop
            with self._context():
                yield
            # If a step has asked for it, its report says so.
            self._trainer.should_stop = has_stopped
            return
        options = with_options(self._trainer.optimizers[0], call.options)
        with at_position(self._trainer, call.position), options:
            yield

    def adjust(self, adjustments: Adjustments) -> None:
        """See :class:`AsynchronousTraining`."""
        self._log_values(adjustments)
        adjustments.log_steps_by(self._trainer, self._log_others)
        TrainingSteps.adjust(self, adjustments)

    def drain(self, is_resumable: bool = False) -> None:
        """See :class:`TrainingSteps`."""
        super().drain(is_resumable)
        self._pipeline.settle_values()

    @contextmanager
    def gradient_hooks(self) -> Iterator[None]:
        """See :class:`TrainingSteps`: of this stage's own layers."""
        with TrainingSteps.gradient_hooks(self):
            yield

    def _update(self, one: Finished) -> None:
        # A hook around the update finds tensors of this stage: the others are at other updates.
        with run_by(None):
            super()._update(one)


def _is_written(gradient: Tensor | None) -> bool:
    return isinstance(gradient, Value) and gradient.account.memory.num_writes > 0


def _tensor_of(value: Value) -> Tensor | None:
    return value.account.tensor


def _read(value: Value) -> Any:
    """A value that is logged in a step is gathered at the step's end; outside, it is read."""
    program = running()
    is_outside = isinstance(program, Microbatch) and program.turn == OUTSIDE
    return value.item() if is_outside else value
