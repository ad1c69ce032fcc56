"""What it costs to hold less: swaps, planned by ``MemoryCompression``, against keeping everything,
recomputing everything, and moving everything without a plan.

    python -m benchmarks.compression

Four stages of two layers each, which sleep 20 ms forward and 40 ms backward and save tensors: real
ones, really copied, by the two cores that carry all four stages. What a stage saves for one
microbatch is a *unit*; in 1F1B the stages hold 4, 3, 2 and 1 of them. Contenders take turns, in
three runs. With layers that save 128 MB each, so much that copying it there and back takes about as
long as computing, and with 64 MB:

- everything stays;
- under a budget of 3 units each, with other stages' room alone, and with the host's;
- every tensor copied to other memory when it is saved, and back when it is needed, by the thread
  that computes, as ``torch.autograd.graph.save_on_cpu`` does on a GPU without pinned memory.

(A transformer layer of width h saves 34 h bytes a token, Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, and computes 72 h^2 operations for it, forward and
backward. With h = 4096, at 150 TFLOP/s and 24 GB/s of PCIe, copying that there and back takes 1.4
times as long as computing.)

With layers that save 8 MB each:

- everything stays;
- everything recomputed, and a plan under the budget that this takes at its peak, a unit.

Peaks are what the activation store counted on each stage; it does not see the naive copies. Freed
memory stays with each process, for all contenders, as it does with a GPU's allocator: giving it
back to the system takes longer here than many of the copies.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from benchmarks.measuring import arguments, print_table, save
from benchmarks.placements import Repeated, TakingTurns
from benchmarks.sleeping import plain_sgd
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, Plan
from lightning_pipeshift.runtime.planning import make_plan
from lightning_pipeshift.runtime.stage_memory import MemoryWishes
from tests.features_models import quiet_trainer
from tests.harness import run_ranks

NUM_STAGES, LAYERS_PER_STAGE = 4, 2
SLEEPS = (0.020, 0.040)
TENSORS = 4
WIDTH, SAMPLES = 64, 4
SLACK_BYTES = 400_000
"""What a unit does not count: weights, and what layers are called with."""

KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_ARENA_MAX": "1",
}
"""For glibc, which asks the system for what is larger all the same."""

STAYS, LENT, HOST = "everything stays", "3 units, other stages", "3 units, the host"
AGAIN, LIKE_AGAIN, NAIVE = "all recomputed", "that peak, planned", "naive copies"


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        begun = time.perf_counter()
        inner = [torch.full((num_bytes // TENSORS // 4,), float(n)) for n in range(TENSORS)]
        ctx.save_for_backward(*inner)
        time.sleep(max(0.0, SLEEPS[0] - (time.perf_counter() - begun)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for number, inner in enumerate(ctx.saved_tensors):
            if inner[-1] != number:
                raise AssertionError("a saved tensor has changed")
        time.sleep(SLEEPS[1])
        return gradients[0], None


class Holding(nn.Module):
    """A layer that costs time and memory, and little processor."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        held: Tensor = _Holds.apply(self.linear(x), self.num_bytes)
        return held


class Model(L.LightningModule):
    """Such layers, one after the other."""

    copies = False

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        count = NUM_STAGES * LAYERS_PER_STAGE
        self.layers = nn.ModuleList(Holding(num_bytes) for _ in range(count))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        with saved_tensors_hooks(_copied, _copied) if self.copies else nullcontext():
            for layer in self.layers:
                x = layer(x)
        return F.mse_loss(x, target)

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return plain_sgd(self.parameters())


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(tensor) if tensor.numel() > WIDTH**2 else tensor


@dataclass(frozen=True)
class Terms:
    """What a contender may use.

    Args:
        unit_bytes: what a stage saves for a microbatch.
        units: of them that a stage may hold; ``None``: any.
        host_units: of them on the host.
        recompute: as in the strategy.
    """

    unit_bytes: int
    units: float | None = None
    host_units: float = 0.0
    recompute: str = "none"

    def wishes(self) -> MemoryWishes:
        """The same as ``MemoryCompression`` has it."""
        budget = 1e12 if self.units is None else self.units * self.unit_bytes + SLACK_BYTES
        return MemoryWishes(budget, self.host_units * self.unit_bytes)


class Turns(TakingTurns):
    """Contenders with memory of their own.

    Args:
        terms: of each contender.
        num_rounds: how often each has its turn.
        num_steps: how many steps of a turn are timed.
        module: to be told what copies.
    """

    def __init__(
        self, terms: dict[str, Terms], num_rounds: int, num_steps: int, module: Model
    ) -> None:
        super().__init__(self._planned, num_rounds, num_steps, self._entered)
        self.peaks: dict[str, list[float]] = {}
        self._terms = terms
        self._module = module
        self._memory: Any = None
        self._now: str | None = None

    def _planned(self, strategy: Any) -> dict[str, Plan]:
        pipeline = strategy._require_pipeline()
        self._memory = pipeline.memory
        return {name: _plan(pipeline, terms) for name, terms in self._terms.items()}

    def _entered(self, name: str) -> None:
        wishes = self._terms[name].wishes()
        # Nothing is under way between two steps.
        self._memory.wishes = wishes
        self._memory.room = replace(self._memory.room, budget_bytes=int(wishes.budget_bytes or 0))
        self._module.copies = name == NAIVE
        self._now = None

    def on_train_batch_start(self, *args: Any) -> None:
        """A step begins."""
        super().on_train_batch_start(*args)
        traffic = self._memory.store.traffic if self._memory is not None else None
        if traffic is not None and self._turns and self._left == self._num_steps + 1:
            # From here on it is the contender's own.
            traffic.peak_bytes = 0
            self._now = self._turns[0]

    def on_train_batch_end(self, *args: Any) -> None:
        """A step is over."""
        if self._now is not None:
            peak = self._memory.store.traffic.peak_bytes / self._terms[self._now].unit_bytes
            self.peaks.setdefault(self._now, []).append(peak)
        super().on_train_batch_end(*args)


def _plan(pipeline: Any, terms: Terms) -> Plan:
    """The plan under some terms, on all ranks."""
    text, measured = None, pipeline.planning.measured
    if measured is not None:
        wishes = terms.wishes()
        devices = [
            replace(
                device,
                memory_bytes=int(wishes.budget_bytes or 0),
                free_bytes=0,
                host_bytes=int(wishes.host_bytes or 0),
            )
            for device in measured.cluster.devices
        ]
        text = make_plan(
            replace(pipeline.settings, memory=wishes, recompute=terms.recompute),
            measured.profile,
            replace(measured.cluster, devices=tuple(devices)),
            pipeline.replicas.topology,
        ).to_json()
    return Plan.from_json(pipeline.replicas.world.share_object(text, source=0))


def measure(terms: dict[str, Terms], microbatches: int, num_rounds: int, num_steps: int) -> Any:
    """Runs on every rank: what rank 0 timed, and this rank's peaks in units."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    unit_bytes = next(iter(terms.values())).unit_bytes
    module = Model(unit_bytes // LAYERS_PER_STAGE)
    turns = Turns(terms, num_rounds, num_steps, module)
    strategy = PipeShiftStrategy(
        microbatches=microbatches, partition=[LAYERS_PER_STAGE] * NUM_STAGES, profile_steps=4
    )
    trainer = quiet_trainer(
        {"devices": NUM_STAGES, "strategy": strategy},
        max_epochs=-1,
        callbacks=[turns],
        plugins=[MemoryCompression(budget=1e12, host_budget=8 * unit_bytes)],
    )
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    data = torch.utils.data.DataLoader(Repeated(sample), batch_size=SAMPLES * microbatches)
    trainer.fit(module, data)
    return turns.found, turns.peaks


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=2)
    options = parser.parse_args()

    large, medium, small = 256_000_000, 128_000_000, 16_000_000
    rounds = (options.microbatches, options.num_rounds, options.num_steps)
    evened, evened_medium = (
        _compared(
            {
                STAYS: Terms(unit),
                LENT: Terms(unit, 3.0),
                HOST: Terms(unit, 3.0, 8.0),
                NAIVE: Terms(unit),
            },
            *rounds,
        )
        for unit in (large, medium)
    )
    again = _compared(
        {
            STAYS: Terms(small),
            # It holds one unit: what the microbatch has made again whose backward runs.
            AGAIN: Terms(small, recompute="full"),
            LIKE_AGAIN: Terms(small, 1.0, 8.0),
        },
        *rounds,
    )
    ratios = {
        "lent_over_stays": evened[LENT]["median_seconds"] / evened[STAYS]["median_seconds"],
        "naive_over_lent": evened[NAIVE]["median_seconds"] / evened[LENT]["median_seconds"],
        "naive_over_lent_64_MB": evened_medium[NAIVE]["median_seconds"]
        / evened_medium[LENT]["median_seconds"],
        "recomputed_over_planned": again[AGAIN]["median_seconds"]
        / again[LIKE_AGAIN]["median_seconds"],
    }
    print(
        f"\nEvened out among the stages: {ratios['lent_over_stays']:.3f} times the step (at most"
        f" 1.05), and {ratios['naive_over_lent']:.2f} times\nas fast as naive copies (at least 1.5;"
        f" with half as much to copy, {ratios['naive_over_lent_64_MB']:.2f}). At the peak of"
        f"\nrecomputing everything, the plan is {ratios['recomputed_over_planned']:.2f} times as"
        " fast as that (at least 1.25)."
    )
    save(
        options.json,
        {
            "ratios": ratios,
            "128 MB a layer": evened,
            "64 MB a layer": evened_medium,
            "8 MB a layer": again,
        },
    )


def _compared(terms: dict[str, Terms], *rounds: int) -> dict[str, dict[str, Any]]:
    """Runs contenders, prints what came of them, and returns that."""
    ranks = run_ranks(measure, NUM_STAGES, terms, *rounds, timeout=1800, env=KEEPS_FREED_MEMORY)
    found = ranks[0][0]
    base = found[STAYS].median
    rows, figures = [], {}
    for name, timed in found.items():
        peaks = [max(peaks[name]) for _, peaks in ranks]
        is_known = name != NAIVE
        rows.append(
            [
                name,
                " ".join(f"{peak:.2f}" for peak in peaks) if is_known else "",
                f"{sum(peaks) / len(peaks):.2f}" if is_known else "",
                timed.median,
                timed.median / base,
            ]
        )
        figures[name] = {
            "peaks_in_units": peaks if is_known else None,
            "predicted_seconds": timed.predicted_seconds,
            "median_seconds": timed.median,
            "step_seconds": timed.step_seconds,
            "times_everything_stays": timed.median / base,
            "plan": timed.plan,
        }
    unit_bytes = terms[STAYS].unit_bytes
    print_table(
        f"{NUM_STAGES} stages, {rounds[0]} microbatches, a unit of {unit_bytes / 1e6:.0f} MB",
        ["", "peaks in units", "mean", "s a step", "times"],
        rows,
    )
    return figures


if __name__ == "__main__":
    main()
