from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_pipeshift.plan.cost import workload as workload_module
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import relative_sizes, workload_of
from lightning_pipeshift.plan.cost.memory_model import Footprints
from lightning_pipeshift.plan.cost.memory_timeline import Links
from lightning_pipeshift.plan.cost.prediction import Pipelines
from lightning_pipeshift.plan.cost.ring_contention import crowded
from lightning_pipeshift.plan.cost.simulator import simulate
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link
from lightning_pipeshift.plan.inputs.profile import LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT, SavedTensor, Swap
from lightning_pipeshift.plan.schedule.schedules import INTERLEAVED, SCHEDULES
from tests.unit.plan.clusters import devices, profile
from tests.unit.plan.workloads import all_counts, random_workload


def predicted(model, cluster, ranks, cuts, microbatches=2, schedule="1f1b"):
    """The prediction, and when each layer's ring is complete."""
    links = crowded(cluster, ranks)
    workloads = [workload_of(model, links, machine, schedule, microbatches) for machine in ranks]
    timelines = [w.timeline(c) for w, c in zip(workloads, cuts, strict=True)]
    found = Pipelines(model, cluster, ranks, workloads, cuts)
    return found.predicted(), found.rings(timelines) if len(ranks) > 1 else []


ONE_STAGE = [
    # Two layers of 1 s and 2 s, two microbatches: the last backward is from 8 to 12. Layer 1 is
    # ready at 10 and layer 0 at 12. What a ring takes, and when each is complete.
    (1, [13, 11]),
    (2, [14, 12]),
    # The device sends for one ring after the other.
    (3, [16, 13]),
]


@pytest.mark.parametrize(("seconds", "ends"), ONE_STAGE)
def test_rings_of_one_stage(seconds, ends):
    # A ring of two carries half of the bytes twice over each link.
    model = profile(2, gradient=100)
    cluster = Cluster(devices("a:X b:X"), outside=Link(0.0, 100 / seconds))
    found, when = predicted(model, cluster, [[0], [1]], [Cut((2,))] * 2)
    assert when == ends
    assert found.step_seconds == max(ends)
    assert found.exposed_seconds == max(ends) - 12


def test_the_last_stage_hides_its_rings_behind_the_others():
    model = profile(2, gradient=100)
    cluster = Cluster(devices("a:X b:X c:X d:X"), outside=Link(0.0, 50))
    found, when = predicted(model, cluster, [[0, 1], [2, 3]], [Cut((1, 1))] * 2)
    # Stage 1 ends its last backward at 7, stage 0 at 9; each ring takes 2 s.
    assert when == [11, 9]
    assert (found.step_seconds, found.exposed_seconds) == (11, 2)


def test_latency_of_one_ring_does_not_hold_up_the_next():
    model = profile(2, gradient=100)
    cluster = Cluster(devices("a:X b:X"), outside=Link(5.0, 100))
    _, when = predicted(model, cluster, [[0], [1]], [Cut((2,))] * 2)
    # Two messages one after the other, 5 s each on their way, and 1 s to send.
    assert when == [12 + 11, 10 + 11]


def test_three_virtual_machines_of_unlike_speed_and_links():
    model = profile(1, "XY", gradient=90)
    links = {("a", "b"): Link(0.0, 60), ("b", "c"): Link(0.0, 30), ("a", "c"): Link(0.0, 60)}
    cluster = Cluster(devices("a:X b:X c:Y"), hosts=links)
    found, when = predicted(model, cluster, [[0], [1], [2]], [Cut((1,))] * 3)
    # The slow one ends at 12. 2 (m - 1) / m of 90 bytes at the pace of the slowest link.
    assert when == [12 + 4 / 3 * 90 / 30]
    assert found.exposed_seconds == pytest.approx(4)


def test_unlike_cuts_make_rings_of_unlike_members():
    model = profile(3, gradient=100)
    cluster = Cluster(devices("a:X b:X c:X d:X"), outside=Link(0.0, 100))
    _, when = predicted(model, cluster, [[0, 1], [2, 3]], [Cut((1, 2)), Cut((2, 1))])
    # By hand: the first machine's stages end at 15 and 12, the second's at 15 and 9 + 3. Layer 1
    # is on stage 1 of the first (ready at 12) and on stage 0 of the second (ready at 13).
    first = simulate_ends(model, cluster, [0, 1], Cut((1, 2)))
    second = simulate_ends(model, cluster, [2, 3], Cut((2, 1)))
    ready = [max(first[0], second[0]), max(first[1], second[0] - 2), max(first[1] - 2, second[1])]
    assert when[2] == ready[2] + 1
    assert when[1] == max(ready[1], when[2]) + 1  # rank 1 is in both
    assert when[0] == max(ready[0], when[1]) + 1  # rank 2 is in both


def simulate_ends(model, cluster, machine, cut):
    """When each stage's last backward ends."""
    workload = workload_of(model, cluster, machine, "1f1b", 2)
    return [row[-1].end for row in workload.timeline(cut).rows]


def test_rings_share_the_nic_of_a_host():
    model = profile(2, gradient=100)
    cuts = [Cut((1, 1))] * 2

    def ends(hosts, ranks):
        cluster = Cluster(devices(hosts), inside=Link(0.0, 1e9), outside=Link(0.0, 20))
        return predicted(model, cluster, ranks, cuts)[1]

    # Ready at 7 and 9; a ring takes 5 s.
    assert ends("a:X b:X c:X d:X", [[0, 1], [2, 3]]) == [14, 12]
    # Both leave the same two hosts: the second waits for the first.
    assert ends("a:X a:X b:X b:X", [[0, 1], [2, 3]]) == [17, 12]
    # Inside of the hosts there is no NIC.
    assert ends("a:X b:X a:X b:X", [[0, 1], [2, 3]])[0] == pytest.approx(9)


def test_a_ring_that_leaves_a_host_twice_is_half_as_fast():
    model = profile(1, gradient=100)
    cuts = [Cut((1,))] * 4
    cluster = Cluster(devices("a:X a:X b:X b:X"), inside=Link(0.0, 1e9), outside=Link(0.0, 30))
    once = predicted(model, cluster, [[0], [1], [2], [3]], cuts)[0]
    twice = predicted(model, cluster, [[0], [2], [1], [3]], cuts)[0]
    assert once.exposed_seconds == pytest.approx(1.5 * 100 / 30)
    assert twice.exposed_seconds == pytest.approx(1.5 * 100 / 15)


CROWDED = [
    # Hosts, virtual machines, and the bandwidth between the first one's first two stages.
    ("a:X b:X", [[0, 1]], 80),
    ("a:X a:X b:X b:X", [[0, 2], [1, 3]], 40),
    # A payload out of a host and a gradient out of it do not meet.
    ("a:X a:X b:X b:X", [[0, 2], [3, 1]], 80),
    ("a:X b:X c:X", [[0, 1, 2]], 80),
    # Inside of a host there is no NIC.
    ("a:X a:X b:X b:X", [[0, 1], [2, 3]], 1000),
    # There and back again: two boundaries out of host a.
    ("a:X b:X a:X b:X", [[0, 1, 2, 3]], 40),
]


@pytest.mark.parametrize(("hosts", "ranks", "bandwidth"), CROWDED)
def test_boundaries_share_the_nic_of_a_host(hosts, ranks, bandwidth):
    cluster = Cluster(devices(hosts), inside=Link(0.0, 1000), outside=Link(0.5, 80))
    link = crowded(cluster, ranks).link(*ranks[0][:2])
    assert link.bandwidth == bandwidth
    assert link.latency_seconds == (0 if bandwidth == 1000 else 0.5)


def test_a_nic_is_as_fast_as_the_fastest_way_out_of_its_host():
    hosts = {("a", "b"): Link(0.0, 30), ("a", "c"): Link(0.0, 100)}
    cluster = Cluster(devices("a:X a:X b:X c:X"), hosts=hosts)
    links = crowded(cluster, [[0, 2], [1, 3]])
    assert links.link(0, 2).bandwidth == 30  # of the 50 that are left to it
    assert links.link(1, 3).bandwidth == 50


def test_nothing_known_of_links_means_nothing_shared():
    cluster = Cluster(devices("a:X a:X b:X b:X"))
    assert crowded(cluster, [[0, 2], [1, 3]]) is cluster
    found, _ = predicted(profile(2, gradient=100), cluster, [[0, 2], [1, 3]], [Cut((1, 1))] * 2)
    assert found.exposed_seconds == 0


MEMORY = [
    # Stages, microbatches, schedule, cut, bytes of each stage. A layer holds 10, and 3 in flight.
    (2, 4, "1f1b", (1, 1), (10 + 2 * 3, 10 + 3)),
    (2, 4, "gpipe", (1, 1), (10 + 4 * 3, 10 + 4 * 3)),
    (2, 1, "1f1b", (1, 1), (13, 13)),
    (3, 4, "1f1b", (2, 1, 0), (20 + 3 * 6, 10 + 2 * 3, 0)),
    (2, 4, "eager_1f1b", (1, 1), (10 + 3 * 3, 10 + 3)),
    # Trained weights of 4 bytes, and their gradients: 3, 2 and 1 versions, and as many in flight.
    (3, 1, "async", (1, 1, 1), (14 + 2 * 4 + 3 * 3, 14 + 4 + 2 * 3, 14 + 3), 4),
    (3, 1, "async-2bw", (1, 1, 1), (14 + 4 + 3 * 3, 14 + 4 + 2 * 3, 14 + 4 + 3), 4),
]


@pytest.mark.parametrize("case", MEMORY)
def test_memory(case):
    stages, microbatches, schedule, counts, held, *gradient = case
    model = profile(sum(counts), static=10, saved=3, gradient=sum(gradient))
    cluster = Cluster(devices("a:X " * stages))
    workload = workload_of(model, cluster, range(stages), schedule, microbatches)
    cut = Cut(counts)
    found = Pipelines(model, cluster, [range(stages)], [workload], [cut]).predicted()
    assert found.memory_bytes == (held,)
    assert workload.memory.peak_bytes(cut) == held


@pytest.mark.parametrize("is_unequal", [False, True])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_memory_in_closed_form_is_that_of_the_timeline(schedule, is_unequal):
    """With messages, recomputation, stages without layers, and tensors of code around layers; with
    microbatches of one size, or of two.
    """
    recomputing = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        num_layers = int(draw.integers(2, 7))
        is_interleaved = schedule in INTERLEAVED
        num_stages = 2 * int(draw.integers(2, 4)) if is_interleaved else None
        given = random_workload(
            seed, num_layers=num_layers, num_stages=num_stages, schedule=schedule
        )
        outside = np.minimum(given.saved_bytes, given.input_bytes) // 2
        samples = 2 * given.microbatches - 1 if is_unequal else given.microbatches
        given = replace(
            given,
            sizes=relative_sizes(samples, given.microbatches),
            outside_bytes=outside,
            payload_bytes=np.array([0, *draw.integers(0, 9, num_layers - 1), 0], float),
        )
        layers = [
            LayerProfile(
                f"l{index}",
                saved_bytes=int(saved),
                tensors=(SavedTensor(0, int(saved - out)), SavedTensor(FRONT, int(out))),
            )
            for index, (saved, out) in enumerate(zip(given.saved_bytes, outside, strict=True))
        ]
        footprints = Footprints(Profile(tuple(layers)), given, Links())
        for counts in list(all_counts(given))[::3]:
            everything = sorted(given.everything_recomputed(counts).recompute)
            # With zb-h1 layers that run again hold less than the closed form says.
            again = [x for x in everything if draw.random() < 0.5 and schedule != "zb-h1"]
            cut = Cut(counts, frozenset(again))
            recomputing += bool(again)
            found, closed = footprints.of(cut).peak_bytes, given.memory.peak_bytes(cut)
            # A payload may be freed at the moment at which the next one is sent.
            sent = given.payload_bytes[list(cut.bounds[1:])]
            for peak, most, payload in zip(found, closed, sent, strict=True):
                least = most - given.sizes[0] * payload
                assert least - 1e-6 <= peak <= most + 1e-6, (seed, cut)
    assert recomputing > 20 or schedule in {"zb-h1", *INTERLEAVED}


@pytest.mark.parametrize("by_processor", [False, True])
def test_copies_that_the_processor_makes_are_compute(by_processor):
    """As if the layer's forward and backward took longer by it; but for one stage only, whose
    device does not copy by itself.
    """
    tensors = (SavedTensor(0, 100), SavedTensor(1, 60), SavedTensor(2, 0))
    layers = tuple(LayerProfile(f"l{n}", saved_bytes=160, tensors=tensors) for n in range(4))
    given = random_workload(3, num_layers=4, num_stages=2)
    cut = Cut((2, 2))
    swaps = (
        Swap(1, (0, 1, 2)),
        # Neither stays on the device, nor goes to another stage: unmeasured.
        Swap(0, (0,), stays=True),
        Swap(0, (1,), stages=(1,)),
        Swap(3, (0,)),
    )
    copying = ((0.5, 0.01), (0.0, 0.0)) if by_processor else ()
    links = Links({(0, 1): (0.0, 1e9), (1, 0): (0.0, 1e9)}, (1e9, 1e9), copying)
    sized = replace(given, saved_bytes=np.full(4, 160.0))
    found = Footprints(Profile(layers), sized, links).of(cut, swaps)
    slower = replace(sized, forward=sized.forward.copy(), backward=sized.backward.copy())
    if by_processor:
        for seconds in (slower.forward, slower.backward):
            seconds[0, 1] += 2 * 0.5 + 160 * 0.01
    assert found.timeline.step_seconds == slower.timeline(cut).step_seconds


def test_the_slowest_optimizer_counts():
    model = profile(3, gradient=100, optimizer_seconds_per_byte=0.01, step_seconds=0.5)
    cluster = Cluster(devices("a:X a:X"))
    found, _ = predicted(model, cluster, [[0, 1]], [Cut((2, 1))], microbatches=1)
    assert found.step_seconds == 9 + 2 + 0.5


def test_an_asynchronous_optimizer_steps_after_each_backward():
    model = profile(3, gradient=100, optimizer_seconds_per_byte=0.01, step_seconds=0.5)
    cluster = Cluster(devices("a:X a:X"))
    # Two layers take 6 s and 2 s, one takes 3 s and 1 s.
    for cut, seconds in ((Cut((2, 1)), 8), (Cut((3, 0)), 12)):
        assert endless(model, cluster, [[0, 1]], [cut]).step_seconds == seconds + 0.5
    # An update of at least two minibatches.
    found = endless(model, cluster, [[0, 1]], [Cut((2, 1))], "async-2bw")
    assert found.step_seconds == 6 + 2 / 2 + 0.5


def endless(model, cluster, ranks, cuts, schedule="async"):
    workloads = [workload_of(model, cluster, machine, schedule, 1) for machine in ranks]
    return Pipelines(model, cluster, ranks, workloads, cuts).predicted()


@pytest.mark.parametrize(
    ("hosts", "cuts", "schedule", "seconds"),
    [
        # Stages of 3 s; the ring of each takes 2 s after the backward.
        ("a:X b:X c:X d:X", [(1, 1), (1, 1)], "async", 3 + 2),
        # Two layers: the later one's gradient is ready after 2 s of 4 s, the other one's after 4.
        ("a:X b:X c:X d:X", [(2, 0), (2, 0)], "async", 6 + 2),
        # Each leaves the same NIC.
        ("a:X a:X b:X b:X", [(1, 1), (1, 1)], "async", 3 + 4),
        # Unlike cuts: the ring waits for the later backward, and the faster stage for the ring.
        ("a:X b:X c:X d:X", [(2, 0), (1, 1)], "async", 6 + 2),
        # 4 s of rings in the time of at least two minibatches: 3 s each.
        ("a:X a:X b:X b:X", [(1, 1), (1, 1)], "async-2bw", 3),
    ],
)
def test_rings_of_an_asynchronous_pipeline(hosts, cuts, schedule, seconds):
    model = profile(2, gradient=100)
    cluster = Cluster(devices(hosts), inside=Link(0.0, 1e9), outside=Link(0.0, 50))
    found = endless(model, cluster, [[0, 1], [2, 3]], [Cut(counts) for counts in cuts], schedule)
    assert found.step_seconds == pytest.approx(seconds)
    assert found.exposed_seconds == pytest.approx(seconds - max(3 * max(c) for c in cuts))


def test_rings_of_two_buffered_weights_that_take_longer_than_an_update():
    model = profile(2, gradient=100)
    cluster = Cluster(devices("a:X b:X c:X d:X"), outside=Link(0.0, 5))
    found = endless(model, cluster, [[0, 1], [2, 3]], [Cut((1, 1))] * 2, "async-2bw")
    # 2 s of a backward, and 20 s of a ring, for two minibatches.
    assert found.step_seconds == (2 + 20) / 2


def test_equal_virtual_machines_are_simulated_once(monkeypatch):
    calls: list[Any] = []

    def counted(*args):
        calls.append(args)
        return simulate(*args)

    monkeypatch.setattr(workload_module, "simulate", counted)
    model = profile(4, "XY", gradient=100)
    ranks = [[2 * vm, 2 * vm + 1] for vm in range(300)]
    cluster = Cluster(devices("a:X b:Y " * 300), outside=Link(0.0, 1e3))
    workload = workload_of(model, cluster, ranks[0], "1f1b", 4)
    many = Pipelines(model, cluster, ranks, [workload] * 300, [Cut((2, 2))] * 300).predicted()
    assert len(calls) == 1
    two = Pipelines(model, cluster, ranks[:2], [workload] * 2, [Cut((2, 2))] * 2).predicted()
    assert many.costs == two.costs[:1] * 300
    assert many.memory_bytes == two.memory_bytes[:1] * 300
    assert many.step_seconds - many.exposed_seconds == two.step_seconds - two.exposed_seconds
