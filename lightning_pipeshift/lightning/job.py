"""A job: torch's default process group, and the connections by which its ranks notice failures.

It outlasts a strategy, as one process may run several strategies one after another.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_pipeshift.compat.lightning_private import init_dist_connection
from lightning_pipeshift.compat.torch_distributed_private import default_store
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.runtime.comm.backends import backends
from lightning_pipeshift.runtime.comm.meeting import store_of_this_start
from lightning_pipeshift.runtime.comm.mesh import connect_all
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, nccl_environment
from lightning_pipeshift.runtime.comm.sockets import Opened, give_up_after, open_sockets, shut_down
from lightning_pipeshift.runtime.liveness.failure import FailureBoard


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


@dataclass
class Job:
    """State shared by all strategies that a job's ranks run one after another.

    Args:
        world: torch's default process group.
        board: reports failures.
        groups: the groups in addition to the default one.
    """

    world: weakref.ref[Any]
    board: FailureBoard
    groups: ProcessGroups | None = None


_jobs: list[Job] = []


def meet(place: RankPlace, options: Options, before: Opened) -> Job:
    """Returns the job of torch's default process group. If there is none, connects the ranks, and
    initialises torch.distributed where the user has not. Every rank calls this.

    Args:
        place: this process.
        options: the user's.
        before: the sockets that were open before the ranks connected.
    """
    if not dist.is_initialized():
        board = _initialise(place, options, before)
    elif known := _job_of(dist.group.WORLD):
        board = known.board
    else:
        board = _make_board(place, options, default_store(), before)
    job = _job_of(dist.group.WORLD) or Job(weakref.ref(dist.group.WORLD), board)
    for other in _jobs:
        if other.world() is not job.world():
            other.board.close()
    _jobs[:] = [job]
    return job


def _job_of(world: Any) -> Job | None:
    return next((job for job in _jobs if job.world() is world and job.board.is_open), None)


def _initialise(place: RankPlace, options: Options, before: Opened) -> FailureBoard:
    environment = place.environment
    store = store_of_this_start(
        place.rank,
        place.world_size,
        environment.main_address,
        environment.main_port,
        options.timeout or default_pg_timeout,
    )
    board = _make_board(place, options, store, before)
    # From now on, heartbeats tell.
    give_up_after(open_sockets() - before - board.sockets, 0)
    with board.watched(), nccl_environment():
        init_dist_connection(
            environment,
            backends(place.device, options.process_group_backend),
            global_rank=place.rank,
            world_size=place.world_size,
            timeout=options.timeout,
            store=store,
        )
    return board


def _make_board(place: RankPlace, options: Options, store: Any, before: Opened) -> FailureBoard:
    mesh = connect_all(
        dist.PrefixStore("pipeshift/peers", store),
        place.rank,
        place.world_size,
        place.environment.main_address,
        place.environment.main_port,
    )
    board = FailureBoard(place.rank, mesh, options.heartbeat_timeout)
    # What is opened up to the end of the setup is for this job.
    board.interrupt = lambda: shut_down(open_sockets() - before - board.sockets)
    return board
