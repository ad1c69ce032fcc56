"""A machine gets slow while it trains, and layers move away from it.

    python examples/watch_a_migration.py

Three stages have four layers each. In the middle of the run the second stage takes twice as
long for each of its layers, as if another job had started there. `LayerMigration` notices it, and
moves layers to the other stages while training goes on. It prints the plan before and after, and
the time of each step. The layers sleep instead of computing, so three stages fit on two cores.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_pipeshift import LayerMigration, PipeShiftStrategy
from lightning_pipeshift.testing.sleeping import Sleeper, slow_down

STAGES, LAYERS, MICROBATCHES = 3, 12, 6
SLOW_STAGE, SLOW_AT = 1, 3


class Watch(L.Callback):
    """Makes a stage slow, and prints what becomes of the steps and of the plan."""

    def __init__(self, steps: int) -> None:
        self.begin = 0.0
        self.steps = steps

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if batch_idx == SLOW_AT:
            if trainer.is_global_zero:
                print(f"\nbefore\n\n{strategy.plan}\n\nstage {SLOW_STAGE} gets slow\n")
            if strategy.stage == SLOW_STAGE:
                slow_down(2.0)
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        trainer.should_stop = trainer.global_step == self.steps
        if trainer.is_global_zero:
            counts = ", ".join(map(str, strategy.plan.placement.counts[0]))
            seconds = time.perf_counter() - self.begin
            print(f"step {trainer.global_step:>2}   {seconds:.2f} s   layers {counts}", flush=True)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.is_global_zero:
            print(f"\nafter\n\n{strategy.plan}")


def main(steps: int = 24) -> None:
    """Train for some steps, of which the fourth and the later ones have a slow stage.

    Args:
        steps: how many.
    """
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=PipeShiftStrategy(microbatches=MICROBATCHES, partition=[4, 4, 4]),
        callbacks=[LayerMigration(patience=3), Watch(steps)],
        # Layers move if that pays off in the rest of the run: here it has no end that is known.
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Sleeper(layers=LAYERS, forward_seconds=0.002, backward_seconds=0.004)
    data = [(torch.randn(64), torch.randn(64)) for _ in range(MICROBATCHES * steps)]
    trainer.fit(model, DataLoader(data, batch_size=MICROBATCHES))  # type: ignore[arg-type]


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
