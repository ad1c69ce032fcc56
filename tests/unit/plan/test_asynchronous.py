"""The asynchronous pipeline's rows, and the weights that its minibatches use."""

import pytest

from lightning_pipeshift.errors import PlanError, ScheduleError
from lightning_pipeshift.plan.schedule.actions import Action, Kind, format_row
from lightning_pipeshift.plan.schedule.asynchronous import (
    ahead,
    drain,
    require_deepest_first,
    require_equal_depths,
    shared_copies,
    turn,
    updates_per_backward,
    weight_versions,
)
from lightning_pipeshift.plan.schedule.cut_over import newest_update
from lightning_pipeshift.plan.schedule.schedules import one_forward_one_backward


def test_the_table() -> None:
    turns = [[format_row(turn(k, stage, 3)) for k in range(5)] for stage in range(3)]
    assert turns == [
        ["F0", "F1", "F2 B0", "F3 B1", "F4 B2"],
        ["F0", "F1 B0", "F2 B1", "F3 B2", "F4 B3"],
        ["F0 B0", "F1 B1", "F2 B2", "F3 B3", "F4 B4"],
    ]
    assert [format_row(drain(4, stage, 3)) for stage in range(3)] == ["B3 B4", "B4", ""]


def test_after_a_drain_the_pipeline_fills_again() -> None:
    assert [format_row(turn(k, 0, 3, first=5)) for k in (5, 6, 7)] == ["F5", "F6", "F7 B5"]
    assert format_row(drain(6, 0, 3, first=5)) == "B5 B6"


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 5, 9])
def test_from_drain_to_drain_it_is_1f1b(num_stages: int, num_minibatches: int) -> None:
    rows = []
    for stage in range(num_stages):
        row = [a for k in range(num_minibatches) for a in turn(k, stage, num_stages)]
        rows.append((*row, *drain(num_minibatches - 1, stage, num_stages)))
    assert tuple(rows) == one_forward_one_backward(num_stages, num_minibatches)


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_what_is_ahead_ends_with_the_turn_in_which_its_own_backward_is(num_stages: int) -> None:
    for stage in range(num_stages):
        for k in range(3, 3 + 2 * num_stages):
            row = turn(k, stage, num_stages, 3) + ahead(k, stage, num_stages, 3)
            assert row[-1] == Action(Kind.BACKWARD, k)
            num_behind = num_stages - 1 - stage
            turns = [turn(j, stage, num_stages, 3) for j in range(k, k + num_behind + 1)]
            assert row == tuple(action for each in turns for action in each)


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_no_stage_has_more_minibatches_in_flight_than_stages_are_left(num_stages: int) -> None:
    for stage in range(num_stages):
        in_flight, most = set[int](), 0
        for k in range(4 * num_stages):
            for action in turn(k, stage, num_stages):
                if action.kind is Kind.FORWARD:
                    in_flight.add(action.microbatch)
                    most = max(most, len(in_flight))
                else:
                    in_flight.remove(action.microbatch)
        assert most == num_stages - stage


def test_weight_versions() -> None:
    assert weight_versions("async", 4) == (4, 3, 2, 1)
    assert weight_versions("async", 4, 2) == (3, 2, 2, 1)
    assert weight_versions("async", 4, 9) == (2, 2, 2, 1)
    assert weight_versions("async-2bw", 3) == weight_versions("async-2bw", 3, 5) == (2, 2, 2)
    assert weight_versions("1f1b", 2) == (1, 1)


@pytest.mark.parametrize("num_accumulated", range(1, 8))
@pytest.mark.parametrize("num_stages", range(1, 7))
def test_the_weights_of_the_minibatches_in_flight(num_stages: int, num_accumulated: int) -> None:
    """The newest of them has just begun."""
    versions = weight_versions("async", num_stages, num_accumulated)
    for stage, most in enumerate(versions):
        found = set()
        for last in range(40, 40 + num_accumulated):
            in_flight = range(last - num_stages + 1 + stage, last + 1)
            newest = (newest_update(k, stage, num_stages) for k in in_flight)
            found.add(len({(k + 1) // num_accumulated for k in newest}))
        assert max(found) == most


def test_copies_of_shared_weights() -> None:
    assert shared_copies("async", 4) == ((2, 1), (2, 1), (2, 1), (2, 1))
    assert shared_copies("async", 4, 2) == ((2, 2), (2, 2), (2, 1), (2, 1))
    assert shared_copies("async-2bw", 4, 3) == ((2, 3), (2, 2), (2, 1), (2, 0))
    assert shared_copies("1f1b", 2) == ((2, 0), (2, 0))
    assert shared_copies("async", 1) == shared_copies("1f1b", 1) == ((0, 0),)


def test_how_often_stages_update() -> None:
    assert updates_per_backward("async", 4) == 1
    assert updates_per_backward("async", 4, 2) == 1 / 2
    assert updates_per_backward("async-2bw", 4, 6) == 1 / 6
    # A profile of a run with another schedule may have accumulated less.
    assert updates_per_backward("async-2bw", 4) == 1 / 4
    assert updates_per_backward("1f1b", 4, 2) == 0


def test_virtual_machines_of_unequal_depth() -> None:
    with pytest.raises(PlanError, match=r"2, 3 stages: a deeper pipeline uses older weights"):
        require_equal_depths("async", [2, 3])
    require_equal_depths("async", [3, 3])
    require_equal_depths("async-2bw", [2, 3])
    require_equal_depths("1f1b", [2, 3])
    with pytest.raises(PlanError, match=r"2, 3, 1 stages.*virtual_machines=\[\[0, 1\], \[2\]\]"):
        require_deepest_first([2, 3, 1])
    for depths in ([3, 2, 3], [2, 2], [1]):
        require_deepest_first(depths)


def test_what_is_not_there() -> None:
    with pytest.raises(ScheduleError, match="stages 0 to 2"):
        turn(0, 3, 3)
    with pytest.raises(ScheduleError, match="filled from minibatch 4 on"):
        turn(3, 0, 3, first=4)
