"""The moments of a move in an asynchronous pipeline, as one of its ranks sees them."""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.ownership.migration import Migration, Turn
from lightning_pipeshift.runtime.ownership.transfers import Incoming, MessageKind, Outgoing


class Moment(enum.Enum):
    """A moment of a move on one rank."""

    ANNOUNCED = "it knows of the move"
    CUT_OVER = "it begins with the first minibatch of the new owner"
    WEIGHTS = "a version of the weights is under way"
    LAST_WEIGHTS = "the last version is under way"
    STATE = "the optimizer's state is under way"
    ACKNOWLEDGED = "everything is there, and the new owner is about to say so"


class Way(NamedTuple):
    """A move of two layers, with who gives them, who gets them, and who has no part in it."""

    before: list[int]
    after: list[int]
    old: int
    new: int
    third: int


WAYS = [
    Way([3, 2, 1], [1, 4, 1], old=0, new=1, third=2),
    Way([1, 2, 3], [3, 2, 1], old=2, new=0, third=1),
    Way([1, 4, 1], [1, 2, 3], old=1, new=2, third=0),
]


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Calls a function, with the inner one as its first argument, in the place of a method. Lasts
    as long as the process.
    """
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return call(inner, *args, **kwargs)

    setattr(owner, name, outer)


def watch_moves(reach: Callable[[Moment], None]) -> None:
    """Calls a function at each moment of a move on this rank. Lasts as long as the process.

    Args:
        reach: called in the training's own thread at the first two moments, and in the thread that
            sends or receives at the others.
    """
    under_way = threading.local()

    def announced(inner: Any, *args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        reach(Moment.ANNOUNCED)

    def turn(inner: Any, self: Migration, turn: Turn) -> Any:
        is_cut_over = inner(self, turn)
        if is_cut_over:
            reach(Moment.CUT_OVER)
        return is_cut_over

    def thread(inner: Any, *args: Any) -> None:
        # What this thread sends or receives belongs to the move.
        under_way.kind, under_way.has_values, under_way.is_over = None, False, False
        inner(*args)

    def tell(inner: Any, self: Lane, *args: Any) -> Any:
        if not hasattr(under_way, "kind"):
            return inner(self, *args)
        if under_way.is_over:
            reach(Moment.ACKNOWLEDGED)
        told = inner(self, *args)
        if under_way.has_values:
            # The names of the values.
            under_way.has_values = False
            under_way.is_over = under_way.kind is MessageKind.LAST
        elif not under_way.is_over:
            # Who sends a message gives it as an argument, who gets it has it as a result.
            under_way.kind, *_ = told if told is not None else args[0]
        return told

    def carry(inner: Any, self: Lane, *args: Any) -> Any:
        kind = getattr(under_way, "kind", None)
        if kind is MessageKind.WEIGHTS:
            reach(Moment.WEIGHTS)
        elif kind is MessageKind.LAST:
            reach(Moment.LAST_WEIGHTS)
        return inner(self, *args)

    def values(inner: Any, self: Lane, *args: Any) -> Any:
        if hasattr(under_way, "kind"):
            under_way.has_values = True
            if under_way.kind is MessageKind.LAST:
                reach(Moment.STATE)
        return inner(self, *args)

    around(Migration, "__init__", announced)
    around(Migration, "before_turn", turn)
    around(Outgoing, "send", thread)
    around(Incoming, "receive", thread)
    for name in ("send_object", "receive_object"):
        around(Lane, name, tell)
    for name in ("send_tensor", "receive_into"):
        around(Lane, name, carry)
    for name in ("send_values", "receive_values"):
        around(Lane, name, values)
