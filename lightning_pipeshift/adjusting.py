"""What a run changes of Lightning's own objects, in one place, and puts back when it ends.

Lightning asks some things of a loop or a callback that only one device can answer. Nothing of it is
left when the run is over: another strategy may use the same objects then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import nn
from torch.optim import Optimizer

# Given an optimizer and parameters: those that the optimizer does not have yet.
FilterOnOptimizer = Callable[[Optimizer, Iterable[nn.Parameter]], list[nn.Parameter]]


class _NoLoss:
    """The result of a training step that made no loss."""

    def __repr__(self) -> str:
        return "a training step's result without a loss"


NO_LOSS: Final = _NoLoss()


class _Result(ClosureResult):
    """What Lightning's loop makes of a step's result, and of one without a loss on any number of
    ranks.

    Several ranks may not return None: Lightning cannot know that they all do. Here they do.
    """

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
        output = None if training_step_output is NO_LOSS else training_step_output
        return super().from_training_step_output(output, normalize)


class Adjustments:
    """The changes of one run."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def undo(self) -> None:
        """Puts everything back as it was."""
        self._undo.close()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end of the run."""
        own = vars(owner)
        if name in own:
            # A static method is in its class's dict as such, and stays one.
            self._undo.callback(setattr, owner, name, own[name])
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def take_steps_without_loss(self, trainer: pl.Trainer) -> None:
        """Lets a step return :data:`NO_LOSS`: hooks get ``{}``, as on one device."""
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        self._set(optimization, "output_result_cls", _Result)

    def notify_of_sigterm(self, trainer: pl.Trainer, notify: Callable[..., None]) -> None:
        """Has this called on SIGTERM in place of Lightning's own way, which broadcasts."""
        self._set(trainer._signal_connector, "_sigterm_notifier_fn", notify)

    def when_over(self, undo: Callable[[], None]) -> None:
        """Calls this at the end of the run."""
        self._undo.callback(undo)

    def hear_exceptions(self, callback: pl.Callback, hook: Callable[..., None]) -> None:
        """Has this called in place of a callback's ``on_exception``, with that as its first
        argument.
        """
        self._set(callback, "on_exception", partial(hook, callback.on_exception))

    def filter_parameters(self, make: Callable[[FilterOnOptimizer], FilterOnOptimizer]) -> None:
        """Replaces how finetuning callbacks look for parameters that an optimizer has already.

        Args:
            make: given Lightning's way, makes the one for this run.
        """
        plain = BaseFinetuning.filter_on_optimizer
        self._set(BaseFinetuning, "filter_on_optimizer", staticmethod(make(plain)))
