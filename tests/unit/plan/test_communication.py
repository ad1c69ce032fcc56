import itertools

import pytest

from lightning_pipeshift.plan.schedule.actions import format_row, parse_row
from lightning_pipeshift.plan.schedule.communication import with_communication
from lightning_pipeshift.plan.schedule.schedules import (
    SCHEDULES,
    forward_only,
    gpipe,
    one_forward_one_backward,
    with_recomputation,
)
from tests.unit.plan.schedule_checker import check


def table(schedule):
    return [format_row(row) for row in with_communication(schedule)]


def test_gpipe():
    assert table(gpipe(3, 2)) == [
        "F0 F0> >B0 F1 F1> >B1 B0 B1",
        ">F0 >F1 F0 F0> >B0 F1 F1> >B1 B0 B0> B1 B1>",
        ">F0 >F1 F0 F1 B0 B0> B1 B1>",
    ]


def test_1f1b():
    assert table(one_forward_one_backward(2, 3)) == [
        "F0 F0> >B0 F1 F1> B0 >B1 F2 F2> >B2 B1 B2",
        ">F0 F0 >F1 B0 B0> F1 >F2 B1 B1> F2 B2 B2>",
    ]


def test_a_gradient_is_not_received_before_the_forward_that_it_depends_on():
    for schedule in SCHEDULES.values():
        assert table(schedule(3, 1)) == ["F0 F0> >B0 B0", ">F0 F0 F0> >B0 B0 B0>", ">F0 F0 B0 B0>"]


def test_forward_only():
    assert table(forward_only(2, 3)) == [
        "F0 F0> F1 F1> F2 F2>",
        ">F0 >F1 F0 >F2 F1 F2",
    ]


def test_the_last_stage_sends_its_first_chunk_to_the_first_stage():
    assert table(tuple(map(parse_row, ("F0 F0.1 B0.1 B0",) * 2))) == [
        "F0 F0> >F0.1 F0.1 F0.1> >B0.1 B0.1 B0.1> >B0 B0",
        ">F0 F0 F0> >F0.1 F0.1 B0.1 B0.1> >B0 B0 B0>",
    ]


def test_chunks_of_one_stage_need_no_communication():
    schedule = (parse_row("F0 F0.1 F1 B0.1 B0 F1.1 B1.1 B1"),)
    assert with_communication(schedule) == schedule
    check(schedule)


def test_one_stage_has_nothing_to_add():
    assert with_communication(gpipe(1, 2)) == gpipe(1, 2)


def test_empty_rows_stay():
    assert with_communication(((), ())) == ((), ())


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only])
def test_every_schedule_passes_the_check(schedule):
    """The runtime checks no schedule: whatever it runs is among these."""
    for num_stages, num_microbatches in itertools.product(range(1, 7), range(1, 10)):
        rows = schedule(num_stages, num_microbatches)
        for recomputing in range(num_stages + 1):
            again = (
                rows if schedule is forward_only else with_recomputation(rows, range(recomputing))
            )
            check(with_communication(again))
        if schedule is not forward_only:
            check(with_communication(with_recomputation(rows, range(1, num_stages, 2))))


def test_each_receive_is_one_compute_action_early():
    for row in with_communication(one_forward_one_backward(4, 8)):
        computes = [action for action in row if action.kind.is_compute]
        for stage_needs in (">F", ">B"):
            for receive in (a for a in row if a.kind.value == stage_needs):
                needing = next(i for i, c in enumerate(computes) if str(receive) == f">{c}")
                before = sum(a.kind.is_compute for a in row[: row.index(receive)])
                assert before == max(0, needing - 1)


def test_what_depends_on_the_action_before_is_received_behind_it():
    schedule = (parse_row("F0 B0 F1 B1"), parse_row("F0 B0 F1 B1"))
    assert table(schedule) == [
        "F0 F0> >B0 B0 F1 F1> >B1 B1",
        ">F0 F0 >F1 B0 B0> F1 B1 B1>",
    ]


def test_a_table_can_be_written_by_hand():
    schedule = (parse_row("F1 F0"), parse_row("F1 F0"))
    assert table(schedule) == ["F1 F1> F0 F0>", ">F1 >F0 F1 F0"]
