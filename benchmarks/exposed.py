"""How long ranks wait for gradients of other virtual machines, with nothing left to compute.

    python -m benchmarks.exposed

Two virtual machines of two stages train inside ``Trainer.fit``, each rank on a host of its own
(network namespaces, see ``benchmarks/hosts.py``; needs root). Each stage has four layers of 4 MB
that sleep 20 ms in a forward and 40 ms in a backward of each of eight microbatches. The last
microbatch's backward passes the layers one after another, and each layer's ring begins then, behind
the backwards that are left. For comparison the same with ``"allreduce"``, which begins as early but
keeps one order, and the time that all rings would take with nothing beside them.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hosts import Link, hosts, why_not
from benchmarks.measuring import arguments, interval, print_table, save, shown
from lightning_pipeshift import Communication, PipeShiftStrategy
from lightning_pipeshift.testing.sleeping import SleepingLayer

NUM_HOSTS = 4
NUM_LAYERS = 8
WIDTH = 1024
NUM_MICROBATCHES = 8
NUM_WARM_UP = 2


class Sleeper(L.LightningModule):
    """A row of sleeping layers of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer(WIDTH) for _ in range(NUM_LAYERS))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.zeros_like(x))

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01)


class Clock(L.Callback):
    """Notes how long each step takes, and how much of it is waiting for gradients."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._begin = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.steps.append((time.perf_counter() - self._begin, strategy.exposed_seconds))


def measure(aggregation: Any, num_steps: int) -> list[tuple[float, float]]:
    """Runs on every rank: the seconds of each step, and those of them that were exposed."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=NUM_HOSTS,
        strategy=PipeShiftStrategy(
            virtual_machines=[[0, 1], [2, 3]],
            microbatches=NUM_MICROBATCHES,
            partition="uniform",
            communication=Communication(gradient_aggregation=aggregation),
        ),
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = NUM_MICROBATCHES * 2 * (num_steps + NUM_WARM_UP)
    data = DataLoader(TensorDataset(torch.randn(size, WIDTH)), batch_size=NUM_MICROBATCHES)
    trainer.fit(Sleeper(), data)
    return clock.steps[NUM_WARM_UP:]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--megabits", type=float, nargs="+", default=[200.0, 1000.0])
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    rows, figures = [], {}
    for megabits in options.megabits:
        link = Link(megabits=megabits)
        # With two members a rank sends and receives each of its layers' gradients once.
        alone = (NUM_LAYERS / 2) * WIDTH * WIDTH * 4 / link.bytes_per_second
        with hosts(NUM_HOSTS, link) as made:
            for aggregation in ("ring", "allreduce"):
                ranks = made.run(measure, aggregation, options.num_steps, timeout=240.0)
                slowest = [
                    max(steps, key=lambda step: step[1]) for steps in zip(*ranks, strict=True)
                ]
                step = median(seconds for seconds, _ in slowest)
                exposed = median(seconds for _, seconds in slowest)
                percent = interval([100 * e / s for s, e in slowest])
                rows.append(
                    [
                        f"{megabits:g} Mbit/s, {aggregation}",
                        step,
                        alone,
                        exposed,
                        shown(percent, ".1f"),
                    ]
                )
                figures[f"{megabits:g} {aggregation}"] = {
                    "step_seconds": [s for s, _ in slowest],
                    "exposed_seconds": [e for _, e in slowest],
                    "alone_seconds": alone,
                    "exposed_percent": percent,
                }
    print_table(
        "2 virtual machines of 2 stages, 4 layers of 4 MB on each; the rank that waits longest",
        ["", "s a step", "s of gradients on the wire", "s exposed", "% of the step"],
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
