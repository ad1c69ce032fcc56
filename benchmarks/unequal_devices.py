"""The gain of a plan by measured speeds on unequal devices, and its distance from the bound.

    python -m benchmarks.unequal_devices

Three stages of which the second is half as fast as the first, and the third a quarter: as many
layers on each (the uniform split) against what PipeShift makes of it by itself. The devices are
slow because their layers sleep longer, and because a CPU quota holds them back (layers that
compute; needs root and cgroups, version 1). Both plans take turns in one run.

The bound: all layers' work, as it was measured in this run, over the sum of all speeds; once for
every microbatch, and once more for every stage but one, in which the pipeline fills and drains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.placements import Plans, Repeated, TakingTurns, Timed, compare
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper, slow_down

SPEEDS = (1.0, 0.5, 0.25)
NUM_LAYERS = 21
SLEEPS = (0.004, 0.008)
WIDTH, ROWS = 384, 96
CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_MICROSECONDS = 10_000


class Computer(L.LightningModule):
    """Equal layers that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(x, target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return SGD(self.parameters(), lr=0.001)


class Block(nn.Module):
    """One layer, as `configure_layers` would name it: it is not opened."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(x)))
        return found


@contextmanager
def quota(part: float) -> Iterator[None]:
    """Context in which this process has a part of one core."""
    group = CGROUP / f"pipeshift-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (group / "cpu.cfs_quota_us").write_text(str(round(part * PERIOD_MICROSECONDS)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def measure(computes: bool, microbatches: int, num_rounds: int, num_steps: int) -> Any:
    """Runs on every rank: what came of both plans, and what one layer takes at full speed."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    speed = SPEEDS[int(os.environ["RANK"])]

    def make_plans(strategy: PipeShiftStrategy) -> Plans:
        even = Placement((uniform(NUM_LAYERS, len(SPEEDS)),))
        plans = {"planned": strategy.plan, "uniform": strategy.plan.with_placement(even)}
        return {name: strategy.predicted(plan) for name, plan in plans.items()}

    def fit() -> tuple[dict[str, Timed], float | None]:
        strategy = PipeShiftStrategy(microbatches=microbatches, profile_steps=4)
        turns = TakingTurns(make_plans, num_rounds, num_steps)
        width, rows = (WIDTH, ROWS) if computes else (64, 1)
        sample = (torch.randn(width), torch.randn(width))
        module = Computer() if computes else Sleeper(NUM_LAYERS, 64, *SLEEPS)
        found = compare(module, Repeated(sample), microbatches * rows, strategy, turns)
        return found, _slot(strategy)

    if computes:
        with quota(speed):
            return fit()
    slow_down(1 / speed)
    return fit()


def _slot(strategy: PipeShiftStrategy) -> float | None:
    """All layers' work over all devices' speeds, by what was measured; on the first rank."""
    if strategy.measured is None:
        return None
    profile, cluster, _ = strategy.measured
    (times,) = profile.kinds.values()
    work = sum(times.forward) + sum(times.backward)
    return work / sum(device.speed for device in cluster.devices)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-steps", type=int, default=2)
    parser.add_argument("--only", choices=("sleep", "compute"))
    options = parser.parse_args()

    rows, figures = [], {}
    kinds = {"sleep": False, "compute": True}
    for name, computes in kinds.items():
        if options.only not in (None, name):
            continue
        given = (computes, options.microbatches, options.num_rounds, options.num_steps)
        found, slot = run_ranks(measure, len(SPEEDS), *given, timeout=1200)[0]
        bound = slot * (options.microbatches + len(SPEEDS) - 1)
        planned, even = found["planned"], found["uniform"]
        for what, timed in found.items():
            rows.append(
                [
                    f"layers that {name}",
                    what,
                    str(timed.counts[0]),
                    timed.predicted_seconds,
                    timed.median,
                    shown(interval(ratios(even.turns, timed.turns))),
                    shown(interval([bound / seconds for seconds in timed.turns])),
                ]
            )
        figures[name] = {
            "bound_seconds": bound,
            "times_the_uniform": interval(ratios(even.turns, planned.turns)),
            "of_the_bound": interval([bound / seconds for seconds in planned.turns]),
            "counts": ", ".join(map(str, planned.counts[0])),
            "plans": {what: asdict(timed) for what, timed in found.items()},
        }
    header = ["", "plan", "layers", "predicted s", "s a step", "times the uniform", "of the bound"]
    speeds = " : ".join(f"{speed:g}" for speed in SPEEDS)
    print_table(f"Devices of speeds {speeds}, {options.microbatches} microbatches", header, rows)
    print("\nPipeShift is to reach 1.6 times the uniform split, and 0.95 of the bound.")
    save(options.json, figures)


if __name__ == "__main__":
    main()
