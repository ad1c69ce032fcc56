import pytest

from lightning_pipeshift.plan.cost.simulator import Costs, simulate
from lightning_pipeshift.plan.document.text_timeline import Scale, draw_row
from lightning_pipeshift.plan.schedule.schedules import gpipe, one_forward_one_backward


def timeline(schedule, forward=(1.0, 1.0)):
    backward = tuple(2 * seconds for seconds in forward)
    free = (0.0,) * (len(forward) - 1)
    return simulate(schedule, Costs(tuple(forward), backward, free, free))


def drawn(timeline, width):
    scale = Scale.fitting(timeline.rows, timeline.end_seconds, width)
    return [draw_row(row, timeline.step_seconds, scale, width) for row in timeline.rows]


def test_1f1b():
    assert drawn(timeline(one_forward_one_backward(2, 3)), 40) == [
        "0──1──······0━━━━━2──1━━━━━···2━━━━━",
        "···0──0━━━━━1──1━━━━━2──2━━━━━······",
    ]


def test_gpipe():
    assert drawn(timeline(gpipe(2, 2)), 40) == [
        "0───1───············0━━━━━━━1━━━━━━━",
        "····0───1───0━━━━━━━1━━━━━━━········",
    ]


def test_a_short_step_is_not_blown_up():
    (row,) = drawn(timeline(gpipe(1, 1), (5.0,)), 100)
    assert row == "0─────0━━━━━━━━━━━"


@pytest.mark.parametrize("width", [20, 41, 80])
def test_a_long_step_shows_how_it_begins_and_ends(width):
    rows = drawn(timeline(one_forward_one_backward(2, 64)), width)
    assert {len(row) for row in rows} == {width}
    assert rows[0].startswith("0──1──")
    assert " ⋯ " in rows[0]
    assert rows[0].endswith("━")
    assert rows[1].endswith("·")


def test_all_stages_take_the_same_time():
    rows = drawn(timeline(one_forward_one_backward(3, 6), (1.0, 0.7, 1.3)), 90)
    assert len({len(row) for row in rows}) == 1
