"""Steps of user code on several stages: the bits of a plain loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest

from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.values.models import (
    MODELS,
    Trained,
    copied_view,
    derivative,
    into_a_view,
    into_history,
    into_what_others_see,
    kept_behind,
    layer_inside,
    number_of_values,
    on_stages,
    other_draws,
    other_keywords,
    other_layers,
    other_modes,
    other_numbers,
    other_operations,
    other_shape,
    other_slices,
    other_tensors,
    plainly,
    refused,
    require_same,
    second_backward,
    shared_by_two,
    shared_with_others,
    stale,
    written_after,
    written_after_its_last_use,
)

# They draw random numbers: on one stage, too, these come from streams of each layer.
DRAW = ("Drops", "Recurrent")


CASES: dict[int, list[tuple[str, str, bool]]] = {
    2: [*((name, "1f1b", False) for name in MODELS), ("Reads", "gpipe", True)],
    3: [
        *((name, "1f1b", False) for name in MODELS),
        ("Skips", "gpipe", False),
        ("Model", "eager_1f1b", False),
        ("Reads", "1f1b", True),
        ("Recurrent", "1f1b", True),
    ],
}


@lru_cache
def trained(stages: int) -> list[list[Trained]]:
    """The cases of so many stages on all ranks, in one job: ranks take time to start."""
    return run_ranks(on_stages, stages, CASES[stages])


@lru_cache
def on_one_stage() -> dict[str, Trained]:
    """The models that draw, on one stage."""
    (found,) = run_ranks(on_stages, 1, [(name, "1f1b", False) for name in DRAW])
    return dict(zip(DRAW, found, strict=True))


@pytest.mark.parametrize(
    ("stages", "at"),
    [
        pytest.param(stages, at, id="-".join((str(stages), *map(str, case))))
        for stages, cases in CASES.items()
        for at, case in enumerate(cases)
    ],
)
def test_the_bits_of_a_plain_loop(stages: int, at: int) -> None:
    name, _, overlaps = CASES[stages][at]
    expected: Sequence[float | None]
    if name in DRAW:
        one = on_one_stage()[name]
        expected, parameters, noted = one.losses, one.held, one.noted
    else:
        expected, parameters, noted = plainly(name)
    ranks = [each[at] for each in trained(stages)]
    require_same(ranks, expected, parameters)
    if overlaps:
        # What a step does behind a read may happen later than another one's begin.
        assert all(sorted(rank.noted, key=str) == sorted(noted, key=str) for rank in ranks)
        assert any(rank.num_suspended for rank in ranks)
    else:
        assert all(rank.noted == noted for rank in ranks)
    if name == "Model":
        # One for each kind of layer, and those of the three operations behind them.
        assert max(rank.num_fake for rank in ranks) == 6


def failure_of(step: object) -> str:
    """What the ranks that failed by themselves said."""
    outcomes = run_ranks(refused, 2, step, grace=1, expect_failure=True)
    return "\n".join(outcome.message for outcome in outcomes if outcome.failed)


@pytest.mark.parametrize(
    "step",
    [
        other_operations,
        other_numbers,
        other_layers,
        other_keywords,
        other_slices,
        other_draws,
        other_tensors,
        other_modes,
    ],
)
def test_ranks_that_run_different_programs_are_told_both_lines(step: Callable[..., object]) -> None:
    said = failure_of(step)
    assert "run different programs" in said
    assert len(re.findall(r"models\.py:\d+\)", said)) == 2


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (into_a_view, "Write into a tensor of its own"),
        (into_what_others_see, "Write into a tensor of its own"),
        (into_history, "Write into a tensor of its own"),
        (stale, "operation that returns a new tensor"),
        (derivative, "inside of one layer"),
        (other_shape, "Write in place instead"),
        (written_after, "returns a new tensor"),
        (written_after_its_last_use, "returns a new tensor"),
        (shared_with_others, "x.data = y.clone()"),
        (kept_behind, "x.data = y.clone()"),
        (shared_by_two, "x.data = y.clone()"),
        (second_backward, "once for the sum of the losses"),
        (copied_view, "returns a new tensor"),
        (number_of_values, "have to be tensors"),
        (layer_inside, "Make the module that contains both one layer"),
    ],
)
def test_what_is_refused_is_told_with_advice(step: Callable[..., object], advice: str) -> None:
    assert advice in failure_of(step)
