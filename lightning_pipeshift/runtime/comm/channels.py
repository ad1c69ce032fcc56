"""The connections between the stages of one virtual machine.

Values and gradients go through a stage's :mod:`.mailbox`, everything else through a lane. One group
of gloo carries everything, and tags keep messages apart; between GPUs of one host, the mailbox uses
memory that both ranks can reach, where that is possible (see :mod:`.memory_link`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.devices.shared_memory import Address
from lightning_pipeshift.plan.inputs.traffic import BULK, GRADIENTS, PIPELINE
from lightning_pipeshift.runtime.comm.groups import Group, StageGroups
from lightning_pipeshift.runtime.comm.lane import Lane, Paced, Subject, finish, gathered
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.memory_link import ranks_with_shared_memory
from lightning_pipeshift.runtime.comm.sockets import Opened, ends_soon, keep_for_ever, shut_down
from lightning_pipeshift.runtime.comm.turns import BACKGROUND, LaneTraffic, Turns, Urgency
from lightning_pipeshift.runtime.comm.waits import Watched

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
        turns: of this rank's large messages.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        device: torch.device,
        watched: Watched,
        groups: StageGroups,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(ranks, stage, groups.pipeline.control, watched)
        self.device = device
        self._transfers = [
            group if group is not None else Group(None, frozenset())
            for group in (groups.swaps, groups.bulk)
        ]
        self.turns = turns or Turns()
        self.measurements = Lane(ranks, stage, self.control, watched, Subject.MEASUREMENTS)
        """Apart from what is sent in steps."""
        self._pipeline_sockets = groups.pipeline.sockets
        self._sockets = self._pipeline_sockets.union(*(one.sockets for one in self._transfers))
        self.shares_memory_with: frozenset[int] = frozenset()
        """The ranks to which tensors go through memory that both can reach."""
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
        for lane in (self, self.measurements):
            lane.number_stages(ranks, ranks.index(rank))

    def share_memory(self, address: Address | None) -> None:
        """Finds out with which stages this one can share its device's memory; from then on, tensors
        go to them through that. Every stage calls this.

        Args:
            address: that of this process; ``None`` to share no memory.
        """
        addresses = self.gather(address)
        self.shares_memory_with = ranks_with_shared_memory(self, addresses, self.device)

    def mailbox(self, others: Collection[int] | None = None) -> Mailbox:
        """Makes a mailbox for this stage; there is one at a time, and every stage makes it.

        Args:
            others: the stages that it is connected with; by default, all.
        """
        return Mailbox(
            self.control,
            self._members,
            self.ranks,
            self.stage,
            self.watched,
            self.device,
            self.shares_memory_with,
            others,
        )

    def bulk(self, subject: Subject) -> Lane:
        """A lane for large transfers that are not urgent: tensors wait while any other large
        message does. Only one thread at a time may use it for the same stage and direction.

        Args:
            subject: of its messages; different lanes do not wait for each other.
        """
        group = self._transfers[1]
        if group.control is None:
            # Ranks of several virtual machines have no connections for it.
            group = Group(self.control, self._pipeline_sockets)
        return self._transfer_lane(group, subject, BACKGROUND)

    def swaps(self, subject: Subject, comes_back: bool) -> Lane:
        """A lane for swapped tensors, as :meth:`bulk`.

        Args:
            subject: of its messages.
            comes_back: whether it carries those that a backward needs next. They go before all
                gradients; those that are swapped out, behind them.
        """
        urgency = Urgency(_BACK if comes_back else _OUT)
        return self._transfer_lane(self._transfers[not comes_back], subject, urgency)

    def _transfer_lane(self, group: Group, subject: Subject, urgency: Urgency) -> Lane:
        paced = Paced(self.turns, urgency)
        return Lane(self.ranks, self.stage, group.control, self.watched, subject, paced)

    @property
    def traffic(self) -> dict[str, LaneTraffic]:
        """Counts of the blocks that this rank has sent on each lane, by its name."""
        return {lane_name(lane): traffic for lane, traffic in self.turns.traffic.items()}

    @property
    def payload_sockets(self) -> Opened:
        """The connections that values travel on, if gloo carries them all."""
        return frozenset() if self.shares_memory_with else self._pipeline_sockets

    def interrupt_transfers(self) -> None:
        """Ends the connections of :meth:`bulk` and :meth:`swaps`, here and for the peers."""
        for group in self._transfers:
            shut_down(group.sockets)

    def close(self) -> None:
        """Closes the connections; peers that wait on them see an error at once."""
        shut_down(self._sockets)
        if not all(map(ends_soon, self._under_way)):
            keep_for_ever(self.control)
        for lane in (self.measurements, self):
            lane.release()
        self._transfers = []

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

    def gather(self, obj: Any) -> list[Any]:
        """Every stage calls this, and gets what each of them passed, in stage order.

        Args:
            obj: picklable.
        """
        if self.num_stages == 1:
            return [obj]
        found = gathered(obj, self.control, self.watched, self._note_posted)
        return [found[member] for member in self._members]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of a CPU vector over the stages, with the same bits on each."""
        return self.post_sum(vector).wait()

    def post_sum(self, vector: Tensor) -> PostedSum:
        """Begins :meth:`sum` without waiting for it."""
        work = None
        if self.num_stages > 1:
            with self.watched(None):
                work = dist.all_reduce(vector, group=self.control, async_op=True)
            self._note_posted(work)
        return PostedSum(vector, work, self.watched)

    def _note_posted(self, work: Any) -> None:
        self._under_way = [one for one in self._under_way if not one.is_completed()]
        self._under_way.append(work)
