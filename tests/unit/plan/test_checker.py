import pytest

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.schedule.actions import parse_row
from tests.unit.plan.schedule_checker import check


def schedule(*rows):
    return tuple(map(parse_row, rows))


@pytest.mark.parametrize(
    "rows",
    [
        ("F0 B0",),
        ("F0 F1",),
        ("F0 B0 F1 B1",),
        ("F0 F0> >B0 B0", ">F0 F0 B0 B0>"),
        ("F0 F0>", ">F0 F0"),
        # Recomputation: on some stages, of some microbatches.
        ("F0 F0> F1 F1> >B0 R0 B0 >B1 B1", ">F0 F0 B0 B0> >F1 F1 B1 B1>"),
        # Backwards out of order are legal, as long as both neighbours agree.
        ("F0 F0> F1 F1> >B1 B1 >B0 B0", ">F0 >F1 F0 F1 B1 B1> B0 B0>"),
    ],
)
def test_sound(rows):
    check(schedule(*rows))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "empty schedule"),
        (("", ""), "empty schedule"),
        (("F0 F0 B0",), "stage 0 does F0 again"),
        (("F0 B0 B0",), "stage 0 does B0 again"),
        (("F0 B0 F1",), "stage 0 never does B1; every stage does F and B"),
        (("F0 B0 B1",), "stage 0 never does F1"),
        (("F1 B1",), "stage 0 never does F0.*0 to 1"),
        (("F0 F0>", ""), "stage 1 never does F0; every stage does F of"),
        (("B0 F0",), "stage 0 does B0 before F0"),
        (("F0 B0 R0",), "stage 0 does B0 before R0"),
        (("R0 F0 B0",), "stage 0 does R0 before F0"),
        (("F0 R0 R0 B0",), "stage 0 does R0 again"),
        (("F0 R0",), "stage 0 does R0, but has no backward"),
        # Pairs.
        (("F0", ">F0 F0"), "stage 1 does >F0, but stage 0 never does F0>"),
        (("F0 F0>", "F0"), "stage 0 does F0>, but stage 1 never does >F0"),
        (("F0 F0>",), "stage 0 does F0>, but has no neighbour"),
        ((">F0 F0",), "stage 0 does >F0, but has no neighbour"),
        (("F0 F0> >B0 B0 B0>", ">F0 F0 B0 B0>"), "stage 0 does B0>, but has no neighbour"),
        (("F0 F0> F0>", ">F0 F0"), "stage 0 does F0> again"),
        # Places.
        (("F0", "F0"), "stage 1 does F0 without posting >F0 first"),
        (("F0 F0>", "F0 >F0"), "stage 1 does F0 without posting >F0 first"),
        (("F0> F0", ">F0 F0"), "stage 0 does F0> before F0"),
        # Orders.
        (("F0 F0> F1 F1>", ">F1 >F0 F0 F1"), "stage 1 posts >F1 where stage 0 sends F0>"),
        # Deadlocks: each neighbour waits for what the other does later.
        (
            (
                "F0 F0> >B0 B0 F1 F1> >B1 B1",
                ">F0 >F1 F0 F1 B0 B0> B1 B1>",
            ),
            "deadlock: B0 of stage 0 waits for B0> of stage 1, F1 of stage 1 waits for F1> of st",
        ),
    ],
)
def test_unsound(rows, words):
    with pytest.raises(ScheduleError, match=words):
        check(schedule(*rows))


def test_the_message_draws_the_grid_with_an_arrow():
    with pytest.raises(ScheduleError) as error:
        check(schedule("F0 F0> F1 F1>", ">F1 >F0 F0 F1", ""))
    assert str(error.value).splitlines()[1:] == [
        "stage 0: F0  F0> F1  F1>",
        "stage 1: >F1 >F0 F0  F1",
        "stage 2:",
        "         ^^ here",
    ]
    with pytest.raises(ScheduleError) as error:
        check(schedule("F0 F0> F1 F1>", ">F0 F0 F1 >F1"))
    assert str(error.value).splitlines() == [
        "stage 1 does F1 without posting >F1 first; with_communication() places it",
        "stage 0: F0  F0> F1  F1>",
        "stage 1: >F0 F0  F1  >F1",
        "                 ^^ here",
    ]
