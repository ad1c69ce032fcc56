"""The processor time that a step takes beside what it computes, by what happens to saved tensors.

    python -m benchmarks.host_time

GPT-2 of ``transformers`` with 12 blocks of 16 numbers, bf16-mixed, 4 microbatches of 4 x 8 tokens,
on one thread: so small that nearly all of the time is that of Python and of torch's calls. A GPU
with short kernels waits for that time, wherever it exceeds that of the kernels. Plain Lightning
accumulates as many batches.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift import (
    Choice,
    KeepAll,
    MemoryCompression,
    PipeShiftStrategy,
    RecomputeAll,
    SwapAll,
    TensorRecord,
)
from lightning_pipeshift.testing.ranks import run_ranks

MICROBATCHES, WARM_UP, WORDS, LENGTH = 4, 6, 100, 8
PLAIN = "plain Lightning"


class Products(NamedTuple):
    """Keeps the results of matrix products, and recomputes all else."""

    def choose(self, record: TensorRecord) -> Choice:
        """See :class:`~lightning_pipeshift.Policy`."""
        is_product = record.maker.rsplit(": ", 1)[-1] in ("addmm", "mm")
        return Choice.KEEP if is_product else Choice.RECOMPUTE


POLICIES: dict[str, Any] = {
    PLAIN: None,
    "one stage": None,
    "a budget, all kept": KeepAll(),
    "all swapped": SwapAll("host"),
    "all recomputed": RecomputeAll(),
    "all recomputed in part": Products(),
}


class Model(L.LightningModule):
    """Next-token prediction."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=12, n_embd=16, n_head=2, attn_pdrop=0.0, vocab_size=WORDS, use_cache=False
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of one batch."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The usual optimizer of such models."""
        return AdamW(self.parameters(), fused=True)


class Clock(L.Callback):
    """Reads the processor's clock as each batch begins."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch begins."""
        self.begun.append(time.process_time())


def seconds(name: str, num_steps: int) -> float:
    """The processor time of a step. Runs in a process of its own."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    policy, per_step = POLICIES[name], MICROBATCHES if name == PLAIN else 1
    how: dict[str, Any] = {"accumulate_grad_batches": per_step}
    if name != PLAIN:
        how["strategy"] = PipeShiftStrategy(microbatches=MICROBATCHES, profile_steps=0)
    if policy is not None:
        how["plugins"] = [MemoryCompression(policy=policy, budget=1e15)]
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        callbacks=[clock],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **how,
    )
    samples: Any = torch.randint(WORDS, (4 * MICROBATCHES * (WARM_UP + num_steps + 1), LENGTH))
    trainer.fit(Model(), DataLoader(samples, batch_size=4 * MICROBATCHES // per_step))
    begun = clock.begun[WARM_UP * per_step :: per_step]
    return median(after - before for before, after in pairwise(begun))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=10)
    options = parser.parse_args()

    found: dict[str, list[float]] = {}
    for _ in range(options.num_rounds):
        for name in POLICIES:
            (took,) = run_ranks(seconds, 1, name, options.num_steps)
            found.setdefault(name, []).append(took)
    usual = {name: median(each) for name, each in found.items()}
    rows = [[name, 1e3 * took, took / usual[PLAIN]] for name, took in usual.items()]
    print_table("Processor time of a step", ["", "ms", "times plain"], rows)
    figures = {
        name: {"milliseconds": 1e3 * took, "times_plain": took / usual[PLAIN]}
        for name, took in usual.items()
    }
    save(options.json, {"policies": figures, "rounds": found})


if __name__ == "__main__":
    main()
