"""The cost of skipping a layer that another stage owns, and of the code between such layers.

    python -m benchmarks.skip_cost

The last stage owns the last layer only, and its `training_step` passes by all the others, so the
time that it takes grows with their number. Models with few and with many layers give the cost of
one by the difference; with a number of small operations between the layers, that of one operation
on a placeholder. Each is also measured on a plain model without PipeShift, where the same loop runs
the layers: what the skipped layer would have cost itself. All of it is processor time: nothing here
waits.

The parts are those of cProfile, which slows everything down; so they are scaled to the cost
measured without it.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, interval, print_table, save, shown
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks

WIDTH = 64
NUM_MICROBATCHES = 8
FEW, MANY = 8, 72
NUM_WARM_UP_CALLS = 2 * NUM_MICROBATCHES
NUM_PARTS = 12


# Of this process's calls. What a LightningModule keeps on itself would be sent to the other stage.
_seconds: list[float] = []
_profile = cProfile.Profile()


class Chain(L.LightningModule):
    """Cheap layers in a row, and operations between them.

    Args:
        num_layers: how many layers.
        num_operations: how many operations follow each of them.
        profile: whether to look into the parts.
    """

    def __init__(self, num_layers: int, num_operations: int, profile: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.num_operations = num_operations
        self.profile = profile

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        if self.profile and len(_seconds) >= NUM_WARM_UP_CALLS:
            _profile.enable()
        begun = time.thread_time()
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
            for _ in range(self.num_operations):
                x = x * 0.5
        _seconds.append(time.thread_time() - begun)
        if self.profile:
            _profile.disable()
        return x.square().mean()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.0)


@dataclass(frozen=True)
class Passing:
    """The duration of one rank's calls of ``training_step``, up to the loss.

    Args:
        seconds: a call.
        parts: with a profile, the seconds in each function for a call, without its callees.
    """

    seconds: float
    parts: dict[str, float]


def measure(num_layers: int, num_operations: int, num_steps: int, profile: bool) -> Passing:
    """Runs on both ranks; the last one's is the figure."""
    return _fit(
        Chain(num_layers, num_operations, profile),
        num_steps,
        devices=2,
        strategy=PipeShiftStrategy(
            microbatches=NUM_MICROBATCHES, partition=[num_layers - 1, 1], schedule="1f1b"
        ),
    )


def measure_plain(num_layers: int, num_operations: int, num_steps: int) -> Passing:
    """The same loop where all layers run."""
    return _fit(Chain(num_layers, num_operations, False), num_steps * NUM_MICROBATCHES, devices=1)


def _fit(module: Chain, num_steps: int, **options: Any) -> Passing:
    batch_size = NUM_MICROBATCHES
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=num_steps + 2,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    data = TensorDataset(torch.randn(16 * batch_size, WIDTH))
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    seconds = _seconds[NUM_WARM_UP_CALLS:]
    parts: dict[str, float] = {}
    if seconds and module.profile:
        stats: Any = pstats.Stats(_profile)
        for (file, _, function), (_, _, own_seconds, _, _) in stats.stats.items():
            where = "" if file == "~" else f"{Path(file).stem}."
            name = f"{where}{function}"
            parts[name] = parts.get(name, 0.0) + own_seconds / len(seconds)
    # The first stage's part of a step ends before its last line.
    return Passing(median(seconds) if seconds else 0.0, parts)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-steps", type=int, default=60)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-operations", type=int, default=4, help="between two layers")
    options = parser.parse_args()

    def cost(num_operations: int) -> tuple[float, float]:
        """Microseconds of a skipped layer and what follows it; and of the same where it runs."""
        skipped, plain = [], []
        for num_layers in (FEW, MANY):
            arguments = (num_layers, num_operations, options.num_steps)
            skipped.append(run_ranks(measure, 2, *arguments, False, timeout=300)[-1].seconds)
            plain.append(run_ranks(measure_plain, 1, *arguments, timeout=300)[0].seconds)
        each = 1e6 / (MANY - FEW)
        return (skipped[1] - skipped[0]) * each, (plain[1] - plain[0]) * each

    costs: dict[str, list[float]] = {
        name: []
        for name in (
            "skipped_layer_us",
            "plain_layer_us",
            "skipped_operation_us",
            "plain_operation_us",
        )
    }
    for _ in range(options.num_rounds):
        layer, plain_layer = cost(0)
        both, plain_both = cost(options.num_operations)
        operation = (both - layer) / options.num_operations
        plain_operation = (plain_both - plain_layer) / options.num_operations
        found = (layer, plain_layer, operation, plain_operation)
        for each, value in zip(costs.values(), found, strict=True):
            each.append(value)
    figures = {name: interval(each) for name, each in costs.items()}
    print_table(
        "Microseconds in a forward pass",
        ["", "skipped", "on a plain model"],
        [
            [
                f"a layer, nn.Linear({WIDTH}, {WIDTH})",
                shown(figures["skipped_layer_us"], ".1f"),
                shown(figures["plain_layer_us"], ".1f"),
            ],
            [
                "an operation between layers, x * 0.5",
                shown(figures["skipped_operation_us"], ".1f"),
                shown(figures["plain_operation_us"], ".1f"),
            ],
        ],
    )

    def parts(
        what: str, fewer: tuple[int, int], more: tuple[int, int], cost: float
    ) -> dict[str, float]:
        """The functions in which the calls with ``more`` spend what those with ``fewer`` don't."""
        few, many = (
            run_ranks(measure, 2, *counts, options.num_steps, True, timeout=300)[-1].parts
            for counts in (fewer, more)
        )
        grown = {name: seconds - few.get(name, 0.0) for name, seconds in many.items()}
        scale = cost / sum(grown.values())
        most = sorted(grown, key=lambda name: grown[name], reverse=True)[:NUM_PARTS]
        costs = {name: grown[name] * scale for name in most}
        print_table(
            f"The parts of a skipped {what}",
            ["microseconds", "function"],
            [[us, name] for name, us in costs.items()],
        )
        return costs

    layer_parts = parts("layer", (FEW, 0), (MANY, 0), figures["skipped_layer_us"]["median"])
    operation_parts = parts(
        "operation",
        (MANY, 0),
        (MANY, options.num_operations),
        figures["skipped_operation_us"]["median"],
    )
    save(
        options.json,
        {
            **figures,
            "rounds": costs,
            "layer_parts_us": layer_parts,
            "operation_parts_us": operation_parts,
        },
    )


if __name__ == "__main__":
    main()
