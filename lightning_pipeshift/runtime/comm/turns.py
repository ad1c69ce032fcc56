"""Decides which of a rank's messages is sent next: the most urgent one, not the first that came.

Once bytes are in a socket, nothing overtakes them on the same connection. So large messages are
sent in blocks, and a block waits until it is its turn: few blocks to a rank are on their way at a
time, and only those of the same lane, or of a more urgent one, hold others back. A block of an
urgent lane does not wait for those of other lanes that have been sent already: the network carries
it first if it honours the lanes' marks. Where it honours none, this is what keeps bulk behind
urgent bytes, inside of one process.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

# How many blocks to the same rank are sent at a time: while the thread of one wakes up, another is
# on the wire.
_MOST_AT_ONCE: Final = 2


class Urgency(NamedTuple):
    """How urgent a message is; the lowest goes first.

    Args:
        lane: the number of its lane, 0 for the most urgent.
        order: within the lane.
    """

    lane: int = 0
    order: int = 0


MOST_URGENT: Final = Urgency()


@dataclass(frozen=True)
class LaneTraffic:
    """What a lane has carried.

    Args:
        num_bytes: sent.
        queueing_seconds: the time in which blocks waited for their turn, added up over blocks.
        sending_seconds: the time in which any block was being sent.
    """

    num_bytes: int = 0
    queueing_seconds: float = 0.0
    sending_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The throughput while the lane was sending."""
        return self.num_bytes / self.sending_seconds if self.sending_seconds else 0.0


@dataclass(order=True)
class _Waiting:
    urgency: Urgency
    number: int
    may_go: threading.Event = field(default_factory=threading.Event, compare=False)


class _Queue:
    """The blocks for one rank."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.lanes: list[int] = []
        """Those of the blocks that are being sent."""

    def admit(self) -> None:
        """Lets blocks go whose turn it is."""
        while self.waiting:
            first = self.waiting[0]
            if sum(lane <= first.urgency.lane for lane in self.lanes) >= _MOST_AT_ONCE:
                return
            heapq.heappop(self.waiting)
            self.lanes.append(first.urgency.lane)
            first.may_go.set()


@dataclass
class _Counted:
    num_bytes: int = 0
    queueing_seconds: float = 0.0
    sending_seconds: float = 0.0
    num_now: int = 0
    since: float = 0.0


class Turns:
    """The turns of one rank's messages. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[int, _Queue] = {}
        self._numbers = count()
        self._counted: dict[int, _Counted] = {}

    @contextmanager
    def turn(self, peer: int, urgency: Urgency, num_bytes: int) -> Iterator[None]:
        """Context in which a block is sent. Waits for its turn; ends when the block has left.

        Args:
            peer: the rank that it is sent to.
            urgency: of the block.
            num_bytes: its size.
        """
        begin = time.perf_counter()
        with self._lock:
            queue = self._queues.setdefault(peer, _Queue())
            mine = _Waiting(urgency, next(self._numbers))
            heapq.heappush(queue.waiting, mine)
            queue.admit()
        mine.may_go.wait()
        now = time.perf_counter()
        with self._lock:
            counted = self._counted.setdefault(urgency.lane, _Counted())
            counted.queueing_seconds += now - begin
            counted.since = counted.since if counted.num_now else now
            counted.num_now += 1
        try:
            yield
        finally:
            with self._lock:
                counted.num_bytes += num_bytes
                counted.num_now -= 1
                if not counted.num_now:
                    counted.sending_seconds += time.perf_counter() - counted.since
                queue.lanes.remove(urgency.lane)
                queue.admit()

    @property
    def traffic(self) -> Mapping[int, LaneTraffic]:
        """What each lane has carried so far, by its number."""
        with self._lock:
            return {
                lane: LaneTraffic(one.num_bytes, one.queueing_seconds, one.sending_seconds)
                for lane, one in sorted(self._counted.items())
            }
