"""Activation checkpointing in the user's model, around layers and code that draws between them: the
backward computes with the same masks as the forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import built, parameters_of, quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, Classifier, points


class Draws(Classifier):
    """Draws in its layers, and behind each of them."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.clone().requires_grad_()
        for pair in (self.blocks[:2], self.blocks[2:]):
            if self.use_reentrant is None:
                hidden = self._through(pair, hidden)
            else:
                part = partial(self._through, pair)
                # As users do where a checkpoint asks for it; on most stages it is a placeholder.
                hidden = hidden.requires_grad_()
                hidden = checkpoint(part, hidden, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(hidden)
        return out

    def _through(self, pair: Any, hidden: Tensor) -> Tensor:
        for block in pair:
            hidden = F.dropout(block(hidden), 0.3, self.training)
        return hidden


def train(
    use_reentrant: bool | None,
    num_ranks: int,
    settings: dict[str, Any],
    budget: float | None = None,
) -> Any:
    torch.set_num_threads(1)
    strategy = PipeShiftStrategy(**{"microbatches": 2, "partition": "uniform", **settings})
    plugins = [] if budget is None else [MemoryCompression(budget=budget)]
    how = {"devices": num_ranks, "strategy": strategy}
    trainer = quiet_trainer(how, max_epochs=1, plugins=plugins)
    module = built(partial(Draws, use_reentrant))
    trainer.fit(module, points(4))
    return parameters_of(module)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_are_those_of_the_forward(use_reentrant: bool) -> None:
    (expected,) = run_ranks(train, 1, None, 1, {})
    cases: list[tuple[int, dict[str, Any], float | None]] = [
        (1, {}, None),
        (2, {"partition": [1, 4]}, None),
        (2, {"partition": [3, 2]}, 1e9),
        (3, {"schedule": "gpipe"}, None),
    ]
    for num_ranks, settings, budget in cases:
        for found in run_ranks(train, num_ranks, use_reentrant, num_ranks, settings, budget):
            different = [name for name in expected if not torch.equal(found[name], expected[name])]
            assert not different, (num_ranks, settings, budget)
