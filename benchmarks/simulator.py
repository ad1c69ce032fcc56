"""How near the simulator comes to what a step really takes.

    python -m benchmarks.simulator

The first steps of a run are measured, under one placement; from that the simulator predicts what a
step takes under others, which then take turns in the same run. With layers that sleep (two cores
carry eight stages) and with layers that compute (two stages). It is to be within 5 %.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.placements import Plans, Repeated, TakingTurns, Timed, compare
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper

WIDTH = 512
ROWS = 32


class Computer(L.LightningModule):
    """Layers of unlike sizes that compute."""

    def __init__(self, hidden: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size), nn.GELU(), nn.Linear(size, WIDTH))
            for size in hidden
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        for block in self.blocks:
            x = x + block(x)
        loss = F.mse_loss(x, target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return SGD(self.parameters(), lr=0.001)


def others(num_layers: int, num_stages: int, count: int) -> list[tuple[int, ...]]:
    """Some placements, drawn once and for all: even and uneven ones."""
    draw = random.Random(num_stages)
    found = []
    for _ in range(count):
        cuts = sorted(draw.sample(range(1, num_layers), num_stages - 1))
        ends = [0, *cuts, num_layers]
        found.append(tuple(b - a for a, b in pairwise(ends)))
    return found


def measure(
    num_stages: int, computes: bool, schedule: str, num_plans: int, num_rounds: int
) -> dict[str, Timed]:
    """Runs on every rank."""
    L.seed_everything(0, verbose=False)
    module: Any = Sleeper(2 * num_stages, 64, 0.008, 0.016)
    width, rows = 64, 1
    if computes:
        module, width, rows = Computer([1024, 2048, 512, 4096, 1024, 2048]), WIDTH, ROWS

    def make_plans(strategy: PipeShiftStrategy) -> Plans:
        plans = {"measured under": strategy.plan}
        for counts in others(len(strategy.plan.layers), num_stages, num_plans):
            plans[str(list(counts))] = strategy.plan.with_placement(Placement((counts,)))
        return {name: strategy.predicted(plan) for name, plan in plans.items()}

    strategy = PipeShiftStrategy(
        microbatches=2 * num_stages, schedule=schedule, partition="auto", profile_steps=10
    )
    turns = TakingTurns(make_plans, num_rounds, num_steps=4 if computes else 2)
    sample = (torch.randn(width), torch.randn(width))
    return compare(module, Repeated(sample), 2 * num_stages * rows, strategy, turns)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--num-plans", type=int, default=3)
    parser.add_argument("--num-rounds", type=int, default=5)
    options = parser.parse_args()

    rows, figures, errors = [], [], []
    cases = [(stages, False, "1f1b") for stages in options.stages]
    cases += [(options.stages[1 % len(options.stages)], False, "gpipe"), (2, True, "1f1b")]
    for num_stages, computes, schedule in cases:
        found = run_ranks(
            measure,
            num_stages,
            num_stages,
            computes,
            schedule,
            options.num_plans,
            options.num_rounds,
            timeout=1200,
        )[0]
        for name, timed in found.items():
            assert timed.predicted_seconds is not None
            predicted = timed.predicted_seconds
            error = interval([100 * (predicted / seconds - 1) for seconds in timed.turns])
            layers = "compute" if computes else "sleep"
            errors.append((layers, abs(error["median"])))
            rows.append(
                [num_stages, layers, schedule, name, predicted, timed.median, shown(error, "+.1f")]
            )
            figures.append(
                {"stages": num_stages, "layers": layers, "schedule": schedule}
                | {"error_percent": error, "measured_seconds": interval(timed.turns)}
                | asdict(timed)
            )
    header = [
        "stages",
        "layers that",
        "schedule",
        "placement",
        "predicted s",
        "measured s",
        "off by, %",
    ]
    print_table("Predicted and measured step times", header, rows)
    summary = {}
    for layers in ("sleep", "compute"):
        found_errors = [error for kind, error in errors if kind == layers]
        summary[layers] = {
            "cases": len(found_errors),
            "within_2_percent": sum(error <= 2 for error in found_errors),
            "within_5_percent": sum(error <= 5 for error in found_errors),
            "largest_error_percent": max(found_errors),
        }
        print(f"\nlayers that {layers}: {summary[layers]}")
    save(options.json, summary | {"cases": figures})


if __name__ == "__main__":
    main()
