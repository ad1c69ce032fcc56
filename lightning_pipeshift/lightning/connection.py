"""A rank's connections to the others: opened for the first run, kept for later ones, and closed
after a failure.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch import Tensor

from lightning_pipeshift.compat.lightning_private import init_dist_connection
from lightning_pipeshift.compat.torch_distributed_private import default_store
from lightning_pipeshift.errors import ConfigurationError, PlanError, StageFailedError
from lightning_pipeshift.host import host_names
from lightning_pipeshift.plan.arrange.options import Options
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.topology import Topology, arrange
from lightning_pipeshift.plan.inputs.traffic import BULK, GRADIENTS
from lightning_pipeshift.runtime.comm.backends import (
    backends,
    device_of,
    payload_address,
    payload_backend,
)
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.comm.lane import gathered
from lightning_pipeshift.runtime.comm.meeting import store_of_this_start
from lightning_pipeshift.runtime.comm.mesh import connect_all
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, nccl_environment
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.sockets import (
    Opened,
    give_up_after,
    open_sockets,
    shut_down,
)
from lightning_pipeshift.runtime.comm.turns import Turns
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.failure import FailureBoard
from lightning_pipeshift.runtime.liveness.stalls import (
    STACKS,
    print_stacks_on_a_signal,
    purpose,
)
from lightning_pipeshift.runtime.planning.probe import found_here, with_speeds
from lightning_pipeshift.step.control_files import FOLDER, WITHOUT_LOGGER

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


def _connected(part: T | None, who: str) -> T:
    if part is None:
        raise ConfigurationError(f"The {who} are not connected yet. Use this from `setup` on.")
    return part


@dataclass(frozen=True)
class RankPlace:
    """This process among those of a job.

    Args:
        rank: its rank.
        world_size: how many processes there are.
        device: the rank's device.
        environment: has the address of the first rank.
    """

    rank: int
    world_size: int
    device: torch.device
    environment: ClusterEnvironment


class Connection:
    """This rank's connections to the others. They are made by :meth:`open`.

    Args:
        options: the user's.
    """

    def __init__(self, options: Options) -> None:
        self.has_failed = False
        """Whether the run has ended by an exception that this rank knows of."""
        self._options = options
        self._lanes = Lanes(options.timeout, options.marks)
        self._board: FailureBoard | None = None
        self._groups: ProcessGroups | None = None
        self._channels: Channels | None = None
        self._replicas: Replicas | None = None
        self._rings: Rings | None = None
        self._hosts: list[str] | None = None
        self._place: RankPlace | None = None
        self._chosen: Topology | None = None
        # Once for all runs, as another run on other virtual machines would connect anew.
        self._measured: list[Device] | None = None
        self._sockets: Opened = frozenset()
        # Ranks that have all failed together can still complete a checkpoint.
        self._checkpoint_sockets: Opened = frozenset()

    # --- what is connected ---

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        """See :class:`Pipeline`."""
        return self

    @property
    def is_open(self) -> bool:
        """Whether there are connections: a run has started, and has not failed. Without them,
        collective calls return this rank's own value.
        """
        return self._replicas is not None and dist.is_initialized()

    @property
    def has_met(self) -> bool:
        """Whether this rank has been connected to the others, which then know when it ends."""
        return self._board is not None

    @property
    def replicas(self) -> Replicas:
        """The virtual machines."""
        return _connected(self._replicas, "ranks")

    @property
    def channels(self) -> Channels:
        """The connections between the stages of this rank's virtual machine."""
        return _connected(self._channels, "stages")

    @property
    def groups(self) -> ProcessGroups:
        """The process groups that carry tensors from device to device."""
        return _connected(self._groups, "ranks")

    @property
    def rings(self) -> Rings | None:
        """This rank's part in the rings over the virtual machines; ``None`` if there is only
        one virtual machine.
        """
        return self._rings

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's host."""
        return _connected(self._hosts, "ranks")

    @property
    def lost_at(self) -> float | None:
        """The time since which any rank has been gone, by ``time.monotonic``."""
        return self._board.lost_at if self._board is not None else None

    # --- the start of a run ---

    def open(self, place: RankPlace, folder: Path) -> None:
        """Connects the ranks, unless an earlier run has. Every rank calls this.

        Args:
            place: this process.
            folder: where stacks are written if the user asks for them.

        Raises:
            ConfigurationError: the ranks are not those that the options want.
            PlanError: the devices are not those of the plan.
        """
        self.has_failed = False
        self._place = place
        before = open_sockets()
        board = self._board_of_job(place, before)
        job = _job_of(dist.group.WORLD) or _Job(weakref.ref(dist.group.WORLD), board)
        _keep(job)
        is_new = self._board is not board
        self._board = board
        board.resume()
        with board.watched():
            topology = self._topology(place, board)
            if is_new:
                self._replicas = None
            # All ranks have the board: sockets opened from now on are shut down after a failure.
            self._arrange(topology, place, board, job)
        self._sockets |= open_sockets() - before - board.sockets
        board.interrupt = self._interrupt
        # Called in a thread when a rank is gone: ends operations that need all ranks.
        board.give_up = lambda: shut_down(self._checkpoint_sockets)
        board.trouble = self.groups.error
        print_stacks_on_a_signal()
        are_asked_for = os.environ.get(STACKS, "0") not in ("", "0")
        stacks = folder / WITHOUT_LOGGER / FOLDER if are_asked_for else None
        done = self._num_done
        board.watch_for_stalls(done, self._options.stall_timeout, stacks)

    def regroup(self, topology: Topology) -> None:
        """Makes other virtual machines of the ranks, for this run and later ones. Every rank calls
        this, before a run begins.

        Args:
            topology: of all ranks.
        """
        board, place, job = self._board, self._place, _job_of(dist.group.WORLD)
        assert board is not None
        assert place is not None
        assert job is not None
        self._chosen = topology
        self.channels.settle()
        self.replicas.world.settle()
        before = open_sockets()
        with board.watched():
            self._arrange(topology, place, board, job)
        self._sockets |= open_sockets() - before - board.sockets

    def _arrange(
        self, topology: Topology, place: RankPlace, board: FailureBoard, job: _Job
    ) -> None:
        """Connects the stages of each virtual machine, unless they are connected."""
        board.name_of = lambda rank: topology.name_of(rank, self.hosts[rank])
        known = self._replicas
        if known is None or not known.topology.has_machines_of(topology):
            known = self._connect(topology, place, board, job)
        # A run begins in the order that was asked for, whatever an earlier one has found.
        known.reorder(topology)
        board.name_of = lambda rank: known.topology.name_of(rank, self.hosts[rank])

    def _num_done(self) -> int:
        return self._channels.num_done if self._channels is not None else 0

    def _board_of_job(self, place: RankPlace, before: Opened) -> FailureBoard:
        """The connections by which failures are noticed; initialises torch.distributed.

        Args:
            place: this process.
            before: the sockets that were open before the ranks connected.
        """
        if dist.is_initialized():
            known = _job_of(dist.group.WORLD)
            return known.board if known else self._make_board(place, default_store(), before)
        environment = place.environment
        store = store_of_this_start(
            place.rank,
            place.world_size,
            environment.main_address,
            environment.main_port,
            self._options.timeout or default_pg_timeout,
        )
        board = self._make_board(place, store, before)
        # From now on, heartbeats tell.
        give_up_after(open_sockets() - before - board.sockets, 0)
        with board.watched(), nccl_environment():
            init_dist_connection(
                environment,
                backends(place.device, self._options.process_group_backend),
                global_rank=place.rank,
                world_size=place.world_size,
                timeout=self._options.timeout,
                store=store,
            )
        return board

    def _make_board(self, place: RankPlace, store: Any, before: Opened) -> FailureBoard:
        mesh = connect_all(
            dist.PrefixStore("pipeshift/peers", store),
            place.rank,
            place.world_size,
            place.environment.main_address,
            place.environment.main_port,
        )
        board = FailureBoard(place.rank, mesh, self._options.heartbeat_timeout)
        # What is opened up to the end of the setup is for this job.
        board.interrupt = lambda: shut_down(open_sockets() - before - board.sockets)
        return board

    def _topology(self, place: RankPlace, board: FailureBoard) -> Topology:
        devices = gathered(device_of(place.device), dist.group.WORLD, board.watched)
        hosts = self._hosts = host_names([device.host for device in devices])
        if self._options.groups_devices:
            # Two devices of one kind, as every CPU is here, may be of very different speeds. The
            # ranks have just waited for each other: all compute at once, as in training.
            if self._measured is None:
                mine = found_here(place.device, devices[place.rank])
                self._measured = with_speeds(gathered(mine, dist.group.WORLD, board.watched))
            devices = self._measured
        plan = self._options.plan
        num_planned = sum(map(len, plan.ranks)) if plan is not None else 0
        if num_planned and num_planned != len(devices):
            raise PlanError(
                f"The plan is for {num_planned} devices (its field 'ranks'), and this run has"
                f" {len(devices)}. Use that number of devices, or make a plan for those there are."
            )
        topology = self._chosen or arrange(self._options.ranks, devices, self._options.depths)
        planned = plan.kinds if plan is not None else ()
        for ranks, kinds in zip(topology.ranks, planned, strict=False):
            for stage, (rank, kind) in enumerate(zip(ranks, kinds, strict=True)):
                if devices[rank].kind != kind:
                    raise PlanError(
                        f"The plan was made for another cluster: for stage {stage} it has a "
                        f"{kind!r}, and rank {rank} is a {devices[rank].kind!r} (host "
                        f"{hosts[rank]!r}). Make a plan here with `pipeshift plan`, or "
                        "remove its field 'kinds' if you know that it is suitable."
                    )
        return topology

    def _connect(
        self, topology: Topology, place: RankPlace, board: FailureBoard, job: _Job
    ) -> Replicas:
        rank, device, watched = place.rank, place.device, board.watched
        backend = payload_backend(device, self._options.process_group_backend, watched)
        groups = job.groups
        lanes = self._lanes
        if groups is None or (groups.backend, groups.device) != (backend, device):
            groups = ProcessGroups(backend, device, watched, lanes)
        self._groups = job.groups = groups
        vm, stage = topology.place_of(rank)
        hosts = [lanes.between_stages(ranks) for ranks in topology.ranks]
        turns = Turns()
        machine = Channels(topology.ranks[vm], stage, device, watched, hosts[vm], groups, turns)
        machine.share_memory(payload_address(device))
        everyone, of_all = range(place.world_size), hosts[vm]
        if topology.num_virtual_machines > 1:
            of_all = lanes.between_stages(everyone, has_transfers=False)
            self._rings = Rings(
                lambda lane: lanes.make(everyone, GRADIENTS[lane].name), rank, watched, turns
            )
        # In the order of the ranks: that of the stages may change.
        world = Channels(everyone, rank, device, watched, of_all, groups, turns)
        world.shares_memory_with = machine.shares_memory_with
        self._channels = machine
        self._replicas = Replicas(topology, rank, world, machine)
        return self._replicas

    def group_for_checkpoints(self) -> dist.ProcessGroup:
        """Makes a group of all ranks. After a failure its connections remain until a rank is gone,
        so that the remaining ranks can complete a checkpoint. Every rank calls this.
        """
        made = self._lanes.make(range(dist.get_world_size()), BULK.name)
        self._checkpoint_sockets = made.sockets
        group: dist.ProcessGroup = made.control
        return group

    # --- collective calls: of every rank ---

    @purpose("a barrier")
    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.is_open:
            self.replicas.world.sum(torch.zeros(1))

    @purpose("a broadcast")
    def broadcast(self, value: T, source: int) -> T:
        """The value of one rank."""
        if not self.is_open:
            return value
        world = self.replicas.world
        mine = value if self.replicas.rank == source else None
        # Not a message: in the middle of a step, the receive of another message may be posted
        # already.
        found: T = gathered(mine, world.control, world.watched)[source]
        return found

    def reduce(self, value: Any, operation: str) -> Any:
        """A tensor reduced over the virtual machines, all stages of which pass the same one."""
        if self.has_failed or self.replicas.count == 1 or not isinstance(value, Tensor):
            return value
        return self.replicas.reduce(value, operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all virtual machines, along a new first dimension; the tensor itself if
        there is only one virtual machine.
        """
        if self.has_failed or self.replicas.count == 1:
            return tensor
        return torch.stack(self.replicas.gather_tensor(tensor))

    @purpose("a decision of all ranks")
    def agree(self, decision: bool, all_of_them: bool) -> bool:
        """Whether all ranks decide so, or any."""
        if not self.is_open:
            return decision
        votes = self.replicas.world.sum(torch.tensor([float(decision)]))
        return bool(votes == self.replicas.topology.num_ranks) if all_of_them else bool(votes > 0)

    # --- the end of a run ---

    def pause(self) -> None:
        """Ends a run in order: from now on, a rank whose process ends has not failed.

        Waits until the other ranks have received all messages of this one: when the caller then
        drops the connection, no send is in progress. gloo loses a send that no object refers to.
        """
        if self._channels is not None and self._replicas is not None:
            self._channels.settle()
            self._replicas.world.settle()
        if self._board is not None and not self.has_failed:
            self._board.pause()

    def end_in_order(self) -> None:
        """See :meth:`FailureBoard.end_in_order`."""
        if self._board is not None:
            self._board.end_in_order()

    def announce(self, exception: BaseException) -> bool:
        """Ends a run by an exception: publishes the reason to the other ranks, and interrupts what
        is in progress on the device.

        Returns:
            whether the connections are now to be closed: they are open, and this is the run's first
            exception.
        """
        if self.has_failed or not dist.is_initialized():
            return False
        self.has_failed = True
        board = self._board
        if board is not None and not board.is_first(exception):
            board.publish(board.own_name, exception)
        if self._groups is not None:
            # Later code may wait for the device, which may wait for other ranks.
            self._groups.abort()
        return True

    def announce_from_thread(self, exception: BaseException) -> None:
        """Publishes an exception of a thread to the other ranks. They notice it when they wait for
        a move, and this rank when it communicates next; so there is no deadlock.
        """
        channels, board = self._channels, self._board
        # Ranks that wait for a failed rank notice the failure by themselves.
        if channels is None or board is None or isinstance(exception, StageFailedError):
            return
        if not board.is_first(exception):
            board.publish_from_thread(exception)
        channels.interrupt_transfers()
        if self._groups is not None:
            # On a device, this rank would wait for operations that the failure ends.
            self._groups.abort()

    def close(self) -> None:
        """Closes all connections, so that no rank waits for this one."""
        if self._channels is not None and self._replicas is not None:
            self._channels.close()
            self._replicas.world.close()
        if self._rings is not None:
            self._rings.close()
        groups = self._groups
        self._channels = self._replicas = self._rings = self._groups = None
        if groups is not None:
            groups.end_all()
        else:
            dist.destroy_process_group()
        self._sockets = self._checkpoint_sockets = frozenset()
        if self._board is not None:
            self._board.close()

    def _interrupt(self) -> None:
        """Interrupts the waits of this rank; called in a thread when another rank failed."""
        groups = self._groups
        if groups is not None:
            groups.abort()
        shut_down(self._sockets)
        if self._rings is not None:
            # Lanes may have been opened later.
            shut_down(self._rings.sockets)
