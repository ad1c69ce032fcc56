"""``LayerMigration``: moves layers to other owners while training runs, on request or
automatically.

CN115454655A moves layers between the stages of a running pipeline when devices slow down or other
jobs start. Here a callback decides when; the change itself is made by the strategy, between two
steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeshift.compat.lightning_private import step_of_loggers
from lightning_pipeshift.errors import ConfigurationError, PipeShiftError
from lightning_pipeshift.lightning.callbacks.strategy_of import strategy_of
from lightning_pipeshift.plan.document.moves import Move, check_moves
from lightning_pipeshift.runtime.planning.make_plan import Watch
from lightning_pipeshift.step.control_files import WITHOUT_LOGGER

_PURPOSE: Final = "`LayerMigration` moves layers between the stages of"


class LayerMigration(Callback):
    """Measures the time of every layer on every stage, and moves layers if that makes steps faster.

    Args:
        moves: moves to make at given steps, in addition to those found by measuring.
        min_gain: the fraction by which a step has to get shorter, by the simulator, for layers to
            move.
        patience: for how many consecutive steps an imbalance has to last; more, as long as they do
            not say clearly how fast each stage is. After so many steps under the new plan the move
            is judged by their mean time, and undone if they gain less than a quarter of what was
            expected. Moves that reverse earlier ones need twice the patience, and twice that the
            next time, so that layers do not move back and forth with a stage whose speed
            fluctuates; so do moves after one that was undone.
        watches: whether to measure at all; ``False``: only ``moves`` and requests from other
            processes are carried out.

    During a run, ``pipeshift move --run DIR LAYER STAGE`` requests a move from it, and
    ``pipeshift move --run DIR`` shows the owners of all layers. ``DIR`` is the logger's folder,
    or ``lightning_logs`` in the Trainer's ``default_root_dir``.

    Raises:
        ConfigurationError: a value that is not allowed; or, at the start of a run, another
            strategy.
        PlanError: at the start of training: a move of an unknown layer, or to an unknown stage.
    """

    def __init__(
        self,
        moves: Sequence[Move] | None = None,
        min_gain: float = 0.05,
        patience: int = 10,
        watches: bool = True,
    ) -> None:
        if not (isinstance(min_gain, int | float) and math.isfinite(min_gain) and min_gain > 0):
            raise ConfigurationError(f"min_gain={min_gain!r}: pass a number above 0, such as 0.05.")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigurationError(f"patience={patience!r}: pass a whole number of 1 or more.")
        self.moves = list(moves or ())
        for move in self.moves:
            if not isinstance(move, Move):
                raise ConfigurationError(
                    f"moves has {move!r}: pass `Move(step=20, layer='model.h.3', stage=1)`."
                )
        self.min_gain = float(min_gain)
        self.patience = patience
        self.watches = watches
        self._logged: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Makes the strategy measure layers."""
        strategy = strategy_of(trainer, _PURPOSE)
        logged = trainer.log_dir if trainer.loggers else None
        folder = str(logged or os.path.join(trainer.default_root_dir, WITHOUT_LOGGER))
        # Requests need a local folder, not a remote one.
        is_here = stage == "fit" and "://" not in folder
        strategy.next_run = replace(
            strategy.next_run,
            watch=Watch(self.min_gain, self.patience) if self.watches else None,
            requests=Path(folder) if is_here else None,
        )
        self._logged = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises PlanError if one of the moves has an unknown layer, stage or virtual machine."""
        strategy = strategy_of(trainer, _PURPOSE)
        check_moves(self.moves, strategy.layer_names, strategy.topology.stages_per_vm)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Makes the moves for this step."""
        strategy = strategy_of(trainer, _PURPOSE)
        # The step that starts now prepares the move. There is a plan after the first step.
        step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        due = [move for move in self.moves if max(move.step or 0, 2) == step]
        if not due:
            return
        try:
            strategy.migrate(*due)
        except PipeShiftError as error:
            rank_zero_warn(f"PipeShift: nothing moves at step {step}: {error}.")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Logs changes of the plan: ``pipeshift/before_seconds`` and ``expected_seconds``, and
        ``after_seconds`` once it has been measured. They are callback metrics, too.
        """
        strategy = strategy_of(trainer, _PURPOSE)
        strategy.steps_left = _steps_left(trainer)
        found = strategy.decisions
        for number, change in enumerate(found):
            known = self._logged[number] if number < len(self._logged) else {}
            figures = {
                f"pipeshift/{name}": value
                for name, value in change.items()
                if isinstance(value, float) and name not in known
            }
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in figures.items()}
            )
            for logger in trainer.loggers if figures else ():
                logger.log_metrics(figures, step=step_of_loggers(trainer))
        self._logged = found


def _steps_left(trainer: pl.Trainer) -> float:
    """The number of remaining batches; infinite if it is not known."""
    done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    of_steps = math.inf
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        of_steps = trainer.max_steps * trainer.accumulate_grad_batches
    of_epochs = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        of_epochs = trainer.max_epochs * trainer.num_training_batches
    return max(0.0, min(of_steps, of_epochs) - done)
