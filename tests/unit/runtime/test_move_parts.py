"""How a change of the plan is split into parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.planning.move_parts import parts_of

MB = 10**6
# Weights, gradients and Adam's state of a layer; a forward takes 10 ms, a backward 20 ms.
WEIGHTS = 25 * MB
LAYERS = tuple(
    LayerProfile(f"layer{n}", WEIGHTS, gradient_bytes=WEIGHTS, optimizer_bytes=2 * WEIGHTS)
    for n in range(8)
)
STATIC = 4 * WEIGHTS


def measured(bandwidth: float, memory_bytes: int = 0, num_stages: int = 2) -> Measured:
    devices = [Device(f"host{n}", "cpu", memory_bytes=memory_bytes) for n in range(num_stages)]
    times = KindProfile((0.010,) * 8, (0.020,) * 8)
    profile = Profile(LAYERS, {"cpu": times}, 1.0, 4)
    cluster = Cluster(tuple(devices), outside=Link(0.0, bandwidth))
    return Measured(profile, cluster, (tuple(range(num_stages)),))


def plan(*counts: int, schedule: str = "1f1b") -> Plan:
    records = tuple(LayerRecord(layer.name, WEIGHTS, 0.01, 0) for layer in LAYERS)
    microbatches = 4 if schedule == "1f1b" else 1
    ranks = (tuple(range(len(counts))),)
    return Plan(records, Placement((counts,)), schedule, microbatches, ranks=ranks)


def split(old: Plan, new: Plan, known: Measured | None) -> list[tuple[int, ...]]:
    parts = parts_of(old, new, LAYERS, known, checks_memory=True)
    assert parts[-1] is new
    return [part.placement.counts[0] for part in parts]


def test_as_much_moves_at_a_time_as_the_link_carries_in_half_a_step() -> None:
    # A step takes about 0.75 s: four microbatches of six layers on the first stage, and the rest.
    fast, slow, slower = (measured(rate * MB) for rate in (100_000, 600, 25))
    assert split(plan(6, 2), plan(3, 5), fast) == [(3, 5)]
    # A layer takes 0.17 s. The weights of two of them travel during two microbatches.
    assert split(plan(6, 2), plan(3, 5), slow) == [(4, 4), (3, 5)]
    one_by_one = [(5, 3), (4, 4), (3, 5)]
    assert split(plan(6, 2), plan(3, 5), slower) == one_by_one
    assert split(plan(3, 5), plan(6, 2), slower) == [(4, 4), (5, 3), (6, 2)]


def test_links_that_are_not_measured_carry_32_mib_in_a_step() -> None:
    assert split(plan(6, 2), plan(4, 4), None) == [(5, 3), (4, 4)]


def test_ranks_that_change_places_do_it_at_once() -> None:
    new = replace(plan(3, 5), ranks=((1, 0),))
    assert parts_of(plan(6, 2), new, LAYERS, measured(1.0), True) == [new]


def test_what_is_held_twice_counts() -> None:
    enough = 6 * STATIC + WEIGHTS
    assert split(plan(6, 2), plan(3, 5), measured(1e12, enough)) == [
        (5, 3),
        (4, 4),
        (3, 5),
    ]
    with pytest.raises(PlanError, match=r"stage 0 .* 625.0 MB or .* 25.0 MB of them .* 1.0"):
        split(plan(6, 2), plan(3, 5), measured(1e12, enough - MB))
    # The new owner lacks no more than the old one did.
    assert split(plan(2, 6), plan(3, 5), measured(1e12, enough)) == [(3, 5)]


def asynchronous(*counts: int) -> Plan:
    return plan(*counts, schedule="async")


def test_an_asynchronous_step_is_a_minibatch() -> None:
    # It takes about 0.18 s, and a layer 0.08 s at the higher rate.
    fast, slow = (measured(rate * MB) for rate in (1300, 600))
    assert split(asynchronous(6, 2), asynchronous(3, 5), fast) == [
        (5, 3),
        (4, 4),
        (3, 5),
    ]
    assert split(asynchronous(6, 2), asynchronous(4, 4), slow) == [(5, 3), (4, 4)]
    assert split(asynchronous(6, 2), asynchronous(3, 5), measured(1e12)) == [(3, 5)]


def test_while_minibatches_are_in_flight_both_owners_hold_every_version() -> None:
    # Of a layer, the second of three stages holds two versions of the weights.
    old, new, of_a_layer = asynchronous(3, 3, 2), asynchronous(1, 4, 3), STATIC + WEIGHTS
    assert split(old, new, measured(1e12, 5 * of_a_layer, 3)) == [(1, 4, 3)]
    # It gives one layer away, and gets another one.
    in_parts = [(2, 3, 3), (1, 4, 3)]
    for enough in (5 * of_a_layer - MB, 4 * of_a_layer):
        assert split(old, new, measured(1e12, enough, 3)) == in_parts
    with pytest.raises(PlanError, match=r"stage 1 .* 500.0 MB or .* 125.0 MB of them .* 1.0 MB"):
        split(old, new, measured(1e12, 4 * of_a_layer - MB, 3))
    # So do the batches of two minibatches, and what the largest layer takes while it runs.
    needed = measured(1e12, 4 * of_a_layer + 2 * 3 * MB + 5 * MB, 3)
    layers = tuple(replace(layer, working_bytes=5 * MB) for layer in LAYERS)
    profile = replace(needed.profile, layers=layers, batch_bytes=3 * MB)
    assert split(old, new, replace(needed, profile=profile)) == in_parts
    more = replace(profile, batch_bytes=3 * MB + 1)
    with pytest.raises(PlanError, match=r"stage 1 .* 511.0 MB or .* 125.0 MB of them"):
        split(old, new, replace(needed, profile=more))
    # A stage that has too much may give some of it away.
    relief = measured(1e12, 5 * of_a_layer)
    assert split(asynchronous(6, 2), asynchronous(3, 5), relief) == [(3, 5)]
