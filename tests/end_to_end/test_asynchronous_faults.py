"""A rank that dies while layers move in an asynchronous pipeline: the others end and name it, and
the last checkpoint is whole.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.moments_of_moves import WAYS, Moment, watch_moves
from tests.end_to_end.test_asynchronous import Case, reference, require_same, train
from tests.end_to_end.test_migration_faults import require_named

SAVED, MOVES_AFTER = 8, 8
"""How many minibatches are in the checkpoint, and the one after which a move is asked for. The next
checkpoint would come when the move is over."""


DEATHS = [
    *((moment, who) for who in ("old", "new") for moment in Moment),
    *((moment, "third") for moment in (Moment.ANNOUNCED, Moment.CUT_OVER)),
]


def die_at(moment: Moment) -> None:
    """Lets this rank be killed at a moment of the first move."""

    def reach(found: Moment) -> None:
        if found is moment:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_moves(reach)


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
