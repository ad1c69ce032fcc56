"""The cost of recording a step for `PipelineTimeline`, and of gathering what was recorded.

    python -m benchmarks.timeline_cost

GPT-2 of transformers, small, on two stages. In one run each eighth step is recorded; the record is
gathered in threads during the step after it, and the file written. A cycle's seconds beyond eight
times its undisturbed steps are the cost of one record, the gathering included. Spread over a
hundred steps, it is to be below 0.5 %.
"""

from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.placements import Repeated
from lightning_pipeshift import PipelineTimeline, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer

CYCLE, SPREAD, NUM_MICROBATCHES, LENGTH = 8, 100, 8, 64
# After a recorded step, while its record is gathered.
DISTURBED = 2


class LanguageModel(L.LightningModule):
    """A small GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(n_layer=8, n_embd=192, n_head=4, vocab_size=512, n_positions=LENGTH)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor) -> Tensor:
        """The usual loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return SGD(self.parameters(), lr=0.001)


class Watch(L.Callback):
    """Times all steps, from the start of one to the start of the next."""

    def __init__(self, num_steps: int) -> None:
        self.begun: list[float] = []
        self._num_steps = num_steps

    def on_train_batch_start(self, *_: Any) -> None:
        """Before the timeline's own hook."""
        self.begun.append(time.perf_counter())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Ends the run when there is enough."""
        trainer.should_stop = len(self.begun) > self._num_steps


def measure(num_cycles: int, records: bool) -> list[float]:
    """Runs on every rank: the seconds of each step, a whole number of cycles."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    # The first cycle is warm-up.
    watch = Watch((num_cycles + 1) * CYCLE)
    with tempfile.TemporaryDirectory() as folder:
        timeline = PipelineTimeline(every_n_steps=CYCLE, folder=folder)
        trainer = quiet_trainer(
            {
                "devices": int(os.environ["WORLD_SIZE"]),
                "strategy": PipeShiftStrategy(microbatches=NUM_MICROBATCHES, profile_steps=0),
            },
            max_epochs=-1,
            callbacks=[watch, timeline] if records else [watch],
        )
        sample = torch.randint(512, (LENGTH,))
        trainer.fit(LanguageModel(), DataLoader(Repeated(sample), batch_size=2 * NUM_MICROBATCHES))
    steps = [after - before for before, after in zip(watch.begun, watch.begun[1:], strict=False)]
    return steps[CYCLE : CYCLE * (num_cycles + 1)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-cycles", type=int, default=40)
    options = parser.parse_args()
    steps = run_ranks(measure, 2, options.num_cycles, True, timeout=1200)[0]
    cycles = [steps[begin : begin + CYCLE] for begin in range(0, len(steps), CYCLE)]
    plain = [median(cycle[DISTURBED:]) for cycle in cycles]
    recorded = [cycle[0] for cycle in cycles]
    extra = [
        sum(cycle[:DISTURBED]) - DISTURBED * one for cycle, one in zip(cycles, plain, strict=True)
    ]
    ratios = [cycle[0] / one for cycle, one in zip(cycles, plain, strict=True)]
    costs = [100 * more / (SPREAD * one) for more, one in zip(extra, plain, strict=True)]
    rows = [
        ["not recorded", 1000 * median(plain)],
        ["recorded", 1000 * median(recorded)],
        ["the one after it", 1000 * median(cycle[1] for cycle in cycles)],
    ]
    print_table(f"{options.num_cycles} records", ["step", "ms"], rows)
    print(
        f"\na recorded step takes {shown(interval(ratios))} times its neighbours; all that a record"
        f" costs is {shown(interval(costs), '+.3f')} % of {SPREAD} steps; at most 0.5 % is allowed"
    )
    save(
        options.json,
        {
            "recorded_ratio": interval(ratios),
            "cost_percent": interval(costs),
            "recorded_seconds": interval(recorded),
            "plain_seconds": interval(plain),
            "rounds": {"steps": steps},
        },
    )


if __name__ == "__main__":
    main()
