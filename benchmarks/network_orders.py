"""What the order and the grouping of hosts are worth where their links differ.

    python -m benchmarks.network_orders

Four hosts, two of them joined at 200 Mbit/s and two at 50 (network namespaces; needs root), as two
virtual machines of two stages. The model and the links are measured, and the planner chooses. Then
every order and grouping that there is takes some steps, each with its own best cut: the chosen one
is compared with the worst of all, and with their mean.
"""

from __future__ import annotations

import time
from itertools import pairwise, permutations
from statistics import mean, median
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.hosts import Link, hosts, why_not
from benchmarks.measuring import arguments, print_table, save
from benchmarks.placements import Repeated
from benchmarks.sleeping import Sleeper
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.arrangement import Wishes
from lightning_pipeshift.plan.planner import arrange_all
from tests.features_models import quiet_trainer

MEGABITS = (200.0, 50.0, 50.0, 200.0)
NUM_LAYERS, WIDTH, ROWS, NUM_MICROBATCHES = 8, 1024, 64, 8
SLEEPS = (0.010, 0.020)
NUM_WARM_UP = 2

Machines = list[list[int]]


class Steps(L.Callback):
    """Times the steps, and ends the run after some."""

    def __init__(self, count: int) -> None:
        self.begins: list[float] = []
        self._count = count

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self.begins.append(time.perf_counter())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Looks whether that was enough."""
        trainer.should_stop = len(self.begins) > self._count


def run(machines: Machines, num_steps: int, measures: bool) -> Any:
    """Runs on every rank: what the steps took, or what was measured."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    strategy = PipeShiftStrategy(
        virtual_machines=machines, microbatches=NUM_MICROBATCHES, profile_steps=4 * measures
    )
    if measures:
        strategy.only_measures()
    steps = Steps(num_steps + NUM_WARM_UP)
    where = {"devices": 1, "num_nodes": len(MEGABITS), "strategy": strategy}
    trainer = quiet_trainer(where, max_epochs=-1, callbacks=[steps])
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    data = DataLoader(Repeated(sample), batch_size=ROWS * NUM_MICROBATCHES)
    trainer.fit(Sleeper(NUM_LAYERS, WIDTH, *SLEEPS), data)
    if measures:
        return strategy.measured
    seconds = [b - a for a, b in pairwise(steps.begins)]
    return median(seconds[NUM_WARM_UP:]), [
        list(counts) for counts in strategy.plan.placement.counts
    ]


def every_arrangement() -> list[Machines]:
    """All ways to make two ordered pairs of four; which of the pairs is first does not matter."""
    found = [[list(order[:2]), list(order[2:])] for order in permutations(range(4))]
    return [machines for machines in found if 0 in machines[0]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-steps", type=int, default=4)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    with hosts(len(MEGABITS), [Link(megabits=rate) for rate in MEGABITS]) as made:
        measured = made.run(run, [[0, 1], [2, 3]], 12, True, timeout=300.0)
        profile, cluster, _ = next(found for found in measured if found is not None)
        wishes = Wishes(
            virtual_machines=2,
            microbatches=NUM_MICROBATCHES,
            batch_samples=float(ROWS * NUM_MICROBATCHES),
            batch_shares=(1.0, 1.0),
        )
        best = arrange_all(profile, cluster, wishes)
        chosen = sorted(map(list, best.ranks), key=lambda ranks: 0 not in ranks)
        rows, seconds = [], {}
        for machines in every_arrangement():
            took, counts = made.run(run, machines, options.num_steps, False, timeout=300.0)[0]
            seconds[str(machines)] = took
            mark = "<- chosen" if machines == chosen else ""
            rows.append([str(machines), str(counts), took, mark])
    rows.sort(key=lambda row: row[2])
    print_table(
        f"Hosts at {', '.join(f'{rate:g}' for rate in MEGABITS)} Mbit/s, as 2 x 2",
        ["virtual machines", "layers", "s a step", ""],
        rows,
    )
    mine, all_of_them = seconds[str(chosen)], list(seconds.values())
    figures = {
        "chosen": chosen,
        "worst_over_chosen": max(all_of_them) / mine,
        "mean_over_chosen": mean(all_of_them) / mine,
        "chosen_over_best": mine / min(all_of_them),
        "predicted_seconds": best.prediction.step_seconds,
        "seconds": seconds,
    }
    print(
        f"\nthe chosen one is {figures['worst_over_chosen']:.2f} times as fast as the worst, and"
        f" {figures['mean_over_chosen']:.2f} times as the mean; predicted"
        f" {best.prediction.step_seconds:.3g} s"
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
