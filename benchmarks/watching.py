"""The cost of measuring every layer and every action of a step.

    python -m benchmarks.watching

Two stages of small transformer blocks; measuring is switched on and off from one step to the next,
in one run. Small blocks, because the cost is per layer. It is to be below 0.5 %.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.placements import Repeated
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer

WIDTH, LENGTH, NUM_BLOCKS, NUM_MICROBATCHES = 128, 64, 8, 8


class Blocks(L.LightningModule):
    """Transformer blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.1)
            for _ in range(NUM_BLOCKS)
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Any loss."""
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return SGD(self.parameters(), lr=0.001)


class Switching(L.Callback):
    """Switches measuring on for every second step, and times all of them."""

    def __init__(self, num_pairs: int) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._num_pairs = num_pairs
        self._is_on = True
        self._begun: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """One step ends, the next one begins."""
        now = time.perf_counter()
        if self._begun is not None:
            self.seconds[self._is_on].append(now - self._begun)
        self._is_on = not self._is_on
        strategy: Any = trainer.strategy
        strategy.pipeline.planning.profiler.is_over = not self._is_on
        self._begun = now

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Ends the run when there is enough."""
        trainer.should_stop = len(self.seconds[False]) > self._num_pairs


def measure(num_pairs: int) -> tuple[list[float], list[float]]:
    """Runs on every rank: the seconds of steps with measuring, and of their neighbours without."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    switching = Switching(num_pairs)
    # So many steps that no plan is made of them.
    strategy = PipeShiftStrategy(microbatches=NUM_MICROBATCHES, profile_steps=10**6)
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy},
        max_epochs=-1,
        callbacks=[switching],
    )
    sample = (torch.randn(LENGTH, WIDTH),)
    trainer.fit(Blocks(), DataLoader(Repeated(sample), batch_size=2 * NUM_MICROBATCHES))
    on, off = (switching.seconds[is_on][5:] for is_on in (True, False))
    count = min(len(on), len(off))
    return on[:count], off[:count]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-pairs", type=int, default=150)
    options = parser.parse_args()
    on, off = run_ranks(measure, 2, options.num_pairs, timeout=1200)[0]
    costs = interval([100 * (ratio - 1) for ratio in ratios(on, off)])
    rows = [["measured", median(on)], ["not measured", median(off)]]
    print_table(f"{options.num_pairs} pairs of steps", ["", "s a step"], rows)
    print(f"\nmeasuring costs {shown(costs, '+.2f')} % (of neighbours); at most 0.5 % is allowed")
    save(
        options.json,
        {
            "cost_percent": costs,
            "measured_seconds": interval(on),
            "plain_seconds": interval(off),
            "rounds": {"measured": on, "plain": off},
        },
    )


if __name__ == "__main__":
    main()
