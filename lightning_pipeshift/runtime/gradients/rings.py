"""Sums of gradients over the owners of a layer, without a coordinator (CN112528108B).

Every layer has its own ring, over its owners in the virtual machines. A member that has its own
gradient and its upstream neighbour's partial sum adds the two and passes the sum on at once: no
rank reports that it is ready or gives a start signal, and layers are summed in any order. The
gradient is cut into as many chunks as the ring has members and each chunk starts at another member,
so a member sends and receives 2 (m - 1) / m of the gradient, the bandwidth bound (Patarasuk and
Yuan 2009, section 3). Chunk c is summed in the order of the members c, c + 1, ..., so all members
hold the same bits, in every run.

Many rings are in progress at a time, and the most urgent one sends next (:mod:`..comm.turns`): the
gradients of the first layers are ready last, and needed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.runtime.comm.groups import Group
from lightning_pipeshift.runtime.comm.lane import Watched
from lightning_pipeshift.runtime.comm.sockets import Opened, shut_down
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.comm.turns import MOST_URGENT, Turns, Urgency
from lightning_pipeshift.runtime.comm.waits import complete

# A long gradient is summed in pieces, each in a ring of its own: while one piece is added up,
# another is on the wire.
_PIECE_BYTES = 4 << 20
_MOST_PIECES = 8
_TAGS_PER_PIECE = 4
# What is sent at once: an urgent message waits for at most two blocks of another one.
_BLOCK_BYTES = 1 << 20


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
        make_group: makes the gloo process group of a lane, over all ranks, given the lane's number,
            0 for the most urgent. Nothing else may use it. Every rank calls this.
        rank: this rank.
        watched: the context to communicate in.
    """

    def __init__(self, make_group: Callable[[int], Group], rank: int, watched: Watched) -> None:
        self._make_group = make_group
        self._groups: list[Group] = []
        self._rank = rank
        self.watched = watched
        self.turns = Turns()
        self.open_lanes(1)
        # One for every piece in progress: with fewer threads, two members that have started rings
        # in different orders could wait for each other. A waiting thread costs only its stack.
        self._threads = Threads("ring")

    def open_lanes(self, count: int) -> None:
        """Makes sure that there are so many lanes. Every rank calls this at the same time."""
        while len(self._groups) < count:
            self._groups.append(self._make_group(len(self._groups)))

    @property
    def num_lanes(self) -> int:
        """How many lanes there are."""
        return len(self._groups)

    @property
    def sockets(self) -> Opened:
        """Those of all lanes."""
        return frozenset().union(*(group.sockets for group in self._groups))

    def start(
        self,
        number: int,
        members: Sequence[int],
        buffer: Tensor,
        urgency: Urgency = MOST_URGENT,
    ) -> RingSum:
        """Sums a vector over the members of a ring, in place, without waiting.

        Args:
            number: distinguishes rings that run at the same time; 0 to 8191.
            members: the ranks, in the same order on each; this rank is one of them.
            buffer: a contiguous vector on the CPU, of the same length and type on every member. Its
                values are undefined until the sum has been waited for.
            urgency: that of the messages, the same on every member. If there is no such lane, the
                last one carries them.
        """
        if len(members) == 1:
            return RingSum([])
        length = max(_PIECE_BYTES // buffer.element_size(), -(-len(buffer) // _MOST_PIECES))
        pieces = [
            self._threads.submit(
                partial(self._sum, number * _MOST_PIECES + i, members, piece, urgency)
            )
            for i, piece in enumerate(buffer.split(length))
        ]
        return RingSum(pieces)

    def close(self) -> None:
        """Closes the connections: sums in progress end with an error, here and at the peers."""
        shut_down(self.sockets)
        self._threads.close()

    def _sum(self, number: int, members: Sequence[int], buffer: Tensor, urgency: Urgency) -> None:
        group = self._groups[min(urgency.lane, len(self._groups) - 1)].control
        place, count = members.index(self._rank), len(members)
        upstream, downstream = members[place - 1], members[(place + 1) % count]
        chunks = chunks_of(buffer, count)

        def tag(step: int) -> int:
            return number * _TAGS_PER_PIECE + step % _TAGS_PER_PIECE

        def receive(step: int, into: Tensor) -> list[Any]:
            with self.watched(upstream):
                return [group.recv([block], upstream, tag(step)) for block in _blocks(into)]

        def finish(works: list[Any]) -> None:
            with self.watched(upstream):
                for work in works:
                    complete(work)

        def send(step: int, chunk: Tensor) -> None:
            for block in _blocks(chunk):
                with (
                    self.turns.turn(downstream, urgency, block.nbytes),
                    self.watched(downstream),
                ):
                    complete(group.send([block], downstream, tag(step)))

        # Two buffers in turn, so that the next partial sum travels while this one is added.
        landing = [torch.empty_like(chunks[0]) for _ in range(2)]

        def receive_partial(step: int) -> tuple[Tensor, list[Any]]:
            partial_sum = landing[step % 2][: len(chunks[received_at(step, place, count)])]
            return partial_sum, receive(step, partial_sum)

        # A member's receive is posted before it sends, so no two members wait for each other.
        coming = receive_partial(0)
        for step in range(count - 1):
            send(step, chunks[sent_at(step, place, count)])
            partial_sum, arriving = coming
            finish(arriving)
            if step + 2 < count:
                coming = receive_partial(step + 1)
            chunks[received_at(step, place, count)] += partial_sum
        # Each member has the complete sum of one chunk; these are now passed around the ring.
        for step in range(count - 1, 2 * count - 2):
            arriving = receive(step, chunks[received_at(step, place, count)])
            send(step, chunks[sent_at(step, place, count)])
            finish(arriving)


def _blocks(chunk: Tensor) -> list[Tensor]:
    """The parts of a chunk that are sent one by one; none if it is empty."""
    return list(chunk.split(_BLOCK_BYTES // chunk.element_size())) if len(chunk) else []


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
