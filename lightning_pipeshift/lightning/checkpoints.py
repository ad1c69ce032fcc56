"""Checkpoints that do not depend on the placement, of models that no rank holds completely."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_pipeshift.checkpoint import atomic
from lightning_pipeshift.checkpoint.checkpoint_io import PipeShiftCheckpointIO
from lightning_pipeshift.checkpoint.export import pretrained_prefix
from lightning_pipeshift.checkpoint.gather_state import (
    complete,
    gather_optimizer_state,
    gather_state,
    part_of_optimizer_state,
    part_of_state,
)
from lightning_pipeshift.checkpoint.sharded import leaves
from lightning_pipeshift.compat.lightning_private import WrappingCheckpointIO, is_local_path
from lightning_pipeshift.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lightning_pipeshift.lightning.collectives import broadcast
from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.lightning.random_state import RandomState
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.plan.search.auto_numbers import RunNumbers
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.sockets import keep_for_ever
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.values.value import run_by

log = logging.getLogger(__name__)

# How long, after a rank was lost, an unfinished checkpoint may take to fail by itself.
_PATIENCE: Final = 3.0

# The name of a checkpoint's entry for state that Lightning does not save: a run's seed, its random
# state, and the numbers on which its bits depend.
_EXTRA: Final = "pipeshift"


def with_inner_plugin(io: CheckpointIO | None) -> CheckpointIO:
    """The plugin for checkpoints: a :class:`PipeShiftCheckpointIO` where none is given, by itself
    or inside of a wrapper.
    """
    if io is None:
        return PipeShiftCheckpointIO()
    innermost = _innermost(io)
    if isinstance(innermost, WrappingCheckpointIO):
        innermost.checkpoint_io = PipeShiftCheckpointIO()
    return io


def _innermost(io: CheckpointIO) -> CheckpointIO:
    """The plugin inside of all wrappers; a wrapper itself, if it has no inner plugin yet."""
    while isinstance(io, WrappingCheckpointIO) and io.checkpoint_io is not None:
        io = io.checkpoint_io
    return io


def warn_not_saved(what: str) -> None:
    """Warns that something is not saved, as its parts can no longer be collected."""
    rank_zero_warn(
        f"PipeShift: {what} is not saved. A rank has failed, and the other ranks can no "
        "longer send their layers. Resume from the last checkpoint that was saved before."
    )


class Checkpoints:
    """Saves and opens the checkpoints of all runs.

    Args:
        plugin: returns the plugin that writes and reads, which the user may replace at any time.
        connection: to the other ranks.
        random_state: is saved, too.
    """

    def __init__(
        self, plugin: Callable[[], CheckpointIO], connection: Connection, random_state: RandomState
    ) -> None:
        self._plugin = plugin
        self._connection = connection
        self._random_state = random_state
        self._pipeline: Pipeline | None = None
        # An evaluation after the training has its own plan; the optimizers' state remains on the
        # stages of the training.
        self._trained: Pipeline | None = None
        self._group: dist.ProcessGroup | None = None
        # The actual names of checkpoints, by the names that this rank gave to them.
        self._names: dict[str, Any] = {}
        self.numbers: RunNumbers | None = None
        """Those of the checkpoint with which the run continues."""

    def begin_run(self, pipeline: Pipeline, trains: bool) -> None:
        """From now on, saves the model of this pipeline; and, if it trains, the optimizers."""
        self._pipeline = pipeline
        if trains:
            self._trained = pipeline

    # --- the plugin ---

    def _own_plugin(self) -> PipeShiftCheckpointIO | None:
        plugin = _innermost(self._plugin())
        return plugin if isinstance(plugin, PipeShiftCheckpointIO) else None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank saves its own part."""
        plugin = self._own_plugin()
        return plugin is not None and plugin.sharded

    def connect(self) -> None:
        """Connects the ranks, if each of them saves its own part. Every rank calls this.

        Raises:
            ConfigurationError: a wrapper of Lightning's does not allow that.
        """
        plugin = self._own_plugin()
        if plugin is None or not plugin.sharded:
            return
        if isinstance(self._plugin(), AsyncCheckpointIO):
            raise ConfigurationError(
                "AsyncCheckpointIO removes older checkpoints before the new one is on disk. Use"
                " PipeShiftCheckpointIO(sharded=True, asynchronous=True) by itself."
            )
        if self._group is None and self._connection.is_open:
            self._group = self._connection.group_for_checkpoints()
        plugin.connect(self._group)

    def end(self) -> None:
        """Waits for checkpoints that are being written when a run fails."""
        group, self._group = self._group, None
        plugin = self._own_plugin()
        if plugin is None:
            return
        try:
            if not plugin.wait(self._is_incomplete):
                keep_for_ever(group)
                log.warning(
                    "PipeShift: the checkpoint that was being written when a rank was lost is not"
                    " complete. Earlier ones are."
                )
        except Exception as error:
            log.warning("PipeShift: %s", error)
        plugin.connect(None)

    def _is_incomplete(self) -> bool:
        """Whether a checkpoint that all ranks write together can no longer become complete."""
        lost_at = self._connection.lost_at
        return self.is_sharded and lost_at is not None and time.monotonic() > lost_at + _PATIENCE

    # --- saving: every rank calls each of these ---

    @property
    def is_lost(self) -> bool:
        """Whether the run has failed, and this rank cannot save the model by itself: it does not
        have every layer, or the update of some layers is missing.
        """
        pipeline = self._pipeline
        return self._connection.has_failed and (
            self.is_sharded
            or pipeline is None
            or pipeline.channels.num_stages > 1
            or pipeline.late_updates.is_pending
        )

    @purpose("a checkpoint's saving")
    def save(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None, is_first: bool
    ) -> None:
        """Writes a checkpoint, or warns that this is no longer possible.

        Args:
            checkpoint: Lightning's dict.
            path: its name.
            storage_options: for the plugin.
            is_first: whether this is the first rank.
        """
        if self.is_lost:
            warn_not_saved(str(path))
            return
        # Some callers create a random name on every rank (`BatchSizeFinder`): the first rank's is
        # used.
        first, path = str(path), broadcast(self._connection, path, source=0)
        if first != str(path):
            self._names[first] = path
        # A copy: user code in `on_save_checkpoint` got the dict, and may keep it.
        checkpoint = {**checkpoint}
        pipeline = self._pipeline
        if pipeline is not None:
            prefix = pretrained_prefix(pipeline.root)
            stages_per_vm = pipeline.replicas.topology.stages_per_vm
            checkpoint[_EXTRA] = {
                **self._random_state.state(),
                "pretrained_prefix": prefix,
                "virtual_machines": len(stages_per_vm),
                "microbatches": pipeline.settings.num_microbatches(stages_per_vm),
            }
            home = _home(pipeline.replicas)
            if pipeline.holdings is not None and (self.is_sharded or home is not None):
                with run_by(None):
                    complete(pipeline.holdings, checkpoint, None if self.is_sharded else home)
        if self.is_sharded or is_first:
            # The plugin may be another than when the run began.
            self.connect()
            # A value that is left is an error: a rank that saves alone would wait for its bytes.
            with run_by(None):
                self._plugin().save_checkpoint(checkpoint, path, storage_options=storage_options)

    @purpose("a checkpoint's gathering")
    def module_state(self, module: pl.LightningModule, is_first: bool) -> dict[str, Any]:
        """The whole state on the first rank; on other ranks, tensors that they do not hold are meta
        tensors. For a sharded checkpoint, the part that this rank saves.
        """
        if self.is_lost:
            return {}
        pipeline = self._pipeline
        holdings = pipeline.holdings if pipeline is not None else None
        # The parameters themselves, not copies of them, as holders are found by their identity.
        state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
        if pipeline is None or holdings is None:
            _require_values(module)
            return {} if self.is_sharded and not is_first else state_dict
        replicas = pipeline.replicas
        # A hook may ask for it that sees parameters as values.
        with run_by(None):
            if self.is_sharded:
                return part_of_state(holdings, state_dict, replicas.vm, replicas.count)
            home = _home(replicas)
            return state_dict if home is None else gather_state(holdings, state_dict, home)

    @purpose("a checkpoint's gathering")
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on the first rank, in torch's own format. For a sharded checkpoint, the
        part that this rank saves.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self.is_lost:
            return {}
        pipeline = self._trained
        if pipeline is None or pipeline.holdings is None:
            return optimizer.state_dict()
        holdings, replicas = pipeline.holdings, pipeline.replicas
        with run_by(None):
            if self.is_sharded:
                return part_of_optimizer_state(holdings, optimizer, replicas.vm, replicas.count)
            home = _home(replicas)
            if home is None:
                return optimizer.state_dict()
            return gather_optimizer_state(holdings, optimizer, home)

    # --- loading ---

    @purpose("a checkpoint's loading")
    def load(
        self,
        path: Any,
        weights_only: bool | None,
        deferred: DeferredInit,
        turn: tuple[int, int],
        continues: bool,
    ) -> dict[str, Any]:
        """Opens a checkpoint, a file or a folder. A rank reads its tensors on demand. Every rank
        calls this.

        Args:
            path: its name.
            weights_only: as in ``torch.load``.
            deferred: gets what is read on demand.
            turn: which entries this rank compares with their checksums; see
                :meth:`PipeShiftCheckpointIO.open`.
            continues: whether the run that saved it goes on, with its seed and random state.

        Raises:
            CheckpointError: not all ranks can find it, or it is incomplete or damaged.
        """
        path = self._names.get(str(path), path)
        plugin = self._own_plugin()
        if plugin is None or not is_local_path(str(path)):
            checkpoint = self._plugin().load_checkpoint(
                path, weights_only=weights_only is not False
            )
        else:
            plugin.wait()
            self._require_visible(Path(path))
            checkpoint = plugin.open(path, weights_only, deferred.promise, turn)
            if Path(path).is_file():
                for _, owner, name in leaves(checkpoint):
                    if isinstance(owner[name], torch.Tensor):
                        deferred.lend(owner[name])
        # Removed, as hooks should see only entries of Lightning's own checkpoints.
        extra = checkpoint.pop(_EXTRA, {})
        self._random_state.continue_from(extra if continues else {})
        self.numbers = None
        if continues and "virtual_machines" in extra:
            self.numbers = RunNumbers(extra["virtual_machines"], extra["microbatches"])
        return checkpoint

    def _require_visible(self, path: Path) -> None:
        atomic.restore(path)
        there = [path.exists()]
        if self._connection.is_open:
            world = self._connection.replicas.world
            there = world.gather(path.exists())
        if all(there):
            return
        blind = ", ".join(str(rank) for rank, sees in enumerate(there) if not sees)
        where = f"rank(s) {blind} do not see it" if any(there) else "no rank sees it"
        raise CheckpointNotFoundError(
            f"Checkpoint file not found: {path}: {where}. Every rank reads its own part: put the "
            "checkpoint on a file system that all hosts see, under the same path."
        )


def _home(replicas: Replicas) -> int | None:
    """The stage of the first rank, which writes checkpoints, if it is in this virtual machine."""
    ranks = replicas.topology.ranks[replicas.vm]
    return ranks.index(0) if 0 in ranks else None


def _require_values(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise CheckpointError(
                f"{name!r} has no values yet: a model that is created in `configure_model` "
                "gets them at the first batch. Save after that."
            )
