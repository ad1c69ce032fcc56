"""A memory plan that is measured slower than recomputing everything is replaced within ten steps.

The seconds of steps are made up, by the plan in force; so no clock decides.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, Plan
from lightning_pipeshift.runtime.offload import stage_memory
from lightning_pipeshift.runtime.planning.delivered import Estimate
from lightning_pipeshift.runtime.planning.profiling import Profiler
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_memory_compression import SAMPLES, WIDTH, Trains
from tests.features_models import AwaitsPlanning, built, quiet_trainer

NUM_STEPS = 20


class Follows(L.Callback):
    """Notes the plan of each step, and makes up the seconds that it takes."""

    def __init__(self, moving: float, recomputing: float) -> None:
        self._seconds = {False: moving, True: recomputing}
        self.plans: list[Plan] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.plans.append(trainer.strategy.plan)

    def took(self) -> float:
        """The seconds of a step under the plan in force."""
        return self._seconds[recomputes(self.plans[-1])]


class Trained(NamedTuple):
    """The parameters, and the plan in force at the end of each step."""

    parameters: dict[str, Tensor]
    plans: list[str]


def recomputes(plan: Plan) -> bool:
    """Whether it recomputes all layers; the plans made at first move what they have no room for."""
    return all(len(again) == len(plan.layers) for again in plan.recompute or [()])


def train(budget: float | None, moving: float, recomputing: float, **how: Any) -> Trained:
    """One rank's part. The host is said to be so fast that whatever lacks room moves there."""
    L.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    batches: Any = [
        (
            torch.randn(SAMPLES, WIDTH, generator=generator),
            torch.randint(4, (SAMPLES,), generator=generator),
        )
        for _ in range(NUM_STEPS)
    ]
    model, follows = built(Trains), Follows(moving, recomputing)
    strategy = PipeShiftStrategy(microbatches=4, partition="uniform", **how)
    with (
        mock.patch.object(stage_memory.StageMemory, "_bandwidth", return_value=1e15),
        mock.patch.object(stage_memory, "copy_costs", return_value=(0.0, 0.0)),
        mock.patch.object(Profiler, "took", side_effect=lambda _: Estimate(follows.took())),
    ):
        trainer = quiet_trainer(
            {"devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy},
            max_epochs=1,
            callbacks=[follows, AwaitsPlanning()],
            plugins=[MemoryCompression(budget=budget)] if budget is not None else [],
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))
    return Trained(
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        [plan.to_json() for plan in follows.plans],
    )


BUDGET = {1: 2.2e6, 2: 1.6e6}
"""By ranks: what the weights take, and a part of what the layers save."""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_slower_plan_is_dropped_within_ten_steps_and_no_bit_changes(num_ranks: int) -> None:
    plain = run_ranks(train, num_ranks, None, 0.0, 0.0)
    found = run_ranks(train, num_ranks, BUDGET[num_ranks], 100.0, 50.0)
    for mine, before in zip(found, plain, strict=True):
        plans = [Plan.from_json(text) for text in mine.plans]
        assert any(plans[0].swaps)
        assert not recomputes(plans[0])
        assert recomputes(plans[9])
        assert all(plan.is_like(plans[9]) for plan in plans[9:])
        for name, value in before.parameters.items():
            assert torch.equal(mine.parameters[name], value), name
    assert found[0].plans == found[-1].plans


def test_the_plan_before_returns_if_recomputing_is_slower_still() -> None:
    plain = run_ranks(train, 1, None, 0.0, 0.0)[0]
    (found,) = run_ranks(train, 1, BUDGET[1], 100.0, 200.0)
    plans = [Plan.from_json(text) for text in found.plans]
    assert any(map(recomputes, plans))
    assert plans[-1].is_like(plans[0])
    assert sum(one.is_like(plans[0]) != two.is_like(plans[0]) for one, two in pairwise(plans)) == 2
    for name, value in plain.parameters.items():
        assert torch.equal(found.parameters[name], value), name


def test_a_plan_that_keeps_its_promise_stays() -> None:
    (found,) = run_ranks(train, 1, BUDGET[1], 1e-9, 50.0)
    plans = [Plan.from_json(text) for text in found.plans]
    assert all(plan.is_like(plans[0]) for plan in plans)
    assert any(plans[0].swaps)
