"""What a rank measures of its steps."""

from __future__ import annotations

import torch

from lightning_pipeshift.devices.streams import synchronize
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
