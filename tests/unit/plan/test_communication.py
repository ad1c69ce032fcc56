from lightning_pipeshift.plan.schedule.actions import format_row
from lightning_pipeshift.plan.schedule.communication import with_communication
from lightning_pipeshift.plan.schedule.schedules import (
    INTERLEAVED,
    SCHEDULES,
    forward_only,
    gpipe,
    one_forward_one_backward,
    schedule_named,
)


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
    for name in SCHEDULES.keys() - INTERLEAVED:
        schedule = schedule_named(name)
        found = [row.removesuffix(" W0") for row in table(schedule(3, 1))]
        assert found == ["F0 F0> >B0 B0", ">F0 F0 F0> >B0 B0 B0>", ">F0 F0 B0 B0>"]


def test_forward_only():
    assert table(forward_only(2, 3)) == [
        "F0 F0> F1 F1> F2 F2>",
        ">F0 >F1 F0 >F2 F1 F2",
    ]
