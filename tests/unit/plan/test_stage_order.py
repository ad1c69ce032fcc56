import itertools
import random
from operator import itemgetter

import pytest

from lightning_pipeshift.plan.arrange.evaluator import Evaluator
from lightning_pipeshift.plan.arrange.request import PlanRequest
from lightning_pipeshift.plan.arrange.stage_order import best_order, ranked_orders
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.partition.orders import distinct_orders, interchangeable, num_orders
from tests.unit.plan.clusters import NARROW, WIDE, devices, profile

ALIKE = [
    # Devices, other links, and the first rank that each is like.
    ("a:X a:X a:X", {}, "000"),
    ("a:X a:Y a:X", {}, "010"),
    ("a:X b:X c:X", {}, "000"),
    # Those on a host with others have other links.
    ("a:X b:X b:X", {}, "011"),
    ("a:X a:X b:X b:X", {}, "0022"),
    ("a:X b:X c:X", {("a", "b"): NARROW}, "002"),
    ("a:X b:X c:X d:X", {("a", "b"): NARROW, ("c", "d"): NARROW}, "0022"),
]


@pytest.mark.parametrize(("text", "hosts", "expected"), ALIKE)
def test_interchangeable(text, hosts, expected):
    cluster = Cluster(devices(text), Link(0.0, 1e9), WIDE, hosts)
    assert "".join(map(str, interchangeable(cluster))) == expected


def test_what_else_tells_devices_apart():
    same = Device("a", "X")
    for other in (Device("a", "X", speed=0.5), Device("a", "X", memory_bytes=100)):
        assert interchangeable(Cluster((same, other, same))) == (0, 1, 0)
    cluster = Cluster((same, same, same, same), ranks={(0, 1): NARROW, (2, 3): NARROW})
    assert interchangeable(cluster) == (0, 0, 2, 2)


def test_interchangeable_is_quick_for_a_thousand():
    cluster = Cluster(
        tuple(Device(f"h{rank // 8}", "XYZ"[rank % 3]) for rank in range(1024)), WIDE, NARROW
    )
    found = interchangeable(cluster)
    assert len(set(found)) == 128 * 3
    assert all(cluster.devices[rank] == cluster.devices[one] for rank, one in enumerate(found))


@pytest.mark.parametrize("alike", ["", "0", "00", "01", "0012", "00112", "01234"])
def test_distinct_orders(alike):
    machine = tuple(range(len(alike)))
    found = list(distinct_orders(machine, [int(name) for name in alike]))
    as_names = ["".join(alike[rank] for rank in order) for order in found]
    assert sorted(as_names) == sorted(set(map("".join, itertools.permutations(alike))))
    assert len(found) == num_orders(list(alike))
    # Interchangeable ranks stay in their order.
    assert all(
        order.index(a) < order.index(b)
        for order in found
        for a, b in itertools.combinations(machine, 2)
        if alike[a] == alike[b]
    )


def test_within_two_percent_the_ranks_own_order_is_kept():
    machines = ((0, 1, 2),)
    ranked = [(((2, 1, 0),), 100.0), (((1, 0, 2),), 101.9), (((0, 1, 2),), 102.1)]
    assert best_order(ranked, machines) == ((1, 0, 2),)
    assert best_order([*ranked, (((0, 2, 1),), 101.8)], machines) == ((0, 2, 1),)
    assert best_order([*ranked[:2], (((0, 1, 2),), 102.0)], machines) == machines


def costs(seed, num_ranks):
    """The step time of an order: each pair of neighbours and each position has a cost."""
    chance = random.Random(seed)
    places = [[chance.random() for _ in range(num_ranks)] for _ in range(num_ranks)]
    pairs = [[chance.random() for _ in range(num_ranks)] for _ in range(num_ranks)]

    def seconds(orders):
        return sum(
            sum(places[place][rank] for place, rank in enumerate(order))
            + sum(pairs[a][b] for a, b in itertools.pairwise(order))
            for order in orders
        )

    return seconds


def test_few_orders_are_all_tried():
    for seed in range(20):
        seconds = costs(seed, 4)
        machines = ((0, 1), (2, 3))
        ranked = ranked_orders(machines, [], range(4), seconds, most=4)
        assert len(ranked) == 4
        assert ranked[0][1] == min(
            seconds(orders) for orders in itertools.product(*map(itertools.permutations, machines))
        )


def test_of_many_orders_those_are_tried_that_are_given():
    seconds = costs(0, 6)
    machine, start = (tuple(range(6)),), (tuple(reversed(range(6))),)
    ranked = ranked_orders(machine, [start], range(6), seconds, most=200)
    assert ranked == sorted(((one, seconds(one)) for one in (machine, start)), key=itemgetter(1))


def test_an_order_that_puts_hosts_apart_pays_for_it():
    # Fast and slow devices in turn on two hosts with a slow link in between. With the slow ones
    # first, payloads cross the link three times.
    model = profile(8, "XY", payload=500_000, gradient=1000, seconds=1e-3)
    cluster = Cluster(devices("a:X a:Y b:X b:Y c:X c:Y d:X d:Y"), Link(0.0, 1e9), NARROW)
    placer = Evaluator(model, cluster, PlanRequest(batch_samples=8.0))
    machines = ((0, 1, 2, 3), (4, 5, 6, 7))

    def seconds(orders):
        placed = placer.placed(orders, 8)
        return placer.simulator.step(placed, placer.cuts(placed))

    apart = ((1, 3, 0, 2), (5, 7, 4, 6))
    alike = interchangeable(cluster)
    found = best_order(ranked_orders(machines, [apart], alike, seconds, 600), machines)
    for machine in found:
        hosts = [cluster.devices[rank].host for rank in machine]
        assert sum(a != b for a, b in itertools.pairwise(hosts)) == 1
    assert seconds(found) < seconds(apart) / 1.2
