from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.partition.best_cut import best_cut
from lightning_pipeshift.plan.partition.equal_counts import uniform
from tests.unit.plan.workloads import all_cuts, random_workload, workload


@pytest.mark.parametrize(
    ("given", "cut"),
    [
        (workload([1, 1, 1, 1]), Cut((2, 2))),
        (workload([1, 1, 1, 1], [1, 0.5]), Cut((3, 1))),
        (workload([1, 1], [1, 0.1]), Cut((2, 0))),
        (workload([1, 1, 1, 1], payload=20), Cut((0, 4))),
        (workload([1, 1, 1, 1], allowed=frozenset({1})), Cut((1, 3))),
        (workload([1, 1, 1]), Cut((2, 1))),
        (workload([1, 1], [1]), Cut((2,))),
        (workload([1], [1, 1, 1]), Cut((1, 0, 0))),
        # Nothing is known yet: evenly.
        (workload([0, 0, 0, 0, 0], [1, 1]), Cut((3, 2))),
    ],
)
def test_by_hand(given, cut):
    assert best_cut(given) == cut


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
    return min(given.step_seconds(cuts)) / given.step_seconds([found])[0]


@pytest.mark.parametrize(
    ("recompute", "tight", "num_layers", "seeds"),
    [
        ("none", False, 8, range(100)),
        ("none", True, 8, range(1000, 1060)),
        ("full", True, 8, range(2000, 2060)),
        ("auto", True, 6, range(3000, 3060)),
    ],
)
def test_brute_force(recompute, tight, num_layers, seeds):
    ratios = {}
    for seed in seeds:
        sizes = {"num_stages": 2 + seed % 3, "num_layers": 2 + seed % (num_layers - 1)}
        ratios[seed] = ratio(random_workload(seed, tight=tight, **sizes), recompute)
    worse = {seed: found for seed, found in ratios.items() if found is not None and found < 0.99}
    assert not worse, "seeds and how near to brute force they come"
    # Not all of them without an answer.
    assert sum(found is not None for found in ratios.values()) > len(seeds) / 3


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


def test_the_cut_in_force_stays_where_none_is_faster():
    given = workload([0, 0, 0, 0], [1, 1])
    assert best_cut(given).counts == (2, 2)
    assert best_cut(given, start=[Cut((1, 3))]).counts == (1, 3)
    slower = workload([1, 1, 1, 1])
    assert best_cut(slower, start=[Cut((1, 3))]).counts == (2, 2)
    # It need not be allowed any more, nor fit.
    assert best_cut(replace(slower, allowed=frozenset({2})), start=[Cut((1, 3))]).counts == (2, 2)
    tight = workload([1, 1, 1, 1], static=1, room=[3, 3])
    assert best_cut(tight, start=[Cut((0, 4))]).counts == (2, 2)


def test_what_it_starts_from_is_no_slower_than_the_answer():
    for seed in range(20):
        given = random_workload(seed, num_stages=5, num_layers=20, tight=False)
        bounds = np.random.default_rng(seed).choice(range(21), 4)
        start = Cut(tuple(e - b for b, e in pairwise([0, *sorted(bounds.tolist()), 20])))
        if given.is_allowed(start):
            best, other = given.step_seconds([best_cut(given, start=[start]), start])
            assert best <= other * (1 + 1e-9), f"seed {seed}"


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
        assert given.step_seconds(cuts) == alone


def test_unknown_word():
    with pytest.raises(PlanError, match=r"recompute='some'; choose one of 'auto', 'full', 'none'"):
        best_cut(workload([1, 1]), "some")
