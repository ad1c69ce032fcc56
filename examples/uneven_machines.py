"""Three machines of speeds 1 : 0.5 : 0.25 train one model: cut evenly, then by what is measured.

    python examples/uneven_machines.py

The layers sleep instead of computing, so that three machines fit on any computer, and each rank
sleeps as long as its machine is slow. No result depends on the cut, only the time does.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.sleeping import Sleeper, slow_down

SPEEDS = (1.0, 0.5, 0.25)


class StepTimes(L.Callback):
    """Notes when each step began."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begins.append(time.perf_counter())

    @property
    def last_seconds(self) -> float:
        """How long the last step but one took: it is complete."""
        return self.begins[-1] - self.begins[-2]


def train(partition: Any, steps: int) -> float:
    """Trains for some steps, prints the plan, and returns the seconds of a step."""
    times = StepTimes()
    strategy = PipeShiftStrategy(partition=partition, microbatches=8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=len(SPEEDS),
        strategy=strategy,
        max_steps=steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # All stages of a pipeline see the same data.
    L.seed_everything(1, verbose=False)
    slow_down(1 / SPEEDS[int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))])
    model = Sleeper(layers=21, forward_seconds=0.001, backward_seconds=0.002)
    data = [(torch.randn(64), torch.randn(64)) for _ in range(8 * steps)]
    trainer.fit(model, DataLoader(data, batch_size=8))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        print(f"\npartition={partition!r}\n\n{strategy.plan}\n")
    return times.last_seconds


def main() -> None:
    even, measured = train("uniform", steps=3), train("auto", steps=5)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"a step, layers in equal numbers   {even:.2f} s")
        print(f"a step, cut by measured speeds    {measured:.2f} s")


if __name__ == "__main__":
    main()
