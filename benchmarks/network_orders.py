"""The gain of choosing the order and the grouping of hosts with different links.

    python -m benchmarks.network_orders

Four hosts, two of them joined at 200 Mbit/s and two at 50 (network namespaces; needs root), as two
virtual machines of two stages. The model and the links are measured, and the planner chooses. Then
every order and grouping that there is takes some steps, each with its own best cut, in rounds.

Hosts of one rate are alike, so the twelve orders are of four kinds, named by the rates of their
stages. All orders of a kind should take the same: what they differ by is the machine's noise. The
chosen kind is compared with the others round by round: every order of a kind with the median of the
chosen one's.
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
from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.placements import Repeated
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.lightning.session import NextRun
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import PlanRequest
from lightning_pipeshift.testing.sleeping import Sleeper
from tests.features_models import quiet_trainer

MEGABITS = (200.0, 50.0, 50.0, 200.0)
NUM_LAYERS, WIDTH, ROWS, NUM_MICROBATCHES = 8, 512, 64, 8
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
        strategy.next_run = NextRun(only_measures=True)
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


def kind_of(machines: Machines) -> str:
    """The rates of an order's stages, the same for orders that differ by equal hosts only."""
    rates = sorted([f"{MEGABITS[host]:g}" for host in machine] for machine in machines)
    return " | ".join(" - ".join(machine) for machine in rates)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-steps", type=int, default=4)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    with hosts(len(MEGABITS), [Link(megabits=rate) for rate in MEGABITS]) as made:
        measured = made.run(run, [[0, 1], [2, 3]], 12, True, timeout=300.0)
        profile, cluster, _ = next(found for found in measured if found is not None)
        request = PlanRequest(
            virtual_machines=2,
            microbatches=NUM_MICROBATCHES,
            batch_samples=float(ROWS * NUM_MICROBATCHES),
            batch_shares=(1.0, 1.0),
        )
        best = arrange(profile, cluster, request)
        chosen = sorted(map(list, best.ranks), key=lambda ranks: 0 not in ranks)
        seconds: dict[str, list[float]] = {str(order): [] for order in every_arrangement()}
        cuts = {}
        for number in range(options.num_rounds):
            orders = every_arrangement()
            # Nobody always goes first.
            turn = number % len(orders)
            for machines in orders[turn:] + orders[:turn]:
                took, counts = made.run(run, machines, options.num_steps, False, timeout=300.0)[0]
                seconds[str(machines)].append(took)
                cuts[str(machines)] = str(counts)
    kinds: dict[str, list[str]] = {}
    for machines in every_arrangement():
        kinds.setdefault(kind_of(machines), []).append(str(machines))
    by_kind = {
        kind: [median(seconds[order][n] for order in orders) for n in range(options.num_rounds)]
        for kind, orders in kinds.items()
    }
    mine = kind_of(chosen)
    means = [mean(rounds) for rounds in zip(*seconds.values(), strict=True)]
    figures: dict[str, Any] = {
        "chosen": chosen,
        "chosen_kind": mine,
        "mean_over_chosen": interval(ratios(means, by_kind[mine])),
        "predicted_seconds": best.prediction.step_seconds,
        "kinds": {},
        "seconds": seconds,
    }
    rows = []
    for kind in by_kind:
        alike = [[seconds[order][n] for order in kinds[kind]] for n in range(options.num_rounds)]
        found: dict[str, Any] = {
            "orders": kinds[kind],
            "cuts": [cuts[order] for order in kinds[kind]],
            "step_seconds": interval([each for order in kinds[kind] for each in seconds[order]]),
            "over_chosen": interval(
                [each for order in kinds[kind] for each in ratios(seconds[order], by_kind[mine])]
            ),
            "slowest_over_fastest_alike": interval([max(each) / min(each) for each in alike]),
        }
        figures["kinds"][kind] = found
        rows.append(
            [
                kind,
                len(kinds[kind]),
                shown(found["step_seconds"]),
                shown(found["over_chosen"]),
                shown(found["slowest_over_fastest_alike"]),
                "<- chosen" if kind == mine else "",
            ]
        )
    rows.sort(key=lambda row: str(row[2]))
    worst = max(by_kind, key=lambda kind: median(by_kind[kind]))
    figures["worst_kind"] = worst
    figures["worst_over_chosen"] = figures["kinds"][worst]["over_chosen"]
    print_table(
        f"Hosts at {', '.join(f'{rate:g}' for rate in MEGABITS)} Mbit/s, as 2 x 2:"
        f" {options.num_rounds} rounds",
        ["Mbit/s", "orders", "s a step", "times the chosen", "slowest / fastest of them", ""],
        rows,
    )
    print(f"\nall orders' mean: {shown(figures['mean_over_chosen'])} times the chosen kind")
    save(options.json, figures)


if __name__ == "__main__":
    main()
