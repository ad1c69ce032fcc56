"""Decides which of a rank's messages is sent next: the most urgent one, not the first that came.

Once bytes are in a socket, nothing overtakes them on the same connection. So large messages are
sent in blocks, and a block waits until it is its turn: only so many bytes to a rank are on their
way at a time as its link carries in a few milliseconds, and only those of the same lane, or of a
more urgent one, count. A block of an urgent lane does not wait for those of other lanes that have
been sent already: the network carries it first if it honours the lanes' marks. Where it honours
none, this is what keeps the less urgent lanes behind the others, inside of one process. Messages in
the background (layers that move, swapped tensors) wait while any others are waiting or on their
way, and so use what these leave of the link.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What

# What may be on its way to a rank: so much that the link is never idle while a thread wakes up, and
# so little that an urgent block does not wait long.
_WINDOW_SECONDS: Final = 0.004
_LEAST_WINDOW_BYTES: Final = 1 << 17
# Before the link's speed is known.
_FIRST_WINDOW_BYTES: Final = 1 << 20
# A speed is measured over this time; of the last ones the highest counts, as in the others the
# receiver may not have been ready.
_MEASURED_SECONDS: Final = 0.02
_NUM_MEASURED: Final = 8
# The part of the link that messages in the background get at least.
_FLOOR: Final = 0.02


class Urgency(NamedTuple):
    """How urgent a message is; the lowest goes first.

    Args:
        lane: the number of its lane, 0 for the most urgent.
        order: within the lane.
    """

    lane: int = 0
    order: int = 0


BACKGROUND: Final = Urgency(1 << 20)
"""That of messages which wait while any others, to whichever rank, wait or are on their way."""

Urgencies = tuple[tuple[float, Urgency], ...]
"""Those of a vector's parts: where each ends, as a fraction of the vector, and how urgent it is."""

MOST_URGENT: Final[Urgencies] = ((1.0, Urgency()),)


def lane_of(urgencies: Urgencies) -> int:
    """Returns the lane of a vector that is not split: the most urgent one of its parts'."""
    return min(urgency.lane for _, urgency in urgencies)


@dataclass(frozen=True)
class LaneTraffic:
    """Counts of one lane's messages.

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
    num_bytes: int = field(compare=False)
    may_go: threading.Event = field(default_factory=threading.Event, compare=False)


class _Queue:
    """The blocks for one rank."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.on_their_way: Counter[int] = Counter()
        """Bytes, by lane."""
        self._window = _FIRST_WINDOW_BYTES
        self._speeds: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._done_bytes = 0
        self._busy_since = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The speed of the link, as far as it is known."""
        return self._window / _WINDOW_SECONDS

    def has_place(self, urgency: Urgency, num_bytes: int) -> bool:
        """Whether a block may be sent now, if no other one waits."""
        counted = sum(size for lane, size in self.on_their_way.items() if lane <= urgency.lane)
        return not counted or counted + num_bytes <= self._window

    def begin(self, urgency: Urgency, num_bytes: int) -> None:
        """A block is sent."""
        if not self.on_their_way.total():
            self._busy_since, self._done_bytes = time.perf_counter(), 0
        self.on_their_way[urgency.lane] += num_bytes

    def end(self, urgency: Urgency, num_bytes: int) -> None:
        """A block has left."""
        self.on_their_way[urgency.lane] -= num_bytes
        self._done_bytes += num_bytes
        now = time.perf_counter()
        if now - self._busy_since >= _MEASURED_SECONDS:
            self._speeds.append(self._done_bytes / (now - self._busy_since))
            self._busy_since, self._done_bytes = now, 0
            fastest = max(self._speeds)
            self._window = max(_LEAST_WINDOW_BYTES, round(_WINDOW_SECONDS * fastest))

    def admit(self) -> None:
        """Lets the blocks go whose turn it is."""
        while self.waiting and self.has_place(self.waiting[0].urgency, self.waiting[0].num_bytes):
            first = heapq.heappop(self.waiting)
            self.begin(first.urgency, first.num_bytes)
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
        self._calm = threading.Condition(self._lock)
        self._queues: dict[int, _Queue] = {}
        self._numbers = count()
        self._counted: dict[int, _Counted] = {}
        self.recorder: Recorder | None = None
        """Takes notes of blocks."""
        self._asked: dict[tuple[int, Urgency], deque[float]] = {}
        """When the blocks that are on their way were ready, if they are recorded."""

    def take(self, peer: int, urgency: Urgency, num_bytes: int, waits: bool = True) -> bool:
        """Waits until a block may be sent; the caller then sends it, and calls :meth:`end`.

        Args:
            peer: the rank that it is sent to.
            urgency: of the block.
            num_bytes: its size.
            waits: if not, and it is not yet the block's turn, nothing happens.

        Returns:
            whether the block may be sent.
        """
        begin = time.perf_counter()
        with self._lock:
            queue = self._queues.setdefault(peer, _Queue())
            if urgency >= BACKGROUND:
                # Not for ever: it keeps a part of the link.
                seconds = num_bytes / (_FLOOR * queue.bytes_per_second)
                if not self._calm.wait_for(self._is_calm, seconds if waits else 0) and not waits:
                    return False
            mine = _Waiting(urgency, next(self._numbers), num_bytes)
            is_next = not queue.waiting or mine < queue.waiting[0]
            if is_next and queue.has_place(urgency, num_bytes):
                queue.begin(urgency, num_bytes)
                self._count_begin(urgency.lane, begin, 0.0)
                self._note_begin(peer, urgency, begin)
                return True
            if not waits:
                return False
            heapq.heappush(queue.waiting, mine)
        mine.may_go.wait()
        now = time.perf_counter()
        with self._lock:
            self._count_begin(urgency.lane, now, now - begin)
            self._note_begin(peer, urgency, begin)
        return True

    def end(self, peer: int, urgency: Urgency, num_bytes: int) -> None:
        """A block has left, or could not be sent."""
        with self._lock:
            queue = self._queues[peer]
            queue.end(urgency, num_bytes)
            queue.admit()
            if self._is_calm():
                self._calm.notify_all()
            counted = self._counted[urgency.lane]
            counted.num_bytes += num_bytes
            counted.num_now -= 1
            if not counted.num_now:
                counted.sending_seconds += time.perf_counter() - counted.since
            self._note_end(peer, urgency, num_bytes)

    def _note_begin(self, peer: int, urgency: Urgency, ready: float) -> None:
        if self.recorder is not None:
            self._asked.setdefault((peer, urgency), deque()).append(ready)

    def _note_end(self, peer: int, urgency: Urgency, num_bytes: int) -> None:
        ready = self._asked.get((peer, urgency))
        if ready:
            begin, recorder = ready.popleft(), self.recorder
            if recorder is None:
                self._asked.clear()
                return
            name = str(urgency.lane)
            recorder.add(What.BLOCK, name, begin, time.perf_counter(), peer, num_bytes)

    def _count_begin(self, lane: int, now: float, queueing_seconds: float) -> None:
        counted = self._counted.setdefault(lane, _Counted())
        counted.queueing_seconds += queueing_seconds
        counted.since = counted.since if counted.num_now else now
        counted.num_now += 1

    def _is_calm(self) -> bool:
        return not any(
            (queue.waiting and queue.waiting[0].urgency < BACKGROUND)
            or any(size for lane, size in queue.on_their_way.items() if lane < BACKGROUND.lane)
            for queue in self._queues.values()
        )

    @property
    def traffic(self) -> Mapping[int, LaneTraffic]:
        """The counts of each lane so far, by its number."""
        with self._lock:
            return {
                lane: LaneTraffic(one.num_bytes, one.queueing_seconds, one.sending_seconds)
                for lane, one in sorted(self._counted.items())
            }
