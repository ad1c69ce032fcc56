import itertools
import random

import pytest

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.balance import balanced, uniform


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (6, 3, (2, 2, 2)),
        (9, 2, (5, 4)),
        (11, 4, (3, 3, 3, 2)),
        (2, 4, (1, 1, 0, 0)),
        (0, 2, (0, 0)),
        (5, 1, (5,)),
    ],
)
def test_uniform(num_layers, num_stages, counts):
    assert uniform(num_layers, num_stages) == counts


@pytest.mark.parametrize(
    ("seconds", "num_stages", "counts"),
    [
        ([1, 1, 1, 1], 2, (2, 2)),
        ([3, 1, 1, 1], 2, (1, 3)),
        ([1, 1, 1, 3], 2, (3, 1)),
        ([1, 9, 1], 3, (1, 1, 1)),
        ([1, 9, 1], 2, (2, 1)),
        # 0.1 + 0.2 and 0.3 differ by rounding; three times 0.1 must still tie with three times 0.1.
        ([0.1] * 6, 2, (3, 3)),
        ([0.0, 0.0], 2, (1, 1)),
        ([], 2, (0, 0)),
        ([1, 1], 4, (1, 1, 0, 0)),
    ],
)
def test_balanced(seconds, num_stages, counts):
    assert balanced(seconds, num_stages) == counts


@pytest.mark.parametrize("num_layers", range(1, 12))
@pytest.mark.parametrize("num_stages", range(1, 6))
def test_equal_layers_are_split_uniformly(num_layers, num_stages):
    assert balanced([0.1] * num_layers, num_stages) == uniform(num_layers, num_stages)


def test_ties_go_to_the_smaller_payload():
    # Both cuts leave 7 on the slowest stage.
    assert balanced([5, 2, 5], 2, [0, 9, 4, 0]) == (2, 1)
    assert balanced([5, 2, 5], 2, [0, 4, 9, 0]) == (1, 2)


def test_payload_does_not_buy_a_slower_stage():
    assert balanced([1, 1, 1, 1], 2, [0, 1, 10**9, 1, 0]) == (2, 2)


def test_only_allowed_boundaries_are_cut():
    assert balanced([1, 1, 1, 1], 2, cuts=frozenset({1})) == (1, 3)
    # The ends are no cuts, and one cut makes two stages: the third stays empty.
    assert balanced([1, 1, 1, 1], 3, cuts=frozenset({0, 1, 4})) == (1, 3, 0)
    assert balanced([1, 1], 2, cuts=frozenset()) == (2, 0)


def brute_force(seconds, num_stages, payload, cuts):
    """Tries every set of cuts, in the order of preference that the docstring promises."""
    layers = len(seconds)
    usable = [b for b in range(1, layers) if cuts is None or b in cuts]
    filled = min(num_stages, len(usable) + 1)
    candidates = []
    for chosen in itertools.combinations(usable, filled - 1):
        edges = [0, *chosen, layers]
        loads = [sum(seconds[a:b]) for a, b in itertools.pairwise(edges)]
        counts = [b - a for a, b in itertools.pairwise(edges)]
        key = (
            max(loads),
            sum(payload[b] for b in chosen),
            sum(load**2 for load in loads),
            [-count for count in counts],
        )
        candidates.append((key, (*counts, *[0] * (num_stages - filled))))
    return min(candidates)[1]


def test_brute_force():
    draw = random.Random(0)
    for _ in range(1500):
        layers, stages = draw.randint(1, 9), draw.randint(1, 5)
        # Few distinct values, so that ties happen.
        seconds = [draw.randint(0, 4) for _ in range(layers)]
        payload = [draw.randint(0, 3) for _ in range(layers + 1)]
        cuts = None
        if draw.random() < 0.5:
            cuts = frozenset(b for b in range(layers + 1) if draw.random() < 0.6)
        expected = brute_force(seconds, stages, payload, cuts)
        assert balanced(seconds, stages, payload, cuts) == expected, (seconds, payload, cuts)


def test_many_layers_take_no_time():
    draw = random.Random(1)
    counts = balanced([draw.random() for _ in range(200)], 16)
    assert sum(counts) == 200
    assert all(counts)


def test_errors():
    with pytest.raises(PartitionError, match="0 stages"):
        uniform(3, 0)
    with pytest.raises(PartitionError, match="0 stages"):
        balanced([1.0], 0)
    with pytest.raises(PartitionError, match=r"2 payloads for 2 layers.*3 boundaries"):
        balanced([1.0, 1.0], 1, [0, 0])
    with pytest.raises(PartitionError, match="nan seconds"):
        balanced([float("nan")], 1)
    with pytest.raises(PartitionError, match=r"-1.0 seconds"):
        balanced([-1.0], 1)
