import itertools
from dataclasses import replace

import pytest

from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.planner import arrange, evaluate
from lightning_pipeshift.plan.search.request import PlanRequest
from tests.cases import some
from tests.unit.plan.clusters import NARROW, WIDE, devices, every_arrangement, profile, unlike


def machines(arrangement):
    """The ranks as a text: ``"01 23"``."""
    return " ".join("".join(map(str, ranks)) for ranks in arrangement.ranks)


# --- against brute force ---


@pytest.mark.parametrize("seed", range(6))
def test_near_the_best_of_all_groupings_and_orders(seed):
    # Links of 200 and 50 Mbit/s between stages and replicas, devices of two speeds.
    case = unlike(seed)
    every = [found.samples_per_second for found in every_arrangement(*case)]
    assert arrange(*case).samples_per_second >= 0.97 * max(every)


@pytest.mark.parametrize("seed", [4, 12, 21, 23])
def test_near_the_best_where_memory_is_short(seed):
    case = unlike(seed, room=0.8)
    every = [found.samples_per_second for found in every_arrangement(*case)]
    found = arrange(*case)
    assert found.samples_per_second >= 0.97 * max(every)
    for ranks, held in zip(found.ranks, found.prediction.memory_bytes, strict=True):
        for rank, num_bytes in zip(ranks, held, strict=True):
            assert num_bytes <= case[1].devices[rank].usable_bytes


@pytest.mark.parametrize("seed", [12, 22, 29])
def test_near_the_best_of_a_number_of_virtual_machines(seed):
    model, cluster, request = unlike(seed)
    request = replace(request, virtual_machines=2)
    every = [found.samples_per_second for found in every_arrangement(model, cluster, request)]
    found = arrange(model, cluster, request)
    assert len(found.ranks) == 2
    assert found.samples_per_second >= 0.97 * max(every)


# --- by hand ---


def test_nothing_to_send_means_a_virtual_machine_for_each_device():
    found = arrange(profile(8), Cluster(devices("a:X " * 4)), PlanRequest(batch_samples=4))
    assert machines(found) == "0 1 2 3"
    assert found.cuts == (Cut((8,)),) * 4
    # One sample takes 24 s, and four of them at once as long as one after the other.
    assert (found.microbatches, found.batch_shares) == (1, None)
    assert found.samples_per_second == pytest.approx(4 / 24)


def test_gradients_that_take_long_stay_inside_of_one_virtual_machine():
    model = profile(8, gradient=10**9)
    cluster = Cluster(devices("a:X b:X c:X d:X"), outside=NARROW)
    found = arrange(model, cluster, PlanRequest(batch_samples=64))
    assert machines(found) == "0123"
    assert found.cuts == (Cut((2, 2, 2, 2)),)


def test_payloads_stay_inside_of_a_host():
    model = profile(8, payload=10**7, gradient=1000, seconds=1e-3)
    cluster = Cluster(devices("a:X b:X a:X b:X"), Link(0.0, 1e10), NARROW)
    found = arrange(model, cluster, PlanRequest(batch_samples=8, virtual_machines=2))
    assert machines(found) == "02 13"


def test_gradients_stay_inside_of_a_host_where_they_are_larger():
    model = profile(8, payload=10, gradient=10**8, seconds=1e-2)
    cluster = Cluster(devices("a:X a:X b:X b:X"), Link(0.0, 1e10), NARROW)
    found = arrange(model, cluster, PlanRequest(batch_samples=8, virtual_machines=2))
    assert machines(found) == "02 13"


def test_one_of_each_kind():
    model = profile(6, "XY", gradient=10**5, seconds=1e-3)
    cluster = Cluster(devices("a:X a:X b:Y b:Y"), outside=WIDE)
    request = PlanRequest(batch_samples=8, virtual_machines=2, batch_shares=(1.0, 1.0))
    found = arrange(model, cluster, request)
    assert {frozenset(ranks) for ranks in found.ranks} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )
    # The fast device has twice the layers.
    for ranks, cut in zip(found.ranks, found.cuts, strict=True):
        assert dict(zip(ranks, cut.counts, strict=True))[min(ranks)] == 4


def test_shares_follow_the_speed_of_virtual_machines():
    found = arrange(
        profile(4, "XY"),
        Cluster(devices("a:X b:Y")),
        PlanRequest(batch_samples=6, virtual_machines=2),
    )
    assert found.batch_shares == (2, 1)
    # 8 samples of 12 s, and 4 of 24 s.
    assert found.prediction.step_seconds == pytest.approx(96)
    assert found.samples_per_second == pytest.approx(12 / 96)


def test_shares_count_what_does_not_depend_on_samples():
    # An action takes 6 s besides its layers, on either kind: the slow one is not that slow.
    times = {
        kind: KindProfile((factor,), (2 * factor,), action_forward=3.0, action_backward=3.0)
        for kind, factor in (("X", 1.0), ("Y", 2.0))
    }
    model = Profile((LayerProfile("l"),), times)
    request = PlanRequest(batch_samples=6, virtual_machines=2, microbatches=4)
    found = arrange(model, Cluster(devices("a:X b:Y")), request)
    # 4 x 6 s for the actions, and 3 s or 6 s for each sample.
    assert found.prediction.step_seconds == pytest.approx(24 + 24)
    assert found.batch_shares == (2, 1)


def test_shares_that_hardly_gain_are_equal():
    cluster = Cluster((Device("a", "X"), Device("b", "X", speed=0.985)))
    found = arrange(profile(4), cluster, PlanRequest(batch_samples=128, virtual_machines=2))
    assert found.batch_shares is None


def test_wished_shares_go_to_the_faster_ones():
    model, cluster = profile(4, "XY"), Cluster(devices("a:X b:Y"))
    for shares, expected in (((3.0, 1.0), "0 1"), ((1.0, 3.0), "1 0")):
        found = arrange(model, cluster, PlanRequest(batch_samples=4, batch_shares=shares))
        assert machines(found) == expected
        assert found.batch_shares == shares
        assert found.prediction.step_seconds == pytest.approx(6 * 12)


def test_microbatches_fill_the_pipeline():
    # Nothing speaks for fewer than there are samples, but the last percent.
    model, cluster = profile(4), Cluster(devices("a:X a:X a:X a:X"))
    found = arrange(model, cluster, PlanRequest(batch_samples=32, virtual_machines=1))
    assert found.microbatches == 32
    assert found.prediction.step_seconds == pytest.approx((32 + 3) * 3)


def test_microbatches_are_fewer_where_actions_cost():
    times = KindProfile((1.0,) * 4, (2.0,) * 4, action_forward=3.0, action_backward=3.0)
    model = Profile(tuple(LayerProfile(f"l{n}") for n in range(4)), {"X": times})
    cluster = Cluster(devices("a:X a:X a:X a:X"))
    found = arrange(model, cluster, PlanRequest(batch_samples=32, virtual_machines=1))
    seconds = {
        count: evaluate(
            model, cluster, PlanRequest(batch_samples=32), found.ranks, found.cuts, count
        ).prediction.step_seconds
        for count in (1, 2, 4, 8, 16, 32)
    }
    assert found.prediction.step_seconds == min(seconds.values())
    assert found.microbatches < 32


def test_more_microbatches_where_memory_is_short():
    # A layer holds 24 bytes, and 8 for each sample: a device has room for one layer, and for two
    # samples in flight. Twice a slice of one are, on the first stage.
    cluster = Cluster(devices("a:X a:X", memory_bytes=40))
    times = KindProfile((1.0,) * 2, (2.0,) * 2, action_forward=30.0, action_backward=30.0)
    layers = tuple(LayerProfile(f"l{n}", 24, saved_bytes=8, input_bytes=8) for n in range(2))
    model = Profile(layers, {"X": times})
    request = PlanRequest(batch_samples=16, virtual_machines=1)
    assert arrange(model, Cluster(devices("a:X a:X")), request).microbatches <= 2
    found = arrange(model, cluster, request)
    assert found.microbatches == 16
    assert found.prediction.memory_bytes == ((40, 32),)


def test_memory_makes_pipelines_deeper():
    # A model of 8 x 10 bytes, and as much for gradients. A device for itself would be fastest.
    model = profile(8, gradient=10, static=10)
    depths = {}
    for room in (0, 160, 80, 40, 20):
        cluster = Cluster(devices("a:X " * 8, memory_bytes=room))
        found = arrange(model, cluster, PlanRequest(batch_samples=8))
        depths[room] = {len(ranks) for ranks in found.ranks}
    assert depths == {0: {1}, 160: {1}, 80: {2}, 40: {4}, 20: {8}}


def test_what_does_not_fit_in_one_order_fits_in_another():
    # In 1F1B the first stage holds two microbatches, and the last one.
    room = {"a": 30, "b": 45}
    cluster = Cluster(tuple(Device(host, "X", memory_bytes=room[host]) for host in "ab"))
    model = profile(2, saved=20, static=5)
    request = PlanRequest(batch_samples=2, microbatches=2, recompute="none", virtual_machines=1)
    found = arrange(model, cluster, request)
    assert machines(found) == "10"


def test_equal_shares_that_do_not_fit():
    # The slow device has room for a third of the batch only.
    cluster = Cluster((Device("a", "X", memory_bytes=100), Device("b", "Y", memory_bytes=50)))
    request = PlanRequest(batch_samples=6, virtual_machines=2, microbatches=1)
    found = arrange(profile(1, "XY", saved=10), cluster, request)
    assert found.batch_shares == (2, 1)


def test_unequal_depths():
    # A device as fast as the three others together.
    cluster = Cluster(devices("a:X b:Z b:Z b:Z"), Link(0.0, 1e9), WIDE)
    model = profile(6, "XYZ", gradient=10**7, seconds=1e-2, payload=1000)
    found = arrange(model, cluster, PlanRequest(batch_samples=64, virtual_machines=2))
    assert machines(found) == "0 123"
    assert [cut.counts for cut in found.cuts] == [(6,), (2, 2, 2)]


# --- request ---


def test_wished_ranks_stay_where_they_are():
    model, cluster = profile(6, "XY"), Cluster(devices("a:X a:Y b:X b:Y"), outside=NARROW)
    request = PlanRequest(batch_samples=8, virtual_machines=((3, 0), (1, 2)))
    found = arrange(model, cluster, request)
    assert machines(found) == "30 12"
    assert [cut.counts for cut in found.cuts] == [(2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("uniform", [(3, 3), (3, 3)]),
        (((5, 1), (2, 4)), [(5, 1), (2, 4)]),
        (((6,), (1, 2, 3)), [(6,), (1, 2, 3)]),
        # One row is for all.
        (((5, 1),), [(5, 1), (5, 1)]),
        (((1, 1, 1, 3),), [(1, 1, 1, 3)]),
    ],
)
def test_wished_partitions(partition, expected):
    model, cluster = profile(6, "XY", gradient=10), Cluster(devices("a:X a:Y b:X b:Y"))
    request = PlanRequest(
        batch_samples=8,
        partition=partition,
        virtual_machines=2 if partition == "uniform" else "auto",
    )
    found = arrange(model, cluster, request)
    assert [cut.counts for cut in found.cuts] == expected
    assert [len(ranks) for ranks in found.ranks] == list(map(len, expected))


@pytest.mark.parametrize("recompute", ["auto", "full", "none"])
def test_recomputation_of_a_wished_partition(recompute):
    model = profile(2, saved=10)
    layers = tuple(replace(layer, input_bytes=1) for layer in model.layers)
    model = replace(model, layers=layers)
    request = PlanRequest(
        batch_samples=4,
        microbatches=4,
        partition="uniform",
        virtual_machines=1,
        recompute=recompute,
    )
    boundless = arrange(model, Cluster(devices("a:X a:X")), request)
    assert bool(boundless.cuts[0].recompute) == (recompute == "full")
    short = Cluster(devices("a:X a:X", memory_bytes=15))
    if recompute == "none":
        with pytest.raises(PlanError, match=r"partition \[1, 1\] needs 20 bytes on stage 0"):
            arrange(model, short, request)
    else:
        assert arrange(model, short, request).cuts == (Cut((1, 1), frozenset({0})),)


@pytest.mark.parametrize(("room", "num_recomputed"), [(90, 0), (60, 2), (33, 3)])
def test_one_device_recomputes_layer_by_layer(room, num_recomputed):
    """Each layer has 2 bytes of weights, saves 20, or 1 if it is recomputed in its backward."""
    model = profile(4, saved=20, static=2, seconds=0.01)
    model = replace(model, layers=tuple(replace(layer, input_bytes=1) for layer in model.layers))
    request = PlanRequest(virtual_machines=1, microbatches=2, batch_samples=2.0)
    found = arrange(model, Cluster(devices("a:X", memory_bytes=room)), request)
    assert len(found.cuts[0].recompute) == num_recomputed
    assert found.prediction.memory_bytes[0][0] <= room


def blocks_of_two(num_blocks: int, weights: int = 0) -> Profile:
    """Equal layers; more crosses the boundary inside of a block than those between blocks."""
    layers = tuple(
        LayerProfile(f"l{n}", weights, payload_bytes=payload, payload_gradient_bytes=payload)
        for n, payload in enumerate([9, 1] * num_blocks)
    )
    times = KindProfile((1.0,) * len(layers), (2.0,) * len(layers))
    return Profile(layers, {"X": times})


ONE_OF_TWO_STAGES = PlanRequest(batch_samples=8, virtual_machines=1)


def test_no_cut_inside_of_a_block_for_a_small_gain():
    cluster = Cluster(devices("a:X a:X"))
    found = arrange(blocks_of_two(11), cluster, ONE_OF_TWO_STAGES)
    assert found.cuts[0].counts in ((10, 12), (12, 10))
    # For a large gain, or where nothing else fits.
    assert arrange(blocks_of_two(3), cluster, ONE_OF_TWO_STAGES).cuts == (Cut((3, 3)),)
    short = Cluster(devices("a:X a:X", memory_bytes=1140))
    found = arrange(blocks_of_two(11, weights=100), short, ONE_OF_TWO_STAGES)
    assert found.cuts == (Cut((11, 11)),)


BAD_REQUESTS = [
    ({"batch_samples": 0.0}, "0.0 samples"),
    ({"virtual_machines": 0}, "virtual_machines=0"),
    ({"microbatches": 0}, "microbatches=0"),
    ({"virtual_machines": 2, "batch_shares": (1.0, 2.0, 3.0)}, "is for 2, batch_shares is for 3"),
    ({"virtual_machines": ((0, 1),), "partition": ((1,), (1,))}, "is for 1, partition is for 2"),
    ({"schedule": "async", "microbatches": 2}, "schedule='async' with microbatches=2; an asyn"),
    ({"schedule": "async", "virtual_machines": ((0, 1), (2,))}, "a deeper pipeline uses older"),
    ({"schedule": "async", "partition": ((1, 1), (2,))}, r"virtual machines \(.*\) of 2, 1 stages"),
]


@pytest.mark.parametrize(("wanted", "message"), BAD_REQUESTS)
def test_requests_that_do_not_go_together(wanted, message):
    with pytest.raises(PlanError, match=message):
        PlanRequest(**wanted)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"virtual_machines": 3}, r"3 virtual machines \(.*\) on 2 devices"),
        ({"partition": ((1, 1), (2,))}, "3 stages on 2 devices"),
        ({"partition": ((1, 1, 0),)}, "3 stages on 2 devices"),
        ({"partition": ((1, 1),), "virtual_machines": 2}, "4 stages on 2 devices"),
        ({"virtual_machines": ((0,), (1,), (2,))}, "3 ranks on 2 devices"),
        ({"virtual_machines": ((0, 0),)}, "rank 0 more than once"),
    ],
)
def test_requests_that_do_not_fit_the_machines(wanted, message):
    with pytest.raises(ConfigurationError, match=message):
        arrange(profile(2), Cluster(devices("a:X a:X")), PlanRequest(**wanted))


def test_the_error_tells_of_what_comes_nearest_to_fitting():
    cluster = Cluster(devices("a:X a:X a:X a:X", memory_bytes=15))
    with pytest.raises(PlanError, match=r"\[2, 2, 2, 2\] layers.*lacks 5 bytes"):
        arrange(profile(8, static=10), cluster, PlanRequest(batch_samples=4))


# --- asynchronous pipelines ---


@pytest.mark.parametrize("schedule", ["async", "async-2bw"])
@pytest.mark.parametrize(("seed", "room"), [(0, None), (1, None), (2, None), (4, 2.0), (23, 2.5)])
def test_near_the_best_of_all_asynchronous_pipelines(schedule, seed, room):
    model, cluster, request = unlike(seed, room=room)
    request = replace(request, schedule=schedule, microbatches="auto")
    # All boundaries are alike, so that it may cut anywhere, as brute force does.
    smallest = min(layer.payload_bytes for layer in model.layers[:-1])
    same = dict.fromkeys(("payload_bytes", "payload_gradient_bytes"), smallest)
    model = replace(model, layers=tuple(replace(layer, **same) for layer in model.layers))
    every = list(every_arrangement(model, cluster, request))
    found = arrange(model, cluster, request)
    assert found.microbatches == 1
    assert found.samples_per_second >= 0.97 * max(
        one.samples_per_second
        for one in every
        if schedule != "async" or len({len(ranks) for ranks in one.ranks}) == 1
    )


def test_an_asynchronous_pipeline_is_deeper_than_a_step_of_few_microbatches_allows():
    model = profile(4, gradient=1, saved=1)
    cluster = Cluster(devices("a:X " * 4))
    request = PlanRequest(batch_samples=2, virtual_machines=1)
    step = arrange(model, cluster, replace(request, microbatches=2))
    minibatch = arrange(model, cluster, replace(request, schedule="async"))
    # Two microbatches through four stages take five times as long as one on a stage.
    assert step.prediction.step_seconds == 5 * 3
    # Both samples at once, on one of four stages.
    assert minibatch.prediction.step_seconds == 2 * 3


def test_three_devices_are_no_two_asynchronous_pipelines_of_equal_depth():
    model, cluster = profile(4), Cluster(devices("a:X " * 3))
    request = PlanRequest(schedule="async", virtual_machines=2, batch_samples=4)
    with pytest.raises(PlanError, match="a deeper pipeline uses older weights"):
        arrange(model, cluster, request)
    found = arrange(model, cluster, replace(request, schedule="async-2bw"))
    # All follow the first rank of the first one, which has to be the deepest.
    assert list(map(len, found.ranks)) == [2, 1]
    # The planner itself never chooses them.
    chosen = arrange(model, cluster, replace(request, virtual_machines="auto"))
    assert len({len(ranks) for ranks in chosen.ranks}) == 1


# --- what is predicted ---


def test_an_evaluation_is_what_was_arranged():
    model, cluster, request = unlike(3)
    found = arrange(model, cluster, request)
    again = evaluate(
        model, cluster, request, found.ranks, found.cuts, found.microbatches, found.batch_shares
    )
    assert again == found


def test_the_uniform_split_beside_the_chosen_one():
    model, cluster = profile(6, "XY"), Cluster(devices("a:X a:Y"))
    request = PlanRequest(batch_samples=4, virtual_machines=1)
    found = arrange(model, cluster, request)
    beside = evaluate(model, cluster, request, ((0, 1),), [Cut((3, 3))], found.microbatches)
    assert beside.prediction.step_seconds == pytest.approx(3 * 3 + 4 * 18)
    assert beside.samples_per_second == pytest.approx(4 / 81)
    # Also what doesn't fit.
    small = Cluster(devices("a:X a:Y", memory_bytes=10))
    model = profile(6, "XY", static=10)
    assert evaluate(model, small, request, ((0, 1),), [Cut((3, 3))], 2).prediction.memory_bytes == (
        (30, 30),
    )


def test_few_samples_are_cut_into_few_slices():
    model, cluster = profile(2), Cluster(devices("a:X b:X"))
    request = PlanRequest(batch_samples=4)
    shares = evaluate(model, cluster, request, ((0,), (1,)), [Cut((2,))] * 2, 4, (6.0, 2.0))
    assert shares.prediction.step_seconds == pytest.approx(6 * 6)
    costs = shares.prediction.costs
    # 6 samples in 4 slices, and 2 in 2.
    assert costs[0].forward_seconds == pytest.approx((1.5 * 2,))
    assert costs[1].forward_seconds == pytest.approx((2,))


def test_links_that_are_shared_are_seen():
    # Two pipelines over one pair of hosts have half of its link each.
    model = profile(2, payload=10**6, seconds=1e-3)
    cluster = Cluster(devices("a:X a:X b:X b:X"), Link(0.0, 1e10), WIDE)
    request = PlanRequest(batch_samples=2)
    found = evaluate(model, cluster, request, ((0, 2), (1, 3)), [Cut((1, 1))] * 2, 1)
    alone = workload_of(model, cluster, (0, 2), "1f1b", 1, 2.0).costs(Cut((1, 1)))
    assert found.prediction.costs[0].payload_seconds[0] == pytest.approx(
        2 * alone.payload_seconds[0], rel=0.01
    )


# --- machines that aren't there ---


def thousand(kinds, memory_bytes=0):
    """128 hosts of 8 devices."""
    return Cluster(
        tuple(
            Device(f"h{n // 8}", kinds[n // 8 % len(kinds)], memory_bytes=memory_bytes)
            for n in range(1024)
        ),
        Link(5e-6, 2e10),
        Link(5e-5, 1.25e9),
    )


@pytest.mark.parametrize(
    ("kinds", "memory_bytes", "schedule"),
    [
        *some(itertools.product(["X", "XYZ"], [0, 4 * 10**9, 10**9], ["1f1b"]), 3),
        ("X", 4 * 10**9, "async"),
        # A stage of a deep pipeline holds the payloads of many minibatches.
        ("XYZ", 2 * 10**9, "async-2bw"),
    ],
)
def test_a_thousand_devices(kinds, memory_bytes, schedule):
    model = profile(
        96,
        kinds,
        seconds=2e-3,
        static=4 * 10**7,
        gradient=10**7,
        payload=10**6,
        saved=10**7,
        step_seconds=1e-2,
    )
    request = PlanRequest(batch_samples=32, schedule=schedule)
    found = arrange(model, thousand(kinds, memory_bytes), request)
    assert sorted(rank for ranks in found.ranks for rank in ranks) == list(range(1024))
    depth = max(map(len, found.ranks))
    assert depth > 1 if memory_bytes else depth == 1
    if memory_bytes:
        assert max(max(held) for held in found.prediction.memory_bytes) <= memory_bytes
