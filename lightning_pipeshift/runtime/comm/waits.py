"""Waits for messages between two ranks, and ends these waits when the run has failed.

When a connection breaks, gloo does not tell the operations that were under way on it: a message of
which a part has been sent or received by then (in gloo's ``tcp::Pair``, what ``tx_`` and ``rx_``
hold) is waited for until the process group's timeout, half an hour. gloo can end such a wait
(``Work::abort`` of its sends and receives), but torch has no binding of it for Python. So it is
called by :mod:`~lightning_pipeshift.compat.gloo_private`, where that is possible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_pipeshift.compat.gloo_private import abort_wait

Watched = Callable[[int | None], AbstractContextManager[None]]
"""A context around communication with a rank (``None``: with several), which turns a broken
connection into its reason."""

# The operation that each thread waits for.
_under_way: dict[int, Any] = {}


def complete(work: Any) -> None:
    """Waits for a send or a receive.

    Raises:
        RuntimeError: the connection broke, or :func:`interrupt_waits` was called.
    """
    thread = threading.get_ident()
    _under_way[thread] = work
    try:
        if not work.wait():
            raise RuntimeError("the wait was ended because the run has failed")
    finally:
        del _under_way[thread]


def interrupt_waits() -> None:
    """Ends all waits of :func:`complete` that are in progress, if they use gloo on Linux."""
    for work in list(_under_way.values()):
        abort_wait(work)
