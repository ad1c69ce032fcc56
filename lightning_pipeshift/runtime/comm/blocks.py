"""Sends large vectors in blocks, each when it is its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from lightning_pipeshift.runtime.comm.turns import Turns, Urgency
from lightning_pipeshift.runtime.comm.waits import Watched, complete

# What is sent at once: nothing overtakes it.
_BLOCK_BYTES: Final = 1 << 19

Post = Callable[[Tensor], Any]
"""Posts the send, or the receive, of a block; returns the operation."""


def blocks_of(vector: Tensor) -> list[Tensor]:
    """The blocks of a contiguous vector, the same for its sender and its receiver; none if it is
    empty.
    """
    return list(vector.split(_BLOCK_BYTES // vector.element_size())) if len(vector) else []


def send_blocks(
    vector: Tensor, post: Post, turns: Turns, to: int, urgency: Urgency, watched: Watched
) -> None:
    """Sends a vector, and waits until its memory may be reused. The receiver posts a receive for
    each block.

    Args:
        vector: contiguous, on the CPU.
        post: posts the send of a block.
        turns: the turns of this rank's messages.
        to: the rank that it is sent to.
        urgency: of its blocks.
        watched: the context to communicate in.
    """
    posted: deque[tuple[Any, int]] = deque()

    def finish_all() -> None:
        while posted:
            work, size = posted.popleft()
            try:
                with watched(to):
                    complete(work)
            finally:
                turns.end(to, urgency, size)

    try:
        for block in blocks_of(vector):
            if not turns.take(to, urgency, block.nbytes, waits=False):
                # It may be its turn when these have left.
                finish_all()
                turns.take(to, urgency, block.nbytes)
            try:
                with watched(to):
                    posted.append((post(block), block.nbytes))
            except BaseException:
                turns.end(to, urgency, block.nbytes)
                raise
        finish_all()
    finally:
        for _, size in posted:
            turns.end(to, urgency, size)
