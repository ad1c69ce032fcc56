"""Which lane carries the gradients of which layer.

The next forward needs the first layers first, whichever stage they are on, and their gradients are
ready last. So lanes are given in call order: the most urgent one to the first layers, up to its
share of the bytes, and so on (Tsinghua's "method and system for accelerating distributed machine
learning"; Geryon, INFOCOM 2020, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def lanes_by_share(gradient_bytes: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """Returns the lane of each layer, 0 for the most urgent one.

    Args:
        gradient_bytes: of each layer, in call order.
        shares: the part of all bytes that each lane carries, the most urgent lane first; they add
            up to 1. A layer belongs to the lane in which its middle byte lies.
    """
    total = sum(gradient_bytes) or 1
    limits = list(accumulate(shares))[:-1]
    lanes, before = [], 0
    for size in gradient_bytes:
        middle = (before + size / 2) / total
        lanes.append(sum(middle > limit for limit in limits))
        before += size
    return tuple(lanes)
