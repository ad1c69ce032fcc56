"""Stages of one virtual machine for the tests: a process group, a board and channels."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipeshift.runtime.channels import Channels, make_groups
from lightning_pipeshift.runtime.failure import FailureBoard


def connect() -> tuple[Channels, FailureBoard]:
    """This rank's connections, from the environment."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    board = FailureBoard(store, rank, world_size, 0)
    ranks = range(world_size)
    groups = make_groups(ranks, "gloo", has_bulk=True)
    channels = Channels(ranks, rank, torch.device("cpu"), "gloo", board.watched, groups)
    return channels, board
