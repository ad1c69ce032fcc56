"""How a run ends before its time: in order after a SIGTERM, and without new checkpoints after an
exception.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipeshift.compat.lightning_private import end_as_after_sigterm
from lightning_pipeshift.lightning.checkpoints import warn_not_saved
from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.lightning.patches import Adjustments
from lightning_pipeshift.step.pipeline import Pipeline


class Interruptions:
    """The events that may end one run."""

    def __init__(self, trainer: pl.Trainer, pipeline: Pipeline, connection: Connection) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        self._connection = connection
        self._saves_alone = False

    def listen(self, adjustments: Adjustments, is_sharded: bool) -> None:
        """Makes a SIGTERM of any rank end the run on all of them, after the same step: Lightning's
        own handler communicates with the other ranks from inside the signal handler, in the middle
        of other communication.

        Prevents callbacks from saving after an exception if nothing can be saved: they would report
        success, and make the last checkpoint's link point to nothing.

        Args:
            adjustments: those of the run.
            is_sharded: whether each rank saves its own part of a checkpoint.
        """
        adjustments.hear_sigterm(self._trainer, self._note_sigterm)
        self._saves_alone = self._pipeline.channels.num_stages == 1 and not is_sharded
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            saves = isinstance(callback, OnExceptionCheckpoint) or getattr(
                callback, "save_on_exception", False
            )
            if saves:
                adjustments.hear_exceptions(callback, self._after_exception)

    def _note_sigterm(self, signum: int, _: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._pipeline.asks_to_end = True
        else:
            end_as_after_sigterm(self._trainer)

    def _after_exception(
        self, plain: Callable[..., None], trainer: pl.Trainer, module: Any, exception: BaseException
    ) -> None:
        is_whole = self._saves_alone and not self._pipeline.late_updates.is_pending
        if self.ends_in_order(exception) or trainer.world_size == 1 or is_whole:
            plain(trainer, module, exception)
        else:
            warn_not_saved(f"the state of the model when {type(exception).__name__} was raised")

    def heed(self) -> None:
        """After a step: makes Lightning's loop end the run, if any rank got a SIGTERM."""
        if self._pipeline.is_to_end:
            self._connection.end_in_order()
            end_as_after_sigterm(self._trainer)

    def ends_in_order(self, exception: BaseException) -> bool:
        """Whether the run ends by this exception after a SIGTERM that all ranks know of."""
        return (
            isinstance(exception, SIGTERMException)
            and self._pipeline.is_to_end
            and not self._connection.has_failed
        )

    def save_last(self, exception: BaseException) -> None:
        """Saves ``last.ckpt`` in the ModelCheckpoint's folder, after a SIGTERM that all ranks know
        of.
        """
        assert isinstance(exception, SIGTERMException)
        # Not 0, so that `torchrun --max-restarts` restarts the run.
        exception.code = 128 + signal.SIGTERM
        trainer = self._trainer
        callback = trainer.checkpoint_callback
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
            rank_zero_warn(
                "PipeShift: the run was ended by SIGTERM, and nothing is saved, as the Trainer has"
                " no ModelCheckpoint, which has the folder."
            )
            return
        path = Path(callback.dirpath) / (callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION)
        trainer.save_checkpoint(path)
        rank_zero_info(
            f"PipeShift: the run was ended by SIGTERM after step {trainer.global_step}. Resume "
            f"from {path}: fit(ckpt_path='last')."
        )
