"""A SIGTERM, a validation, a checkpoint or the end of training in the middle of a move: the move is
over or has not begun, and the bits are those of the reference.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.cases import some
from tests.end_to_end.moments_of_moves import WAYS, Moment, Way, around, watch_moves
from tests.end_to_end.test_asynchronous import (
    Case,
    Result,
    moved,
    on_ranks,
    reference,
    require_same,
    train,
)
from tests.models import is_held

MOVES_AFTER = 4
"""The minibatch after which a move is asked for."""

HOW = [(WAYS[0], "async", 1), (WAYS[1], "async-2bw", 4), (WAYS[2], "async", 2)]
each_way = pytest.mark.parametrize(("way", "schedule", "accumulated"), HOW)
# With slow links, layers move in parts, three with the second way.
each_way_and_links = pytest.mark.parametrize(
    ("way", "schedule", "accumulated", "has_slow_links"),
    [*((*how, False) for how in HOW), (WAYS[1], "async", 1, True), (*HOW[1], True)],
)


class Saved(NamedTuple):
    """What one rank says of a run that was ended.

    Args:
        code: that of the process, in the end.
        counts: of the plan in force at the end of each minibatch.
        held: how many layers the rank held when the checkpoint was saved.
        is_reached: whether the moment came that was waited for, on this rank.
    """

    code: Any
    counts: list[Any]
    held: int
    is_reached: bool


class TakenAway(L.Callback):
    """Sends this rank a SIGTERM, in front of a batch or at a moment of a move."""

    def __init__(self) -> None:
        self.at: int | Moment | None = None
        self.number = 0
        self.is_reached = False
        self.counts: list[Any] = []
        self.held = 0

    def begin(self, at: int | Moment | None) -> None:
        """Waits for the next batch or moment; the same call on every rank."""
        self.at, self.is_reached, self.counts = at, False, []
        self.number += 1

    def end_run(self) -> None:
        """Sends the signal."""
        self.is_reached, self.at = True, None
        os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
        if self.at == idx:
            self.end_run()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.counts += trainer.strategy.plan.placement.counts

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        weights = [layer.linear.weight for layer in module.layers]
        self.held = sum(map(is_held, weights))

    # --- in the thread of a move ---

    @property
    def _released(self) -> str:
        return f"move {self.number} goes on"

    def reach(self, found: Moment) -> None:
        """Sends the signal at a moment, and lets the move go on only when training waits for it."""
        if found is not self.at:
            return
        self.end_run()
        if found not in (Moment.ANNOUNCED, Moment.CUT_OVER):
            # A store serves one call at a time.
            store: Any = dist.distributed_c10d._get_default_store()
            store.clone().wait([self._released], timedelta(seconds=LIMIT_SECONDS))

    def let_go(self, inner: Any, *args: Any) -> Any:
        """Around what waits for a move, on any rank."""
        dist.distributed_c10d._get_default_store().set(self._released, "")
        return inner(*args)

    def let_go_if_late(self, inner: Any, migration: Any, incoming: Any, is_there: Any) -> Any:
        """Around what waits for one message of a move, on any rank."""
        return (
            inner(migration, incoming, is_there)
            if is_there()
            else self.let_go(inner, migration, incoming, is_there)
        )


def end_each(folder: str, cases: Sequence[tuple[Case, int | Moment, int]]) -> list[Saved]:
    """Runs that are ended by a SIGTERM on one rank, one after another."""
    taken_away, found = TakenAway(), []
    watch_moves(taken_away.reach)
    for name in ("settle", "finish"):
        around(Migration, name, taken_away.let_go)
    around(Migration, "_await", taken_away.let_go_if_late)
    for number, (case, at, rank) in enumerate(cases):
        taken_away.begin(at if int(os.environ["RANK"]) == rank else None)
        checkpoint = ModelCheckpoint(f"{folder}/{number}", save_top_k=0)
        code: Any = None
        try:
            train(case, callbacks=[taken_away, checkpoint], enable_checkpointing=True)
        except SIGTERMException as error:
            code = error.code
        found.append(Saved(code, taken_away.counts, taken_away.held, taken_away.is_reached))
    return found


def require_ended_in_order(
    folder: Path, cases: Sequence[tuple[Case, int | Moment, int]]
) -> list[int]:
    """Checks that all runs end in order; returns how many layers have moved in each."""
    found = []
    # Each case is a run: a loaded machine takes a few seconds for one.
    seconds = LIMIT_SECONDS + 4 * len(cases)
    outcomes = run_ranks(end_each, 3, str(folder), cases, timeout=seconds)
    for number, (case, _, rank) in enumerate(cases):
        saved = [outcome[number] for outcome in outcomes]
        assert saved[rank].is_reached
        assert [one.code for one in saved] == [143] * 3
        assert saved[0].counts == saved[1].counts == saved[2].counts
        # Nobody holds a layer that is another one's in the plan in force.
        assert [one.held for one in saved] == list(saved[0].counts[-1])
        state = torch.load(folder / str(number) / "last.ckpt", weights_only=False)
        num_updates, moves = len(saved[0].counts) // case.accumulated, moved(saved[0].counts)
        assert state["global_step"] == num_updates
        # An update that has lacked minibatches is not made.
        expected = reference(case, moves, num_updates * case.accumulated)
        require_same(state["state_dict"], expected.layers)
        found.append(len(moves))
    return found


def case_of(way: Way, schedule: str, accumulated: int) -> Case:
    """With Adam, whose state moves too."""
    moves = {MOVES_AFTER: way.after}
    return Case(way.before, schedule, accumulated, moves, "adam", num_batches=48, num_epochs=1)


@each_way_and_links
def test_sigterm_at_each_minibatch_around_a_move(
    way: Way, schedule: str, accumulated: int, has_slow_links: bool, tmp_path: Path
) -> None:
    """On any rank."""
    case = case_of(way, schedule, accumulated)._replace(has_slow_links=has_slow_links)
    last = MOVES_AFTER + (3 * accumulated + 4) * (2 if has_slow_links else 1)
    cases: list[Any] = [(case, idx, idx % 3) for idx in range(MOVES_AFTER - 2, last)]
    tried = some(cases, 4)
    num_moves = set(require_ended_in_order(tmp_path, tried))
    # Some moves have not begun, and some are over.
    expected = set(range(4 if has_slow_links else 2))
    assert {0, max(expected)} <= num_moves <= expected
    assert num_moves == expected or len(tried) < len(cases)


@each_way
def test_sigterm_at_each_moment_of_a_move(
    way: Way, schedule: str, accumulated: int, tmp_path: Path
) -> None:
    """What is under way then goes on only when training waits for it, on some rank."""
    case = case_of(way, schedule, accumulated)
    cases: list[Any] = [(case, moment, rank) for rank in (way.old, way.new) for moment in Moment]
    cases += [(case, moment, way.third) for moment in (Moment.ANNOUNCED, Moment.CUT_OVER)]
    require_ended_in_order(tmp_path, some(cases, 5))


def train_with_checkpoints(folder: str, cases: Sequence[Case]) -> list[Result]:
    """Saves when the pipeline is drained in the middle, too."""
    found = []
    for number, case in enumerate(cases):
        every = DRAINED // case.accumulated
        checkpoint = ModelCheckpoint(
            f"{folder}/{number}", every_n_train_steps=every, save_top_k=-1, filename="{step}"
        )
        found.append(train(case, callbacks=[checkpoint], enable_checkpointing=True))
    return found


DRAINED = 8
"""The minibatch before which there is a validation or a checkpoint."""


def around_the_drain(way: Way, schedule: str, accumulated: int, **more: Any) -> list[Case]:
    """A move that is asked for after each minibatch: some are in the middle of it when the pipeline
    drains, some when training ends.
    """
    case = Case(way.before, schedule, accumulated, {}, "adam", num_epochs=1, **more)
    cases = [case._replace(moves={number: way.after}) for number in range(case.num_batches)]
    return some(cases, 5)


@each_way_and_links
def test_a_validation_at_each_minibatch_of_a_move(
    way: Way, schedule: str, accumulated: int, has_slow_links: bool
) -> None:
    more = {"validates": DRAINED, "num_batches": 13, "has_slow_links": has_slow_links}
    cases = around_the_drain(way, schedule, accumulated, **more)
    for case, ranks in zip(cases, on_ranks(cases), strict=True):
        expected = reference(case, moved(ranks[0].counts)).layers
        for result in ranks:
            assert result.counts == ranks[0].counts
            require_same(result.state, expected)


@each_way_and_links
def test_a_checkpoint_at_each_minibatch_of_a_move(
    way: Way, schedule: str, accumulated: int, has_slow_links: bool, tmp_path: Path
) -> None:
    more = {"num_batches": DRAINED + 4, "has_slow_links": has_slow_links}
    cases = around_the_drain(way, schedule, accumulated, **more)
    runs = run_ranks(train_with_checkpoints, 3, str(tmp_path), cases, timeout=LIMIT_SECONDS)
    for number, case in enumerate(cases):
        ranks = [results[number] for results in runs]
        moves = moved(ranks[0].counts)
        expected = reference(case, moves, DRAINED)
        path = tmp_path / str(number) / f"step={DRAINED // accumulated}.ckpt"
        saved = torch.load(path, weights_only=False)
        require_same(saved["state_dict"], expected.layers)
        require_same_moments(saved, expected.optimizers)
        # Later minibatches begin with an empty pipeline, and the newest weights.
        expected = reference(case, moves, saves=[DRAINED])
        for result in ranks:
            assert result.counts == ranks[0].counts
            require_same(result.state, expected.layers)


def require_same_moments(saved: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Compares the state of Adam in a checkpoint, by parameter."""
    (found,) = saved["optimizer_states"]
    expected = [
        state for one in optimizers for _, state in sorted(one.state_dict()["state"].items())
    ]
    assert len(found["state"]) == len(expected)
    for (_, own), state in zip(sorted(found["state"].items()), expected, strict=True):
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(own[name]), torch.as_tensor(value)), name
