"""What a rank measures of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_pipeshift.devices.streams import synchronize
from lightning_pipeshift.plan.inputs.profile_fitting import RankFigures
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
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
