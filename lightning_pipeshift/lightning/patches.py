"""All changes that a run makes to Lightning's own objects.

Some code of Lightning's loops and callbacks only works on a single device. All changes are undone
at the end of the run, as another strategy may use the same objects then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any, Final, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.lightning_private import (
    CHECKS_FOR_VALIDATION,
    LOGS_STEP,
    SIGTERM_BROADCAST,
    SIGTERM_NOTIFIER,
    logger_connector,
    signal_connector,
)
from lightning_pipeshift.lightning.steps import is_users_own
from lightning_pipeshift.model.parameters.absent import AbsentTensor, absent_error
from lightning_pipeshift.model.user_state.copies import method_of_copy
from lightning_pipeshift.values.value import StepBuffer, StepParameter, Value

# A function of an optimizer and parameters: returns those that the optimizer does not have yet.
FilterOnOptimizer = Callable[[Optimizer, Iterable[nn.Parameter]], list[nn.Parameter]]


class _NoLoss:
    """The result of a training step without a loss."""

    def __repr__(self) -> str:
        return "a training step's result without a loss"


NO_LOSS: Final = _NoLoss()


class _Result(ClosureResult):
    """The closure result in Lightning's loop, also for a step without a loss.

    With several ranks Lightning does not allow ``None``, as it cannot know that all of them return
    it. Here they do.
    """

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
        output = None if training_step_output is NO_LOSS else training_step_output
        return super().from_training_step_output(output, normalize)


HOOKS: Final = frozenset(
    name
    for kind in (pl.Callback, pl.LightningModule)
    for name in dir(kind)
    if name.startswith("on_") and callable(getattr(kind, name))
) - {"on_exception", "on_before_batch_transfer", "on_after_batch_transfer", "on_load_checkpoint"}
"""Those of user code that run outside of steps."""
_USES_WEIGHTS = StochasticWeightAveraging, WeightAveraging, ModelPruning
"""Lightning's own callbacks whose hooks use the module's parameters."""


class _Replaced:
    """Stands for a method of one object.

    Args:
        part: has the method.
        name: of the method.
    """

    def __init__(self, part: Any, name: str) -> None:
        self._part, self._name = part, name
        self._plain = getattr(part, name)
        update_wrapper(cast(Any, self), self._plain)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """For a copy of what has the method: its own, which nothing stands for."""
        copied = memo.get(id(self._part))
        own: Any = getattr(type(self._part), self._name, None)
        if copied is None or own is None or getattr(self._plain, "__func__", None) is not own:
            return self._plain
        return method_of_copy(copied, self._name, memo)


class _InContext(_Replaced):
    """A hook that runs in a context.

    Args:
        part: has the hook.
        name: of the hook.
        context: makes the context.
    """

    def __init__(self, part: Any, name: str, context: Callable[[], Any]) -> None:
        super().__init__(part, name)
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._plain(*args, **kwargs)


class _LogsValues(_Replaced):
    """A module's ``log`` that takes values.

    Args:
        module: the module.
        read: makes a value a tensor.
    """

    def __init__(self, module: pl.LightningModule, read: Callable[[Value], Any]) -> None:
        super().__init__(module, "log")
        self._read = read

    def __call__(self, name: str, value: Any, *rest: Any, **options: Any) -> None:
        value = apply_to_collection(value, (Value, StepParameter, StepBuffer), self._read)
        if isinstance(value, AbsentTensor):
            raise absent_error(f"self.log({name!r}, ...)", value.absent_name)
        self._plain(name, value, *rest, **options)


class Adjustments:
    """The changes of one run."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def undo(self) -> None:
        """Undoes all changes."""
        self._undo.close()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end of the run."""
        own = vars(owner)
        if name in own:
            # Restored from the class's dict, so that a static method remains one.
            self._undo.callback(setattr, owner, name, own[name])
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def take_steps_without_loss(self, trainer: pl.Trainer) -> None:
        """Allows a step to return :data:`NO_LOSS`: hooks get ``{}``, as on one device."""
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        self._set(optimization, "output_result_cls", _Result)

    def hear_sigterm(self, trainer: pl.Trainer, notify: Callable[..., None]) -> None:
        """Calls ``notify`` on SIGTERM instead of Lightning's own handler, and removes the broadcast
        of a SIGTERM by the first rank before each batch.
        """
        self._set(signal_connector(trainer), SIGTERM_NOTIFIER, notify)
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, SIGTERM_BROADCAST):
            self._set(loop, SIGTERM_BROADCAST, lambda: None)

    def drain_before_validation(
        self, trainer: pl.Trainer, drain: Callable[[], None], end_epoch: Callable[[], None]
    ) -> None:
        """Calls ``drain`` before validation, and ``end_epoch`` when an epoch's batches end."""
        loop = trainer.fit_loop.epoch_loop
        run, asks = loop.run, getattr(loop, CHECKS_FOR_VALIDATION)

        def run_and_drain(*args: Any) -> None:
            run(*args)
            end_epoch()

        def ask_and_drain(*args: Any) -> bool:
            follows: bool = asks(*args)
            if follows:
                drain()
            return follows

        self._set(loop, "run", run_and_drain)
        self._set(loop, CHECKS_FOR_VALIDATION, ask_and_drain)

    def log_steps_by(self, trainer: pl.Trainer, log: Callable[[], None]) -> None:
        """Calls ``log`` after each batch instead of Lightning's function for loggers."""
        self._set(logger_connector(trainer), LOGS_STEP, log)

    def show_values(
        self, trainer: pl.Trainer, hooks: Iterable[str], context: Callable[[], Any]
    ) -> None:
        """Runs the hooks of user code, and of callbacks that use weights, in a context.

        Args:
            trainer: the Trainer.
            hooks: their names.
            context: makes the context.
        """
        parts: list[Any] = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
        for part in parts:
            for hook in hooks:
                uses_weights = isinstance(part, _USES_WEIGHTS) and hasattr(part, hook)
                if uses_weights or is_users_own(part, hook):
                    self._set(part, hook, _InContext(part, hook, context))

    def log_values(self, module: pl.LightningModule, read: Callable[[Value], Any]) -> None:
        """Logs what ``read`` returns in the place of values. Raises a LayerError for a logged
        parameter that is on another stage, outside of steps: logged without a word, it would be
        missing, or fail when the run is over.
        """
        self._set(module, "log", _LogsValues(module, read))

    def when_over(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` at the end of the run."""
        self._undo.callback(undo)

    def hear_exceptions(self, callback: pl.Callback, hook: Callable[..., None]) -> None:
        """Calls ``hook`` instead of a callback's ``on_exception``, with that as its first
        argument.
        """
        self._set(callback, "on_exception", partial(hook, callback.on_exception))

    def filter_parameters(self, make: Callable[[FilterOnOptimizer], FilterOnOptimizer]) -> None:
        """Replaces the function by which finetuning callbacks find parameters that an optimizer
        already has.

        Args:
            make: given Lightning's function, makes the one for this run.
        """
        plain = BaseFinetuning.filter_on_optimizer
        self._set(BaseFinetuning, "filter_on_optimizer", staticmethod(make(plain)))
