"""The strategy of a Trainer whose callbacks need PipeShift's."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning.strategy import PipeShiftStrategy


def strategy_of(trainer: pl.Trainer, purpose: str) -> PipeShiftStrategy:
    """Returns the Trainer's strategy.

    Args:
        trainer: the Trainer.
        purpose: the callback, and its use of the pipeline, for the message.

    Raises:
        ConfigurationError: it is another strategy.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, PipeShiftStrategy):
        raise ConfigurationError(
            f"{purpose} a pipeline, and this Trainer has the strategy"
            f" `{type(strategy).__name__}`. Use `Trainer(strategy='pipeshift')`, or remove the"
            " callback."
        )
    return strategy
