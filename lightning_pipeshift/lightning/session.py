"""The state of a strategy, from its first run to its last one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_pipeshift.compat.lightning_private import update_properties
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.lightning.auto_numbers import chosen
from lightning_pipeshift.lightning.checkpoints import Checkpoints
from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.lightning.data import for_virtual_machine
from lightning_pipeshift.lightning.job import RankPlace
from lightning_pipeshift.lightning.metric_sync import metrics_to_cpu
from lightning_pipeshift.lightning.patches import Adjustments
from lightning_pipeshift.lightning.random_state import RandomState
from lightning_pipeshift.lightning.run import Run
from lightning_pipeshift.lightning.steps import accumulation_of
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.plan.search.auto_numbers import RunNumbers
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.runtime.ownership.holdings import optimizer_to_device
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch


@dataclass(frozen=True, kw_only=True)
class NextRun:
    """How the next runs differ from what the user's options say.

    Args:
        watch: when a run moves layers without a request; ``None``: never.
        requests: the folder in which a run takes requests for moves, and writes its status;
            ``None``: neither.
        only_measures: whether a run only measures the machines and the model, without changing the
            plan.
    """

    watch: Watch | None = None
    requests: Path | None = None
    only_measures: bool = False


class Session:
    """The state of a strategy: the objects that stay from one run to the next, and the current run.
    A copy of the strategy gets a new session.

    Args:
        options: the user's.
        checkpoint_io: returns the plugin for checkpoints, which the user may replace at any time.
    """

    def __init__(self, options: Options, checkpoint_io: Callable[[], CheckpointIO]) -> None:
        self.connection = Connection(options)
        self.random_state = RandomState(self.connection)
        self.checkpoints = Checkpoints(checkpoint_io, self.connection, self.random_state)
        self.deferred = DeferredInit()
        """Has the values of tensors that are on the meta device."""
        self.run: Run | None = None
        """The present run, or the last one; ``None`` before the first."""
        self._adjustments = Adjustments()
        # The number that the planner has chosen, if it was left to it.
        self._microbatches: int | None = None

    # --- the start of a run: every rank calls each of these ---

    def open(self, place: RankPlace, folder: Path) -> None:
        """See :meth:`Connection.open`. Random numbers are shared from now on (for a split of the
        data in `setup`, for example).
        """
        self.connection.open(place, folder)
        self.random_state.share()
        self.random_state.continue_from({})
        self.checkpoints.numbers = None
        self.deferred = DeferredInit()

    def settings(self, trainer: pl.Trainer, options: Options, next_run: NextRun) -> Settings:
        """Returns the settings of a run that begins now. Numbers that are left to the planner are
        chosen first, unless an earlier run has chosen the same; that raises the errors of
        :func:`~.auto_numbers.chosen`.
        """
        settings = Settings(
            **vars(options),
            only_measures=next_run.only_measures,
            watch=next_run.watch,
            memory=getattr(trainer.precision_plugin, "memory_request", None),
            **accumulation_of(trainer),
        )
        if next_run.only_measures and not options.profile_steps:
            settings = replace(settings, profile_steps=Options.profile_steps)
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains and options.leaves_numbers and not next_run.only_measures:
            self._choose_numbers(trainer, settings)
        if self._microbatches is not None:
            settings = replace(settings, microbatches=self._microbatches)
        return replace(settings, seed=self.random_state.begin_run())

    def _choose_numbers(self, trainer: pl.Trainer, settings: Settings) -> None:
        connection, saved = self.connection, self.checkpoints.numbers
        if self._microbatches is not None:
            known = RunNumbers(connection.replicas.count, self._microbatches)
            if saved in (None, known):
                return
        self._microbatches = None
        settings = replace(settings, seed=self.random_state.seed())
        topology, number = chosen(trainer, connection, settings, self.deferred, saved)
        connection.regroup(topology)
        self._microbatches = number

    def start(self, trainer: pl.Trainer, settings: Settings, requests: Path | None) -> None:
        """Starts a run, in which the first rank takes requests for moves from a folder, if any."""
        self.checkpoints.connect()
        run = self.run = Run.start(trainer, self.connection, settings, self.deferred)
        run.adjust(trainer, self._adjustments, self.deferred, self.checkpoints.is_sharded)
        if requests is not None and trainer.is_global_zero:
            run.take_requests(requests)
        self.checkpoints.begin_run(run.pipeline, trainer.state.fn == TrainerFn.FITTING)

    def share_of(self, loader: object, shares: Sequence[float] | None, pads: bool) -> object:
        """Returns the loader of this virtual machine's part of the data: see
        :func:`~.data.for_virtual_machine`. Without ``shares`` all are equal.
        """
        vm, count = self.connection.replicas.vm, self.connection.replicas.count
        shares = shares or [1.0] * count
        stream = self.random_state.stream
        return for_virtual_machine(loader, vm, shares, pads, stream) if count > 1 else loader

    # --- its end ---

    def end(self, module: pl.LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Makes the model whole again, on the CPU, and undoes the run's changes to Lightning's
        objects.
        """
        self._adjustments.undo()
        if self.run is not None:
            self.run.end(self.connection.has_failed)
        cpu = torch.device("cpu")
        update_properties(module, device=cpu)
        metrics_to_cpu(module)
        for optimizer in optimizers:
            optimizer_to_device(optimizer, cpu, self.deferred)

    def end_by(self, exception: BaseException) -> None:
        """After a SIGTERM that all ranks know of, saves ``last.ckpt`` in the ModelCheckpoint's
        folder. After any other exception, publishes the reason to the other ranks, and closes the
        connections, so that none of them waits for this one.
        """
        if self.run is not None and self.run.interruptions.ends_in_order(exception):
            self.run.interruptions.save_last(exception)
        else:
            self._fail(exception)

    def notice_exception(self, trainer: pl.Trainer | None) -> None:
        """Ends the run if an exception is being handled. Callbacks are notified of it before the
        strategy, and some then save a checkpoint, for which the other ranks would be needed. A
        single rank can still save: for it, only an exception counts that the strategy has handled.
        """
        handled = sys.exc_info()[1]
        if handled is None or not trainer or not trainer.interrupted or trainer.world_size == 1:
            return
        if self.run is None or not self.run.interruptions.ends_in_order(handled):
            self._fail(handled)

    def _fail(self, exception: BaseException) -> None:
        if isinstance(exception, StageFailedError):
            # Another rank's failure is not explained by where this one was: the reason counts.
            exception.__traceback__ = None
        if self.connection.announce(exception):
            if self.run is not None:
                self.run.release()
            self.checkpoints.end()
            self.connection.close()
