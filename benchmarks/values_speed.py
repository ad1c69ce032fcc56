"""What a step costs in `Trainer.fit` on two stages, by what it does.

    python -m benchmarks.values_speed
    python -m benchmarks.values_speed --only tiny --num-rounds 9

Fits take turns in the same two processes, of one thread each:

* layers that are tiny, that compute, and that sleep;
* a step that draws random numbers, and one that updates a metric of torchmetrics,
  against the same without: they should cost at most 10 % more;
* 24 blocks, and a new input length in every second step: one should cost at most 50 ms more than a
  length that was there before, in one run without values for each kind of layer.

A step is what lies between two ``on_train_batch_start``. Its processor time, the sum of all ranks,
is the figure to go by where others use the machine, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from benchmarks import skip_cost
from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.throughput import NUM_SYMBOLS, Config, Transformer, loss_of
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper

NUM_STAGES, NUM_MICROBATCHES, NUM_WARM_UP_STEPS = 2, 4, 4
NUM_BLOCKS_OF_SHAPES = 24


def _config(num_blocks: int, width: int, length: int) -> Config:
    return Config(num_blocks, width, length, 8, NUM_MICROBATCHES, "1f1b", 0, 0, False)


class Drawing(Transformer):
    """Draws random numbers in the step: common ones, and of the shape of a value."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        x = torch.where(torch.rand(x.shape) < 0.01, 0, x)
        for layer in self.layers:
            x = layer(x)
        x = x + 0.01 * torch.randn_like(x)
        loss = loss_of(x, target)
        self.log("train_loss", loss)
        return loss


class Measured(Transformer):
    """Updates and logs a metric in the step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.accuracy = MulticlassAccuracy(NUM_SYMBOLS)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        for layer in self.layers:
            x = layer(x)
        loss = loss_of(x, target)
        self.accuracy.update(x.detach().flatten(0, 1), target.flatten())
        self.log("train_loss", loss)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


@dataclass(frozen=True)
class Contender:
    """A fit that takes its turn.

    Args:
        make: makes the module.
        data: makes a batch.
        num_layers: how many layers the module has, half of them for each stage.
        num_steps: how many steps are timed in a round.
    """

    make: Callable[[], L.LightningModule]
    data: Callable[[int], Any]
    num_layers: int
    num_steps: int


def _symbols(length: int) -> Callable[[int], Any]:
    return lambda _: (
        torch.randint(NUM_SYMBOLS, (8, length)),
        torch.randint(NUM_SYMBOLS, (8, length)),
    )


def _vectors(num_tensors: int) -> Callable[[int], Any]:
    return lambda _: tuple(torch.randn(NUM_MICROBATCHES, 64) for _ in range(num_tensors))


def _changing(number: int) -> Any:
    # A new length in every second step, once everything runs.
    return _symbols(8 + max(0, number - NUM_WARM_UP_STEPS + 2) // 2)(number)


def _contenders() -> dict[str, Contender]:
    tiny, computing = _config(10, 64, 8), _config(10, 256, 32)
    found = {
        "chain": Contender(lambda: skip_cost.Chain(24, 0, False), _vectors(1), 24, 20),
        "sleeping": Contender(lambda: Sleeper(2, 64, 0.005, 0.010), _vectors(2), 2, 10),
    }
    for kind, config, num_steps in (("tiny", tiny, 20), ("computing", computing, 10)):
        for name, cls in (("without", Transformer), ("random", Drawing), ("metric", Measured)):

            def make(cls: Any = cls, config: Config = config) -> L.LightningModule:
                return cls(config)

            num_layers = config.num_blocks + 2
            found[f"{kind} step, {name}"] = Contender(
                make, _symbols(config.length), num_layers, num_steps
            )
    found["shapes"] = Contender(
        lambda: Transformer(_config(NUM_BLOCKS_OF_SHAPES, 64, 64)), _changing, 26, 20
    )
    return found


@dataclass
class Clock(L.Callback):
    """Reads the clocks, of the wall and of the processor, as each batch begins."""

    read: list[tuple[float, float]] = field(default_factory=list)

    def on_train_batch_start(self, *_: Any) -> None:
        self.read.append((time.perf_counter(), time.process_time()))


def _fit(contender: Contender) -> list[tuple[float, float]]:
    """The seconds and processor seconds of each step."""
    L.seed_everything(0, verbose=False)
    num_steps = NUM_WARM_UP_STEPS + contender.num_steps + 1
    batches = [contender.data(at) for at in range(num_steps)]
    half = contender.num_layers // 2
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_STAGES,
        strategy=PipeShiftStrategy(
            microbatches=NUM_MICROBATCHES,
            schedule="1f1b",
            partition=[half, contender.num_layers - half],
        ),
        callbacks=[clock],
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(contender.make(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    steps = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(clock.read)]
    return steps[NUM_WARM_UP_STEPS:]


def measure(names: Sequence[str], num_rounds: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Runs on every rank; returns the steps of each round."""
    torch.set_num_threads(1)
    contenders = _contenders()
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    for number in range(num_rounds):
        # Nobody always goes first.
        for name in names if number % 2 else reversed(names):
            found[name].append(_fit(contenders[name]))
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--only", help="contenders with this in their names")
    options = parser.parse_args()
    names = [name for name in _contenders() if (options.only or "") in name]
    ranks = run_ranks(measure, NUM_STAGES, names, options.num_rounds, timeout=1200)

    # The milliseconds of each step, of the first rank, and of the processor, of all ranks.
    steps = {
        name: [
            [
                (1e3 * each[0][0], 1e3 * sum(cpu for _, cpu in each))
                for each in zip(*here, strict=True)
            ]
            for here in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in names
    }

    def series(name: str, which: int) -> list[float]:
        return [median(step[which] for step in turn) for turn in steps[name]]

    rows = []
    figures: dict[str, Any] = {"steps_milliseconds": steps}
    for name in names:
        kind, *_ = name.partition(", ")
        base = f"{kind}, without"
        row: list[Any] = [name, median(series(name, 0)), median(series(name, 1)), "", ""]
        if base in steps and base != name:
            times = [interval(ratios(series(name, at), series(base, at))) for at in (0, 1)]
            row[3:] = map(shown, times)
            figures[name] = {"times": times[0], "times_processor": times[1]}
        rows.append(row)
    header = ["", "ms a step", "processor ms", "times the other", "of the processor's"]
    print_table(
        f"{NUM_STAGES} stages, {NUM_MICROBATCHES} microbatches: {options.num_rounds} rounds",
        header,
        rows,
    )
    if "shapes" in steps:
        more = [
            interval(
                [
                    median(
                        new[at] - known[at]
                        for new, known in zip(turn[::2], turn[1::2], strict=False)
                    )
                    for turn in steps["shapes"]
                ]
            )
            for at in (0, 1)
        ]
        figures["new_shape_milliseconds"], figures["new_shape_processor_milliseconds"] = more
        print(
            f"\nA new input length with {NUM_BLOCKS_OF_SHAPES} blocks: {shown(more[0], '.1f')} ms;"
            f" processor, all ranks: {shown(more[1], '.1f')} ms"
        )
    save(options.json, figures)


if __name__ == "__main__":
    main()
