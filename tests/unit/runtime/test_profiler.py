"""What a rank measures of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from lightning_pipeshift.devices.streams import synchronize
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.planning import profiling
from lightning_pipeshift.runtime.planning.profile_fitting import RankFigures
from lightning_pipeshift.runtime.planning.profiling import Profiler
from tests.simulated.device import SimulatedDevice

GPU = torch.device("cuda", 0)


def test_the_time_between_two_steps_is_that_of_the_device_and_not_the_hosts_waits() -> None:
    """On the simulated device each operation takes a millisecond. The host does not wait for any:
    by its clock, what is left of the step would be between two steps.
    """
    with SimulatedDevice():
        profiler = Profiler(GPU, LinkMeter(frozenset()))
        value = torch.zeros(4, device=GPU)
        for _ in range(7):
            profiler.begin_step()
            for _ in range(50):
                value.add_(1)
            profiler.end_step()
            value.mul_(2)
            value.mul_(3)
            synchronize(GPU)
        figures = profiler.figures((), [], ())
    assert figures.outside_seconds == 0.002


class Moment:
    """An event at a time that a test chooses."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Moment) -> float:
        return 1000 * (end.seconds - self.seconds)


def measured(profiler: Profiler, layers: Sequence[int], seconds: float) -> RankFigures:
    """What some steps say in which each of these layers takes so long."""
    profiler.begin_anew()
    for _ in range(10):
        profiler.timers([1])
        profiler.begin_step()
        for layer in layers:
            profiler.timer.add("forward", layer, Moment(0.0), Moment(seconds))
        profiler.end_step()
    return profiler.figures(layers, [], [], fewest=10)


def test_a_rank_that_gave_layers_away_counts_as_slow_as_it_has_been_since() -> None:
    profiler = Profiler(torch.device("cpu"), LinkMeter(frozenset()))
    measured(profiler, (0, 1, 2, 3), 0.1)
    # Steps from before it got slow were in that mean, and it gives layers away all the same.
    measured(profiler, (0, 1, 2, 3), 0.15)
    assert measured(profiler, (0,), 0.3).earlier[3][0] == pytest.approx(0.15)
    assert measured(profiler, (0,), 0.3).earlier[3][0] == pytest.approx(0.3)
    # With so little to do it may look fast, whether it is or not.
    assert measured(profiler, (0,), 0.1).earlier[3][0] == pytest.approx(0.3)
    assert not measured(profiler, (0, 1), 0.1).earlier


def test_a_pause_in_a_layer_is_none_outside_of_it() -> None:
    """In each action another layer is stopped for longer than all take. The rest of an action is
    2 ms, stretched as all work is.
    """
    profiler = Profiler(torch.device("cpu"), LinkMeter(frozenset()))
    for step in range(3 + 18):
        profiler.timers([1])
        profiler.begin_step()
        for what in (Kind.FORWARD, Kind.BACKWARD):
            for layer in range(3):
                seconds = 0.7 if step % 3 == layer else 0.1
                profiler.timer.add(what.name.lower(), layer, Moment(0.0), Moment(seconds))
            profiler.timer.add(what.name, -1, Moment(0.0), Moment(0.902), is_around=True)
        profiler.end_step()
    figures = profiler.figures((0, 1, 2), [], [], fewest=10)
    assert sum(map(sum, figures.times.values())) == pytest.approx(2 * 0.9)
    assert figures.extra == pytest.approx((3 * 0.002, 3 * 0.002))


def test_work_before_steps_changed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few layers of a rank are seldom interrupted: only the steps, which all wait for it, show
    at once that nothing does any more.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    profiler = Profiler(torch.device("cpu"), LinkMeter(frozenset()))
    for step in range(3 + 80 + 12):
        profiler.timers([1])
        profiler.begin_step()
        is_held = step < 3 + 80
        work = 0.55 if is_held and step % 4 == 0 else 0.05
        profiler.timer.add("forward", 0, Moment(0.0), Moment(work))
        profiler.end_step()
        clock.now += 1.3 if is_held else 0.6
        if step == 3 + 80:
            profiler.next_window()
    figures = profiler.figures((0,), [], [], fewest=10)
    assert figures.times[0][0] == pytest.approx(0.05)
    assert profiler.took(10).mean == pytest.approx(0.6, rel=0.1)
