"""The base of the strategy: a rank's position, its connections, and its handling of failures."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.lightning_private import (
    IS_INTERACTIVE,
    init_dist_connection,
    set_num_threads_if_needed,
)
from lightning_pipeshift.compat.torch_distributed_private import default_store
from lightning_pipeshift.errors import ConfigurationError, StageFailedError
from lightning_pipeshift.host import host_names
from lightning_pipeshift.lightning.checks import check_devices, check_packages, check_processes
from lightning_pipeshift.lightning.launcher import Launcher, NotebookLauncher
from lightning_pipeshift.lightning.patches import Adjustments
from lightning_pipeshift.model.user_state.random_streams import global_state, set_global_state
from lightning_pipeshift.plan.arrange.options import Options
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.topology import Topology, arrange
from lightning_pipeshift.runtime.comm.backends import (
    backends,
    device_of,
    payload_backend,
    store_of_this_start,
)
from lightning_pipeshift.runtime.comm.channels import Channels, connect_devices, make_groups
from lightning_pipeshift.runtime.comm.lane import gathered
from lightning_pipeshift.runtime.comm.mesh import connect_all
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, nccl_environment
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.sockets import Opened, open_sockets, shut_down
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.failure import FailureBoard
from lightning_pipeshift.runtime.liveness.stalls import STACKS, print_stacks_on_a_signal
from lightning_pipeshift.runtime.step.control_files import FOLDER, WITHOUT_LOGGER

T = TypeVar("T")


@dataclass
class _Job:
    """State shared by all strategies that a job's ranks run one after another.

    Args:
        world: torch's default process group.
        board: reports failures.
        groups: the groups in addition to the default one.
    """

    world: weakref.ref[Any]
    board: FailureBoard
    groups: ProcessGroups | None = None


_jobs: list[_Job] = []


def _job_of(world: Any) -> _Job | None:
    return next((job for job in _jobs if job.world() is world and job.board.is_open), None)


def _keep(job: _Job) -> None:
    for other in _jobs:
        if other.world() is not job.world():
            other.board.close()
    _jobs[:] = [job]


class ConnectedStrategy(ParallelStrategy):
    """The part of the strategy that connects ranks, and does not depend on the training.

    Args:
        options: the user's.
        accelerator: as in every Lightning strategy, as the others are.
    """

    def __init__(
        self,
        options: Options,
        accelerator: pl.accelerators.Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self._options = options
        self._board: FailureBoard | None
        self._channels: Channels | None
        self._replicas: Replicas | None
        self._rings: Rings | None
        self._groups: ProcessGroups | None
        self._failed: bool
        self._sockets: Opened
        # Ranks that have all failed together can still complete a checkpoint.
        self._checkpoint_sockets: Opened
        self._hosts: list[str]
        self._adjustments: Adjustments
        vars(self).update(self._of_a_run())
        self.num_nodes = 1

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: only the settings, without the state of a run."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in self._of_a_run()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(self._of_a_run() | state)

    def _of_a_run(self) -> dict[str, Any]:
        """The attributes that belong to a run, with their values before it."""
        return {
            "_board": None,
            "_channels": None,
            "_replicas": None,
            "_rings": None,
            "_groups": None,
            "_failed": False,
            "_sockets": frozenset(),
            "_checkpoint_sockets": frozenset(),
            "_hosts": [],
            "_adjustments": Adjustments(),
        }

    # --- the rank's position ---

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
        return self._require_replicas().vm

    @property
    def topology(self) -> Topology:
        """The ranks of every virtual machine, in stage order."""
        return self._require_replicas().topology

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
        replicas = self._require_replicas()
        return {"num_replicas": replicas.count, "rank": replicas.vm}

    @property
    def is_distributed(self) -> bool:
        """Whether there are several virtual machines: values logged with ``sync_dist`` are reduced
        over them.
        """
        return self._replicas is not None and self._replicas.count > 1

    @property
    def process_group_backend(self) -> str | None:
        """The backend that the user requested."""
        return self._options.process_group_backend

    @property
    def _is_unconnected_alone(self) -> bool:
        """Whether no run has started, and this process would be its only rank: then it can answer
        the Trainer's queries by itself (for `estimated_stepping_batches`, for example).
        """
        return self._replicas is None and self.world_size == 1

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

    # --- launch and connections ---

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
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

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
        module = self.lightning_module
        if module is not None and trainer_of(module) is not None:
            check_packages(module.trainer, module)
        check_processes(self.num_processes)
        super().setup_environment()
        if self.num_processes > 1:
            # The launcher does this only for the process that it launches from. A single process
            # keeps the number of threads that the user has set.
            set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._failed = False
        before = open_sockets()
        if not dist.is_initialized():
            store = store_of_this_start(
                self.global_rank,
                self.world_size,
                self.cluster_environment.main_address,
                self.cluster_environment.main_port,
                self._options.timeout or default_pg_timeout,
            )
            board = self._make_board(store, before)
            with board.watched(), nccl_environment():
                init_dist_connection(
                    self.cluster_environment,
                    backends(self.root_device, self._options.process_group_backend),
                    global_rank=self.global_rank,
                    world_size=self.world_size,
                    timeout=self._options.timeout,
                    store=store,
                )
        else:
            default = default_store()
            known = _job_of(dist.group.WORLD)
            board = known.board if known is not None else self._make_board(default, before)
        job = _job_of(dist.group.WORLD) or _Job(weakref.ref(dist.group.WORLD), board)
        _keep(job)
        is_new = self._board is not board
        self._board = board
        board.resume()
        with board.watched():
            topology = self._topology()
            board.name_of = [
                topology.name_of(rank, host) for rank, host in enumerate(self._hosts)
            ].__getitem__
            # All ranks have the board: sockets opened from now on are shut down after a failure.
            if is_new or self._replicas is None or self._replicas.topology != topology:
                self._connect(topology, job)
        groups = self._require_groups()
        self._sockets |= open_sockets() - before - board.sockets - groups.sockets
        board.interrupt, board.give_up = self._interrupt, self._give_up
        board.trouble = groups.error
        self._watch_for_stalls(board)
        world = self._require_replicas().world
        for channels in (self._require_channels(), world):
            channels.watched = board.watched
        groups.watched = board.watched
        if self._rings is not None:
            self._rings.watched = board.watched
        # Random numbers drawn from now on (for a split of the data in `setup`, for example) are the
        # same on all ranks, with or without a seed, and as on one device: those of rank 0.
        set_global_state(world.share_object(global_state(), source=0))

    def _make_board(self, store: Any, before: Opened) -> FailureBoard:
        """Connects this rank with all others, to notice failures.

        Args:
            store: the process group's.
            before: the sockets that were open before the ranks connected.
        """
        assert self.cluster_environment is not None
        mesh = connect_all(
            dist.PrefixStore("pipeshift/peers", store),
            self.global_rank,
            self.world_size,
            self.cluster_environment.main_address,
            self.cluster_environment.main_port,
            self._options.timeout or default_pg_timeout,
        )
        board = FailureBoard(self.global_rank, mesh, self._options.heartbeat_timeout)
        # What is opened up to the end of the setup is for this job.
        board.interrupt = lambda: shut_down(open_sockets() - before - board.sockets)
        return board

    def _watch_for_stalls(self, board: FailureBoard) -> None:
        channels = self._require_channels()
        trainer = trainer_of(self.lightning_module)
        root = trainer.default_root_dir if trainer is not None else "."
        are_asked_for = os.environ.get(STACKS, "0") not in ("", "0")
        stacks = Path(root) / WITHOUT_LOGGER / FOLDER if are_asked_for else None
        print_stacks_on_a_signal()
        board.watch_for_stalls(lambda: channels.num_done, self._options.stall_timeout, stacks)

    def _interrupt(self) -> None:
        """Interrupts the waits of this rank; called in a thread when another rank failed."""
        groups = self._groups
        if groups is not None:
            groups.abort()
        shut_down(self._sockets)

    def _give_up(self) -> None:
        """Interrupts operations that need all ranks; called in a thread when one is gone."""
        shut_down(self._checkpoint_sockets)

    def _topology(self) -> Topology:
        mine = device_of(self.root_device)
        assert self._board is not None
        devices = gathered(mine, dist.group.WORLD, self._board.watched)
        self._hosts = host_names([device.host for device in devices])
        topology = arrange(self._options.ranks, devices, self._options.depths)
        self._check_devices(topology, devices)
        return topology

    def _check_devices(self, topology: Topology, devices: Sequence[Device]) -> None:
        """Raises ConfigurationError if these devices are not the requested ones."""

    def _connect(self, topology: Topology, job: _Job) -> None:
        assert self._board is not None
        device, watched = self.root_device, self._board.watched
        timeout = self._options.timeout
        backend = payload_backend(device, self._options.process_group_backend, watched)
        groups = job.groups
        if groups is None or (groups.backend, groups.device) != (backend, device):
            groups = ProcessGroups(backend, device, watched, timeout)
        self._groups = job.groups = groups
        vm, stage = topology.place_of(self.global_rank)
        hosts = [make_groups(ranks, has_bulk=True, timeout=timeout) for ranks in topology.ranks]
        connect_devices(groups, topology.ranks)
        machine = Channels(topology.ranks[vm], stage, device, watched, hosts[vm], groups)
        machine.open_lines()
        world = machine
        if topology.num_virtual_machines > 1:
            everyone = range(self.world_size)
            of_all = make_groups(everyone, timeout=timeout)
            world = Channels(everyone, self.global_rank, device, watched, of_all, groups)
            self._rings = Rings(make_groups(everyone, timeout=timeout), self.global_rank, watched)
        self._channels = machine
        self._replicas = Replicas(topology, self.global_rank, world, machine)

    def _require_groups(self) -> ProcessGroups:
        assert self._groups is not None
        return self._groups

    def _require_replicas(self) -> Replicas:
        if self._replicas is None:
            raise ConfigurationError("The ranks are not connected yet. Use this from `setup` on.")
        return self._replicas

    def _require_channels(self) -> Channels:
        if self._channels is None:
            raise ConfigurationError("The stages are not connected yet. Use this from `setup` on.")
        return self._channels

    # --- communication between ranks ---

    def _is_alone(self) -> bool:
        """Whether there are no connections to other ranks: no run has started, or it has failed.
        Then collective calls of callbacks return this rank's own value.
        """
        return self._has_failed() or self._replicas is None or not dist.is_initialized()

    def barrier(self, name: str | None = None) -> None:
        if not self._is_alone():
            self._require_replicas().world.sum(torch.zeros(1))

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._is_alone():
            return obj
        world = self._require_replicas().world
        mine = obj if self.global_rank == src else None
        # Not a message: in the middle of a step, the receive of another message may be posted
        # already.
        found: T = gathered(mine, world.control, world.watched)[src]
        return found

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over virtual machines; all stages of one pass the same value."""
        if self._has_failed() or self._is_unconnected_alone:
            return tensor
        replicas = self._require_replicas()
        if replicas.count == 1 or not isinstance(tensor, Tensor):
            return tensor
        name = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2]
        return replicas.reduce(tensor, name.lower())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over virtual machines, along a new first dimension. With a single virtual machine
        it returns the tensor itself.
        """
        if self._has_failed() or self._is_unconnected_alone:
            return tensor
        replicas = self._require_replicas()
        return tensor if replicas.count == 1 else torch.stack(replicas.gather_tensor(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._is_alone():
            return decision
        votes = self._require_replicas().world.sum(torch.tensor([float(decision)]))
        return bool(votes == self.world_size) if all else bool(votes > 0)

    # --- a failure ---

    def _has_failed(self) -> bool:
        """Whether the run has ended by an exception.

        Callbacks are notified of an exception before the strategy, and some then save a checkpoint,
        for which the other ranks would be needed. A single rank can still save: for it, only a
        failure that the strategy has handled counts.
        """
        if self.world_size == 1:
            return self._failed
        trainer = trainer_of(self.lightning_module)
        handled = sys.exc_info()[1]
        if not self._failed and handled is not None and trainer is not None and trainer.interrupted:
            self._fail(handled)
        return self._failed

    def on_exception(self, exception: BaseException) -> None:
        """Publishes the reason to the other ranks, and closes the connections, so that none of them
        waits for this one.
        """
        super().on_exception(exception)
        self._fail(exception)

    def _settle(self) -> None:
        """Waits until the other ranks have received all messages of this one: when the caller then
        drops the strategy, no send is in progress. gloo loses a send that no object refers to.
        """
        if self._channels is not None and self._replicas is not None:
            self._channels.settle()
            self._replicas.world.settle()

    def _fail_beside(self, exception: BaseException) -> None:
        """Publishes a failure in a thread to the other ranks. They notice it when they wait for a
        move, and this rank when it communicates next; so there is no deadlock.
        """
        channels, board = self._channels, self._board
        # Ranks that wait for a failed rank notice the failure by themselves.
        if channels is None or board is None or isinstance(exception, StageFailedError):
            return
        if not board.is_first(exception):
            board.publish_beside(exception)
        channels.interrupt_bulk()
        if self._groups is not None:
            # On a device, this rank would wait for operations that the failure ends.
            self._groups.abort()

    def _fail(self, exception: BaseException) -> None:
        if self._failed or not dist.is_initialized():
            return
        self._failed = True
        board = self._board
        heard = isinstance(exception, StageFailedError)
        if board is not None and not heard and not board.is_first(exception):
            board.publish(board.own_name, exception)
        groups = self._groups
        if groups is not None:
            # Later code may wait for the device, which may wait for other ranks.
            groups.abort()
        self._let_go()
        self._end_checkpoints()
        if self._channels is not None and self._replicas is not None:
            self._channels.close()
            self._replicas.world.close()
        if self._rings is not None:
            self._rings.close()
        self._channels = self._replicas = self._rings = self._groups = None
        if groups is not None:
            groups.end_all()
        else:
            dist.destroy_process_group()
        self._sockets = self._checkpoint_sockets = frozenset()
        if board is not None:
            board.close()

    def _end_checkpoints(self) -> None:
        """Waits for checkpoints that are being written."""

    def _let_go(self) -> None:
        """Undoes the run's changes to the model."""
