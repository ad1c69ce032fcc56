"""What really lives on a device under a budget: never more than that, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
