"""Only plans that are in force are announced, and only their gain is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pipeshift import PlanError
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.runtime.planning.decisions import Decisions
from lightning_pipeshift.runtime.planning.move_decision import Decision
from lightning_pipeshift.timeline import outcomes
from lightning_pipeshift.timeline.outcomes import Change
from tests.unit.timeline.test_timeline import PLAN

BETTER = PLAN.with_placement(Placement(((3, 1),)))
PART = PLAN.with_placement(Placement(((1, 3),)))
CHANGE = Change("layers move, [2, 2] becomes [3, 1]", 3.0, 2.0)
MOVES = Decision(BETTER.to_json(), True, "layers move.", CHANGE)
STAYS = Decision(PLAN.to_json(), False, "")


def test_a_change_is_announced_when_its_last_part_is_in_force(tmp_path: Path) -> None:
    said: list[str] = []
    decisions = Decisions(said.append)
    decisions.accept(MOVES)
    decisions.came_into_force(PART, is_last=False)
    assert (said, decisions.changes) == ([], [])
    decisions.step = 7
    decisions.came_into_force(BETTER, is_last=True)
    assert said == ["layers move."]
    assert decisions.changes == [replace(CHANGE, step=7)]
    decisions.step = 17
    decisions.accept(replace(STAYS, judged=replace(CHANGE, after_seconds=2.5, verdict="kept")))
    assert said[1] == (
        "layers move, [2, 2] becomes [3, 1]: a step took 3 s, and 2 s is expected; it takes 2.5 s;"
        " kept."
    )
    assert decisions.changes == [replace(CHANGE, step=7, after_seconds=2.5, verdict="kept")]
    outcomes.save(decisions.changes, tmp_path)
    assert list(outcomes.load(tmp_path)) == decisions.changes


def test_a_refused_decision_moves_nothing_and_gains_nothing() -> None:
    said: list[str] = []
    decisions = Decisions(said.append)
    for _ in range(2):
        decisions.accept(MOVES)
        decisions.refuse("rank 1 lacks 3 MB.")
    (line,) = said
    assert line == (
        "the plan stays; layers move, [2, 2] becomes [3, 1]: a step took 3 s, and 2 s is expected;"
        " refused, as rank 1 lacks 3 MB."
    )
    assert decisions.changes == [replace(CHANGE, verdict="refused", reason="rank 1 lacks 3 MB")]
    # A plan of the user's that is refused has no decision.
    decisions.refuse("the layers are on one stage")
    assert said[1:] == ["the plan stays: the layers are on one stage."]


def test_moves_that_come_between_end_a_decision() -> None:
    said: list[str] = []
    decisions = Decisions(said.append)
    decisions.accept(MOVES)
    decisions.came_into_force(PART, is_last=True)
    assert [each.verdict for each in decisions.changes] == ["refused"]
    assert "other moves were asked for" in said[0]
    decisions.accept(replace(STAYS, message="the plan stays: no other fits."))
    assert said[-1] == "the plan stays: no other fits."


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert outcomes.load(tmp_path) == ()
    (tmp_path / "decisions.json").write_text('{"version": 2, "decisions": [{"step": 1}]}')
    with pytest.raises(PlanError, match=r"decisions\.json.*what"):
        outcomes.load(tmp_path)
    entry = '{"what": "", "before_seconds": 1.0, "expected_seconds": 1.0, "verdict": "good"}'
    (tmp_path / "decisions.json").write_text(f'{{"version": 2, "decisions": [{entry}]}}')
    with pytest.raises(PlanError, match="'kept', 'undone' or 'refused'"):
        outcomes.load(tmp_path)
