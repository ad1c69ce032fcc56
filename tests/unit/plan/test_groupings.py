import itertools
import random
from collections import Counter

import pytest

from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.inputs.topology import host_order
from lightning_pipeshift.plan.search.groupings import candidate_counts, groupings, ring_order
from lightning_pipeshift.plan.search.orders import interchangeable
from tests.unit.plan.clusters import NARROW, WIDE, devices, partitions

SPEEDS = {"X": 4.0, "Y": 2.0, "Z": 1.0}


def grouped(cluster, count, depths=None):
    """The groupings as texts: ``"02 13"``."""
    powers = [SPEEDS[device.kind] for device in cluster.devices]
    found = groupings(cluster, count, powers, interchangeable(cluster), depths)
    return [" ".join("".join(map(str, ranks)) for ranks in groups) for groups in found]


COUNTS = [
    ("a:X", [1]),
    ("a:X a:X a:X a:X a:X a:X", [1, 2, 3, 6]),
    # One for each host.
    ("a:X a:X b:X b:X c:X", [1, 3, 5]),
    # A few unlike ones: any number.
    ("a:X a:X a:X a:Y a:Y", [1, 2, 3, 4, 5]),
    # More of them: as many as there are of a kind.
    ("a:X " * 10 + "a:Y " * 5, [1, 3, 5, 10, 15]),
    ("a:X " * 9 + "a:Y " * 4, [1, 4, 9, 13]),
]


@pytest.mark.parametrize(("text", "expected"), COUNTS)
def test_candidate_counts(text, expected):
    assert list(candidate_counts(devices(text))) == expected


def test_candidate_counts_of_many():
    def counts(num_ranks, per_host, kinds="X"):
        return candidate_counts(
            [Device(f"h{n // per_host}", kinds[n % len(kinds)]) for n in range(num_ranks)]
        )

    assert counts(1024, 8) == (16, 32, 64, 128, 256, 512, 1024)
    assert counts(1024, 8, "XYZ") == (16, 32, 64, 128, 256, 512, 1024)
    assert counts(1000, 8) == (20, 25, 50, 125, 250, 500, 1000)
    assert counts(96, 8) == (2, 3, 6, 12, 24, 48, 96)
    # A prime number: as good as evenly.
    assert counts(127, 127) == (2, 4, 8, 16, 32, 64, 127)
    for num_ranks in range(65, 300, 7):
        for per_host in (1, 4, 8):
            found = counts(num_ranks, per_host)
            assert len(found) <= 9
            assert all(num_ranks <= 64 * count for count in found)


WAYS = [
    # All, where there are few, without those that differ by interchangeable ranks only.
    ("a:X a:X a:X a:X", 1, {"0123"}),
    ("a:X a:X a:X a:X", 2, {"012 3", "01 23"}),
    ("a:X a:X a:Y a:Y", 2, {"01 23", "02 13", "012 3", "0 123"}),
    ("a:X b:X c:X d:X", 4, {"0 1 2 3"}),
    ("a:X a:X b:X b:X", 2, {"01 23", "02 13", "012 3", "0 123"}),
    # More: those with a reason. Two of each kind, and equal devices.
    ("a:X a:X a:X a:X b:Y b:Y b:Y b:Y", 2, {"0145 2367", "0123 4567"}),
    # Evenly; by host; across the hosts; by kind; and equally fast, with equal depths.
    (
        "a:X a:Y a:Z b:X b:Y b:Z b:Z",
        2,
        {"0123 456", "012 3456", "0246 135", "0134 256", "0126 345"},
    ),
    ("a:X " * 8, 3, {"012 345 67", "012345 6 7", "01234 56 7", "0123 456 7", "0123 45 67"}),
    # Nothing to choose from.
    ("a:X " * 10, 5, {"01 23 45 67 89"}),
    ("a:X " * 10, 4, {"012 345 67 89"}),
]


@pytest.mark.parametrize(("text", "count", "expected"), WAYS)
def test_ways(text, count, expected):
    cluster = Cluster(devices(text), Link(0.0, 1e9), WIDE)
    found = grouped(cluster, count)
    if len(cluster.devices) <= USUAL.few_ranks and len(found) <= USUAL.groupings_each:
        as_sets = {frozenset(ways.split()) for ways in expected}
        names = interchangeable(cluster)
        assert {named(way, names) for way in found} == {
            named(" ".join(sorted(ways)), names) for ways in as_sets
        }
    else:
        assert set(found) == expected
    assert len(set(found)) == len(found)


def named(way, names):
    """A grouping by what its ranks are like."""
    return tuple(sorted(tuple(sorted(names[int(rank)] for rank in m)) for m in way.split()))


def test_one_device_of_each_kind_comes_first():
    cluster = Cluster(devices("a:X a:X a:X a:X b:Y b:Y b:Y b:Y"), WIDE, NARROW)
    assert grouped(cluster, 4)[0] == "04 15 26 37"
    # Two of each.
    assert grouped(cluster, 2)[0] == "0145 2367"


def drawn(chance, most, hosts, kinds):
    """A cluster of some devices."""
    num_ranks = chance.randint(1, most)
    machines = [Device(chance.choice(hosts), chance.choice(kinds)) for _ in range(num_ranks)]
    return Cluster(tuple(machines), WIDE, NARROW)


def test_every_rank_is_in_one_virtual_machine():
    chance = random.Random(1)
    for _ in range(300):
        cluster = drawn(chance, 20, "abc", "XYZ")
        num_ranks = cluster.num_ranks
        count = chance.randint(1, num_ranks)
        powers = [SPEEDS[device.kind] for device in cluster.devices]
        ways = groupings(cluster, count, powers, interchangeable(cluster))
        assert 1 <= len(ways) <= 8
        for groups in ways:
            assert len(groups) == count
            assert all(groups)
            assert sorted(itertools.chain(*groups)) == list(range(num_ranks))


def test_all_ways_are_those_of_brute_force():
    chance = random.Random(2)
    for _ in range(100):
        cluster = drawn(chance, 5, "ab", "XY")
        num_ranks = cluster.num_ranks
        names = interchangeable(cluster)
        brute = Counter(
            (len(groups), tuple(sorted(tuple(sorted(names[r] for r in ranks)) for ranks in groups)))
            for groups in partitions(list(range(num_ranks)))
        )
        for count in range(1, num_ranks + 1):
            wanted = {key for number, key in brute if number == count}
            found = {named(way, names) for way in grouped(cluster, count)}
            assert found == wanted if len(wanted) <= 8 else found <= wanted


def test_unequal_depths_make_virtual_machines_equally_fast():
    # One device of 4 and eight of 1: the fast one alone, and with as few as make up for it.
    cluster = Cluster(devices("a:X " + "a:Z " * 8))
    depths = {tuple(map(len, way.split())) for way in grouped(cluster, 2)}
    assert (3, 6) in depths  # 4 + 2 and 6


def test_given_depths_are_kept():
    cluster = Cluster(devices("a:X a:X a:Y a:Y b:X b:X b:Y"), WIDE, NARROW)
    for depths in ([3, 4], [4, 3], [1, 6], [2, 2, 3]):
        for way in grouped(cluster, len(depths), depths):
            assert list(map(len, way.split())) == depths
        assert grouped(cluster, len(depths), depths)
    # Of a few, all: which of them is the deep one matters.
    few = Cluster(devices("a:X a:Y b:X"), WIDE, NARROW)
    assert set(grouped(few, 2, [1, 2])) == {"0 12", "1 02", "2 01"}


def test_hosts_are_kept_together():
    cluster = Cluster(devices("b:X a:X b:X a:X c:X b:X"))
    assert host_order(cluster.devices) == (0, 2, 5, 1, 3, 4)


def test_a_thousand_devices_have_few_ways():
    machines = tuple(Device(f"h{n // 8}", "XYZ"[n % 8 % 3]) for n in range(1024))
    cluster = Cluster(machines, WIDE, NARROW)
    alike = interchangeable(cluster)
    powers = [SPEEDS[device.kind] for device in machines]
    for count in candidate_counts(machines):
        ways = groupings(cluster, count, powers, alike)
        assert 1 <= len(ways) <= 6
        assert all(len({len(ranks) for ranks in groups}) == 1 for groups in ways)


RINGS = [
    # Links between hosts a, b, c, d that are wide; all others are narrow.
    ("ab bc cd da", "0123"),
    ("ac cb bd da", "0213"),
    ("ab bd dc ca", "0132"),
    # No ring of wide links only: as many of them as can be.
    ("ab cd", "0123"),
    ("ac bd", "0132"),
    # All alike: as they come.
    ("", "0123"),
]


@pytest.mark.parametrize(("wide", "expected"), RINGS)
def test_rings_go_over_wide_links(wide, expected):
    hosts = {(pair[0], pair[1]): WIDE for pair in wide.split()}
    cluster = Cluster(devices("a:X b:X c:X d:X"), outside=NARROW, hosts=hosts)
    order = "".join(str(machine[0]) for machine in ring_order(cluster, [(0,), (1,), (2,), (3,)]))
    # A cycle is the same the other way round.
    assert order in (expected, expected[0] + expected[:0:-1])


def test_larger_rings_avoid_slow_links():
    chance = random.Random(3)
    for num_machines in (6, 9, 12):
        for _ in range(10):
            # A ring of wide links is hidden among narrow ones.
            hidden = chance.sample(range(num_machines), num_machines)
            hosts = {(f"h{a}", f"h{b}"): WIDE for a, b in itertools.pairwise([*hidden, hidden[0]])}
            hosts |= {
                (f"h{a}", f"h{b}"): WIDE
                for a, b in itertools.combinations(range(num_machines), 2)
                if chance.random() < 0.3 and (f"h{b}", f"h{a}") not in hosts
            }
            machines = tuple(Device(f"h{n}", "X") for n in range(num_machines))
            cluster = Cluster(machines, outside=NARROW, hosts=hosts)
            before = [(n,) for n in range(num_machines)]
            found = ring_order(cluster, before)
            assert sorted(found) == before
            assert narrow_links(cluster, found) <= narrow_links(cluster, before)
            if num_machines <= 7:
                assert narrow_links(cluster, found) == 0


def narrow_links(cluster, machines):
    ring = [machine[0] for machine in machines]
    return sum(cluster.link(a, b) == NARROW for a, b in itertools.pairwise([*ring, ring[0]]))
