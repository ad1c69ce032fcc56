"""``PipeShiftStrategy``: connects Lightning's hooks with the pipeline. Each hook delegates."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import BatchSizeFinder, ModelSummary
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_pipeshift.commands.stage_table import layers_text, table
from lightning_pipeshift.compat.lightning_names import TRAINER
from lightning_pipeshift.compat.lightning_private import (
    evaluation_loop,
    update_properties,
    use_distributed_sampler,
    uses_distributed_sampler,
)
from lightning_pipeshift.errors import BatchError, PlanError
from lightning_pipeshift.lightning.callbacks.finetuning import SharedComparison
from lightning_pipeshift.lightning.checkpointing import CheckpointingStrategy
from lightning_pipeshift.lightning.checks import (
    check_aggregation,
    check_arguments,
    check_backward,
    check_optimizers,
    check_planning,
    check_run,
    check_seconds,
    several_optimizers,
)
from lightning_pipeshift.lightning.data import for_virtual_machine
from lightning_pipeshift.lightning.evaluation import (
    EvaluationSteps,
    are_results_used,
    is_hook_used,
)
from lightning_pipeshift.lightning.metric_sync import MetricSync, silence_advice_to_synchronise
from lightning_pipeshift.lightning.patches import NO_LOSS
from lightning_pipeshift.lightning.precision.all_stages import by_itself, loss_scale_of, over_stages
from lightning_pipeshift.model.execution.transfer import to_device
from lightning_pipeshift.model.user_state.logs import say_again
from lightning_pipeshift.model.user_state.random_streams import (
    SharedRandomStream,
    global_state,
    set_global_state,
)
from lightning_pipeshift.plan.arrange.options import Options
from lightning_pipeshift.plan.arrange.request import PlanRequest
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.shares import check_shares
from lightning_pipeshift.plan.inputs.topology import Topology, check_spec
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.runtime.comm.backends import device_of
from lightning_pipeshift.runtime.liveness.failure import HEARTBEAT_SECONDS
from lightning_pipeshift.runtime.liveness.stalls import STALL_SECONDS
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.ownership.holdings import optimizer_to_device
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch
from lightning_pipeshift.runtime.step.checksum import (
    require_data_for_all,
    require_same_lengths,
    require_same_lengths_over_replicas,
)
from lightning_pipeshift.runtime.step.pipeline import Accumulation, Pipeline
from lightning_pipeshift.runtime.step.status import status_of

T = TypeVar("T")

# Attributes of LightningModule and Metric themselves are not the user's state.
_FRAMEWORK_ATTRIBUTES = frozenset(vars(pl.LightningModule())) | {"log", "log_dict", TRAINER}


def _weighed(result: Any) -> Any:
    """A step's result; ``None`` if its ``weight`` is 0."""
    if isinstance(result, Mapping) and result.get("weight") is not None:
        return result if float(result["weight"]) else None
    return result


def _say(message: str) -> None:
    rank_zero_info(f"PipeShift: {message}")


class PipeShiftStrategy(CheckpointingStrategy):
    """Trains one model as a pipeline over all devices, from an unmodified LightningModule.

    Every stage runs the user's own ``training_step``; a gate in each layer skips those of other
    stages. Schedules: GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan et al.,
    PipeDream-Flush, 2021, section 3.2).

    Args:
        virtual_machines: how many replicas of the model train in parallel, each a pipeline of its
            own; or the ranks of each in stage order, ``[[0, 2], [1, 3]]``. ``"auto"``: one, or as
            many as ``partition`` or ``plan`` has.
        microbatches: the number of slices of a batch; ``"auto"``: four for each stage.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"eager_1f1b"``, which overlaps communication with
            compute and holds up to twice the activations.
        partition: the layers of each stage. ``"auto"`` balances the measured forward times,
            ``"uniform"`` the number of layers, a list gives the number of layers of each stage, and
            a list of lists does so for each virtual machine.
        plan: a :class:`~lightning_pipeshift.Plan`, or the path of one, that overrides the four
            above, ``recompute``, and ``batch_shares`` if it has any.
        batch_shares: how the samples of a global batch are divided among the virtual machines, one
            number for each: ``[3, 1]``. By default equally. A global batch has the DataLoader's
            batch size times the number of virtual machines.
        recompute: which layers drop the tensors saved for their backward, and are recomputed before
            it: ``"auto"``, as few as the memory of the devices requires; ``"full"``, all for which
            it frees memory; ``"none"``. It changes no bit of the results. With a ``partition`` of
            your own, ``"auto"`` means ``"none"``.
        profile_steps: after how many measured steps the layers are distributed again, if
            ``partition`` is ``"auto"``; 0: never.
        gradient_aggregation: how gradients are summed over the virtual machines: ``"ring"``, a ring
            for each layer that starts as soon as its gradient is ready; ``"allreduce"``, torch's
            own collectives; ``"auto"``, rings on gloo and collectives on NCCL.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default chosen by the devices. With
            gloo, tensors on a GPU are sent through host memory.
        timeout: how long a rank waits for other ranks at the start; and, if longer than half an
            hour, in each later operation.
        heartbeat_timeout: after how many seconds without a heartbeat a rank counts as gone, and the
            run ends on all others; at least 1. A thread of each rank sends the heartbeats. A longer
            timeout is needed only if single calls hold Python's lock for longer.
        stall_timeout: after how many seconds without a completed action on any rank the first rank
            reports which rank the others wait for, and its activity; 0: never.
        accelerator: as in every Lightning strategy; the Trainer's argument is the usual way.
        parallel_devices: this host's devices, likewise.
        cluster_environment: the source of a process's rank, likewise.
        checkpoint_io: the plugin that writes checkpoints, likewise.
        precision_plugin: the precision, likewise.

    Raises:
        ConfigurationError: an argument has a value that is not allowed; the message lists those
            that are.
    """

    def __init__(
        self,
        virtual_machines: int | Literal["auto"] | list[list[int]] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        partition: Literal["auto", "uniform"] | list[int] | list[list[int]] = "auto",
        plan: str | Path | Plan | None = None,
        batch_shares: list[float] | None = None,
        recompute: Literal["auto", "full", "none"] = "auto",
        profile_steps: int = 20,
        gradient_aggregation: Literal["auto", "ring", "allreduce"] = "auto",
        process_group_backend: Literal["nccl", "gloo"] | None = None,
        timeout: timedelta | None = default_pg_timeout,
        heartbeat_timeout: float = HEARTBEAT_SECONDS,
        stall_timeout: float = STALL_SECONDS,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_arguments(microbatches, partition, plan, process_group_backend)
        check_spec(virtual_machines)
        check_shares(batch_shares, None)
        check_aggregation(gradient_aggregation)
        check_planning(recompute, profile_steps)
        check_seconds("heartbeat_timeout", heartbeat_timeout, 1.0)
        check_seconds("stall_timeout", stall_timeout, 0.0)
        schedule_named(schedule)
        given_plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        if given_plan is not None and given_plan.batch_shares:
            batch_shares = list(given_plan.batch_shares)
        options = Options(
            virtual_machines=virtual_machines,
            microbatches=microbatches,
            schedule=schedule,
            partition=partition,
            plan=given_plan,
            batch_shares=batch_shares,
            recompute=recompute,
            profile_steps=profile_steps,
            gradient_aggregation=gradient_aggregation,
            process_group_backend=process_group_backend,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            stall_timeout=stall_timeout,
        )
        super().__init__(
            options,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        self._only_measures = False
        self._watch: Watch | None = None
        self._request_folder: Path | None = None
        self._shares_data: bool | None = None
        self._accumulates = False
        self._metric_sync: MetricSync | None
        self._evaluation: EvaluationSteps | None
        self._num_steps: int
        self._num_losses: int
        self._finds_batch_size = False
        self._is_plain_step: bool

    def _of_a_run(self) -> dict[str, Any]:
        return super()._of_a_run() | {
            "_metric_sync": None,
            "_evaluation": None,
            "_num_steps": 0,
            "_num_losses": 0,
            # Whether the current step runs without a pipeline, with its backward by Lightning.
            "_is_plain_step": False,
        }

    # --- the plan and its environment ---

    def _check_devices(self, topology: Topology, devices: Sequence[Device]) -> None:
        plan = self._options.plan
        planned = plan.kinds if plan is not None else ()
        for ranks, kinds in zip(topology.ranks, planned, strict=False):
            for stage, (rank, kind) in enumerate(zip(ranks, kinds, strict=True)):
                if devices[rank].kind != kind:
                    raise PlanError(
                        f"The plan was made for another cluster: for stage {stage} it has a "
                        f"{kind!r}, and rank {rank} is a {devices[rank].kind!r} (host "
                        f"{self._hosts[rank]!r}). Make a plan here with `pipeshift plan`, or "
                        "remove its field 'kinds' if you know that it is suitable."
                    )

    # --- for `LayerMigration` ---

    def watch(self, watch: Watch | None) -> None:
        """Sets whether the next run moves layers without a request."""
        self._watch = watch

    def take_requests(self, folder: Path | None) -> None:
        """Makes the next run take requests for moves in a folder, and write its status there;
        ``None``: neither.
        """
        self._request_folder = folder

    # --- for `pipeshift plan` ---

    def only_measures(self) -> None:
        """Makes the next run only measure the machines and the model, without changing the plan."""
        self._only_measures = True
        steps = self._options.profile_steps or Options.profile_steps
        self._options = replace(self._options, profile_steps=steps)

    @property
    def _memory_wishes(self) -> MemoryRequest | None:
        """The settings of a `MemoryCompression`, if there is one."""
        return getattr(self.precision_plugin, "memory_wishes", None)

    @property
    def steps_to_measure(self) -> int:
        """How many steps are measured before the layers are distributed again."""
        return self._options.profile_steps

    @property
    def measured(self) -> tuple[Profile, Cluster, PlanRequest] | None:
        """The measurements, and the settings for a planner: on the first rank."""
        planning = self._require_pipeline().planning
        if planning.measured is None or not planning.is_measured:
            return None
        profile, cluster = planning.measured.profile, planning.measured.cluster
        policy = self._memory_wishes.policy if self._memory_wishes is not None else None
        samples = profile.samples * profile.microbatches
        return profile, cluster, self._options.request(samples, policy)

    # --- setup ---

    def setup(self, trainer: pl.Trainer) -> None:
        module = self._require_module()
        assert self.accelerator is not None
        channels, replicas = self._require_channels(), self._require_replicas()
        self._seed_of_run = self._seed()
        settings = self._settings()
        stages_per_vm = replicas.topology.stages_per_vm
        is_plain = self.world_size == 1 and settings.leaves_steps_whole(stages_per_vm)
        check_run(module, is_plain)
        self.accelerator.setup(trainer)
        check_shares(self._options.batch_shares, replicas.count)
        # Code that draws outside of a step (shuffling, workers' seeds) draws the same numbers on
        # every stage.
        set_global_state(replicas.world.share_object(global_state(), source=0))
        self._shared_stream = SharedRandomStream(replicas.vm)
        self._metric_sync = MetricSync(replicas)
        self._adjustments.when_over(silence_advice_to_synchronise())
        # Lightning's own samplers support neither shares nor global batches.
        if self._shares_data is None:
            self._shares_data = uses_distributed_sampler(trainer)
        use_distributed_sampler(trainer, False)
        self.precision_plugin = over_stages(
            self.precision_plugin, self._gradient_norms, self._gradient_hooks, channels.sum
        )
        self._adjustments.when_over(partial(by_itself, self.precision_plugin))
        with self._deferred.recording():
            self.model = self.precision_plugin.convert_module(module)
        # What user code asks for (`self.device`), in nested LightningModules too.
        update_properties(module, device=self.root_device)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.to(self.root_device)
                # The states are the same on every stage of a virtual machine: gathering them over
                # all ranks, as torchmetrics would, would count each several times. This also holds
                # after the run, while the ranks are connected.
                metric.distributed_available_fn = self._metric_sync.is_possible
                metric.dist_sync_fn = self._metric_sync.gather
        self._connect_checkpoints()
        self._watch_for_sigterm(trainer)
        self._watch_for_exceptions(trainer)
        self._adjustments.take_steps_without_loss(trainer)
        self._adjustments.filter_parameters(
            partial(SharedComparison, module, channels, self._deferred)
        )
        self._num_steps = self._num_losses = 0
        self._finds_batch_size = any(
            isinstance(callback, BatchSizeFinder)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        self._pipeline = Pipeline(
            root=module,
            channels=channels,
            replicas=replicas,
            rings=self._rings,
            groups=self._require_groups(),
            settings=settings,
            here=device_of(self.root_device),
            deferred=self._deferred,
            ignored=_FRAMEWORK_ATTRIBUTES,
            say=_say,
            outside=self._outside,
            fail_beside=self._fail_beside,
            profile=trainer.profiler.profile,  # type: ignore[attr-defined]
        )
        if self._request_folder is not None and self.is_global_zero:
            self._open_to_requests(self._request_folder, self._pipeline)
        self._evaluation = EvaluationSteps(trainer, self._pipeline)
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, is_plain)
            self._trained = self._pipeline
        self.setup_precision_plugin()

    def _settings(self) -> Settings:
        assert self._seed_of_run is not None
        return Settings.of(
            self._options,
            seed=self._seed_of_run,
            only_measures=self._only_measures,
            watch=self._watch,
            memory=self._memory_wishes,
        )

    def _open_to_requests(self, folder: Path, pipeline: Pipeline) -> None:
        try:
            self._outside.open(folder, partial(status_of, pipeline))
        except OSError as error:
            _say(f"this run takes no requests for moves, as its folder is not writable: {error}.")
        else:
            _say(f"`pipeshift status --run {folder}` shows the status of this run.")

    def _seed(self) -> int:
        if self._resumed.get("seed") is not None:
            return int(self._resumed["seed"])
        world = self._require_replicas().world
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() & (2**62 - 1)))
        return int(world.share_object(seed, source=0))

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Creates the optimizers.

        Raises:
            ConfigurationError: there are several. Lightning's own advice would be manual
                optimization, which cannot be a pipeline.
        """
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise several_optimizers() from error

    def model_to_device(self) -> None:
        """Does nothing yet: each stage moves its own layers to its device when the plan is made."""

    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader of this virtual machine's share of the data, and makes workers' seeds
        depend on the virtual machine, instead of the rank as in Lightning.
        """
        if (
            isinstance(dataloader, DataLoader)
            and int(os.environ.get("PL_SEED_WORKERS", 0))
            and dataloader.worker_init_fn is None
        ):
            # The same on all ranks: the virtual machine's index is added below.
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        if self._is_unconnected_alone:
            return dataloader
        trainer = self._require_module().trainer
        count = self._require_replicas().count
        if trainer.state.stage == RunningStage.TRAINING:
            # Next, Lightning creates the loader's iterator, whose order may be random.
            self._resume_random_state()
        if count == 1 or not self._shares_data:
            return dataloader
        return for_virtual_machine(
            dataloader,
            self.virtual_machine,
            self._options.batch_shares or [1.0] * count,
            pads=trainer.state.stage == RunningStage.TRAINING,
            stream=self._shared_stream,
        )

    def on_train_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        trainer = self._require_module().trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready and not progress.is_last_batch:
            # In the middle of an epoch the iterator was created before the checkpoint.
            self._resume_random_state()
        self._resumed = {}
        length = trainer.num_training_batches
        require_same_lengths([length], "training", self._require_channels())
        require_same_lengths_over_replicas(length, self._require_replicas())

    def on_validation_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._begin_evaluation(evaluation_loop(self._require_module().trainer), "validation")

    def on_test_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._begin_evaluation(self._require_module().trainer.test_loop, "test")

    def on_validation_end(self) -> None:
        """Checks that no batch of the data was skipped."""
        self._end_evaluation("validation")

    def on_test_end(self) -> None:
        """Checks that no batch of the data was skipped."""
        self._end_evaluation("test")

    def on_predict_end(self) -> None:
        """Checks that no batch of the data was skipped."""
        self._end_evaluation("prediction")

    def _end_evaluation(self, what: str) -> None:
        self._require_evaluation().require_all_fetched(what)
        # After the sanity check Lightning restores the earlier random state, which was that of the
        # shared stream.
        self._draw_from_shared()

    def on_train_end(self) -> None:
        """Makes the virtual machines' states equal: running statistics, random numbers. Warns if no
        step had a loss.
        """
        if self._num_steps and not self._num_losses:
            rank_zero_warn(
                f"PipeShift: `training_step` returned None in all {self._num_steps} steps of this"
                " run, so nothing was learned. Return the loss, or a dict with 'loss'."
            )
        self._require_pipeline().match_replicas(parameters_too=False)
        self._draw_from_shared()

    def _draw_from_shared(self) -> None:
        if self._shared_stream is not None:
            self._shared_stream.to_shared()

    def on_predict_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._begin_evaluation(self._require_module().trainer.predict_loop, "prediction")

    def _begin_evaluation(self, loop: Any, what: str) -> None:
        require_same_lengths(loop.max_batches, what, self._require_channels())
        require_data_for_all(loop.max_batches, what, self._require_replicas())
        # Each virtual machine has its own running statistics until they are used.
        self._require_pipeline().match_replicas(parameters_too=False)

    # --- steps ---

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, pipeline = self._require_module(), self._require_pipeline()
        trainer = module.trainer
        batch, *rest = args or tuple(kwargs.values())

        def step(root: Any, part: Any) -> Any:
            with self.precision_plugin.train_step_context():
                return root.training_step(part, *rest)

        epoch_loop = trainer.fit_loop.epoch_loop
        number = epoch_loop.total_batch_idx
        self._is_plain_step = pipeline.begins_plain_step(batch, step, number, self.optimizers)
        if self._is_plain_step:
            return self._counted(_weighed(pipeline.plain_training_step(batch, step, number)))
        check_backward(module)
        with self._recording(), self._out_of_memory_for_all():
            report = pipeline.training_step(
                batch,
                epoch_loop.batch_idx,
                step,
                number,
                loss_scale_of(self.precision_plugin, trainer.accumulate_grad_batches),
                self.optimizers,
                wants_result=are_results_used(trainer, "train_step"),
                keeps_gradients=self._keeps_gradients(epoch_loop.batch_idx),
                is_last_batch=bool(epoch_loop.batch_progress.is_last_batch),
                accumulation=Accumulation(
                    has_begun=bool(epoch_loop.batch_idx % trainer.accumulate_grad_batches),
                    goes_on=self._accumulates,
                ),
            )
        # The logged values are already those of all virtual machines.
        synchronised = False if self._require_replicas().count > 1 else None
        say_again(report.logs, module.log, module, self.root_device, synchronised)
        if report.loss is None:
            return self._counted(NO_LOSS)
        loss = to_device(report.loss, self.root_device)
        if isinstance(report.result, Mapping):
            return self._counted({**report.result, "loss": loss})
        return self._counted(loss)

    def _counted(self, result: Any) -> Any:
        """Called at the end of a training step; returns its result."""
        self._heed_sigterm()
        news = self._require_pipeline().news
        if not self._num_steps:
            self._show_stages()
        while news:
            _say(news.pop(0))
        self._num_steps += 1
        self._num_losses += result is not None and result is not NO_LOSS
        return result

    def _show_stages(self) -> None:
        """Prints a table of the stages with their layers, if the Trainer prints a summary of the
        model.
        """
        trainer = self._require_module().trainer
        pipeline = self._require_pipeline()
        is_asked = any(
            isinstance(callback, ModelSummary)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        if not is_asked or not pipeline.has_plan or self.num_stages == 1:
            return
        plan, lines = pipeline.plan, []
        for vm, ranks in enumerate(pipeline.replicas.topology.ranks):
            rows = [["stage", "rank", "host", "parameters", "layers"]]
            for stage, (rank, layers) in enumerate(zip(ranks, plan.stage_layers(vm), strict=True)):
                megabytes = sum(layer.parameter_bytes for layer in layers) / 1e6
                names = layers_text([layer.name for layer in layers])
                rows.append(
                    [str(stage), str(rank), self._hosts[rank], f"{megabytes:,.2f} MB", names]
                )
            lines += [f"the stages of virtual machine {vm}", *table(rows)]
        _say("\n".join(lines))

    def _keeps_gradients(self, batch_idx: int) -> bool:
        """Whether Lightning will not zero the gradients after the step, or user code may read them
        before.
        """
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
        assert self._metric_sync is not None
        module.__dict__["log"] = recorder.log
        module.__dict__["log_dict"] = recorder.log_dict
        # In a step, only the last stages call metrics.
        self._metric_sync.is_open = False
        try:
            yield
        finally:
            self._metric_sync.is_open = True
            del module.__dict__["log"], module.__dict__["log_dict"]

    @contextmanager
    def _out_of_memory_for_all(self) -> Generator[None, None, None]:
        """Context of a step. If this rank runs out of memory, a `BatchSizeFinder` would catch that
        and start again while the other ranks still wait in the step; so the run ends instead.
        """
        try:
            yield
        except RuntimeError as error:
            if not (self._finds_batch_size and self.world_size > 1 and is_oom_error(error)):
                raise
            raise BatchError(
                "`BatchSizeFinder` has tried a batch that does not fit: a rank ran out of memory "
                "in this step. With several ranks the search ends here, as the others are in the "
                "middle of it. Use the last size that succeeded, remove the callback, and run "
                "again; or limit the search (`max_val`, `max_trials`)."
            ) from error

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context of the steps that no optimizer step follows."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Adds the step's gradients to the parameters' own, between the hooks that belong to a
        backward. A single device computes them only now.
        """
        if self._is_plain_step:
            with self._require_pipeline().one_stage.backward(self._require_holdings()):
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self._require_module()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._require_holdings().hand_gradients_over()
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        pipeline = self._require_pipeline()
        # There are none if the optimizer did not call the step; Lightning raises an error for that.
        if pipeline.holdings is not None:
            # Hooks may read gradients until they are zeroed.
            pipeline.holdings.show_gradients()
        pipeline.changes.weights_are_final()
        return result

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
        evaluation = self._require_evaluation()
        batch, *rest = args or tuple(kwargs.values())

        def step(root: nn.Module, part: Any) -> Any:
            with context():
                return getattr(root, name)(part, *rest)

        if self._require_pipeline().is_by_itself:
            return evaluation.run_plainly(name, batch, tuple(rest), step)
        with self._recording(), self._out_of_memory_for_all():
            return evaluation.run(name, batch, tuple(rest), step)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over virtual machines; all stages of one pass the same value.

        During an evaluation the virtual machines may be at different batches, so logged values are
        not reduced; the epoch's value is reduced at its end.
        """
        if self._metric_sync is not None and not self._metric_sync.is_open:
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def _gradient_hooks(self) -> AbstractContextManager[None]:
        module = self._require_module()
        if not any(
            is_hook_used(module.trainer, hook)
            for hook in ("on_after_backward", "on_before_optimizer_step")
        ) and not is_overridden("configure_gradient_clipping", module):
            return nullcontext()
        return self._require_holdings().stand_ins()

    def _require_evaluation(self) -> EvaluationSteps:
        assert self._evaluation is not None
        return self._evaluation

    # --- the end ---

    def teardown(self) -> None:
        """Makes the model whole again on every rank, and undoes the run's changes."""
        pipeline = self._pipeline
        self._adjustments.undo()
        self._outside.close()
        if pipeline is not None:
            pipeline.release_gates()
            if not self._failed:
                pipeline.make_whole()
            elif pipeline.holdings is not None:
                pipeline.holdings.to_cpu()
        update_properties(self._require_module(), device=torch.device("cpu"))
        for metric in self._require_module().modules():
            if isinstance(metric, Metric):
                metric.cpu()
        for optimizer in self.optimizers:
            optimizer_to_device(optimizer, torch.device("cpu"), self._deferred)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._settle()
        if self._board is not None and not self._failed:
            self._board.pause()
