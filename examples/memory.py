"""A budget for what a device holds: half of what the first stage would save goes elsewhere.

    python examples/memory.py

The same model trains twice, without a budget and with one. `MemoryCompression` moves tensors that
layers save for their backward to the host's memory or to a stage that has room, or runs a layer
again. Losses and weights are the same, to the last bit.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy

Recompute = Literal["auto", "none"]


class Wide(L.LightningModule):
    """Layers that save much and have few parameters."""

    def __init__(self, layers: int = 8, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return (x - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(budget: str | None, recompute: Recompute) -> tuple[dict[str, float], Tensor]:
    """Trains with a budget or without, and returns the memory's figures and a weight."""
    L.seed_everything(1, verbose=False)
    strategy = PipeShiftStrategy(microbatches=8, partition="uniform", recompute=recompute)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[MemoryCompression(budget=budget)] if budget else [],
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Wide()
    data = [torch.randn(64, 256) for _ in range(32)]
    trainer.fit(model, DataLoader(data, batch_size=16))  # type: ignore[arg-type]
    return strategy.memory_figures, model.get_parameter("layers.0.0.weight").detach().clone()


def main(budget: str = "5MB", recompute: Recompute = "auto") -> None:
    """Train twice, and compare.

    Args:
        budget: what each device may hold.
        recompute: whether layers may run again where that is faster than to move tensors.
    """
    _, expected = train(None, recompute)
    figures, found = train(budget, recompute)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"peak of saved tensors   {figures['peak_bytes'] / 1e6:.1f} MB")
        print(f"they may take           {figures['budget_bytes'] / 1e6:.1f} MB")
        print(f"moved elsewhere         {figures['moved_bytes'] / 1e6:.1f} MB in all")
        print(f"the same bits           {torch.equal(expected, found)}")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
