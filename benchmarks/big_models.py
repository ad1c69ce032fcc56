"""How much memory a rank needs for a model of which it holds half.

    python -m benchmarks.big_models

A model of 2 GB (32 layers of 64 MB) over two stages runs one batch of validation. The peak is that
of a rank's resident memory, less what the interpreter with torch and Lightning had before, as a
part of the model's size. The model comes from its own initialisation, from safetensors files, and
from checkpoints: a folder and a file. "whole" is the same model made in ``__init__``, which every
rank then holds, as other strategies make it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift import PipeShiftCheckpointIO, PipeShiftStrategy, load_pretrained
from lightning_pipeshift.testing.ranks import run_ranks

WIDTH = 4096
NUM_STAGES = 2
NUM_SHARDS = 4


class Wide(L.LightningModule):
    """A row of linear layers."""

    def __init__(self, depth: int, pretrained: Path | None, late: bool) -> None:
        super().__init__()
        self.depth = depth
        self.pretrained = pretrained
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.depth))
        )
        if self.pretrained is not None:
            load_pretrained(self.layers, self.pretrained)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("output", self.layers(batch[0]).mean())


def resident(field: str) -> int:
    """This process's memory in bytes: ``VmRSS`` now, ``VmHWM`` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def peak(
    depth: int, late: bool, pretrained: Path | None, ckpt_path: Path | None, saves: dict[Path, bool]
) -> tuple[int, float]:
    """Runs on every rank: its peak in bytes, and what the model said."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    before = resident("VmRSS")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_STAGES,
        strategy=PipeShiftStrategy(partition="uniform"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.ones(1, WIDTH)))
    module = Wide(depth, pretrained, late)
    (logged,) = trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)
    found = resident("VmHWM") - before
    for path, sharded in saves.items():
        trainer.strategy.checkpoint_io = PipeShiftCheckpointIO(sharded=sharded)
        trainer.save_checkpoint(path)
    return found, logged["output"]


def write_pretrained(folder: Path, depth: int) -> None:
    """As Hugging Face would: several files and an index."""
    torch.manual_seed(1)
    places: dict[str, str] = {}
    for shard in range(NUM_SHARDS):
        names = [f"{i}.weight" for i in range(depth) if i * NUM_SHARDS // depth == shard]
        file = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        tensors = {name: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for name in names}
        save_file(tensors, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depth", type=int, default=32, help="layers of 64 MB")
    options = parser.parse_args()
    size = options.depth * WIDTH * WIDTH * 4
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, shards = folder / "one.ckpt", folder / "sharded.ckpt"
        write_pretrained(folder, options.depth)
        cases: dict[str, tuple[Any, ...]] = {
            "whole, made in __init__": (False, None, None, {}),
            "configure_model, initialised": (True, None, None, {file: False, shards: True}),
            "configure_model, from safetensors": (True, folder, None, {}),
            "configure_model, from a sharded checkpoint": (True, None, shards, {}),
            "configure_model, from one file": (True, None, file, {}),
        }
        for case, given in cases.items():
            ranks = run_ranks(peak, NUM_STAGES, options.depth, *given, timeout=900.0)
            outputs = [output for _, output in ranks]
            parts = [found / size for found, _ in ranks]
            rows.append([case, *parts, outputs[0]])
            figures[case] = {"peak_bytes": [found for found, _ in ranks], "parts": parts}
            assert outputs[0] == outputs[1]
    print_table(
        f"{size / 1e9:.1f} GB over {NUM_STAGES} stages: peak memory as a part of the model",
        ["", *(f"stage {stage}" for stage in range(NUM_STAGES)), "output"],
        rows,
    )
    save(options.json, {"model_bytes": size, **figures})


if __name__ == "__main__":
    main()
