"""A slow link, a slow neighbour and a full host are told apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_pipeshift.commands.running import shown
from lightning_pipeshift.model.measuring import timing
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.simulator import Costs, clock, simulate
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.planning.profiling import Profiler
from lightning_pipeshift.runtime.planning.waits import saved_seconds, waits_of, waits_text

RANKS = ((2, 0, 1),)


def waits(
    speed: float = 1.0,
    bandwidth: float = 1e12,
    waited: tuple[float, ...] = (),
    ran: tuple[float | None, ...] = (),
) -> Any:
    """Three equal stages; rank 0, the second stage, of another speed, and with another link to
    rank 1.
    """
    layers = tuple(LayerProfile(f"l{n}", 1, 1, 1000, 1000, 1000) for n in range(6))
    kinds = {"cpu": KindProfile((0.01,) * 6, (0.02,) * 6)}
    devices = tuple(Device("here", "cpu", speed=speed if rank == 0 else 1.0) for rank in range(3))
    cluster = Cluster(devices, inside=Link(0, 1e12), ranks={(0, 1): Link(0, bandwidth)})
    measured = Measured(Profile(layers, kinds, 1.0, 4), cluster, RANKS, waited, ran)
    plan = measured.plan("1f1b", 4, [Cut((2, 2, 2))])
    return waits_of(plan, measured)


def test_nobody_waits_for_equal_stages() -> None:
    assert waits() == []
    assert waits_text([]) == ""


def test_a_slow_link_a_slow_neighbour_and_a_full_host_are_told_apart() -> None:
    [link] = waits(bandwidth=1e4)
    assert (link.what, link.ranks) == ("link", (0, 1))
    [stage] = waits(speed=0.5)
    assert (stage.what, stage.ranks) == ("stage", (0,))
    [host] = waits(waited=(0.0, 0.3, 0.0))
    assert (host.what, host.ranks, host.seconds) == ("host", (1,), 0.3)
    together = waits(speed=0.5, bandwidth=1e4, waited=(0.0, 50.0, 0.0))
    assert next(wait.what for wait in together) == "host", "the longest first"
    assert {wait.what for wait in together} == {"link", "stage", "host"}


def test_a_slow_stage_that_is_held_back_is_told_from_one_that_computes_more() -> None:
    [held] = waits(speed=0.5, ran=(0.48, 0.99, 0.99))
    assert str(held).endswith("(its process runs 48% of their time: held back, or they wait)")
    [computes] = waits(speed=0.5, ran=(0.97, 0.99, 0.99))
    assert str(computes).endswith("(its process runs 97% of their time)")
    [unknown] = waits(speed=0.5, ran=(None, None, None))
    assert str(unknown).endswith("than those of other stages")


class Clocks:
    """Time that a test lets pass, with and without this thread running."""

    def __init__(self) -> None:
        self.clock = self.processor = 0.0

    def perf_counter(self) -> float:
        return self.clock

    def thread_time(self) -> float:
        return self.processor

    def pass_by(self, took: float, ran: float) -> None:
        """A layer that takes some time, in a part of which the process runs."""
        self.clock += took
        self.processor += ran


def test_how_much_of_the_time_of_layers_a_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(timing, "time", clocks)
    profiler = Profiler(torch.device("cpu"), LinkMeter(frozenset()))
    timer = profiler.timer
    for took, ran in ((1.0, 1.0), (3.0, 1.0)):
        timer.timed(0, partial(clocks.pass_by, took, ran))()
        # What passes between two layers is not theirs: waits for data, for example.
        clocks.clock += 100.0
    assert profiler.figures((), [], ()).ran == 0.5
    profiler.next_window()
    assert profiler.figures((), [], ()).ran == 1.0


def test_the_seconds_are_those_of_the_simulator() -> None:
    costs = Costs((1.0, 2.0), (2.0, 4.0), (0.5,), (0.5,))
    links, stages = saved_seconds("gpipe", 2, costs)

    def step(changed: Costs) -> float:
        return simulate(clock("gpipe", 2, 2), changed).step_seconds

    without = replace(costs, payload_seconds=(0.0,), gradient_seconds=(0.0,))
    equal = replace(costs, forward_seconds=(1.0, 1.0), backward_seconds=(2.0, 2.0))
    assert links == (step(costs) - step(without),)
    assert stages == (0.0, step(costs) - step(equal))
    assert links[0] > 0 < stages[1]


def test_the_status_shows_them() -> None:
    status = {
        "time": 0.0,
        "process": 1,
        "host": "h",
        "step": 3,
        "step_seconds": 1.0,
        "decisions": [],
        "virtual_machines": [],
        "waits": [str(each) for each in waits(speed=0.5)],
    }
    assert "for rank 0, whose layers take longer than those of other stages" in shown(status, True)
