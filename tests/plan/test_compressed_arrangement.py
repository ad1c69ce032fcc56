"""Which device is which stage, where saved tensors may move."""

import itertools
import random
from dataclasses import replace

import pytest

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.plan.arrangement import Wishes
from lightning_pipeshift.plan.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.compressed_arrangement import arrange_compressed, compressed
from lightning_pipeshift.plan.planner import evaluate
from lightning_pipeshift.plan.policies import Planned
from lightning_pipeshift.plan.profile import Profile
from lightning_pipeshift.plan.workload import Cut
from tests.plan.clusters import devices, profile

MB = 10**6
ONE = Wishes(virtual_machines=1, microbatches=8, batch_samples=8.0, policy=Planned())


def model(num_layers: int = 8, saved: int = 20 * MB, static: int = 2 * MB, **how) -> Profile:
    """Layers of 10 ms forward and 20 ms backward."""
    return profile(num_layers, saved=saved, static=static, seconds=0.01, **how)


def keeps(found, cluster) -> bool:
    return all(
        held <= cluster.devices[rank].room_bytes
        for ranks, peaks in zip(found.ranks, found.prediction.memory_bytes, strict=True)
        for rank, held in zip(ranks, peaks, strict=True)
    )


# --- the mapping ---


def test_who_has_room_for_it_takes_the_first_stage():
    # Two layers of 20 MB for 4, 3, 2 and 1 microbatches, and no way to lend.
    rooms = [50 * MB, 90 * MB, 130 * MB, 170 * MB]
    cluster = Cluster(
        tuple(Device(f"h{n}", "X", memory_bytes=room) for n, room in enumerate(rooms)),
        outside=Link(0.0, 1e3),
    )
    found = arrange_compressed(model(), cluster, replace(ONE, recompute="none"))
    assert found.ranks == ((3, 2, 1, 0),)
    assert not found.swaps
    assert keeps(found, cluster)


def rate(cluster, wishes) -> float:
    """Samples per second; 0 where nothing fits."""
    try:
        return arrange_compressed(model(), cluster, wishes).samples_per_second
    except BudgetError:
        return 0.0


@pytest.mark.parametrize("pair", [*itertools.combinations(range(4), 2)])
def test_who_lacks_room_is_put_beside_who_has_it(pair):
    # All are alike, and two of them have a fast link: what the first stage lacks, the last has.
    one, other = ("abcd"[rank] for rank in pair)
    cluster = Cluster(
        devices("a:X b:X c:X d:X", memory_bytes=130 * MB),
        outside=Link(0.0, 1e7),
        hosts={(one, other): Link(0.0, 1e10)},
    )
    wishes = replace(ONE, recompute="none")
    found = arrange_compressed(model(), cluster, wishes)
    order = found.ranks[0]
    assert {order[0], order[3]} == set(pair)
    of_first = [swap for swap in found.swaps[0] if swap.layer < found.cuts[0].bounds[1]]
    assert of_first
    assert all(3 in swap.stages for swap in of_first)
    assert keeps(found, cluster)
    # In their own order the step is longer, unless that is this one.
    own = rate(cluster, replace(wishes, virtual_machines=((0, 1, 2, 3),)))
    if pair == (0, 3):
        assert own == found.samples_per_second
    else:
        assert own < found.samples_per_second


def test_ranks_that_are_given_stay():
    rooms = [90 * MB, 110 * MB, 130 * MB, 170 * MB]
    machines = tuple(Device(f"h{n}", "X", memory_bytes=room) for n, room in enumerate(rooms))
    cluster = Cluster(machines, outside=Link(0.0, 1e10))
    wishes = replace(ONE, virtual_machines=((0, 1, 2, 3),))
    assert arrange_compressed(model(), cluster, wishes).ranks == ((0, 1, 2, 3),)


def unlike(seed: int):
    """Three or four devices of unlike speed, room, links and hosts."""
    chance = random.Random(seed)
    count = chance.choice([3, 4])
    saved = 20 * MB
    machines = tuple(
        Device(
            f"h{rank}",
            "X",
            speed=chance.choice([1.0, 1.0, 0.6]),
            memory_bytes=round(chance.uniform(0.4, 1.1) * 8 * saved),
            host_bytes=chance.choice([0, 4 * saved]),
            host_bandwidth=chance.choice([0.0, 1e9, 4e9]),
        )
        for rank in range(count)
    )
    links = {
        (f"h{a}", f"h{b}"): Link(1e-4, chance.choice([1e8, 1e9, 5e9]))
        for a, b in itertools.combinations(range(count), 2)
    }
    return model(6, saved=saved), Cluster(machines, hosts=links)


def test_near_the_best_of_all_orders_and_cuts():
    """Against every order of the stages with every cut, each compressed."""
    ratios, missed = [], 0
    for seed in range(8):
        given, cluster = unlike(seed)
        count = cluster.num_ranks
        best = 0.0
        for order in itertools.permutations(range(count)):
            for ends in itertools.combinations(range(1, given.num_layers), count - 1):
                counts = [b - a for a, b in itertools.pairwise((0, *ends, given.num_layers))]
                plain = evaluate(given, cluster, ONE, [order], [Cut(tuple(counts))], 8)
                if plain.samples_per_second <= best:
                    continue
                try:
                    found = compressed(given, cluster, ONE, plain)
                except BudgetError:
                    continue
                best = max(best, found.samples_per_second)
        try:
            found = arrange_compressed(given, cluster, ONE)
        except BudgetError:
            missed += best > 0
            continue
        assert keeps(found, cluster)
        ratios.append(found.samples_per_second / best)
    assert missed == 0
    assert len(ratios) >= 6
    assert min(ratios) > 0.9
