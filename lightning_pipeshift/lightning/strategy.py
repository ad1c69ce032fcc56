"""``PipeShiftStrategy``: Lightning's hooks. Each delegates to what it is about."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.checkpoint.load_state import load_state
from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.lightning_private import (
    IS_INTERACTIVE,
    set_num_threads_if_needed,
    update_properties,
    use_distributed_sampler,
    uses_distributed_sampler,
)
from lightning_pipeshift.errors import ConfigurationError, PlanError, StageFailedError
from lightning_pipeshift.lightning.auto_numbers import chosen
from lightning_pipeshift.lightning.checkpoints import Checkpoints, with_inner_plugin
from lightning_pipeshift.lightning.checks import (
    check_devices,
    check_manual,
    check_optimizers,
    check_packages,
    check_processes,
    check_run,
)
from lightning_pipeshift.lightning.collectives import agree, all_gather, barrier, broadcast, reduce
from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.lightning.data import for_virtual_machine, seed_workers_alike
from lightning_pipeshift.lightning.job import RankPlace
from lightning_pipeshift.lightning.launcher import Launcher, NotebookLauncher
from lightning_pipeshift.lightning.metric_sync import metrics_to_cpu
from lightning_pipeshift.lightning.optimizers import check_known
from lightning_pipeshift.lightning.patches import Adjustments
from lightning_pipeshift.lightning.random_state import RandomState
from lightning_pipeshift.lightning.run import Run
from lightning_pipeshift.lightning.steps import accumulation_of
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, give_attributes_values
from lightning_pipeshift.plan.arrange.auto_numbers import Numbers
from lightning_pipeshift.plan.arrange.options import Options
from lightning_pipeshift.plan.arrange.request import PlanRequest
from lightning_pipeshift.plan.document.moves import Move
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.shares import check_shares
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.liveness.failure import HEARTBEAT_SECONDS
from lightning_pipeshift.runtime.liveness.stalls import STALL_SECONDS
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.ownership.holdings import optimizer_to_device
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch
from lightning_pipeshift.step.pipeline import Pipeline

T = TypeVar("T")


_OF_RUNS = (
    "connection",
    "random_state",
    "checkpoints",
    "adjustments",
    "deferred",
    "run",
    "microbatches",
)


class PipeShiftStrategy(ParallelStrategy):
    """Trains one model as a pipeline over all devices, from an unmodified LightningModule.

    Every stage runs the user's own ``training_step``; a gate in each layer skips those of other
    stages. Schedules: GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan et al.,
    PipeDream-Flush, 2021, section 3.2).

    Args:
        virtual_machines: how many virtual machines (replicas of the pipeline) train in parallel; or
            the ranks of each in stage order, ``[[0, 2], [1, 3]]``. By default one, or as many as
            ``partition`` or ``plan`` has. ``"auto"``: the planner chooses. Where no ranks are
            named, the planner chooses their order, if it also chooses the cuts.
        microbatches: the number of slices of a batch; by default four for each stage, and 1
            with a single stage or an asynchronous schedule. ``"auto"``: the planner chooses.

            Results depend on both numbers, so ``"auto"`` chooses once, before the first batch of
            ``fit``, by a short measurement of the layers (on a batch from a copy of the training
            data, for which ``train_dataloader`` is called once more), the devices and the links.
            The choice is shown and saved in checkpoints, and a run that continues one keeps it. The
            hooks ``setup`` and ``configure_model`` run before it.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"eager_1f1b"``, which overlaps communication with
            compute and holds up to twice the activations; or ``"async"`` or ``"async-2bw"``, which
            do not drain between batches, and use older weights (``docs/asynchronous.md``).
        partition: the layers of each stage. ``"auto"`` balances the measured forward times,
            ``"uniform"`` the number of layers, a list gives the number of layers of each stage, and
            a list of lists does so for each virtual machine.
        plan: a :class:`~lightning_pipeshift.Plan`, or the path of one, that overrides the four
            above, ``recompute``, and ``batch_shares`` if it has any.
        batch_shares: how the samples of a global batch are divided among the virtual machines, one
            number for each: ``[3, 1]``. By default equally. A global batch has the DataLoader's
            batch size times the number of virtual machines.
        recompute: which layers drop the tensors saved for their backward, and are recomputed before
            it: ``"auto"``, as few as the memory of the devices requires; ``"full"``, all on stages
            that hold several microbatches; ``"none"``. It changes no bit of the results.
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
        lane_marks: whether the packets of each lane (payloads, gradients, bulk) get a DSCP value,
            by which a network can carry urgent ones first: see ``pipeshift lanes``. A dict replaces
            values by the lane's name: ``{"pipeline": 46}``.
        overlap_updates: whether the optimizer updates a layer when its own gradient is summed over
            the virtual machines, so that the next step's forward begins while other sums are still
            on their way. ``False``: all layers are updated together. The bits are the same.
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
        virtual_machines: int | Literal["auto"] | list[list[int]] | None = None,
        microbatches: int | Literal["auto"] | None = None,
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
        lane_marks: bool | dict[str, int] = True,
        overlap_updates: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._options = Options(
            virtual_machines=virtual_machines,
            microbatches=microbatches,
            schedule=schedule,
            partition=partition,
            plan=Plan.load(plan) if isinstance(plan, str | Path) else plan,
            batch_shares=batch_shares,
            recompute=recompute,
            profile_steps=profile_steps,
            gradient_aggregation=gradient_aggregation,
            process_group_backend=process_group_backend,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            stall_timeout=stall_timeout,
            lane_marks=lane_marks,
            overlap_updates=overlap_updates,
        )
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self.num_nodes = 1
        self._only_measures = False
        self._watch: Watch | None = None
        self._request_folder: Path | None = None
        # Whether the Trainer wants the data shared out; asked in the first run.
        self._shares_data: bool | None = None
        self._forget_runs()

    def _forget_runs(self) -> None:
        self._connection = Connection(self._options)
        self._random_state = RandomState(self._connection)
        self._checkpoints = Checkpoints(
            lambda: self.checkpoint_io, self._connection, self._random_state
        )
        self._adjustments = Adjustments()
        self._deferred = DeferredInit()
        self._run: Run | None = None
        # The number that the planner has chosen, if it was left to it.
        self._microbatches: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: only the settings, without the state of a run."""
        state: dict[str, Any] = super().__getstate__()
        for name in _OF_RUNS:
            del state[f"_{name}"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_runs()

    # --- the rank's position ---

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self._connection.channels.stage

    @property
    def num_stages(self) -> int:
        """How many stages this rank's virtual machine has."""
        return self._connection.channels.num_stages

    @property
    def virtual_machine(self) -> int:
        """The index of this rank's virtual machine."""
        return self._connection.replicas.vm

    @property
    def topology(self) -> Topology:
        """The ranks of every virtual machine, in stage order."""
        return self._connection.replicas.topology

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's host."""
        return self._connection.hosts

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
        if self._is_unconnected_alone:
            return {"num_replicas": 1, "rank": 0}
        replicas = self._connection.replicas
        return {"num_replicas": replicas.count, "rank": replicas.vm}

    @property
    def is_distributed(self) -> bool:
        """Whether there are several virtual machines: values logged with ``sync_dist`` are reduced
        over them.
        """
        return self._connection.is_open and self._connection.replicas.count > 1

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

    @property
    def _is_unconnected_alone(self) -> bool:
        """Whether no run has started, and this process would be its only rank: then it can answer
        the Trainer's queries by itself (for `estimated_stepping_batches`, for example).
        """
        return not self._connection.is_open and self.world_size == 1

    # --- the plan and the measurements ---

    @property
    def pipeline(self) -> Pipeline:
        """This rank's pipeline, for tools that look into a run.

        Raises:
            ConfigurationError: no run has begun.
        """
        return self._require_run().pipeline

    @property
    def plan(self) -> Plan:
        """The plan in force. Raises PlanError before the first batch."""
        if self._run is None:
            raise PlanError(
                "There is no plan yet: no run has begun. It is made at the first batch."
            )
        return self._run.pipeline.plan_in_call_order

    @property
    def is_measured(self) -> bool:
        """Whether the first steps have been measured; the same on every rank."""
        return self._run is not None and self._run.pipeline.planning.is_measured

    def predicted(self, plan: Plan) -> Plan:
        """The same plan with the simulator's prediction, by the measurements of this run. Every
        rank calls this.

        Args:
            plan: for the virtual machines of this run.

        Raises:
            PlanError: nothing has been measured yet.
        """
        return self.pipeline.planning.predicted(plan)

    def adopt(self, plan: Plan, at_once: bool = False) -> None:
        """Puts another plan in force: the next step prepares it, and still runs under the old one.
        Layers change their owners, and all results remain the same. If the plan has other ``ranks``
        in its virtual machines' stages, these become other stages. Layers that take long to
        transfer move one after the other in several steps. Every rank calls this, with the same
        plan, between the same steps (for example in ``on_train_batch_end``).

        Args:
            plan: the plan.
            at_once: whether all layers change their owners with the step after the next, however
                long they take to transfer.

        Raises:
            PlanError: it is for another model, or would change more than the owners of layers, the
                order of the ranks and the recomputation; or a device lacks memory for layers while
                they move (with an asynchronous schedule, only the first rank raises it then, and
                nothing moves).
        """
        self.pipeline.adopt(plan, at_once)

    def migrate(self, *moves: Move) -> None:
        """Makes layers change their owners: the next step prepares that, and still runs under the
        old placement. Layers that take long to transfer move one after the other in several steps.
        Every rank calls this, with the same moves, between the same steps; a second call adds to
        the first.

        Raises:
            PlanError: a layer, a stage or a virtual machine that does not exist; two moves of one
                layer; a stage whose layers would not be contiguous; or a stage that would have too
                little memory, if only while layers move (with an asynchronous schedule, only the
                first rank raises it then). Then nothing changes.
        """
        self.pipeline.migrate(moves)

    @property
    def steps_left(self) -> float:
        """The number of steps over which a change of the plan can pay off; infinite if it was not
        set.
        """
        return self.pipeline.planning.steps_left

    @steps_left.setter
    def steps_left(self, steps: float) -> None:
        self.pipeline.planning.steps_left = steps

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, as plans and moves have them."""
        return list(self.pipeline.layers)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The automatic changes of the plan so far, in their order: the fields that are known of a
        :class:`~lightning_pipeshift.timeline.outcomes.Change`, with the seconds of a step that were
        measured before, expected, and measured after it.
        """
        return [each.entries for each in self.pipeline.planning.decisions.changes]

    @property
    def move_seconds(self) -> float:
        """How long this rank has waited for the last change of owners, in seconds: the part that
        did not overlap with its steps.
        """
        return self.pipeline.migration_seconds

    @property
    def memory_figures(self) -> dict[str, float]:
        """Statistics of :class:`~lightning_pipeshift.MemoryCompression` on this rank since the run
        began: ``peak_bytes`` of saved tensors on the device, the ``budget_bytes`` that they may
        take (the device's, less the other memory of its layers), ``moved_bytes``,
        ``waited_seconds`` (how long the compute has waited for copies), ``num_evicted`` (tensors
        that were evicted although the plan keeps them) and ``host_peak_bytes`` (of all that has
        moved there). Of the optimizer's state that moves: ``optimizer_host_bytes``, the bytes in
        host memory; ``optimizer_peak_bytes``, the most of it on the device; and
        ``optimizer_moved_bytes``, the sum of the bytes moved out. Empty without the plugin.
        """
        memory = self.pipeline.memory
        return memory.figures() if memory is not None else {}

    @property
    def exposed_seconds(self) -> float:
        """How long the last step has waited for gradients of other virtual machines, in seconds,
        after its own compute.
        """
        return self.pipeline.exposed_seconds

    def gradient_norms(self, norm_type: float) -> dict[str, Tensor]:
        """The norm of every parameter's gradient by the parameter's name, over all stages.

        Every rank calls this. See :func:`lightning_pipeshift.grad_norm`, which adds the total.

        Args:
            norm_type: the order of the norm.

        Returns:
            Scalars, float32, on the CPU. A parameter without a gradient is omitted.
        """
        return self._require_run().training.gradients.norms_by_name(norm_type)

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

    @property
    def steps_to_measure(self) -> int:
        """How many steps are measured before the layers are distributed again."""
        steps = self._options.profile_steps
        return steps or Options.profile_steps if self._only_measures else steps

    @property
    def measured(self) -> tuple[Profile, Cluster, PlanRequest] | None:
        """The measurements, and the settings for a planner: on the first rank."""
        planning = self.pipeline.planning
        if planning.measured is None or not planning.is_measured:
            return None
        profile, cluster = planning.measured.profile, planning.measured.cluster
        policy = self._memory_request.policy if self._memory_request is not None else None
        return profile, cluster, self._options.request(profile.num_samples, policy)

    @property
    def _memory_request(self) -> MemoryRequest | None:
        """The settings of a `MemoryCompression`, if there is one."""
        return getattr(self.precision_plugin, "memory_request", None)

    # --- the launch ---

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_devices(self.parallel_devices or ())
        if self.num_processes * self.num_nodes == 1:
            return  # this process is all there is
        if self.cluster_environment.creates_processes_externally:
            return
        if IS_INTERACTIVE and self.num_nodes == 1:
            # A notebook is no script that could be run again: the other ranks are copies of it.
            self._launcher = NotebookLauncher(self)
        else:
            self._launcher = Launcher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                lambda: self._connection.has_met,
            )

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
            check_packages(trainer, self._require_module())
        check_processes(self.num_processes)
        super().setup_environment()
        if self.num_processes > 1:
            # The launcher does this only for the process that it launches from. A single process
            # keeps the number of threads that the user has set.
            set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        assert self.cluster_environment is not None
        place = RankPlace(
            self.global_rank, self.world_size, self.root_device, self.cluster_environment
        )
        self._connection.open(place, Path(trainer.default_root_dir if trainer is not None else "."))
        # Random numbers are shared from now on (for a split of the data in `setup`, for example).
        self._random_state.share()
        self._random_state.continue_from({})
        self._checkpoints.numbers = None
        self._deferred = DeferredInit()

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Context of ``configure_model``: tensors created in it get their values later, on the
        stages that hold them.
        """
        self._deferred = DeferredInit(self._random_state.seed())
        with self._deferred.recording():
            yield
        give_attributes_values(self._require_module(), self._deferred)

    # --- the start of a run ---

    def setup(self, trainer: pl.Trainer) -> None:
        module, connection = self._require_module(), self._connection
        trains = trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        with self._deferred.recording():
            self.model = self.precision_plugin.convert_module(module)
        # What user code asks for (`self.device`), in nested LightningModules too.
        update_properties(module, device=self.root_device)
        if trains and self._options.leaves_numbers and not self._only_measures:
            self._choose_numbers(trainer)
        settings = self._settings(trainer, self._random_state.begin_run())
        is_plain = self.world_size == 1 and settings.leaves_steps_whole(self.topology.stages_per_vm)
        is_automatic = module.automatic_optimization
        if not is_automatic:
            check_manual(settings, connection.replicas.count)
        else:
            check_run(module, is_plain)
        check_shares(settings.batch_shares, connection.replicas.count)
        # Lightning's own samplers support neither shares nor global batches.
        if self._shares_data is None:
            self._shares_data = uses_distributed_sampler(trainer)
        use_distributed_sampler(trainer, False)
        self._checkpoints.connect()
        run = self._run = Run.start(trainer, connection, settings, self._deferred)
        run.adjust(trainer, self._adjustments, self._deferred, self._checkpoints.is_sharded)
        if self._request_folder is not None and self.is_global_zero:
            run.take_requests(self._request_folder)
        self._checkpoints.begin_run(run.pipeline, trains)
        if trains:
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, is_plain, not is_automatic)
            check_known(self.optimizers, module, {*module.parameters()}.__contains__)
        self.setup_precision_plugin()

    def _settings(self, trainer: pl.Trainer, seed: int) -> Settings:
        options = replace(self._options, profile_steps=self.steps_to_measure)
        if self._microbatches is not None:
            options = replace(options, microbatches=self._microbatches)
        return Settings(
            **vars(options),
            seed=seed,
            only_measures=self._only_measures,
            watch=self._watch,
            memory=self._memory_request,
            **accumulation_of(trainer),
        )

    def _choose_numbers(self, trainer: pl.Trainer) -> None:
        """Chooses the numbers that are left to the planner, unless an earlier run has chosen the
        same. Every rank calls this.
        """
        connection, saved = self._connection, self._checkpoints.numbers
        if self._microbatches is not None:
            known = Numbers(connection.replicas.count, self._microbatches)
            if saved in (None, known):
                return
        self._microbatches = None
        settings = self._settings(trainer, self._random_state.seed())
        topology, number = chosen(trainer, connection, settings, self._deferred, saved)
        connection.regroup(topology)
        self._microbatches = number

    def model_to_device(self) -> None:
        """Does nothing yet: each stage moves its own layers to its device when the plan is made."""

    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader of this virtual machine's share of the data, and makes workers' seeds
        depend on the virtual machine, instead of the rank as in Lightning.
        """
        seed_workers_alike(dataloader)
        if self._is_unconnected_alone:
            return dataloader
        trains = self._require_module().trainer.state.stage == RunningStage.TRAINING
        if trains:
            # Next, Lightning creates the loader's iterator, whose order may be random.
            self._random_state.restore()
        replicas = self._connection.replicas
        if replicas.count == 1 or not self._shares_data:
            return dataloader
        shares = self._options.batch_shares or [1.0] * replicas.count
        stream = self._random_state.stream
        return for_virtual_machine(dataloader, replicas.vm, shares, pads=trains, stream=stream)

    # --- training ---

    def on_train_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        trainer = self._require_module().trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready and not progress.is_last_batch:
            # In the middle of an epoch the iterator was created before the checkpoint.
            self._random_state.restore()
        self._random_state.continue_from({})
        self._require_run().training.begin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._require_run()
        result = run.training.run(*args, *kwargs.values())
        run.interruptions.heed()
        return result

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context of the steps that no optimizer step follows."""
        with self._require_run().training.accumulating():
            yield

    @property
    def backward(self) -> Callable[..., Tensor]:
        """``(loss, optimizer, ...) -> loss``; Lightning's own where the user's step calls it."""
        plain = super().backward
        if self._run is None or self._run.training.leaves_backward:
            return plain

        def run(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            training = self._require_run().training
            return training.backward(loss, partial(plain, loss, *args, **kwargs))

        return run

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        plain = super().optimizer_step
        return self._require_run().training.optimizer_step(
            optimizer, closure, lambda inner: plain(optimizer, inner, *args, **kwargs)
        )

    def on_train_end(self) -> None:
        """Makes the virtual machines' states equal: running statistics, random numbers."""
        self._require_run().training.end()
        self._random_state.to_shared()

    # --- evaluation ---

    def on_validation_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._require_run().evaluation.begin("validation")

    def on_test_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._require_run().evaluation.begin("test")

    def on_predict_start(self) -> None:
        """Compares the lengths of the data over the ranks."""
        self._require_run().evaluation.begin("prediction")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._require_run().evaluation.run("validation_step", *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._require_run().evaluation.run("test_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._require_run().evaluation.run("predict_step", *args, *kwargs.values())

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
        self._require_run().evaluation.end(what)
        # After the sanity check Lightning restores the earlier random state, which was that of the
        # shared stream.
        self._random_state.to_shared()

    # --- collective calls of Lightning's and of callbacks ---

    def _meet(self) -> None:
        if self._run is not None:
            self._run.pipeline.meets()

    def barrier(self, name: str | None = None) -> None:
        self._notice_exception()
        self._meet()
        barrier(self._connection)

    def broadcast(self, obj: T, src: int = 0) -> T:
        self._notice_exception()
        self._meet()
        return broadcast(self._connection, obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over virtual machines; all stages of one pass the same value.

        During an evaluation the virtual machines may be at different batches, so logged values are
        not reduced; the epoch's value is reduced at its end.
        """
        self._notice_exception()
        is_in_step = self._run is not None and not self._run.metric_sync.is_open
        if is_in_step or self._is_unconnected_alone:
            return tensor
        name = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2]
        return reduce(self._connection, tensor, name.lower())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over virtual machines, along a new first dimension. With a single virtual machine
        it returns the tensor itself.
        """
        self._notice_exception()
        return tensor if self._is_unconnected_alone else all_gather(self._connection, tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._notice_exception()
        self._meet()
        return agree(self._connection, decision, all)

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
        self._notice_exception()
        self._checkpoints.save(checkpoint, filepath, storage_options, self.is_global_zero)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, unless the one that replaces it could not be saved."""
        self._notice_exception()
        if not self._checkpoints.is_lost:
            super().remove_checkpoint(filepath)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; for a sharded checkpoint, the part that this rank saves."""
        self._notice_exception()
        if self._run is not None:
            self._run.training.drain(is_resumable=True)
        return self._checkpoints.module_state(self._require_module(), self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0; for a sharded checkpoint, the part that this rank saves."""
        self._notice_exception()
        return self._checkpoints.optimizer_state(optimizer)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Opens a checkpoint, a file or a folder. A rank reads its tensors on demand."""
        trainer = trainer_of(self.lightning_module)
        trains = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        turn = self.local_rank, max(1, self.num_processes)
        return self._checkpoints.load(
            checkpoint_path, weights_only, self._deferred, turn, continues=trains
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model's state; tensors without values are loaded when these are initialised."""
        with self._deferred.recording():
            load_state(self._require_module(), checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the whole state, on the CPU; each stage moves its part to the device of its
        parameters later.
        """
        states = checkpoint["optimizer_states"]
        with self._deferred.recording():
            for optimizer, state in zip(self.optimizers, states, strict=False):
                optimizer.load_state_dict(state)

    # --- the end ---

    def on_exception(self, exception: BaseException) -> None:
        """After a SIGTERM that all ranks know of, saves ``last.ckpt`` in the ModelCheckpoint's
        folder. After any other exception, publishes the reason to the other ranks, and closes the
        connections, so that none of them waits for this one.
        """
        super().on_exception(exception)
        if self._run is not None and self._run.interruptions.ends_in_order(exception):
            self._run.interruptions.save_last(exception)
        else:
            self._fail(exception)

    def _notice_exception(self) -> None:
        """Ends the run if an exception is being handled. Callbacks are notified of it before the
        strategy, and some then save a checkpoint, for which the other ranks would be needed. A
        single rank can still save: for it, only an exception counts that the strategy has handled.
        """
        trainer, handled = trainer_of(self.lightning_module), sys.exc_info()[1]
        if self.world_size > 1 and handled is not None and trainer and trainer.interrupted:
            run = self._run
            if run is None or not run.interruptions.ends_in_order(handled):
                self._fail(handled)

    def _fail(self, exception: BaseException) -> None:
        if isinstance(exception, StageFailedError):
            # Another rank's failure is not explained by where this one was: the reason counts.
            exception.__traceback__ = None
        if self._connection.announce(exception):
            if self._run is not None:
                self._run.release()
            self._checkpoints.end()
            self._connection.close()

    def teardown(self) -> None:
        """Makes the model whole again on every rank, and undoes the run's changes."""
        module, cpu = self._require_module(), torch.device("cpu")
        self._adjustments.undo()
        if self._run is not None:
            self._run.end(self._connection.has_failed)
        update_properties(module, device=cpu)
        metrics_to_cpu(module)
        for optimizer in self.optimizers:
            optimizer_to_device(optimizer, cpu, self._deferred)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._connection.pause()

    def _require_run(self) -> Run:
        if self._run is None:
            raise ConfigurationError(
                "There is no pipeline yet: it is created when `fit`, `validate`, `test` or "
                "`predict` begins."
            )
        return self._run

    def _require_module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
