"""What it costs to recompute every layer: in idle time, and by checkpointing each layer.

    python -m benchmarks.recomputation

Four stages of layers that sleep 5 ms forward and 10 ms backward, four on each and six on the
last. So the last stage sets the pace, and the others wait for its gradients longer than a
forward takes (NUDT: stage i recomputes for free iff the slowest stage's time >= 2 F_i + B_i).
Contenders take turns in one run: nothing recomputed; everything recomputed by the plan
(``recompute="full"``); every layer in ``torch.utils.checkpoint``, as a model does by itself.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring import arguments, print_table, save
from benchmarks.placements import Plans, Repeated, TakingTurns, Timed, compare
from benchmarks.sleeping import Sleeper
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.placement import Placement
from tests.harness import run_ranks

COUNTS = (4, 4, 4, 6)
SLEEPS = (0.005, 0.010)
WIDTH = 256
NOTHING, PLANNED, CHECKPOINTED = "nothing", "everything, in idle time", "every layer, by itself"


class Checkpointing(Sleeper):
    """Sleeping layers that may each be checkpointed."""

    checkpoints = False

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Calls a layer."""
        if self.checkpoints:
            found: Tensor = checkpoint(layer, x, use_reentrant=False)
            return found
        return super().run(layer, x)


def measure(microbatches: int, num_rounds: int, num_steps: int) -> dict[str, Timed]:
    """Runs on every rank."""
    L.seed_everything(0, verbose=False)
    module = Checkpointing(sum(COUNTS), WIDTH, *SLEEPS)

    def make_plans(strategy: PipeShiftStrategy) -> Plans:
        plan = strategy.plan.with_placement(Placement((COUNTS,)))
        everything = replace(plan, recompute=(tuple(range(sum(COUNTS))),))
        plans = {NOTHING: plan, PLANNED: everything}
        plans = {name: strategy.predicted(plan) for name, plan in plans.items()}
        # The simulator knows nothing of what a model does by itself.
        return {**plans, CHECKPOINTED: plan}

    def enter(name: str) -> None:
        module.checkpoints = name == CHECKPOINTED

    strategy = PipeShiftStrategy(microbatches=microbatches, profile_steps=4)
    turns = TakingTurns(make_plans, num_rounds, num_steps, enter)
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    return compare(module, Repeated(sample), 64 * microbatches, strategy, turns)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=3)
    options = parser.parse_args()

    given = (options.microbatches, options.num_rounds, options.num_steps)
    found = run_ranks(measure, len(COUNTS), *given, timeout=1200)[0]
    base = found[NOTHING].median
    rows = [
        [name, timed.predicted_seconds or "", timed.median, f"{timed.median / base - 1:+.1%}"]
        for name, timed in found.items()
    ]
    print_table(
        f"{len(COUNTS)} stages of {list(COUNTS)} layers, {options.microbatches} microbatches",
        ["recomputed", "predicted s", "s a step", "costs"],
        rows,
    )
    print("\nIn idle time it is to cost at most 5 %.")
    costs = {name: timed.median / base - 1 for name, timed in found.items()}
    save(options.json, {"costs": costs, "plans": {n: asdict(t) for n, t in found.items()}})


if __name__ == "__main__":
    main()
