import itertools
import random

import pytest

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.shares import check_shares, shared_out
from lightning_pipeshift.plan.inputs.topology import Topology, check_spec, topology_of


def devices(text):
    """``"a:X a:X b:Y:0.5"``: the host and the kind of each rank, and its speed if that is not 1."""
    words = (word.split(":") for word in text.split())
    return [Device(host, kind, float((*speed, 1)[0])) for host, kind, *speed in words]


CASES = [
    # One host, one kind: neighbours.
    ("a:X a:X a:X a:X", 2, None, "01 23"),
    ("a:X a:X a:X a:X", 4, None, "0 1 2 3"),
    ("a:X a:X a:X", 1, None, "012"),
    ("a:X a:X a:X", "auto", None, "012"),
    # Pipelines inside a host, however the ranks are numbered.
    ("a:X b:X a:X b:X", 2, None, "02 13"),
    ("b:X a:X a:X b:X", 2, None, "03 12"),
    # One of each kind in every virtual machine.
    ("a:X a:X b:Y b:Y", 2, None, "02 13"),
    ("a:X a:Y b:X b:Y", 2, None, "01 23"),
    ("a:X a:Y a:X a:Y", 2, None, "01 23"),
    ("a:X a:X a:Y a:Y b:Z b:Z", 2, None, "024 135"),
    # One of each speed.
    ("a:X a:X b:X:0.25 b:X:0.25", 2, None, "02 13"),
    ("a:X a:X:0.5 b:X:0.5 b:X", 2, None, "01 23"),
    ("a:X a:X:0.5 b:X b:X", 2, None, "01 23"),
    # Counts of kinds that do not divide.
    ("a:X a:X a:X b:Y", 2, None, "01 23"),
    # Unequal numbers of devices on the hosts.
    ("a:X a:X a:X b:X", 2, None, "01 23"),
    ("a:X b:X b:X b:X", 2, None, "01 23"),
    # Depths that a partition gives.
    ("a:X a:X a:X", 2, (2, 1), "01 2"),
    ("a:X a:X a:X", "auto", (1, 2), "0 12"),
    ("a:X b:X b:X", "auto", (1, 2), "0 12"),
    # As the user says.
    ("a:X a:X a:X a:X", [[0, 2], [3, 1]], None, "02 31"),
    ("a:X a:X a:X", [[2], [1, 0]], None, "2 10"),
]


@pytest.mark.parametrize(("text", "spec", "depths", "expected"), CASES)
def test_which_rank_is_where(text, spec, depths, expected):
    topology = topology_of(spec, devices(text), depths)
    assert " ".join("".join(map(str, ranks)) for ranks in topology.ranks) == expected


def test_every_rank_has_one_place():
    chance = random.Random(1)
    for _ in range(300):
        count, depth = chance.randint(1, 4), chance.randint(1, 4)
        some = [Device(chance.choice("abc"), chance.choice("XY")) for _ in range(count * depth)]
        topology = topology_of(count, some)
        assert topology.stages_per_vm == (depth,) * count
        assert topology.num_ranks == count * depth
        for rank in range(count * depth):
            vm, stage = topology.place_of(rank)
            assert topology.ranks[vm][stage] == rank
        if all(sum(d.kind == kind for d in some) % count == 0 for kind in "XY"):
            kinds = [sorted(some[rank].kind for rank in ranks) for ranks in topology.ranks]
            assert all(each == kinds[0] for each in kinds)
        # A host's devices are neighbours in every pipeline.
        for ranks in topology.ranks:
            hosts = [some[rank].host for rank in ranks]
            changes = sum(a != b for a, b in itertools.pairwise(hosts))
            assert changes == len(set(hosts)) - 1


def test_names():
    assert Topology(((0, 1),)).name_of(1) == "stage 1 (rank 1)"
    assert Topology(((2,), (1, 0))).name_of(0) == "stage 1 of virtual machine 1 (rank 0)"


@pytest.mark.parametrize(
    ("spec", "num_ranks", "message"),
    [
        (2, 3, "3 ranks cannot be shared out evenly.*\\[\\[0, 1\\], \\[2\\]\\]"),
        (5, 3, "cannot be shared out"),
        ([[0], [1]], 3, "names 2 ranks; this run has 3"),
        ([[0, 1], [1]], 3, "rank 1 more than once"),
        ([[0, 3], [1]], 3, "not rank 2"),
        ([[0, 1, 2], []], 3, r"virtual machine 1 \(.*\) has no device"),
        ([], 3, "has no device"),
    ],
)
def test_what_cannot_be_arranged(spec, num_ranks, message):
    with pytest.raises(ConfigurationError, match=message):
        topology_of(spec, [Device("a", "X")] * num_ranks)


@pytest.mark.parametrize("spec", [0, -1, True, "some", 1.5, [0, 1], [["a"]], None])
def test_what_is_no_specification(spec):
    with pytest.raises(ConfigurationError, match="virtual_machines="):
        check_spec(spec)


def test_shares():
    assert shared_out(16, [3, 1]) == [12, 4]
    assert shared_out(5, [1, 1]) == [3, 2]
    assert shared_out(2, [10, 1]) == [1, 1]
    assert shared_out(1, [1, 10]) == [0, 1]
    assert shared_out(0, [1, 10]) == [0, 0]
    chance = random.Random(2)
    for _ in range(500):
        shares = [chance.choice([1, 2, 0.3, 7]) for _ in range(chance.randint(1, 5))]
        size = chance.randint(0, 40)
        counts = shared_out(size, shares)
        assert sum(counts) == size
        assert min(counts) >= (size >= len(shares))
        exact = [size * share / sum(shares) for share in shares]
        assert all(
            abs(n - x) < 1 or n == 1 or min(exact) < 1 for n, x in zip(counts, exact, strict=True)
        )


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1, 0], "share 0"),
        ([1, float("inf")], "inf"),
        ("12", "one number"),
        ([1, "2"], "one number"),
    ],
)
def test_shares_that_nobody_could_take(shares, message):
    with pytest.raises(ConfigurationError, match=message):
        check_shares(shares, None)
    with pytest.raises(ConfigurationError, match="Give one for each"):
        check_shares([1, 2], 3)
