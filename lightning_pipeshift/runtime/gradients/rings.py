"""Sums of gradients over the owners of a layer, without a coordinator (CN112528108B).

Every layer has its own ring, over its owners in the virtual machines. A member that has its own
gradient and its upstream neighbour's partial sum adds the two and passes the sum on at once: no
rank reports that it is ready or gives a start signal, and layers are summed in any order. The
gradient is cut into as many chunks as the ring has members and each chunk starts at another member,
so a member sends and receives 2 (m - 1) / m of the gradient, the bandwidth bound (Patarasuk and
Yuan 2009, section 3). Chunk c is summed in the order of the members c, c + 1, ..., so all members
hold the same bits, in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.runtime.comm.groups import Group
from lightning_pipeshift.runtime.comm.lane import Watched
from lightning_pipeshift.runtime.comm.sockets import shut_down
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.comm.waits import complete

# A long gradient is summed in pieces, each in a ring of its own: while one piece is added up,
# another is on the wire.
_PIECE_BYTES = 4 << 20
_MOST_PIECES = 8
_TAGS_PER_PIECE = 4


class RingSum:
    """A sum in progress."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def wait(self) -> None:
        """Returns when the sum is complete.

        Raises:
            StageFailedError: a member of the ring ended before that.
        """
        for piece in self._pieces:
            piece.result()
        self._pieces = []

    def query(self) -> bool:
        """Whether the sum is complete, or has failed."""
        return all(piece.done() for piece in self._pieces)


class Rings:
    """One rank's part in all rings, on gloo.

    Args:
        group: a gloo process group over all ranks. Nothing else may use it.
        rank: this rank.
        watched: the context to communicate in.
    """

    def __init__(self, group: Group, rank: int, watched: Watched) -> None:
        self._group = group.control
        self._sockets = group.sockets
        self._rank = rank
        self.watched = watched
        # One for every piece in progress: with fewer threads, two members that have started rings
        # in different orders could wait for each other. A waiting thread costs only its stack.
        self._threads = Threads("ring")

    def start(self, number: int, members: Sequence[int], buffer: Tensor) -> RingSum:
        """Sums a vector over the members of a ring, in place, without waiting.

        Args:
            number: distinguishes rings that run at the same time; 0 to 8191.
            members: the ranks, in the same order on each; this rank is one of them.
            buffer: a contiguous vector on the CPU, of the same length and type on every member. Its
                values are undefined until the sum has been waited for.
        """
        if len(members) == 1:
            return RingSum([])
        length = max(_PIECE_BYTES // buffer.element_size(), -(-len(buffer) // _MOST_PIECES))
        pieces = [
            self._threads.submit(partial(self._sum, number * _MOST_PIECES + i, members, piece))
            for i, piece in enumerate(buffer.split(length))
        ]
        return RingSum(pieces)

    def close(self) -> None:
        """Closes the connections: sums in progress end with an error, here and at the peers."""
        shut_down(self._sockets)
        self._threads.close()

    def _sum(self, number: int, members: Sequence[int], buffer: Tensor) -> None:
        place, count = members.index(self._rank), len(members)
        upstream, downstream = members[place - 1], members[(place + 1) % count]
        chunks = chunks_of(buffer, count)

        def tag(step: int) -> int:
            return number * _TAGS_PER_PIECE + step % _TAGS_PER_PIECE

        def receive(step: int, into: Tensor) -> Any:
            with self.watched(upstream):
                return self._group.recv([into], upstream, tag(step)) if len(into) else None

        def send(step: int, chunk: Tensor) -> Any:
            with self.watched(downstream):
                return self._group.send([chunk], downstream, tag(step)) if len(chunk) else None

        def finish(work: Any, peer: int) -> None:
            if work is not None:
                with self.watched(peer):
                    complete(work)

        # Two buffers in turn, so that the next partial sum travels while this one is added.
        landing = [torch.empty_like(chunks[0]) for _ in range(2)]

        def receive_partial(step: int) -> tuple[Tensor, Any]:
            partial_sum = landing[step % 2][: len(chunks[received_at(step, place, count)])]
            return partial_sum, receive(step, partial_sum)

        coming = receive_partial(0)
        sent = []
        for step in range(count - 1):
            sent.append(send(step, chunks[sent_at(step, place, count)]))
            partial_sum, arriving = coming
            if step + 2 < count:
                coming = receive_partial(step + 1)
            finish(arriving, upstream)
            chunks[received_at(step, place, count)] += partial_sum
        # Each member has the complete sum of one chunk; these are now passed around the ring. A
        # chunk that is overwritten now was sent on `count - 1` steps ago.
        for step in range(count - 1, 2 * count - 2):
            finish(sent[step - count + 1], downstream)
            arriving = receive(step, chunks[received_at(step, place, count)])
            sent.append(send(step, chunks[sent_at(step, place, count)]))
            finish(arriving, upstream)
        for work in sent[count - 1 :]:
            finish(work, downstream)


def chunks_of(buffer: Tensor, count: int) -> list[Tensor]:
    """Splits a vector into as many chunks as a ring has members, the longer ones first."""
    sizes = [len(range(chunk, len(buffer), count)) for chunk in range(count)]
    return list(buffer.split(sizes))


def sent_at(step: int, place: int, count: int) -> int:
    """Returns the chunk that a member sends in a step. There are ``2 (count - 1)`` steps: first the
    partial sums are passed around the ring, and then the complete ones.

    Args:
        step: from 0.
        place: the member's index.
        count: how many members there are.
    """
    return (place - step) % count


def received_at(step: int, place: int, count: int) -> int:
    """Returns the chunk that a member receives in a step: see :func:`sent_at`."""
    return sent_at(step, place - 1, count)
