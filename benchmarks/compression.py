"""The cost of using less memory: tensors moved as ``MemoryCompression`` plans it, against torch's
own ``torch.utils.checkpoint`` and ``save_on_cpu``, at the same memory.

    python -m benchmarks.compression

Four stages of two layers each, which sleep 20 ms forward and 40 ms backward and save tensors: real
ones, really copied, by the processors that carry all four stages. What a stage saves for one
microbatch is a *unit*; in 1F1B the stages hold 4, 3, 2 and 1 of them. For each size of a layer's
tensors, contenders take turns in one run. Everything stays, or with at most three units on a stage:

- PipeShift's plan with other stages' room alone, and with the host's;
- only the first layer of the first stage in ``save_on_cpu``, or in ``torch.utils.checkpoint``, by
  hand: that is what would do in a model written for this pipeline.

With at most one unit on a stage:

- PipeShift's plan with the host's room, the same where layers may also run again, and
  ``recompute="full"``. A plan that cannot keep the budget is refused, and left out;
- all layers in ``save_on_cpu``, or in ``torch.utils.checkpoint``, in the model.

``save_on_cpu(pin_memory=True)`` copies each tensor to other memory when it is saved, in the thread
that computes; on a CPU it need not be copied back, which is to its advantage here.

(A transformer layer of width h saves 34 h bytes a token, Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, and computes 72 h^2 operations for it, forward and
backward. With h = 4096, at 150 TFLOP/s and 24 GB/s of PCIe, copying that there and back takes 1.4
times as long as computing.)

Peaks are the bytes of the layers' tensors that are alive on each stage, counted by the memory
itself (see :mod:`benchmarks.holding`); copies of them are memory of the host, and not counted.
Freed memory stays with each process, for all contenders, as it does with a GPU's allocator: giving
it back to the system takes longer here than many of the copies.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.holding import Holder, PeakTurns
from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.placements import Repeated
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, Plan
from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.planning.make_plan import make_plan
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer

NUM_STAGES, LAYERS_PER_STAGE = 4, 2
NUM_LAYERS = NUM_STAGES * LAYERS_PER_STAGE
SLEEPS = (0.020, 0.040)
WIDTH, SAMPLES = 64, 4
SLACK_BYTES = 400_000
"""Memory that a unit does not include: weights, and the arguments of layers."""

KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_ARENA_MAX": "1",
}
"""For glibc, which asks the system for what is larger all the same."""

STAYS = "everything stays"


@dataclass(frozen=True)
class Terms:
    """The memory and the means that a contender may use.

    Args:
        units: the number that a stage may hold; ``None``: any.
        host_units: of them on the host.
        recompute: as in the strategy.
        num_copied: layers that the model runs in ``save_on_cpu``, from the first on.
        num_checkpointed: likewise in ``torch.utils.checkpoint``.
    """

    units: float | None = None
    host_units: float = 0.0
    recompute: str = "none"
    num_copied: int = 0
    num_checkpointed: int = 0

    def request(self, unit_bytes: int) -> MemoryRequest:
        """The same as ``MemoryCompression`` has it."""
        budget = 1e12 if self.units is None else self.units * unit_bytes + SLACK_BYTES
        return MemoryRequest(budget, self.host_units * unit_bytes)


CONTENDERS = {
    STAYS: Terms(),
    "3 units: planned, other stages' room": Terms(3.0),
    "3 units: planned, the host's room": Terms(3.0, 8.0),
    "3 units: save_on_cpu, first layer": Terms(num_copied=1),
    "3 units: checkpoint, first layer": Terms(num_checkpointed=1),
    "1 unit: planned, the host's room": Terms(1.0, 8.0),
    "1 unit: planned, that or recomputed": Terms(1.0, 8.0, recompute="auto"),
    '1 unit: recompute="full"': Terms(recompute="full"),
    "1 unit: save_on_cpu, all layers": Terms(num_copied=NUM_LAYERS),
    "1 unit: checkpoint, all layers": Terms(num_checkpointed=NUM_LAYERS),
}


class Model(Holder):
    """Its first layers may be copied or checkpointed."""

    terms = Terms()

    def run(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        """Calls a layer."""
        if number < self.terms.num_checkpointed:
            again: Tensor = checkpoint(layer, x, use_reentrant=False)
            return again
        is_copied = number < self.terms.num_copied
        with save_on_cpu(pin_memory=True) if is_copied else nullcontext():
            return super().run(number, layer, x)


class Turns(PeakTurns):
    """Contenders with memory of their own.

    Args:
        unit_bytes: what a stage saves for a microbatch.
        num_rounds: how often each has its turn.
        num_steps: how many steps of a turn are timed.
        module: to be told what it copies.
    """

    def __init__(self, unit_bytes: int, num_rounds: int, num_steps: int, module: Model) -> None:
        super().__init__(self._planned, num_rounds, num_steps, self._entered)
        self._unit_bytes = unit_bytes
        self._module = module
        self._memory: Any = None

    def _planned(self, strategy: Any) -> dict[str, Plan]:
        pipeline = strategy.pipeline
        self._memory = pipeline.memory
        plans = {
            name: _plan(pipeline, terms, self._unit_bytes) for name, terms in CONTENDERS.items()
        }
        return {name: plan for name, plan in plans.items() if plan is not None}

    def _entered(self, name: str) -> None:
        request = CONTENDERS[name].request(self._unit_bytes)
        # Nothing is under way between two steps.
        self._memory.request = request
        self._memory.room = replace(self._memory.room, budget_bytes=int(request.budget_bytes or 0))
        self._module.terms = CONTENDERS[name]


def _plan(pipeline: Any, terms: Terms, unit_bytes: int) -> Plan | None:
    """The plan under some terms, on all ranks; None where no plan keeps the budget."""
    text, measured = None, pipeline.planning.measured
    if measured is not None:
        request = terms.request(unit_bytes)
        devices = [
            replace(
                device,
                memory_bytes=int(request.budget_bytes or 0),
                free_bytes=0,
                host_bytes=int(request.host_bytes or 0),
            )
            for device in measured.cluster.devices
        ]
        with suppress(BudgetError):
            text = make_plan(
                replace(pipeline.settings, memory=request, recompute=terms.recompute),
                measured.profile,
                replace(measured.cluster, devices=tuple(devices)),
                pipeline.replicas.topology,
            ).to_json()
    text = pipeline.replicas.world.share_object(text, source=0)
    return None if text is None else Plan.from_json(text)


def measure(layer_bytes: int, microbatches: int, num_rounds: int, num_steps: int) -> Any:
    """Runs on every rank: what rank 0 timed, and this rank's peaks in bytes."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    unit_bytes = layer_bytes * LAYERS_PER_STAGE
    module = Model(NUM_LAYERS, WIDTH, layer_bytes, SLEEPS)
    turns = Turns(unit_bytes, num_rounds, num_steps, module)
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
    parser.add_argument("--layer-mb", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-steps", type=int, default=2)
    options = parser.parse_args()
    rounds = (options.microbatches, options.num_rounds, options.num_steps)
    figures = {f"{mb} MB": _compared(1_000_000 * mb, *rounds) for mb in options.layer_mb}
    save(options.json, {"microbatches": options.microbatches, **figures})


def _compared(layer_bytes: int, *rounds: int) -> dict[str, dict[str, Any]]:
    """Runs all contenders with layers of one size, prints what came of them, and returns that."""
    ranks = run_ranks(
        measure, NUM_STAGES, layer_bytes, *rounds, timeout=3000, env=KEEPS_FREED_MEMORY
    )
    found = ranks[0][0]
    rows, figures = [], {}
    for name, timed in found.items():
        # Other stages may still copy what the step before has saved, so not the largest of all.
        peaks = [median(peaks[name]) / layer_bytes / LAYERS_PER_STAGE for _, peaks in ranks]
        times = timed.times(found[STAYS])
        rows.append([name, " ".join(f"{p:.2f}" for p in peaks), timed.median, shown(times)])
        figures[name] = {
            "peaks_in_units": peaks,
            "step_seconds": interval(timed.turns),
            "times_everything_stays": times,
            "timed": asdict(timed),
        }
    title = f"{NUM_STAGES} stages, {rounds[0]} microbatches, {layer_bytes / 1e6:.0f} MB a layer"
    print_table(title, ["", "peaks in units", "s a step", "times everything stays"], rows)
    return figures


if __name__ == "__main__":
    main()
