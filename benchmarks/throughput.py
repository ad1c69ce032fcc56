"""Steps per second of a pipeline of two stages, against torch's own and against the ideal.

    python -m benchmarks.throughput

A transformer is trained with 8 microbatches over two stages, a core each, by contenders that take
turns in the same two processes, on copies of one model with one cut, one loss and one optimizer:

* PipeShift inside `Trainer.fit`: data loader, optimizer, a logged loss, no progress bar;
* `torch.distributed.pipelining`: `PipelineStage` and `Schedule1F1B` in a bare loop, also where
  PipeShift runs another schedule (torch has no eager 1F1B for one chunk on each stage);
* one process: the first rank trains the whole model in a bare loop, one microbatch after the other,
  with one thread, while the second waits without computing.

The ideal is what a pipeline would take that lost nothing but the fill and the drain: the time of
the one process / stages x (microbatches + stages - 1) / microbatches. Two busy cores share a memory
and a clock, so one core alone is faster than either of two: `one process, both cores busy` does the
same on both ranks at once, and shows how much of what is missing from the ideal is the machine's.

Other programs on the same cores spoil the figures: the last column shows what part of the machine
they took.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.side_by_side import (
    BURSTS_HELP,
    PIPESHIFT,
    TORCH,
    Alternation,
    Contender,
    Round,
    TorchPipeline,
    fit_beside,
    series,
)
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks

NUM_STAGES = 2
NUM_SYMBOLS = 64
ALONE = "one process, other core idle"
BOTH = "one process, both cores busy"


@dataclass(frozen=True)
class Config:
    """The model to train, and the number of timings."""

    num_blocks: int
    width: int
    length: int
    batch_size: int
    num_microbatches: int
    schedule: str
    num_rounds: int
    num_steps: int
    bursts: bool


class Embedding(nn.Module):
    """Symbols and their positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(NUM_SYMBOLS, width)
        self.position = nn.Parameter(torch.zeros(length, width))

    def forward(self, symbols: Tensor) -> Tensor:
        embedded: Tensor = self.symbol(symbols) + self.position[: symbols.shape[1]]
        return embedded


class Head(nn.Module):
    """Scores of the symbols."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, NUM_SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.norm(x))
        return scores


class Transformer(L.LightningModule):
    """As many blocks in front of the cut as behind it; embedding and head are small."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        blocks = [
            nn.TransformerEncoderLayer(
                width,
                nhead=width // 64,
                dim_feedforward=4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.num_blocks)
        ]
        self.layers = nn.ModuleList([Embedding(width, config.length), *blocks, Head(width)])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        for layer in self.layers:
            x = layer(x)
        loss = loss_of(x, target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return optimizer_of(self.parameters())


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """The mean over all symbols of a slice."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def optimizer_of(parameters: Any) -> Optimizer:
    """The optimizer of every contender."""
    return AdamW(parameters, lr=1e-4)


class OneProcess:
    """Trains the whole model here, one microbatch after the other."""

    def __init__(
        self, layers: nn.Module, num_microbatches: int, batches: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._layers = layers
        self._num_microbatches = num_microbatches
        self._optimizer = optimizer_of(layers.parameters())
        self._batches = batches
        self._num_done = 0

    def __call__(self, num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, target = self._batches[self._num_done % len(self._batches)]
            self._num_done += 1
            self._optimizer.zero_grad()
            slices = zip(
                inputs.chunk(self._num_microbatches),
                target.chunk(self._num_microbatches),
                strict=True,
            )
            for part, part_target in slices:
                loss = loss_of(self._layers(part), part_target) / self._num_microbatches
                loss.backward()
            # A contender without values would be fast, and would have computed nothing.
            assert loss.isfinite()
            self._optimizer.step()


def measure(config: Config) -> list[Round]:
    """Runs on every rank."""
    L.seed_everything(0, verbose=False)
    model = Transformer(config)
    layers = [copy.deepcopy(layer) for layer in model.layers]
    cut = len(layers) // NUM_STAGES
    # One epoch: what lies between two epochs is no part of a step.
    steps = {PIPESHIFT: config.num_steps, TORCH: config.num_steps, ALONE: 1, BOTH: 1}
    shape = (config.batch_size * (config.num_rounds + 1) * config.num_steps, config.length)
    data = torch.randint(NUM_SYMBOLS, shape), torch.randint(NUM_SYMBOLS, shape)
    batches = list(zip(*(x.split(config.batch_size) for x in data), strict=True))

    def make_contenders() -> Mapping[str, Contender]:
        first, second = nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:])
        alone = OneProcess(copy.deepcopy(nn.Sequential(*layers)), config.num_microbatches, batches)
        return {
            TORCH: TorchPipeline(
                [second if dist.get_rank() else first],
                config.num_microbatches,
                loss_of,
                optimizer_of,
                batches,
            ),
            ALONE: alone if dist.get_rank() == 0 else lambda num_steps: None,
            BOTH: alone,
        }

    return fit_beside(
        model,
        TensorDataset(*data),
        config.batch_size,
        PipeShiftStrategy(
            microbatches=config.num_microbatches,
            schedule=config.schedule,
            partition=[cut, len(layers) - cut],
        ),
        Alternation(make_contenders, steps, config.num_rounds, bursts=config.bursts),
        NUM_STAGES,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-blocks", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b", help="PipeShift's")
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--num-steps", type=int, default=4, help="of a pipeline in a round")
    parser.add_argument("--bursts", action="store_true", help=BURSTS_HELP)
    options = vars(parser.parse_args())
    path = options.pop("json")
    config = Config(**options)

    ranks = run_ranks(measure, NUM_STAGES, config, timeout=1200)
    results = series(ranks, num_cores=len(os.sched_getaffinity(0)))
    bubble = (config.num_microbatches + NUM_STAGES - 1) / config.num_microbatches
    ours = results[PIPESHIFT]

    def of_ideal(name: str, one_process: str) -> dict[str, float]:
        times = results[name].times_as_fast(results[one_process])
        return interval([each / NUM_STAGES * bubble for each in times])

    rows = []
    for name, result in results.items():
        is_pipeline = name in (PIPESHIFT, TORCH)
        rows.append(
            [
                name,
                result.median,
                min(result.step_seconds),
                " + ".join(f"{seconds:.3f}" for seconds in result.cpu_seconds),
                shown(of_ideal(name, ALONE)) if is_pipeline else "",
                shown(of_ideal(name, BOTH)) if is_pipeline else "",
                f"{median(result.others):.0%}",
            ]
        )
    print_table(
        f"{NUM_STAGES} stages, {config.num_microbatches} microbatches:"
        f" {config.num_rounds} rounds of {config.num_steps} steps",
        [
            "",
            "s a step",
            "best",
            "processor s per rank",
            "of the ideal",
            "of the ideal, both busy",
            "others",
        ],
        sorted(rows, key=lambda row: str(row[4]), reverse=True),
    )
    times = ours.times_as_fast(results[TORCH])
    num_faster = sum(each > 1 for each in times)
    print(
        f"\nPipeShift in Trainer.fit / torch in a bare loop, steps per second:"
        f" {shown(interval(times))}; faster in {num_faster} of {len(times)} rounds"
    )
    save(
        path,
        {
            "config": asdict(config),
            "pipeshift_over_torch": interval(times),
            "rounds_faster": num_faster,
            "pipeshift_over_ideal": of_ideal(PIPESHIFT, ALONE),
            "torch_over_ideal": of_ideal(TORCH, ALONE),
            "pipeshift_over_ideal_both_cores_busy": of_ideal(PIPESHIFT, BOTH),
            "torch_over_ideal_both_cores_busy": of_ideal(TORCH, BOTH),
            "step_seconds": {
                name: interval(result.step_seconds) for name, result in results.items()
            },
            "others": {name: median(result.others) for name, result in results.items()},
            "contenders": {name: asdict(result) for name, result in results.items()},
        },
    )


if __name__ == "__main__":
    main()
