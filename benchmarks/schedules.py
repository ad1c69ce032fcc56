"""How long a step takes by each schedule, beside 1F1B and beside torch's own.

    python -m benchmarks.schedules

Layers that sleep let two cores carry four stages: one layer on each stage sleeps 20 ms in its
forward, 20 ms for the gradient of its input and 20 ms for that of its weight. With n stages and k
microbatches a 1F1B step then takes (k + n - 1) x 60 ms. With ``zb-h1`` the last stages compute the
gradients of weights where they would wait: (k + (n - 1) / 3) x 60 ms (Qi et al., ICLR 2024, table
1). With ``interleaved_1f1b`` each stage has two layers of half the time, and a step takes
(k + (n - 1) / 2) x 60 ms (Narayanan et al., SC 2021, section 2.2). torch's pipeline runs in the
same processes, in turn with each schedule: its interleaved 1F1B beside ours, and else 1F1B, as it
has no eager 1F1B and no ZB-H1 for one chunk of layers on each stage.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict

from torch import Tensor

from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.side_by_side import PIPESHIFT, TORCH, series
from benchmarks.sleeping_stages import NUM_STEPS, WIDTH, measure
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import SleepingLayer

PART_SECONDS = 0.020
"""Of a forward, of the gradient of an input, and of that of a weight."""

SCHEDULES = ("1f1b", "eager_1f1b", "zb-h1", "interleaved_1f1b")


def layer_of_three_parts(num_chunks: int) -> SleepingLayer:
    """A sleeping layer whose weight's gradient takes time, too."""
    seconds = PART_SECONDS / num_chunks

    def pause(_: Tensor) -> None:
        time.sleep(seconds)

    layer = SleepingLayer(WIDTH, seconds, seconds)
    layer.linear.weight.register_hook(pause)
    return layer


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[4])
    parser.add_argument("--microbatches", type=int, help="by default twice the stages")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--num-rounds", type=int, default=6)
    options = parser.parse_args()

    rows, figures = [], {}
    for num_stages in options.stages:
        num_microbatches = options.microbatches or 2 * num_stages
        ideal = (num_microbatches + num_stages - 1) * 3 * PART_SECONDS
        for schedule in options.schedules:
            ranks = run_ranks(
                measure,
                num_stages,
                num_stages,
                schedule,
                options.num_rounds,
                num_microbatches=num_microbatches,
                make_layer=layer_of_three_parts,
                timeout=900,
            )
            results = series(ranks, num_cores=len(os.sched_getaffinity(0)))
            ours, theirs = results[PIPESHIFT], results[TORCH]
            faster = interval(ours.times_as_fast(theirs))
            of_ideal = interval([ideal / seconds for seconds in ours.step_seconds])
            shape = [num_stages, num_microbatches, schedule]
            rows.append([*shape, ours.median, theirs.median, shown(faster), shown(of_ideal)])
            figures[f"{num_stages} stages, {num_microbatches} microbatches, {schedule}"] = {
                "ideal_seconds_of_1f1b": ideal,
                "pipeshift_over_torch": faster,
                "pipeshift_over_ideal_1f1b": of_ideal,
                "contenders": {name: asdict(result) for name, result in results.items()},
            }
    header = ["stages", "microbatches", "schedule", "s a step", "torch", "times as fast"]
    print_table(
        f"Layers that sleep {PART_SECONDS * 1000:.0f} ms in each of three parts:"
        f" {options.num_rounds} rounds of {NUM_STEPS} steps",
        [*header, "of 1F1B's ideal"],
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
