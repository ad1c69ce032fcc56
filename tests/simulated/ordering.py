"""Vector clocks: which accesses to memory are ordered, on a device with several streams.

The work of each stream, and that of each host, is a timeline. An access has the number of its place
in its timeline, and a timeline's clock says, for every timeline, up to which number its work
precedes whatever comes next here. Queueing work, events and synchronisations are what joins clocks,
and so is what one host tells another: what a host has waited for is known to no other.
Two accesses to the same bytes, one of them a write, of which neither precedes the other, are a data
race: their order on a real device is a matter of luck. (As in ``torch.cuda._sanitizer``, and in
FastTrack, Flanagan and Freund, PLDI 2009.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

HOST: Final = "the host"
"""The timeline of a CPU's work: that of a process, or of one of its threads."""

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    """Adds to a clock what another one knows."""
    for timeline, number in other.items():
        clock[timeline] = max(clock.get(timeline, 0), number)


class Access(NamedTuple):
    """An access to memory.

    Args:
        timeline: whose work it is.
        number: its place there.
        begin: the first byte.
        end: the byte after the last one.
        writes: whether it changes them.
        what: the operation, in words.
    """

    timeline: str
    number: int
    begin: float
    end: float
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.timeline}, which {'writes' if self.writes else 'reads'}"

    def is_covered_by(self, other: Access) -> bool:
        """Whether whatever conflicts with this access conflicts with a later one, too."""
        is_inside = other.begin <= self.begin and self.end <= other.end
        return is_inside and (other.writes or not self.writes)


History = list[Access]
"""The accesses to one piece of memory, but for those that later ones cover."""


class Region(NamedTuple):
    """Bytes of a piece of memory, from ``begin`` to before ``end``."""

    history: History
    begin: int
    end: int


class Ordering:
    """The clocks of a device's streams and of its hosts."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        # By stream: the last accesses of each timeline to memory that was freed.
        self._freed: defaultdict[str, dict[str, Access]] = defaultdict(dict)

    def access(
        self,
        timeline: str,
        host: str,
        what: str,
        reads: Iterable[Region],
        writes: Iterable[Region],
    ) -> list[str]:
        """Notes an operation that a host asks for; returns its data races, in words."""
        clock = self._clocks[timeline]
        join(clock, self._clocks[host])
        clock[timeline] = number = clock.get(timeline, 0) + 1
        races = []
        for regions, is_write in ((reads, False), (writes, True)):
            for history, begin, end in regions:
                new = Access(timeline, number, begin, end, is_write, what)
                kept = []
                for old in history:
                    is_before = clock.get(old.timeline, 0) >= old.number
                    overlaps = old.begin < end and begin < old.end
                    if overlaps and not is_before and (is_write or old.writes):
                        races.append(f"{new}: nothing orders it and {old}")
                    elif not (is_before and old.is_covered_by(new)):
                        kept.append(old)
                history[:] = [*kept, new]
        return races

    def allocate(self, stream: str, host: str) -> History:
        """The history of new memory of a stream: that of all memory that the stream's allocations
        may be given again.

        Args:
            stream: the stream.
            host: which allocates.
        """
        known = self._clocks[host]
        return [
            access._replace(begin=0, end=float("inf"), writes=True)
            for access in self._freed[stream].values()
            if known.get(access.timeline, 0) < access.number
        ]

    def free(
        self, history: History, stream: str, kept_for: Iterable[str], hosts: Iterable[str]
    ) -> None:
        """Notes that memory is freed: the stream's next allocation may be given it at once.

        Args:
            history: that of the memory.
            stream: the stream on which it was allocated.
            kept_for: streams that the allocator has been told of: it waits for their work.
            hosts: those that may have freed it. What they have waited for is complete.
        """
        freed = self._freed[stream]
        known: Clock = {}
        for host in hosts:
            join(known, self._clocks[host])
        for access in history:
            last = freed.get(access.timeline)
            is_later = last is None or last.number < access.number
            is_complete = known.get(access.timeline, 0) >= access.number
            if is_later and not is_complete and access.timeline not in kept_for:
                what = access.what.removesuffix(_FREED) + _FREED
                freed[access.timeline] = access._replace(what=what)

    def now(self, timeline: str, host: str) -> Clock:
        """The clock after all work that has been queued so far, and after what a host knows."""
        clock = dict(self._clocks[timeline])
        join(clock, self._clocks[host])
        return clock

    def wait(self, timeline: str, clock: Clock) -> None:
        """Orders a timeline's later work after the work that a clock knows."""
        join(self._clocks[timeline], clock)

    def is_known(self, clock: Clock, host: str) -> bool:
        """Whether a host knows that the work that a clock knows is complete."""
        known = self._clocks[host]
        return all(known.get(timeline, 0) >= number for timeline, number in clock.items())


_FREED = " (in memory that is freed)"
