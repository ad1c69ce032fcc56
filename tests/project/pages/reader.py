"""The names that the code on the pages takes for granted: the reader's own model and data, small.

Trainers are short and quiet here, and run on the CPU. One that a page only makes is fitted
afterwards, so that its arguments have to work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging  # noqa: F401
from torch import Tensor, nn  # noqa: F401

from examples.train_gpt import GPT, TextDataModule
from lightning_pipeshift import *  # noqa: F403

_made: list[L.Trainer] = []


class ShortTrainer(L.Trainer):
    """A Trainer of a few batches."""

    def __init__(self, **arguments: Any) -> None:
        defaults: dict[str, Any] = {
            "max_epochs": 1,
            "limit_train_batches": 6,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": any(
                isinstance(each, ModelCheckpoint) for each in arguments.get("callbacks") or ()
            ),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        super().__init__(**{**defaults, **arguments})
        _made.append(self)


class MyModel(GPT):
    """The reader's model."""

    def __init__(self) -> None:
        super().__init__(num_layers=4, width=16, warmup_steps=2)


class MyDataModule(TextDataModule):
    """The reader's data: few short windows of one file."""

    def __init__(self) -> None:
        super().__init__(batch_size=16, length=16)

    def setup(self, stage: str | None = None) -> None:
        text = b"for i in range(10): print(i)\n" * 300
        self.train_text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.val_text = self.train_text[:2000]


make_model, make_trainer = MyModel, ShortTrainer


def become() -> None:
    """Makes this process one in which a reader's code runs.

    Trainers are short from here on, wherever they are taken from.
    """
    for module in (lightning, L, sys.modules["lightning.pytorch.trainer.trainer"], L.trainer):
        module.Trainer = ShortTrainer  # type: ignore[attr-defined]
    L.seed_everything(1)


def finish() -> None:
    """Fits the Trainers that were made and not run."""
    for trainer in _made:
        if trainer.state.fn is None:
            trainer.fit(MyModel(), MyDataModule())


def prepare(folder: Path, root: Path) -> None:
    """The files that commands take for granted: the reader's configuration, and the examples."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(root / name)
    (folder / "my_project.py").write_text(
        "from tests.project.pages.reader import MyDataModule, MyModel\n"
    )
    text = (root / "examples" / "gpt.yaml").read_text()
    (folder / "config.yaml").write_text(
        text.replace("num_layers: 4", "num_layers: 4\n    warmup_steps: 2")
        .replace("width: 128", "width: 16")
        .replace("batch_size: 32", "batch_size: 16")
        .replace("length: 64", "length: 16")
        .replace("max_steps: 300", "max_steps: 4")
        .replace("val_check_interval: 300", "val_check_interval: 4")
        + "  limit_val_batches: 1\n"
    )


__all__ = [name for name in dir() if not name.startswith("_")]
