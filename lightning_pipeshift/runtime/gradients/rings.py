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

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.runtime.comm.blocks import blocks_of, send_blocks
from lightning_pipeshift.runtime.comm.groups import Group
from lightning_pipeshift.runtime.comm.sockets import Opened, shut_down
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.comm.turns import MOST_URGENT, Turns, Urgencies, Urgency
from lightning_pipeshift.runtime.comm.waits import Watched, complete
from lightning_pipeshift.runtime.gradients.lanes import MOST_PIECES, num_pieces
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What


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
        turns: of this rank's large messages.
    """

    def __init__(
        self,
        make_group: Callable[[int], Group],
        rank: int,
        watched: Watched,
        turns: Turns | None = None,
    ) -> None:
        self._make_group = make_group
        self._groups: list[Group] = []
        self._rank = rank
        self.watched = watched
        self._turns = turns or Turns()
        self.recorder: Recorder | None = None
        """Takes notes of the rings."""
        self.open_lanes(1)
        # One for every piece in progress: with fewer threads, two members that have started rings
        # in different orders could wait for each other. A waiting thread costs only its stack.
        self._threads = Threads("ring")

    def open_lanes(self, count: int) -> None:
        """Makes sure that there are so many lanes. Every rank calls this at the same time."""
        while len(self._groups) < count:
            self._groups.append(self._make_group(len(self._groups)))

    @property
    def sockets(self) -> Opened:
        """Those of all lanes."""
        return frozenset().union(*(group.sockets for group in self._groups))

    def start(
        self,
        number: int,
        members: Sequence[int],
        buffer: Tensor,
        urgencies: Urgencies = MOST_URGENT,
    ) -> RingSum:
        """Sums a vector over the members of a ring, in place, without waiting.

        Args:
            number: distinguishes rings that run at the same time; 0 to 8191.
            members: the ranks, in the same order on each; this rank is one of them.
            buffer: a contiguous vector on the CPU, of the same length and type on every member. Its
                values are undefined until the sum has been waited for.
            urgencies: those of the messages, the same on every member. If there is no such lane,
                the last one carries them.
        """
        if len(members) == 1:
            return RingSum([])
        # In pieces, each in a ring of its own: while one piece is added up, another is on the wire.
        # Where they begin does not depend on the lanes, or the plan would change bits.
        pieces = buffer.tensor_split(num_pieces(buffer.nbytes))
        ends = [end for end, _ in urgencies]
        downstream = members[(members.index(self._rank) + 1) % len(members)]
        running = []
        for i, piece in enumerate(pieces):
            _, urgency = urgencies[bisect_right(ends, (i + 0.5) / len(pieces))]
            noted = self._noted(What.RING, str(number), downstream, piece.nbytes)
            go_round = partial(self._sum, number * MOST_PIECES + i, members, piece, urgency, noted)
            running.append(self._threads.submit(go_round))
        return RingSum(running)

    def _noted(self, *mark: Any) -> ExitStack:
        """Begins to record a ring, if this step is recorded; ends with the context."""
        stack, recorder, begin = ExitStack(), self.recorder, time.perf_counter()
        if recorder is not None:
            stack.enter_context(recorder.lasting(*mark))
            return stack

        def add() -> None:
            what, name, *others = mark
            if self.recorder is not None:
                # The ring began in the step before the recorded one.
                self.recorder.add(what, name, begin, time.perf_counter(), *others)

        stack.callback(add)
        return stack

    def close(self) -> None:
        """Closes the connections: sums in progress end with an error, here and at the peers."""
        shut_down(self.sockets)
        self._threads.close()

    def _sum(
        self,
        number: int,
        members: Sequence[int],
        buffer: Tensor,
        urgency: Urgency,
        noted: AbstractContextManager[Any],
    ) -> None:
        with noted:
            self._go_round(number, members, buffer, urgency)

    def _go_round(
        self, number: int, members: Sequence[int], buffer: Tensor, urgency: Urgency
    ) -> None:
        group = self._groups[min(urgency.lane, len(self._groups) - 1)].control
        place, count = members.index(self._rank), len(members)
        upstream, downstream = members[place - 1], members[(place + 1) % count]
        chunks = chunks_of(buffer, count)

        def post(block: Tensor) -> Any:
            return group.send([block], downstream, number)

        # Every receive is posted before anything is sent. So a send never waits for another send of
        # its receiver: that one may wait for its turn behind a third, and so on, in a circle.
        places = [received_at(step, place, count) for step in range(2 * count - 2)]
        landing = [torch.empty_like(chunks[c]) for c in places[: count - 1]]
        with self.watched(upstream):
            coming = [
                [group.recv([block], upstream, number) for block in blocks_of(into)]
                for into in [*landing, *(chunks[c] for c in places[count - 1 :])]
            ]
        for step, works in enumerate(coming):
            chunk = chunks[sent_at(step, place, count)]
            send_blocks(chunk, post, self._turns, downstream, urgency, self.watched)
            with self.watched(upstream):
                for work in works:
                    complete(work)
            # Then each member has the complete sum of one chunk; these are passed around the ring.
            # A complete chunk arrives when this member's part of it has long been sent.
            if step < count - 1:
                chunks[places[step]] += landing[step]


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
