"""When layers change their owners by themselves, on figures out of thin air."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_pipeshift import PlanError
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.policies import KeepAll, Planned, Policy, SwapAll
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.planning import move_decision
from lightning_pipeshift.runtime.planning.make_plan import Settings, Watch
from lightning_pipeshift.runtime.planning.move_decision import Decider, Decision, Window

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
    middle: Measured, extremes: Sequence[Measured] = (), steps_left: float = math.inf
) -> Window:
    return Window(5, 1.0, middle, extremes or (middle, middle), steps_left)


def counts_of(decision: Decision) -> tuple[int, ...]:
    return Plan.from_json(decision.plan).placement.counts[0]


def test_equal_devices_keep_their_layers() -> None:
    decision = decider().decide(plan(), window(measured(1.0)))
    assert not decision.is_new
    assert counts_of(decision) == (4, 4)
    assert Plan.from_json(decision.plan).prediction is not None, "what is predicted is known anew"


def test_a_slow_device_gives_layers_away() -> None:
    decision = decider().decide(plan(), window(measured(0.5)))
    assert decision.is_new
    first, second = counts_of(decision)
    assert first > second
    assert decision.expected_gain > 1.2
    assert "[4, 4] becomes" in decision.message


def test_what_does_not_last_is_left_alone() -> None:
    swinging = window(measured(0.5), (measured(1.0), measured(0.4)))
    assert not decider().decide(plan(), swinging).is_new
    lasting = window(measured(0.5), (measured(0.55), measured(0.45)))
    assert decider().decide(plan(), lasting).is_new


def test_a_gain_has_to_be_worth_the_move() -> None:
    assert not decider(min_gain=5.0).decide(plan(), window(measured(0.5))).is_new
    assert not decider().decide(plan(), window(measured(0.5), steps_left=0)).is_new
    heavy = measured(0.5, parameter_bytes=10**10)
    assert heavy.move_seconds(plan(), plan((5, 3))) > 0.1
    assert not decider().decide(plan(), window(heavy, steps_left=1)).is_new
    assert decider().decide(plan(), window(heavy, steps_left=10**9)).is_new


def test_each_time_that_layers_are_taken_back_takes_twice_as_long() -> None:
    mind, now, waited = decider(), plan(), []
    for speed in (0.5, 1.0, 0.5, 1.0):
        decisions: list[Decision] = []
        while not (decisions and decisions[-1].is_new):
            assert len(decisions) < 20
            decisions.append(mind.decide(now, window(measured(speed))))
        now = Plan.from_json(decisions[-1].plan)
        waited.append(len(decisions))
    assert waited == [1, 2, 4, 8]


def test_what_was_left_alone_in_between_is_begun_anew() -> None:
    mind = decider()
    moved = Plan.from_json(mind.decide(plan(), window(measured(0.5))).plan)
    assert not mind.decide(moved, window(measured(1.0))).is_new
    assert not mind.decide(moved, window(measured(0.5))).is_new
    assert not mind.decide(moved, window(measured(1.0))).is_new, "not twice in a row"
    assert mind.decide(moved, window(measured(1.0))).is_new


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
    assert Plan.from_json(decision.plan).swaps
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
