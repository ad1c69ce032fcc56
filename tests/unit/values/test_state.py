"""Layers that keep, share and change things, and steps that use gradients: as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest

from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.values.models import Trained, plainly, require_same
from tests.unit.values.state_models import (
    NAMES,
    early_gradient,
    hidden_change,
    hidden_flag,
    hidden_item,
    hidden_write,
    on_stages,
    other_layout,
    refused,
    written_by_a_hook,
)


@lru_cache
def trained(stages: int) -> list[list[Trained]]:
    """All models on all ranks, in one job: ranks take time to start."""
    cases = [(name, "1f1b", False) for name in NAMES]
    return run_ranks(on_stages, stages, cases, timeout=600)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_a_plain_loop(stages: int, name: str) -> None:
    at = NAMES.index(name)
    expected: Sequence[float | None]
    if name == "SetsDropout":
        # It draws, from streams of each layer.
        one = trained(1)[0][at]
        expected, parameters, noted = one.losses, one.held, one.noted
    else:
        expected, parameters, noted = plainly(name)
    ranks = [each[at] for each in trained(stages)]
    require_same(ranks, expected, parameters)
    assert all(rank.noted == noted for rank in ranks)


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (hidden_change, "assign the attribute in every call"),
        (hidden_write, "Do it in every call"),
        (hidden_item, "Do it in every call"),
        (hidden_flag, "other `requires_grad` or `training`"),
        (other_layout, "contiguous()"),
        (early_gradient, "on_before_optimizer_step"),
        (written_by_a_hook, "may only look"),
    ],
)
def test_what_is_refused_is_told_with_advice(step: Callable[..., object], advice: str) -> None:
    outcomes = run_ranks(refused, 2, step, grace=1, expect_failure=True)
    assert advice in "\n".join(outcome.message for outcome in outcomes if outcome.failed)
