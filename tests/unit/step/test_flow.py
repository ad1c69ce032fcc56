import random

import pytest

from lightning_pipeshift.step.flow import call_order, merged_order


@pytest.mark.parametrize(
    ("calls", "num_layers", "expected"),
    [
        ([], 3, [0, 1, 2]),
        ([0, 1, 2], 3, [0, 1, 2]),
        ([2, 0, 1], 3, [2, 0, 1]),
        # Called twice in a row.
        ([1, 1, 0], 2, [1, 0]),
        # The first call decides.
        ([0, 1, 3, 0, 1, 2], 4, [0, 1, 3, 2]),
        # A layer that is never called stays behind its predecessor in the tree, or comes first.
        ([2, 0, 3], 4, [2, 0, 1, 3]),
        ([1, 2], 3, [0, 1, 2]),
        ([3, 1], 5, [0, 3, 4, 1, 2]),
    ],
)
def test_call_order(calls, num_layers, expected):
    assert call_order(calls, num_layers) == expected


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ([[0, 1, 2]], [0, 1, 2]),
        # By chance each calls one of the two in the middle.
        ([[0, 2, 3], [0, 1, 3]], [0, 1, 2, 3]),
        ([[0, 1, 3], [0, 2, 3], [0, 3]], [0, 1, 2, 3]),
        # A later module in the tree is called before them.
        ([[0, 4, 2], [0, 4, 1]], [0, 4, 1, 2]),
        ([[1, 1, 0]], [1, 0]),
        # No order agrees with both.
        ([[0, 1], [1, 0]], [0, 1]),
    ],
)
def test_flows_that_call_some_layers_at_a_time(flows, expected):
    assert merged_order(flows) == expected


@pytest.mark.parametrize("seed", range(50))
def test_call_order_is_a_permutation_that_keeps_the_flows_order(seed):
    dice = random.Random(seed)
    num_layers = dice.randrange(1, 7)
    calls = dice.sample(range(num_layers), dice.randrange(num_layers + 1))
    order = call_order(calls, num_layers)
    assert sorted(order) == list(range(num_layers))
    assert [layer for layer in order if layer in calls] == calls
