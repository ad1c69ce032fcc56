"""Stages of one virtual machine for the tests: a process group, a board and channels."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipeshift.runtime.channels import Channels, make_groups
from lightning_pipeshift.runtime.failure import FailureBoard
from lightning_pipeshift.runtime.mesh import connect_all
from lightning_pipeshift.runtime.sockets import shut_down


def connect() -> tuple[Channels, FailureBoard]:
    """This rank's connections, from the environment."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    mesh = connect_all(store, rank, world_size, address, port, timedelta(seconds=60))
    board = FailureBoard(rank, mesh)
    ranks = range(world_size)
    groups = make_groups(ranks, has_bulk=True)
    channels = Channels(ranks, rank, torch.device("cpu"), board.watched, groups)
    board.interrupt = lambda: shut_down(groups.sockets)
    return channels, board
