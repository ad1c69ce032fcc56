"""Layers leave a host that something holds back, and come back when it is over: the planning of two
ranks by simulated clocks, in steps of the benchmark `slow_hosts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.slow_hosts import LAYERS as OF_LAYERS
from benchmarks.slow_hosts import PAUSES, STOPPED, USUAL, split_for
from lightning_pipeshift.devices import streams
from lightning_pipeshift.model.measuring.measure import Figures
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import LayerProfile
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.planning import profiling, replanning, slow_rank
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch
from lightning_pipeshift.runtime.planning.move_decision import Decision
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.timeline.outcomes import UNDONE, Change
from tests.unit.runtime.test_profiler import Moment

NUM_LAYERS, MICROBATCHES, PATIENCE = 12, 4, 10
EVEN = (6, 6)
TOPOLOGY = Topology(((0, 1),))
# Seconds of a slice of the probe; and by which part of its time any work may take longer by chance.
SLICE, NOISE = 0.002, 0.02
LAYERS = tuple(LayerProfile(f"layer{n}", 1000, 1000) for n in range(NUM_LAYERS))
FORWARD, BACKWARD = "forward", "backward"
# 1F1B on both stages.
ORDERS = (
    [
        *((FORWARD, 0), (FORWARD, 1), (BACKWARD, 0), (FORWARD, 2)),
        *((BACKWARD, 1), (FORWARD, 3), (BACKWARD, 2), (BACKWARD, 3)),
    ],
    [(what, m) for m in range(MICROBATCHES) for what in (FORWARD, BACKWARD)],
)


class Host:
    """A process whose clock goes on while it is stopped.

    Args:
        pause: seconds for which it is stopped each time; 0: it never is.
        stopped: the part of the time in which it is, while it is :meth:`held`.
        seed: of the noise.
    """

    def __init__(self, pause: float, stopped: float, seed: int) -> None:
        self.now = 0.0
        self._pause, self._runs = pause, pause / stopped - pause if pause else 0.0
        self._held_since: float | None = None
        self._draw = random.Random(seed)

    def hold(self, is_held: bool) -> None:
        """From here on it is stopped now and then, or no longer."""
        self._held_since = self.now if is_held and self._pause else None

    def wait(self, until: float) -> None:
        """Returns when it is so late, and the process runs."""
        self.now = max(self.now, until)
        self._left()

    def work(self, seconds: float) -> tuple[Moment, Moment]:
        """Computes for so long; when it begins and ends."""
        seconds *= self._draw.uniform(1.0, 1.0 + NOISE)
        left, begin = self._left(), self.now
        while left < seconds:
            self.now, seconds = self.now + left + self._pause, seconds - left
            left = self._left()
        self.now += seconds
        return Moment(begin), Moment(self.now)

    def _left(self) -> float:
        """How long it runs until it is stopped next; returns when it runs."""
        if self._held_since is None:
            return float("inf")
        period = self._runs + self._pause
        at = (self.now - self._held_since) % period
        if at > self._runs - 1e-9:
            self.now, at = self.now + period - at, 0.0
        return self._runs - at


class Run:
    """A run of two ranks, of which the second one's host may be held back.

    Args:
        monkeypatch: puts the simulated clocks in place of the real one.
        pause: see :class:`Host`.
        stopped: likewise.
        counts: the layers of each rank at first.
        moves: whether they move as the measurements say.
        layer: seconds of a layer's forward; its backward takes twice as long.
        seed: of the noise.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        pause: float = 0.0,
        stopped: float = 0.0,
        counts: tuple[int, ...] = EVEN,
        moves: bool = True,
        layer: float = 0.004,
        seed: int = 1,
    ) -> None:
        self.hosts = Host(0.0, 0.0, seed), Host(pause, stopped, 100 + seed)
        self.seconds: list[float] = []
        # Before which steps a rank was probed, and under which split each step ran.
        self.probes: list[int] = []
        self.counts: list[tuple[int, ...]] = []
        self._moves, self._layer = moves, layer
        self._now = self.hosts[0]
        clock = SimpleNamespace(perf_counter=lambda: self._now.now, thread_time=lambda: 0.0)
        for module in (profiling, streams):
            monkeypatch.setattr(module, "time", clock)
        cluster = Cluster((Device("here", "cpu"),) * 2, inside=Link(0.0, 10e9))
        probed = SimpleNamespace(cluster=cluster, seconds=(SLICE, SLICE), notes=[])
        monkeypatch.setattr(replanning, "probe", lambda *_: probed)
        monkeypatch.setattr(replanning, "layers_of", lambda *_: LAYERS)
        monkeypatch.setattr(slow_rank, "time_slices", self._slices)
        self._sent: list[Any] = []
        self.ranks = [self._rank(number) for number in (0, 1)]
        estimates = dict.fromkeys(range(NUM_LAYERS), Figures(layer, 2 * layer))
        nothing: Any = None
        second, first = (
            rank.measure([], nothing, estimates, None, 1.0, 0, 0, True)
            for rank in reversed(self.ranks)
        )
        assert second is None
        assert first is not None
        self.plan = first.plan("1f1b", MICROBATCHES, [Cut(counts)])

    def _rank(self, number: int) -> Replanning:
        watch = Watch(0.05, PATIENCE)
        settings = Settings(microbatches=MICROBATCHES, partition=list(EVEN), watch=watch)
        lane = SimpleNamespace(
            settle=lambda: None,
            send_object=lambda mine, _: self._sent.append(mine),
            receive_object=lambda _: self._sent.pop(),
        )
        world = SimpleNamespace(stage=number, num_stages=2, measurements=lane)
        replicas: Any = SimpleNamespace(
            topology=TOPOLOGY, rank=number, is_last_stage=number == 1, world=world
        )
        threads: Any = SimpleNamespace(submit=finished)
        here, device = Device("here", "cpu"), torch.device("cpu")
        links = LinkMeter(frozenset())
        return Replanning(settings, replicas, here, device, [], print, threads, links)

    def _slices(self, device: torch.device, seconds: float) -> list[float]:
        self.probes.append(len(self.seconds))
        slices, begin = [], self._now.now
        while self._now.now < begin + seconds:
            start, end = self._now.work(SLICE)
            slices.append(end.seconds - start.seconds)
        return slices

    def hold(self, is_held: bool) -> None:
        """The second rank's host is held back from here on, or no longer."""
        self.hosts[1].hold(is_held)

    def steps(self, count: int) -> list[float]:
        """Runs so many steps; their seconds."""
        for _ in range(count):
            begin = self.hosts[0].now
            self.counts.append(self.plan.placement.counts[0])
            self._step()
            if self._moves:
                self._decide()
            self.seconds.append(self.hosts[0].now - begin)
        return self.seconds[-count:]

    def split(self, *counts: int, undoes: bool = False) -> None:
        """Moves layers so that each rank has so many.

        Args:
            counts: of each rank.
            undoes: whether that undoes the last move, which did not deliver.
        """
        judged = Change("", 1.0, 1.0, verdict=UNDONE) if undoes else None
        assert self.ranks[0].measured is not None
        self.plan = self.ranks[0].measured.plan("1f1b", MICROBATCHES, [Cut(counts)])
        for rank in self.ranks:
            rank.accept(Decision(self.plan.to_json(), True, "", judged=judged))

    @property
    def speed(self) -> float:
        """Of the second rank, relative to the first, by the latest measurements."""
        assert self.ranks[0].measured is not None
        first, second = self.ranks[0].measured.cluster.devices
        return second.speed / first.speed

    def num_changes(self, first: int, last: int) -> int:
        """How many times layers moved before these steps."""
        return sum(a != b for a, b in pairwise(self.counts[first - 1 : last]))

    def own(self, number: int) -> range:
        """The layers of a rank."""
        first = self.plan.placement.counts[0][0]
        return (range(first), range(first, NUM_LAYERS))[number]

    def _step(self) -> None:
        for rank in self._by_their_clocks():
            rank.profiler.timers([1] * MICROBATCHES)
            rank.profiler.begin_step()
        done: dict[tuple[int, str, int], float] = {}
        left = [list(order) for order in ORDERS]
        while any(left):
            for stage, order in enumerate(left):
                while order:
                    what, microbatch = order[0]
                    other = 1 - stage
                    # The first stage's forward and the last one's backward need no other rank.
                    needs = (other, what, microbatch) if (what == FORWARD) == stage else None
                    if needs is not None and needs not in done:
                        break
                    self.hosts[stage].wait(done[needs] if needs is not None else 0.0)
                    self._run(stage, what)
                    order.pop(0)
                    done[stage, what, microbatch] = self.hosts[stage].now
        for rank in self._by_their_clocks():
            rank.profiler.end_step()

    def _by_their_clocks(self) -> Iterator[Replanning]:
        for rank, host in zip(self.ranks, self.hosts, strict=True):
            self._now = host
            yield rank

    def _run(self, stage: int, what: str) -> None:
        host, timer = self.hosts[stage], self.ranks[stage].profiler.timer
        seconds = self._layer if what == FORWARD else 2 * self._layer
        begin = host.now
        for layer in self.own(stage):
            timer.add(what, layer, *host.work(seconds))
        timer.add(Kind[what.upper()].name, -1, Moment(begin), Moment(host.now), is_around=True)

    def _decide(self) -> None:
        # The second rank sends first what the first one takes in.
        for number in (1, 0):
            self._now = self.hosts[number]
            self.ranks[number].after_step(self.plan, self.own(number), [], [])
        if self.ranks[0].has_decided:
            found = self.ranks[0].take_decision(self.plan)
            assert found is not None
            for rank in self._by_their_clocks():
                rank.accept(found)
            self.plan = Plan.from_json(found.plan)


def finished(function: Callable[[], Any]) -> Future[Any]:
    """Calls it at once."""
    found: Future[Any] = Future()
    found.set_result(function())
    return found


@pytest.mark.parametrize(
    ("pause", "stopped", "layer"),
    [
        *((pause, stopped, OF_LAYERS[0]) for pause in PAUSES for stopped in STOPPED),
        *((*USUAL, layer) for layer in OF_LAYERS[1:]),
    ],
)
def test_a_fault_is_answered_and_its_end_too(
    monkeypatch: pytest.MonkeyPatch, pause: float, stopped: float, layer: float
) -> None:
    """The goals of the benchmark, in all of its cases whose pauses are equal."""
    run = Run(monkeypatch, pause, stopped, layer=layer)
    before = fmean(run.steps(40)[-30:])
    assert run.num_changes(1, 40) == 0
    run.hold(True)
    during = fmean(run.steps(140)[-30:])
    run.hold(False)
    after = fmean(run.steps(100)[-30:])
    best = []
    for counts in {split_for(1 - stopped), EVEN}:
        fixed = Run(monkeypatch, pause, stopped, counts, moves=False, layer=layer)
        fixed.hold(True)
        best.append(fmean(fixed.steps(33)[-30:]))
    assert min(best) >= 0.90 * during
    assert after <= 1.05 * before
    assert run.num_changes(40, 180) <= 2
    assert run.num_changes(180, 280) <= 2


@pytest.mark.parametrize(("pause", "second"), [(0.005, 5), (0.1, 5), (0.5, 1), (0.1, 0)])
def test_a_rank_that_has_recovered_is_not_probed_any_more(
    monkeypatch: pytest.MonkeyPatch, pause: float, second: int
) -> None:
    """Its layers need not come back for that: a move may not be worth it."""
    run = Run(monkeypatch, pause, 0.5)
    run.steps(40)
    run.hold(True)
    run.steps(14)
    nothing_moves(run, monkeypatch)
    run.split(NUM_LAYERS - second, second)
    run.steps(100)
    assert run.speed < 0.7
    run.hold(False)
    run.steps(100)
    probes = list(run.probes)
    assert probes
    run.steps(400)
    assert run.probes == probes
    assert run.speed == pytest.approx(1.0, abs=0.03)


def nothing_moves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured."""
    stays = lambda plan, _: Decision(plan.to_json(), False, "")  # noqa: E731
    monkeypatch.setattr(run.ranks[0]._decider, "decide", stays)


@pytest.mark.parametrize(("pause", "stopped"), [(0.5, 0.25), (0.1, 0.5)])
def test_a_rank_that_is_slow_has_not_recovered(
    monkeypatch: pytest.MonkeyPatch, pause: float, stopped: float
) -> None:
    """A short probe may miss pauses of half a second, and so may the few layers that it has."""
    run = Run(monkeypatch, pause, stopped)
    run.steps(40)
    run.hold(True)
    run.steps(100)
    nothing_moves(run, monkeypatch)
    run.split(11, 1)
    for _ in range(20):
        run.steps(20)
        assert run.speed < 0.95


def test_a_rank_counts_as_slow_again_when_its_return_was_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without layers, nothing else would say so."""
    run = Run(monkeypatch, 0.1, 0.5)
    run.steps(40)
    run.hold(True)
    run.steps(14)
    nothing_moves(run, monkeypatch)
    run.split(12, 0)
    run.steps(60)
    run.hold(False)
    run.steps(80)
    assert run.speed == pytest.approx(1.0, abs=0.03)
    run.split(6, 6)
    run.hold(True)
    run.steps(20)
    run.split(12, 0, undoes=True)
    run.steps(15)
    assert run.speed < 0.7
