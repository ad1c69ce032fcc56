from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize

from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.partition import integer_programming
from lightning_pipeshift.plan.partition.dynamic_programming import programme_of
from lightning_pipeshift.plan.partition.integer_programming import joint_optimum
from lightning_pipeshift.plan.partition.recomputation import Recomputation
from tests.unit.plan.workloads import all_cuts, fastest_cuts, random_workload, workload


@pytest.mark.parametrize(
    ("given", "cut"),
    [
        (workload([1, 1, 1, 1]), Cut((2, 2))),
        (workload([1, 1, 1, 1], [1, 0.5]), Cut((3, 1))),
        (workload([1, 1], [0.1, 1]), Cut((0, 2))),
        (workload([1, 1, 1, 1], payload=20), Cut((0, 4))),
        (workload([1, 1, 1, 1], allowed=frozenset({1})), Cut((1, 3))),
        (workload([1, 1, 1, 1], extra=30), Cut((0, 4))),
        (workload([1, 1, 1, 1], saved=1, inputs=1, room=[2, 4]), Cut((1, 3))),
        # The second stage has no room for more, and the first only if it lets go of something: of
        # the layer that takes less time.
        (
            workload([2, 1, 1, 1], saved=1, room=[3, 2], microbatches=4),
            Cut((2, 2), frozenset({1})),
        ),
        # The layer that frees enough alone, not the one that is cheapest for its bytes.
        (
            workload([4, 3, 1], [1, 1], saved=[5, 4, 1], room=[13, 1]),
            Cut((2, 1), frozenset({0})),
        ),
        (workload([1, 1], [1]), Cut((2,))),
        (workload([1, 1], static=3, room=2), None),
    ],
)
def test_by_hand(given, cut):
    assert joint_optimum(given) == cut


def test_brute_force():
    for seed in range(80):
        given = random_workload(seed, num_layers=2 + seed % 4, tight=True)
        expected = min(map(given.estimate, all_cuts(given)), default=None)
        cut = joint_optimum(given)
        assert (cut is None) == (expected is None), f"seed {seed}"
        if cut is not None:
            assert given.fits(cut), f"seed {seed}"
            assert given.is_allowed(cut), f"seed {seed}"
            assert given.estimate(cut) == pytest.approx(expected, rel=1e-6), f"seed {seed}"


@pytest.mark.parametrize("tight", [False, True])
def test_dynamic_programme_without_recomputation(tight):
    for seed in range(25):
        given = random_workload(seed, num_stages=2 + seed % 3, num_layers=10, tight=tight)
        # Inputs as large as all that is saved: nothing is to be had from recomputation.
        given = replace(given, input_bytes=given.saved_bytes)
        found, cut = fastest_cuts(given), joint_optimum(given)
        assert (cut is None) == (not found), f"seed {seed}"
        if cut is not None:
            assert not cut.recompute, f"seed {seed}"
            exact = given.estimate(found[0])
            assert given.estimate(cut) == pytest.approx(exact, rel=1e-6), f"seed {seed}"


def test_the_dynamic_programme_bounds_it_from_below_and_the_search_from_above():
    """Larger ones than brute force can do: the bound counts parts of layers, and the search starts
    from its cut."""
    ratios = []
    for seed in range(16):
        given = random_workload(seed, num_stages=3 + seed % 2, num_layers=16, tight=True)
        recomputation = Recomputation(given, "auto")
        solutions = programme_of(given, recomputation.seconds).fastest(1)
        cut = joint_optimum(given)
        assert (cut is None) == (not solutions), f"seed {seed}"
        if cut is not None:
            least = given.estimate(cut)
            assert solutions[0].seconds <= least * (1 + 1e-6), f"seed {seed}"
            start = given.estimate(recomputation.cuts([solutions[0].counts])[0])
            assert start >= least * (1 - 1e-6), f"seed {seed}"
            ratios.append(start / least)
    assert len(ratios) > 5
    assert np.mean(ratios) < 1.02


def test_of_equal_cuts_the_one_that_recomputes_less():
    # The first stage is far from the slowest, so both its layers could be recomputed.
    given = workload([1, 1, 9], saved=[2, 2, 0], room=[6, np.inf], allowed=frozenset({2}))
    cut = joint_optimum(given)
    assert cut is not None
    assert len(cut.recompute) == 1


# Powers of two: what fits exactly still does.
@pytest.mark.parametrize("unit", [2.0**-20, 2.0**20])
def test_units_do_not_matter(unit):
    seconds = ("forward", "backward", "forward_extra", "backward_extra", "payload_seconds")
    held = (
        "static",
        "weight",
        "saved",
        "input",
        "outside",
        "momentary",
        "batch",
        "payload",
        "usable",
    )
    sizes = [f"{name}_bytes" for name in held]
    for seed in range(10):
        given = random_workload(seed, num_layers=5, tight=True)
        other = replace(
            given,
            **{name: unit * getattr(given, name) for name in (*seconds, "gradient_seconds")},
            **{name: getattr(given, name) / unit for name in sizes},
        )
        cut, same = joint_optimum(given), joint_optimum(other)
        assert (cut is None) == (same is None), f"seed {seed}"
        if cut is not None and same is not None:
            assert given.estimate(same) == pytest.approx(given.estimate(cut), rel=1e-6)


def test_an_unproven_solution_is_said_to_be_one(monkeypatch, caplog):
    """As if the time had ended when the best solution was found."""
    workload = random_workload(3, num_stages=2, num_layers=4)
    solve = scipy.optimize.milp

    def timed_out(*args, **kwargs):
        result = solve(*args, **kwargs)
        result.status, result.mip_gap = 1, 0.125
        return result

    monkeypatch.setattr(integer_programming, "milp", timed_out)
    assert joint_optimum(workload, time_limit=7.0) is not None
    assert "not proven within 7 s" in caplog.text
    assert "12.5 %" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    assert joint_optimum(workload) is not None
    assert not caplog.text
