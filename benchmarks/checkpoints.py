"""How long training stands still for a checkpoint, and how fast one is loaded on another split.

    python -m benchmarks.checkpoints

Two ranks train a model with AdamW and save in the middle. What counts is the time between the last
rank's entering and its leaving of ``trainer.save_checkpoint``, with the checkpoint's pages written
back before each. Side by side: Lightning's DDP (rank 0 writes one file), its ModelParallelStrategy
(FSDP2, every rank writes to a folder), and PipeShift with one file, with a folder, and each beside
the training. Loading: a folder that two stages wrote is loaded by two stages cut elsewhere, from a
cold cache, against reading the same number of bytes from the same files and doing nothing with
them. Contenders take turns in rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, interval, print_table, ratios, save
from lightning_pipeshift import PipeShiftCheckpointIO, PipeShiftStrategy
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.testing.ranks import run_ranks

WIDTH = 1024
NUM_RANKS = 2
IO = {
    "PipeShift, one file": {},
    "PipeShift, folder": {"sharded": True},
    "PipeShift, one file, asynchronous": {"asynchronous": True},
    "PipeShift, folder, asynchronous": {"sharded": True, "asynchronous": True},
}
DDP, FSDP = "DDP", "ModelParallelStrategy"


class Row(L.LightningModule):
    """Linear layers of 4 MB."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.depth))
        )
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class SavesTwice(L.Callback):
    """After the second and the third step, when the optimizer has its state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step < 2:
            return
        io: Any = trainer.strategy.checkpoint_io
        if isinstance(io, PipeShiftCheckpointIO):
            # Whoever saves more often than the disk writes waits for the disk.
            io.wait()
        os.sync()
        dist.barrier()
        begin = time.perf_counter()
        trainer.save_checkpoint(self.path)
        self.seconds.append(time.perf_counter() - begin)


def strategy_of(contender: str, partition: list[int]) -> tuple[Any, list[Any]]:
    if contender == DDP:
        return DDPStrategy(process_group_backend="gloo"), []
    if contender == FSDP:
        return ModelParallelStrategy(process_group_backend="gloo"), []
    return PipeShiftStrategy(partition=partition, microbatches=2), [
        PipeShiftCheckpointIO(**IO[contender])
    ]


def trainer_of(contender: str, partition: list[int], **more: Any) -> L.Trainer:
    strategy, plugins = strategy_of(contender, partition)
    return L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=strategy,
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(40, WIDTH)), batch_size=4)


def stands_still(contender: str, depth: int, path: Path) -> list[float]:
    """Runs on every rank: seconds, at the first save and at a later one."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    saves = SavesTwice(path)
    trainer = trainer_of(contender, [depth // 2, depth // 2], max_steps=3, callbacks=[saves])
    trainer.fit(Row(depth), data())
    return saves.seconds


# What a start from a checkpoint does that one without does not.
LOADING = (
    (PipeShiftStrategy, "load_checkpoint"),
    (PipeShiftStrategy, "load_model_state_dict"),
    (PipeShiftStrategy, "load_optimizer_state_dict"),
    (Holdings, "obtain"),
    (Holdings, "settle"),
)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Context that notes how long each call of the functions above takes."""

    def wrapper(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)

        return run

    originals = [getattr(owner, name) for owner, name in LOADING]
    for (owner, name), original in zip(LOADING, originals, strict=True):
        setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(LOADING, originals, strict=True):
            setattr(owner, name, original)


def loads(depth: int, path: Path) -> float:
    """Runs on every rank: seconds."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    seconds: list[float] = []
    # Three of the four quarters of the model lie in one rank's file, and are read by the other.
    trainer = trainer_of("PipeShift, folder", [depth // 4, depth - depth // 4], max_steps=4)
    with timed(seconds):
        trainer.fit(Row(depth), data(), ckpt_path=path)
    return sum(seconds)


def reads(depth: int, path: Path) -> float:
    """Runs on every rank: seconds to read as many bytes as the rank of the same number loads."""
    parts = (depth // 4, depth - depth // 4)
    rank = int(os.environ["RANK"])
    left = parts[rank] * WIDTH * WIDTH * 4 * 3
    begin = time.perf_counter()
    for file in sorted(path.rglob("*.distcp"), reverse=bool(rank)):
        size = min(left, file.stat().st_size)
        buffer = bytearray(size)
        with file.open("rb", buffering=0) as opened:
            view = memoryview(buffer)
            while view:
                view = view[opened.readinto(view) :]
        left -= size
    return time.perf_counter() - begin


def forget_pages(folder: Path) -> None:
    """Takes files out of the page cache, so that they are read from the disk."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depth", type=int, default=64, help="layers of 4 MB")
    parser.add_argument("--num-rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.depth * WIDTH * WIDTH * 4
    still: dict[str, list[list[float]]] = {name: [[], []] for name in (DDP, FSDP, *IO)}
    loading: dict[str, list[float]] = {"load": [], "read": []}
    for _ in range(options.num_rounds):
        for contender, seconds in still.items():
            with tempfile.TemporaryDirectory() as name:
                path = Path(name) / "kept.ckpt"
                args = (contender, options.depth, path)
                ranks = run_ranks(stands_still, NUM_RANKS, *args, timeout=600)
                for which, slowest in enumerate(map(max, zip(*ranks, strict=True))):
                    seconds[which].append(slowest)
                if contender == "PipeShift, folder":
                    for what, function in (("load", loads), ("read", reads)):
                        forget_pages(path)
                        each = run_ranks(function, NUM_RANKS, options.depth, path, timeout=600)
                        loading[what].append(max(each))
    rounds = [f"round {n + 1}" for n in range(options.num_rounds)]
    figures: dict[str, dict[str, Any]] = {"the first save": {}, "a later one": {}}
    for number, when in enumerate(figures):
        rows = []
        for name, seconds in still.items():
            took = seconds[number]
            over_ddp = ratios(took, still[DDP][number])
            rows.append([name, median(took), median(over_ddp), *took])
            figures[when][name] = {"seconds": interval(took), "over_ddp": interval(over_ddp)}
        print_table(
            f"{3 * size / 1e6:.0f} MB of parameters and AdamW's state, {NUM_RANKS} ranks: seconds"
            f" that training stands still for {when}",
            ["", "median", "of DDP's", *rounds],
            rows,
        )
    over_reading = ratios(loading["load"], loading["read"])
    print_table(
        "Loading the folder on another split, from a cold cache: seconds",
        ["", "median", *rounds],
        [
            ["PipeShift", median(loading["load"]), *loading["load"]],
            ["reading the bytes", median(loading["read"]), *loading["read"]],
            ["ratio", median(over_reading), *over_reading],
        ],
    )
    save(
        options.json,
        {
            "state_bytes": 3 * size,
            **figures,
            "loading_over_reading": interval(over_reading),
            "stands_still_seconds": still,
            "loading_seconds": loading,
        },
    )


if __name__ == "__main__":
    main()
