"""What becomes of a run whose network slows down in the middle.

    python -m benchmarks.slow_links

Two hosts, joined at 200 Mbit/s (network namespaces; needs root), and sleeping layers with
a waist: little crosses one boundary, and much all others. The even cut is best, until the link
falls to 20 Mbit/s; then the cut at the waist is. `LayerMigration` is to find that out, and does not
know of the change. Runs with each of the two cuts, on a link that is slow from the start, show what
is lost without it, and what is best.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.hosts import Hosts, Link, hosts, why_not
from benchmarks.measuring import arguments, print_table, save
from benchmarks.placements import Repeated
from lightning_pipeshift import LayerMigration, PipeShiftStrategy
from lightning_pipeshift.testing.sleeping import SleepingLayer, plain_sgd
from tests.features_models import quiet_trainer

FAST, SLOW = 200.0, 20.0
NUM_LAYERS, WIDTH, WAIST, ROWS, NUM_MICROBATCHES = 12, 512, 16, 256, 8
SLEEPS = (0.005, 0.010)
EVEN, AT_THE_WAIST = [6, 6], [9, 3]
PATIENCE, WITHIN = 10, 15


class Waist(nn.Module):
    """A sleeping layer of which little comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = SleepingLayer(WIDTH, *SLEEPS)
        self.out = nn.Linear(WIDTH, WAIST, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layer(x))
        return found


class AfterTheWaist(nn.Module):
    """A sleeping layer to which little comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WAIST, WIDTH, bias=False)
        self.layer = SleepingLayer(WIDTH, *SLEEPS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.into(x))
        return found


class Waisted(L.LightningModule):
    """Layers that take equal time."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [SleepingLayer(WIDTH, *SLEEPS) for _ in range(NUM_LAYERS)]
        layers[AT_THE_WAIST[0] - 1], layers[AT_THE_WAIST[0]] = Waist(), AfterTheWaist()
        self.layers = nn.ModuleList(layers)

    def configure_layers(self) -> list[nn.Module]:
        """One by one."""
        return list(self.layers)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return plain_sgd(self.parameters())


@dataclass
class Steps(L.Callback):
    """Times the steps, and slows the network down after some.

    Args:
        made: the hosts.
        at: the number of steps after which the link is slow.
        count: the number of steps of the run.
    """

    made: Hosts
    at: int
    count: int

    def __post_init__(self) -> None:
        self.begins: list[float] = []
        self.counts: list[tuple[int, ...]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self.begins.append(time.perf_counter())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """The step is over."""
        strategy: Any = trainer.strategy
        self.counts.append(strategy.plan.placement.counts[0])
        if len(self.begins) == self.at and os.environ["RANK"] == "0":
            self.made.set_rate(0, SLOW)
        trainer.should_stop = len(self.begins) > self.count


def run(made: Hosts, partition: Any, at: int, count: int) -> Any:
    """Runs on every rank: the seconds of each step, and the cut under which it ran."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    strategy = PipeShiftStrategy(
        microbatches=NUM_MICROBATCHES, partition=partition, profile_steps=4
    )
    steps = Steps(made, at, count)
    callbacks: list[L.Callback] = [steps]
    if partition == "auto":
        callbacks.append(LayerMigration(patience=PATIENCE))
    trainer = quiet_trainer(
        {"devices": 1, "num_nodes": 2, "strategy": strategy}, max_epochs=-1, callbacks=callbacks
    )
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    trainer.fit(Waisted(), DataLoader(Repeated(sample), batch_size=ROWS * NUM_MICROBATCHES))
    return [b - a for a, b in pairwise(steps.begins)], steps.counts


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--at", type=int, default=16, help="steps before the link slows down")
    parser.add_argument("--num-steps", type=int, default=12, help="steps that are compared")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    whole = options.at + WITHIN + options.num_steps
    with hosts(2, Link(megabits=FAST)) as made:
        seconds, counts = made.run(run, made, "auto", options.at, whole, timeout=600.0)[0]
        found = {}
        for name, partition in (("even", EVEN), ("at the waist", AT_THE_WAIST)):
            # The link is slow by now.
            fixed, _ = made.run(run, made, partition, 0, options.num_steps + 2, timeout=600.0)[0]
            found[name] = median(fixed[2:])
    before = median(seconds[2 : options.at])
    after = median(seconds[options.at + WITHIN :])
    cut = counts[options.at - 1]
    moved = next((n for n, now in enumerate(counts) if n >= options.at and now != cut), None)
    rows = [
        ["before", str(list(counts[options.at - 1])), before],
        ["slow, even", str(EVEN), found["even"]],
        ["slow, at the waist", str(AT_THE_WAIST), found["at the waist"]],
        [f"slow, after {WITHIN} steps", str(list(counts[-1])), after],
    ]
    header = ["", "layers", "s a step"]
    print_table(f"A link of {FAST:g} Mbit/s that falls to {SLOW:g}", header, rows)
    best = min(found.values())
    print(f"\nThe layers have moved {moved and moved - options.at} steps after that, and a step is")
    print(f"{best / after:.2f} times as fast as that of the best plan; it is to be 0.9.")
    save(
        options.json,
        {
            "before_seconds": before,
            "after_seconds": after,
            "even_seconds": found["even"],
            "best_seconds": best,
            "of_the_best": best / after,
            "steps_to_move": None if moved is None else moved - options.at,
        },
    )


if __name__ == "__main__":
    main()
