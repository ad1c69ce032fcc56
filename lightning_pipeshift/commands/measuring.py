"""Measures a model on the present machines, for ``pipeshift plan``.

The run is that of ``pipeshift fit`` with the same arguments. It ends when its steps have been
measured, and saves nothing of the model.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    ModelSummary,
    ProgressBar,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_pipeshift.commands.memory import show_tensors
from lightning_pipeshift.commands.planning import add_budgets, budgets_of, plan_and_show, within
from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.lightning.precision.memory_compression import MemoryCompression
from lightning_pipeshift.lightning.session import NextRun
from lightning_pipeshift.lightning.strategy import PipeShiftStrategy
from lightning_pipeshift.plan.document.files import save_cluster, save_profile

_ENOUGH_STEPS: Final = 100_000
_SHOWN_EVERY: Final = 5


class Measuring(Callback):
    """Ends a run as soon as its steps have been measured, and shows the progress."""

    def __init__(self) -> None:
        self._shown = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Ends the run if enough has been measured."""
        strategy = trainer.strategy
        assert isinstance(strategy, PipeShiftStrategy)
        if strategy.is_measured:
            trainer.should_stop = True
        if trainer.is_global_zero:
            total = strategy.pipeline.settings.profile_steps
            self._show(trainer.global_step, total, trainer.should_stop)

    def _show(self, step: int, total: int, is_over: bool) -> None:
        # The plan is made in a thread, during a few more steps.
        step = min(step, total)
        if sys.stderr.isatty():
            begin, end = "\r", "\n" if is_over else ""
        elif step != self._shown and (is_over or step == 1 or not step % _SHOWN_EVERY):
            begin, end = "", "\n"
        else:
            return
        self._shown = step
        print(
            f"{begin}PipeShift measures: step {step} of {total}",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def _measuring_cli(
    base: type[LightningCLI], memory: MemoryCompression | None
) -> type[LightningCLI]:
    class MeasuringCLI(base):  # type: ignore[valid-type, misc]
        """Creates the same objects as ``fit``, without loggers and checkpoints."""

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            config = self.config_init
            wanted = config.get(str(self.subcommand), config).get("trainer", {})
            callbacks = [
                callback
                for callback in _listed(wanted.get("callbacks"))
                if not isinstance(callback, Checkpoint | EarlyStopping | ModelSummary | ProgressBar)
            ]
            plugins = _listed(wanted.get("plugins"))
            if memory is not None and not any(isinstance(p, MemoryCompression) for p in plugins):
                kwargs["plugins"] = [*plugins, memory]
            trainer: pl.Trainer = super().instantiate_trainer(
                **kwargs,
                callbacks=[*callbacks, Measuring()],
                # Some callbacks require a logger.
                logger=DummyLogger(),
                enable_checkpointing=False,
                # The number of steps is set, not that of epochs.
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                # Enough to measure, and finite: schedulers ask for the number of steps.
                max_epochs=-1,
                max_steps=max(_ENOUGH_STEPS, wanted.get("max_steps") or 0),
                max_time=None,
                min_epochs=None,
                min_steps=None,
            )
            if not isinstance(trainer.strategy, PipeShiftStrategy):
                raise ConfigurationError(
                    "`pipeshift plan` measures runs of the PipeShift strategy, but the "
                    f"configuration has `{type(trainer.strategy).__name__}`. Set "
                    "`trainer.strategy: pipeshift`, or remove it."
                )
            trainer.strategy.next_run = NextRun(only_measures=True)
            return trainer

    return MeasuringCLI


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def measured_strategy(
    arguments: Sequence[str], memory: MemoryCompression | None = None
) -> PipeShiftStrategy:
    """Runs the same training as ``pipeshift fit`` until its steps have been measured; returns the
    strategy.

    Args:
        arguments: of ``pipeshift fit``.
        memory: keeps a budget, unless the configuration has its own.

    Raises:
        PlanError: the data ended before.
    """
    from lightning_pipeshift.commands.cli import PipeShiftCLI

    make = _measuring_cli(PipeShiftCLI, memory)
    with warnings.catch_warnings():
        # The command-line arguments are not those of `fit`, and ranks that Lightning launches need
        # them unchanged.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        strategy = make(args=["fit", *arguments], save_config_callback=None).trainer.strategy
    assert isinstance(strategy, PipeShiftStrategy)
    if not strategy.is_measured:
        raise PlanError(
            "The data ended before enough steps had been measured. Use more data, or fewer"
            " `profile_steps` in the strategy's arguments."
        )
    return strategy


def plugin_of(options: argparse.Namespace) -> MemoryCompression | None:
    """The plugin for the options of :func:`~.planning.add_budgets`; ``None`` without ``--budget``.

    Raises:
        ConfigurationError: a value is no size, or a combination has no meaning.
    """
    if budgets_of(options) is None:
        return None
    return MemoryCompression(budget=options.budget, host_budget=options.host_budget)


def main(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift plan`` for the present machines."""
    # The other arguments are for Lightning's parser.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("plan.json"))
    parser.add_argument("--tensors", action="store_true")
    add_budgets(parser)
    options, rest = parser.parse_known_args(list(arguments))
    memory, out = plugin_of(options), options.out
    if options.tensors:
        show_tensors(measured_strategy(rest, memory or MemoryCompression()))
        return
    strategy = measured_strategy(rest, memory)
    found = strategy.measured
    if found is None:
        return
    profile, cluster, request = found
    # A plan with more virtual machines keeps the number of samples of a step.
    request = replace(request, step_samples=strategy.plan.step_samples)
    plan_and_show(profile, cluster if request.policy else within(cluster, None), request, out)
    of_model = out.with_name(f"{out.stem}.profile.json")
    of_machines = out.with_name(f"{out.stem}.cluster.yaml")
    save_profile(profile, of_model)
    save_cluster(cluster, of_machines)
    print(f"\nwritten to {out}; the measurements are in {of_model} and {of_machines}")
