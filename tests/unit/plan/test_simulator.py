import math

import numpy as np
import pytest

from lightning_pipeshift.errors import PlanError, ScheduleError
from lightning_pipeshift.plan.cost.simulator import Costs, clock, columns, simulate
from lightning_pipeshift.plan.schedule.actions import Action, Kind, parse_row
from lightning_pipeshift.plan.schedule.communication import with_communication
from lightning_pipeshift.plan.schedule.execution_order import execution_order
from lightning_pipeshift.plan.schedule.schedules import (
    forward_only,
    gpipe,
    one_forward_one_backward,
    with_recomputation,
)


def costs(forward, backward, payload=0.0, gradient=0.0):
    gaps = len(forward) - 1
    return Costs(tuple(forward), tuple(backward), (payload,) * gaps, (gradient,) * gaps)


def spans(spans):
    return " ".join(f"{span.action}@{span.start:g}-{span.end:g}" for span in spans)


def test_every_start_and_end():
    timeline = simulate(one_forward_one_backward(2, 2), costs([1, 1], [2, 2]))
    assert [spans(row) for row in timeline.rows] == [
        "F0@0-1 F1@1-2 B0@4-6 B1@7-9",
        "F0@1-2 B0@2-4 F1@4-5 B1@5-7",
    ]
    assert timeline.step_seconds == 9
    assert timeline.idle_seconds == (3, 3)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("k", range(1, 8))
def test_balanced_step_is_k_plus_n_minus_1_rounds(schedule, n, k):
    timeline = simulate(schedule(n, k), costs([3] * n, [5] * n))
    assert timeline.step_seconds == (k + n - 1) * (3 + 5)
    assert timeline.idle_seconds == ((n - 1) * (3 + 5),) * n


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("k", range(1, 8))
def test_in_flight(n, k):
    equal = costs([1] * n, [2] * n)
    one_one = simulate(one_forward_one_backward(n, k), equal)
    assert one_one.peak_in_flight == tuple(min(n - s, k) for s in range(n))
    assert simulate(gpipe(n, k), equal).peak_in_flight == (k,) * n
    assert simulate(forward_only(n, k), equal).peak_in_flight == (0,) * n


def recomputing(stages, forward, backward, k=8):
    """A step in which some stages recompute all."""
    n = len(forward)
    schedule = with_recomputation(one_forward_one_backward(n, k), stages)
    again = tuple(seconds if s in stages else 0 for s, seconds in enumerate(forward))
    free = (0.0,) * (n - 1)
    return simulate(schedule, Costs(tuple(forward), tuple(backward), free, free, again))


def test_every_start_and_end_with_recomputation():
    timeline = recomputing({0}, [1, 1], [2, 4], k=2)
    assert [spans(row) for row in timeline.rows] == [
        "F0@0-1 F1@1-2 R0@2-3 B0@6-8 R1@8-9 B1@11-13",
        "F0@1-2 B0@2-6 F1@6-7 B1@7-11",
    ]
    assert timeline.idle_seconds == (13 - 8, 13 - 10)


@pytest.mark.parametrize("slowest", [6, 7, 8, 9])
def test_recomputation_is_free_where_the_slowest_stage_takes_as_long(slowest):
    # NUDT: stage i recomputes for free in the steady state iff the slowest takes 2 F_i + B_i.
    forward, backward = [2, 2, 2], [4, 4, slowest - 2]
    plain = simulate(one_forward_one_backward(3, 40), costs(forward, backward))
    again = recomputing({0, 1}, forward, backward, k=40)
    per_microbatch = (again.step_seconds - plain.step_seconds) / 40
    if slowest >= 2 * 2 + 4:
        # What is left is in the draining, once.
        assert again.step_seconds - plain.step_seconds <= 2 * 2
    else:
        assert per_microbatch == pytest.approx(8 - slowest, rel=0.1)


def test_what_recomputes_holds_as_many_microbatches():
    plain = simulate(one_forward_one_backward(4, 8), costs([1] * 4, [2] * 4))
    again = recomputing({0, 1, 2}, [1] * 4, [2] * 4)
    assert again.peak_in_flight == plain.peak_in_flight


def test_many_costs_at_once_are_each_by_itself():
    timed = clock("1f1b", 3, 5)
    some = [costs([1, 2, 3], [4, 5, 6], 0.5, 0.25), costs([3, 1, 1], [1, 1, 2], 0.0, 3.0)]
    together = timed.step_seconds(
        [np.array(column).T for column in zip(*map(columns, some), strict=True)]
    )
    assert list(together) == [simulate(timed, each).step_seconds for each in some]


def test_transfers_take_time_and_overlap_compute():
    timeline = simulate(forward_only(2, 3), costs([1, 1], [0, 0], payload=1))
    assert [spans(row) for row in timeline.rows] == ["F0@0-1 F1@1-2 F2@2-3", "F0@2-3 F1@3-4 F2@4-5"]
    assert spans(timeline.transfers[0]) == "F0>@1-2 F1>@2-3 F2>@3-4"
    assert timeline.transfers[1] == ()


def test_a_link_carries_one_transfer_after_the_other():
    timeline = simulate(forward_only(2, 3), costs([1, 1], [0, 0], payload=3))
    assert spans(timeline.transfers[0]) == "F0>@1-4 F1>@4-7 F2>@7-10"
    assert timeline.step_seconds == 11


def test_gradients_have_their_own_time_and_direction():
    timeline = simulate(gpipe(2, 1), costs([1, 1], [2, 2], payload=10, gradient=100))
    assert spans(timeline.rows[0]) == "F0@0-1 B0@114-116"
    assert spans(timeline.transfers[1]) == "B0>@14-114"


def test_each_boundary_has_its_own_time():
    three = Costs((1, 1, 1), (1, 1, 1), (10, 20), (100, 200))
    rows = simulate(gpipe(3, 1), three).rows
    assert [row[0].start for row in rows] == [0, 11, 32]
    assert [row[1].start for row in rows] == [335, 234, 33]


def test_a_drained_stage_costs_nothing():
    timeline = simulate(one_forward_one_backward(3, 4), costs([1, 0, 1], [2, 0, 2]))
    assert timeline.step_seconds == (4 + 2 - 1) * 3
    assert timeline.idle_seconds[1] == timeline.step_seconds


def test_the_slowest_stage_sets_the_pace():
    even = simulate(one_forward_one_backward(3, 100), costs([2, 2, 2], [4, 4, 4]))
    uneven = simulate(one_forward_one_backward(3, 100), costs([1, 4, 1], [2, 8, 2]))
    assert uneven.step_seconds > 1.9 * even.step_seconds


def test_with_or_without_communication():
    schedule, price = one_forward_one_backward(3, 5), costs([1, 2, 3], [4, 5, 6], 0.5, 0.25)
    one, other = simulate(schedule, price), simulate(with_communication(schedule), price)
    assert one.rows == other.rows
    assert one.transfers == other.transfers
    assert one.step_seconds == other.step_seconds


def test_wrong_schedules():
    with pytest.raises(ScheduleError, match=r"2 stages and costs of 1"):
        simulate(gpipe(2, 1), costs([1], [1]))
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate((parse_row("B0 F0"), parse_row("F0 B0")), costs([1, 1], [1, 1]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((), (), (), ()), "0 stages"),
        (((1,), (1, 1), (), ()), "1 stages with 2 backward_seconds; 1 are"),
        (((1, 1), (1, 1), (), (0,)), "2 stages with 0 payload_seconds; 1 are"),
        (((1, 1), (1, 1), (0,), (0, 0)), "gradient_seconds"),
        (((1,), (-1,), (), ()), "-1 among backward_seconds"),
        (((math.nan,), (1,), (), ()), "nan among forward_seconds"),
    ],
)
def test_wrong_costs(arguments, words):
    with pytest.raises(PlanError, match=words):
        Costs(*arguments)


def test_costs_are_of_all_stages():
    with pytest.raises(ScheduleError, match="a schedule of 2 stages and costs of 3; they must"):
        simulate(one_forward_one_backward(2, 2), costs([1, 1, 1], [1, 1, 1]))


def run_action_by_action(schedule, by_kind):
    """The oracle: (stage, action, start, end), one action after the other."""
    free, found = [0.0] * len(schedule), []
    link_free: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, Action], float] = {}
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.SEND_PAYLOAD, Kind.SEND_GRADIENT, Kind.RECOMPUTE)
    seconds_of = dict(zip(kinds, by_kind, strict=True))
    for stage, index in execution_order(schedule):
        action = schedule[stage][index]
        start = free[stage]
        if action.kind.is_compute:
            needed = action.receive_needed(stage, len(schedule))
            start = max(start, arrived[stage, needed]) if needed else start
            end = free[stage] = start + seconds_of[action.kind][stage]
        elif action.kind.is_send:
            there = action.counterpart(stage, len(schedule))
            link = stage, there[0]
            start = max(start, link_free.get(link, 0.0))
            end = start + seconds_of[action.kind][min(link)]
            link_free[link] = arrived[there] = end
        else:
            continue
        found.append((stage, action, start, end))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_timeline_has_the_times_of_a_run_action_by_action(seed):
    draw = np.random.default_rng(seed)
    num_stages = int(draw.integers(1, 6))
    schedule = ("gpipe", "1f1b", "eager_1f1b", "async")[seed % 4]
    timed = clock(schedule, num_stages, int(draw.integers(1, 9)))
    sizes = (num_stages, num_stages, num_stages - 1, num_stages - 1)
    given = Costs(*(tuple(draw.random(size).tolist()) for size in sizes))
    found = simulate(timed, given)
    by_action = run_action_by_action(timed.schedule, columns(given))
    for is_compute, rows in ((True, found.computed), (False, found.sent)):
        for stage, row in enumerate(rows):
            assert list(row.spans) == [
                (action, start, end)
                for there, action, start, end in by_action
                if there == stage and action.kind.is_compute == is_compute
            ]
