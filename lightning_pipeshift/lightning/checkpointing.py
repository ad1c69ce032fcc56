"""Checkpoints that do not depend on the placement, and models that no rank holds completely."""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
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
from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.lightning_private import (
    WrappingCheckpointIO,
    end_as_after_sigterm,
    is_local_path,
)
from lightning_pipeshift.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    PipeShiftError,
    some_of,
)
from lightning_pipeshift.lightning.pipelined import PipelinedStrategy
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, give_attributes_values
from lightning_pipeshift.model.user_state.random_streams import SharedRandomStream
from lightning_pipeshift.runtime.comm.sockets import keep_for_ever, open_sockets

log = logging.getLogger(__name__)

# How long, after a rank was lost, an unfinished checkpoint may take to fail by itself.
_PATIENCE: Final = 3.0

# The name of a checkpoint's entry for state that Lightning does not save: a run's seed and random
# state.
_EXTRA = "pipeshift"


class CheckpointingStrategy(PipelinedStrategy):
    """The part of the strategy that saves and loads checkpoints, and makes the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._deferred: DeferredInit
        self._shared_stream: SharedRandomStream | None
        self._seed_of_run: int | None
        self._resumed: dict[str, Any]
        self._checkpoint_group: dist.ProcessGroup | None
        self._home: int | None
        # The actual names of checkpoints, by the names that this rank gave to them.
        self._names: dict[str, Any]

    def _of_a_run(self) -> dict[str, Any]:
        return super()._of_a_run() | {
            "_deferred": DeferredInit(),
            "_shared_stream": None,
            "_seed_of_run": None,
            "_resumed": {},
            "_checkpoint_group": None,
            "_home": 0,
            "_names": {},
        }

    def setup_environment(self) -> None:
        super().setup_environment()
        self._resumed = {}
        self._deferred = DeferredInit()
        # The stage of rank 0, which writes checkpoints, if it is in this virtual machine.
        ranks = self.topology.ranks[self.virtual_machine]
        self._home = ranks.index(0) if 0 in ranks else None

    # --- the checkpoint plugin ---

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin for checkpoints; a :class:`PipeShiftCheckpointIO` unless another is given."""
        if self._checkpoint_io is None:
            self._checkpoint_io = PipeShiftCheckpointIO()
        innermost = _innermost(self._checkpoint_io)
        if isinstance(innermost, WrappingCheckpointIO):
            innermost.checkpoint_io = PipeShiftCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def _own_io(self) -> PipeShiftCheckpointIO | None:
        io = _innermost(self.checkpoint_io)
        return io if isinstance(io, PipeShiftCheckpointIO) else None

    @property
    def _is_sharded(self) -> bool:
        io = self._own_io()
        return io is not None and io.sharded

    def _connect_checkpoints(self) -> None:
        """Connects the ranks for sharded checkpoints. Every rank calls this."""
        io = self._own_io()
        if io is None or not io.sharded:
            return
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise ConfigurationError(
                "AsyncCheckpointIO removes older checkpoints before the new one is on disk. Use"
                " PipeShiftCheckpointIO(sharded=True, asynchronous=True) by itself."
            )
        if self._checkpoint_group is None:
            before = open_sockets()
            self._checkpoint_group = dist.new_group(backend="gloo", timeout=self._options.timeout)
            self._checkpoint_sockets = open_sockets() - before
        io.connect(self._checkpoint_group)

    def _end_checkpoints(self) -> None:
        group, self._checkpoint_group = self._checkpoint_group, None
        io = self._own_io()
        if io is None:
            return
        try:
            if not io.wait(self._is_incomplete):
                keep_for_ever(group)
                log.warning(
                    "PipeShift: the checkpoint that was being written when a rank was lost is not"
                    " complete. Earlier ones are."
                )
        except Exception as error:
            log.warning("PipeShift: %s", error)
        io.connect(None)

    def _is_incomplete(self) -> bool:
        """Whether a checkpoint that all ranks write together can no longer become complete."""
        lost_at = self._board.lost_at if self._board is not None else None
        return self._is_sharded and lost_at is not None and time.monotonic() > lost_at + _PATIENCE

    # --- a model that is built later ---

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Context of ``configure_model``: tensors created in it get their values later, on the
        stages that hold them.
        """
        self._deferred = DeferredInit(self._seed())
        with self._deferred.recording():
            yield
        give_attributes_values(self._require_module(), self._deferred)

    def _seed(self) -> int:
        """The seed of the run's random streams; the same on every rank."""
        raise NotImplementedError

    # --- saving ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint. After a failure this is impossible if its parts are on several
        ranks, as these are no longer connected, but still possible on a stage with every layer.
        """
        if self._is_lost():
            self._say_not_saved(str(filepath))
            return
        # Some callers create a random name on every rank (`BatchSizeFinder`): the first rank's is
        # used.
        first, filepath = str(filepath), self.broadcast(filepath)
        if first != str(filepath):
            self._names[first] = filepath
        # A copy: user code in `on_save_checkpoint` got the dict, and may keep it.
        checkpoint = {**checkpoint}
        if self._seed_of_run is not None:
            checkpoint[_EXTRA] = {
                "seed": self._seed_of_run,
                "random": self._random_state(),
                "pretrained_prefix": pretrained_prefix(self._require_module()),
            }
        home, holdings = self._home, self._pipeline.holdings if self._pipeline else None
        if holdings is not None and home is not None and not self._is_sharded:
            complete(holdings, checkpoint, home)
        if self._is_sharded or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, unless the one that replaces it could not be saved."""
        if not self._is_lost():
            super().remove_checkpoint(filepath)

    def _is_lost(self) -> bool:
        """Whether the run has failed, and this rank cannot save the model by itself."""
        return self._has_failed() and (
            self._is_sharded or self._pipeline is None or self._pipeline.channels.num_stages > 1
        )

    def _say_not_saved(self, what: str) -> None:
        rank_zero_warn(
            f"PipeShift: {what} is not saved. A rank has failed, and the other ranks can no "
            "longer send their layers. Resume from the last checkpoint that was saved before."
        )

    def _watch_for_exceptions(self, trainer: pl.Trainer) -> None:
        """Prevents callbacks from saving after an exception if nothing can be saved: they would
        report success, and make the last checkpoint's link point to nothing.
        """
        if self.num_stages == 1 and not self._is_sharded:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            saves = isinstance(callback, OnExceptionCheckpoint) or getattr(
                callback, "save_on_exception", False
            )
            if saves:
                self._adjustments.hear_exceptions(callback, self._after_exception)

    def _after_exception(
        self, plain: Callable[..., None], trainer: pl.Trainer, module: Any, exception: BaseException
    ) -> None:
        if self._ends_in_order(exception) or self.world_size == 1:
            plain(trainer, module, exception)
        else:
            self._say_not_saved(
                f"the state of the model when {type(exception).__name__} was raised"
            )

    def _random_state(self) -> dict[str, Any]:
        stream = self._shared_stream
        shared, own = stream.state() if stream is not None else (None, None)
        # Without connections, the states of the other virtual machines are not known.
        gathered = [] if self._is_alone() else self._require_replicas().gather(own)
        return {"shared": shared, "own": gathered}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; on other ranks, tensors that they do not hold are meta
        tensors. For a sharded checkpoint, the part that this rank saves.
        """
        module = self._require_module()
        if self._is_lost():
            return {}
        holdings = self._pipeline.holdings if self._pipeline is not None else None
        # The parameters themselves, not copies of them, as holders are found by their identity.
        state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
        if holdings is None:
            self._require_values(module)
            if self._is_sharded and not self.is_global_zero:
                state_dict.clear()
            return state_dict
        if self._is_sharded:
            replicas = self._require_replicas()
            return part_of_state(holdings, state_dict, replicas.vm, replicas.count)
        return state_dict if self._home is None else gather_state(holdings, state_dict, self._home)

    def _require_values(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise CheckpointError(
                    f"{name!r} has no values yet: a model that is created in `configure_model` "
                    "gets them at the first batch. Save after that."
                )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, in torch's own format. For a sharded checkpoint, the part that
        this rank saves.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._is_lost():
            return {}
        # An evaluation after the training has its own plan; the optimizers' state remains on the
        # stages of the training.
        holdings = self._trained.holdings if self._trained is not None else None
        if holdings is not None and self._is_sharded:
            replicas = self._require_replicas()
            return part_of_optimizer_state(holdings, optimizer, replicas.vm, replicas.count)
        if holdings is None or self._home is None:
            return optimizer.state_dict()
        return gather_optimizer_state(holdings, optimizer, self._home)

    # --- a machine that is shut down ---

    def _watch_for_sigterm(self, trainer: pl.Trainer) -> None:
        """Makes a SIGTERM of any rank end the run on all of them, after the same step.

        Lightning's own handler communicates with the other ranks from inside the signal handler, in
        the middle of other communication.
        """
        self._adjustments.notify_of_sigterm(trainer, self._note_sigterm)

    def _note_sigterm(self, signum: int, _: Any) -> None:
        trainer = self._require_module().trainer
        if self._launcher is not None:
            self._launcher.kill(signum)
        if self._pipeline is not None and trainer.state.fn == TrainerFn.FITTING:
            self._pipeline.asks_to_end = True
        else:
            end_as_after_sigterm(trainer)

    def _heed_sigterm(self) -> None:
        """After a step: makes Lightning's loop end the run, if any rank got a SIGTERM."""
        if self._require_pipeline().is_to_end:
            end_as_after_sigterm(self._require_module().trainer)

    def on_exception(self, exception: BaseException) -> None:
        """After a SIGTERM that all ranks know of, saves ``last.ckpt`` in the ModelCheckpoint's
        folder. After any other exception, closes the connections.
        """
        if not self._ends_in_order(exception):
            super().on_exception(exception)
            return
        assert isinstance(exception, SIGTERMException)
        # Not 0, so that `torchrun --max-restarts` restarts the run.
        exception.code = 128 + signal.SIGTERM
        trainer = self._require_module().trainer
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

    def _ends_in_order(self, exception: BaseException) -> bool:
        return (
            isinstance(exception, SIGTERMException)
            and self._pipeline is not None
            and self._pipeline.is_to_end
            and not self._failed
        )

    def _fail(self, exception: BaseException) -> None:
        if not self._ends_in_order(exception):
            super()._fail(exception)

    # --- loading ---

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint, a file or a folder. A rank reads its tensors on demand.

        Raises:
            CheckpointError: not all ranks can find it, or it is incomplete or damaged.
        """
        checkpoint_path = self._names.get(str(checkpoint_path), checkpoint_path)
        io = self._own_io()
        if io is None or not is_local_path(str(checkpoint_path)):
            checkpoint = self.checkpoint_io.load_checkpoint(
                checkpoint_path, weights_only=weights_only is not False
            )
        else:
            io.wait()
            self._require_visible(Path(checkpoint_path))
            checkpoint = io.open(
                checkpoint_path,
                weights_only,
                self._deferred.promise,
                (self.local_rank, max(1, self.num_processes)),
            )
            if Path(checkpoint_path).is_file():
                for _, owner, name in leaves(checkpoint):
                    if isinstance(owner[name], torch.Tensor):
                        self._deferred.lend(owner[name])
        trainer = trainer_of(self.lightning_module)
        trains = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        # Removed, as hooks should see only entries of Lightning's own checkpoints.
        extra = checkpoint.pop(_EXTRA, {})
        self._resumed = extra if trains else {}
        return checkpoint

    def _require_visible(self, path: Path) -> None:
        atomic.restore(path)
        there = [path.exists()]
        if not self._is_unconnected_alone:
            there = list(map(bool, self._require_replicas().world.gather_int(int(path.exists()))))
        if all(there):
            return
        blind = ", ".join(str(rank) for rank, sees in enumerate(there) if not sees)
        where = f"rank(s) {blind} do not see it" if any(there) else "no rank sees it"
        raise CheckpointNotFoundError(
            f"Checkpoint file not found: {path}: {where}. Every rank reads its own part: put the "
            "checkpoint on a file system that all hosts see, under the same path."
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model's state; tensors without values are loaded when these are initialised.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        module = self._require_module()
        state_dict = checkpoint["state_dict"]
        expected = {
            name: value.shape if isinstance(value, torch.Tensor) else None
            for name, value in module.state_dict().items()
        }
        try:
            with self._deferred.recording(), warnings.catch_warnings():
                # Torch warns for each parameter of another stage that it is not changed.
                warnings.filterwarnings("ignore", ".*copying from a non-meta parameter.*no-op")
                module.load_state_dict(state_dict, strict=strict)
        except PipeShiftError:
            raise
        except RuntimeError as error:
            missing = [name for name in expected if name not in state_dict]
            unexpected = [name for name in state_dict if name not in expected]
            differing = [
                name
                for name, shape in expected.items()
                if shape is not None and name in state_dict and state_dict[name].shape != shape
            ]
            if not missing and not unexpected and not differing:
                raise CheckpointError(f"The checkpoint could not be loaded: {error}") from error
            raise CheckpointError(
                "The checkpoint is of another model."
                + _told(" Not in the checkpoint", missing)
                + _told(" Not in the model", unexpected)
                + _told(" Of another shape", differing)
                + " Build the model as it was, or load the matching tensors by hand "
                "(`strict_loading=False` on the LightningModule ignores missing tensors). "
                f"Torch says: {error}"
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the whole state, on the CPU; each stage moves its part to the device of its
        parameters later.
        """
        with self._deferred.recording():
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=False
            ):
                optimizer.load_state_dict(state)

    def _resume_random_state(self) -> None:
        """Continues with the checkpoint's random state outside of steps."""
        state, stream = self._resumed.get("random"), self._shared_stream
        if state is not None and stream is not None and state["shared"] is not None:
            own = state["own"]
            same_count = len(own) == self._require_replicas().count
            stream.set_state(state["shared"], own[self.virtual_machine] if same_count else None)


def _innermost(io: CheckpointIO) -> CheckpointIO:
    """The plugin inside of all wrappers; a wrapper itself, if it has no inner plugin yet."""
    while isinstance(io, WrappingCheckpointIO) and io.checkpoint_io is not None:
        io = io.checkpoint_io
    return io


def _told(what: str, names: list[str]) -> str:
    """A part of a message: names grouped by their layers."""
    if not names:
        return ""
    owners = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return f"{what}: {some_of(owners)}."
