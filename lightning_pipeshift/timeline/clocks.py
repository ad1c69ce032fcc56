"""How far the clocks of two ranks are apart, by messages that go to one of them and back.

The other end reads its clock after a message was sent and before its answer came back. Each message
therefore bounds the offset from both sides (Cristian, "Probabilistic clock synchronization", 1989,
section 3), and the offset lies in the intersection of all these bounds, which is narrower than
that of the quickest message alone if the way there and the way back are slow at different times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Ping(NamedTuple):
    """A message to another rank and back; all readings in seconds.

    Args:
        sent: this rank's clock before the message was sent.
        there: the other rank's clock when it answered.
        back: this rank's clock after the answer had arrived.
    """

    sent: float
    there: float
    back: float


class Offset(NamedTuple):
    """How another clock is translated into this rank's.

    Args:
        seconds: to be added to a reading of the other clock.
        error_seconds: by how much this may be wrong at most, in either direction.
    """

    seconds: float = 0.0
    error_seconds: float = 0.0


def offset_of(pings: Sequence[Ping], is_same_host: bool = False) -> Offset:
    """The offset between two clocks that run at the same speed while the messages travel.

    Args:
        pings: at least one.
        is_same_host: whether both ranks are on one host, whose processes share a clock. If the
            messages allow an offset of exactly 0, it is 0 then. (They do not if the processes are
            in different time namespaces.)
    """
    lowest = max(ping.sent - ping.there for ping in pings)
    highest = min(ping.back - ping.there for ping in pings)
    if lowest > highest:
        # A clock was set, or ran faster than the other, meanwhile: the quickest message decides.
        quickest = min(pings, key=lambda ping: ping.back - ping.sent)
        lowest, highest = quickest.sent - quickest.there, quickest.back - quickest.there
    if is_same_host and lowest <= 0 <= highest:
        return Offset()
    return Offset((lowest + highest) / 2, (highest - lowest) / 2)
