"""A transformer on one GPU with less memory than it takes: what that costs.

    python -m benchmarks.gpu.all --only memory --json benchmarks/results/gpu_memory.json

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

from dataclasses import asdict, replace
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from benchmarks.gpu.running import Findings, Run
from benchmarks.measuring import print_table
from benchmarks.placements import Repeated, TakingTurns
from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, Plan
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest, StageMemory
from lightning_pipeshift.runtime.planning.make_plan import make_plan

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
        self._memory: StageMemory | None = None
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
        assert self._memory is not None
        assert self._memory.memory is not None
        self._memory.request = replace(self._memory.request, budget_bytes=budget)
        self._memory.memory = replace(self._memory.memory, budget_bytes=int(budget))

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


def largest(run: Run, width: int, length: int, batch_size: int, with_plugin: bool) -> int:
    """The number of blocks of the largest model that trains, by bisection."""
    low, high = 0, run.sizes.most_blocks
    while low < high:
        middle = (low + high + 1) // 2
        tried = (middle, width, length, batch_size, with_plugin)
        outcomes = run.ranks(trains, 1, *tried, limit=300, expect_failure=True)
        problem = outcomes[0].message if outcomes[0].failed else ""
        assert not problem or "emory" in problem, str(outcomes[0])
        low, high = (low, middle - 1) if problem else (middle, high)
    return low


def figures(run: Run) -> Findings:
    """What the benchmark finds."""
    blocks, *shape = run.sizes.transformer
    turns = run.sizes.transformer_turns
    found, peaks = run.ranks(compared, 1, blocks, *shape, *turns, limit=590)[0]
    base = found[STAYS].median
    return {
        "model": f"{blocks} blocks of {shape[0]}, {shape[2]} x {shape[1]} tokens",
        "ratios": {
            "half_over_stays": found[HALF].median / base,
            "recomputed_over_planned": found[AGAIN].median / found[LIKE_AGAIN].median,
        },
        "largest_blocks": {
            str(with_plugin): largest(run, shape[0], shape[1], shape[2], with_plugin)
            for with_plugin in (False, True)
        },
        "plans": {name: asdict(timed) for name, timed in found.items()},
        "peak_bytes": {name: median(peaks[name]) for name in peaks},
        "rows": [
            [name, median(peaks[name]) / 1e9, timed.predicted_seconds or "", timed.median,
             timed.median / base]
            for name, timed in found.items()
        ],
    }  # fmt: skip


def show(found: Findings) -> None:
    """Prints the figures."""
    print_table(found["model"], ["", "peak GB", "predicted s", "s a step", "times"], found["rows"])
    ratios, blocks = found["ratios"], found["largest_blocks"]
    print(
        f"\nHalf of the peak takes {ratios['half_over_stays']:.3f} times as long (at most 1.03);"
        f" at the peak of recomputing everything\nthe plan is"
        f" {ratios['recomputed_over_planned']:.2f} times as fast as that (at least 1.25).\n"
        f"The largest model: {blocks['False']} blocks without, {blocks['True']} with it (0: not"
        " looked for)."
    )
