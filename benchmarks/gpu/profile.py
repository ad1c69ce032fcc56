"""How busy a GPU is in microbatches of 10 ms, and the processor's share of a microbatch."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.placements import Repeated
from lightning_pipeshift import PipeShiftStrategy
from tests.features_models import QUIET

_NUM_LAYERS, _MICROBATCHES = 24, 4


class Tower(L.LightningModule):
    """Layers of one width.

    Args:
        width: of each.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(_NUM_LAYERS)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        """Any loss."""
        for layer in self.layers:
            batch = layer(batch)
        return batch.float().square().mean()

    def configure_optimizers(self) -> Any:
        """Little work, so that microbatches decide."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class _Timed(L.Callback):
    """The seconds of each step, by the clock and of the thread that runs it.

    Args:
        num_batches: how many of the Trainer's batches are one step.
        waits: whether the GPU's work belongs to the step.
    """

    def __init__(self, num_batches: int, waits: bool) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._num_batches, self._waits = num_batches, waits
        self._begin = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        if self._waits and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter(), time.thread_time()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        """The first batch of a step begins it."""
        if number % self._num_batches == 0:
            self._begin = self._now()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
    ) -> None:
        """The last batch of a step ends it."""
        if number % self._num_batches == self._num_batches - 1:
            wall, own = self._now()
            self.seconds.append((wall - self._begin[0], own - self._begin[1]))


def _trained(
    width: int, rows: int, device: str, is_pipeline: bool, num_steps: int, waits: bool, **how: Any
) -> list[tuple[float, float]]:
    """Trains, and returns the seconds of each step: by the clock, and of the processor."""
    L.seed_everything(5, verbose=False)
    index = torch.device(device, 0) if device == "cuda" else torch.device(device)
    # Plain Lightning takes one microbatch after the other, as batches of their own.
    num_batches = 1 if is_pipeline else _MICROBATCHES
    timed = _Timed(num_batches, waits)
    size = rows * (_MICROBATCHES if is_pipeline else 1)
    if is_pipeline:
        how["strategy"] = PipeShiftStrategy(
            microbatches=_MICROBATCHES, parallel_devices=[index], profile_steps=0
        )
    else:
        how["accumulate_grad_batches"] = _MICROBATCHES
    L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision="bf16-true" if device == "cuda" else "32-true",
        max_steps=num_steps,
        callbacks=[timed],
        **how,
        **QUIET,  # type: ignore[arg-type]
    ).fit(
        Tower(width),
        DataLoader(Repeated(torch.linspace(-1, 1, width, dtype=_dtype(device))), batch_size=size),
    )
    return timed.seconds


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def profiled(device: str) -> dict[str, Any]:
    """Microbatches of about 10 ms on an H100, in plain Lightning and as a pipeline of one stage."""
    width, rows = (4096, 2048) if device == "cuda" else (64, 64)
    found: dict[str, Any] = {}
    for is_pipeline in (False, True):
        seconds = [s for s, _ in _trained(width, rows, device, is_pipeline, 6, True)][2:]
        activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as prof:
            begin = time.perf_counter()
            _trained(width, rows, device, is_pipeline, 6, False)
            if device == "cuda":
                torch.cuda.synchronize()
            wall = time.perf_counter() - begin
        busy = sum(getattr(e, "self_device_time_total", 0.0) for e in prof.key_averages()) / 1e6
        found["pipeline" if is_pipeline else "plain"] = {
            "seconds_of_a_microbatch": median(seconds) / _MICROBATCHES,
            "seconds_of_kernels_of_a_microbatch": busy / 6 / _MICROBATCHES,
            "seconds_of_the_run": wall,
        }
    for figures in (value for value in found.values() if isinstance(value, dict)):
        figures["busy"] = (
            figures["seconds_of_kernels_of_a_microbatch"] / figures["seconds_of_a_microbatch"]
        )
    return found


def processor_share(device: str) -> dict[str, Any]:
    """The processor's time for a microbatch of tiny layers, beyond plain Lightning's: at most 1 ms
    with 24 layers.
    """
    own = {}
    for is_pipeline in (False, True):
        seconds = [s for _, s in _trained(32, 8, device, is_pipeline, 40, False)][10:]
        own[is_pipeline] = median(seconds) / _MICROBATCHES
    return {
        "plain_seconds_of_a_microbatch": own[False],
        "seconds_of_a_microbatch": own[True],
        "more_milliseconds": 1e3 * (own[True] - own[False]),
        "layers": _NUM_LAYERS,
    }
