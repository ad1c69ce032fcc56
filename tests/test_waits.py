"""How often a step waits for the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from lightning.pytorch.plugins import MixedPrecision

from lightning_pipeshift import PipeShiftStrategy
from tests.features_models import QUIET, built, parameters_of
from tests.harness import run_ranks
from tests.models import NUM_CLASSES, NUM_FEATURES, points
from tests.pretended_gpu import OnAPretendedGPU, Wait


class Model(L.LightningModule):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU()) for _ in range(3)),
            nn.Linear(NUM_FEATURES, NUM_CLASSES),
        )
        if kind == "metric":
            self.accuracy = MulticlassAccuracy(NUM_CLASSES, validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        scores = self.net(features)
        loss = F.cross_entropy(scores, classes)
        if self.kind in ("logging", "metric"):
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log(
                "largest", scores.detach().amax(), reduce_fx="max", on_step=True, on_epoch=True
            )
        if self.kind == "metric":
            self.accuracy(scores, classes)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if self.kind == "weight":
            return {"loss": loss, "weight": classes.gt(0).sum()}
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    kind: str, strategy: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> tuple[list[list[Wait]], list[str], dict[str, Tensor]]:
    L.seed_everything(7, verbose=False)
    arguments = dict(arguments)
    if arguments.pop("fp16", False):
        arguments["plugins"] = [MixedPrecision("16-mixed", "cpu")]
    how: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        strategy = {"microbatches": 4, "partition": "uniform", **strategy}
        how = {"strategy": PipeShiftStrategy(**strategy), "devices": int(os.environ["WORLD_SIZE"])}
    module = built(lambda: Model(kind))
    gpu = OnAPretendedGPU()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=6,
        callbacks=[gpu],
        **QUIET,
        **how,
        **arguments,
    )
    trainer.fit(module, points(12))
    return gpu.steps, gpu.mixed, parameters_of(module)


CASES = {
    "plain": ("plain", {}, {}),
    "logging": ("logging", {}, {}),
    "metric": ("metric", {}, {}),
    "weight": ("weight", {}, {}),
    "clipping": ("plain", {}, {"gradient_clip_val": 0.1}),
    "fp16": ("plain", {}, {"fp16": True}),
    "accumulation": ("plain", {}, {"accumulate_grad_batches": 2}),
    "virtual machines": ("plain", {"virtual_machines": 2, "gradient_aggregation": "allreduce"}, {}),
    "fp16 accumulation clipping": (
        "logging",
        {},
        {"fp16": True, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ),
}
