"""Steps that branch on plain values: the epoch, the number of a step or batch, and counters, names
and switches of the LightningModule. The same bits on one, two and three stages.
"""

from __future__ import annotations

import os
import random
from enum import Enum
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import some
from tests.features_models import quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, points

WIDTH = 8
EPOCHS, BATCHES = 3, 4
SPLITS = {1: [5], 2: [2, 3], 3: [1, 2, 2]}


class Model(L.LightningModule):
    """With a second head, which some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, NUM_CLASSES)
        self.other = nn.Linear(WIDTH, NUM_FEATURES)
        self.count = 0
        self.validated = 0

    def hidden(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).relu()).relu()

    def loss(self, batch: Any, also: bool = False) -> Tensor:
        x, y = batch
        hidden = self.hidden(x)
        loss = F.cross_entropy(self.last(hidden), y)
        return loss + F.mse_loss(self.other(hidden), x) if also else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FromAnEpochOn(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.current_epoch >= 1)


class LateInTraining(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.trainer.current_epoch / EPOCHS > 0.5)


class EveryFewSteps(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.global_step % 3 == 2)


class InTurn(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, bool(batch_idx % 2))


class SwitchedByAHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.warms_up = True

    def on_train_epoch_start(self) -> None:
        self.warms_up = self.current_epoch < 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, not self.warms_up)


class Phase(Enum):
    FIRST = 1
    SECOND = 2


class HasPhases(Model):
    def __init__(self) -> None:
        super().__init__()
        self.phase, self.name = Phase.FIRST, "first"

    def on_train_epoch_end(self) -> None:
        self.phase, self.name = Phase.SECOND, "second"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, self.phase is Phase.SECOND)
        return loss if self.name in ("first", "none") else loss * 2


class CountsInFront(Model):
    """Each microbatch has its own number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return self.loss(batch, self.count % 3 == 0)


class CountsAtTheEnd(Model):
    """Wrong values, without a word: the first stages had the count of the batch's begin."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x * (1 + 0.1 * self.count) if self.count % 4 < 3 else x
        loss = self.loss((x * (1 + self.count / 10), y))
        self.count += 1
        return loss


class TurnsAround(Model):
    def __init__(self) -> None:
        super().__init__()
        self.is_odd = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, self.is_odd)
        self.is_odd = not self.is_odd
        return loss


class Unfreezes(Model):
    """As lightly's prototypes do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.second.requires_grad_(self.current_epoch > 0)
        return self.loss(batch)


class HandsTheEpochOn(Model):
    """A layer decides by it."""

    class Frozen(nn.Linear):
        def forward(self, input: Tensor, epoch: int = 0) -> Tensor:
            self.weight.requires_grad_(epoch > 0)
            return super().forward(input)

    def __init__(self) -> None:
        super().__init__()
        self.second = self.Frozen(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x), self.current_epoch).relu()).relu()


class KeepsTheBest(Model):
    """By values of the loss, which only the last stage has: no reason to follow a step again."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.mean, self.waits = 1e9, 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = loss.item()
        self.mean += 0.1 * (value - self.mean)
        if value < self.best:
            self.best, self.waits = value, 0
        else:
            self.waits += 1
        if self.waits > 2 or self.mean > 1.0:
            self.log("waits", float(self.waits))
        if self.current_epoch > 1:
            loss = loss * 0.5
        return loss


class Validates(Model):
    """Branches of validation, which has several batches in flight."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = self.loss((x * (1 + self.validated / 10), y), batch_idx == 2)
        if not self.trainer.sanity_checking:
            loss = loss + self.other(self.hidden(x)).square().mean()
        if self.trainer.is_last_batch:
            loss = loss * 2
        self.validated += 1
        self.log("validated", loss)


MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        FromAnEpochOn,
        LateInTraining,
        EveryFewSteps,
        InTurn,
        SwitchedByAHook,
        HasPhases,
        CountsInFront,
        CountsAtTheEnd,
        TurnsAround,
        Unfreezes,
        HandsTheEpochOn,
        KeepsTheBest,
        Validates,
    )
}


def built(name: str) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return (MODELS | OTHERS)[name]()


def trained(name: str, strategy: dict[str, Any]) -> dict[str, Tensor]:
    """All values at the end."""
    module = built(name)
    how = {"devices": int(os.environ["WORLD_SIZE"]), "pipeshift": strategy}
    trainer = quiet_trainer(how, max_epochs=EPOCHS, num_sanity_val_steps=2)
    trainer.fit(module, points(BATCHES), points(3, seed=4))
    values = {name: value.clone() for name, value in module.state_dict().items()}
    values["validated"] = trainer.callback_metrics["validated"]
    return values


def all_trained(num_stages: int, names: list[str], how: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        try:
            found.append(trained(name, {"partition": SPLITS[num_stages], **how}))
        except LayerError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_branches_of_steps(num_microbatches: int) -> None:
    names, how = list(MODELS), {"microbatches": num_microbatches}
    if num_microbatches == 1:
        names = some(names, 12)
    (alone,) = run_ranks(all_trained, 1, 1, names, how)
    for num_stages in (2, 3):
        for rank in run_ranks(all_trained, num_stages, num_stages, names, how, timeout=300.0):
            for name, expected, found in zip(names, alone, rank, strict=True):
                assert not isinstance(found, str), (name, found)
                for key, value in expected.items():
                    assert torch.equal(value, found[key]), (name, num_stages, key)


class CountsByTheIndex(CountsAtTheEnd):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count = self.current_epoch * BATCHES + batch_idx
        return super().training_step(batch, batch_idx)


def test_an_asynchronous_schedule_counts_on_all_stages() -> None:
    """Stages shared what code behind their layers keeps only when the pipeline was empty."""
    how = {"microbatches": 1, "schedule": "async"}
    names = ["CountsAtTheEnd", "CountsByTheIndex", "CountsInFront", "TurnsAround", "EveryFewSteps"]
    for rank in run_ranks(all_trained, 3, 3, names, how):
        assert not any(isinstance(found, str) for found in rank), rank
        counted, computed, *_ = rank
        for key, value in counted.items():
            assert torch.equal(value, computed[key]), key


class ScalesByItsLosses(Model):
    """The first stage needs the loss of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss((x * (1 + self.total), y))
        self.total += loss.item()
        return loss


class KeepsItsLosses(Model):
    """In a list, which it uses in front of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.unused: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss((x * (1 + len(self.losses)), y))
        self.losses.append(loss.item())
        self.unused.append(loss.item())
        return loss


class Meter:
    """A running mean."""

    def __init__(self) -> None:
        self.total, self.count, self.largest = 0.0, 0, list[float]()

    @property
    def average(self) -> float:
        return self.total / max(1, self.count)

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.largest = sorted([*self.largest, value])[-3:]


class ScalesByItsMeter(Model):
    """The object of another class changes on the last stage, and is used on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x * (1 + self.meter.average + sum(self.meter.largest))
        loss = self.loss((x, y))
        self.meter.update(loss.item())
        return loss


class DrawsAtBothEnds(Model):
    """From one generator in front of the layers and behind them, as in a mixing of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.draw, self.numbers = random.Random(1), np.random.default_rng(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss((x * self.draw.random() + float(self.numbers.random()), y))
        return loss * self.draw.random() + float(self.numbers.random())


OTHERS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        CountsByTheIndex,
        ScalesByItsLosses,
        KeepsItsLosses,
        ScalesByItsMeter,
        DrawsAtBothEnds,
    )
}


@pytest.mark.parametrize("how", [{"microbatches": 2}, {"microbatches": 1, "schedule": "async"}])
def test_what_the_last_stage_computes_is_there_in_front_of_all_layers(how: dict[str, Any]) -> None:
    together, other = run_ranks(trained, 2, "ScalesByItsLosses", how)
    # An asynchronous schedule has other weights on each split.
    alone = other if "schedule" in how else run_ranks(trained, 1, "ScalesByItsLosses", how)[0]
    for key, value in alone.items():
        assert torch.equal(value, together[key]), key


def test_an_object_that_the_last_stage_changes_is_the_same_on_all_stages() -> None:
    """Other stages kept it as it was, and computed with that."""
    names, how = ["ScalesByItsMeter", "DrawsAtBothEnds"], {"microbatches": 1}
    (alone,) = run_ranks(all_trained, 1, 1, names, how)
    for num_stages in (2, 3):
        for rank in run_ranks(all_trained, num_stages, num_stages, names, how):
            for name, expected, values in zip(names, alone, rank, strict=True):
                for key, value in expected.items():
                    assert torch.equal(value, values[key]), (name, num_stages, key)


def kept(names: list[str], how: dict[str, Any]) -> list[Any]:
    """What the modules have in the end."""
    found = []
    for name in names:
        module = built(name)
        shape = {"devices": int(os.environ["WORLD_SIZE"]), "pipeshift": how}
        trainer = quiet_trainer(shape, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(module, points(BATCHES))
        meter = getattr(module, "meter", None)
        found.append([getattr(module, "losses", None), vars(meter) if meter else None])
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_what_the_last_stage_keeps_is_on_all_stages(schedule: str) -> None:
    """Of an asynchronous pipeline they had the last minibatch's only."""
    how = {"microbatches": 1, "schedule": schedule}
    first, last = run_ranks(kept, 2, ["KeepsItsLosses", "ScalesByItsMeter"], how)
    assert first == last
    (losses, _), (_, meter) = last
    assert len(losses) == meter["count"] == BATCHES


class BranchesOnItsRank(Model):
    """Attributes of one rank only, by which no step branches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero and self.global_step % 3 == 1:
            self.name = "pictures"
        if self.global_rank == 1 and batch_idx == 2:
            self.name = "numbers"
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 1:
            self.name = "pictures"
        super().validation_step(batch, batch_idx)


OTHERS["BranchesOnItsRank"] = BranchesOnItsRank


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_ranks_may_have_other_attributes(schedule: str) -> None:
    how = {"microbatches": 1, "schedule": schedule}
    for rank in run_ranks(all_trained, 3, 3, ["BranchesOnItsRank"], how, timeout=100.0):
        assert not isinstance(rank[0], str), rank
