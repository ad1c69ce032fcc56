"""A batch of training, and how Lightning's loop wants it to be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Key = tuple[int | str, ...]
"""Determines the random stream of a step: the run's seed, the kind of the step, its number, the
microbatch, and the virtual machine."""

Profile = Callable[[str], AbstractContextManager[Any]]
"""A context around what its name says, as ``Profiler.profile`` of Lightning makes."""

WAIT: Final = "[PipeShift] wait for other stages"
"""The name of such a context."""


@dataclass(frozen=True)
class UserStep:
    """Runs the user's step on a module and a slice of a batch, in the user's precision.

    Args:
        run: takes the module, the slice and the other arguments.
        arguments: those after the batch: its index, and that of its dataloader.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, root: nn.Module, batch: Any) -> Any:
        return self.run(root, batch, *self.arguments)


class Accumulation(NamedTuple):
    """A step's position among the steps between two optimizer steps.

    Args:
        has_begun: whether this step's gradients are added to those of earlier steps.
        goes_on: whether no optimizer step follows this step.
    """

    has_begun: bool
    goes_on: bool


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """A virtual machine's batch, with all that belongs to it.

    Args:
        batch: the batch.
        batch_idx: its index in the epoch.
        step: runs the user's ``training_step`` on a module and a slice.
        step_number: counts batches over the whole run; the random streams depend on it.
        optimizers: their state follows the parameters.
        wants_result: whether more of the step's result than the loss is needed.
        is_last_batch: whether this stage's data ends with the batch.
        accumulation: how gradients of this batch and of earlier ones are accumulated.
        keeps_gradients: whether the gradients from before the step are still needed.
        stops: tells whether user code has asked the Trainer to stop.
        skips_backward: whether the step is for its forward only; gradients stay as they are.
        leaves_late: whether the optimizer may update layers late; see
            :class:`~lightning_pipeshift.runtime.gradients.late_updates.LateUpdates`.
        num_accumulated: how many batches make an update: a divisor of the losses.
        scale: a factor of the losses.
    """

    batch: Any
    batch_idx: int
    step: UserStep
    step_number: int
    optimizers: Sequence[Optimizer]
    wants_result: bool
    is_last_batch: bool
    accumulation: Accumulation
    keeps_gradients: bool
    stops: Callable[[], bool] = bool
    skips_backward: bool = False
    leaves_late: bool = False
    num_accumulated: int = 1
    scale: float | Tensor = 1.0

    @property
    def loss_scale(self) -> float | Tensor:
        """The scale by the number of batches."""
        if isinstance(self.scale, Tensor):
            # Divided by a plain number, a GPU would multiply by its rounded reciprocal.
            return self.scale / torch.full_like(self.scale, self.num_accumulated)
        return self.scale / self.num_accumulated
