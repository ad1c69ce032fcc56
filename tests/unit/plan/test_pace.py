"""The pace of an asynchronous pipeline, and the time of a step."""

import numpy as np
import pytest

from lightning_pipeshift.plan.cost.pace import steady_pace
from lightning_pipeshift.plan.cost.simulator import Clock, Costs, clock, columns, simulate
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.schedule.schedules import (
    one_forward_one_backward,
    recomputing_stages,
    simulated_rows,
    with_recomputation,
)

BY_HAND = [
    # Forwards, backwards, payloads, gradients, recomputations.
    (([1, 2, 1], [2, 4, 1], [0, 0], [0, 0], [0, 0, 0]), 6),
    # A slow link beside a fast stage is hidden; one that is slower than all is not.
    (([1, 2, 1], [2, 4, 1], [0, 3], [0, 1], [0, 0, 0]), 6),
    (([1, 2, 1], [2, 4, 1], [0, 9], [0, 1], [0, 0, 0]), 9),
    # Two slow stages wait for the messages between them: 6 + 6 and 2 + 2 s for two minibatches.
    (([2, 2, 1], [4, 4, 1], [2, 0], [2, 0], [0, 0, 0]), 8),
    # Three wait for two links: 3 * 6 + 2 * 3 s for three minibatches; two for one: 15 / 2.
    (([2, 2, 2], [4, 4, 4], [2, 2], [1, 1], [0, 0, 0]), 8),
    # A recomputation is never free. It does not wait for a gradient.
    (([2, 2], [4, 4], [0], [0], [2, 0]), 8),
    (([2, 2], [4, 4], [3], [3], [2, 0]), 9),
    (([5], [7], [], [], [0]), 12),
]


@pytest.mark.parametrize(("costs", "seconds"), BY_HAND)
def test_by_hand(costs, seconds):
    assert steady_pace(costs) == seconds


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("num_stages", range(1, 6))
def test_as_in_a_long_run(num_stages, recomputes):
    """The difference of two simulated lengths."""
    draw = np.random.default_rng(num_stages)

    def numbers(count):
        return draw.integers(0, 9, (count, 200)).astype(float)

    costs = [numbers(count) for count in (num_stages, num_stages, num_stages - 1, num_stages - 1)]
    again = numbers(num_stages) * recomputes
    again[-1] = 0
    stages = range(num_stages - 1) if recomputes else ()
    # Any cycle of up to 5 stages fits a whole number of times into 60 minibatches.
    short, long = (
        Clock(with_recomputation(one_forward_one_backward(num_stages, count), stages))
        for count in (120, 180)
    )
    seconds = long.step_seconds([*costs, again]) - short.step_seconds([*costs, again])
    assert seconds / 60 == pytest.approx(steady_pace([*costs, again]), rel=1e-12)


@pytest.mark.parametrize("name", ["async", "async-2bw"])
def test_the_simulator_says_how_long_a_minibatch_takes(name):
    costs = Costs((1, 2, 1), (2, 4, 1), (0.5, 3), (0.5, 1))
    timed = clock(name, 3, 1)
    timeline = simulate(timed, costs)
    assert timeline.step_seconds == 6
    assert timeline.end_seconds == timeline.rows[0][-1].end > 6
    assert timeline.idle_seconds == (3, 0, 4)
    assert timeline.peak_in_flight == (3, 2, 1)
    assert not timeline.is_one_step
    # In the rows, only the last stage's backwards follow their own forwards.
    recomputed = with_recomputation(simulated_rows(name, 3, 1), range(3))
    kinds = [{action.kind for action in row} for row in recomputed]
    again = {stage for stage, found in enumerate(kinds) if Kind.RECOMPUTE in found}
    assert recomputing_stages(name, 3, 1) == again == {0, 1}
    many = [np.array([field, field]).T for field in columns(costs)]
    assert list(timed.step_seconds(many)) == [6, 6]


def test_a_step_ends_with_its_last_action():
    timeline = simulate(clock("1f1b", 2, 3), Costs((1, 1), (2, 2), (0,), (0,)))
    assert timeline.is_one_step
    assert timeline.step_seconds == timeline.rows[0][-1].end
