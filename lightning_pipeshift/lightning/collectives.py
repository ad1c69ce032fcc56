"""The collective calls of Lightning and of callbacks: every rank calls each of them.

Without a connection they return this rank's own value.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.runtime.liveness.stalls import purpose

T = TypeVar("T")


@purpose("a barrier")
def barrier(connection: Connection) -> None:
    """Waits for all ranks."""
    if connection.is_open:
        connection.replicas.world.sum(torch.zeros(1))


@purpose("a broadcast")
def broadcast(connection: Connection, value: T, source: int) -> T:
    """Returns the value of one rank."""
    if not connection.is_open:
        return value
    world = connection.replicas.world
    mine = value if connection.replicas.rank == source else None
    # Not a message: in the middle of a step, another one may be on its way.
    found: T = world.gather(mine)[source]
    return found


def reduce(connection: Connection, value: Any, operation: Any) -> Any:
    """Returns a tensor reduced over the virtual machines, all stages of which pass the same one;
    anything but a tensor is returned as it is. The operation is torch's, or the name of one.
    """
    if connection.has_failed or connection.replicas.count == 1 or not isinstance(value, Tensor):
        return value
    name = operation if isinstance(operation, str) else str(operation).rpartition(".")[2]
    return connection.replicas.reduce(value, name.lower())


def all_gather(connection: Connection, tensor: Tensor) -> Tensor:
    """Returns the tensors of all virtual machines, along a new first dimension; the tensor itself
    if there is only one virtual machine.
    """
    if connection.has_failed or connection.replicas.count == 1:
        return tensor
    return torch.stack(connection.replicas.gather_tensor(tensor))


@purpose("a decision of all ranks")
def agree(connection: Connection, decision: bool, all_of_them: bool) -> bool:
    """Returns whether all ranks decide so, or any."""
    if not connection.is_open:
        return decision
    votes = connection.replicas.world.sum(torch.tensor([float(decision)]))
    num_ranks = connection.replicas.topology.num_ranks
    return bool(votes == num_ranks) if all_of_them else bool(votes > 0)
