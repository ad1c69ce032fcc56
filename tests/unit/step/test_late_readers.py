"""Whether a stage may read a value of another one by itself does not depend on which is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.plan.schedule.schedules import forward_only
from lightning_pipeshift.runtime.comm.offers import KEPT_RUNS
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.values.core import Core
from tests.unit.step.together import StageError, Stages, is_refusal

NUM_AHEAD, NUM_RUNS = 4, 6
SMALL, LARGE = 10, 5000
Step = Callable[[list[Tensor], int, Tensor], Any]
"""What a stage does in a run: ``(the values of all runs so far, the stage, x) -> what it read``."""


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 2.0)


def run(step: Step, size: int, order: int) -> list[Any]:
    """What the second stage reads, in each run; the first one owns all values."""
    stages = Stages(2, order, yields=0.5)
    modules = [Scales(), Scales()]
    cores = [
        Core(module, [module.layer], lambda _, __: 0, stages.mailboxes[at], torch.device("cpu"))
        for at, module in enumerate(modules)
    ]

    def work(stage: int) -> list[Any]:
        engine, found, values = Engine(cores[stage]), list[Any](), list[Tensor]()
        for number in range(NUM_RUNS):
            stages.begin(stage, NUM_AHEAD)

            def body(batch: Tensor, _: int) -> None:
                values.append(modules[stage].layer(batch))
                found.append(step(values, stage, values[-1]))

            batch = torch.full((size, 1), float(number))
            (row, _) = forward_only(2, 1)
            engine.run(number, [batch], body, row, num_ahead=NUM_AHEAD)
        return found

    return stages.run_on(cores, work)[1]


def outcomes(step: Step, size: int = SMALL) -> list[Any]:
    """What different orders of events give: a list of numbers, or ``None`` for a refusal."""
    found: list[Any] = []
    for order in range(12):
        try:
            outcome = run(step, size, order)
        except StageError as error:
            if not is_refusal(error.cause):
                raise
            outcome = None
        if outcome not in found:
            found.append(outcome)
    return found


def read(value: Tensor) -> float:
    found: float = value.tolist()[0][0]
    return found


@pytest.mark.parametrize("age", range(KEPT_RUNS + 3))
def test_small_values_are_kept_for_so_many_runs(age: int) -> None:
    def step(values: list[Tensor], stage: int, _: Tensor) -> Any:
        return read(values[-1 - age]) if stage == 1 and len(values) > age else None

    served = [None] * age + [2.0 * number for number in range(NUM_RUNS - age)]
    assert outcomes(step) == [served if age <= KEPT_RUNS else None]


def test_a_value_is_read_as_it_was_before_a_write() -> None:
    def step(values: list[Tensor], stage: int, x: Tensor) -> Any:
        with torch.no_grad():
            found = read(x) if stage == 1 else None
            x.add_(1)
            return found

    assert outcomes(step) == [[2.0 * number for number in range(NUM_RUNS)]]


@pytest.mark.parametrize(("reads_before", "is_served"), [(True, True), (False, False)])
def test_a_large_value_is_read_if_its_owner_has_read_it(
    reads_before: bool, is_served: bool
) -> None:
    def step(values: list[Tensor], stage: int, x: Tensor) -> Any:
        return read(x) if stage == 1 or reads_before else None

    served = [2.0 * number for number in range(NUM_RUNS)]
    assert outcomes(step, LARGE) == [served if is_served else None]


def test_a_read_of_the_owner_in_another_run_does_not_count() -> None:
    def step(values: list[Tensor], stage: int, x: Tensor) -> Any:
        if stage == 0:
            return read(x)
        return read(values[-2]) if len(values) > 1 else None

    assert outcomes(step, LARGE) == [None]


def test_all_stages_may_read_a_value_however_old() -> None:
    def step(values: list[Tensor], stage: int, x: Tensor) -> Any:
        return read(values[0])

    assert outcomes(step, LARGE) == [[0.0] * NUM_RUNS]
