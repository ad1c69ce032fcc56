"""Training with an asynchronous schedule: what belongs to a minibatch stays with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.compat.lightning_private import (
    accumulates,
    at_position,
    in_training_step,
    logger_connector,
    logs_step,
    position_of,
    skips_backward,
    step_metrics,
    step_of_loggers,
)
from lightning_pipeshift.compat.torch_private import mark_as_stepped
from lightning_pipeshift.errors import BatchError, ConfigurationError
from lightning_pipeshift.lightning.loop_gradients import LoopGradients, OptimizerStep
from lightning_pipeshift.lightning.optimizers import (
    GRADIENT_HOOKS,
    STEP_METHODS,
    OptimizerOptions,
    options_of,
    step_with,
    with_options,
)
from lightning_pipeshift.lightning.patches import HOOKS, Adjustments
from lightning_pipeshift.lightning.steps import is_hook_used
from lightning_pipeshift.lightning.training import TrainingSteps
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.step.asynchronous import AsynchronousPipeline
from lightning_pipeshift.step.minibatches import Finished
from lightning_pipeshift.step.training_batch import TrainingBatch
from lightning_pipeshift.values.value import run_by


@dataclass(frozen=True)
class Call:
    """The state of Lightning's loop when a minibatch begins.

    Args:
        number: counts the minibatches since the pipeline was empty.
        options: of the optimizer.
        dtype: torch's default.
        step_of_loggers: under which its values are logged.
        position: of the loop, if a part of the minibatch's step may run in a later call.
    """

    number: int
    options: OptimizerOptions
    dtype: torch.dtype
    step_of_loggers: int
    position: tuple[Any, ...] = ()


# User code between the calls of two steps, which may look at what steps have left.
_HOOKS_BETWEEN = "on_train_batch_start", "on_train_batch_end", *GRADIENT_HOOKS
_METHODS_BETWEEN = (
    *STEP_METHODS,
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
)


class _OwnGradients(LoopGradients):
    """Each stage is at another batch: user code sees the gradients of the stage's own layers, and
    ``training_step`` makes the updates.
    """

    _pipeline: AsynchronousPipeline
    is_in_optimizer_step = False
    """Whether Lightning's loop has called ``Strategy.optimizer_step``."""

    def hooks(self) -> AbstractContextManager[None]:
        """See :class:`LoopGradients`."""
        return self.of_this_stage()

    def norms(self, parameters: list[Tensor], norm_type: float) -> Tensor:
        """Raises ConfigurationError."""
        raise ConfigurationError(
            "An asynchronous schedule: the norms of all gradients are not known when a stage"
            " steps, as the stages are at different batches. Clip by value, log the norms of a"
            " stage's own gradients, or use schedule='1f1b'."
        )

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: OptimizerStep
    ) -> Any:
        """Returns the closure's result."""
        self.is_in_optimizer_step = True
        try:
            return closure()
        finally:
            self.is_in_optimizer_step = False

    def _updating_late(self) -> AbstractContextManager[None]:
        return self._pipeline.updating(None)


class AsynchronousTraining(TrainingSteps):
    """The training steps of one run with an asynchronous schedule.

    In a call of ``training_step`` a stage runs the forward of the loader's batch, and the backward
    of an earlier one, whose update follows. That update has the learning rate of its own
    minibatch, and its logged values go to the loggers under its own number. All stages log the
    values of a minibatch in the same call, when they have reached stage 0.
    """

    # At these, each stage is at another batch.
    value_hooks = HOOKS - {"on_before_backward", *GRADIENT_HOOKS}
    steps_itself = True
    _gradients_of = _OwnGradients
    gradients: _OwnGradients
    # It has no `training_step`, `manual_step` or `plain_training_step`: what would call them is
    # overridden, or never reached.
    _pipeline: AsynchronousPipeline  # type: ignore[assignment]

    def __init__(self, trainer: pl.Trainer, pipeline: AsynchronousPipeline, *rest: Any) -> None:
        super().__init__(trainer, pipeline, *rest)  # type: ignore[arg-type]
        self._arrived: deque[Finished] = deque()
        """Minibatches that have had their update here, and whose values are not logged yet."""
        self._number = 0

    def adjust(self, adjustments: Adjustments) -> None:
        """See :class:`TrainingSteps`. The values of a minibatch are logged under its own number."""
        self._log_values(adjustments)
        adjustments.log_steps_by(self._trainer, self._log_others)
        end_epoch = partial(self.drain, is_resumable=True)
        adjustments.drain_before_validation(self._trainer, self.drain, end_epoch)

    def begin(self) -> None:
        """Checks what an asynchronous schedule needs of the Trainer."""
        super().begin()
        trainer, schedule = self._trainer, self._pipeline.settings.schedule
        depth, length = self._depth, trainer.num_training_batches
        clip = trainer.gradient_clip_val
        if clip and trainer.gradient_clip_algorithm != "value":
            raise ConfigurationError(
                f"schedule={schedule!r} and gradient_clip_val={clip}: the norm of all gradients is"
                " not known when a stage steps, as the stages are at different batches. Use"
                " gradient_clip_algorithm='value', or schedule='1f1b'."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            raise ConfigurationError(
                f"schedule={schedule!r} and precision='16-mixed': whether the gradients of a batch"
                " overflow on another stage is not known when a stage steps. Use"
                " precision='bf16-mixed', or schedule='1f1b'."
            )
        if length < depth:
            raise BatchError(
                f"schedule={schedule!r}: an epoch has {length} batches, fewer than the {depth}"
                f" stages, so the pipeline is never full. Use at least {depth} batches, fewer"
                " stages, or schedule='1f1b'."
            )
        for optimizer in trainer.optimizers:
            # Schedulers would warn that they step before their optimizer does.
            mark_as_stepped(optimizer)
        module = trainer.lightning_module
        is_seen = any(is_hook_used(trainer, hook) for hook in _HOOKS_BETWEEN)
        is_seen |= any(is_overridden(method, module) for method in _METHODS_BETWEEN)
        self._pipeline.steps.leaves_tails = not is_seen
        self._pipeline.steps.in_call = self._in_call

    def _check_call(self, ends_update: bool) -> None:
        """Checks what may change from batch to batch."""
        depth, accumulated = self._depth, self._trainer.accumulate_grad_batches
        if self._pipeline.settings.schedule == "async-2bw" and accumulated < depth:
            raise ConfigurationError(
                f"schedule='async-2bw' and accumulate_grad_batches={accumulated} on {depth} stages:"
                " with two versions of the weights, an update needs the gradients of at least as"
                f" many batches as there are stages. Use accumulate_grad_batches={depth} or more,"
                " or schedule='async'."
            )
        if skips_backward(self._trainer):
            raise ConfigurationError(
                "An asynchronous schedule: `StochasticWeightAveraging` of a model with BatchNorm"
                " trains its last epoch without backwards, and here backwards follow in later"
                " batches. Use schedule='1f1b', or another normalisation."
            )
        if ends_update and not self.gradients.is_in_optimizer_step:
            raise ConfigurationError(
                "An asynchronous schedule: `optimizer_step` of the LightningModule has called its"
                " closure without `optimizer.step(closure=...)`. The update of a batch follows its"
                " backward, in a later call, so it cannot be left out. Call `optimizer.step` with"
                " the closure in each call, or use schedule='1f1b'."
            )

    @property
    def _depth(self) -> int:
        return max(self._pipeline.replicas.topology.stages_per_vm)

    # --- a call ---

    def _pipelined(self, given: TrainingBatch) -> Any:
        trainer, pipeline = self._trainer, self._pipeline
        call = self._call()
        self._number += 1
        ends_update = not given.accumulation.goes_on
        self._check_call(ends_update)
        pipeline.before_minibatch(given.batch, given.batch_idx, ends_update)
        has_stopped = trainer.should_stop
        with self._context():
            finished = pipeline.begin_minibatch(given, tag=call)
        # If the step has asked for it, its report says so: all stages stop in the call in which
        # they log the minibatch.
        trainer.should_stop = has_stopped
        for one in finished:
            with run_by(None):
                self._update(one)
        result: Any = torch.full((), torch.nan)
        while (
            self._arrived and self._arrived[0].minibatch.tag.number <= call.number + 1 - self._depth
        ):
            result = self._log(self._arrived.popleft())
        return result

    def _call(self) -> Call:
        trainer = self._trainer
        position = position_of(trainer) if self._pipeline.steps.leaves_tails else ()
        options = options_of(trainer.optimizers[0])
        dtype = torch.get_default_dtype()
        return Call(self._number, options, dtype, step_of_loggers(trainer), position)

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

    def drain(self, is_resumable: bool = False) -> None:
        """See :class:`TrainingSteps`."""
        drained = self._pipeline.drain()
        while True:
            with self._context():
                one = next(drained, None)
            if one is None:
                break
            with run_by(None):
                self._update(one)
        self._pipeline.finish_updates()
        if is_resumable:
            self._pipeline.forget_older_weights()
        self._number = 0
        if self._arrived:
            with in_training_step(self._trainer):
                while self._arrived:
                    self._log(self._arrived.popleft())
            logger_connector(self._trainer).on_batch_end()
        self._pipeline.settle_values()

    def end(self) -> None:
        """See :class:`TrainingSteps`. Says which moves were asked for too late."""
        super().end()
        if self._pipeline.num_waiting_changes:
            self._say(
                f"{self._pipeline.num_waiting_changes} changes of owners were given up, as training"
                " has ended before they could begin."
            )

    def backward(self, loss: Tensor, plain: Callable[[], Tensor]) -> Tensor:
        """Returns the loss: the backward has run in the call of ``training_step``."""
        return loss

    # --- an update ---

    def _update(self, one: Finished) -> None:
        """Takes the gradients of a minibatch; if it is the last one of an update, makes it. A hook
        around the update finds tensors of this stage: the others are at other updates.
        """
        self._arrived.append(one)
        trainer, holdings, loss = self._trainer, self.gradients.holdings, one.report.loss
        module, precision = trainer.lightning_module, trainer.precision_plugin
        if loss is None:
            holdings.gradients.hand_over()
        else:
            loss = precision.pre_backward(to_device(loss, self._pipeline.channels.device), module)
            holdings.gradients.hand_over()
            precision.post_backward(loss, module)
        if not one.minibatch.ends_update:
            holdings.gradients.withdraw()
            return
        with (
            self._pipeline.updating(one.minibatch),
            self.gradients.around_step_hooks(trainer.optimizers[0]),
        ):
            in_flight = self._pipeline.minibatches_in_flight
            waiting = [minibatch.tag.options for minibatch in in_flight]
            step_with(trainer, one.minibatch.tag.options, counting=waiting)
        holdings.gradients.drop()

    # --- logging ---

    def _log(self, one: Finished) -> Any:
        """Logs a minibatch's values under its own number; returns its result."""
        trainer, call = self._trainer, one.minibatch.tag
        trainer.should_stop |= one.report.stops
        self._pipeline.take_metrics(one.report)
        self._log_again(one.report)
        if one.minibatch.ends_update and logs_step(trainer, call.step_of_loggers):
            values = step_metrics(trainer, lambda hook: hook == "training_step")
            step = None if "step" in values else call.step_of_loggers
            if values:
                values.setdefault("epoch", trainer.current_epoch)
                logger_connector(trainer).log_metrics(values, step)
        return self._result_of(one.report)

    def _log_others(self) -> None:
        """In place of Lightning's own: passes values that were not logged in ``training_step``,
        and belong to the batch of now, to the loggers.
        """
        trainer, connector = self._trainer, logger_connector(self._trainer)
        if accumulates(trainer):
            return
        if logs_step(trainer, step_of_loggers(trainer)):
            connector.log_metrics(step_metrics(trainer, lambda hook: hook != "training_step"))
