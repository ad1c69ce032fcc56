import math

import numpy as np
import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.saved_tensors import Choice, SavedTensor, Swap


@pytest.mark.parametrize(("number", "num_bytes"), [(-1, 5), (0, -5)])
def test_a_saved_tensor_counts_from_0(number, num_bytes):
    with pytest.raises(
        PlanError,
        match=f"a saved tensor with number {number} and {num_bytes} bytes; both are at least 0",
    ):
        SavedTensor(number, num_bytes)
    assert SavedTensor(0, 0).num_bytes == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tensors": ()}, r"the tensors \[\] of layer 7; it names one or more, each once"),
        ({"tensors": (0, 2, 0)}, r"the tensors \[0, 2, 0\] of layer 7; it names one or more"),
        ({"tensors": (2, -1)}, r"the tensors \[2, -1\] of layer 7.* counted from 0"),
        ({"stages": (1, 1)}, r"layer 7 to the stages \[1, 1\]; each is named once"),
        ({"stages": (0, -1)}, r"layer 7 to the stages \[0, -1\]"),
        ({"stages": (1, 2), "shares": (1.0,)}, r"to 2 stages with the shares \[1.0\]; give one"),
        ({"stages": (1,), "shares": (1.0, 2.0)}, r"to 1 stages with the shares \[1.0, 2.0\]"),
        ({"shares": (1.0,)}, r"to 0 stages with the shares \[1.0\]"),
        ({"stages": (1, 2), "shares": (1.0, 0.0)}, r"\[1.0, 0.0\]; give one above 0 for each"),
        ({"stages": (1, 2), "shares": (-1.0, 1.0)}, r"\[-1.0, 1.0\]; give one above 0"),
        ({"stages": (1, 2), "shares": (math.inf, 1.0)}, r"\[inf, 1.0\]; give one above 0"),
        ({"stages": (1, 2), "shares": (1.0, math.nan)}, r"\[1.0, nan\]; give one above 0"),
    ],
)
def test_a_wrong_swap_is_told(values, words):
    with pytest.raises(PlanError, match=words):
        Swap(**({"layer": 7, "tensors": (0, 2)} | values))


def test_what_becomes_of_swapped_tensors():
    assert Swap(0, (0,)).choice is Choice.HOST
    assert Swap(0, (0,), (1,)).choice is Choice.DEVICE


@pytest.mark.parametrize(
    ("stages", "shares", "num_items", "parts"),
    [
        ((4,), (), 7, [(4, 7)]),
        ((1, 2), (), 10, [(1, 5), (2, 5)]),
        ((1, 2), (3.0, 1.0), 12, [(1, 9), (2, 3)]),
        # As they are named, and not by number.
        ((3, 1), (1.0, 2.0), 9, [(3, 3), (1, 6)]),
        ((0, 5, 2), (1.0, 1.0, 2.0), 8, [(0, 2), (5, 2), (2, 4)]),
        ((0, 1, 2), (), 7, [(0, 2), (1, 3), (2, 2)]),
        # Whose part is nothing gets nothing.
        ((1, 2), (1.0, 99.0), 3, [(2, 3)]),
        ((1, 2, 3), (), 0, []),
        # The host takes all of it: there is nothing to cut.
        ((), (), 5, []),
    ],
)
def test_parts(stages, shares, num_items, parts):
    assert Swap(0, (0,), stages, shares).parts(num_items) == parts


def test_parts_add_up_and_keep_their_proportions():
    draw = np.random.default_rng(0)
    for number in range(300):
        num_stages = int(draw.integers(1, 6))
        stages = tuple(draw.permutation(8)[:num_stages].tolist())
        shares = tuple((10.0 ** draw.uniform(-3, 3, num_stages)).tolist()) if number % 3 else ()
        num_items = int(10 ** draw.uniform(0, 12))
        parts = Swap(0, (0,), stages, shares).parts(num_items)
        assert sum(items for _, items in parts) == num_items
        assert [stage for stage, _ in parts] == [s for s in stages if s in dict(parts)]
        assert all(items > 0 for _, items in parts)
        weights = shares or (1.0,) * num_stages
        for stage, share in zip(stages, weights, strict=True):
            exact = num_items * share / sum(weights)
            # Either end of it may be rounded.
            assert abs(dict(parts).get(stage, 0) - exact) <= 1 + 1e-9 * num_items
