"""Code that the steps of training and of evaluation share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    GradientAccumulationScheduler,
)
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.lightning.metric_sync import MetricSync
from lightning_pipeshift.model.user_state.logs import LogRecorder


class StepContext:
    """Makes the context of a step, in which the LightningModule's logging is recorded instead.

    Args:
        trainer: the Trainer.
        recorder: takes the module's logs.
        metric_sync: that of the run; in a step, only the last stages call metrics.
    """

    def __init__(self, trainer: pl.Trainer, recorder: LogRecorder, metric_sync: MetricSync) -> None:
        self._module = trainer.lightning_module
        self._recorder = recorder
        self._metric_sync = metric_sync
        # Asked now: while it tries sizes, the Trainer has no callbacks.
        self._ends_search = trainer.world_size > 1 and any(
            isinstance(callback, BatchSizeFinder)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )

    @contextmanager
    def __call__(self) -> Generator[None, None, None]:
        """The context of one step.

        Raises:
            BatchError: this rank runs out of memory. A `BatchSizeFinder` would catch the error
                itself and start again while the other ranks still wait in the step.
        """
        attributes = self._module.__dict__
        outside = {name: v for name, v in attributes.items() if name in ("log", "log_dict")}
        attributes |= {"log": self._recorder.log, "log_dict": self._recorder.log_dict}
        self._metric_sync.is_open = False
        try:
            yield
        except RuntimeError as error:
            if not (self._ends_search and is_oom_error(error)):
                raise
            raise BatchError(
                "`BatchSizeFinder` has tried a batch that does not fit: a rank ran out of memory "
                "in this step. With several ranks the search ends here, as the others are in the "
                "middle of it. Use the last size that succeeded, remove the callback, and run "
                "again; or limit the search (`max_val`, `max_trials`)."
            ) from error
        finally:
            self._metric_sync.is_open = True
            del attributes["log"], attributes["log_dict"]
            attributes |= outside


def is_hook_used(trainer: pl.Trainer, hook: str) -> bool:
    """Whether a hook has code other than Lightning's own, whose callbacks only show progress."""
    parts: list[Any] = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(is_users_own(part, hook) for part in parts)


def is_users_own(part: Any, hook: str) -> bool:
    """Whether a callback or a LightningModule has a hook that is not Lightning's.

    A hook's own ``__module__`` is not reliable: `functools.wraps` copies it from the wrapped one.
    """
    if hook in vars(part):
        return True  # `LambdaCallback` sets its hooks on the instance
    for kind in type(part).__mro__:
        if hook in vars(kind):
            function = vars(kind)[hook]
            written_in = getattr(function, "__globals__", {}).get("__name__", "")
            return not (_is_lightnings(kind.__module__) and _is_lightnings(written_in))
    # The attribute may be computed by `__getattr__`.
    return callable(getattr(part, hook, None))


def _is_lightnings(module: str) -> bool:
    # Some of its hooks are wrapped by decorators of `lightning_utilities`. Our own callbacks do not
    # look at what their hooks are given either.
    is_ours = module.startswith("lightning_pipeshift.lightning.callbacks.")
    return is_ours or module.partition(".")[0] in ("lightning", "lightning_utilities")


def are_results_used(trainer: pl.Trainer, step: str) -> bool:
    """Whether code other than Lightning's own gets the step's result after each batch."""
    writes = any(
        isinstance(part, BasePredictionWriter) and part.interval.on_batch
        for part in trainer.callbacks  # type: ignore[attr-defined]
    )
    return writes or is_hook_used(trainer, f"on_{step.removesuffix('_step')}_batch_end")


def accumulation_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The fields of ``Settings`` that say how many batches make an update, over all epochs."""
    numbers = {trainer.accumulate_grad_batches}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            numbers |= set(callback.scheduling.values())
    return {"num_accumulated": min(numbers), "accumulates": max(numbers) > 1}
