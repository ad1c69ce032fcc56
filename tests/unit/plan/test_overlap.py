"""The simulation of steps that overlap with sums of gradients."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.cost.prediction import Pipelines
from lightning_pipeshift.plan.cost.ring_contention import Rings
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.measurements import Measured
from tests.unit.plan.clusters import devices


def model(
    seconds: Sequence[float], sizes: Sequence[int], backward: float = 2.0, **others: object
) -> Profile:
    return Profile(
        layers=tuple(
            LayerProfile(f"l{i}", parameter_bytes=size, gradient_bytes=size)
            for i, size in enumerate(sizes)
        ),
        kinds={"X": KindProfile(tuple(seconds), tuple(backward * s for s in seconds))},
        **others,  # type: ignore[arg-type]
    )


def planner(
    profile: Profile, cluster: Cluster, ranks: list[list[int]], cuts: list[Cut], microbatches: int
) -> Pipelines:
    workloads = [workload_of(profile, cluster, one, "1f1b", microbatches) for one in ranks]
    return Pipelines(profile, cluster, ranks, workloads, cuts)


TWO_HOSTS = Cluster(devices("a:X b:X"), outside=Link(0.0, 100.0))


def test_a_step_waits_only_for_the_first_layer() -> None:
    """By hand: four layers of 1 s and 2 s backward; a ring of 100 bytes takes 1 s."""
    found = planner(model([1.0] * 4, [100] * 4), TWO_HOSTS, [[0], [1]], [Cut((4,))] * 2, 1)
    # 12 s of compute, and the ring of layer 0, which begins when the backward ends.
    assert found.overlapping_seconds == pytest.approx(13.0)


def test_of_rings_that_wait_the_first_layers_goes_first() -> None:
    """By hand: rings of 300 bytes, which take 3 s each."""
    rings = Rings(TWO_HOSTS, [[0], [1]], [Cut((3,))] * 2)
    # Layer 2 is ready first, and meanwhile both of the others.
    assert rings.ends([300] * 3, [6.0, 5.0, 4.0]) == [10.0, 13.0, 7.0]
    # Layer 0 is ready too late for its turn.
    assert rings.ends([300] * 3, [8.0, 5.0, 4.0]) == [13.0, 10.0, 7.0]


def test_rings_of_a_host_share_its_link_and_the_first_layers_goes_first() -> None:
    """Rings of two stages share a host's NIC. Stage 0 has the first layers."""
    hosts = Cluster(devices("a:X a:X b:X b:X"), outside=Link(0.0, 100.0))
    rings = Rings(hosts, [[0, 1], [2, 3]], [Cut((2, 2))] * 2)
    assert rings.ends([100] * 4, [0.0] * 4) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert rings.ends([100] * 4, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([2.0, 3.0, 1.0, 4.0])


def one_by_one(
    cluster: Cluster,
    ranks: list[list[int]],
    cuts: list[Cut],
    sizes: list[int],
    ready: list[float],
) -> list[float]:
    """The ends of rings, from one moment to the next, by the rules alone: the oracle."""
    count = len(ranks)
    hosts = [device.host for device in cluster.devices]
    nic = cluster.outside.bandwidth
    free: dict[int | str, float] = dict.fromkeys([*range(cluster.num_ranks), *hosts], 0.0)
    ends = list(ready)
    left = {layer for layer, size in enumerate(sizes) if size}
    moments = set(ready)
    while left:
        now = min(moments)
        moments.remove(now)
        for layer in sorted(left):
            members = [
                machine[next(s for s, b in enumerate(cut.bounds[1:]) if layer < b)]
                for machine, cut in zip(ranks, cuts, strict=True)
            ]
            ways = list(zip(members, [*members[1:], members[0]], strict=True))
            leaving = [hosts[a] for a, b in ways if hosts[a] != hosts[b]]
            uses: list[int | str] = [*members, *leaving]
            if ready[layer] > now or any(free[use] > now for use in uses):
                continue
            sent = 2 * (count - 1) / count * sizes[layer]
            rate = min(
                [cluster.link(a, b).bandwidth for a, b in ways]
                + [nic / leaving.count(host) for host in leaving]
            )
            for use in uses:
                free[use] = now + sent / rate
            for host in leaving:
                free[host] = now + leaving.count(host) * sent / nic
            moments |= {free[use] for use in uses}
            ends[layer] = now + sent / rate
            left.remove(layer)
    return ends


@pytest.mark.parametrize("seed", range(24))
def test_rings_end_as_the_rules_say(seed: int) -> None:
    draw = random.Random(seed)
    num_layers, stages, count = draw.randint(2, 5), draw.randint(1, 2), draw.randint(2, 3)
    ranks = [[vm * stages + s for s in range(stages)] for vm in range(count)]
    names = [draw.choice("ab") for _ in range(stages * count)]
    cluster = Cluster(
        tuple(Device(name, "X") for name in names), Link(0.0, 1000.0), Link(0.0, 100.0)
    )
    cuts = []
    for _ in range(count):
        first = draw.randint(0, num_layers) if stages == 2 else num_layers
        cuts.append(Cut((first, num_layers - first) if stages == 2 else (num_layers,)))
    ready = [draw.randint(0, 8) / 2 for _ in range(num_layers)]
    sizes = [draw.randint(0, 3) * 50 for _ in range(num_layers)]
    found = Rings(cluster, ranks, cuts).ends(sizes, ready)
    assert found == pytest.approx(one_by_one(cluster, ranks, cuts, sizes, ready))


def test_overlap_makes_a_prediction_shorter_and_never_shorter_than_its_compute() -> None:
    for backward in (0.1, 2.0):
        plain = model([1.0] * 4, [300] * 4, backward)
        workloads = [workload_of(plain, TWO_HOSTS, [rank], "1f1b", 1) for rank in (0, 1)]
        cuts = [Cut((4,))] * 2
        waits = Pipelines(plain, TWO_HOSTS, [[0], [1]], workloads, cuts).predicted()
        late = model([1.0] * 4, [300] * 4, backward, overlaps_updates=True)
        overlaps = Pipelines(late, TWO_HOSTS, [[0], [1]], workloads, cuts).predicted()
        assert 4 * (1 + backward) < overlaps.step_seconds < waits.step_seconds
        assert overlaps.exposed_seconds == pytest.approx(overlaps.step_seconds - 4 * (1 + backward))


# --- in the plan ---


def test_a_plan_keeps_the_shares_that_it_was_given() -> None:
    profile = model([1.0] * 4, [100] * 4, overlaps_updates=True)
    measured = Measured(profile, TWO_HOSTS, [[0], [1]])
    plan = measured.plan("1f1b", 2, [Cut((4,))] * 2)
    assert plan.lane_shares == ()
    assert "gradient lanes" not in str(plan)
    fixed = replace(plan, lane_shares=(0.2, 0.8), prediction=None)
    assert "gradient lanes, the most urgent first: 20.0%, 80.0%" in str(fixed)
    assert Plan.from_json(fixed.to_json()) == fixed
    assert fixed.with_placement(plan.placement).lane_shares == (0.2, 0.8)


@pytest.mark.parametrize("shares", [[0.5, 0.4], [0.0, 1.0], [1.5, -0.5], [1 / 6] * 6])
def test_impossible_shares_are_named(shares: list[float]) -> None:
    text = Measured(model([1.0], [100]), TWO_HOSTS, [[0]]).plan("1f1b", 1, [Cut((1,))]).to_json()
    wrong = text.replace('"placement"', f'"lane_shares": {shares}, "placement"')
    assert wrong != text
    with pytest.raises(PlanError, match="'lane_shares'"):
        Plan.from_json(wrong)
