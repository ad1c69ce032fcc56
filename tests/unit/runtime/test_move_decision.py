"""When layers change their owners by themselves, on figures out of thin air."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_pipeshift import PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.policies import KeepAll, Planned, Policy, SwapAll
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.planning import move_decision
from lightning_pipeshift.runtime.planning.delivered import Estimate, recent
from lightning_pipeshift.runtime.planning.first_plan import FirstOrder
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch
from lightning_pipeshift.runtime.planning.move_decision import Decider, Decision, Window
from lightning_pipeshift.text import seconds_text
from lightning_pipeshift.timeline.outcomes import Change

NUM_LAYERS, MICROBATCHES = 8, 4
TOPOLOGY = Topology(((0, 1),))
LINK = Link(0.0, 10e9)


def measured(speed: float, parameter_bytes: int = 1000) -> Measured:
    """Two devices, the second of another speed."""
    layers = tuple(
        LayerProfile(f"layer{i}", parameter_bytes, parameter_bytes) for i in range(NUM_LAYERS)
    )
    kinds = {"cpu": KindProfile((0.01,) * NUM_LAYERS, (0.02,) * NUM_LAYERS)}
    devices = (Device("here", "cpu"), Device("here", "cpu", speed=speed))
    return Measured(
        Profile(layers, kinds, 1.0, MICROBATCHES), Cluster(devices, inside=LINK), TOPOLOGY.ranks
    )


def decider(min_gain: float = 0.05) -> Decider:
    watch = Watch(min_gain, patience=5)
    return Decider(Settings(microbatches=MICROBATCHES, partition=[4, 4], watch=watch), TOPOLOGY)


def plan(counts: Sequence[int] = (4, 4)) -> Plan:
    return measured(1.0).plan("1f1b", MICROBATCHES, [Cut(tuple(counts))])


def window(
    found: Measured,
    took: Estimate | None = None,
    errors: Sequence[float] = (),
    steps_left: float = math.inf,
) -> Window:
    return Window(5, took or Estimate(1.0, 0.0, 5), found, errors, steps_left)


def counts_of(decision: Decision) -> tuple[int, ...]:
    return Plan.from_json(decision.plan).placement.counts[0]


def test_equal_devices_keep_their_layers() -> None:
    decision = decider().decide(plan(), window(measured(1.0)))
    assert not decision.is_new
    assert counts_of(decision) == (4, 4)
    assert Plan.from_json(decision.plan).prediction is not None, "what is predicted is known anew"


def test_a_slow_device_gives_layers_away() -> None:
    known = replace(plan(), step_samples=64.0)
    decision = decider().decide(known, window(measured(0.5)))
    assert decision.is_new
    assert Plan.from_json(decision.plan).step_samples == 64, "of the same steps"
    first, second = counts_of(decision)
    assert first > second
    assert decision.change is not None
    assert decision.change.before_seconds == 1.0
    assert decision.change.expected_seconds < 1 / 1.2
    assert "[4, 4] becomes" in decision.message


def test_what_is_not_clear_is_left_alone() -> None:
    assert not decider().decide(plan(), window(measured(0.5), errors=(0.0, 0.4))).is_new
    assert not decider().decide(plan(), window(measured(0.5), errors=(0.4, 0.0))).is_new
    assert decider().decide(plan(), window(measured(0.5), errors=(0.05, 0.05))).is_new


def test_a_gain_has_to_be_worth_the_move() -> None:
    assert not decider(min_gain=5.0).decide(plan(), window(measured(0.5))).is_new
    assert not decider().decide(plan(), window(measured(0.5), steps_left=0)).is_new
    heavy = measured(0.5, parameter_bytes=10**10)
    assert heavy.move_seconds(plan(), plan((5, 3))) > 0.1
    assert not decider().decide(plan(), window(heavy, steps_left=1)).is_new
    assert decider().decide(plan(), window(heavy, steps_left=10**9)).is_new


def test_each_time_that_layers_are_taken_back_takes_twice_as_long() -> None:
    mind, now, waited, took = decider(), plan(), [], 1.0
    for speed in (0.5, 1.0, 0.5, 1.0):
        decisions: list[Decision] = []
        while not (decisions and decisions[-1].is_new):
            assert len(decisions) < 20
            decisions.append(mind.decide(now, window(measured(speed), Estimate(took))))
        now = Plan.from_json(decisions[-1].plan)
        # Every move delivers.
        took *= 0.5
        waited.append(len(decisions))
    assert waited == [1, 2, 4, 8]


def test_what_was_left_alone_in_between_is_begun_anew() -> None:
    mind = decider()
    moved = Plan.from_json(mind.decide(plan(), window(measured(0.5))).plan)
    fast = Estimate(0.5)
    assert not mind.decide(moved, window(measured(1.0), fast)).is_new
    assert not mind.decide(moved, window(measured(0.5), fast)).is_new
    assert not mind.decide(moved, window(measured(1.0), fast)).is_new, "not twice in a row"
    assert mind.decide(moved, window(measured(1.0), fast)).is_new


# --- every change is judged by the measured time of a step ---

SLOW = measured(0.5)


def moved_by(mind: Decider, found: Measured = SLOW) -> tuple[Plan, Decision]:
    decision = mind.decide(plan(), window(found, Estimate(1.0, 0.01, 5)))
    assert decision.is_new
    return Plan.from_json(decision.plan), decision


def ordered(*ranks: int) -> Plan:
    """Rank 1 is slow, and has all layers but one."""
    counts = tuple(NUM_LAYERS - 1 if rank else 1 for rank in ranks)
    found = replace(SLOW, ranks=[ranks])
    return replace(found.plan("1f1b", MICROBATCHES, [Cut(counts)]), ranks=(ranks,))


@pytest.mark.parametrize("misled", [False, True])
def test_the_first_order_is_judged_by_measured_steps(misled: bool) -> None:
    """A short measurement says that a step takes 1 s and not 1.5 s if the ranks are [1, 0]. By the
    first steps, half of the work is in the last layer, which suits that order, or in the first one.
    """
    mind = Decider(Settings(microbatches=MICROBATCHES), TOPOLOGY)
    own, best = ordered(0, 1), ordered(1, 0)
    change = Change("the stages are the ranks", 1.5, 1.0, is_estimated=True)
    mind.first = FirstOrder(change, own, best)
    times = (0.02,) * (NUM_LAYERS - 1)
    times = (0.28, *times) if misled else (*times, 0.28)
    kinds = {"cpu": KindProfile(times, times)}
    found = replace(SLOW, profile=replace(SLOW.profile, kinds=kinds), ranks=best.ranks)
    assert (found.prediction(own).step_seconds < found.prediction(best).step_seconds) is misled
    took = found.prediction(best).step_seconds
    decision = mind.decide(best, window(found, Estimate(took, 0.0, 5)))
    judged = decision.judged
    assert judged is not None
    text = str(judged)
    assert text.startswith("the stages are the ranks: a step would take 1.5 s, and 1 s is expected")
    assert (judged.before_seconds, judged.expected_seconds) == (1.5, 1.0)
    assert judged.after_seconds == took
    assert judged.verdict == ("undone" if misled else "kept")
    assert (Plan.from_json(decision.plan).ranks == ((0, 1),)) is decision.is_new is misled
    assert seconds_text(found.prediction(own).step_seconds) in judged.reason
    if misled:
        assert decision.change is not None
        assert decision.change.before_seconds == took, "measured, and the way back is judged by it"
    assert mind.decide(best, window(found, Estimate(took, 0.0, 5))).judged is None, "once"


@pytest.mark.parametrize("took", [0.97, 1.0, 1.3])
def test_a_move_that_does_not_deliver_is_undone(took: float) -> None:
    mind = decider()
    moved, decision = moved_by(mind)
    back = mind.decide(moved, window(SLOW, Estimate(took, 0.001, 5)))
    assert back.is_new
    assert counts_of(back) == (4, 4)
    assert decision.change is not None
    assert back.judged == replace(decision.change, after_seconds=took, verdict="undone")
    # The way back is a change as any other: it states what it expects.
    assert back.change is not None
    assert (back.change.before_seconds, back.change.expected_seconds) == (took, 1.0)


def test_the_first_move_of_a_profile_is_undone_too() -> None:
    """`partition="auto"` without LayerMigration: one decision, and its judgement."""
    for took, counts in ((1.1, (4, 4)), (0.8, None)):
        mind = Decider(Settings(microbatches=MICROBATCHES), TOPOLOGY)
        moved, _ = moved_by(mind)
        found = mind.decide(moved, window(SLOW, Estimate(took, 0.001, 5)))
        assert found.judged is not None
        assert found.judged.verdict == ("undone" if counts else "kept")
        assert counts_of(found) == (counts or moved.placement.counts[0])
        # No other plan is looked for, whatever is measured.
        assert not mind.decide(moved, window(measured(0.1), Estimate(took))).judged


def test_what_was_undone_is_not_tried_again_until_something_changes() -> None:
    mind = decider()
    moved, _ = moved_by(mind)
    mind.decide(moved, window(SLOW, Estimate(1.2, 0.0, 5)))
    judged = mind.decide(plan(), window(SLOW, Estimate(1.0, 0.0, 5))).judged
    assert judged is not None
    assert (judged.verdict, judged.after_seconds) == ("kept", 1.0)
    for speed in (0.5, 0.4, 0.7, 0.5):
        for _ in range(10):
            assert not mind.decide(plan(), window(measured(speed))).is_new
    later = [mind.decide(plan(), window(measured(0.3))).is_new for _ in range(2)]
    assert later == [False, True], "and then it waits twice as long"


def test_a_move_that_was_not_the_reason_may_be_tried_again() -> None:
    """Steps got slower for another reason: without the move they are even slower."""
    mind = decider()
    moved, _ = moved_by(mind)
    assert mind.decide(moved, window(SLOW, Estimate(1.2, 0.0, 5))).is_new
    decisions = [mind.decide(plan(), window(SLOW, Estimate(1.5, 0.0, 5))) for _ in range(2)]
    assert [each.is_new for each in decisions] == [False, True]
    assert counts_of(decisions[-1]) == moved.placement.counts[0]


@pytest.mark.parametrize("took", [Estimate(1.21, 0.02, 5), Estimate(1.21, 0.0, 5)])
def test_a_move_is_not_tried_again_where_steps_without_it_are_alike(took: Estimate) -> None:
    """Ever so little slower is chance: layers would go back and forth."""
    mind = decider()
    moved, _ = moved_by(mind)
    assert mind.decide(moved, window(SLOW, Estimate(1.2, 0.02, 5))).is_new
    alike = window(SLOW, took)
    assert not any(mind.decide(plan(), alike).is_new for _ in range(10))


def test_a_move_is_judged_when_enough_is_measured() -> None:
    mind = decider()
    moved, decision = moved_by(mind)
    for num_steps in (5, 10, 15):
        found = mind.decide(moved, window(SLOW, Estimate(0.95, 0.2, num_steps)))
        assert (found.is_new, found.goes_on, found.judged) == (False, True, None)
    judged = mind.decide(moved, window(SLOW, Estimate(0.9, 0.2, 20))).judged
    assert judged is not None
    assert judged.verdict == "kept"
    assert decision.change is not None
    assert str(judged) == (
        f"layers move, [4, 4] becomes {list(moved.placement.counts[0])}: a step took 1 s, and"
        f" {1000 * decision.change.expected_seconds:.3g} ms is expected; it takes 900 ms; kept"
    )


def test_what_did_not_come_into_force_is_not_judged() -> None:
    mind = decider()
    moved_by(mind)
    found = mind.decide(plan(), window(SLOW, Estimate(2.0)))
    assert found.judged is None
    assert found.is_new, "it is asked for again"


def nothing_fits(*_: Any) -> Topology:
    raise PlanError("no order fits")


def test_orders_are_searched_for_when_speeds_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def search(*given: Any) -> Topology:
        searched.append([device.speed for device in given[2].devices])
        return Topology(((1, 0),))

    monkeypatch.setattr(move_decision, "best_topology", search)
    mind = Decider(Settings(microbatches=MICROBATCHES), TOPOLOGY)
    for speed in (1.0, 1.02, 0.5, 0.51, 1.0):
        decision = mind.decide(plan(), window(measured(speed)))
        assert not decision.is_new or Plan.from_json(decision.plan).ranks in (((0, 1),), ((1, 0),))
    assert searched == [[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]]
    monkeypatch.setattr(move_decision, "best_topology", nothing_fits)
    mind = Decider(Settings(microbatches=MICROBATCHES), TOPOLOGY)
    assert counts_of(mind.decide(plan(), window(measured(0.5)))) != (4, 4), "the order stays"
    fixed = Decider(Settings(microbatches=MICROBATCHES, virtual_machines=[[0, 1]]), TOPOLOGY)
    fixed.decide(plan(), window(measured(0.5)))
    assert len(searched) == 3, "an order of one's own stays"


# --- with MemoryCompression ---


def saving(num_bytes: int, room: int) -> Measured:
    """Layers that save so much, on equal devices with so much room, and a fast way to the host."""
    found = measured(1.0)
    layers = tuple(
        replace(layer, saved_bytes=num_bytes, tensors=(SavedTensor(0, num_bytes),))
        for layer in found.profile.layers
    )
    devices = tuple(
        replace(device, memory_bytes=room, host_bytes=10**12, host_bandwidth=1e12)
        for device in found.cluster.devices
    )
    return replace(
        found,
        profile=replace(found.profile, layers=layers),
        cluster=replace(found.cluster, devices=devices),
    )


def mindful(policy: Policy) -> Decider:
    memory = MemoryRequest(policy=policy)
    return Decider(
        Settings(microbatches=MICROBATCHES, partition=[4, 4], recompute="none", memory=memory),
        TOPOLOGY,
    )


def test_a_policy_is_asked_once_more_when_all_is_measured() -> None:
    mind, seen = mindful(SwapAll(min_bytes=1)), window(saving(10**6, 10**9))
    decision = mind.decide(plan(), seen)
    assert decision.is_new
    assert "other tensors move" in decision.message
    chosen = Plan.from_json(decision.plan)
    assert chosen.swaps
    # It was asked for: it stays, whatever it takes.
    judged = mind.decide(chosen, window(saving(10**6, 10**9), Estimate(9.0))).judged
    assert judged is not None
    assert (judged.verdict, judged.after_seconds) == ("kept", 9.0)
    # Not again and again: its answers may depend on what is measured, and that swings.
    assert not mind.decide(plan(), seen).is_new
    for content in (KeepAll(), Planned()):
        assert not mindful(content).decide(plan(), seen).is_new


def test_what_does_not_fit_by_what_was_measured_moves() -> None:
    # The first stage holds two microbatches of four layers.
    decision = mindful(Planned()).decide(plan(), window(saving(10**6, 7 * 10**6)))
    assert decision.is_new
    assert Plan.from_json(decision.plan).swaps


def test_where_nothing_fits_the_run_goes_on() -> None:
    decision = mindful(Planned()).decide(plan(), window(saving(10**6, 10**6)))
    assert not decision.is_new
    assert "the plan stays: No plan keeps the memory budget" in decision.message


# --- on a machine that other programs use, too ---


class Machine:
    """Two ranks whose steps vary, and what the decisions about them make of it.

    Args:
        seed: of the noise.
        spread: of a step's time, the standard deviation of its logarithm.
    """

    def __init__(self, seed: int, spread: float) -> None:
        self.plan, self.moves = plan(), 0
        self._decider = decider()
        self._random, self._spread = random.Random(seed), spread
        self._begin()

    def _begin(self) -> None:
        self._work: list[list[float]] = [[], []]
        self._took: list[float] = []

    def _step(self, slowdown: float) -> None:
        counts = self.plan.placement.counts[0]
        seconds = []
        for count, work, factor in zip(counts, self._work, (1.0, slowdown), strict=True):
            spike = self._random.uniform(2, 8) if self._random.random() < 0.02 else 1.0
            work.append(math.exp(self._random.gauss(0, self._spread)) * spike * factor)
            seconds.append(work[-1] * count)
        self._took.append(max(seconds))

    def run(self, num_steps: int, slowdown: float) -> None:
        """Runs steps; there is a decision after every ten."""
        for step in range(num_steps):
            self._step(slowdown)
            if step % 10 != 9:
                continue
            found = [recent(work, 10) for work in self._work]
            exact = measured(1.0)
            devices = tuple(
                replace(device, speed=1 / each.mean)
                for device, each in zip(exact.cluster.devices, found, strict=True)
            )
            seen = replace(exact, cluster=replace(exact.cluster, devices=devices))
            took = recent(self._took[-min(each.num_steps for each in found) :], 10)
            errors = [each.error / each.mean for each in found]
            decision = self._decider.decide(self.plan, Window(10, took, seen, errors))
            if decision.is_new:
                self.moves += 1
                self.plan = Plan.from_json(decision.plan)
                self._begin()


@pytest.mark.parametrize("seed", range(4))
def test_nothing_moves_without_a_cause_on_a_loaded_machine(seed: int) -> None:
    machine = Machine(seed, spread=0.3)
    machine.run(500, slowdown=1.0)
    assert machine.moves == 0


@pytest.mark.parametrize("seed", range(4))
def test_layers_move_once_where_there_is_one(seed: int) -> None:
    machine = Machine(seed, spread=0.1)
    machine.run(100, slowdown=1.0)
    machine.run(150, slowdown=2.0)
    assert machine.moves == 1
    assert machine.plan.placement.counts[0] == (6, 2)
