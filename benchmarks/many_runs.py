"""Hundreds of runs in a row on two ranks: none hangs, and none leaves anything behind.

    python -m benchmarks.many_runs --runs 500 --json benchmarks/results/many_runs.json

Runs differ in turn: one or two virtual machines, moves of layers, checkpoints in one file or in
folders that are written beside the training; every tenth ends with an error of user code on one
rank. After each one, what is left over is counted: processes, files in ``/dev/shm`` and in the
temporary folder, file descriptors of this process, and ports that somebody listens on. Counts are
those of the whole machine: nothing else should run on it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.testing.ranks import run_ranks

KINDS = ("plain", "moves", "one file", "folder", "replicas")
FAILS_EVERY = 10


class UserError(Exception):
    """Raised in the user's code."""


def train(kind: str, fails: bool, folder: str) -> int:
    """A short run on one rank; returns its number of steps."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn

    from lightning_pipeshift import LayerMigration, Move, PipeShiftCheckpointIO
    from tests.features_models import quiet_trainer

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers(batch[0]).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            if fails and self.trainer.global_step == 3 and self.trainer.global_rank == 1:
                raise UserError

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    torch.set_num_threads(1)
    torch.manual_seed(1)
    strategy: dict[str, Any] = {"partition": [2, 2], "microbatches": 2}
    callbacks: list[L.Callback] = []
    plugins: list[Any] = []
    if kind == "moves":
        callbacks.append(LayerMigration(moves=[Move(layer="layers.1", stage=1, step=1)]))
    if kind == "replicas":
        strategy = {"virtual_machines": 2, "microbatches": 2}
    if kind in ("one file", "folder"):
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    if kind == "folder":
        plugins.append(PipeShiftCheckpointIO(sharded=True, asynchronous=True))
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=8
    )
    trainer = quiet_trainer(
        {"pipeshift": strategy},
        devices=2,
        max_steps=5,
        callbacks=callbacks,
        plugins=plugins,
        enable_checkpointing=kind in ("one file", "folder"),
    )
    trainer.fit(Model(), batches)
    return trainer.global_step


def left_over() -> dict[str, int]:
    """The number of each kind of object that a run may leave behind."""
    listening = 0
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        listening += sum(line.split()[3] == "0A" for line in lines)
    mine = os.getuid()
    processes = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            processes += path.stat().st_uid == mine
        except OSError:
            continue  # it has just ended
    return {
        "processes": processes,
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "listening ports": listening,
    }


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    seconds: list[float] = []
    # The server that forks the ranks is there from the first run on.
    run_ranks(train, 2, "plain", False, "")
    before = left_over()
    most = dict(before)
    for number in range(options.runs):
        kind, fails = KINDS[number % len(KINDS)], number % FAILS_EVERY == FAILS_EVERY - 1
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(train, 2, kind, fails, folder, expect_failure=True)
        seconds.append(time.perf_counter() - begin)
        errors = [outcome.error_type for outcome in found]
        expected = ["StageFailedError", "UserError"] if fails else [None, None]
        if errors != expected:
            raise SystemExit(f"run {number} ({kind}): {found}")
        now = left_over()
        most = {name: max(most[name], count) for name, count in now.items()}
        if (number + 1) % 50 == 0:
            print(f"{number + 1} runs, {sum(seconds):.0f} s, {now}", flush=True)
    after = left_over()
    rows = [[name, before[name], after[name], most[name]] for name in before]
    print_table("What there was", ["", "before", "after all runs", "at most"], rows)
    mean = sum(seconds) / len(seconds)
    print(f"{len(seconds)} runs, {mean:.2f} s each, {max(seconds):.2f} s at most")
    save(
        options.json,
        {
            "runs": len(seconds),
            "seconds": sum(seconds),
            "longest seconds": max(seconds),
            "before": before,
            "after": after,
            "at most": most,
        },
    )


if __name__ == "__main__":
    main()
