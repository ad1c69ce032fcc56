"""Stages of one virtual machine for the tests: a process group, a board and channels; and what
stands in for GPUs where there are none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipeshift.devices.shared_memory import address_here
from lightning_pipeshift.lightning import connection
from lightning_pipeshift.runtime.comm import process_groups
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.comm.mesh import connect_all
from lightning_pipeshift.runtime.comm.sockets import shut_down
from lightning_pipeshift.runtime.liveness.failure import FailureBoard

CPU = torch.device("cpu")

_KEPT: list[Channels] = []
"""Gloo drops a send whose memory is freed before the other end has posted its receive, which then
waits for good: connections are kept until the rank has ended, not until its function returns."""


def connect(shares_memory: bool = False) -> tuple[Channels, FailureBoard]:
    """This rank's connections, from the environment.

    Args:
        shares_memory: whether tensors go through memory that the ranks share: on a CPU, files in
            memory stand in for a GPU's.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    mesh = connect_all(store, rank, world_size, address, port)
    board = FailureBoard(rank, mesh)
    ranks = range(world_size)
    groups = Lanes().between_stages(ranks)
    channels = Channels(ranks, rank, CPU, board.watched, groups)
    channels.share_memory(address_here(CPU) if shares_memory else None)
    assert groups.bulk is not None
    sockets = groups.pipeline.sockets | groups.bulk.sockets
    board.interrupt = lambda: shut_down(sockets)
    _KEPT.append(channels)
    return channels, board


def let_gloo_stand_in() -> None:
    """Makes gradients be summed in groups of the devices' own backend, and these run on gloo, in
    this process from here on.
    """
    new_group = dist.new_group

    def made(ranks: list[int], backend: str, timeout: timedelta, pg_options: Any = None) -> Any:
        return new_group(ranks, backend="gloo", timeout=timeout)

    dist.new_group = made  # type: ignore[assignment]
    process_groups.nccl_options = lambda *_: None
    vars(connection)["backend_of_sums"] = lambda *_: "nccl"


class Kernels:
    """A device on which kernels of every group wait for other ranks until they are told to leave.

    As with NCCL, aborting a communicator tells its kernels to leave, and then frees memory, which
    waits for the kernels of all communicators.
    """

    def __init__(self) -> None:
        self._waiting: set[Any] = set()
        self._changed = threading.Condition()

    @property
    def are_waiting(self) -> bool:
        """Whether any kernels wait for other ranks."""
        return bool(self._waiting)

    def abort_of(self, group: Any, device: torch.device) -> Callable[[], None] | None:
        """In the place of the function of :mod:`process_groups`, called for each new group."""
        if group in (dist.GroupMember.NON_GROUP_MEMBER, dist.group.WORLD):
            return None
        self._waiting.add(group)
        return partial(self._abort, group)

    def _abort(self, group: Any) -> None:
        with self._changed:
            self._waiting.discard(group)
            self._changed.notify_all()
        self.synchronize()

    def synchronize(self) -> None:
        """Waits for all kernels, as ``tensor.cpu()`` does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
