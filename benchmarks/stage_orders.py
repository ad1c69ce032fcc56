"""What the order of unlike devices is worth, and which one a run chooses by itself.

    python -m benchmarks.stage_orders

Three devices, given from the fastest to the slowest, and a model whose last layers take longest: in
that order no cut is good. PipeShift chooses cuts and order by itself. Once it has measured its
first steps and has decided, the best plan of each of the six orders, by the same measurements,
takes its turn in the same run.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import nn

from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.placements import Plans, Repeated, TakingTurns, Timed, compare
from lightning_pipeshift import PipeShiftStrategy, Plan
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.planning.make_plan import Settings, make_plan
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper, SleepingLayer, slow_down

SPEEDS = (1.0, 0.5, 0.25)
WIDTH = 64
FORWARD_SECONDS, BACKWARD_SECONDS = 0.004, 0.008
WEIGHTS = (1, 1, 1, 2, 4, 12)
PROFILE_STEPS = 6
CHOSEN = "chosen"


class Uneven(Sleeper):
    """Layers of which the last ones take longest."""

    def __init__(self) -> None:
        super().__init__(0)
        # Layers that look alike count as equal until they have been measured.
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(SleepingLayer(WIDTH, FORWARD_SECONDS, BACKWARD_SECONDS) for _ in range(weight))
            )
            for weight in WEIGHTS
        )

    def configure_layers(self) -> list[nn.Module]:
        """One by one."""
        return list(self.layers)


def plans_of(strategy: PipeShiftStrategy, microbatches: int) -> Plans:
    """The plan in force, and the best plan of each order, on every rank."""
    texts: dict[str, str] = {}
    if strategy.measured is not None:
        profile, cluster, _ = strategy.measured
        settings = Settings(microbatches=microbatches)
        texts = {CHOSEN: strategy.plan.to_json()}
        for order in itertools.permutations(range(len(SPEEDS))):
            found = make_plan(settings, profile, cluster, Topology((order,)))
            texts[" ".join(map(str, order))] = found.to_json()
    return {name: Plan.from_json(text) for name, text in strategy.broadcast(texts).items()}


class AfterTheDecision(TakingTurns):
    """Begins when the run has decided by its first measurements."""

    def __init__(self, wait: int, *given: Any) -> None:
        super().__init__(*given)
        self._wait = wait

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        """See :class:`TakingTurns`."""
        strategy: Any = trainer.strategy
        if not self.found and strategy.is_measured and self._wait:
            self._wait -= 1
            return
        super().on_train_batch_end(trainer, *others)


def measure(microbatches: int, num_rounds: int, num_steps: int) -> dict[str, Timed]:
    """Runs on every rank."""
    L.seed_everything(0, verbose=False)
    slow_down(1 / SPEEDS[int(os.environ["RANK"])])
    strategy = PipeShiftStrategy(microbatches=microbatches, profile_steps=PROFILE_STEPS)
    turns = AfterTheDecision(6, lambda s: plans_of(s, microbatches), num_rounds, num_steps)
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    return compare(Uneven(), Repeated(sample), microbatches, strategy, turns)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=3)
    options = parser.parse_args()

    given = (options.microbatches, options.num_rounds, options.num_steps)
    found = run_ranks(measure, len(SPEEDS), *given, timeout=1200)[0]
    orders = {name: timed for name, timed in found.items() if name != CHOSEN}
    best = min(orders.values(), key=lambda timed: timed.median)
    worst = max(orders.values(), key=lambda timed: timed.median)
    rows = [
        [
            name,
            str(timed.counts[0]),
            timed.predicted_seconds,
            timed.median,
            shown(interval(ratios(timed.turns, best.turns))),
        ]
        for name, timed in found.items()
    ]
    header = ["ranks", "layers", "predicted s", "s a step", "times the best order"]
    speeds = " : ".join(f"{speed:g}" for speed in SPEEDS)
    print_table(f"Ranks of speeds {speeds}, {options.microbatches} microbatches", header, rows)
    print("\nWhat the run chooses is to take at most 1.02 times as long as the best order.")
    save(
        options.json,
        {
            "chosen_over_best": interval(ratios(found[CHOSEN].turns, best.turns)),
            "worst_over_best": interval(ratios(worst.turns, best.turns)),
            "plans": {name: asdict(timed) for name, timed in found.items()},
        },
    )


if __name__ == "__main__":
    main()
