"""What really lives on a device under a budget: never more than that, and no bit changes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.runtime.offload import stage_memory
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_memory_compression import SAMPLES, WIDTH, Trains
from tests.features_models import built, quiet_trainer
from tests.living_bytes import LivingBytes


class Wide(L.LightningModule):
    """Takes little memory for weights, and much for payloads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MODELS: dict[str, tuple[type[L.LightningModule], int]] = {
    "blocks": (Trains, SAMPLES),
    "wide": (Wide, 32 * SAMPLES),
}


class Batches(Dataset[Any]):
    """Makes each batch when it is asked for: no device holds a data set."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        if number >= len(self):
            raise IndexError
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.rows, WIDTH, generator=generator)
        return x, torch.randint(4, (self.rows,), generator=generator)


@contextmanager
def fast_host() -> Iterator[None]:
    """Copies to the host are said to take no time: by measured ones, the least budget that has a
    plan depends on what else the machine does.
    """
    with (
        mock.patch.object(stage_memory.StageMemory, "_bandwidth", return_value=1e15),
        mock.patch.object(stage_memory, "copy_costs", return_value=(0.0, 0.0)),
    ):
        yield


def train(name: str, budgets: list[float]) -> list[tuple[dict[str, Any], list[int]]]:
    """For each budget in bytes: the weights, and the peaks of the steps."""
    results: list[tuple[dict[str, Any], list[int]]] = []
    kind, rows = MODELS[name]
    num_stages = int(os.environ["WORLD_SIZE"])
    for budget in budgets:
        model, living = built(kind), LivingBytes()
        trainer = quiet_trainer(
            {
                "devices": num_stages,
                "strategy": PipeShiftStrategy(
                    microbatches=2 * num_stages, partition="uniform", profile_steps=0
                ),
            },
            max_epochs=1,
            callbacks=[living],
            plugins=[MemoryCompression(budget=budget, host_budget=1e9)],
        )
        with fast_host() if name == "wide" else nullcontext():
            trainer.fit(model, DataLoader(Batches(rows), batch_size=None))
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        results.append((state, living.peaks))
    return results


@pytest.mark.parametrize(
    ("name", "num_stages", "parts"),
    [("blocks", 1, (0.9, 0.75)), ("blocks", 2, (0.85, 0.7)), ("wide", 2, (0.9, 0.81))],
)
def test_what_lives_is_within_the_budget(
    name: str, num_stages: int, parts: tuple[float, ...]
) -> None:
    free = [stage[0] for stage in run_ranks(train, num_stages, name, [1e9])]
    need = max(max(peaks[1:]) for _, peaks in free)
    budgets = [part * need for part in parts]
    results = run_ranks(train, num_stages, name, budgets)
    for (plain, _), found in zip(free, results, strict=True):
        for (state, peaks), budget in zip(found, budgets, strict=True):
            assert all(torch.equal(state[name], value) for name, value in plain.items())
            # In the first step the bandwidth to the host is measured, with tensors of its own.
            assert max(peaks[1:]) <= budget, (peaks, budget)
    for budget, found in zip(budgets, zip(*results, strict=True), strict=True):
        # The memory is used, and not held back.
        assert max(max(peaks[1:]) for _, peaks in found) == pytest.approx(budget, rel=0.25)


WORDS, ROWS = 4000, 16


class Words(nn.Linear):
    """With a large buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)
        self.register_buffer("mask", torch.zeros(50, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mask[0]


class OfManyWords(Trains):
    """What the loss and its backward take is more than what the layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def training_step(self, batch: Any) -> Tensor:
        hidden, _ = batch
        hidden = hidden * 2
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.words(hidden)
        return F.cross_entropy(logits, hidden[:, 0].long().clamp(0, WORDS - 1))


class Tied(OfManyWords):
    """With layers that share weights, and some that code between layers uses."""

    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.words.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(500, WIDTH))
        self.register_buffer("numbers", torch.zeros(500, WIDTH))

    def training_step(self, batch: Any) -> Tensor:
        tokens = batch[0][:, 0].long().abs().clamp(0, WORDS - 1)
        hidden = self.embed(tokens) + self.shift[0] + self.numbers[0]
        return super().training_step((hidden, None))


def around_layers(
    num_ranks: int, kind: type[L.LightningModule] = OfManyWords, profile_steps: int = 3
) -> tuple[dict[int, int], tuple[float, ...], int]:
    """What code around this rank's layers takes, the predictions of the peaks, and its own one."""
    batches = [(torch.randn(2 * ROWS, WIDTH), torch.zeros(2 * ROWS)) for _ in range(8)]
    model, living = built(kind), LivingBytes()
    strategy = PipeShiftStrategy(microbatches=2, partition="uniform", profile_steps=profile_steps)
    trainer = quiet_trainer(
        {"devices": num_ranks, "strategy": strategy},
        max_epochs=1,
        callbacks=[living],
        plugins=[MemoryCompression(budget=1e9, host_budget=0)],
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    planning = strategy.pipeline.planning
    measured = planning.measured
    predicted = measured.prediction(strategy.plan).memory_bytes[0] if measured else ()
    return planning.profiler.observer.of_code, predicted, max(living.peaks[1:])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_code_around_layers_counts(num_ranks: int) -> None:
    found = run_ranks(around_layers, num_ranks, num_ranks)
    assert [peak for *_, peak in found] == pytest.approx(found[0][1], rel=0.1)
    # The gradients of the logarithms of the probabilities, and of the logits that they are of.
    gradients = 2 * ROWS * WORDS * 4
    assert gradients <= max(found[-1][0].values()) <= 1.02 * gradients
    if num_ranks > 1:
        # In front of the first layer: the batch times 2, and its gradient.
        assert max(found[0][0].values()) <= 2 * ROWS * WIDTH * 4


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", [OfManyWords, Tied])
def test_the_first_plan_counts_code_around_layers_and_shared_weights(
    kind: type[L.LightningModule], num_ranks: int
) -> None:
    found = run_ranks(around_layers, num_ranks, num_ranks, kind, 100)
    for (*_, peak), predicted in zip(found, found[0][1], strict=True):
        # With what is reserved for messages under way.
        assert peak / 1.02 <= predicted <= 1.12 * peak


class CountsTensors(L.Callback):
    """The number of tensors that Python knows at the end of each step, without the garbage
    collector.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        gc.collect()
        gc.disable()

    def on_train_end(self, *_: Any) -> None:
        gc.enable()

    def on_train_batch_end(self, *_: Any) -> None:
        # `isinstance` would ask proxies, too.
        self.numbers.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))


def counting(how: dict[str, Any], budget: float | None, profile_steps: int) -> list[int]:
    batches = [(torch.randn(2 * ROWS, WIDTH), torch.zeros(2 * ROWS)) for _ in range(9)]
    counts = CountsTensors()
    strategy = PipeShiftStrategy(
        **{"microbatches": 2, "partition": "uniform", "profile_steps": profile_steps, **how}
    )
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy},
        max_epochs=1,
        callbacks=[counts],
        plugins=[MemoryCompression(budget=budget, host_budget=1e9)] if budget else [],
    )
    trainer.fit(built(Tied), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return counts.numbers


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "budget", "profile_steps"),
    [
        ({}, None, 0),
        ({"recompute": "full"}, None, 0),
        ({"recompute": "full", "schedule": "gpipe"}, None, 100),
        ({}, 0.9, 100),
    ],
)
def test_nothing_waits_for_the_garbage_collector(
    how: dict[str, Any], budget: float | None, profile_steps: int, num_ranks: int
) -> None:
    if budget is not None:
        # That of what is needed without it.
        budget *= max(run_ranks(around_layers, num_ranks, num_ranks, Tied, 100)[0][1])
    for numbers in run_ranks(counting, num_ranks, how, budget, profile_steps):
        # A message under way may be one more; what is kept makes every step's number larger.
        assert any(after <= before for before, after in pairwise(numbers[4:])), numbers
