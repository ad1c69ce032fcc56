"""Prints a recorded step of two stages below what its plan expected of it, for `docs/see.md`.

    python docs/make_timeline.py

GPT-2 of transformers, small, on two CPU processes. The plan is made after some measured steps.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

# Benchmarks and tests are no part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.placements import Repeated
from benchmarks.timeline_cost import LENGTH, LanguageModel
from lightning_pipeshift import PipelineTimeline, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.timeline.recording import Recording
from lightning_pipeshift.timeline.text import draw
from tests.features_models import quiet_trainer

NUM_STEPS = 16


def train(folder: str) -> None:
    """Runs on both ranks."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    strategy: Any = PipeShiftStrategy(microbatches=4, profile_steps=4, recompute="full")
    trainer = quiet_trainer(
        {"devices": 2, "strategy": strategy},
        max_steps=NUM_STEPS,
        max_epochs=-1,
        callbacks=[PipelineTimeline(every_n_steps=NUM_STEPS - 2, folder=folder)],
    )
    sample = torch.randint(512, (LENGTH,))
    trainer.fit(LanguageModel(), DataLoader(Repeated(sample), batch_size=16))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(train, 2, folder, timeout=300)
        recording = Recording.load(Path(folder) / f"timeline-{NUM_STEPS - 2}.json")
    print(draw(recording))


if __name__ == "__main__":
    main()
