"""The search of a virtual machine's stages, against brute force and by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.plan.search.orders import distinct_orders, interchangeable, num_orders
from lightning_pipeshift.plan.search.recomputation import Recomputation
from lightning_pipeshift.plan.search.stages import StageSearch, best_cut
from tests.unit.plan.clusters import NARROW, WIDE, devices
from tests.unit.plan.swapping import little_memory
from tests.unit.plan.workloads import all_counts, all_cuts, random_workload, workload


def endless(*args, schedule="async", **kwargs):
    return workload(*args, schedule=schedule, microbatches=1, **kwargs)


@pytest.mark.parametrize(
    ("given", "counts", "seconds"),
    [
        # One microbatch through both stages is 4 layers of 3 s; 7 more at 6 s.
        (workload([1, 1, 1, 1]), (2, 2), 12 - 3 + 7 * 6 + 3),
        (workload([1, 1, 1, 1], [1, 0.5]), (3, 1), None),
        (workload([1, 1], [1, 0.1]), (2, 0), 8 * 6),
        (workload([1, 1, 1, 1], payload=20), (0, 4), None),
        (workload([1, 1, 1, 1], allowed=frozenset({1})), (1, 3), None),
        (workload([1, 1, 1, 1], allowed=frozenset()), (4, 0), 8 * 12),
        (workload([1, 1, 1]), (2, 1), None),
        (workload([1, 1], [1]), (2,), 8 * 6),
        (workload([1], [1, 1, 1]), (1, 0, 0), 8 * 3),
        # For one microbatch there is nothing to do side by side.
        (workload([1, 1, 1], [0.9, 1], microbatches=1), (0, 3), 9),
        # What a stage does besides its layers it does if it has some, and the last one anyway.
        (workload([1, 1, 1, 1], extra=30), (0, 4), 8 * 72),
        # Nothing is known yet: evenly.
        (workload([0, 0, 0, 0, 0], [1, 1]), (3, 2), 0),
        # The pace of an asynchronous pipeline.
        (endless([1, 1, 1, 1]), (2, 2), 6),
        (endless([1, 1, 1, 1], [1, 0.5]), (3, 1), 9),
        # One microbatch alone would be fastest on one device; the pace of two is better.
        (endless([1, 1, 1], [0.9, 1]), (1, 2), 6),
        # Messages take 4 s each way, and both stages wait for them: 6 + 6 + 8 for two minibatches.
        (endless([1, 1, 1, 1], payload=[0, 5, 4, 5, 0]), (2, 2), 10),
        # Beside a stage of 9 s, those of 2 s are hidden.
        (endless([1, 1, 1, 1], payload=[0, 2, 4, 4, 0]), (1, 3), 9),
        # (6 + 6 + 14) / 2 would be more than the 12 of all layers on one device.
        (endless([1, 1, 1, 1], payload=7), (0, 4), 12),
        # Two versions of the weights on the first stage, one on the last; and two everywhere.
        (endless([1] * 3, weight=2, static=4, room=[6, 9]), (1, 2), 6),
        (endless([1] * 3, weight=2, static=4, room=[12, 9], schedule="async-2bw"), (2, 1), 6),
    ],
)
def test_by_hand(given, counts, seconds):
    best = best_cut(given)
    assert best == Cut(counts)
    if seconds is not None:
        assert given.step_seconds([best])[0] == pytest.approx(seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize("num_stages", range(1, 5))
def test_equal_layers_that_come_out_even_are_split_evenly(schedule, num_stages):
    given = workload([1] * 3 * num_stages, [1] * num_stages, schedule=schedule, microbatches=16)
    assert best_cut(given).counts == uniform(3 * num_stages, num_stages)


def ratio(given, recompute):
    """The ratio of the search's result to that of brute force; ``None`` if nothing fits."""
    cuts = all_cuts(given, recompute)
    if not cuts:
        with pytest.raises(PlanError, match="No plan fits in memory"):
            best_cut(given, recompute)
        return None
    found = best_cut(given, recompute)
    assert found in cuts
    # A plan is written as JSON, which knows no numbers of NumPy.
    assert {type(layer) for layer in found.recompute} <= {int}
    return min(given.step_seconds(cuts)) / given.step_seconds([found])[0]


@pytest.mark.parametrize(
    ("recompute", "tight", "num_layers", "seeds", "schedule"),
    [
        ("none", False, 8, range(100), None),
        ("none", True, 8, range(1000, 1060), None),
        ("full", True, 8, range(2000, 2060), None),
        ("auto", True, 6, range(3000, 3060), None),
        ("auto", True, 5, range(60), "async"),
        ("auto", True, 5, range(60), "async-2bw"),
    ],
)
def test_brute_force(recompute, tight, num_layers, seeds, schedule):
    ratios = {}
    for seed in seeds:
        sizes = {"num_stages": 2 + seed % 3, "num_layers": 2 + seed % (num_layers - 1)}
        given = random_workload(seed, tight=tight, schedule=schedule, **sizes)
        ratios[seed] = ratio(given, recompute)
    worse = {seed: found for seed, found in ratios.items() if found is not None and found < 0.99}
    assert not worse, "seeds and how near to brute force they come"
    # Not all of them without an answer.
    assert sum(found is not None for found in ratios.values()) > len(seeds) / 3


@pytest.mark.parametrize("schedule", ["async", "1f1b"])
def test_the_best_cut_with_the_same_sharers(schedule):
    """Layers that share parameters: the stages that have some of them stay the same."""
    num_hindered = 0
    for seed in range(120):
        draw = np.random.default_rng(seed)
        given = random_workload(
            seed, num_layers=3 + seed % 5, schedule=schedule, tight=seed % 2 == 0
        )
        counts = list(all_counts(given))
        present = stages_of(counts[draw.integers(len(counts))])
        groups = [
            tuple(sorted(draw.choice(given.num_layers, size, replace=False).tolist()))
            for size in draw.integers(2, 4, 2)
        ]
        sharers = tuple((g, frozenset(present[layer] for layer in g)) for g in groups)
        pinned = replace(given, allowed=None, sharers=sharers)
        free = all_cuts(replace(given, allowed=None))
        cuts = [cut for cut in free if keeps_sharers(groups, present, stages_of(cut.counts))]
        if not cuts:
            continue
        best = best_cut(pinned)
        assert best in cuts, f"seed {seed}"
        least = min(given.step_seconds(cuts))
        assert given.step_seconds([best])[0] <= least * 1.01, f"seed {seed}"
        num_hindered += least > 1.01 * min(given.step_seconds(free))
    assert num_hindered > 20


def stages_of(counts):
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def keeps_sharers(groups, before, after):
    """As an asynchronous pipeline needs it to move layers."""
    for group in groups:
        now, then = ({stage_of[layer] for layer in group} for stage_of in (before, after))
        if now != then and max(len(now), len(then)) > 1:
            return False
    return True


@pytest.mark.parametrize("schedule", ["async", "1f1b"])
def test_a_cut_is_as_good_as_any_of_many_layers(schedule):
    for seed in range(10):
        given = random_workload(seed, num_stages=4, num_layers=40, schedule=schedule, tight=False)
        (best,) = given.step_seconds([best_cut(given)])
        draw = np.random.default_rng(seed)
        inner = np.sort(draw.choice(sorted(given.allowed or range(1, 40)), (500, 3)), axis=1)
        bounds = np.pad(inner, ((0, 0), (1, 1)), constant_values=(0, 40))
        others = given.step_seconds([Cut(tuple(row)) for row in np.diff(bounds).tolist()])
        assert best <= min(others) * (1 + 1e-8), f"seed {seed}"


def test_recomputation_goes_where_the_stage_waits_anyway():
    """NUDT: recomputation on a stage is free if the slowest takes at least 2 forwards and a
    backward of it, which is 4 s a layer here.
    """
    free = workload([1, 1, 4], saved=[2, 2, 1], room=[6, 4], microbatches=16)
    without = replace(free, usable_bytes=np.full(2, np.inf))
    # Two layers in 6 s on the first stage, of which one can be recomputed, and 12 s on the second.
    cut = best_cut(free)
    assert cut.counts == (2, 1)
    assert len(cut.recompute) == 1
    assert free.step_seconds([cut]) == pytest.approx(without.step_seconds([best_cut(without)]))
    # In an asynchronous pipeline it is never free.
    minibatch = endless([1, 1, 2], saved=[2, 2, 1], room=[6, 4])
    assert minibatch.step_seconds([Cut((2, 1), frozenset({0})), Cut((2, 1))]) == [7, 6]


@pytest.mark.parametrize("recompute", ["none", "full", "auto"])
def test_each_cut_gets_a_recomputation_that_is_near_the_fastest(recompute):
    ratios = []
    for seed in range(60):
        given = random_workload(seed, num_layers=2 + seed % 4, tight=True)
        least: dict[tuple[int, ...], float] = {}
        for cut in all_cuts(given, recompute):
            seconds = sum(given.costs(cut).recompute_seconds)
            least[cut.counts] = min(seconds, least.get(cut.counts, np.inf))
        recomputation = Recomputation(given, recompute)
        for counts in all_counts(given):
            taken = recomputation.seconds(np.cumsum([0, *counts])[:, None]).sum()
            # What does not fit takes for ever.
            assert np.isfinite(taken) == (counts in least), f"seed {seed}"
            if counts in least:
                cut = recomputation.cut(counts)
                assert given.fits(cut), f"seed {seed}"
                seconds = sum(given.costs(cut).recompute_seconds)
                assert least[counts] <= seconds * (1 + 1e-9), f"seed {seed}"
                ratios.append(seconds / least[counts] if least[counts] else 1.0)
    assert recompute == "auto" or max(ratios) == pytest.approx(1)
    assert np.mean(ratios) < 1.02


def test_ranges_of_layers_hold_what_the_memory_of_whole_cuts_says():
    for seed in range(40):
        given = random_workload(seed)
        memory = given.memory
        for cut in all_cuts(given, "none"):
            where = np.arange(given.num_stages), cut.bounds[:-1], cut.bounds[1:]
            assert memory.kept_ranges[where] == pytest.approx(memory.peak_bytes(cut))
            full = memory.peak_bytes(given.everything_recomputed(cut.counts))
            assert memory.full_ranges[where] == pytest.approx(full)


def test_the_cut_in_force_stays_where_none_is_faster():
    given = workload([0, 0, 0, 0], [1, 1])
    assert best_cut(given).counts == (2, 2)
    assert best_cut(given, given=[(1, 3)]).counts == (1, 3)
    slower = workload([1, 1, 1, 1])
    assert best_cut(slower, given=[(1, 3)]).counts == (2, 2)
    # It need not be allowed any more, nor fit.
    assert best_cut(replace(slower, allowed=frozenset({2})), given=[(1, 3)]).counts == (2, 2)
    tight = workload([1, 1, 1, 1], static=1, room=[3, 3])
    assert best_cut(tight, given=[(0, 4)]).counts == (2, 2)


def test_the_same_every_time():
    for seed in range(10):
        one, same = (random_workload(seed, num_layers=12, tight=True) for _ in range(2))
        assert answer(one) == answer(same)


def answer(given):
    try:
        return best_cut(given)
    except PlanError as error:
        return str(error)


def test_many_cuts_at_once_are_timed_as_one_by_one():
    for seed in range(15):
        given = random_workload(seed, num_layers=5, tight=True)
        cuts = all_cuts(given)[::7]
        alone = [given.timeline(cut).step_seconds for cut in cuts]
        assert given.step_seconds(cuts) == pytest.approx(alone, rel=1e-12)


def test_unknown_word():
    with pytest.raises(PlanError, match=r"recompute='some'; choose one of 'auto', 'full', 'none'"):
        best_cut(workload([1, 1]), "some")


# --- with the order of the devices ---


def ordered(seed, num_stages, num_layers, schedule="1f1b", samples=1.0, effort=USUAL):
    """The results of a search, and the workload of each order."""
    model, cluster, request = little_memory(seed, num_stages, num_layers)
    machines = [replace(one, memory_bytes=2 * one.memory_bytes) for one in cluster.devices]
    cluster = replace(cluster, devices=tuple(machines))
    microbatches = 1 if schedule in ASYNCHRONOUS else request.microbatches

    def of(order):
        assert isinstance(microbatches, int)
        return workload_of(model, cluster, order, schedule, microbatches, samples)

    order = tuple(range(num_stages))
    search = StageSearch(of, "none", interchangeable(cluster), effort)
    search.first(order)
    search.improve([order], reorders=True)
    return search.found(), of


@pytest.mark.parametrize(
    ("seed", "num_stages", "num_layers", "schedule"),
    [
        *((seed, 4, 6, schedule) for seed in range(12) for schedule in ("1f1b", "gpipe")),
        # 120 orders are too many for this effort: stages are exchanged.
        *((seed, 5, 7, "1f1b") for seed in range(5)),
    ],
)
def test_near_the_best_of_all_orders(seed, num_stages, num_layers, schedule):
    found, of = ordered(seed, num_stages, num_layers, schedule, effort=replace(USUAL, orders=24))
    best = np.inf
    for order in itertools.permutations(range(num_stages)):
        best = min([best, *of(order).step_seconds(all_cuts(of(order), "none"))])
    assert bool(found) == np.isfinite(best)
    if found:
        there = of(found[0].order)
        assert there.fits(found[0].cut)
        assert there.step_seconds([found[0].cut])[0] <= best * USUAL.alike


@pytest.mark.parametrize("samples", [1.0, 2.25])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "async"])
def test_times_are_those_of_the_workloads(schedule, samples):
    """With microbatches of unequal sizes, too. Orders come with the fastest first, one of each."""
    num_checked = 0
    for seed in range(6):
        found, of = ordered(seed, 4, 12, schedule, samples)
        times = [of(one.order).step_seconds([one.cut])[0] for one in found]
        assert [one.seconds for one in found] == pytest.approx(times)
        assert times == sorted(times)
        assert len({one.order for one in found}) == len(found)
        num_checked += len(found)
    assert num_checked > 10


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
