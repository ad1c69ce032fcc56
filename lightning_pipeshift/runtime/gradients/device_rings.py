"""The rings of :mod:`lightning_pipeshift.runtime.gradients.rings` on NCCL.

NCCL has no tags and matches by order, so all members have to begin their rings in one order. They
need no messages for that: it is the order in which backwards pass the layers, the last layer first.
The transfers and the additions are queued on a separate stream, and the host does not wait. Each
lane has a communicator and a stream of its own, so that the sums of layers that the next forward
needs first do not run behind those of others. A vector is not split over lanes, as on gloo: each
part would be a sequence of kernels of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.devices.streams import Event, keep_for_stream, record_event, side_stream
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.turns import MOST_URGENT, Urgencies, lane_of
from lightning_pipeshift.runtime.comm.waits import Watched
from lightning_pipeshift.runtime.gradients.rings import chunks_of, received_at, sent_at


class DeviceRings:
    """One rank's part in all rings, on NCCL.

    Args:
        groups: have one group for each set of owners.
        rank: this rank.
        watched: the context to communicate in.
    """

    def __init__(self, groups: ProcessGroups, rank: int, watched: Watched) -> None:
        self._groups = groups
        self._rank = rank
        self._watched = watched

    def start(
        self,
        number: int,
        members: Sequence[int],
        buffer: Tensor,
        urgencies: Urgencies = MOST_URGENT,
    ) -> Event:
        """Queues the sum of a vector on the GPU, in place, over the members. Returns the event of
        its end.
        """
        lane = lane_of(urgencies)
        group = self._groups.group(members, lane)
        place, count = members.index(self._rank), len(members)
        upstream, downstream = members[place - 1], members[(place + 1) % count]
        chunks = chunks_of(buffer, count)
        device = self._groups.device
        is_computed = record_event(device)
        with side_stream(device, f"rings {lane}"), self._watched(None):
            is_computed.wait()
            keep_for_stream(buffer)
            landing = torch.empty_like(chunks[0])
            for step in range(2 * count - 2):
                outgoing, chunk = (
                    chunks[sent_at(step, place, count)],
                    chunks[received_at(step, place, count)],
                )
                sums = step < count - 1
                incoming = landing[: len(chunk)] if sums else chunk
                transfers = [
                    dist.P2POp(dist.isend, outgoing, downstream, group),
                    dist.P2POp(dist.irecv, incoming, upstream, group),
                ]
                # Every member skips the same empty chunks.
                transfers = [transfer for transfer in transfers if len(transfer.tensor)]
                for work in dist.batch_isend_irecv(transfers) if transfers else []:
                    work.wait()
                if sums:
                    chunk += incoming
            return record_event(device)
