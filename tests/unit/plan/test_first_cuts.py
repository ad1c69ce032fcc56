import numpy as np
import pytest

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.partition.best_cut import first_cuts
from lightning_pipeshift.plan.partition.recomputation import bytes_held
from lightning_pipeshift.plan.schedule.schedules import SYNCHRONOUS
from tests.unit.plan.workloads import all_cuts, random_workload, workload


@pytest.mark.parametrize(
    ("given", "counts", "seconds"),
    [
        # One microbatch through both stages is 4 layers of 3 s; 7 more at 6 s.
        (workload([1, 1, 1, 1]), (2, 2), 12 + 7 * 6),
        (workload([1, 1, 1, 1], [1, 0.5]), (3, 1), 15 + 7 * 9),
        (workload([3, 1, 1, 1]), (1, 3), 18 + 7 * 9),
        # A device so slow that it is better drained; the other way round, too.
        (workload([1, 1], [1, 0.1]), (2, 0), 6 + 7 * 6),
        (workload([1, 1], [0.1, 1]), (0, 2), 6 + 7 * 6),
        # For one microbatch there is nothing to do side by side.
        (workload([1, 1, 1], [0.9, 1], microbatches=1), (0, 3), 9),
        # The link's 7 s twice on the way, and at its pace: less than the 12 s of all layers.
        (workload([1, 1, 1, 1], payload=7), (2, 2), 26 + 7 * 7),
        (workload([1, 1, 1, 1], payload=20), (0, 4), 12 + 7 * 12),
        # Boundary 1 carries less than the middle.
        (workload([1, 1, 1, 1], payload=[0, 1, 9, 9, 0]), (1, 3), 14 + 7 * 9),
        (workload([1, 1, 1, 1], allowed=frozenset({1})), (1, 3), 12 + 7 * 9),
        (workload([1, 1, 1, 1], allowed=frozenset()), (0, 4), 12 + 7 * 12),
        # What a stage does besides its layers it does if it has some, and the last one anyway.
        (workload([1, 1, 1, 1], extra=4), (2, 2), 28 + 7 * 14),
        (workload([1, 1, 1, 1], extra=30), (0, 4), 72 + 7 * 72),
        # The first stage holds two microbatches in flight, the second one.
        (workload([1, 1, 1, 1], saved=1, room=[2, 3]), (1, 3), 12 + 7 * 9),
    ],
)
def test_by_hand(given, counts, seconds):
    best = fastest_cuts(given)[0]
    assert best.counts == counts
    assert given.estimate(best) == pytest.approx(seconds)


def test_nothing_fits():
    assert fastest_cuts(workload([1, 1], static=2, room=1)) == []
    # Each stage has room for two, but the cut in the middle is not allowed.
    short = workload([1, 1, 1, 1], static=1, room=2, allowed=frozenset({1}))
    assert fastest_cuts(short) == []


def test_brute_force():
    """The first one has the least estimate of all cuts, and every one fits."""
    for seed in range(500):
        given = random_workload(seed, schedule=sorted(SYNCHRONOUS)[seed % 3])
        expected = min(map(given.estimate, all_cuts(given, "none")), default=None)
        found = fastest_cuts(given)
        assert bool(found) == (expected is not None), f"seed {seed}"
        if found:
            assert given.estimate(found[0]) == pytest.approx(expected, rel=1e-9), f"seed {seed}"
            assert all(given.memory.fits(cut) and given.is_allowed(cut) for cut in found), (
                f"seed {seed}"
            )
            assert len(set(found)) == len(found), f"seed {seed}"


def fastest_cuts(workload):
    """The first cuts that fit without recomputation."""
    fits = bytes_held(workload, "none") <= workload.usable_bytes[:, None, None]
    return list(map(Cut, first_cuts(workload, np.where(fits, 0.0, np.inf))))


def test_what_stages_can_do_meanwhile():
    """By the first estimate every stage waits for all behind it. Where many microbatches are in
    flight it need not: what is early in the pipeline may be slower, for it waits for nobody.
    """
    given = workload([1] * 12, [1, 1, 1], schedule="gpipe", microbatches=4)
    again = np.zeros((given.num_stages, *[given.num_layers + 1] * 2))
    found = first_cuts(given, again) + first_cuts(given, again, hides_forwards=True)
    assert (4, 4, 4) in first_cuts(given, again)
    best = min(given.step_seconds(all_cuts(given, "none")))
    assert best in given.step_seconds([Cut(counts) for counts in found])
