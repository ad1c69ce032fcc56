import itertools

import pytest

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.cost.simulator import Costs, simulate
from lightning_pipeshift.plan.schedule.actions import Action, Kind, format_row
from lightning_pipeshift.plan.schedule.communication import with_communication
from lightning_pipeshift.plan.schedule.execution_order import execution_order
from lightning_pipeshift.plan.schedule.schedules import (
    SCHEDULES,
    eager_one_forward_one_backward,
    forward_only,
    gpipe,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
    recomputing_stages,
    schedule_named,
    with_recomputation,
    zero_bubble_h1,
)


def table(schedule):
    return [format_row(row) for row in schedule]


def test_gpipe():
    assert table(gpipe(2, 3)) == [
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 F2 B0 B1 B2",
    ]


def test_1f1b():
    assert table(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert table(one_forward_one_backward(3, 2)) == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_1f1b_on_one_stage():
    assert table(one_forward_one_backward(1, 2)) == ["F0 B0 F1 B1"]


def test_zero_bubble_h1():
    assert table(zero_bubble_h1(3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_zero_bubble_h1_with_few_microbatches():
    assert table(zero_bubble_h1(3, 1)) == ["F0 B0 W0", "F0 B0 W0", "F0 B0 W0"]


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_zero_bubble_h1_waits_for_a_third_of_the_time(num_stages):
    """Stages of 1 s for each of the three parts: Qi et al., ICLR 2024, table 1."""
    num_microbatches = 2 * num_stages
    free = (0.0,) * (num_stages - 1)
    costs = Costs((1.0,) * num_stages, (2.0,) * num_stages, free, free)
    timeline = simulate(zero_bubble_h1(num_stages, num_microbatches), costs)
    assert timeline.step_seconds == 3.0 * num_microbatches + num_stages - 1
    assert max(timeline.peak_in_flight) == num_stages


def test_interleaved_1f1b():
    assert table(interleaved_one_forward_one_backward(2, 4)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]
    assert table(interleaved_one_forward_one_backward(1, 2)) == ["F0 B0 F1 B1"]


@pytest.mark.parametrize("num_stages", range(2, 7))
def test_interleaved_1f1b_waits_for_half_of_the_time(num_stages):
    """Of 1F1B, with two chunks of layers: Narayanan et al., SC 2021, section 2.2."""
    num_microbatches, free = 3 * num_stages, (0.0,) * (2 * num_stages - 1)
    costs = Costs((0.5,) * 2 * num_stages, (1.0,) * 2 * num_stages, free, free)
    timeline = simulate(interleaved_one_forward_one_backward(num_stages, num_microbatches), costs)
    assert timeline.step_seconds == 3.0 * (num_microbatches + (num_stages - 1) / 2)
    assert timeline.idle_seconds == (3.0 * (num_stages - 1) / 2,) * 2 * num_stages


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_interleaved_1f1b_runs_to_its_end_with_any_number_of_microbatches(num_stages):
    for num_microbatches in range(1, 3 * num_stages + 2):
        schedule = interleaved_one_forward_one_backward(num_stages, num_microbatches)
        for row in schedule:
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                numbers = range(num_microbatches)
                everything = {Action(kind, number, chunk) for number in numbers for chunk in (0, 1)}
                assert sorted(map(str, everything)) == sorted(
                    str(action) for action in row if action.kind is kind
                )
        sent = with_communication(schedule)
        assert len(execution_order(sent)) == sum(map(len, sent))


def test_eager_1f1b():
    assert table(eager_one_forward_one_backward(3, 6)) == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_eager_1f1b_with_few_microbatches():
    assert table(eager_one_forward_one_backward(3, 3)) == [
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 F2 B0 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("num_stages", range(2, 6))
def test_eager_1f1b_waits_for_messages_in_the_fill_and_the_drain_only(num_stages, seconds):
    """Stages of 3 s for a microbatch, messages that take `seconds`."""
    num_microbatches = 3 * num_stages
    links = (seconds,) * (num_stages - 1)
    costs = Costs((1.0,) * num_stages, (2.0,) * num_stages, links, links)
    ideal = 3.0 * (num_microbatches + num_stages - 1)
    eager = simulate(eager_one_forward_one_backward(num_stages, num_microbatches), costs)
    assert eager.step_seconds == pytest.approx(ideal + 2 * (num_stages - 1) * seconds)
    stages_left = range(num_stages, 0, -1)
    assert eager.peak_in_flight == tuple(2 * left - 1 for left in stages_left)
    plain = simulate(one_forward_one_backward(num_stages, num_microbatches), costs)
    assert plain.peak_in_flight == tuple(stages_left)
    if seconds:
        # Every microbatch but those of the fill waits for a message there or a message back.
        waits = (num_microbatches - num_stages) * seconds
        assert plain.step_seconds > eager.step_seconds + 0.9 * waits


def test_recomputation_comes_directly_before_the_backward():
    schedule = with_recomputation(one_forward_one_backward(3, 4), {0, 1, 2})
    assert table(schedule) == [
        "F0 F1 F2 R0 B0 F3 R1 B1 R2 B2 R3 B3",
        "F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 R3 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert table(with_recomputation(gpipe(2, 2), {1})) == ["F0 F1 B0 B1", "F0 F1 R0 B0 R1 B1"]
    assert recomputing_stages("1f1b", 3, 4) == {0, 1}
    assert recomputing_stages("gpipe", 3, 4) == {0, 1, 2}
    assert recomputing_stages("1f1b", 2, 1) == set()


def test_forward_only():
    assert table(forward_only(2, 3)) == ["F0 F1 F2", "F0 F1 F2"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_backwards_accumulate_in_one_order(name):
    for num_stages, num_microbatches in itertools.product(range(1, 6), range(1, 8)):
        for row in schedule_named(name)(num_stages, num_microbatches):
            for kind, chunk in itertools.product((Kind.FORWARD, Kind.BACKWARD), (0, 1)):
                own = [each for each in row if (each.kind, each.chunk) == (kind, chunk)]
                order = [action.microbatch for action in own]
                assert order == list(range(num_microbatches if chunk == 0 or order else 0))


def test_unknown_name():
    with pytest.raises(ScheduleError, match=r"'zigzag'.*'gpipe', '1f1b'"):
        schedule_named("zigzag")


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only])
def test_counts_are_positive(schedule):
    with pytest.raises(ScheduleError, match="0 stages"):
        schedule(0, 1)
    with pytest.raises(ScheduleError, match="0 microbatches"):
        schedule(1, 0)
