"""``core="values"`` trains the bits of plain Lightning with each of Lightning's features that
changes gradients, parameters or the loop, and with what users do to gradients and logs.

Plain Lightning accumulates as many batches as there are microbatches, and gets the microbatches as
its batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.training import QUIET
from tests.end_to_end.test_values import MICROBATCHES, WIDTH, WORDS, Base, batches

PARTS = "uniform"


class Tied(Base):
    """The head has the embedding's weight, and a loose parameter scales what goes between."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


class LeavesOut(Base):
    """Some microbatches have no loss: by their data, or by a value."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        return None if words[0, 0] % 3 == 0 or loss < 2.45 else loss


class Case(NamedTuple):
    """A run.

    Args:
        kind: of the model.
        every: how many batches make an update.
        options: of the Trainer.
        callbacks: makes the callbacks, given the number of microbatches.
        split: whether batches are split into microbatches.
    """

    kind: type[Base]
    every: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012
    callbacks: Callable[[int], list[Any]] = lambda _: []
    split: bool = True


CASES = {
    "accumulates": Case(Base, 2),
    "accumulates tied": Case(Tied, 2, {"gradient_clip_val": 0.1}),
    "accumulates where some have no loss": Case(LeavesOut, 2),
    "some have no loss": Case(LeavesOut),
}


class Found(NamedTuple):
    """What a run gave on a rank.

    Args:
        parameters: by name; buffers, too.
        metrics: the callback metrics.
        noted: what the module has noted.
    """

    parameters: dict[str, Tensor]
    metrics: dict[str, float]
    noted: list[Any]


def run_cases(strategy: dict[str, Any] | None, names: list[str]) -> list[Found]:
    """Trains models: plainly, or on the ranks of a job."""
    torch.set_num_threads(1)
    return [run_case(CASES[name], strategy) for name in names]


def run_case(case: Case, strategy: dict[str, Any] | None) -> Found:
    """Trains a model."""
    pl.seed_everything(7, verbose=False)
    module = case.kind()
    number = MICROBATCHES if case.split else 1
    factor, arguments = number, {}
    if strategy is not None:
        factor = 1
        ours = PipeShiftStrategy(core="values", microbatches=number, **strategy)
        arguments = {"strategy": ours, "devices": int(os.environ["WORLD_SIZE"])}
    if case.every > 1 or factor > 1:
        arguments["accumulate_grad_batches"] = case.every * factor
    callbacks = case.callbacks(factor)
    if any(isinstance(each, GradientAccumulationScheduler) for each in callbacks):
        del arguments["accumulate_grad_batches"]
    trainer = pl.Trainer(
        **{**QUIET, "max_epochs": 2, **case.options},
        accelerator="cpu",
        limit_val_batches=0,
        callbacks=callbacks,
        **arguments,
    )
    data: Any = batches(is_split=strategy is None and case.split)
    trainer.fit(module, DataLoader(data, batch_size=None))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Found(
        {name: x.detach().clone() for name, x in tensors.items()},
        {name: float(x) for name, x in trainer.callback_metrics.items()},
        module.noted,
    )


@lru_cache
def found_on(stages: int) -> list[list[Found]]:
    """All cases on all ranks, in one job; with 0 stages, in plain Lightning."""
    strategy = {"partition": PARTS} if stages else None
    return run_ranks(run_cases, max(stages, 1), strategy, list(CASES))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_plain_lightning(name: str, stages: int) -> None:
    at = list(CASES).index(name)
    ((expected,),) = [each[at : at + 1] for each in found_on(0)]
    for each in found_on(stages):
        found, others = each[at], expected.parameters
        assert found.parameters.keys() == others.keys()
        assert [n for n, x in found.parameters.items() if not torch.equal(x, others[n])] == []
        assert found.noted == expected.noted
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
