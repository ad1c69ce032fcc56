"""Decides which lane carries the gradients of which layer.

The next forward needs the first layers first, and their gradients are ready last: a layer's slack,
the time from its gradient to its next forward, grows from layer to layer. So lanes are given in
call order: the most urgent one to the first layers, up to its share of the bytes, and so on
(Tsinghua's "method and system for accelerating distributed machine learning"; Geryon, INFOCOM 2020,
section 4). The shares are equal unless a plan gives others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from lightning_pipeshift.plan.inputs.traffic import NUM_GRADIENT_CLASSES

PIECE_BYTES: Final = 4 << 20
"""A gradient is summed in pieces of about this size, which may travel on different lanes."""
MOST_PIECES: Final = 8


class Part(NamedTuple):
    """A part of a layer's gradient that travels on one lane.

    Args:
        end: where it ends, as a fraction of the gradient. It begins where the one before ends.
        lane: its number, 0 for the most urgent lane.
    """

    end: float
    lane: int


Parts = tuple[Part, ...]


def num_pieces(num_bytes: int) -> int:
    """Returns in how many pieces a gradient is summed."""
    return max(1, min(MOST_PIECES, -(-num_bytes // PIECE_BYTES)))


def lanes_by_share(gradient_bytes: Sequence[int], shares: Sequence[float]) -> tuple[Parts, ...]:
    """Returns the lanes of each layer's gradient. Only a large one is split, between two pieces.

    Args:
        gradient_bytes: of each layer, in call order.
        shares: the part of all bytes that each lane carries, the most urgent lane first; they add
            up to 1. A piece belongs to the lane in which its middle byte lies.
    """
    total = sum(gradient_bytes) or 1
    limits = list(accumulate(shares))[:-1]
    layers, before = [], 0
    for size in gradient_bytes:
        count = num_pieces(size)
        lanes = [
            bisect_left(limits, (before + size * (piece + 0.5) / count) / total)
            for piece in range(count)
        ]
        layers.append(
            tuple(
                Part((piece + 1) / count, lane)
                for piece, lane in enumerate(lanes)
                if piece + 1 == count or lanes[piece + 1] != lane
            )
        )
        before += size
    return tuple(layers)


def equal_shares(gradient_bytes: Sequence[int]) -> tuple[float, ...]:
    """Returns equal shares for as many lanes as these layers have use for."""
    count = min(NUM_GRADIENT_CLASSES, sum(map(num_pieces, filter(None, gradient_bytes))) or 1)
    return (1 / count,) * count
