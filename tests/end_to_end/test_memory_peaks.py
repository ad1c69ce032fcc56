"""What really lives on a device under a budget: never more than that, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_memory_compression import SAMPLES, WIDTH, Trains
from tests.features_models import built, quiet_trainer
from tests.living_bytes import LivingBytes


def train(budgets: list[float | None]) -> list[tuple[dict[str, Any], list[int], float]]:
    """For each budget, or part of what the first run has taken: the weights, the peaks of the
    steps, and the budget in bytes.
    """
    results: list[tuple[dict[str, Any], list[int], float]] = []
    for part in budgets:
        generator = torch.Generator().manual_seed(1)
        batches: Any = [
            (
                torch.randn(SAMPLES, WIDTH, generator=generator),
                torch.randint(4, (SAMPLES,), generator=generator),
            )
            for _ in range(6)
        ]
        budget = 1e9 if part is None else part * max(results[0][1][1:])
        model, living = built(Trains), LivingBytes()
        trainer = quiet_trainer(
            {
                "devices": 1,
                "strategy": PipeShiftStrategy(microbatches=2, profile_steps=0),
            },
            max_epochs=1,
            callbacks=[living],
            plugins=[MemoryCompression(budget=budget, host_budget=1e9)],
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        results.append((state, living.peaks, budget))
    return results


def test_what_lives_is_within_the_budget() -> None:
    (found,) = run_ranks(train, 1, [None, 0.9, 0.75])
    (plain, _, _), *others = found
    for state, peaks, budget in others:
        # In the first step the bandwidth to the host is measured, with tensors of its own.
        assert all(torch.equal(state[name], value) for name, value in plain.items())
        assert max(peaks[1:]) <= budget, (peaks, budget)
        # The memory is used, and not held back.
        assert max(peaks[1:]) == pytest.approx(budget, rel=0.25)


WORDS, ROWS = 4000, 16


class OfManyWords(Trains):
    """What the loss and its backward take is more than what the layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Any) -> Tensor:
        hidden, _ = batch
        hidden = hidden * 2
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.words(hidden)
        return F.cross_entropy(logits, hidden[:, 0].long().clamp(0, WORDS - 1))


def around_layers(num_ranks: int) -> tuple[dict[int, int], float, int]:
    """What code around this rank's layers takes, the prediction of its peak, and its peak."""
    batches = [(torch.randn(2 * ROWS, WIDTH), torch.zeros(2 * ROWS)) for _ in range(8)]
    model, living = built(OfManyWords), LivingBytes()
    strategy = PipeShiftStrategy(microbatches=2, partition="uniform", profile_steps=3)
    trainer = quiet_trainer(
        {"devices": num_ranks, "strategy": strategy},
        max_epochs=1,
        callbacks=[living],
        plugins=[MemoryCompression(budget=1e9, host_budget=0)],
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    predicted = strategy.predicted(strategy.plan).prediction
    assert predicted is not None
    found = strategy.pipeline.planning.profiler.observer.of_code
    peak = max(living.peaks[1:])
    return found, predicted.memory_bytes[0][strategy.stage], peak


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_code_around_layers_counts(num_ranks: int) -> None:
    found = run_ranks(around_layers, num_ranks, num_ranks)
    for _, predicted, peak in found:
        assert predicted == pytest.approx(peak, rel=0.1)
    # The gradients of the logarithms of the probabilities, and of the logits that they are of.
    gradients = 2 * ROWS * WORDS * 4
    assert gradients <= max(found[-1][0].values()) <= 1.02 * gradients
    if num_ranks > 1:
        # In front of the first layer: the batch times 2, and its gradient.
        assert max(found[0][0].values()) <= 2 * ROWS * WIDTH * 4
