import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.step.checksum import checksum, is_checked, require_same_batch
from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.runtime.stages import connect


@dataclass
class Pair:
    x: Any
    y: Any


X = torch.arange(6.0)


@pytest.mark.parametrize(
    "other",
    [
        {"x": X + 1e-6 * (torch.arange(6) == 5), "y": ["a"], "z": 1},
        {"x": X.view(2, 3), "y": ["a"], "z": 1},
        {"x": X.flip(0), "y": ["a"], "z": 1},
        {"x": X.int(), "y": ["a"], "z": 1},
        {"x": X.double(), "y": ["a"], "z": 1},
        {"x": X[:5], "y": ["a"], "z": 1},
        {"x": X, "y": ["b"], "z": 1},
        {"x": X, "y": ["a"], "z": 2},
        {"x": X, "y": ["a"], "z": 1.0},
        {"x": X, "y": ["a"], "z": True},
        {"x": X, "y": ["a", "a"], "z": 1},
        {"x": X, "y": [None], "z": 1},
        {"x": X, "y": ["a"], "z": b"1"},
    ],
)
def test_what_makes_a_difference(other: Any) -> None:
    assert checksum({"x": X, "y": ["a"], "z": 1}) != checksum(other)


def test_every_bit_counts() -> None:
    for position in range(6):
        changed = X.clone()
        changed.view(torch.int32)[position] ^= 1
        assert checksum([X]) != checksum([changed])
    negative_zero = torch.tensor([-0.0])
    assert checksum(negative_zero) != checksum(torch.tensor([0.0]))
    assert checksum(torch.tensor(float("nan"))) == checksum(torch.tensor(float("nan")))


def test_what_makes_none() -> None:
    noncontiguous = torch.stack([X, X], dim=1)[:, 0]
    assert checksum(X) == checksum(noncontiguous) == checksum(X.clone().requires_grad_())
    assert checksum(Pair(X, 1)) == checksum(Pair(X.clone(), 1))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(True),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(2.5),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors_of_every_kind(tensor: torch.Tensor) -> None:
    assert checksum([tensor]) == checksum([tensor.clone()]) != checksum([X])


def test_order_counts() -> None:
    batches = [list(order) for order in itertools.permutations([X, X + 1, "a", 2])]
    assert len({checksum(batch) for batch in batches}) == len(batches)


def test_the_first_batches_are_checked_and_later_ones_now_and_then() -> None:
    assert [i for i in range(301) if is_checked(i)] == [0, 1, 100, 200, 300]


def compare(odd: int | None) -> str:
    channels, _ = connect()
    batch = X + 1 if channels.stage == odd else X
    try:
        require_same_batch({"x": batch}, 7, channels)
    except BatchError as error:
        return str(error)
    return "same"


def test_stages_that_see_the_same() -> None:
    assert run_ranks(compare, 3, None) == ["same"] * 3


@pytest.mark.parametrize(("odd", "named"), [(2, "stage 2 got"), (0, "stage 1, 2 got")])
def test_stages_that_see_different_batches(odd: int, named: str) -> None:
    for message in run_ranks(compare, 3, odd):
        assert "different batches: at batch 7" in message
        assert named in message
        assert "sampler" in message
