"""Lanes of gradients: their shares, and the simulation of steps that overlap with sums."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.lanes import (
    MOST_PIECES,
    PIECE_BYTES,
    equal_shares,
    lanes_by_share,
    num_pieces,
)
from lightning_pipeshift.plan.cost.prediction import Pipelines
from lightning_pipeshift.plan.cost.ring_contention import RingNetwork, Transfer, ring_ends
from lightning_pipeshift.plan.cost.workload import Cut, workload_of
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from tests.unit.plan.clusters import devices

# --- shares ---


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [
        ([1, 1, 1, 1], [0.5, 0.5], [0, 0, 1, 1]),
        ([1, 1, 1, 1], [1.0], [0, 0, 0, 0]),
        ([6, 1, 1], [0.5, 0.5], [0, 1, 1]),
        ([1, 1, 6], [0.5, 0.5], [0, 0, 1]),
        ([0, 0], [0.5, 0.5], [0, 0]),
        ([], [0.5, 0.5], []),
        ([1, 2, 3, 4], [0.1, 0.2, 0.7], [0, 1, 2, 2]),
    ],
)
def test_the_first_layers_travel_on_the_most_urgent_lane(
    sizes: list[int], shares: list[float], expected: list[int]
) -> None:
    assert lanes_by_share(sizes, shares) == tuple(((1.0, lane),) for lane in expected)


def test_a_large_layer_is_split_between_two_pieces() -> None:
    sizes = [PIECE_BYTES, 3 * PIECE_BYTES, PIECE_BYTES]
    assert lanes_by_share(sizes, [0.4, 0.6]) == (
        ((1.0, 0),),
        ((1 / 3, 0), (1.0, 1)),
        ((1.0, 1),),
    )
    # No more parts than there are pieces, however large it is.
    shares = [1 / 5] * 5
    (parts,) = lanes_by_share([100 * PIECE_BYTES], shares)
    assert [part.lane for part in parts] == [0, 1, 2, 3, 4]
    assert all(part.end * MOST_PIECES == round(part.end * MOST_PIECES) for part in parts)


def test_equal_shares_are_as_many_as_there_are_pieces() -> None:
    assert equal_shares([10, 0, 10]) == (1 / 2,) * 2
    assert equal_shares([10] * 9) == (1 / 5,) * 5
    assert equal_shares([0, 0]) == (1.0,)
    assert equal_shares([3 * PIECE_BYTES]) == (1 / 3,) * 3
    assert num_pieces(0) == 1


# --- the simulation ---


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
    assert found.overlapping_seconds([1.0]) == pytest.approx(13.0)


def test_the_most_urgent_ring_stops_the_others() -> None:
    """By hand: two layers of 1 s and 2 s backward; a ring of 300 bytes takes 3 s."""
    found = planner(model([1.0] * 2, [300] * 2), TWO_HOSTS, [[0], [1]], [Cut((2,))] * 2, 1)
    # Layer 1 is ready at 4 and has 2 s of the link until layer 0 is ready, at 6. That one is
    # complete at 9, and its forward ends at 10, as does the rest of layer 1: the step takes 9 s.
    assert found.overlapping_seconds([1.0]) == pytest.approx(9.0)
    # In order of arrival, layer 0 is complete at 10, and the step would wait for that.
    ends = ring_ends(TWO_HOSTS, [[0], [1]], [Cut((2,))] * 2, [300, 300], [6.0, 4.0])
    assert ends == [10.0, 7.0]


def test_lanes_tell_the_ranks_of_a_host_which_one_is_more_urgent() -> None:
    """Rings of two stages share a host's NIC. Stage 0 has the first layers, which are urgent."""
    hosts = Cluster(devices("a:X a:X b:X b:X"), outside=Link(0.0, 100.0))
    ranks, cuts = [[0, 1], [2, 3]], [Cut((2, 2))] * 2
    network = RingNetwork(hosts, ranks, cuts)
    ready = [0.0] * 4

    def ends(lanes: list[int]) -> list[float]:
        return network.ends([Transfer(i, lane, 100.0) for i, lane in enumerate(lanes)], ready)

    # Each stage sends for its own first layer first, and both share the link.
    assert ends([0, 0, 0, 0]) == pytest.approx([2.0, 4.0, 2.0, 4.0])
    assert ends([0, 0, 1, 1]) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert ends([0, 1, 0, 1]) == pytest.approx([2.0, 4.0, 2.0, 4.0])
    assert ends([1, 1, 0, 0]) == pytest.approx([3.0, 4.0, 1.0, 2.0])


# The members of a ring, the host of each message that leaves one, and the bytes per second.
Uses = tuple[tuple[int, ...], list[Any], float]


def slowly(
    cluster: Cluster,
    ranks: list[list[int]],
    cuts: list[Cut],
    transfers: list[Transfer],
    ready: list[float],
    tick: float,
) -> list[float]:
    """The ends of rings, by many short steps of time, and by the rules alone: the oracle."""
    count = len(ranks)
    hosts = [device.host for device in cluster.devices]
    members = {
        one.layer: [
            machine[next(s for s, b in enumerate(cut.bounds[1:]) if one.layer < b)]
            for machine, cut in zip(ranks, cuts, strict=True)
        ]
        for one in transfers
    }
    left = [2 * (count - 1) / count * one.num_bytes for one in transfers]
    ends = list(ready)
    now = 0.0
    nic = cluster.outside.bandwidth
    while any(size > 1e-9 for size in left):
        capacity: dict[Any, float] = dict.fromkeys(hosts, nic * tick)
        capacity |= dict.fromkeys(range(cluster.num_ranks), 1.0)
        active = [
            i for i, one in enumerate(transfers) if left[i] > 1e-9 and ready[one.layer] <= now
        ]
        for lane in sorted({transfers[i].lane for i in active}):
            # The most urgent one of each set of members; others only get what is left.
            heads: dict[tuple[int, ...], int] = {}
            for i in sorted(active, key=lambda i: transfers[i].layer):
                if transfers[i].lane == lane:
                    heads.setdefault(tuple(members[transfers[i].layer]), i)
            uses: dict[int, Uses] = {}
            for ring, i in heads.items():
                ways = list(zip(ring, [*ring[1:], ring[0]], strict=True))
                leaving = [hosts[a] for a, b in ways if hosts[a] != hosts[b]]
                rate = min(
                    [cluster.link(a, b).bandwidth for a, b in ways]
                    + [nic / leaving.count(host) for host in leaving]
                )
                uses[i] = (ring, leaving, rate)
            for is_second in (False, True):
                shares = {}
                for i, (ring, leaving, rate) in uses.items():
                    fractions = [1.0]
                    places: set[Any] = {*ring, *leaving}
                    for place in places:
                        need = 1.0 if isinstance(place, int) else leaving.count(place) * rate * tick
                        sharers = sum(place in {*r, *w} for r, w, _ in uses.values())
                        fractions.append(capacity[place] / need / (1 if is_second else sharers))
                    shares[i] = max(0.0, min(fractions))
                    if is_second:
                        use(capacity, uses[i], shares[i], tick)
                if not is_second:
                    for i, share in shares.items():
                        use(capacity, uses[i], share, tick)
                for i, share in shares.items():
                    left[i] -= share * uses[i][2] * tick
        now += tick
        for i in active:
            if left[i] <= 1e-9:
                ends[transfers[i].layer] = max(ends[transfers[i].layer], now)
    return ends


def use(capacity: dict[Any, float], uses: Uses, share: float, tick: float) -> None:
    ring, leaving, rate = uses
    for rank in ring:
        capacity[rank] -= share
    for host in leaving:
        capacity[host] -= share * rate * tick


@pytest.mark.parametrize("seed", range(12))
def test_rings_end_as_many_short_steps_of_time_say(seed: int) -> None:
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
    transfers = [
        Transfer(layer, draw.randint(0, 2), float(draw.randint(0, 3) * 50))
        for layer in range(num_layers)
        for _ in range(draw.randint(1, 2))
    ]
    found = RingNetwork(cluster, ranks, cuts).ends(transfers, ready)
    tick = 0.002
    assert found == pytest.approx(slowly(cluster, ranks, cuts, transfers, ready, tick), abs=0.05)


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
