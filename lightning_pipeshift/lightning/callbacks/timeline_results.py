"""The first rank's use of recorded steps: files, figures for loggers, warnings.

Recordings arrive in a thread while training goes on. Loggers are called by the thread of the
Trainer only, after a later batch, with the step that was recorded.
"""

from __future__ import annotations

from pathlib import Path
from queue import Empty, SimpleQueue

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeshift.errors import explained
from lightning_pipeshift.files import write_text
from lightning_pipeshift.timeline.chrome_trace import chrome_trace
from lightning_pipeshift.timeline.compared import Compared
from lightning_pipeshift.timeline.metrics import PREFIX, metrics_of
from lightning_pipeshift.timeline.recording import Recording, What
from lightning_pipeshift.timeline.slow_ranks import SlowRanks


class TimelineResults:
    """The recorded steps of one run.

    Args:
        folder: for the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step_of_loggers: dict[int, int] = {}
        self._arrived: SimpleQueue[tuple[Recording, list[str]]] = SimpleQueue()
        self._slow = SlowRanks()
        self._num_moves = 0

    def expect(self, step: int, step_of_loggers: int) -> None:
        """Sets under which number the loggers get a step's figures."""
        self._step_of_loggers[step] = step_of_loggers

    # --- in the thread that gathers ---

    def take(self, recording: Recording) -> None:
        """Writes a recording's file, and keeps its figures for the loggers. Does not raise."""
        try:
            write_text(self._folder / f"timeline-{recording.step}.json", chrome_trace(recording))
        except OSError as error:
            rank_zero_warn(f"PipeShift: the timeline of a step is not written: {error}.")
        compared = Compared.of(recording)
        self._arrived.put((recording, self._slow.look(compared.measured, compared.expected)))

    # --- in the Trainer's thread ---

    def pass_on(self, trainer: pl.Trainer) -> None:
        """Gives the loggers what has arrived since the last call."""
        while True:
            try:
                recording, messages = self._arrived.get_nowait()
            except Empty:
                return
            # A layer's new and its old owner both note the move, as all stages do.
            moves = {
                (record.vm, mark.name)
                for record in recording.ranks
                for mark in record.of(What.MOVE)
            }
            self._num_moves += len(moves)
            figures = {**metrics_of(recording), f"{PREFIX}moves": float(self._num_moves)}
            step = self._step_of_loggers.pop(recording.step, recording.step)
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)
            for message in messages:
                rank_zero_warn(f"PipeShift: {explained(message)}.")
