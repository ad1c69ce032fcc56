"""Hosts that are held back for some time: what the committed results reach of the goals."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.figures import Results
from benchmarks.slow_hosts import LAYERS, PAUSES, STOPPED, cases_of

# By case and goal, the figures that miss it. Take out what holds by a new result.
MISSED = {
    ("stop 5 ms 75%, layers of 4 ms", "of_the_optimum"): 0.845,
    ("stop 50 ms 25%, layers of 4 ms", "after_over_before"): 1.07,
    ("stop 500 ms 25%, layers of 4 ms", "after_over_before"): 1.10,
    ("stop 100 ms 75%, layers of 4 ms", "after_over_before"): 1.07,
    ("stop 100 ms 50%, layers of 1 ms", "after_over_before"): 1.07,
    ("stop 500 ms 50%, layers of 4 ms", "after_over_before"): 1.06,
    ("stop 500 ms 75%, layers of 4 ms", "of_the_optimum"): 0.897,
    ("stop 500 ms 75%, layers of 4 ms", "after_over_before"): 1.08,
    ("quota 100 ms 75%, layers of 2 ms", "of_the_optimum"): 0.884,
}
LOADED = "loaded 0 ms 0%, layers of 4 ms"


def measured() -> dict[str, dict[str, Any]]:
    results = Results()
    return results.value("slow_hosts") | results.value("slow_hosts_quota")


def missed(found: dict[str, Any]) -> Iterator[str]:
    """The goals that a case misses."""
    holds = {
        "of_the_optimum": found["of_the_optimum"] >= 0.90,
        "after_over_before": found["after_over_before"] <= 1.05,
        "moves_before": found["moves_before"] == 0,
        "moves_during": found["moves_during"] <= 2,
        "moves_after": found["moves_after"] <= 2,
        "bitwise_equal": found["bitwise_equal"] is True,
    }
    return (goal for goal, is_reached in holds.items() if not is_reached)


def test_what_misses_the_goals_is_listed_with_its_figure() -> None:
    cases = measured()
    figures = {(case, goal): cases[case][goal] for case in cases for goal in missed(cases[case])}
    assert figures.keys() == MISSED.keys()
    assert figures == pytest.approx(MISSED, abs=0.005)


def test_every_case_is_measured() -> None:
    options = SimpleNamespace(layers=LAYERS, pauses=PAUSES, stopped=STOPPED, only=None)
    cases = {str(case) for case in cases_of(options)}
    assert cases - {LOADED} == measured().keys()


def test_nothing_has_moved_without_a_cause() -> None:
    found = Results().value("slow_hosts_loaded")[LOADED]
    assert len(found["seconds"]) == 499, "from one of 500 steps to the next"
    assert (found["changes"], found["parts"]) == ([], [])
    assert found["bitwise_equal"] is True


@pytest.mark.parametrize(
    ("goal", "value"),
    [
        ("of_the_optimum", 0.89),
        ("after_over_before", 1.06),
        ("moves_before", 1),
        ("moves_during", 3),
        ("moves_after", 3),
        ("bitwise_equal", False),
    ],
)
def test_a_figure_beyond_a_goal_misses_it(goal: str, value: object) -> None:
    good = measured()["stop 10 ms 50%, layers of 4 ms"]
    assert list(missed(good)) == []
    assert list(missed({**good, goal: value})) == [goal]
