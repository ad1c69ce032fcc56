"""Steps of user code on several stages: the bits of a plain loop."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.values.models import (
    MODELS,
    derivative,
    into_a_view,
    into_what_others_see,
    layer_inside,
    on_stages,
    one_more_read,
    other_layers,
    other_numbers,
    other_operations,
    plainly,
    refused,
    stale,
)

# They draw random numbers: on one stage, too, these come from streams of each layer.
DRAW = {"Drops", "Recurrent"}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_bits_of_a_plain_loop(name: str, stages: int) -> None:
    if name in DRAW:
        ((expected, parameters, noted, _),) = run_ranks(on_stages, 1, name)
    else:
        expected, parameters, noted = plainly(name)
    ranks = run_ranks(on_stages, stages, name)
    losses = [
        next(loss for loss in each if loss is not None)
        for each in zip(*(losses for losses, *_ in ranks), strict=True)
    ]
    assert losses == expected
    held = {name: each for _, held, *_ in ranks for name, each in held.items()}
    assert held.keys() == parameters.keys()
    assert [name for name, each in held.items() if not torch.equal(each, parameters[name])] == []
    assert all(each == noted for _, _, each, _ in ranks)
    if name == "Model":
        # One for each kind of layer, and those of the operations between them and behind them.
        assert max(runs for *_, runs in ranks) == 6


def failure_of(step: object) -> str:
    """What the ranks that failed by themselves said."""
    outcomes = run_ranks(refused, 2, step, grace=1, expect_failure=True)
    return "\n".join(outcome.message for outcome in outcomes if outcome.failed)


@pytest.mark.parametrize("step", [other_operations, other_numbers, other_layers, one_more_read])
def test_ranks_that_run_different_programs_are_told_both_lines(step: Callable[..., object]) -> None:
    said = failure_of(step)
    assert "run different programs" in said
    assert len(re.findall(r"models\.py:\d+\)", said)) == 2


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (into_a_view, "Write into a tensor of its own"),
        (into_what_others_see, "Write into a tensor of its own"),
        (stale, "operation that returns a new tensor"),
        (derivative, "inside of one layer"),
        (layer_inside, "Make the module that contains both one layer"),
    ],
)
def test_what_is_refused_is_told_with_advice(step: Callable[..., object], advice: str) -> None:
    assert advice in failure_of(step)
