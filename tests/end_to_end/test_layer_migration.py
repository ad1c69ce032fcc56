"""`LayerMigration`: layers move on request, and by themselves where that pays."""

from __future__ import annotations

import math
import os
import re
import warnings
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_pipeshift import (
    ConfigurationError,
    LayerMigration,
    Move,
    PipelineTimeline,
    PlanError,
)
from lightning_pipeshift.commands.cli import PipeShiftCLI
from lightning_pipeshift.commands.running import shown
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.step.status import status_of
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.timeline import outcomes
from tests.end_to_end.test_changing_plans import (
    SLOW,
    STOPPED,
    Sleeper,
    SlowsDown,
    go_by_sleep,
    hearing,
)
from tests.features_models import (
    AwaitsPlanning,
    built,
    differences,
    parameters_of,
    quiet_trainer,
    read_csv,
)
from tests.models import points


class Seen(L.Callback):
    """Who owned how many layers in each step."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.counts.append(trainer.strategy.plan.placement.counts[0])


def train(
    callbacks: list[L.Callback], num_batches: int = 14, slows_down: bool = False, **how: Any
) -> Any:
    L.seed_everything(7, verbose=False)
    SLOW["factor"] = 1.0
    module, seen = built(Sleeper), Seen()
    others: list[L.Callback] = [SlowsDown()] if slows_down else []
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [4, 4], "microbatches": 4, **how}},
        callbacks=[*others, *callbacks, seen],
        max_epochs=1,
        logger=CSVLogger("logs", name=None, version="") if callbacks else False,
    )
    trainer.fit(module, DataLoader(points(num_batches).dataset, batch_size=8))
    return {
        "counts": seen.counts,
        "parameters": parameters_of(module),
        "decisions": trainer.strategy.decisions,  # type: ignore[attr-defined]
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def on_request() -> Any:
    moves = [
        Move(step=0, layer="layers.4", stage=0),
        Move(step=3, layer="layers.4", stage=1),
        Move(step=3, layer="layers.3", stage=1),
        Move(step=5, layer="layers.0", stage=1),
        Move(step=8, layer="layers.3", stage=0),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train([LayerMigration(moves, watches=False)])
    said = [str(w.message) for w in caught if "nothing moves" in str(w.message)]
    return {**found, "said": said}


def as_it_is() -> Any:
    return train([])


def test_moves_on_request() -> None:
    moved, plain = run_ranks(on_request, 2), run_ranks(as_it_is, 2)
    # The layers of a stage need not be contiguous.
    later = [(2, 6)] * 3 + [(3, 5)] * 2
    assert moved[0]["counts"][:10] == [(4, 4)] * 2 + [(5, 3)] + [(3, 5)] * 2 + later
    for one, other in zip(moved, plain, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
    assert not moved[0]["said"]


def mistaken(move: Move) -> Any:
    return train([LayerMigration([Move(step=1000, layer="layers.0", stage=1), move])])


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (Move(step=1000, layer="layer.3", stage=1), "did you mean 'layers.3' or"),
        (Move(step=1000, layer="layers.3", stage=5), "has the stages 0 to 1"),
        (Move(step=1000, layer="layers.3", stage=1, virtual_machine=1), "there are 1, counted"),
    ],
)
def test_a_move_of_what_is_not_there_is_an_error_at_the_start(move: Move, words: str) -> None:
    for outcome in run_ranks(mistaken, 2, move, expect_failure=True):
        assert outcome.error_type in ("PlanError", "StageFailedError"), outcome
        assert words in outcome.message


def by_itself(num_batches: int, refusal: str = "") -> Any:
    """A run with a stage that gets slow.

    Args:
        num_batches: of the run.
        refusal: why no layer can move, if none can.
    """
    if refusal:

        def refuse(self: Replanning, old: Plan, new: Plan) -> list[Plan]:
            raise PlanError(refusal)

        Replanning.parts_here = refuse  # type: ignore[method-assign]
    go_by_sleep()
    callbacks = [LayerMigration(patience=2), AwaitsPlanning(), PipelineTimeline(folder="logs")]
    with hearing() as heard:
        found = train(callbacks, num_batches, slows_down=True)
    is_first = os.environ["RANK"] == "0"
    return {
        **found,
        "heard": heard,
        "logged": read_csv("logs/metrics.csv") if is_first else [],
        "outcomes": outcomes.load(Path("logs")) if is_first else (),
    }


def test_a_stage_that_gets_slow_gives_layers_away() -> None:
    first, second = run_ranks(by_itself, 2, 20)
    stays = run_ranks(stays_slow, 2)
    assert first["counts"][0] == (4, 4)
    assert first["counts"][-1][0] >= 6
    for one, other in zip((first, second), stays, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
    # Loggers, callback metrics, the log, and the file for the run's page have the same
    # figures.
    known = first["outcomes"]
    for name in ("before_seconds", "expected_seconds", "after_seconds"):
        logged = [row[f"pipeshift/{name}"] for row in first["logged"]]
        found = [getattr(change, name) for change in known]
        assert list(filter(None, logged)) == list(filter(None, found))
        # Callback metrics are 32-bit floats, and have the latest figure.
        *_, latest = filter(None, found)
        for rank in (first, second):
            assert rank["metrics"][f"pipeshift/{name}"] == pytest.approx(latest, rel=1e-6)
    moves = [step for step, (a, b) in enumerate(pairwise(first["counts"]), 1) if a != b]
    assert [change.step for change in known] == moves
    change = known[0]
    assert change.verdict == "kept"
    assert change.after_seconds < change.before_seconds > 1.05 * change.expected_seconds
    assert any(line.endswith(f"{change}.") for line in first["heard"])
    assert second["decisions"] == first["decisions"] == [each.entries for each in known]


def test_a_decision_that_is_refused_is_not_announced() -> None:
    first, _ = run_ranks(by_itself, 2, 14, "Rank 1 lacks 3 MB.")
    assert set(first["counts"]) == {(4, 4)}
    (line,) = (said for said in first["heard"] if "layers move" in said)
    assert line.startswith("PipeShift: the plan stays; layers move, [4, 4] becomes")
    assert line.endswith("; refused, as Rank 1 lacks 3 MB.")
    (change,) = first["outcomes"]
    assert (change.verdict, change.after_seconds) == ("refused", None)
    assert change.before_seconds > 1.05 * change.expected_seconds


def stays_slow() -> Any:
    go_by_sleep()
    return train([], num_batches=20, slows_down=True)


class Swings(L.Callback):
    """The last stage is slow for some steps, and for as many it is not.

    Args:
        half: how many.
    """

    def __init__(self, half: int) -> None:
        self.half = half

    def on_train_batch_start(self, *given: Any) -> None:
        if os.environ["RANK"] == "1":
            SLOW["factor"] = 6.0 if given[3] // self.half % 2 else 1.0


def swings(half: int, num_batches: int) -> Any:
    # What the machine does beside this must not look like a swing.
    go_by_sleep()
    callbacks = [Swings(half), LayerMigration(patience=5, min_gain=0.3), AwaitsPlanning()]
    return train(callbacks, num_batches)["counts"]


@pytest.mark.parametrize(("half", "num_batches", "allowed"), [(3, 50, 2), (12, 100, 3)])
def test_a_stage_that_swings_does_not_make_layers_swing(
    half: int, num_batches: int, allowed: int
) -> None:
    """By the mean over fast swings the stage is slow. Slow swings last long enough to be reacted
    to, and layers that have to be taken back are moved ever more reluctantly: eight times the stage
    changes its speed here.
    """
    counts, _ = run_ranks(swings, 2, half, num_batches)
    assert 0 < sum(a != b for a, b in pairwise(counts)) <= allowed


class Stops(L.Callback):
    """The last stage has two fifths of a processor, as by a container's quota: it is stopped for
    60 ms whenever it has run for 40 ms. Nine of ten layers do not notice.
    """

    def on_train_batch_start(self, *given: Any) -> None:
        if os.environ["RANK"] == "1" and given[3] == 4:
            STOPPED.update(each=0.04, seconds=0.06)


def stops(watches: bool) -> Any:
    go_by_sleep()
    STOPPED.update(each=math.inf, seconds=0.0)
    watching, asks = LayerMigration(patience=5, watches=watches), AsksForStatus()
    found = train([Stops(), watching, AwaitsPlanning(), asks], 50)
    return {**found, "status": asks.text}


class AsksForStatus(L.Callback):
    """What `pipeshift move` shows at the end of a run."""

    text = ""

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        found = {**status_of(trainer.strategy.pipeline), "process": 1, "host": "h"}
        self.text = shown({**found, "time": 0.0}, True)


def test_a_cpu_quota_is_seen_and_the_slow_rank_is_named() -> None:
    moved, stays = run_ranks(stops, 2, True), run_ranks(stops, 2, False)
    counts = moved[0]["counts"]
    assert counts[0] == (4, 4)
    assert counts[-1][0] >= 6
    assert sum(a != b for a, b in pairwise(counts)) == 1
    for one, other in zip(moved, stays, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
    text = moved[0]["status"]
    (slow,) = re.findall(r"Rank (\d) on .* is slow: in one second it delivers .* in (\d+) ms", text)
    assert slow[0] == "1"
    assert int(slow[1]) == pytest.approx(400, rel=0.1)
    (change,) = moved[0]["decisions"]
    assert f"step {change['step']}: layers move, [4, 4] becomes {list(counts[-1])}: a step" in text
    assert text.rstrip().endswith("; kept.")


class Swells(L.Callback):
    """The last stage is slow; but the first one is even slower with more than four layers."""

    def on_train_batch_start(self, trainer: Any, *given: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 0:
            SLOW["factor"] = 1.0
        elif os.environ["RANK"] == "1":
            SLOW["factor"] = 3.0
        else:
            SLOW["factor"] = 5.0 if trainer.strategy.plan.placement.counts[0][0] > 4 else 1.0


def swells(partition: Any, watches: bool) -> Any:
    go_by_sleep()
    watching = [LayerMigration(patience=4)] if watches else []
    with hearing() as heard:
        callbacks = [Swells(), *watching, AwaitsPlanning()]
        found = train(callbacks, 60, partition=partition, profile_steps=4)
    return {**found, "heard": heard}


@pytest.mark.parametrize(("partition", "watches"), [([4, 4], True), ("auto", False)])
def test_a_move_that_makes_steps_slower_is_undone_and_not_tried_again(
    partition: Any, watches: bool
) -> None:
    first, second = run_ranks(swells, 2, partition, watches)
    spans = [counts for counts, _ in groupby(first["counts"])]
    (start, moved, *end) = spans
    assert start == (4, 4)
    assert moved[0] > 4
    assert end == [(4, 4)], "and there it stays"
    made, back = first["decisions"]
    assert second["decisions"] == first["decisions"]
    assert made["verdict"] == "undone"
    assert made["expected_seconds"] < made["before_seconds"] < made["after_seconds"]
    # The way back is measured, too.
    assert (back["verdict"], back["before_seconds"]) == ("kept", made["after_seconds"])
    assert back["expected_seconds"] == made["before_seconds"]
    assert back["after_seconds"] == pytest.approx(made["before_seconds"], rel=0.05)
    assert any(line.endswith("; undone.") for line in first["heard"])


class Recovers(L.Callback):
    """The last stage is as good as stopped for a while."""

    def on_train_batch_start(self, *given: Any) -> None:
        if os.environ["RANK"] == "1":
            SLOW["factor"] = 100.0 if 4 <= given[3] < 20 else 1.0


def recovers(watches: bool) -> Any:
    go_by_sleep()
    callbacks = [Recovers(), LayerMigration(patience=3, watches=watches), AwaitsPlanning()]
    return train(callbacks, 50)


def test_a_stage_without_layers_is_measured_again() -> None:
    moved, stays = run_ranks(recovers, 2, True), run_ranks(recovers, 2, False)
    counts = moved[0]["counts"]
    assert counts[0] == (4, 4)
    assert counts[18] == (8, 0)
    assert counts[-1] == (4, 4)
    for one, other in zip(moved, stays, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)


class Asks(L.Callback):
    """Asks for moves as a user's own callback does, twice before a step and once with an error."""

    def __init__(self) -> None:
        self.error = ""

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        strategy = trainer.strategy
        if others[2] == 1:
            strategy.migrate(Move(layer="layers.3", stage=1))
            strategy.migrate(Move(layer="layers.2", stage=1), Move(layer="layers.1", stage=1))
            try:
                strategy.migrate(Move(layer="layers.2", stage=0), Move(layer="layers.2", stage=1))
            except PlanError as error:
                self.error = str(error)
        if others[2] == 3:
            strategy.migrate(Move(layer="layers.0", stage=1))


def drained() -> Any:
    asks = Asks()
    return {**train([asks], num_batches=7), "error": asks.error}


def test_a_stage_is_drained() -> None:
    for rank in run_ranks(drained, 2):
        assert rank["counts"] == [(4, 4)] * 3 + [(1, 7)] * 2 + [(0, 8)] * 2
        assert "two moves of the layer 'layers.2'" in rank["error"]


class AsksForTooMuch(L.Callback):
    """Moves to a stage that has no room for it, by figures of ours."""

    def __init__(self) -> None:
        self.error = ""

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        strategy = trainer.strategy
        if not strategy.is_measured or self.error:
            return
        planning = strategy.pipeline.planning
        if planning.measured is not None:
            first, second = planning.measured.cluster.devices
            cluster = replace(
                planning.measured.cluster, devices=(first, replace(second, free_bytes=1000))
            )
            planning.measured = replace(planning.measured, cluster=cluster)
        try:
            strategy.migrate(Move(layer="layers.3", stage=1))
        except PlanError as error:
            self.error = str(error)


def too_much() -> Any:
    asks = AsksForTooMuch()
    return {**train([LayerMigration(min_gain=99, patience=2), asks], 14), "error": asks.error}


def test_a_move_that_leaves_too_little_memory_is_refused() -> None:
    for rank in run_ranks(too_much, 2):
        assert "virtual machine 0 (one replica of the pipeline) would hold" in rank["error"]
        assert "more than it has" in rank["error"]
        assert set(rank["counts"]) == {(4, 4)}


def configured() -> Any:
    cli = PipeShiftCLI(
        Sleeper,
        run=False,
        args={
            "trainer": {
                "accelerator": "cpu",
                "logger": False,
                "callbacks": [
                    {
                        "class_path": "lightning_pipeshift.LayerMigration",
                        "init_args": {
                            "patience": 7,
                            "moves": [{"layer": "layers.3", "stage": 1, "step": 20}],
                        },
                    }
                ],
            }
        },
    )
    trainer: Any = cli.trainer
    (found,) = [c for c in trainer.callbacks if isinstance(c, LayerMigration)]
    return found.moves, found.patience


def test_the_callback_in_a_configuration() -> None:
    ((moves, patience),) = run_ranks(configured, 1)
    assert moves == [Move(layer="layers.3", stage=1, step=20)]
    assert patience == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_gain": 0}, "min_gain=0"),
        ({"min_gain": float("nan")}, "min_gain=nan"),
        ({"patience": 0}, "patience=0"),
        ({"patience": True}, "patience=True"),
        ({"moves": [("layers.0", 1)]}, "pass `Move"),
    ],
)
def test_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LayerMigration(**arguments)


def test_another_strategy() -> None:
    trainer = quiet_trainer({"devices": 1}, callbacks=[LayerMigration()], max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"`SingleDeviceStrategy`.*strategy='pipeshift'"):
        trainer.fit(built(Sleeper), DataLoader(points(1).dataset, batch_size=8))
