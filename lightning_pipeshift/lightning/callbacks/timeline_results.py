"""The first rank's use of recorded steps: files, figures for loggers, pictures, warnings.

Recordings arrive in a thread while training goes on. Loggers are called by the thread of the
Trainer only, after a later batch, with the step that was recorded.
"""

from __future__ import annotations

from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.files import write_text
from lightning_pipeshift.pictures.figure import require_matplotlib, save
from lightning_pipeshift.pictures.gantt import gantt
from lightning_pipeshift.timeline.chrome_trace import chrome_trace
from lightning_pipeshift.timeline.compared import Compared
from lightning_pipeshift.timeline.metrics import PREFIX, metrics_of
from lightning_pipeshift.timeline.recording import Recording, What
from lightning_pipeshift.timeline.slow_ranks import SlowRanks

PICTURE = f"{PREFIX}timeline"
"""The name under which loggers get the picture."""


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
        self._drawn = -1
        self._last: tuple[Recording, int] | None = None

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
                rank_zero_warn(f"PipeShift: {message}.")
            self._last = recording, step
            if self._drawn < 0:
                self._draw(trainer, recording, step)

    def finish(self, trainer: pl.Trainer) -> None:
        """Passes on the rest when the run ends, and draws the last step."""
        self.pass_on(trainer)
        if self._last is not None and self._last[0].step != self._drawn:
            self._draw(trainer, *self._last)

    def _draw(self, trainer: pl.Trainer, recording: Recording, step: int) -> None:
        self._drawn = recording.step
        try:
            require_matplotlib()
        except ConfigurationError:
            rank_zero_info(
                "PipeShift: no picture of the timeline, as matplotlib is not installed (`pip"
                " install lightning-pipeshift[pictures]`)."
            )
            return
        path = self._folder / f"timeline-{recording.step}.png"
        try:
            figure = gantt(recording)
            save(figure, path)
        except OSError as error:
            rank_zero_warn(f"PipeShift: the picture of a step is not written: {error}.")
            return
        for logger in trainer.loggers:
            _give(logger, figure, path, step)


def _give(logger: Any, figure: Any, path: Path, step: int) -> None:
    """Gives a logger the picture, if it takes any: TensorBoard, W&B, MLflow, and those with their
    methods. In a logger's own folder, as that of a CSVLogger, it lies already.
    """
    experiment = getattr(logger, "experiment", None)
    log_image = getattr(logger, "log_image", None)
    add_figure = getattr(experiment, "add_figure", None)
    log_artifact = getattr(experiment, "log_artifact", None)
    if callable(log_image):
        log_image(key=PICTURE, images=[str(path)])
    elif callable(add_figure):
        add_figure(PICTURE, figure, global_step=step, close=False)
    elif callable(log_artifact) and hasattr(logger, "run_id"):
        log_artifact(logger.run_id, str(path), Path(PICTURE).parent.as_posix())
