"""Private names of Lightning, but for hooks that a strategy or a plugin overrides.

Lightning may rename or change any of them without notice.
``tests/unit/compat/test_lightning_private.py`` checks what the package relies on, so a change shows
there first. All were checked with Lightning 2.6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local_path
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as update_properties
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import (
    _set_num_threads_if_needed as set_num_threads_if_needed,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as RecordedBatches
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer import trainer as trainer_module

# The imported names, and why no public one serves:
# - is_local_path: Lightning's own decision which paths `fsspec` handles; ours has to be the same.
# - update_properties: sets `module.device` of nested LightningModules; `to` would move tensors.
# - init_dist_connection: sets the environment, and prints what users of Lightning know.
# - set_num_threads_if_needed: Lightning's launchers call it in the process that launches only.
# - IS_INTERACTIVE: whether Lightning takes this process for an interactive one.
# - RecordedBatches: Lightning's wrapper around the batch sampler of a prediction.
# - WrappingCheckpointIO: the base class of plugins around another CheckpointIO.
# - MultiProcessingLauncher, SubprocessScriptLauncher: what Lightning's own strategies launch with.
__all__ = [
    "IS_INTERACTIVE",
    "MultiProcessingLauncher",
    "RecordedBatches",
    "SubprocessScriptLauncher",
    "WrappingCheckpointIO",
    "init_dist_connection",
    "is_local_path",
    "set_num_threads_if_needed",
    "update_properties",
]


def start_children(launcher: SubprocessScriptLauncher) -> None:
    """Starts this script once for each other rank of this host, as ``launcher.procs``. The public
    ``launch`` also starts a thread that kills them all soon after the first error.
    """
    launcher._call_children_scripts()


def recorded_batch_sampler(batches: RecordedBatches) -> Any:
    """The user's batch sampler inside of Lightning's wrapper."""
    return batches._batch_sampler


# --- signals ---

SIGTERM_NOTIFIER: Final = "_sigterm_notifier_fn"
"""The method of a :func:`signal_connector` that Lightning installs as a handler of SIGTERM."""


def signal_connector(trainer: pl.Trainer) -> Any:
    """A Trainer's handler of signals. Lightning has no public way to replace it."""
    return trainer._signal_connector


def end_as_after_sigterm(trainer: pl.Trainer) -> None:
    """Makes the loops end the run, as after a SIGTERM. ``Trainer.received_sigterm`` can only be
    read.
    """
    trainer._signal_connector.received_sigterm = True


SIGTERM_BROADCAST: Final = "_broadcast_sigterm_tensor"
"""The method of Lightning's training loop that asks the first rank for a SIGTERM before each batch:
a message for which all ranks wait for each other. Versions before 2.6 do not have it."""


# --- loops and data ---

CHECKS_FOR_VALIDATION: Final = "_should_check_val_fx"
"""The method of Lightning's training loop that says whether validation follows a batch."""

LOGS_STEP: Final = "update_train_step_metrics"
"""The method of :func:`logger_connector` that passes a batch's metrics to the loggers."""


def logger_connector(trainer: pl.Trainer) -> Any:
    """The object that passes logged values on to loggers, progress bars and callbacks."""
    return trainer._logger_connector


def logs_step(trainer: pl.Trainer, step: int) -> bool:
    """Whether the values of a step go to the loggers.

    Args:
        trainer: the Trainer.
        step: as :func:`step_of_loggers` counts.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    is_due = every > 0 and (step + 1) % every == 0
    return is_due or trainer.should_stop or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def step_metrics(trainer: pl.Trainer, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The values of the last batch for the loggers.

    Args:
        trainer: in its training loop.
        is_wanted: tells by the name of the hook that has logged a value whether to include it.
    """
    results = trainer._results
    assert results is not None
    values = results.metrics(on_step=True)["log"]
    names = {
        results._forked_name(metric, True)[1]
        for _, metric in results.valid_items()
        if is_wanted(metric.meta.fx)
    }
    return {name: value for name, value in values.items() if name in names}


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether no optimizer step follows the batch of now."""
    return trainer.fit_loop._should_accumulate()


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether the loop calls no backward behind the step: stochastic weight averaging trains one
    more epoch in this way, for the statistics of normalisations.
    """
    return bool(trainer.fit_loop._skip_backward)


@contextmanager
def in_training_step(trainer: pl.Trainer) -> Iterator[None]:
    """Context in which the LightningModule logs as in its ``training_step``."""
    module = trainer.lightning_module
    before, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before


def step_of_loggers(trainer: pl.Trainer) -> int:
    """The step under which Lightning logs the metrics of training now. ``Trainer.global_step``
    differs where there are several optimizers, or accumulated gradients.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def position_of(trainer: pl.Trainer) -> tuple[Any, ...]:
    """How far the loop of training is now, for :func:`at_position`."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress, loop.automatic_optimization.optim_progress
    return *copy.deepcopy(progress), loop._batches_that_stepped


@contextmanager
def at_position(trainer: pl.Trainer, position: tuple[Any, ...]) -> Iterator[None]:
    """Context in which ``Trainer.global_step`` and the like are as they were at a position."""
    loop = trainer.fit_loop.epoch_loop
    optimization = loop.automatic_optimization
    now = loop.batch_progress, optimization.optim_progress, loop._batches_that_stepped
    loop.batch_progress, optimization.optim_progress, loop._batches_that_stepped = position
    try:
        yield
    finally:
        loop.batch_progress, optimization.optim_progress, loop._batches_that_stepped = now


def evaluation_loop(trainer: pl.Trainer) -> Any:
    """The loop that validates or tests now: within a ``fit``, the one inside of the training's."""
    return trainer._evaluation_loop


def training_data(trainer: pl.Trainer) -> Any:
    """The user's training data: what was given to ``fit``, or what ``train_dataloader`` returns,
    which is called. The public ``Trainer.train_dataloader`` is set when the loop has begun.
    """
    return trainer.fit_loop._data_source.dataloader()


def combined_loader_of(loop: Any) -> Any:
    """The CombinedLoader of a loop. ``Trainer.train_dataloader`` and its like return the user's
    own objects, which lack its mode and its limits.
    """
    return loop._combined_loader


def predictions_of(loop: Any) -> list[list[Any]]:
    """The results of ``predict_step`` by dataloader and batch. The public ``predictions`` leaves
    the outer list out where there is one dataloader.
    """
    return loop._predictions  # type: ignore[no-any-return]


def datamodule_of(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    """The LightningDataModule that a Trainer runs with, if any. ``trainer.datamodule`` is set by
    the first run that has one, and stays.
    """
    hooks = trainer._data_connector._datahook_selector
    return hooks.datamodule if hooks is not None else None


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """``Trainer(use_distributed_sampler=...)``, or what was set since. The Trainer keeps no public
    attribute of it.
    """
    return trainer._accelerator_connector.use_distributed_sampler


def use_distributed_sampler(trainer: pl.Trainer, is_wanted: bool) -> None:
    """Sets what :func:`uses_distributed_sampler` returns."""
    trainer._accelerator_connector.use_distributed_sampler = is_wanted


# --- the Trainer's arguments ---

_CHECK = "_check_config_and_set_final_flags"
_MAKE_PRECISION = "_check_and_init_precision"


def arguments_check(connector: Any = None) -> tuple[Any, Callable[..., None]] | None:
    """The class's method that checks a Trainer's arguments, and a function that replaces it.

    Lightning has no hook for it: it checks them before it makes the strategy.

    Args:
        connector: a class that makes a Trainer's parts; by default, the one that Trainers use.

    Returns:
        ``None`` if this version of Lightning has other methods than those that are known here.
    """
    connector = connector or getattr(trainer_module, "_AcceleratorConnector", None)
    check = getattr(connector, _CHECK, None)
    if not callable(check) or not callable(getattr(connector, _MAKE_PRECISION, None)):
        return None
    return check, lambda replacement: setattr(connector, _CHECK, replacement)


def make_precision_by(connector: Any, make: Callable[[], Any]) -> None:
    """Makes one object that makes a Trainer's parts call a function for the precision plugin.

    Args:
        connector: the object; it finds the function before it finds its class's method.
        make: returns the plugin.
    """
    setattr(connector, _MAKE_PRECISION, make)


def make_precision(connector: Any) -> Any:
    """The precision plugin that Lightning makes; undoes :func:`make_precision_by`."""
    delattr(connector, _MAKE_PRECISION)
    return getattr(connector, _MAKE_PRECISION)()
