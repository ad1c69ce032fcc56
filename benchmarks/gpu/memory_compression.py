"""A transformer on one GPU with less memory than it takes: what that costs.

    python -m benchmarks.gpu.memory_compression --json benchmarks/results/gpu_memory.json

One device, one microbatch after the other, so that there is no bubble to hide anything in. First
the same model under plans that take turns in one run:

- everything stays;
- half of what its saved tensors take at their peak;
- every layer recomputed;
- a budget of what recomputing every layer takes at its peak.

Peaks are torch's own, ``torch.cuda.max_memory_allocated``, of a step. Then the largest model that
trains on the device, with and without ``MemoryCompression``, by bisection of its number of blocks;
each try is a process of its own, and one that runs out of memory is too large.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from benchmarks.measuring import arguments, print_table, save
from benchmarks.placements import Repeated, TakingTurns
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, Plan
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.planning.make_plan import make_plan
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks

STAYS, HALF = "everything stays", "half of the peak"
AGAIN, LIKE_AGAIN = "all recomputed", "that peak, planned"
VOCABULARY = 32_000


class Transformer(L.LightningModule):
    """A decoder of torch's own layers.

    Args:
        blocks: how many.
        width: of the hidden state.
    """

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def training_step(self, batch: Tensor) -> Tensor:
        """Next-token prediction."""
        x = self.embedding(batch[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(x)
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        """The usual optimizer of such models."""
        return AdamW(self.parameters(), lr=1e-4)


def trainer_of(strategy: PipeShiftStrategy, callbacks: list[Any], **how: Any) -> L.Trainer:
    """One GPU, in bfloat16."""
    return L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **how,
    )


def tokens(length: int, batch_size: int) -> DataLoader[Any]:
    """The same tokens again and again."""
    sample = torch.arange(length + 1) % VOCABULARY
    return DataLoader(Repeated(sample), batch_size=batch_size)


class Turns(TakingTurns):
    """Plans with budgets of their own; the peak of each turn's steps is noted.

    Args:
        num_rounds: how often each has its turn.
        num_steps: how many steps of a turn are timed.
    """

    def __init__(self, num_rounds: int, num_steps: int) -> None:
        super().__init__(self._planned, num_rounds, num_steps, self._entered)
        self.peaks: dict[str, list[float]] = {}
        self._memory: Any = None
        self._budgets: dict[str, float] = {}

    def _planned(self, strategy: Any) -> dict[str, Plan]:
        pipeline = strategy.pipeline
        self._memory = pipeline.memory
        measured = pipeline.planning.measured
        device = measured.cluster.devices[0]

        def plan(budget: float, recompute: str) -> Plan:
            changed = replace(device, memory_bytes=int(budget), free_bytes=0)
            return make_plan(
                replace(pipeline.settings, memory=MemoryRequest(budget), recompute=recompute),
                measured.profile,
                replace(measured.cluster, devices=(changed,)),
                pipeline.replicas.topology,
            )

        def peak(made: Plan) -> float:
            assert made.prediction is not None
            return made.prediction.memory_bytes[0][0]

        boundless = 1e15
        stays, again = plan(boundless, "none"), plan(boundless, "full")
        static = sum(layer.static_bytes for layer in measured.profile.layers)
        half = static + (peak(stays) - static) / 2
        self._budgets = {STAYS: boundless, HALF: half, AGAIN: boundless, LIKE_AGAIN: peak(again)}
        return {
            STAYS: stays,
            HALF: plan(half, "auto"),
            AGAIN: again,
            LIKE_AGAIN: plan(peak(again), "auto"),
        }

    def _entered(self, name: str) -> None:
        budget = self._budgets[name]
        self._memory.request = replace(self._memory.request, budget_bytes=budget)
        self._memory.room = replace(self._memory.room, budget_bytes=int(budget))

    def on_train_batch_start(self, *args: Any) -> None:
        """A step begins."""
        # The steps are timed from one begin to the next, the GPU's work included.
        torch.cuda.synchronize()
        super().on_train_batch_start(*args)
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *args: Any) -> None:
        """A step is over."""
        if self._turns and 0 < self._left <= self._num_steps:
            peak = float(torch.cuda.max_memory_allocated())
            self.peaks.setdefault(self._turns[0], []).append(peak)
        super().on_train_batch_end(*args)


def compared(blocks: int, width: int, length: int, batch_size: int, rounds: int, steps: int) -> Any:
    """Runs in a process of its own: times, peaks, and what each plan had been expected to be."""
    L.seed_everything(0, verbose=False)
    turns = Turns(rounds, steps)
    trainer = trainer_of(
        PipeShiftStrategy(microbatches=1, profile_steps=5),
        [turns],
        plugins=[MemoryCompression(budget=1e15)],
        max_epochs=-1,
    )
    trainer.fit(Transformer(blocks, width), tokens(length, batch_size))
    return turns.found, turns.peaks


def trains(blocks: int, width: int, length: int, batch_size: int, with_plugin: bool) -> int:
    """Runs in a process of its own: three steps. Returns how many parameters there are."""
    L.seed_everything(0, verbose=False)
    plugins = [MemoryCompression()] if with_plugin else []
    strategy = PipeShiftStrategy(microbatches=1, profile_steps=0, recompute="auto")
    module = Transformer(blocks, width)
    trainer = trainer_of(strategy, [], plugins=plugins, max_steps=3)
    trainer.fit(module, tokens(length, batch_size))
    return sum(parameter.numel() for parameter in module.parameters())


def largest(width: int, length: int, batch_size: int, with_plugin: bool, most: int) -> int:
    """The number of blocks of the largest model that trains, by bisection."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            run_ranks(trains, 1, middle, width, length, batch_size, with_plugin, timeout=300)
            low = middle
        except RanksFailed as failure:
            if "emory" not in str(failure):
                raise
            high = middle - 1
    return low


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU, and torch sees none.")
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--most-blocks", type=int, default=0, help="bisect up to here; 0: do not")
    options = parser.parse_args()

    shape = (options.width, options.length, options.batch_size)
    found, peaks = run_ranks(
        compared, 1, options.blocks, *shape, options.num_rounds, options.num_steps, timeout=590
    )[0]
    base = found[STAYS].median
    rows = [
        [name, median(peaks[name]) / 1e9, timed.predicted_seconds or "", timed.median,
         timed.median / base]
        for name, timed in found.items()
    ]  # fmt: skip
    print_table(
        f"{options.blocks} blocks of {options.width}, {options.batch_size} x {options.length}"
        f" tokens, {torch.cuda.get_device_name()}",
        ["", "peak GB", "predicted s", "s a step", "times"],
        rows,
    )
    ratios = {
        "half_over_stays": found[HALF].median / base,
        "recomputed_over_planned": found[AGAIN].median / found[LIKE_AGAIN].median,
    }
    print(
        f"\nHalf of the peak takes {ratios['half_over_stays']:.3f} times as long (at most 1.03);"
        f" at the peak of recomputing everything\nthe plan is"
        f" {ratios['recomputed_over_planned']:.2f} times as fast as that (at least 1.25)."
    )
    blocks = {}
    if options.most_blocks:
        for with_plugin in (False, True):
            blocks[str(with_plugin)] = largest(*shape, with_plugin, options.most_blocks)
        print(f"\nThe largest model: {blocks['False']} blocks without, {blocks['True']} with it.")
    save(
        options.json,
        {
            "device": torch.cuda.get_device_name(),
            "ratios": ratios,
            "largest_blocks": blocks,
            "plans": {name: asdict(timed) for name, timed in found.items()},
            "peak_bytes": {name: median(peaks[name]) for name in peaks},
        },
    )


if __name__ == "__main__":
    main()
