"""How much of a step's time is neither computing nor the schedule's own bubble.

    python -m benchmarks.sleeping_stages

Layers that sleep instead of computing let two cores carry eight stages: one layer on each stage
sleeps 20 ms in its forward and 40 ms in its backward. With n stages and k microbatches a 1F1B step
then takes (k + n - 1) x 60 ms, and what it takes more is PipeShift, Lightning, and the operating
system's way to wake a process. Every contender runs in the same processes in turn; k is 2 n.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median

import lightning as L
import torch
import torch.nn.functional as F
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
from lightning_pipeshift.plan.schedule.schedules import num_chunks
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import (
    BACKWARD_SECONDS,
    FORWARD_SECONDS,
    Sleeper,
    SleepingLayer,
    plain_sgd,
)

WIDTH = 64
NUM_STEPS = 2


def sleeping_layer(num_chunks: int) -> SleepingLayer:
    """A stage's only layer, or that of one of its chunks."""
    return SleepingLayer(WIDTH, FORWARD_SECONDS / num_chunks, BACKWARD_SECONDS / num_chunks)


def measure(
    num_stages: int,
    schedule: str,
    num_rounds: int,
    bursts: bool = False,
    num_microbatches: int | None = None,
    make_layer: Callable[[int], SleepingLayer] = sleeping_layer,
) -> list[Round]:
    """Runs on every rank.

    Args:
        num_stages: each has one layer, or one for each of its chunks.
        schedule: PipeShift's; torch's is 1F1B, or interleaved 1F1B if that is PipeShift's.
        num_rounds: of both contenders.
        bursts: see ``--bursts``.
        num_microbatches: of a step; by default twice the stages.
        make_layer: makes a layer, given of how many chunks it is one.
    """
    L.seed_everything(0, verbose=False)
    num_microbatches = num_microbatches or 2 * num_stages
    count = num_chunks(schedule, num_stages)
    model = Sleeper(0, WIDTH)
    model.layers.extend(make_layer(count) for _ in range(count * num_stages))
    shape = (num_microbatches * NUM_STEPS * (num_rounds + 2), WIDTH)
    data = torch.randn(shape), torch.randn(shape)

    def make_contenders() -> Mapping[str, Contender]:
        batches = list(zip(*(x.split(num_microbatches) for x in data), strict=True))
        return {
            TORCH: TorchPipeline(
                [make_layer(count) for _ in range(count)],
                num_microbatches,
                F.mse_loss,
                plain_sgd,
                batches,
            )
        }

    return fit_beside(
        model,
        TensorDataset(*data),
        num_microbatches,
        PipeShiftStrategy(
            microbatches=num_microbatches, schedule=schedule, partition=[1] * (count * num_stages)
        ),
        Alternation(
            make_contenders, {PIPESHIFT: NUM_STEPS, TORCH: NUM_STEPS}, num_rounds, bursts=bursts
        ),
        num_stages,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedule", default="1f1b", help="PipeShift's")
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--bursts", action="store_true", help=BURSTS_HELP)
    options = parser.parse_args()

    rows, figures = [], {}
    for num_stages in options.stages:
        num_microbatches = 2 * num_stages
        ideal = (num_microbatches + num_stages - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)
        ranks = run_ranks(
            measure,
            num_stages,
            num_stages,
            options.schedule,
            options.num_rounds,
            options.bursts,
            timeout=900,
        )
        results = series(ranks, num_cores=len(os.sched_getaffinity(0)))
        of_ideal = {
            name: interval([ideal / seconds for seconds in result.step_seconds])
            for name, result in results.items()
        }
        times = interval(results[PIPESHIFT].times_as_fast(results[TORCH]))
        for name, result in results.items():
            rows.append(
                [
                    num_stages,
                    num_microbatches,
                    name,
                    ideal,
                    result.median,
                    shown(of_ideal[name]),
                    f"{median(result.others):.0%}",
                ]
            )
        figures[f"{num_stages} stages"] = {
            "ideal_seconds": ideal,
            "pipeshift_over_ideal": of_ideal[PIPESHIFT],
            "torch_over_ideal": of_ideal[TORCH],
            "pipeshift_over_torch": times,
            "contenders": {name: asdict(result) for name, result in results.items()},
        }
    header = ["stages", "microbatches", "", "ideal s", "s a step", "of the ideal", "others"]
    print_table(
        f"Layers that sleep {FORWARD_SECONDS * 1000:.0f} ms forward and"
        f" {BACKWARD_SECONDS * 1000:.0f} ms backward: {options.num_rounds} rounds"
        f" of {NUM_STEPS} steps",
        header,
        rows,
    )
    print("\nPipeShift is to reach 0.95 of the ideal.")
    save(options.json, figures)


if __name__ == "__main__":
    main()
