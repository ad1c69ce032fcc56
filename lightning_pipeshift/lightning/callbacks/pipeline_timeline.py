"""``PipelineTimeline``: records what all ranks do in some steps, on one clock."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeshift.compat.lightning_private import step_of_loggers
from lightning_pipeshift.devices.properties import used_bytes
from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.lightning.callbacks.record_gathering import Gathering, Place, Taken
from lightning_pipeshift.lightning.callbacks.strategy_of import strategy_of
from lightning_pipeshift.lightning.callbacks.timeline_results import TimelineResults
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.step.control_files import FOLDER, WITHOUT_LOGGER
from lightning_pipeshift.timeline import outcomes
from lightning_pipeshift.timeline.recording import Recording

_PURPOSE: Final = "`PipelineTimeline` records the stages of"


class PipelineTimeline(Callback):
    """Records a step now and then: all actions, waits, transfers, rings, moves, swaps and memory of
    all ranks, on the clock of the first one. Each is written to ``timeline-STEP.json`` in the
    folder ``pipeshift`` of the run's own folder (the logger's, or ``lightning_logs``), as Chrome
    trace JSON: open it in https://ui.perfetto.dev, or draw it with ``pipeshift timeline FILE``.

    Steps that are not recorded run as without the callback. So does what is trained: its bits are
    the same. With an asynchronous schedule some consecutive batches are recorded together. Steps in
    which layers change their owners are recorded too.

    The loggers get figures of each recorded step, as ``pipeshift/bubble`` (see
    :func:`~lightning_pipeshift.timeline.metrics.metrics_of`) and ``pipeshift/moves``, how many
    layers have changed their owners so far. A rank that has become slower than the plan expects is
    named in a warning.
    Decisions by measurements, and what they have gained, are in ``decisions.json``.

    Args:
        every_n_steps: how many batches there are from one record to the next; the first ones are
            never recorded, as the plan is made there.
        folder: another folder for the files.

    Raises:
        ConfigurationError: a value that is not allowed; or, at the start of a run, another
            strategy.
    """

    def __init__(self, every_n_steps: int = 100, folder: str | os.PathLike[str] | None = None):
        is_number = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if not is_number or every_n_steps < 1:
            raise ConfigurationError(
                f"every_n_steps={every_n_steps!r}: pass a whole number of 1 or more, such as 100."
            )
        self.every_n_steps = every_n_steps
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self._gathering: Gathering | None = None
        self._recorder: Recorder | None = None
        self._first = self._num_steps = self._num_batches = 0
        self._plan: Plan | None = None
        self._files = Path()
        self._live: object = None
        self._results: TimelineResults | None = None
        self._earlier: list[outcomes.Change] = []
        self._saved: list[outcomes.Change] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: only the settings."""
        return {"every_n_steps": self.every_n_steps, "folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # --- hooks ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raises ConfigurationError if the Trainer has another strategy."""
        strategy_of(trainer, _PURPOSE)
        self._forget()
        # Lightning asks the first rank for it, so all ranks have to.
        self._files = self.folder_of(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads the decisions that were made before a checkpoint from which the run goes on."""
        if strategy_of(trainer, _PURPOSE).is_global_zero and self._files.is_dir():
            step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            with suppress(PlanError):
                found = outcomes.load(self._files)
                self._earlier = [each for each in found if each.step < step]
                if found:
                    self._save(self._earlier)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts to record, if it is time to."""
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        pipeline = strategy_of(trainer, _PURPOSE).pipeline
        if self._recorder is not None or not self._num_batches:
            # A run's first batch is no usual one: the plan is made, and layers are distributed.
            return
        self._plan = self._plan or pipeline.plan
        is_live = pipeline.plan.is_asynchronous
        moves = self._begins_live_move(pipeline) if is_live else pipeline.changes.next is not None
        if not moves and step % self.every_n_steps:
            return
        device = pipeline.channels.device
        self._first = step
        # A minibatch's forward and backward on the first stage are as many batches apart.
        depth = max(pipeline.replicas.topology.stages_per_vm)
        self._num_steps = depth + 1 if pipeline.plan.is_asynchronous else 1
        self._recorder = Recorder(device, partial(used_bytes, device))
        pipeline.record_actions(self._recorder)

    def _begins_live_move(self, pipeline: Any) -> bool:
        """Whether layers of an asynchronous pipeline have begun to move: the same on every rank."""
        live = pipeline.changes.migration
        is_new, self._live = live is not None and live is not self._live, live
        return is_new

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Ends the record, and hands it to a thread."""
        recorder = self._recorder
        self._num_batches += 1
        self._save_outcomes(strategy_of(trainer, _PURPOSE).pipeline)
        if self._results is not None:
            self._results.pass_on(trainer)
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if recorder is not None and step + 1 >= self._first + self._num_steps:
            recorder.stop()
            self._hand_over(trainer, recorder)

    def _hand_over(self, trainer: pl.Trainer, recorder: Recorder) -> None:
        strategy = strategy_of(trainer, _PURPOSE)
        pipeline, self._recorder = strategy.pipeline, None
        pipeline.record_actions(None)
        replicas = pipeline.replicas
        if self._gathering is None:
            self._gathering = Gathering(replicas.world, strategy.hosts, self._take)
        if replicas.rank == 0:
            self._results = self._results or TimelineResults(self._files)
            self._results.expect(self._first, step_of_loggers(trainer))
        place = Place(
            replicas.rank, replicas.vm, pipeline.channels.stage, strategy.hosts[replicas.rank]
        )
        plan, before = pipeline.plan, self._plan
        self._plan = plan
        moved = list(moves_between(before, plan, replicas.vm)) if before is not None else []
        self._gathering.submit(Taken(recorder, place, self._first, self._num_steps, plan, moved))

    def _save_outcomes(self, pipeline: Any) -> None:
        found = list(pipeline.planning.decisions.changes)
        if found != self._saved and pipeline.replicas.rank == 0:
            self._saved = found
            self._save([*self._earlier, *found])

    def _save(self, found: Iterable[outcomes.Change]) -> None:
        try:
            outcomes.save(found, self._files)
        except OSError as error:
            rank_zero_warn(f"PipeShift: the decisions of a run are not written: {error}.")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits for the records that are on their way."""
        if self._recorder is not None:
            # The run has ended before all of its batches.
            strategy_of(trainer, _PURPOSE).pipeline.record_actions(None)
            self._recorder.stop()
            self._recorder = None
        if self._gathering is not None:
            self._gathering.finish()
            self._gathering = None
        if self._results is not None:
            self._results.pass_on(trainer)
            self._results = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Drops what an exception has left."""
        self._recorder = self._gathering = self._results = None

    def _take(self, recording: Recording) -> None:
        """Called on the first rank, in a thread."""
        if self._results is not None:
            self._results.take(recording)

    def folder_of(self, trainer: pl.Trainer) -> Path:
        """The folder of the files."""
        if self.folder is not None:
            return Path(self.folder)
        return run_folder(trainer) / FOLDER


def run_folder(trainer: pl.Trainer) -> Path:
    """The run's own folder: the logger's if it is on this host, or the default one."""
    logged = trainer.log_dir if trainer.loggers else None
    if logged is None or "://" in str(logged):
        logged = os.path.join(trainer.default_root_dir, WITHOUT_LOGGER)
    return Path(logged)


def moves_between(before: Plan, after: Plan, vm: int) -> Iterator[str]:
    """The layers that one plan gives another stage than the other does, in words."""
    stages = zip(before.placement.stages(vm), after.placement.stages(vm), strict=True)
    for layer, (source, target) in zip(after.layers, stages, strict=True):
        if source != target:
            yield f"{layer.name}: stage {source} to {target}"
