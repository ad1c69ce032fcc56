"""``LayerMigration``: layers change their owners while training runs, on request or by themselves.

CN115454655A moves layers between the stages of a running pipeline when devices slow down or other
jobs come. Here a callback decides when; the change itself is the strategy's, between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeshift.errors import ConfigurationError, PipeShiftError
from lightning_pipeshift.plan.moves import Move
from lightning_pipeshift.runtime.planning import Watch
from lightning_pipeshift.strategy import PipeShiftStrategy


class LayerMigration(Callback):
    """Watches what every layer takes on every stage, and moves layers where that pays.

    Args:
        moves: what is to move, and when; besides what is found by watching.
        min_gain: by how much a step has to get shorter, by the simulator, for layers to move.
        patience: for how many steps an imbalance has to last, without a break. Moves that take
            earlier ones back need twice the patience, and twice that the next time: a stage whose
            speed swings does not make layers swing.
        watches: whether to watch at all; ``False``: only ``moves`` are done, and what is asked for
            from outside.

    While a run goes on, ``pipeshift move --run DIR LAYER STAGE`` asks it for a move, and
    ``pipeshift status --run DIR`` shows who owns what. ``DIR`` is the logger's folder, or the
    Trainer's ``default_root_dir``.

    Raises:
        ConfigurationError: a value that is not allowed; or, as a run begins, another strategy.
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
        self._num_logged = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks the strategy to watch."""
        strategy = _strategy_of(trainer)
        strategy.watch(Watch(self.min_gain, self.patience) if self.watches else None)
        folder = str(trainer.log_dir or trainer.default_root_dir)
        # Nobody can be asked by way of a bucket.
        is_here = stage == "fit" and "://" not in folder
        strategy.take_requests(Path(folder) if is_here else None)
        self._num_logged = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Does what was asked for at this step."""
        strategy = _strategy_of(trainer)
        # The step that begins now prepares it. There is a plan from the end of the first one on.
        step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        due = [move for move in self.moves if max(move.step or 0, 2) == step]
        if not due:
            return
        try:
            strategy.migrate(*due)
        except PipeShiftError as error:
            rank_zero_warn(f"PipeShift: nothing moves at step {step}: {error}.")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Logs what was decided."""
        strategy = _strategy_of(trainer)
        strategy.steps_left = _steps_left(trainer)
        found = strategy.decisions
        for decision in found[self._num_logged :]:
            figures = {f"pipeshift/{name}": value for name, value in decision.items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._num_logged = len(found)


def _strategy_of(trainer: pl.Trainer) -> PipeShiftStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, PipeShiftStrategy):
        raise ConfigurationError(
            "`LayerMigration` moves layers between the stages of a pipeline, and this Trainer has"
            f" the strategy `{type(strategy).__name__}`. Use `Trainer(strategy='pipeshift')`, or"
            " remove the callback."
        )
    return strategy


def _steps_left(trainer: pl.Trainer) -> float:
    """How many batches are still to come; infinite where nobody knows."""
    done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    of_steps = math.inf
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        of_steps = trainer.max_steps * trainer.accumulate_grad_batches
    of_epochs = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        of_epochs = trainer.max_epochs * trainer.num_training_batches
    return max(0.0, min(of_steps, of_epochs) - done)
