"""The cost of recomputing layers: in idle time, and by checkpointing the same ones in the model.

    python -m benchmarks.recomputation

Four stages of layers that sleep 5 ms forward and 10 ms backward and save 1 MB each for a
microbatch: four layers on each stage and six on the last. So the last stage sets the pace, and the
others wait for its gradients longer than a forward takes (NUDT: stage i recomputes for free iff the
slowest stage's time >= 2 F_i + B_i). In 1F1B the last stage runs each backward right after its
forward: it holds one microbatch whether it recomputes or not, so PipeShift never recomputes there,
and keeps what its six layers save.

Contenders take turns in one run:

- nothing is recomputed;
- ``recompute="full"``: PipeShift recomputes the twelve layers of the first three stages;
- the same twelve layers in ``torch.utils.checkpoint``, called by the model;
- all eighteen layers in it, as a model does that does not know of stages.

Peaks are the bytes of saved tensors that are alive at once, counted by the memory itself (see
:mod:`benchmarks.holding`). Those of ``torch.utils.checkpoint`` are lower: it recomputes one layer
just before its backward, PipeShift all of a stage's layers of a microbatch before its gradient
comes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.holding import Holder, PeakTurns
from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from benchmarks.placements import Plans, Repeated, compare
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.testing.ranks import run_ranks

COUNTS = (4, 4, 4, 6)
NOT_LAST = sum(COUNTS[:-1])
SLEEPS = (0.005, 0.010)
WIDTH, NUM_BYTES = 64, 1_000_000
NOTHING, PLANNED = "nothing", 'recompute="full"'
SAME, ALL = "the same layers, torch.utils.checkpoint", "all layers, torch.utils.checkpoint"
CHECKPOINTED = {NOTHING: 0, PLANNED: 0, SAME: NOT_LAST, ALL: sum(COUNTS)}
"""How many layers the model itself checkpoints, from the first on."""


class Checkpointing(Holder):
    """Its first layers may each be checkpointed."""

    num_checkpointed = 0

    def run(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        """Calls a layer."""
        if number < self.num_checkpointed:
            found: Tensor = checkpoint(layer, x, use_reentrant=False)
            return found
        return super().run(number, layer, x)


def measure(microbatches: int, num_rounds: int, num_steps: int) -> Any:
    """Runs on every rank: what was timed, and this rank's peaks in bytes."""
    L.seed_everything(0, verbose=False)
    module = Checkpointing(sum(COUNTS), WIDTH, NUM_BYTES, SLEEPS)

    def make_plans(strategy: PipeShiftStrategy) -> Plans:
        plan = strategy.plan.with_placement(Placement((COUNTS,)))
        everything = replace(plan, recompute=(tuple(range(sum(COUNTS))),))
        # The simulator knows nothing of what a model does by itself.
        return {
            NOTHING: strategy.predicted(plan),
            PLANNED: strategy.predicted(everything),
            SAME: plan,
            ALL: plan,
        }

    def enter(name: str) -> None:
        module.num_checkpointed = CHECKPOINTED[name]

    strategy = PipeShiftStrategy(microbatches=microbatches, profile_steps=4)
    turns = PeakTurns(make_plans, num_rounds, num_steps, enter)
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    found = compare(module, Repeated(sample), 4 * microbatches, strategy, turns)
    return found, turns.peaks


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-steps", type=int, default=2)
    options = parser.parse_args()

    given = (options.microbatches, options.num_rounds, options.num_steps)
    ranks = run_ranks(measure, len(COUNTS), *given, timeout=1200)
    found = ranks[0][0]
    base = found[NOTHING]
    rows, figures = [], {}
    for name, timed in found.items():
        peaks = [max(peaks[name]) for _, peaks in ranks]
        costs = interval([100 * (times - 1) for times in ratios(timed.turns, base.turns)])
        rows.append(
            [
                name,
                " ".join(f"{peak / 1e6:.0f}" for peak in peaks),
                timed.predicted_seconds or "",
                timed.median,
                shown(costs, "+.1f"),
            ]
        )
        figures[name] = {
            "peak_bytes": peaks,
            "step_seconds": interval(timed.turns),
            "costs_percent": costs,
            "timed": asdict(timed),
        }
    print_table(
        f"{len(COUNTS)} stages of {list(COUNTS)} layers, {options.microbatches} microbatches",
        ["recomputed", "peaks, MB", "predicted s", "s a step", "costs, %"],
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
