"""The asynchronous pipeline against a synchronous one: throughput, and how busy its stages are.

    python -m benchmarks.asynchronous

Layers that sleep instead of computing let two cores carry four stages: one layer on each stage
sleeps in its forward, and twice as long in its backward. A step of 1F1B with n stages and m
microbatches takes m + n - 1 times as long as both; a minibatch of the asynchronous pipeline takes
the time of one microbatch, as it never drains. So with minibatches as large as microbatches its
throughput should be (m + n - 1) / m times as high. Both schedules run in the same processes in
turn. A stage's utilisation is the time in which its layers sleep over the time that passes.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper

WIDTH = 64
SYNCHRONOUS, ASYNCHRONOUS = "1f1b", "async"


class Times(pl.Callback):
    """The times at which batches ended on this rank."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())


def seconds_per_batch(
    schedule: str, num_stages: int, num_microbatches: int, num_batches: int, seconds: float
) -> float:
    """How long a batch takes on this rank, when the pipeline has its pace."""
    is_async = schedule == ASYNCHRONOUS
    size = 1 if is_async else num_microbatches
    warm_up = 2 * num_stages if is_async else 2
    data = TensorDataset(*(torch.randn((num_batches + warm_up + 1) * size, WIDTH),) * 2)
    times = Times()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=PipeShiftStrategy(
            schedule=schedule,
            microbatches=1 if is_async else num_microbatches,
            partition=[1] * num_stages,
            profile_steps=0,
        ),
        callbacks=[times],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Sleeper(num_stages, WIDTH, seconds, 2 * seconds), DataLoader(data, batch_size=size))
    return (times.ends[warm_up + num_batches - 1] - times.ends[warm_up - 1]) / num_batches


def measure(
    num_stages: int, num_microbatches: int, num_rounds: int, num_batches: int, seconds: float
) -> dict[str, list[float]]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {SYNCHRONOUS: [], ASYNCHRONOUS: []}
    for _ in range(num_rounds):
        for schedule, number in (
            (SYNCHRONOUS, max(2, num_batches // (2 * num_microbatches))),
            (ASYNCHRONOUS, num_batches),
        ):
            found[schedule].append(
                seconds_per_batch(schedule, num_stages, num_microbatches, number, seconds)
            )
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4, help="of 1f1b")
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-batches", type=int, default=60, help="minibatches in a round")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.020, 0.005])
    options = parser.parse_args()

    n, m = options.stages, options.microbatches
    promised = (m + n - 1) / m
    rows, figures = [], {}
    for seconds in options.seconds:
        ranks = run_ranks(
            measure, n, n, m, options.num_rounds, options.num_batches, seconds, timeout=900
        )
        # The slowest rank of each round.
        slowest = {
            schedule: [max(rank[schedule][i] for rank in ranks) for i in range(options.num_rounds)]
            for schedule in (SYNCHRONOUS, ASYNCHRONOUS)
        }
        of_sample = [step / m for step in slowest[SYNCHRONOUS]]
        gains = ratios(of_sample, slowest[ASYNCHRONOUS])
        gain = interval(gains)
        reached = interval([value / promised for value in gains])
        busy = interval([3 * seconds / pace for pace in slowest[ASYNCHRONOUS]])
        rows.append([f"{seconds * 1000:g} ms", promised, shown(gain), shown(reached), shown(busy)])
        figures[f"{seconds * 1000:g} ms"] = {
            "promised": promised,
            "async_over_1f1b": gain,
            "of_promised": reached,
            "utilisation": busy,
            "seconds": slowest,
        }
    print_table(
        f"{n} stages, {m} microbatches, {len(os.sched_getaffinity(0))} cores",
        ["forward", "promised", "async over 1f1b", "of what is promised", "utilisation"],
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
