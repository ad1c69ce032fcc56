"""The connections between the stages of one virtual machine.

Values and their gradients go through a stage's :mod:`.mailbox`, everything else through a lane. On
gloo, one group carries everything and tags keep messages apart; between GPUs of one host, tensors
go through memory that both ranks can reach, where that is possible (see :mod:`.memory_link`). NCCL
has no tags and matches by order, and an operation that waits would block those after it: gradients
of shared parameters, and measurements, have groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.devices.shared_memory import Address
from lightning_pipeshift.plan.inputs.traffic import BULK, GRADIENTS, PIPELINE
from lightning_pipeshift.runtime.comm.groups import Group, StageGroups
from lightning_pipeshift.runtime.comm.lane import Lane, Paced, as_bytes, finish
from lightning_pipeshift.runtime.comm.memory_link import (
    MemoryEnd,
    MemoryLink,
    ranks_with_shared_memory,
)
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, Purpose
from lightning_pipeshift.runtime.comm.sockets import Opened, ends_soon, keep_for_ever, shut_down
from lightning_pipeshift.runtime.comm.turns import BACKGROUND, LaneTraffic, Turns, Urgency
from lightning_pipeshift.runtime.comm.waits import Watched, complete

# The numbers of lanes.
_MEASUREMENTS = 8
_SHARED = 9
# Two for each purpose, behind those of all other lanes: a record's are 10 and 11.
_FIRST_OF_LINKS = 16
# The urgency of swapped tensors that come back, before all gradients, and of those that are swapped
# out, behind them.
_BACK = -1
_OUT = BACKGROUND.lane - 1


def lane_name(number: int) -> str:
    """The name of the lane with which a block competes, by the lane's number in its urgency."""
    names = {
        _BACK: f"{PIPELINE.name} (swaps)",
        _OUT: f"{BULK.name} (swaps)",
        BACKGROUND.lane: BULK.name,
    }
    return names.get(number) or GRADIENTS[number].name


@dataclass
class PostedSum:
    """A sum over all stages that has begun."""

    vector: Tensor
    work: Any
    watched: Watched

    def wait(self) -> Tensor:
        """The sum; waits for it."""
        if self.work is not None:
            finish(self.work, self.watched)
        return self.vector


class Channels(Lane):
    """One stage's connections.

    Args:
        ranks: the global ranks of the virtual machine's stages, in stage order.
        stage: this stage.
        device: where tensors live.
        watched: the context to communicate in.
        groups: those of ``ranks``.
        devices: carry tensors from device to device. By default, and with gloo, tensors on a GPU
            go through host memory, or through memory that two ranks share: see
            :meth:`share_memory`.
        turns: of this rank's large messages.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        device: torch.device,
        watched: Watched,
        groups: StageGroups,
        devices: ProcessGroups | None = None,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(ranks, stage, groups.pipeline.control, watched)
        self.device = device
        self._devices = devices if devices is not None and devices.backend != "gloo" else None
        self._transfers = [
            group if group is not None else Group(None, frozenset())
            for group in (groups.swaps, groups.bulk)
        ]
        self.turns = turns or Turns()
        self.measurements = Lane(ranks, stage, self.control, watched, _MEASUREMENTS)
        """Apart from what is sent in steps."""
        self.shared = Lane(ranks, stage, self.control, watched, _SHARED)
        """For the gradients of parameters that several stages of an asynchronous pipeline hold."""
        self._pipeline_sockets = groups.pipeline.sockets
        self._sockets = self._pipeline_sockets.union(*(one.sockets for one in self._transfers))
        self.shares_memory_with: frozenset[int] = frozenset()
        """The ranks to which tensors go through memory that both can reach."""
        self._links: dict[tuple[Purpose, int], MemoryLink] = {}
        self.num_done = 0
        """How many actions this stage has completed."""
        # Collectives that have started and may not be complete yet.
        self._under_way: list[Any] = []

    def reorder(self, machines: Sequence[Sequence[int]]) -> None:
        """Gives the ranks of each virtual machine other stages. Every rank of the job calls this,
        when no payload is under way.

        Args:
            machines: the ranks of each virtual machine, in their new stage order.
        """
        rank = self.ranks[self.stage]
        (ranks,) = (ranks for ranks in machines if rank in ranks)
        lanes = [lane for link in self._links.values() for lane in (link.messages, link.answers)]
        for lane in (self, self.measurements, self.shared, *lanes):
            lane.number_stages(ranks, ranks.index(rank))

    @property
    def backend(self) -> str:
        """The backend that carries payloads: ``"gloo"`` or ``"nccl"``."""
        return "gloo" if self._devices is None else self._devices.backend

    def share_memory(self, address: Address | None) -> None:
        """Finds out with which stages this one can share its device's memory; from then on, tensors
        go to them through that. Every stage calls this.

        Args:
            address: that of this process; ``None`` to share no memory.
        """
        if self._devices is None:
            self.shares_memory_with = ranks_with_shared_memory(self, address, self.device)

    def is_direct(self, stage: int) -> bool:
        """Whether tensors of a device go to another stage without passing through host memory."""
        return self._devices is not None or self.ranks[stage] in self.shares_memory_with

    def _link(self, stage: int, purpose: Purpose) -> MemoryLink | None:
        """Returns the link to a stage; ``None`` if no memory is shared with it."""
        rank = self.ranks[stage]
        if rank not in self.shares_memory_with:
            return None
        link = self._links.get((purpose, rank))
        if link is None:
            first = _FIRST_OF_LINKS + 2 * list(Purpose).index(purpose)
            messages, answers = (
                Lane(self.ranks, self.stage, self.control, self.watched, number)
                for number in (first, first + 1)
            )
            link = MemoryLink(MemoryEnd(self.device), messages, answers, rank)
            self._links[purpose, rank] = link
        return link

    def bulk(self, number: int = 0) -> Lane:
        """A lane for large transfers that are not urgent: tensors wait while any other large
        message does. Only one thread at a time may use it for the same stage and direction.

        Args:
            number: the lane's number; different lanes do not wait for each other.
        """
        group = self._transfers[1]
        if group.control is None:
            # Ranks of several virtual machines have no connections for it.
            group = Group(self.control, self._pipeline_sockets)
        return self._transfer_lane(group, number, BACKGROUND)

    def swaps(self, number: int, comes_back: bool) -> Lane:
        """A lane for swapped tensors, as :meth:`bulk`.

        Args:
            number: the lane's number.
            comes_back: whether it carries those that a backward needs next. They go before all
                gradients; those that are swapped out, behind them.
        """
        urgency = Urgency(_BACK if comes_back else _OUT)
        return self._transfer_lane(self._transfers[not comes_back], number, urgency)

    def _transfer_lane(self, group: Group, number: int, urgency: Urgency) -> Lane:
        paced = Paced(self.turns, urgency)
        return Lane(self.ranks, self.stage, group.control, self.watched, number, paced)

    @property
    def traffic(self) -> dict[str, LaneTraffic]:
        """Counts of the blocks that this rank has sent on each lane, by its name."""
        return {lane_name(lane): traffic for lane, traffic in self.turns.traffic.items()}

    @property
    def payload_sockets(self) -> Opened:
        """The connections that payloads travel on, if gloo carries them all."""
        is_gloo = self._devices is None and not self.shares_memory_with
        return self._pipeline_sockets if is_gloo else frozenset()

    def interrupt_transfers(self) -> None:
        """Ends the connections of :meth:`bulk` and :meth:`swaps`, here and for the peers."""
        for group in self._transfers:
            shut_down(group.sockets)

    def close(self) -> None:
        """Closes the connections; peers that wait on them see an error at once."""
        shut_down(self._sockets)
        if not all(map(ends_soon, self._under_way)):
            keep_for_ever(self.control)
        self._links.clear()
        for lane in (self.measurements, self.shared, self):
            lane.release()
        self._transfers = []

    # --- single tensors ---

    def send_on_device(self, tensor: Tensor, to: int, purpose: Purpose = Purpose.SHARED) -> None:
        """Sends one tensor to any stage, in the group that the two stages have for a purpose; from
        device to device if payloads are sent so. Kernels queued after this call may change the
        tensor.
        """
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        link = self._link(to, purpose)
        if link is not None:
            # The other stage has received the one before, or will before anything else.
            link.settle()
            link.send([flat])
        elif self._devices is None:
            self.send_tensor(tensor, to)
        elif flat.numel():
            line = self._devices.line(purpose, self.ranks[self.stage], self.ranks[to])
            work = self._post_send(flat, to, line, 0)
            with self.watched(self.ranks[to]):
                complete(work)

    def post_on_device(self, tensor: Tensor, to: int) -> None:
        """As :meth:`send_on_device`, without waiting for the other stage; from the memory of a CPU
        it waits, rather than take memory for a copy.
        """
        if self.is_direct(to) or tensor.device.type == "cpu":
            self.send_on_device(tensor, to)
            return
        self._object_sends.append(self._post_tensor(tensor, to))

    def receive_on_device(
        self, like: Tensor, source: int, purpose: Purpose = Purpose.SHARED
    ) -> Tensor:
        """Returns the tensor that stage ``source`` sends with :meth:`send_on_device`, of the shape
        and type of ``like``, on this stage's device.
        """
        link = self._link(source, purpose)
        if link is None and self._devices is None:
            return self.receive_tensor(like, source).to(self.device)
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if link is not None:
            link.receive([tensor.view(-1)])
        elif tensor.numel():
            assert self._devices is not None
            rank, peer = self.ranks[self.stage], self.ranks[source]
            group, member = self._devices.line(purpose, rank, peer)
            with self.watched(peer):
                complete(group.recv([as_bytes(tensor.view(-1))], member, 0))
        return tensor

    @contextmanager
    def links(self, pairs: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Context in which pairs of stages have groups to measure their links. Every rank of the
        job calls this.
        """
        ranks = [tuple(self.ranks[stage] for stage in pair) for pair in pairs]
        if self._devices is not None:
            self._devices.want(Purpose.LINKS, ranks)
        yield
        for key in [key for key in self._links if key[0] is Purpose.LINKS]:
            link = self._links.pop(key)
            link.settle()
            link.answers.settle()
            link.end.close()
        if self._devices is not None:
            self._devices.want(Purpose.LINKS, [])

    def settle(self, all_but: int = 0) -> None:
        """See :class:`Lane`."""
        super().settle(all_but)
        for link in self._links.values():
            link.answers.settle()

    # --- all stages together ---

    def share_object(self, obj: Any, source: int) -> Any:
        """Every stage calls this; every stage gets the object of ``source``.

        Args:
            obj: picklable; only that of ``source`` counts.
            source: a stage.
        """
        if self.stage != source:
            return self.receive_object(source)
        self.settle()
        for to in range(self.num_stages):
            if to != source:
                self.send_object(obj, to)
        return obj

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """Every stage calls this; stage 0 gets the objects of all stages, in stage order, all
        others ``None``.
        """
        if self.stage:
            self.send_object(obj, 0)
            return None
        return [obj, *(self.receive_object(stage) for stage in range(1, self.num_stages))]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of a CPU vector over the stages, with the same bits on each."""
        return self.post_sum(vector).wait()

    def post_sum(self, vector: Tensor) -> PostedSum:
        """Begins :meth:`sum` without waiting for it."""
        work = None
        if self.num_stages > 1:
            with self.watched(None):
                work = dist.all_reduce(vector, group=self.control, async_op=True)
            self._under_way = [one for one in self._under_way if not one.is_completed()]
            self._under_way.append(work)
        return PostedSum(vector, work, self.watched)

    def gather_int(self, value: int) -> list[int]:
        """Every stage's value, in stage order."""
        if self.num_stages == 1:
            return [value]
        parts = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        own = torch.tensor([value], dtype=torch.int64)
        with self.watched(None):
            work = dist.all_gather(parts, own, group=self.control, async_op=True)
        self._under_way.append(work)
        finish(work, self.watched)
        return [int(parts[member]) for member in self._members]
