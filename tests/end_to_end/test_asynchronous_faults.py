"""A rank that dies while layers move in an asynchronous pipeline: the others end and name it, and
the last checkpoint is whole.
"""

from __future__ import annotations

import enum
import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.ownership.live_migration import LiveMigration, _Kind
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_asynchronous import Case, reference, require_same, train
from tests.end_to_end.test_migration_faults import require_named

SAVED, MOVES_AFTER = 8, 8
"""How many minibatches are in the checkpoint, and the one after which a move is asked for. The next
checkpoint would come when the move is over."""


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

DEATHS = [
    *((moment, who) for who in ("old", "new") for moment in Moment),
    *((moment, "third") for moment in (Moment.ANNOUNCED, Moment.CUT_OVER)),
]


def die_at(moment: Moment) -> None:
    """Lets this rank be killed at a moment of the first move. Lasts as long as the process."""
    under_way = threading.local()

    def reach(found: Moment) -> None:
        if found is moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str, call: Any) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return call(inner, *args, **kwargs)

        setattr(owner, name, outer)

    def announced(inner: Any, *args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        reach(Moment.ANNOUNCED)

    def turn(inner: Any, self: LiveMigration, minibatch: int, *args: Any) -> Any:
        late = inner(self, minibatch, *args)
        if self.begin == minibatch:
            reach(Moment.CUT_OVER)
        return late

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
            under_way.is_over = under_way.kind is _Kind.LAST_WEIGHTS
        elif not under_way.is_over:
            # Who sends a message gives it as an argument, who gets it has it as a result.
            under_way.kind, *_ = told if told is not None else args[0]
        return told

    def carry(inner: Any, self: Lane, *args: Any) -> Any:
        kind = getattr(under_way, "kind", None)
        if kind is _Kind.WEIGHTS:
            reach(Moment.WEIGHTS)
        elif kind is _Kind.LAST_WEIGHTS:
            reach(Moment.LAST_WEIGHTS)
        return inner(self, *args)

    def values(inner: Any, self: Lane, *args: Any) -> Any:
        if hasattr(under_way, "kind"):
            under_way.has_values = True
            if under_way.kind is _Kind.LAST_WEIGHTS:
                reach(Moment.STATE)
        return inner(self, *args)

    around(LiveMigration, "__init__", announced)
    around(LiveMigration, "before_turn", turn)
    for name in ("_send", "_take_in"):
        around(LiveMigration, name, thread)
    for name in ("send_object", "receive_object"):
        around(Lane, name, tell)
    for name in ("send_tensor", "receive_into"):
        around(Lane, name, carry)
    for name in ("send_values", "receive_values"):
        around(Lane, name, values)


def train_until(case: Case, folder: str, moment: Moment, dead: int) -> None:
    """A rank's part in a run in which one rank dies."""
    if int(os.environ["RANK"]) == dead:
        die_at(moment)
    checkpoint = ModelCheckpoint(
        folder, every_n_train_steps=SAVED // case.accumulated, save_top_k=-1, filename="{step}"
    )
    train(case, callbacks=[checkpoint], enable_checkpointing=True)


@pytest.mark.parametrize(
    ("number", "moment", "who"),
    [
        pytest.param(number, moment, who, id=f"{who}, {moment.name.lower()}")
        for number, (moment, who) in enumerate(DEATHS)
    ],
)
def test_a_rank_that_dies(number: int, moment: Moment, who: str, tmp_path: Path) -> None:
    """In turns on another way, with Adam, whose state moves too."""
    way = WAYS[number % len(WAYS)]
    dead = getattr(way, who)
    schedule, accumulated = ("async", 1) if number % 4 else ("async-2bw", 4)
    case = Case(
        way.before, schedule, accumulated, {MOVES_AFTER: way.after}, optimizer="adam", num_epochs=1
    )
    arguments = case, str(tmp_path), moment, dead
    outcomes = run_ranks(train_until, 3, *arguments, expect_failure=True)
    require_named(outcomes, dead)
    (only,) = tmp_path.iterdir()
    saved = torch.load(only, weights_only=False)
    assert saved["global_step"] == SAVED // accumulated
    require_same(saved["state_dict"], reference(case, length=SAVED).layers)
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"])
