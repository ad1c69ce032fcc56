import itertools
import math

import numpy as np
import pytest

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.partition.ranges import ranges_of
from lightning_pipeshift.plan.partition.recomputation import Recomputation, bytes_held, light_cover
from tests.unit.plan.workloads import all_cuts, random_workload, workload


@pytest.mark.parametrize(
    ("gains", "weights", "needed", "chosen"),
    [
        ([5, 5, 5], [1, 1, 1], 5, 1),
        ([5, 5, 5], [1, 1, 1], 5.5, 2),
        # The one with the best ratio is more than enough, and two of the others are lighter.
        ([100, 5, 5], [10, 1, 1], 10, [1, 2]),
        ([6, 5, 5], [3, 3, 3], 6, [0]),
        # What gains nothing is never chosen, even if it weighs nothing.
        ([0, 4], [0, 9], 4, [1]),
        ([1, 1], [2, 1], 2, [0, 1]),
        ([3, 3], [0, 0], 3, 1),
    ],
)
def test_light_cover(gains, weights, needed, chosen):
    found = light_cover(np.array(gains, float), np.array(weights, float), needed)
    assert chosen in (found, len(found))


def test_a_light_cover_is_near_that_of_brute_force():
    draw = np.random.default_rng(0)
    ratios = []
    for number in range(400):
        num = int(draw.integers(1, 10))
        gains = draw.integers(0, 12, num).astype(float)
        weights = draw.integers(0, 12, num) if number % 2 else draw.random(num)
        needed = draw.uniform(0.01, 1.0) * gains.sum()
        if not needed:
            continue
        found = light_cover(gains, weights.astype(float), needed)
        assert gains[found].sum() >= needed
        least = min(
            weights[list(chosen)].sum()
            for size in range(num + 1)
            for chosen in itertools.combinations(range(num), size)
            if gains[list(chosen)].sum() >= needed
        )
        assert weights[found].sum() <= 2 * least + 1e-9, number
        ratios.append(weights[found].sum() / least if least else 1.0)
    assert np.mean(ratios) < 1.05


def test_many_layers():
    draw = np.random.default_rng(1)
    gains, weights = draw.random((2, 120))
    found = light_cover(gains, weights, 30.0)
    assert gains[found].sum() >= 30
    # Not above the fractional optimum by more than an item.
    order = np.argsort(weights / gains)
    needed = int(np.searchsorted(gains[order].cumsum(), 30.0)) + 1
    assert weights[found].sum() <= weights[order[:needed]].sum()


def test_what_a_stage_holds():
    """As the workload says of whole cuts, for all ranges at once."""
    for seed in range(60):
        given = random_workload(seed)
        none, full = (bytes_held(given, word) for word in ("none", "full"))
        freed = np.maximum(given.memory.freed_bytes, 0.0)
        for cut in all_cuts(given, "none"):
            everything = given.everything_recomputed(cut.counts)
            some = Cut(cut.counts, frozenset(list(everything.recompute)[::2]))
            ranges = list(enumerate(itertools.pairwise(cut.bounds)))
            assert [none[s, b, e] for s, (b, e) in ranges] == pytest.approx(
                given.memory.peak_bytes(cut)
            )
            held = [full[s, b, e] for s, (b, e) in ranges]
            assert held == pytest.approx(given.memory.peak_bytes(everything))
            for s, (b, e) in ranges:
                layers = [layer for layer in range(b, e) if layer in some.recompute]
                less = given.memory.peak_bytes(cut)[s] - given.memory.peak_bytes(some)[s]
                # What would take more memory is no choice.
                assert freed[s, layers].sum() >= less - 1e-9


@pytest.mark.parametrize("recompute", ["none", "full", "auto"])
def test_each_cut_gets_a_recomputation_that_is_near_the_fastest(recompute):
    ratios = []
    for seed in range(60):
        given = random_workload(seed, num_layers=2 + seed % 4, tight=True)
        least: dict[tuple[int, ...], float] = {}
        for cut in all_cuts(given, recompute):
            seconds = sum(given.costs(cut).recompute_seconds)
            least[cut.counts] = min(seconds, least.get(cut.counts, math.inf))
        recomputation = Recomputation(given, recompute)
        found = recomputation.cuts(list(least))
        assert [cut.counts for cut in found] == list(least), f"seed {seed}"
        assert all(given.memory.fits(cut) for cut in found), f"seed {seed}"
        # A plan is written as JSON, which knows no numbers of NumPy.
        assert {type(layer) for cut in found for layer in cut.recompute} <= {int}
        for cut in found:
            seconds, best = sum(given.costs(cut).recompute_seconds), least[cut.counts]
            bound = recomputation.seconds[ranges_of(cut.counts)].sum()
            assert bound <= best * (1 + 1e-9), f"seed {seed}"
            ratios.append(seconds / best if best else 1.0)
            assert best <= seconds * (1 + 1e-9), f"seed {seed}"
    assert recompute == "auto" or max(ratios) == pytest.approx(1)
    assert np.mean(ratios) < 1.02


def test_what_does_not_fit_is_left_out():
    given = workload([1, 1], static=3, room=3)
    assert Recomputation(given, "auto").cuts([(2, 0), (1, 1), (0, 2)]) == [Cut((1, 1))]
