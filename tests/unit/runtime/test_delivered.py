"""What a device delivers is found however its pauses lie; by a simulated clock."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import cycle, product

import pytest

from lightning_pipeshift.runtime.planning.delivered import recent
from lightning_pipeshift.runtime.planning.slow_rank import ProbeTimes

PATIENCE = 10
LAYERS, MICROBATCHES = 4, 4


class Paused:
    """A process that runs for some time, and is stopped for some time, in turn.

    Args:
        pause: seconds.
        stopped: the part of the time in which it is stopped.
        begins: how long it has run when the first step begins, as a part of a period.
    """

    def __init__(self, pause: float, stopped: float, begins: float) -> None:
        self.pause = pause
        self.runs = pause * (1 - stopped) / stopped
        self._has_run = begins * self.runs

    def work(self, seconds: float) -> float:
        """The time that some work takes, with the pauses in it."""
        stops, self._has_run = divmod(self._has_run + seconds, self.runs)
        return seconds + stops * self.pause

    def step(self, layer: float) -> float:
        """The work of a step: the sum of its layers' calls, a forward and a backward each."""
        calls = [layer] * LAYERS + [2 * layer] * LAYERS
        return sum(self.work(call) for _ in range(MICROBATCHES) for call in calls)


def steps_for(periods: int, pause: Paused, layer: float) -> int:
    """After how many steps the process has been stopped so often."""
    return math.ceil(periods * pause.runs / (3 * layer * LAYERS * MICROBATCHES))


@pytest.mark.parametrize("layer", [0.001, 0.002, 0.005, 0.010, 0.020, 0.050])
def test_the_delivered_speed_is_within_a_tenth_after_20_pauses(layer: float) -> None:
    """And after 20 steps at least: pauses of 500 ms are rarer than steps of 48 ms."""
    for pause, stopped, begins in product(
        (0.005, 0.010, 0.050, 0.100, 0.500), (0.25, 0.5, 0.75), (0.0, 0.3, 0.9)
    ):
        process = Paused(pause, stopped, begins)
        num_steps = max(2 * PATIENCE, steps_for(20, process, layer))
        found = recent([process.step(layer) for _ in range(num_steps)], PATIENCE)
        speed = 3 * layer * LAYERS * MICROBATCHES / found.mean
        assert speed == pytest.approx(1 - stopped, rel=0.1), (pause, stopped, begins)


def noisy(mean: float, count: int, seed: int = 1) -> Iterator[float]:
    draw = random.Random(seed)
    return (mean * draw.uniform(0.95, 1.05) for _ in range(count))


def test_one_long_pause_is_an_accident_and_two_are_not() -> None:
    steps = [*noisy(1.0, 30)]
    steps[25] = 60.0
    assert recent(steps, PATIENCE).mean == pytest.approx(1.0, rel=0.03)
    steps[22] = 60.0
    assert recent(steps, PATIENCE).mean > 3


def test_steps_before_a_change_do_not_count() -> None:
    slower = [*noisy(1.0, 200), *noisy(1.5, PATIENCE, seed=2)]
    found = recent(slower, PATIENCE)
    assert found.mean == pytest.approx(1.5, rel=0.03)
    assert found.num_steps == PATIENCE
    same = recent([*noisy(1.0, 210)], PATIENCE)
    assert same.num_steps > 100
    assert same.error < found.error / 2


@pytest.mark.parametrize("since", [15, 16, 19])
def test_steps_before_a_change_do_not_count_wherever_it_is(since: int) -> None:
    """A decision falls into the first steps after it: then both halves of 20 steps have some."""
    steps = [*noisy(0.15, 40), *noisy(0.30, since, seed=3)]
    found = recent(steps, PATIENCE)
    assert found.mean == pytest.approx(0.30, rel=0.03)
    assert found.num_steps <= since + 2


def test_a_long_time_without_rare_pauses_is_no_change() -> None:
    steps = ([0.05] * 30 + [0.55]) * 16
    for clean in range(31):
        found = recent([*steps, *([0.05] * clean)], PATIENCE)
        assert found.mean == pytest.approx(0.05 + 0.5 / 31, rel=0.1), clean
        assert found.num_steps > 100


def test_the_error_says_how_much_is_open() -> None:
    rare = [1.0] * 100
    for step in range(9, 100, 20):
        rare[step] = 11.0
    found = recent(rare, 100)
    assert found.mean == 1.5
    assert found.error == pytest.approx(1 / 6), "one pause in every other tenth of the steps"
    regular = [1.0, 1.0, 1.0, 1.0, 6.0] * 20
    assert recent(regular, 100)[:2] == (2.0, 0.0), "each tenth has two"
    assert recent([2.0], PATIENCE) == (2.0, 0.0, 1)


def due(times: ProbeTimes, is_held: bool, count: int, window_seconds: float = 10.0) -> list[int]:
    return [n for n in range(1, count + 1) if times.seconds(is_held, False, window_seconds)]


def test_after_a_failed_return_the_next_probe_waits_twice_as_long() -> None:
    times = ProbeTimes()
    assert due(times, False, 20) == []
    assert due(times, True, 8) == [4, 8]
    for after in (8, 16, 32):
        assert due(times, False, 3) == []
        assert due(times, True, after) == [after]
    # It has kept its layers for long: what made it slow then may be over.
    assert due(times, False, 100) == []
    assert due(times, True, 64) == [32, 64]


def test_probes_take_a_twentieth_of_the_time_at_most() -> None:
    assert due(ProbeTimes(), True, 18, window_seconds=1.0) == [6, 12, 18]

    for window_seconds in (0.1, 1.0, 2.0, 100.0):
        times = ProbeTimes()
        found = [times.seconds(True, False, window_seconds) for _ in range(200)]
        assert sum(found) <= 0.05 * len(found) * window_seconds + 1e-9
        assert all(0.3 <= each <= 3.0 for each in filter(None, found))
        assert any(found)


def slices_of(times: ProbeTimes, seconds: float, some: list[float]) -> list[float]:
    """What a probe measures that finds these slices again and again; 2 ms is fast."""
    slices: list[float] = []
    coming, taken = cycle(some), 0.0
    while more := times.lasts(slices, taken, seconds, limit=0.0022):
        taken += more
        end = sum(slices) + more
        while sum(slices) < end:
            slices.append(next(coming))
    return slices


@pytest.mark.parametrize("window_seconds", [1.0, 10.0, 100.0])
def test_a_probe_that_goes_on_for_three_seconds_is_made_up_for(window_seconds: float) -> None:
    times, taken = ProbeTimes(), 0.0
    for window in range(1, 201):
        if seconds := times.seconds(True, False, window_seconds):
            assert sum(slices_of(times, seconds, [0.002])) == pytest.approx(3.0, abs=0.01)
            taken += 3.0
            assert taken <= 0.05 * window * window_seconds + 3.0
    assert taken > 3.0


def test_a_probe_ends_when_it_is_sure_that_the_rank_is_slow() -> None:
    """Three seconds are for rare pauses. What they did not take is there for the next probe."""
    times = ProbeTimes()
    assert due(times, True, 4, window_seconds=20.0) == [4]
    seconds = 3.0
    often = [0.002, 0.007]
    assert sum(slices_of(times, seconds, often)) == pytest.approx(0.3, abs=0.01)
    found = [times.seconds(True, False, 0.0) for _ in range(4)]
    assert found[:3] == [0.0, 0.0, 0.0]
    assert found[3] == pytest.approx(2.7, abs=0.01)

    # Half a second in each second: only a longer probe says how slow that is.
    seldom = [0.002] * 125 + [0.502] + [0.002] * 125
    assert sum(slices_of(times, seconds, seldom)) == pytest.approx(3.0, abs=0.5)


def test_a_rank_that_shows_how_slow_it_is_needs_no_probe_until_it_looks_fast() -> None:
    times = ProbeTimes()
    assert not any(times.seconds(True, True, 10.0) for _ in range(50))
    assert times.seconds(True, False, 10.0), "at once: it has been held for long"
