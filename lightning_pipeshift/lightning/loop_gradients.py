"""Gradients inside Lightning's loop: who sees which of them between a backward and the optimizer's
step.

The optimizer of a stage steps the parameters of its own layers, while user code around it is to
find the gradients that it would find on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import called_before_post_hooks, has_step_hooks
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning.optimizers import (
    OptimizerOptions,
    options_of,
    outside_of_steps,
    step_with,
)
from lightning_pipeshift.lightning.steps import is_hook_used
from lightning_pipeshift.model.parameters.gradients import Gradients
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.program import OUTSIDE
from lightning_pipeshift.values.value import Value, run_by, running

# A step of an optimizer, given the closure that computes the gradients: returns the step's result.
OptimizerStep = Callable[[Callable[[], Any]], Any]


class _Tag(NamedTuple):
    """The settings under which an update is made.

    Args:
        options: of the optimizer.
        dtype: torch's default.
    """

    options: OptimizerOptions
    dtype: torch.dtype


class LoopGradients:
    """The gradients of one run on one rank."""

    def __init__(self, trainer: pl.Trainer, pipeline: Pipeline) -> None:
        self._trainer = trainer
        self._pipeline = pipeline

    @property
    def holdings(self) -> Holdings:
        """This rank's part of the model.

        Raises:
            ConfigurationError: there was no batch yet.
        """
        holdings = self._pipeline.holdings
        if holdings is None:
            raise ConfigurationError(
                "No stage has its layers yet: they are distributed at the first batch."
            )
        return holdings

    # --- after a backward ---

    def hand_over(self, loss: Tensor) -> Tensor:
        """Adds the step's gradients to the parameters' own, between the hooks that belong to a
        backward. Returns the loss.
        """
        module, precision = self._trainer.lightning_module, self._trainer.precision_plugin
        loss = precision.pre_backward(loss, module)
        self.holdings.gradients.hand_over()
        # Code in `optimizer_step` may read them, until the optimizer does.
        self.holdings.gradients.show()
        return precision.post_backward(loss, module)

    def hooks(self) -> AbstractContextManager[None]:
        """Context of user code that may read and change gradients: as values, like in a step."""
        is_alone = self._pipeline.channels.num_stages == 1
        if is_alone or not self._are_used or not self._pipeline.is_automatic:
            return self.of_this_stage()
        return self._as_values()

    def hook(self) -> AbstractContextManager[None]:
        """Context of a hook outside of steps: parameters and gradients are values, like in one."""
        program = running()
        is_alone = self._pipeline.channels.num_stages == 1
        if is_alone or not isinstance(program, Microbatch) or program.turn != OUTSIDE:
            return nullcontext()
        if program.core.sees_parameters:
            # A hook that another one has called.
            return nullcontext()
        return self._as_values()

    def of_this_stage(self) -> AbstractContextManager[None]:
        """Context of user code that may read the gradients of this stage's own layers."""
        return self.holdings.gradients.stand_ins() if self._are_used else nullcontext()

    @contextmanager
    def _as_values(self) -> Iterator[None]:
        core, program = self._pipeline.values.core, running()
        assert isinstance(program, Microbatch)
        program.gradients, program.sets_gradients = None, False
        with core.seeing_parameters():
            yield
        if program.sets_gradients or any(map(_is_written, (program.gradients or {}).values())):
            # Only the first stage that holds a tied parameter has changed its gradient.
            with run_by(None):
                self.holdings.gradients.pass_shared_around()
        program.gradients = None

    @property
    def _are_used(self) -> bool:
        """Whether user code may read gradients between a backward and the optimizer's step."""
        trainer, hooks = self._trainer, ("on_after_backward", "on_before_optimizer_step")
        return any(is_hook_used(trainer, hook) for hook in hooks) or is_overridden(
            "configure_gradient_clipping", trainer.lightning_module
        )

    # --- the optimizer's step ---

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: OptimizerStep
    ) -> Any:
        """Makes a step of the optimizer, and returns its result. Code around it sees gradients of
        all stages, and the optimizer those of this one. In manual optimization, the user's step
        calls this.

        Args:
            optimizer: the Trainer's.
            closure: computes the gradients, and may do more of the user's.
            step: Lightning's.
        """
        if not self._pipeline.is_automatic:
            return self._step_by_hand(optimizer, closure, step)

        def then_hidden() -> Any:
            result = closure()
            if self._pipeline.holdings is not None:
                self._pipeline.holdings.gradients.hide()
            return result

        with self.around_step_hooks(optimizer):
            result = step(then_hidden)
        self._end_step()
        return result

    def _step_by_hand(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: OptimizerStep
    ) -> Any:
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
            program.step_parameters(x for group in optimizer.param_groups for x in group["params"])
            program.core.changed()

    def around_step_hooks(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context in which functions that are called after the optimizer's step see gradients of
        all stages.
        """
        if not has_step_hooks(optimizer) or self._pipeline.holdings is None:
            return nullcontext()
        return called_before_post_hooks(optimizer, self._pipeline.holdings.gradients.show)

    def _end_step(self) -> None:
        """Called when the optimizer has stepped: hooks may read gradients until they are zeroed."""
        pipeline, program = self._pipeline, running()
        if isinstance(program, Microbatch):
            program.step_parameters(list(program.accounts))
            pipeline.values.core.changed()
        # There are none if the optimizer did not call the step; Lightning raises an error for that.
        if pipeline.holdings is not None:
            pipeline.holdings.gradients.show()
        if pipeline.late_updates.is_pending:
            (optimizer,) = self._trainer.optimizers
            tag = _Tag(options_of(optimizer), torch.get_default_dtype())
            pipeline.late_updates.begin(optimizer, tag)
            if pipeline.changes.last is not None:
                # Layers are about to move.
                pipeline.late_updates.finish()
        pipeline.changes.weights_are_final(pipeline.num_steps_done)

    def update_late(self, tag: Any, gradients: Gradients, keeps_gradients: bool) -> None:
        """Makes an update that was late.

        Args:
            tag: has the settings of the update.
            gradients: of the parameters that it changes.
            keeps_gradients: whether they still have them afterwards.
        """
        with (
            run_by(None),
            outside_of_steps(tag.dtype, self._pipeline.channels.device),
            self.holdings.gradients.only(gradients, keeps_gradients),
            self._updating_late(),
        ):
            step_with(self._trainer, tag.options)
        if keeps_gradients:
            with run_by(None):
                self.holdings.gradients.show()

    def _updating_late(self) -> AbstractContextManager[None]:
        return nullcontext()

    # --- norms: every rank calls each of these ---

    def norms(self, parameters: list[Tensor], norm_type: float) -> Tensor:
        """Returns the norm of each parameter's gradient, over all stages."""
        with run_by(None):
            return self.holdings.gradients.norms(parameters, norm_type)

    def norms_by_name(self, norm_type: float) -> dict[str, Tensor]:
        """Returns the norm of each gradient over all stages, by the parameter's name: scalars,
        float32. A parameter without a gradient is omitted.
        """
        holdings = self.holdings
        norms = self.norms([use.parameter for use in holdings.uses], norm_type)
        there = holdings.gradients.are_there()
        return {
            use.name: norm.float()
            for use, norm, has_one in zip(holdings.uses, norms, there, strict=True)
            if has_one
        }


def _is_written(gradient: Tensor | None) -> bool:
    return isinstance(gradient, Value) and gradient.account.memory.num_writes > 0
