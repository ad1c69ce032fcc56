"""`Trainer(detect_anomaly=True)`: where values stop being numbers, over all stages."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import NotFiniteError
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer

# In the second of four microbatches of the third batch.
WRONG = 2 * 16 + 4 + 1
HERE = "in microbatch 1 of step 2 on stage"


class Wrong(nn.Linear):
    """Goes wrong for one sample."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = how

    def forward(self, features: Tensor) -> Tensor:
        found = super().forward(features)
        if not (features == 100).any():
            return found
        if self.how == "nan":
            return found * float("nan")
        if self.how == "infinite":
            return found.masked_fill(features == 100, torch.inf)
        return found + (features * 0).sqrt() if self.how == "backward" else found


class Model(L.LightningModule):
    def __init__(self, how: str, layer: int) -> None:
        super().__init__()
        wrong = [Wrong(how if number == layer else "") for number in range(4)]
        self.layers = nn.ModuleList(wrong)
        self.how = how

    def training_step(self, batch: Any, _: int) -> Tensor:
        features = batch[0]
        for number, layer in enumerate(self.layers):
            if self.how == "between" and number == 1:
                features = features.where(features != 100, torch.nan)
            passed = features
            features = layer(features)
            # The sample shows on the way, and layers are given it as it was.
            features = features.where(passed != 100, passed)
        loss = features.clamp(max=10).square().mean()
        return loss / 0.0 if self.how == "loss" and (features == 100).any() else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(how: str, layer: int, partition: list[int], watched: bool = True) -> int:
    torch.manual_seed(1)
    features = torch.randn(64, 8)
    features[WRONG, 0] = 100
    settings = {"pipeshift": {"partition": partition, "microbatches": 4, "virtual_machines": 1}}
    trainer = quiet_trainer(settings, devices=len(partition), max_epochs=1, detect_anomaly=watched)
    trainer.fit(Model(how, layer), DataLoader(TensorDataset(features), batch_size=16))
    return trainer.global_step


CASES = [
    ("nan", 0, f"the result of the layer 'layers.0', {HERE} 0", 0),
    ("nan", 3, f"the result of the layer 'layers.3', {HERE} 1", 1),
    ("between", 9, f"the arguments of the layer 'layers.1', {HERE} 0", 0),
    ("loss", 9, f"The loss is inf, {HERE} 1. No layer has returned NaN", 1),
    ("backward", 1, "In the backward of microbatch 1 of step 2 on stage 0: Function", 0),
]


@pytest.mark.feature("Training", "`detect_anomaly`")
@pytest.mark.parametrize(("how", "layer", "words", "stage"), CASES)
def test_the_first_that_is_no_number_is_named(how: str, layer: int, words: str, stage: int) -> None:
    for outcome in run_ranks(train, 2, how, layer, [2, 2], expect_failure=True):
        is_its_own = outcome.rank == stage
        expected = "NotFiniteError" if is_its_own else "StageFailedError"
        assert outcome.error_type == expected, outcome
        assert words in outcome.message


@pytest.mark.parametrize(("how", "layer", "words", "stage"), CASES)
def test_on_one_stage(how: str, layer: int, words: str, stage: int) -> None:
    with pytest.raises(NotFiniteError) as raised:
        train(how, layer, [4])
    assert words.replace("stage 1", "stage 0") in str(raised.value)


def test_infinite_values_are_told_and_go_on(caplog: pytest.LogCaptureFixture) -> None:
    assert train("infinite", 1, [4]) == 4
    assert f"the result of the layer 'layers.1', {HERE} 0" in caplog.text


def test_without_it_nothing_is_looked_at() -> None:
    assert run_ranks(train, 2, "nan", 0, [2, 2], False) == [4, 4]


def collects_in_a_child(how: str, num_stages: int) -> int:
    """Trains, and collects all garbage in a forked child; returns how the child ended."""
    gc.collect()
    gc.disable()
    with suppress(NotFiniteError, StageFailedError):
        train(how, 0, [4 // num_stages] * num_stages)
    child = os.fork()
    if child == 0:
        # A child that waits for ever is ended by this signal.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("how", ["nan", "infinite"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_worker_that_is_forked_later_may_collect_what_a_run_left(
    how: str, num_stages: int
) -> None:
    # A group's destruction waits for its threads, and a forked process has none of them.
    assert run_ranks(collects_in_a_child, num_stages, how, num_stages) == [0] * num_stages
