"""The hooks that Lightning calls on a strategy. Each one calls the object that does the work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.checkpoint.load_state import load_state
from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.lightning_private import (
    set_num_threads_if_needed,
    update_properties,
    use_distributed_sampler,
    uses_distributed_sampler,
)
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning import checks, collectives
from lightning_pipeshift.lightning.checkpoints import with_inner_plugin
from lightning_pipeshift.lightning.data import seed_workers_alike
from lightning_pipeshift.lightning.job import RankPlace
from lightning_pipeshift.lightning.launcher import launcher_of
from lightning_pipeshift.lightning.optimizers import check_known
from lightning_pipeshift.lightning.run import Run
from lightning_pipeshift.lightning.session import NextRun, Session
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, give_attributes_values
from lightning_pipeshift.plan.search.options import Options

T = TypeVar("T")


class StrategyHooks(ParallelStrategy):
    """The methods of the strategy that Lightning calls. Its subclass :class:`PipeShiftStrategy` has
    those for users.

    Args:
        options: the user's.
        rest: the arguments of every strategy of Lightning's.
    """

    next_run = NextRun()
    """Set by callbacks and commands before a run."""

    def __init__(self, options: Options, *rest: Any) -> None:
        self._options = options
        super().__init__(*rest)
        self.num_nodes = 1
        # Whether the Trainer wants each rank to get a part of the data; read in the first run.
        self._shares_data: bool | None = None
        self._begin_session()

    def _begin_session(self) -> None:
        self._session = Session(self._options, lambda: self.checkpoint_io)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: only the settings, without the state of a run."""
        state: dict[str, Any] = super().__getstate__()
        del state["_session"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_session()

    @property
    def _run(self) -> Run:
        if self._session.run is None:
            raise ConfigurationError(
                "There is no pipeline yet: it is created when `fit`, `validate`, `test` or "
                "`predict` begins."
            )
        return self._session.run

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- this process ---

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        if self.local_rank >= len(self.parallel_devices):
            raise ConfigurationError(
                f"This is process {self.local_rank} on its host, and the Trainer was given"
                f" {len(self.parallel_devices)} device(s). Set `Trainer(devices=...)` to the number"
                " of processes that the launcher starts on each host."
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """How many processes run on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend that the user requested."""
        return self._options.process_group_backend

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        # The rank of the only process is 0 in any case: SLURM's variables may be missing.
        return 0 if self._is_only_process else super().global_rank

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        return 0 if self._is_only_process else super().local_rank

    @property
    def node_rank(self) -> int:
        """The number of this process's host."""
        return 0 if self._is_only_process else super().node_rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return 1 if self._is_only_process else super().world_size

    @property
    def _is_only_process(self) -> bool:
        started = int(os.environ.get("WORLD_SIZE", 1))
        return self.num_processes * self.num_nodes == 1 and started == 1

    # --- the launch ---

    def _configure_launcher(self) -> None:
        checks.check_devices(self.parallel_devices or ())
        self._launcher = launcher_of(self, lambda: self._session.connection.has_met)

    def set_world_ranks(self) -> None:
        """Takes rank and world size from the launcher, or computes them if it sets none."""
        assert self.cluster_environment is not None
        world_size = self.num_nodes * self.num_processes
        rank = self.node_rank * self.num_processes + self.local_rank
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Environments with their own ranks (torchrun, SLURM) ignore this.
        self.cluster_environment.set_global_rank(rank)
        self.cluster_environment.set_world_size(world_size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        # Lightning's, with torch 2.13, once on every rank.
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            checks.check_packages(trainer, self._module)
        checks.check_processes(self.num_processes)
        super().setup_environment()
        if self.num_processes > 1:
            # The launcher does this only for the process that it launches from. A single process
            # keeps the number of threads that the user has set.
            set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        assert self.cluster_environment is not None
        rank, size, device = self.global_rank, self.world_size, self.root_device
        folder = Path(trainer.default_root_dir if trainer is not None else ".")
        self._session.open(RankPlace(rank, size, device, self.cluster_environment), folder)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Context of ``configure_model``: tensors created in it get their values later, on the
        stages that hold them.
        """
        session = self._session
        session.deferred = DeferredInit(session.random_state.seed())
        with session.deferred.recording():
            yield
        give_attributes_values(self._module, session.deferred)

    # --- the start of a run ---

    def setup(self, trainer: pl.Trainer) -> None:
        module, session = self._module, self._session
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        with session.deferred.recording():
            self.model = self.precision_plugin.convert_module(module)
        # What user code asks for (`self.device`), in nested LightningModules too.
        update_properties(module, device=self.root_device)
        settings = session.settings(trainer, self._options, self.next_run)
        topology = session.connection.replicas.topology
        checks.check_run(module, settings, topology)
        # Lightning's own samplers support neither shares nor global batches.
        if self._shares_data is None:
            self._shares_data = uses_distributed_sampler(trainer)
        use_distributed_sampler(trainer, False)
        session.start(trainer, settings, self.next_run.requests)
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, module, settings, topology)
            check_known(self.optimizers, module, {*module.parameters()}.__contains__)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Does nothing yet: each stage moves its own layers to its device when the plan is made."""

    # --- data ---

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers count virtual machines: all stages of one see the same data."""
        if self._is_unconnected_alone:
            return {"num_replicas": 1, "rank": 0}
        replicas = self._session.connection.replicas
        return {"num_replicas": replicas.count, "rank": replicas.vm}

    @property
    def is_distributed(self) -> bool:
        """Whether there are several virtual machines: values logged with ``sync_dist`` are reduced
        over them.
        """
        return self._session.connection.is_open and self._session.connection.replicas.count > 1

    @property
    def _is_unconnected_alone(self) -> bool:
        """Whether no run has started, and this process would be its only rank: then it can answer
        the Trainer's queries by itself (for `estimated_stepping_batches`, for example).
        """
        return not self._session.connection.is_open and self.world_size == 1

    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader of this virtual machine's share of the data, and makes workers' seeds
        depend on the virtual machine, instead of the rank as in Lightning.
        """
        seed_workers_alike(dataloader)
        if self._is_unconnected_alone:
            return dataloader
        trains = self._module.trainer.state.stage == RunningStage.TRAINING
        if trains:
            # Next, Lightning creates the loader's iterator, whose order may be random.
            self._session.random_state.restore()
        if not self._shares_data:
            return dataloader
        return self._session.share_of(dataloader, self._options.batch_shares, pads=trains)

    # --- training ---

    def on_train_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        trainer = self._module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready and not progress.is_last_batch:
            # In the middle of an epoch the iterator was created before the checkpoint.
            self._session.random_state.restore()
        self._session.random_state.continue_from({})
        self._run.training.begin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        result = run.training.run(*args, *kwargs.values())
        run.interruptions.heed()
        return result

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context of the steps that no optimizer step follows."""
        with self._run.training.accumulating():
            yield

    @property
    def backward(self) -> Callable[..., Tensor]:
        """``(loss, optimizer, ...) -> loss``; Lightning's own where the user's step calls it."""
        plain = super().backward
        training = self._session.run.training if self._session.run is not None else None
        if training is None or training.leaves_backward:
            return plain

        def run(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return training.backward(loss, partial(plain, loss, *args, **kwargs))

        return run

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        plain = super().optimizer_step
        return self._run.training.gradients.optimizer_step(
            optimizer, closure, lambda inner: plain(optimizer, inner, *args, **kwargs)
        )

    def on_train_end(self) -> None:
        """Makes the virtual machines' states equal: running statistics, random numbers."""
        self._run.training.end()
        self._session.random_state.to_shared()

    # --- evaluation ---

    def on_validation_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._run.evaluation.begin()

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.evaluation.run("validation_step", *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.evaluation.run("test_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.evaluation.run("predict_step", *args, *kwargs.values())

    def on_validation_end(self) -> None:
        """Checks that no batch of the data was skipped."""
        self._run.evaluation.end()
        # After the sanity check Lightning restores the earlier random state, which was that of the
        # shared stream.
        self._session.random_state.to_shared()

    on_test_end = on_predict_end = on_validation_end

    # --- collective calls of Lightning's and of callbacks ---

    def _together(self, meets: bool = False) -> Session:
        """Returns the session, for a call of all ranks. Ends the run first if an exception is being
        handled.

        Args:
            meets: whether the ranks wait for each other in the call.
        """
        session = self._session
        session.notice_exception(trainer_of(self.lightning_module))
        if meets and session.run is not None:
            session.run.pipeline.meets()
        return session

    def barrier(self, name: str | None = None) -> None:
        collectives.barrier(self._together(meets=True).connection)

    def broadcast(self, obj: T, src: int = 0) -> T:
        return collectives.broadcast(self._together(meets=True).connection, obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over virtual machines; all stages of one pass the same value.

        During an evaluation the virtual machines may be at different batches, so logged values are
        not reduced; the epoch's value is reduced at its end.
        """
        session = self._together()
        is_in_step = session.run is not None and not session.run.metric_sync.is_open
        if is_in_step or self._is_unconnected_alone:
            return tensor
        return collectives.reduce(session.connection, tensor, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over virtual machines, along a new first dimension. With a single virtual machine
        it returns the tensor itself.
        """
        connection = self._together().connection
        return tensor if self._is_unconnected_alone else collectives.all_gather(connection, tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return collectives.agree(self._together(meets=True).connection, decision, all)

    # --- checkpoints ---

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin for checkpoints; a :class:`PipeShiftCheckpointIO` unless another is given."""
        self._checkpoint_io = with_inner_plugin(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint. After a failure only a rank that has every layer still can."""
        checkpoints = self._together().checkpoints
        checkpoints.save(checkpoint, filepath, storage_options, self.is_global_zero)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, unless the one that replaces it could not be saved."""
        if not self._together().checkpoints.is_lost:
            super().remove_checkpoint(filepath)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; for a sharded checkpoint, the part that this rank saves."""
        session = self._together()
        if session.run is not None:
            session.run.training.drain(is_resumable=True)
        return session.checkpoints.module_state(self._module, self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0; for a sharded checkpoint, the part that this rank saves."""
        return self._together().checkpoints.optimizer_state(optimizer)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint, a file or a folder. A rank reads its tensors on demand."""
        trainer = trainer_of(self.lightning_module)
        trains = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        turn = self.local_rank, max(1, self.num_processes)
        return self._session.checkpoints.load(
            checkpoint_path, weights_only, self._session.deferred, turn, continues=trains
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model's state; tensors without values are loaded when these are initialised."""
        with self._session.deferred.recording():
            load_state(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the whole state, on the CPU; each stage moves its part to its parameters later."""
        states = checkpoint["optimizer_states"]
        with self._session.deferred.recording():
            for optimizer, state in zip(self.optimizers, states, strict=False):
                optimizer.load_state_dict(state)

    # --- the end ---

    def on_exception(self, exception: BaseException) -> None:
        """See :meth:`Session.end_by`."""
        super().on_exception(exception)
        self._session.end_by(exception)

    def teardown(self) -> None:
        """Makes the model whole again on every rank, and undoes the run's changes."""
        self._session.end(self._module, self.optimizers)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._session.connection.pause()
