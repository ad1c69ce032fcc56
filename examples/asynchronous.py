"""The pipeline that does not drain: `schedule="async-2bw"` beside `schedule="1f1b"`.

    python examples/asynchronous.py

Both make an update from the same samples. With `1f1b` each batch is cut into microbatches, and the
pipeline is empty at the end of each update. With `async-2bw` (PipeDream-2BW) a batch is as small as
a microbatch, and the next ones are already under way when it is updated; each update is made with
gradients of weights that lack the one before. `docs/asynchronous.md` says more.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.sleeping import Sleeper

STAGES, SAMPLES, UPDATES = 4, 4, 12


class Seconds(L.Callback):
    """Notes when updates are made, from the third on: by then all is measured."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.ends.append(time.perf_counter())

    def each(self) -> float:
        """Seconds of an update."""
        return (self.ends[-1] - self.ends[2]) / (len(self.ends) - 3)


def train(schedule: str, **arguments: Any) -> float:
    """Trains with a schedule, and returns the seconds of an update."""
    seconds = Seconds()
    is_split = schedule == "1f1b"
    strategy = PipeShiftStrategy(
        schedule=schedule, partition="uniform", microbatches=SAMPLES if is_split else 1
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=strategy,
        max_steps=UPDATES,
        accumulate_grad_batches=1 if is_split else SAMPLES,
        callbacks=[seconds],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(1, verbose=False)
    model = Sleeper(layers=STAGES, forward_seconds=0.015, backward_seconds=0.03)
    data = [(torch.randn(64), torch.randn(64)) for _ in range(SAMPLES * UPDATES)]
    batch_size = SAMPLES if is_split else 1
    trainer.fit(model, DataLoader(data, batch_size=batch_size))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        print(f"\n{strategy.plan}\n")
    return seconds.each()


def main() -> None:
    drains, flows = train("1f1b"), train("async-2bw")
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"an update of {SAMPLES} samples, 1f1b       {drains:.2f} s")
        print(f"an update of {SAMPLES} samples, async-2bw  {flows:.2f} s")


if __name__ == "__main__":
    main()
