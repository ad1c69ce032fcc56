"""Asynchronous schedules on either core: the bits of a plain loop with delayed weights."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_asynchronous import Case, Result, reference, require_same, train

CORES = ["trace", "values"]
CASES = {
    2: [
        Case([4, 2], num_batches=11),
        Case([2, 4], "async", 3, optimizer="adam", validates=5, num_batches=11),
        Case([3, 3], "async-2bw", 2, optimizer="adam", validates=4, num_batches=11),
        Case([3, 3], "async", 2, optimizer="clipped", num_batches=11, shares=True),
    ],
    3: [
        Case([1, 3, 2], optimizer="adam", validates=5, num_batches=11),
        Case([2, 0, 4], "async", 2, num_batches=11),
        Case([2, 2, 2], "async-2bw", 3, num_batches=11, shares=True),
        Case([3, 2, 1], "async", optimizer="adam", num_batches=11, shares=True),
    ],
    4: [
        Case([[3, 3], [3, 3]], num_batches=12, optimizer="adam"),
        Case([[4, 2], [4, 2]], "async", 2, num_batches=12, validates=4, shares=True),
        Case([[2, 4], [4, 2]], "async-2bw", 2, optimizer="adam", num_batches=12),
        Case([[2, 2, 2], [6]], "async-2bw", 3, optimizer="adam", num_batches=12),
    ],
}


def train_all(core: str, cases: Sequence[Case]) -> list[Result]:
    os.environ["PIPESHIFT_CORE"] = core
    return [train(case) for case in cases]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_bits_of_the_reference(num_ranks: int, core: str) -> None:
    """Validation in the middle of an epoch, stages without layers, shared parameters, and several
    virtual machines too.
    """
    cases = CASES[num_ranks]
    for case, *ranks in zip(cases, *run_ranks(train_all, num_ranks, core, cases), strict=True):
        layers = reference(case).layers
        for result in ranks:
            require_same(result.state, [one.layer for one in layers] if case.shares else layers)
            if case.shares:
                assert torch.equal(result.state["shift"], layers[0].shift)


@pytest.mark.parametrize("core", CORES)
def test_two_versions_have_the_same_bits_on_every_split(core: str) -> None:
    """Dropout, running statistics, a metric, and validation in the middle of an update."""
    whole = Case([6], "async-2bw", 3, {}, "adam", 7, draws=True, num_batches=11)
    ((expected,),) = run_ranks(train_all, 1, core, [whole])
    for split in ([2, 4], [3, 1, 2]):
        for (result,) in run_ranks(train_all, len(split), core, [whole._replace(split=split)]):
            for name, value in expected.state.items():
                assert torch.equal(result.state[name], value), name
            assert result.metrics == expected.metrics
            assert result.steps == expected.steps
