"""The few messages between virtual machines other than gradients. There is no central rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.comm.channels import Channels


class Replicas:
    """One rank's view of all virtual machines.

    A virtual machine's *speaker* is its last stage, which has a step's result. Speakers exchange
    messages with each other directly.

    Args:
        topology: the position of each rank.
        rank: this rank.
        world: connections between all ranks, whose stages are the ranks.
        machine: connections between the stages of this rank's virtual machine.
    """

    def __init__(self, topology: Topology, rank: int, world: Channels, machine: Channels) -> None:
        self.rank = rank
        self.vm, _ = topology.place_of(rank)
        self.world = world
        self._machine = machine
        self._take(topology)

    def _take(self, topology: Topology) -> None:
        self.topology = topology
        self._speakers = [ranks[-1] for ranks in topology.ranks]

    def reorder(self, topology: Topology) -> None:
        """Gives the ranks of each virtual machine other stages. Every rank calls this, between two
        steps.

        Args:
            topology: the same ranks in each virtual machine, in another order.
        """
        if topology != self.topology:
            self._machine.reorder(topology.ranks)
            self._take(topology)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is the last stage of its virtual machine."""
        return self.rank in self._speakers

    @property
    def count(self) -> int:
        """How many virtual machines there are."""
        return self.topology.num_virtual_machines

    def exchange(self, mine: Any) -> list[Any]:
        """The value that each virtual machine's speaker passed, in order. Speakers call this."""
        if self.count == 1:
            return [mine]
        assert self.rank in self._speakers
        self.world.settle()
        for speaker in self._speakers:
            if speaker != self.rank:
                self.world.send_object(mine, speaker)
        return [
            mine if speaker == self.rank else self.world.receive_object(speaker)
            for speaker in self._speakers
        ]

    def gather(self, mine: Any) -> list[Any]:
        """The value that each virtual machine's speaker passed, in order. Every rank calls this."""
        if self.count == 1:
            return [mine]
        is_speaker = self.rank in self._speakers
        everything = self.exchange(mine) if is_speaker else None
        found: list[Any] = self._machine.share_object(everything, self._machine.num_stages - 1)
        return found

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Each virtual machine's tensor, on the device of ``tensor``. Every rank calls this."""
        if self.count == 1:
            return [tensor]
        return [part.to(tensor.device) for part in self.gather(tensor.detach().cpu())]

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduces a value over the virtual machines, with the same bits on each. Every rank calls
        this.

        Args:
            tensor: this virtual machine's, the same on each of its stages.
            operation: ``"sum"``, ``"mean"`` (or ``"avg"``), ``"max"``, ``"min"`` or ``"product"``.

        Raises:
            ConfigurationError: an operation of another name.
        """
        if operation not in _REDUCTIONS:
            raise ConfigurationError(
                f"reduce_op={operation!r}: allowed are {', '.join(sorted(_REDUCTIONS))}."
            )
        if self.count == 1:
            return tensor
        stacked = torch.stack(self.gather_tensor(tensor))
        if operation in ("mean", "avg") and not stacked.is_floating_point():
            stacked = stacked.float()
        reduced: Tensor = _REDUCTIONS[operation](stacked)
        return reduced


_REDUCTIONS: dict[str, Any] = {
    "sum": lambda stacked: stacked.sum(dim=0),
    "mean": lambda stacked: stacked.mean(dim=0),
    "avg": lambda stacked: stacked.mean(dim=0),
    "max": lambda stacked: stacked.amax(dim=0),
    "min": lambda stacked: stacked.amin(dim=0),
    "product": lambda stacked: stacked.prod(dim=0),
}
