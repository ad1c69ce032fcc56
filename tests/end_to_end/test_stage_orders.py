"""A run chooses which rank is which stage, and that changes nothing that is computed."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_changing_plans import SLOW, Sleeps, go_by_sleep, hearing
from tests.features_models import (
    AwaitsPlanning,
    built,
    differences,
    parameters_of,
    quiet_trainer,
)
from tests.models import NUM_FEATURES, points

FIRST_IS_SLOW, LAST_IS_SLOW = 0, 1


class Heavy(nn.Module):
    """A layer that takes several times as long as a light one."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        # Layers that look alike are tried once.
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=times > 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        x = self.dropout(self.linear(x))
        for _ in range(self.times):
            x = Sleeps.apply(x)
        return x


class TailHeavy(L.LightningModule):
    """Half of the work is in the last layer, so no cut suits a last device of half the speed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heavy(times) for times in (1, 1, 1, 1, 8))

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        for layer in self.layers:
            x = layer(x)
        self.log("loss", x.square().mean())
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class GetsSlow(L.Callback):
    """A rank takes twice the time from the second step on: nobody could have known."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, *_: Any) -> None:
        if os.environ["RANK"] == str(self.rank):
            SLOW["factor"] = 2.0


def train(slow: int, from_the_start: bool, how: dict[str, Any]) -> dict[str, Any]:
    """Trains on devices of which one is slow. All times are of a clock that tests turn."""
    L.seed_everything(7, verbose=False)
    SLOW["factor"] = 2.0 if from_the_start and os.environ["RANK"] == str(slow) else 1.0
    go_by_sleep()
    module = built(TailHeavy)
    callbacks: list[L.Callback] = [AwaitsPlanning()]
    if not from_the_start:
        callbacks.append(GetsSlow(slow))
    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy = {"microbatches": 4, "profile_steps": 3, **how}
    trainer = quiet_trainer(
        {"devices": num_ranks, "pipeshift": strategy}, callbacks=callbacks, max_epochs=1
    )
    with hearing() as heard:
        trainer.fit(module, DataLoader(points(22).dataset, batch_size=8))
    found: Any = trainer.strategy
    return {
        "ranks": found.plan.ranks,
        "counts": found.plan.placement.counts,
        "stage": found.stage,
        "loss": float(trainer.callback_metrics["loss"]),
        "heard": heard,
        "parameters": parameters_of(module),
    }


def require_equal(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(ones, others, strict=True):
        for key in ("parameters", "loss"):
            assert not differences(one[key], other[key], 0, 0), key


def test_the_first_plan_has_the_best_order() -> None:
    own = run_ranks(train, 2, LAST_IS_SLOW, True, {"profile_steps": 0})
    assert own[0]["ranks"] == ((1, 0),)
    assert own[0]["counts"] == ((4, 1),)
    assert [rank["stage"] for rank in own] == [1, 0]
    assert any("the stages are the ranks [1, 0]" in line for line in own[0]["heard"])
    given = run_ranks(train, 2, LAST_IS_SLOW, True, {"virtual_machines": [[0, 1]]})
    assert given[0]["ranks"] == ((0, 1),), "an order of one's own stays"
    require_equal(own, given)


def test_an_order_that_is_best_stays() -> None:
    own = run_ranks(train, 2, FIRST_IS_SLOW, True, {})
    assert own[0]["ranks"] == ((0, 1),)
    assert own[0]["counts"] == ((4, 1),)


def test_ranks_change_places_when_the_first_steps_have_been_measured() -> None:
    own = run_ranks(train, 2, LAST_IS_SLOW, False, {})
    assert own[0]["ranks"] == ((1, 0),)
    assert own[0]["counts"] == ((4, 1),)
    (line,) = (line for line in own[0]["heard"] if "change their owners" in line)
    assert "on the ranks [0, 1] becomes [4, 1] on the ranks [1, 0]" in line
    given = run_ranks(train, 2, LAST_IS_SLOW, False, {"virtual_machines": [[0, 1]]})
    assert given[0]["ranks"] == ((0, 1),)
    require_equal(own, given)


def test_each_virtual_machine_has_an_order_of_its_own() -> None:
    own = run_ranks(train, 4, LAST_IS_SLOW, True, {"virtual_machines": 2})
    assert own[0]["ranks"] == ((1, 0), (2, 3))
    given = run_ranks(train, 4, LAST_IS_SLOW, True, {"virtual_machines": [[0, 1], [2, 3]]})
    require_equal(own, given)
