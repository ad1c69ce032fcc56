"""What a call gives, found on tensors without data."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_pipeshift.values.contract_finder import ContractFinder


def test_an_operation_that_fake_tensors_refuse_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        # Fake tensors take it for bfloat16 only, and log a trace for each call.
        args = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
        finder = ContractFinder(torch.device("cpu"))
        contract = finder.find(lambda x, w, ends: functional.grouped_mm(x, w, offs=ends), args, {})
    finally:
        log.removeHandler(caplog.handler)
    assert contract is not None
    assert contract.specs[0].shape == (6, 4)
    assert not caplog.records


def dropped_by_user(x: Tensor) -> Tensor:
    return x


@torch.library.custom_op("pipeshift_tests::drop", mutates_args=())
def drop(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.5)


@drop.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def distance(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).norm(dim=-1)


@pytest.mark.parametrize(
    ("function", "others", "draws"),
    [
        (Tensor.mul, (2.0,), False),
        (torch.add, (1,), False),
        (Tensor.T.__get__, (), False),  # type: ignore[attr-defined]
        (functional.layer_norm, ((4,),), False),
        (functional.dropout, (0.3, False), False),
        (functional.dropout, (0.3, True), True),
        (torch.dropout, (0.3, True), True),
        (torch.rand_like, (), True),
        (Tensor.bernoulli_, (), True),
        (functional.gumbel_softmax, (), True),
        # What user code does on other values no one knows.
        (dropped_by_user, (), True),
        (drop, (), True),
        (torch.ops.pipeshift_tests.drop, (), True),
        (torch.ops.pipeshift_tests.drop.default, (), True),
        (torch.ops.aten.mul.Tensor, (2.0,), False),
    ],
)
def test_whether_an_operation_draws(function: Any, others: tuple[Any, ...], draws: bool) -> None:
    finder = ContractFinder(torch.device("cpu"))
    contract = finder.find(function, (torch.rand(3, 4), *others), {})
    assert contract is not None
    assert contract.draws is draws


def test_a_function_that_gets_a_users_function_may_draw() -> None:
    finder, x = ContractFinder(torch.device("cpu")), torch.rand(3, 4)
    for options, draws in (({}, False), ({"distance_function": distance}, True)):
        contract = finder.find(
            functional.triplet_margin_with_distance_loss, (x, x, x), dict(options)
        )
        assert contract is not None
        assert contract.draws is draws
