"""Two ranges of layers on each stage: measured, planned again, and refused where it cannot be."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper, SleepingLayer
from lightning_pipeshift.testing.training import QUIET

SECONDS = (0.004, 0.001, 0.001, 0.004, 0.001, 0.001, 0.001, 0.001)


def train(options: dict[str, Any], plugins: list[Any]) -> tuple[bool, dict[str, Tensor]]:
    """Returns whether the simulator can time the last plan, and this rank's parameters."""
    L.seed_everything(0, verbose=False)
    module = Sleeper(0, 16)
    module.layers.extend(SleepingLayer(16, each, 2 * each) for each in SECONDS)
    x = torch.randn(8 * 24, 16)
    trainer = L.Trainer(
        **QUIET,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        plugins=plugins,
        strategy=PipeShiftStrategy(microbatches=4, schedule="interleaved_1f1b", **options),
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x), batch_size=8))
    held = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    strategy: Any = trainer.strategy
    return strategy.plan.is_foreseen and strategy.plan.prediction is not None, held


def test_layers_are_measured_and_placed_again_with_the_same_bits() -> None:
    placed = run_ranks(train, 2, {"partition": [2, 2, 2, 2], "profile_steps": 0}, [])
    measured = run_ranks(train, 2, {"partition": "auto", "profile_steps": 5}, [])
    assert all(is_known for is_known, _ in measured)
    expected, found = (
        {name: x for _, held in ranks for name, x in held.items()} for ranks in (placed, measured)
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


def test_a_partition_has_a_number_for_each_range() -> None:
    (failed, _) = run_ranks(train, 2, {"partition": [4, 4]}, [], expect_failure=True)
    assert failed.error_type == "PartitionError"
    assert "4 stages" in failed.message


@pytest.mark.parametrize(
    "option", [{"recompute": "full"}, {"microbatches": "auto"}, {"virtual_machines": "auto"}]
)
def test_options_of_other_schedules_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"use schedule='1f1b'"):
        PipeShiftStrategy(schedule="interleaved_1f1b", **option)


def test_memory_compression_is_refused() -> None:
    plugins = [MemoryCompression()]
    (failed, _) = run_ranks(train, 2, {"partition": "uniform"}, plugins, expect_failure=True)
    assert failed.error_type == "ConfigurationError"
    assert "Remove the plugin" in failed.message
