"""Layers leave a host that something holds back, and come back when it is over: two ranks' planning
by a simulated clock, without ranks.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pipeshift.model.execution.measure import Figures
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import LayerProfile
from lightning_pipeshift.plan.inputs.profile_fitting import RankFigures, profile_of
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.planning import profiling, replanning
from lightning_pipeshift.runtime.planning.delivered import Estimate
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch
from lightning_pipeshift.runtime.planning.move_decision import Decider, Decision, Window
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.timeline.outcomes import UNDONE, Change
from tests.unit.runtime.test_move_decision import plan
from tests.unit.runtime.test_profiler import Moment

NUM_LAYERS, MICROBATCHES, PATIENCE = 8, 4, 10
TOPOLOGY = Topology(((0, 1),))
# Seconds of a layer's forward, whose backward takes twice as long, and of a slice of the probe.
LAYER, SLICE = 0.004, 0.002
LAYERS = tuple(LayerProfile(f"layer{n}", 1000, 1000) for n in range(NUM_LAYERS))


class Host:
    """A process whose clock goes on while it is stopped. It runs for some time and is stopped for
    some time, in turn.

    Args:
        pause: seconds for which it is stopped each time.
        stopped: the part of the time in which it is, while :attr:`is_held`.
    """

    def __init__(self, pause: float, stopped: float) -> None:
        self.now = 0.0
        self.is_held = False
        # How long it runs in each period, the period, and how much of that is over.
        self._runs, self._period, self._at = pause / stopped - pause, pause / stopped, 0.0

    def wait(self, seconds: float) -> None:
        """Lets so much time pass."""
        self.now += seconds
        self._at = (self._at + seconds) % self._period

    def work(self, seconds: float) -> tuple[Moment, Moment]:
        """Computes for so long; when it begins and ends."""
        begin = self.now
        while self.is_held and self._runs - self._at < seconds:
            seconds -= max(self._runs - self._at, 0.0)
            self.now, self._at = self.now + self._period - self._at, 0.0
        self.wait(seconds)
        return Moment(begin), Moment(self.now)


class Run:
    """A run of two ranks, of which the second one's host may be held back.

    Args:
        host: of the second rank.
        monkeypatch: puts the simulated clock in place of the real one.
    """

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = host
        self.plan = plan()
        self.seconds: list[float] = []
        # At which steps the second rank was probed; and its speed, by each window's measurements.
        self.probes: list[int] = []
        self.speeds: list[float] = []
        self._cluster = Cluster((Device("here", "cpu"),) * 2, inside=Link(0.0, 10e9))
        self._guesses = dict.fromkeys(range(NUM_LAYERS), (LAYER, 2 * LAYER))
        self._sent: list[Any] = []
        watch = Watch(0.05, PATIENCE)
        settings = Settings(microbatches=MICROBATCHES, partition=[4, 4], watch=watch)
        self._decider = Decider(settings, TOPOLOGY)
        lane = SimpleNamespace(
            settle=lambda: None, send_object=lambda mine, _: self._sent.append(mine)
        )
        world: Any = SimpleNamespace(stage=1, num_stages=2, measurements=lane)
        replicas: Any = SimpleNamespace(topology=TOPOLOGY, rank=1, is_last_stage=True, world=world)
        nothing: Any = None
        self._planning = Replanning(
            settings,
            replicas,
            Device("here", "cpu"),
            torch.device("cpu"),
            [],
            print,
            nothing,
            LinkMeter(frozenset()),
        )
        monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: host.now))
        probed = SimpleNamespace(cluster=self._cluster, seconds=(SLICE, SLICE), notes=[])
        monkeypatch.setattr(replanning, "probe", lambda *_: probed)
        monkeypatch.setattr(replanning, "layers_of", lambda *_: LAYERS)
        monkeypatch.setattr(replanning, "time_slices", self._slices)
        guesses = {n: Figures(*times) for n, times in self._guesses.items()}
        self._planning.measure([], nothing, guesses, None, 1.0, 0, 0, True)
        self._sent.clear()

    def _slices(self, device: torch.device, seconds: float) -> list[float]:
        self.probes.append(len(self.seconds))
        slices, begin = [], self.host.now
        while self.host.now < begin + seconds:
            start, end = self.host.work(SLICE)
            slices.append(end.seconds - start.seconds)
        return slices

    @property
    def own(self) -> tuple[int, ...]:
        """The layers of the second rank."""
        return tuple(range(self.plan.placement.counts[0][0], NUM_LAYERS))

    def steps(self, count: int, decides: bool = False) -> None:
        """Runs so many steps.

        Args:
            count: how many.
            decides: whether layers move as the measurements say.
        """
        for _ in range(count):
            begin = self.host.now
            self._step()
            self._planning.after_step(self.plan, self.own, [], [])
            if self._sent:
                mine, took, _ = self._sent.pop()
                self._take_in(mine, took, decides)
            self.seconds.append(self.host.now - begin)

    def split(self, *counts: int, undoes: bool = False) -> None:
        """Moves layers so that each rank has so many.

        Args:
            counts: of each rank.
            undoes: whether that undoes the last move, which did not deliver.
        """
        self.plan = plan(counts)
        judged = Change("", 1.0, 1.0, verdict=UNDONE) if undoes else None
        self._planning.accept(Decision(self.plan.to_json(), True, "", judged=judged))

    def slow_for(self, count: int, *counts: int) -> None:
        """Some usual steps, and then some of a slow host, which soon has fewer layers."""
        self.steps(40)
        self.host.is_held = True
        self.steps(20)
        self.split(*counts)
        self.steps(count)
        assert self.speeds[-1] < 0.7

    def _step(self) -> None:
        profiler, host = self._planning.profiler, self.host
        profiler.timers([1] * MICROBATCHES)
        profiler.begin_step()
        other = 3 * LAYER * (NUM_LAYERS - len(self.own))
        begin = host.now
        for _ in range(MICROBATCHES):
            # The other stage has the microbatch first, and the next one meanwhile.
            host.wait(max(begin + other - host.now, 0.0))
            begin = host.now
            for what, seconds in (("forward", LAYER), ("backward", 2 * LAYER)):
                for layer in self.own:
                    profiler.timer.add(what, layer, *host.work(seconds))
        profiler.end_step()

    def _take_in(self, mine: RankFigures, took: Estimate, decides: bool) -> None:
        others = range(NUM_LAYERS - len(self.own))
        first = RankFigures(self._guesses, {n: self._guesses[n] for n in others})
        profile, cluster = profile_of(LAYERS, self._cluster, [first, mine], 1.0, MICROBATCHES)
        one, other = (device.speed for device in cluster.devices)
        self.speeds.append(other / one)
        measured = Measured(profile, cluster, TOPOLOGY.ranks).compared(self.plan, took.mean)
        found = Decision(self.plan.to_json(), False, "")
        if decides:
            window = Window(PATIENCE, took, measured, [0.0, mine.error])
            found = self._decider.decide(self.plan, window)
        self._planning.accept(found)
        self.plan = Plan.from_json(found.plan)


# The pause, the part of the time that is taken, and how many layers the rank has left.
FAULTS = pytest.mark.parametrize(
    ("pause", "stopped", "left"),
    [(0.005, 0.5, 0), (0.005, 0.5, 1), (0.1, 0.75, 2), (0.5, 0.75, 0), (0.5, 0.25, 1)],
)


@FAULTS
def test_a_rank_that_has_recovered_is_not_probed_any_more(
    monkeypatch: pytest.MonkeyPatch, pause: float, stopped: float, left: int
) -> None:
    """Its layers need not come back for that: a move may not be worth it."""
    run = Run(Host(pause, stopped), monkeypatch)
    run.slow_for(140, NUM_LAYERS - left, left)
    run.host.is_held = False
    # Nothing shows on a rank without layers: it waits at most as long again as it was slow.
    run.steps(70 if left else 160)
    assert run.speeds[-1] == 1.0
    probes = list(run.probes)
    run.steps(400)
    assert run.probes == probes
    assert run.speeds[-1] == 1.0


def test_a_rank_that_stays_slow_is_probed_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(Host(0.1, 0.5), monkeypatch)
    run.slow_for(1000, NUM_LAYERS, 0)
    first, *later = [after - before for before, after in pairwise(run.probes)]
    assert first == 80
    for before, after in pairwise([first, *later]):
        assert after == 2 * before


@FAULTS
def test_layers_return_soon_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, pause: float, stopped: float, left: int
) -> None:
    """Where pauses are rare, steps without any may be chance: a probe tells."""
    run = Run(Host(pause, stopped), monkeypatch)
    run.slow_for(140, NUM_LAYERS - left, left)
    run.host.is_held = False
    run.steps(70 if left else 180, decides=True)
    assert run.plan.placement.counts[0] == (4, 4)


def test_a_rank_counts_as_slow_again_when_its_return_was_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(Host(0.1, 0.5), monkeypatch)
    run.slow_for(100, 7, 1)
    run.host.is_held = False
    run.steps(50)
    assert run.speeds[-1] == 1.0
    run.split(4, 4)
    run.host.is_held = True
    run.steps(20)
    run.split(7, 1, undoes=True)
    run.steps(10)
    assert run.speeds[-1] < 0.6
