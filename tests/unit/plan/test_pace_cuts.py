from dataclasses import replace

import numpy as np
import pytest

from lightning_pipeshift.plan.arrange.evaluator import Evaluator
from lightning_pipeshift.plan.arrange.planner import arrange
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.partition.best_cut import best_cut, neighbours
from tests.unit.plan.clusters import unlike
from tests.unit.plan.workloads import all_counts, all_cuts, random_workload, workload


def endless(*args, schedule="async", **kwargs):
    return workload(*args, schedule=schedule, microbatches=1, **kwargs)


@pytest.mark.parametrize(
    ("given", "counts", "seconds"),
    [
        (endless([1, 1, 1, 1]), (2, 2), 6),
        (endless([1, 1, 1, 1], [1, 0.5]), (3, 1), 9),
        # One microbatch alone would be fastest on one device; the pace of two is better.
        (endless([1, 1, 1], [0.9, 1]), (1, 2), 6),
        (endless([1, 1], [1, 0.1]), (2, 0), 6),
        # Messages take 4 s each way, and both stages wait for them: 6 + 6 + 8 for two minibatches.
        (endless([1, 1, 1, 1], payload=[0, 5, 4, 5, 0]), (2, 2), 10),
        # Beside a stage of 9 s, those of 2 s are hidden.
        (endless([1, 1, 1, 1], payload=[0, 2, 4, 4, 0]), (1, 3), 9),
        # (6 + 6 + 14) / 2 would be more than the 12 of all layers on one device.
        (endless([1, 1, 1, 1], payload=7), (0, 4), 12),
        # Two versions of the weights on the first stage, one on the last.
        (endless([1] * 3, weight=2, static=4, room=[6, 9]), (1, 2), 6),
        # Two everywhere.
        (endless([1] * 3, weight=2, static=4, room=[12, 9], schedule="async-2bw"), (2, 1), 6),
    ],
)
def test_by_hand(given, counts, seconds):
    best = best_cut(given)
    assert best.counts == counts
    assert given.estimate(best) == given.step_seconds([best])[0] == seconds


@pytest.mark.parametrize("schedule", ["async", "async-2bw"])
def test_brute_force(schedule):
    """With as little memory as there may be, and the best recomputation."""
    num_recomputing = 0
    for seed in range(150):
        given = random_workload(seed, num_layers=2 + seed % 5, schedule=schedule, tight=True)
        cuts = all_cuts(given)
        if not cuts:
            continue
        best = best_cut(given)
        assert given.memory.fits(best), f"seed {seed}"
        seconds = given.step_seconds([best])[0]
        assert seconds == pytest.approx(min(given.step_seconds(cuts)), rel=1e-8), f"seed {seed}"
        num_recomputing += bool(best.recompute)
    assert num_recomputing > 10


def test_a_cut_is_as_good_as_any_of_many_layers():
    for seed in range(10):
        given = random_workload(seed, num_stages=4, num_layers=40, schedule="async", tight=False)
        (best,) = given.step_seconds([best_cut(given)])
        draw = np.random.default_rng(seed)
        inner = np.sort(draw.choice(sorted(given.allowed or range(1, 40)), (500, 3)), axis=1)
        bounds = np.pad(inner, ((0, 0), (1, 1)), constant_values=(0, 40))
        others = given.step_seconds([Cut(tuple(row)) for row in np.diff(bounds).tolist()])
        assert best <= min(others) * (1 + 1e-8), f"seed {seed}"


def test_no_shift_of_a_deep_pipelines_cut_is_faster():
    """The fastest cut by the pace of single stages is no more than a start."""
    model, cluster, request = unlike(3, num_ranks=34, num_layers=80)
    request = replace(request, schedule="async", microbatches=1, virtual_machines=1)
    found = arrange(model, cluster, request)
    (given,) = Evaluator(model, cluster, request).placed(found.ranks, 1).workloads
    given = replace(given, allowed=model.possible_cuts)
    near = [Cut(counts) for counts in neighbours(given, found.cuts[0].counts)]
    assert min(given.step_seconds(near)) >= given.estimate(found.cuts[0]) * (1 - 1e-8)


def test_recomputation_takes_its_time_on_a_stage_that_would_be_idle_in_a_step():
    tight = {"saved": [2, 2, 1], "room": [6, 4]}
    step = workload([1, 1, 2], **tight, microbatches=16)
    minibatch = endless([1, 1, 2], **tight)
    cut = Cut((2, 1), frozenset({0}))
    without = Cut((2, 1))
    assert step.step_seconds([cut])[0] < step.step_seconds([without])[0] + 16
    assert minibatch.step_seconds([cut, without]) == [7, 6]


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
