"""``PipeShiftStrategy``: where Lightning's hooks meet the pipeline. Each delegates."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _init_dist_connection,
    _set_num_threads_if_needed,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_pipeshift.checks import check_optimizers, check_packages, check_processes, check_run
from lightning_pipeshift.errors import (
    ConfigurationError,
    PlanError,
    StageFailedError,
)
from lightning_pipeshift.evaluation import (
    EvaluationSteps,
    is_hook_used,
    somebody_looks_at_results,
)
from lightning_pipeshift.model.logs import say_again
from lightning_pipeshift.model.streams import global_state, set_global_state
from lightning_pipeshift.plan.plan import Plan
from lightning_pipeshift.plan.schedule import schedule_named
from lightning_pipeshift.plugins.precision import loss_scale_of, over_stages
from lightning_pipeshift.runtime.channels import Channels
from lightning_pipeshift.runtime.checksum import require_same_lengths
from lightning_pipeshift.runtime.failure import FailureBoard
from lightning_pipeshift.runtime.holdings import Holdings
from lightning_pipeshift.runtime.pipeline import Pipeline
from lightning_pipeshift.runtime.planning import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

# What a LightningModule and a Metric keep on themselves is not the user's state.
_FRAMEWORK_ATTRIBUTES = frozenset(vars(pl.LightningModule())) | {"log", "log_dict", "_trainer"}


class PipeShiftStrategy(ParallelStrategy):
    """Trains one model as a pipeline over all devices, from an unmodified LightningModule.

    Every stage runs the user's own ``training_step``; a gate in front of each layer skips those
    that live on other stages. Schedules: GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan
    et al., PipeDream-Flush, 2021, section 3.2).

    Args:
        virtual_machines: how many replicas of the model train in parallel. This version runs one.
        microbatches: into how many slices a batch is cut; ``"auto"`` takes four for each stage.
        schedule: ``"1f1b"`` or ``"gpipe"``.
        partition: who owns which layers. ``"auto"`` balances the measured forward times,
            ``"uniform"`` the number of layers, a list gives the number of layers of each stage.
        plan: a :class:`~lightning_pipeshift.Plan`, or the path of one, that overrides the three
            above.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default what the devices allow. With
            gloo, tensors on a GPU go through host memory.
        timeout: how long a rank waits for another before it gives up.
        accelerator: as in every Lightning strategy; the Trainer's argument is the usual way.
        parallel_devices: this host's devices, likewise.
        cluster_environment: who tells a process its rank, likewise.
        checkpoint_io: how checkpoints are written, likewise.
        precision_plugin: the precision, likewise.

    Raises:
        ConfigurationError: an argument has a value that is not allowed; the message says what is.
    """

    def __init__(
        self,
        virtual_machines: int | Literal["auto"] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        partition: Literal["auto", "uniform"] | list[int] | list[list[int]] = "auto",
        plan: str | Path | Plan | None = None,
        process_group_backend: Literal["nccl", "gloo"] | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        if virtual_machines not in (1, "auto"):
            raise ConfigurationError(
                f"virtual_machines={virtual_machines!r}: this version trains one virtual machine,"
                " that is one pipeline over all devices. Leave the argument out, or pass 1."
            )
        if microbatches != "auto" and (
            isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
        ):
            raise ConfigurationError(
                f"microbatches={microbatches!r}: a batch is cut into at least 1 slice."
                " Pass a whole number of 1 or more, or 'auto'."
            )
        schedule_named(schedule)
        _require_partition(partition)
        self._microbatches = microbatches
        self._schedule = schedule
        self._partition = partition
        if process_group_backend not in (None, "nccl", "gloo"):
            raise ConfigurationError(
                f"process_group_backend={process_group_backend!r}: allowed are 'nccl', 'gloo', and"
                " None for what the devices allow."
            )
        if not isinstance(plan, str | Path | Plan | None):
            raise ConfigurationError(
                f"plan={plan!r}: pass a `Plan`, or the path of a file that `Plan.save` wrote."
            )
        self._given_plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._board: FailureBoard | None = None
        self._store: Any = None
        self._num_runs = 0
        self._channels: Channels | None = None
        self._pipeline: Pipeline | None = None
        self._evaluation: EvaluationSteps | None = None
        self._failed = False
        self._step_is_skipped = False
        self.num_nodes = 1

    # --- what is known ---

    @property
    def plan(self) -> Plan:
        """The plan in force. Raises PlanError before the first batch."""
        if self._pipeline is None:
            raise PlanError(
                "There is no plan yet: no run has begun. It is made when the first batch comes."
            )
        return self._pipeline.plan

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self._require_channels().stage

    @property
    def num_stages(self) -> int:
        """How many stages this rank's virtual machine has."""
        return self._require_channels().num_stages

    @property
    def virtual_machine(self) -> int:
        """The index of this rank's virtual machine."""
        return 0

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
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers count virtual machines: all stages of one see the same data."""
        return {"num_replicas": 1, "rank": self.virtual_machine}

    @property
    def is_distributed(self) -> bool:
        """Whether data is spread over replicas, which is what Lightning asks here."""
        return False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded when the optimizers exist, while the model is still whole."""
        return True

    @property
    def process_group_backend(self) -> str | None:
        """The backend that was asked for."""
        return self._process_group_backend

    # --- launch and connections ---

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Takes rank and world size from the launcher, and computes them where it gives none."""
        assert self.cluster_environment is not None
        rank = self.node_rank * self.num_processes + self.local_rank
        world_size = self.num_nodes * self.num_processes
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Environments that know better (torchrun, SLURM) ignore this.
        self.cluster_environment.set_global_rank(rank)
        self.cluster_environment.set_world_size(world_size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        module = self._lightning_module
        if module is not None and module._trainer is not None:
            check_packages(module.trainer, module)
        check_processes(self.num_processes)
        super().setup_environment()
        reset_seed()
        # The launcher does this for the process that it launches from alone.
        _set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._failed = False
        if not dist.is_initialized():
            _init_dist_connection(self.cluster_environment, self._backends(), timeout=self._timeout)
        self._num_runs += 1
        self._store = dist.distributed_c10d._get_default_store()
        self._board = FailureBoard(self._store, self.global_rank, self.world_size, self._num_runs)
        if self._channels is None:
            self._channels = Channels(
                ranks=list(range(self.world_size)),
                stage=self.global_rank,
                device=self.root_device,
                backend=self._payload_backend(),
                watched=self._board.watched,
            )
        else:
            self._channels.watched = self._board.watched

    def _backends(self) -> str:
        if self.root_device.type == "cuda" and self._process_group_backend != "gloo":
            return "cpu:gloo,cuda:nccl"
        return "gloo"

    def _payload_backend(self) -> str:
        """NCCL where every stage has a GPU of its own of the same vendor, gloo by way of the host
        otherwise.
        """
        if self.root_device.type != "cuda" or self._process_group_backend == "gloo":
            return "gloo"
        properties = torch.cuda.get_device_properties(self.root_device)
        mine = (str(getattr(properties, "uuid", "")), torch.version.hip is not None)
        devices: list[Any] = [None] * self.world_size
        dist.all_gather_object(devices, mine, group=dist.new_group(backend="gloo"))
        shared = len({uuid for uuid, _ in devices}) < len(devices)
        mixed = len({is_hip for _, is_hip in devices}) > 1
        if (shared or mixed) and self._process_group_backend is None:
            log.info(
                "PipeShift: stages share a device or vendors differ, so payloads go through host"
                " memory."
            )
        return "gloo" if shared or mixed else "nccl"

    def _require_channels(self) -> Channels:
        if self._channels is None:
            raise ConfigurationError(
                "The stages are not connected yet. Ask from `setup` on, when a run has begun."
            )
        return self._channels

    def _require_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise ConfigurationError(
                "There is no pipeline yet: it is built when `fit`, `validate`, `test` or `predict`"
                " begins."
            )
        return self._pipeline

    # --- setup ---

    def setup(self, trainer: pl.Trainer) -> None:
        module = self._require_module()
        assert self.accelerator is not None
        check_run(trainer, module)
        self.accelerator.setup(trainer)
        channels = self._require_channels()
        # Everything that draws outside of a step (shuffling, workers' seeds) draws the same on
        # every stage.
        set_global_state(channels.share_object(global_state(), source=0))
        self.precision_plugin = over_stages(
            self.precision_plugin, self._gradient_norms, self._gradient_hooks, channels.sum
        )
        self.model = self.precision_plugin.convert_module(module)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.to(self.root_device)
                # The states are the same on every stage: gathering them would count each several
                # times.
                metric.distributed_available_fn = _never
        self._pipeline = Pipeline(
            root=module,
            channels=channels,
            virtual_machine=self.virtual_machine,
            settings=Settings(
                self._microbatches, self._schedule, self._partition, self._given_plan, self._seed()
            ),
            ignored=_FRAMEWORK_ATTRIBUTES,
        )
        self._evaluation = EvaluationSteps(trainer, self._pipeline)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()

    def _seed(self) -> int:
        channels = self._require_channels()
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() & (2**62 - 1)))
        return int(channels.share_object(seed, source=0))

    def model_to_device(self) -> None:
        """Nothing yet: each stage takes its own layers to its device when the plan is made."""

    def process_dataloader(self, dataloader: object) -> object:
        """Lets workers' seeds depend on the virtual machine, where Lightning would use the rank."""
        if (
            isinstance(dataloader, DataLoader)
            and int(os.environ.get("PL_SEED_WORKERS", 0))
            and dataloader.worker_init_fn is None
        ):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.virtual_machine)
        return dataloader

    def on_train_start(self) -> None:
        """Compares the lengths of the data over the stages."""
        length = self._require_module().trainer.num_training_batches
        require_same_lengths([length], "training", self._require_channels())

    def on_validation_start(self) -> None:
        """Compares the lengths of the data over the stages."""
        loop = self._require_module().trainer._evaluation_loop
        require_same_lengths(loop.max_batches, "validation", self._require_channels())

    def on_test_start(self) -> None:
        """Compares the lengths of the data over the stages."""
        loop = self._require_module().trainer.test_loop
        require_same_lengths(loop.max_batches, "test", self._require_channels())

    def on_predict_start(self) -> None:
        """Compares the lengths of the data over the stages."""
        loop = self._require_module().trainer.predict_loop
        require_same_lengths(loop.max_batches, "prediction", self._require_channels())

    # --- steps ---

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, pipeline = self._require_module(), self._require_pipeline()
        trainer = module.trainer
        batch, *rest = args or tuple(kwargs.values())

        def step(root: Any, part: Any) -> Any:
            with self.precision_plugin.train_step_context():
                return root.training_step(part, *rest)

        epoch_loop = trainer.fit_loop.epoch_loop
        with self._recording():
            report = pipeline.training_step(
                batch,
                epoch_loop.batch_idx,
                step,
                epoch_loop.total_batch_idx,
                loss_scale_of(self.precision_plugin) / trainer.accumulate_grad_batches,
                self.optimizers,
                wants_result=somebody_looks_at_results(trainer, "train_step"),
                keeps_gradients=self._keeps_gradients(epoch_loop.batch_idx),
                is_last_batch=bool(epoch_loop.batch_progress.is_last_batch),
            )
        say_again(report.logs, module.log, module, self.root_device)
        self._step_is_skipped = report.loss is None
        if report.loss is None:
            # Lightning takes `None` from a single process only. There is no backward, so no
            # gradient, and nothing is stepped.
            return torch.zeros((), device=self.root_device)
        loss = report.loss.to(self.root_device)
        if isinstance(report.result, Mapping):
            return {**report.result, "loss": loss}
        return loss

    def _keeps_gradients(self, batch_idx: int) -> bool:
        """Whether Lightning will not zero the gradients after the step, or somebody looks first."""
        module = self._require_module()
        trainer = module.trainer
        return bool(
            batch_idx % trainer.accumulate_grad_batches
            or is_overridden("optimizer_zero_grad", module)
            or is_hook_used(trainer, "on_before_zero_grad")
        )

    @contextmanager
    def _recording(self) -> Generator[None, None, None]:
        """Context in which the LightningModule's logging is recorded instead."""
        module, recorder = self._require_module(), self._require_pipeline().recorder
        module.__dict__["log"] = recorder.log
        module.__dict__["log_dict"] = recorder.log_dict
        try:
            yield
        finally:
            del module.__dict__["log"], module.__dict__["log_dict"]

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hands over the gradients that the step has made, between the hooks that belong to a
        backward.
        """
        module = self._require_module()
        if self._step_is_skipped:
            return closure_loss
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._require_holdings().hand_gradients_over()
        return self.precision_plugin.post_backward(closure_loss, module)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, *args, **kwargs
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, *args, **kwargs
        )

    def _evaluate(self, name: str, context: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        assert self._evaluation is not None
        batch, *rest = args or tuple(kwargs.values())

        def step(root: nn.Module, part: Any) -> Any:
            with context():
                return getattr(root, name)(part, *rest)

        with self._recording():
            return self._evaluation.run(name, batch, tuple(rest), step, self.optimizers)

    def _gradient_norms(self, parameters: list[Tensor], norm_type: float) -> Tensor:
        return self._require_holdings().gradient_norms(parameters, norm_type)

    def gradient_norms(self, norm_type: float) -> dict[str, Tensor]:
        """The norm of every parameter's gradient by the parameter's name, over all stages.

        Every rank calls this. See :func:`lightning_pipeshift.grad_norm`, which adds the total.

        Args:
            norm_type: the order of the norm.

        Returns:
            Scalars, float32, on the CPU. A parameter without a gradient is left out.
        """
        holdings = self._require_holdings()
        norms = holdings.gradient_norms([use.parameter for use in holdings.uses], norm_type)
        there = holdings.have_gradients()
        return {
            use.name: norm.float()
            for use, norm, has_one in zip(holdings.uses, norms, there, strict=True)
            if has_one
        }

    def _gradient_hooks(self) -> AbstractContextManager[None]:
        module = self._require_module()
        if not any(
            is_hook_used(module.trainer, hook)
            for hook in ("on_after_backward", "on_before_optimizer_step")
        ) and not is_overridden("configure_gradient_clipping", module):
            return nullcontext()
        return self._require_holdings().stand_ins()

    def _require_holdings(self) -> Holdings:
        holdings = self._require_pipeline().holdings
        if holdings is None:
            raise ConfigurationError(
                "No stage has its layers yet: they are given out when the first batch comes."
            )
        return holdings

    def _require_module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- talk between ranks ---

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and not self._has_failed():
            with self._watched():
                dist.barrier(group=self._require_channels().control)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not dist.is_initialized() or self._has_failed():
            return obj
        box = [obj]
        with self._watched():
            dist.broadcast_object_list(box, src, group=self._require_channels().control)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over virtual machines. With one of them there is nothing to reduce."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over virtual machines. With one of them the tensor is all there is."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        channels = self._require_channels()
        votes = channels.sum(torch.tensor([float(decision)]))
        return bool(votes == self.world_size) if all else bool(votes > 0)

    def _watched(self) -> Any:
        return nullcontext() if self._board is None else self._board.watched()

    # --- checkpoints ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, on rank 0. After a failure there is none to write: its parts are on
        ranks that no longer talk to each other.
        """
        if self._has_failed():
            rank_zero_warn(
                f"PipeShift: {filepath} is not saved. A rank has failed, and the others cannot send"
                " their layers any more. Go on from the last checkpoint that was saved before."
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; elsewhere, what is not held is on the meta device."""
        module = self._require_module()
        if self._has_failed():
            return {}
        holdings = self._pipeline.holdings if self._pipeline is not None else None
        if holdings is None:
            return module.state_dict()
        # The parameters themselves, not copies of them, are what the stages know each other's by.
        state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
        for name, value in holdings.gather_state(list(state_dict.items())):
            state_dict[name] = value
        return state_dict

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, in torch's own format."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._has_failed():
            return {}
        holdings = self._pipeline.holdings if self._pipeline is not None else None
        if holdings is None:
            return optimizer.state_dict()
        return holdings.gather_optimizer_state(optimizer)

    # --- the end ---

    def _has_failed(self) -> bool:
        """Whether the run is over on account of an exception.

        Callbacks hear of an exception before the strategy does, and some save a checkpoint then,
        for which the other ranks would have to be there.
        """
        trainer = self._lightning_module._trainer if self._lightning_module is not None else None
        handled = sys.exc_info()[1]
        if not self._failed and handled is not None and trainer is not None and trainer.interrupted:
            self.on_exception(handled)
        return self._failed

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why, and closes the connections, so that none of them waits for
        this one.
        """
        if self._failed or not dist.is_initialized():
            return
        self._failed = True
        first = False
        if self._board is not None and not isinstance(exception, StageFailedError):
            where = f"Stage {self.global_rank} (rank {self.global_rank})"
            first = self._board.publish(where, exception)
        if self._pipeline is not None:
            self._pipeline.release_gates()
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        dist.destroy_process_group()
        if first and self.world_size > 1 and self._board is not None:
            self._board.wait_for_readers()

    def teardown(self) -> None:
        """Makes the model whole again on every rank, and gives back what the run took."""
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.release_gates()
            if not self._failed:
                pipeline.make_whole()
            elif pipeline.holdings is not None:
                pipeline.holdings.to_cpu()
        for metric in self._require_module().modules():
            if isinstance(metric, Metric):
                metric.cpu()
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _never() -> bool:
    return False


def _require_partition(partition: Any) -> None:
    if partition not in ("auto", "uniform") and not isinstance(partition, list | tuple):
        raise ConfigurationError(
            f"partition={partition!r}: allowed are 'auto', 'uniform', a list with the number of"
            " layers of each stage ([5, 4]), or one such list for each virtual machine."
        )
