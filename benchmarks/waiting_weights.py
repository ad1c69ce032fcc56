"""One device trains a model whose optimizer state alone exceeds its memory budget.

    python -m benchmarks.waiting_weights

A stack of residual blocks with Adam on one process, a CPU that stands for a device: weights W,
gradients W, and optimizer state 2 W, which outweigh what layers save. Contenders take turns:

- no `MemoryCompression`;
- a budget that does not bind;
- a budget that is kept by moving optimizer state;
- budgets below the optimizer state, for which weights have to wait in host memory as well.

`peak` is the most bytes of tensors that the process can reach in a block's forward or backward,
without the buffers in host memory. It is measured in a step of its own, which is not timed. The
times are medians of steps; `predicted` is the plan's own, both over those of the budget that does
not bind. All contenders have to end with the same bits.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer

WIDTH, NUM_BLOCKS = 512, 12
SAMPLES, MICROBATCHES = 256, 2
BUDGETS: dict[str, float | None] = {
    "no MemoryCompression": None,
    "does not bind": 8.0,
    "state moves": 2.6,
    "below the state": 1.9,
    "far below the state": 1.6,
}
"""In multiples of the weights; the optimizer state has 2."""
FIRST, LAST = 5, 12
"""The steps that are timed; the plan is made again before them."""


@dataclass
class Result:
    """Of one run.

    Args:
        step_seconds: medians of steps.
        predicted_seconds: the plan's.
        peak_bytes: held at most.
        num_state: how many layers' state is in host memory.
        num_weights: how many layers' weights wait there.
        total: of all weights at the end, to compare runs.
    """

    step_seconds: float = 0.0
    predicted_seconds: float | None = None
    peak_bytes: int = 0
    num_state: int = 0
    num_weights: int = 0
    total: float = 0.0


class Block(nn.Module):
    """Weights outweigh what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        result: Tensor = x + self.down(F.relu(self.up(x)))
        return result


class Stack(L.LightningModule):
    """Blocks; measures what is held in the step after the timed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.result = Result()
        self.times: list[float] = []
        self.data_key = 0

    def on_train_start(self) -> None:
        """Looks at each weight's gradient, too, when it is computed."""
        for parameter in self.parameters():
            parameter.register_hook(lambda _: self.note())

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """A regression."""
        (x,) = batch
        y = x
        for block in self.blocks:
            y = block(y)
            if self.trainer.global_step == LAST:
                self.note()
                y.register_hook(lambda _: self.note())
        return F.mse_loss(y, x.flip(1))

    def note(self) -> None:
        """Notes what is held now, without what the host has of a GPU: the data set."""
        if self.trainer.global_step != LAST:
            return
        found = [tensor for tensor in gc.get_objects() if isinstance(tensor, Tensor)]
        # Those that Python has not seen yet.
        found += [p.grad for p in self.parameters() if p.grad is not None]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in found
            if not tensor.is_meta and tensor.untyped_storage()._cdata != self.data_key
        }
        strategy: Any = self.trainer.strategy
        held = sum(storages.values()) - strategy.memory_figures.get("host_bytes", 0)
        self.result.peak_bytes = max(self.result.peak_bytes, int(held))

    def on_train_batch_start(self, *_: Any) -> None:
        """Takes the time."""
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with two values of state for each parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


WEIGHT_BYTES = NUM_BLOCKS * 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)


def train(budget: float | None) -> Result:
    """One run; the budget in multiples of the weights."""
    L.seed_everything(1, verbose=False)
    model = Stack()
    data = TensorDataset(torch.randn(SAMPLES * (LAST + 1), WIDTH))
    model.data_key = data.tensors[0].untyped_storage()._cdata
    strategy: Any = PipeShiftStrategy(microbatches=MICROBATCHES)
    plugin = MemoryCompression(budget=budget * WEIGHT_BYTES) if budget else None
    trainer = quiet_trainer(
        {"devices": 1, "strategy": strategy},
        max_epochs=1,
        plugins=[plugin] if plugin else [],
    )
    trainer.fit(model, DataLoader(data, batch_size=SAMPLES))
    result, plan = model.result, strategy.plan
    times = model.times[FIRST : LAST + 1]
    result.step_seconds = median(end - begin for begin, end in pairwise(times))
    if plan.prediction is not None:
        result.predicted_seconds = plan.prediction.step_seconds
    result.num_state, result.num_weights = (
        sum(map(len, layers)) for layers in (plan.optimizer_on_host, plan.weights_on_host)
    )
    result.total = float(sum(p.double().sum() for p in model.parameters()))
    return result


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = [
        {name: run_ranks(train, 1, budget)[0] for name, budget in BUDGETS.items()}
        for _ in range(args.num_rounds)
    ]
    reference = [found["does not bind"] for found in rounds]
    rows, figures = [], {}
    for name, budget in BUDGETS.items():
        runs = [found[name] for found in rounds]
        assert {run.total for run in runs} == {reference[0].total}, "the bits differ"
        slower, expected = (
            median(
                getattr(run, what) / getattr(plain, what)
                for run, plain in zip(runs, reference, strict=True)
            )
            if getattr(runs[0], what)
            else None
            for what in ("step_seconds", "predicted_seconds")
        )
        rows.append(
            (
                name,
                f"{budget:.1f} W" if budget else "-",
                f"{max(run.peak_bytes for run in runs) / WEIGHT_BYTES:.2f} W",
                f"{runs[-1].num_state}",
                f"{runs[-1].num_weights}",
                f"{1000 * median(run.step_seconds for run in runs):.0f} ms",
                f"{slower - 1:+.1%}" if slower else "-",
                f"{expected - 1:+.1%}" if expected else "-",
            )
        )
        figures[name] = {
            "budget": budget,
            "slower": slower,
            "expected": expected,
            "runs": [asdict(run) for run in runs],
        }
    print_table(
        f"one device, {NUM_BLOCKS} blocks, W = {WEIGHT_BYTES / 1e6:.0f} MB, optimizer state 2 W",
        ("budget", "of", "peak", "state moves", "weights move", "step", "slower", "predicted"),
        rows,
    )
    save(args.json, {"weight_bytes": WEIGHT_BYTES, "contenders": figures})


if __name__ == "__main__":
    main()
