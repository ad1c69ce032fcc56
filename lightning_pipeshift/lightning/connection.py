"""A rank's connections to the others: opened for the first run, kept for later ones, and closed
after a failure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_pipeshift.errors import ConfigurationError, StageFailedError
from lightning_pipeshift.lightning.grouping import Grouping
from lightning_pipeshift.lightning.job import Job, RankPlace, meet
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.inputs.traffic import BULK, GRADIENTS
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.runtime.comm.backends import backend_of_sums, payload_address
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.sockets import Opened, open_sockets, shut_down
from lightning_pipeshift.runtime.comm.turns import Turns
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.stalls import STACKS, print_stacks_on_a_signal
from lightning_pipeshift.step.control_files import FOLDER, WITHOUT_LOGGER

T = TypeVar("T")


def _connected(part: T | None, who: str) -> T:
    if part is None:
        raise ConfigurationError(f"The {who} are not connected yet. Use this from `setup` on.")
    return part


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
        self._grouping = Grouping(options)
        self._job: Job | None = None
        self._groups: ProcessGroups | None = None
        self._channels: Channels | None = None
        self._replicas: Replicas | None = None
        self.rings: Rings | None = None
        """This rank's part in the rings over the virtual machines; ``None`` for a single one."""
        self._place: RankPlace | None = None
        self._sockets: Opened = frozenset()
        # Ranks that have all failed together can still complete a checkpoint.
        self._checkpoint_sockets: Opened = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        """The same object: a copy of what refers to it has no connections of its own."""
        return self

    # --- what is connected ---

    @property
    def is_open(self) -> bool:
        """Whether there are connections: a run has started, and has not failed."""
        return self._replicas is not None and dist.is_initialized()

    @property
    def has_met(self) -> bool:
        """Whether this rank has been connected to the others, which then know when it ends."""
        return self._job is not None

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
    def hosts(self) -> list[str]:
        """The name of each rank's host."""
        return _connected(self._grouping.hosts, "ranks")

    @property
    def lost_at(self) -> float | None:
        """The time since which any rank has been gone, by ``time.monotonic``."""
        return self._job.board.lost_at if self._job is not None else None

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
        job = meet(place, self._options, before)
        is_new, self._job, board = self._job is not job, job, job.board
        board.resume()
        with board.watched():
            topology = self._grouping.topology(place, board.watched)
            if is_new:
                self._replicas = None
            # All ranks have the board: sockets opened from now on are shut down after a failure.
            self._arrange(topology, place, job)
        self._sockets |= open_sockets() - before - board.sockets
        board.interrupt = self._interrupt
        # Called in a thread when a rank is gone: ends operations that need all ranks.
        board.give_up = lambda: shut_down(self._checkpoint_sockets)
        board.trouble = self.groups.error
        print_stacks_on_a_signal()
        are_asked_for = os.environ.get(STACKS, "0") not in ("", "0")
        stacks = folder / WITHOUT_LOGGER / FOLDER if are_asked_for else None
        board.watch_for_stalls(self._num_done, self._options.stall_timeout, stacks)

    def regroup(self, topology: Topology) -> None:
        """Makes other virtual machines of the ranks, for this run and later ones. Every rank calls
        this, before a run begins.

        Args:
            topology: of all ranks.
        """
        place, job = self._place, self._job
        assert place is not None
        assert job is not None
        self._grouping.chosen = topology
        self.channels.settle()
        self.replicas.world.settle()
        before = open_sockets()
        with job.board.watched():
            self._arrange(topology, place, job)
        self._sockets |= open_sockets() - before - job.board.sockets

    def _arrange(self, topology: Topology, place: RankPlace, job: Job) -> None:
        """Connects the stages of each virtual machine, unless they are connected."""
        board, known = job.board, self._replicas
        board.name_of = lambda rank: topology.name_of(rank, self.hosts[rank])
        if known is None or not known.topology.has_machines_of(topology):
            known = self._connect(topology, place, job)
        # A run begins in the order that was asked for, whatever an earlier one has found.
        known.reorder(topology)
        board.name_of = lambda rank: known.topology.name_of(rank, self.hosts[rank])

    def _num_done(self) -> int:
        return self._channels.num_done if self._channels is not None else 0

    def _connect(self, topology: Topology, place: RankPlace, job: Job) -> Replicas:
        rank, device, watched = place.rank, place.device, job.board.watched
        backend = backend_of_sums(device, self._options.process_group_backend, watched)
        groups, lanes = job.groups, self._lanes
        if groups is None or (groups.backend, groups.device) != (backend, device):
            groups = ProcessGroups(backend, device, watched, lanes)
        self._groups = job.groups = groups
        vm, stage = topology.place_of(rank)
        hosts = [lanes.between_stages(ranks) for ranks in topology.ranks]
        turns = Turns()
        machine = Channels(topology.ranks[vm], stage, device, watched, hosts[vm], turns)
        machine.share_memory(payload_address(device))
        everyone, of_all = range(place.world_size), hosts[vm]
        if self.rings is not None:
            self.rings.close()
            self.rings = None
        if topology.num_virtual_machines > 1:
            of_all = lanes.between_stages(everyone, has_transfers=False)
            self.rings = Rings(
                lambda lane: lanes.make(everyone, GRADIENTS[lane].name), rank, watched, turns
            )
        # In the order of the ranks: that of the stages may change.
        world = Channels(everyone, rank, device, watched, of_all, turns)
        if topology.num_virtual_machines > 1:
            # So that the links between virtual machines are measured.
            world.share_memory(payload_address(device))
        else:
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

    # --- the end of a run ---

    def pause(self) -> None:
        """Ends a run in order: from now on, a rank whose process ends has not failed.

        Waits until the other ranks have received all messages of this one: when the caller then
        drops the connection, no send is in progress. gloo loses a send that no object refers to.
        """
        if self._channels is not None and self._replicas is not None:
            self._channels.settle()
            self._replicas.world.settle()
        if self._job is not None and not self.has_failed:
            self._job.board.pause()

    def end_in_order(self) -> None:
        """See :meth:`FailureBoard.end_in_order`."""
        if self._job is not None:
            self._job.board.end_in_order()

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
        board = self._job.board if self._job is not None else None
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
        channels, job = self._channels, self._job
        # Ranks that wait for a failed rank notice the failure by themselves.
        if channels is None or job is None or isinstance(exception, StageFailedError):
            return
        if not job.board.is_first(exception):
            job.board.publish_from_thread(exception)
        channels.interrupt_transfers()
        if self._groups is not None:
            # On a device, this rank would wait for operations that the failure ends.
            self._groups.abort()

    def close(self) -> None:
        """Closes all connections, so that no rank waits for this one."""
        if self._channels is not None and self._replicas is not None:
            self._channels.close()
            self._replicas.world.close()
        if self.rings is not None:
            self.rings.close()
        groups = self._groups
        self._channels = self._replicas = self.rings = self._groups = None
        if groups is not None:
            groups.end_all()
        else:
            dist.destroy_process_group()
        self._sockets = self._checkpoint_sockets = frozenset()
        if self._job is not None:
            self._job.board.close()

    def _interrupt(self) -> None:
        """Interrupts the waits of this rank; called in a thread when another rank failed."""
        groups = self._groups
        if groups is not None:
            groups.abort()
        shut_down(self._sockets)
        if self.rings is not None:
            # Lanes may have been opened later.
            shut_down(self.rings.sockets)
