"""How busy a GPU is in microbatches of 10 ms, and the processor's share of a microbatch."""

from __future__ import annotations

import copy
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

KERNELS = ProfilerActivity.CUDA
"""What is profiled."""

_MICROBATCHES = 4
# The first steps allocate memory and choose kernels.
_WARMUP = 2


class Tower(L.LightningModule):
    """Layers of one width.

    Args:
        num_layers: how many.
        width: of each.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        # To draw the weights of all of them would take longer than to train.
        linear = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            nn.Sequential(copy.deepcopy(linear), nn.GELU()) for _ in range(num_layers)
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
    """The seconds of each step, by the clock and of the thread that runs it; and of some later
    steps together, in which the processor may run ahead, how long the GPU's kernels took.

    Args:
        num_batches: how many of the Trainer's batches are one step.
        num_steps: how many steps are timed, after those for warming up, one by one.
        num_profiled: how many steps are profiled then.
        waits: whether the GPU's work belongs to the step.
    """

    def __init__(self, num_batches: int, num_steps: int, num_profiled: int, waits: bool) -> None:
        self.seconds: list[tuple[float, float]] = []
        self.kernel_seconds = self.wall_seconds = 0.0
        self._num_batches, self._waits = num_batches, waits
        self._num_steps, self._num_profiled = num_steps, num_profiled
        self._profile = profile(activities=[KERNELS])
        self._begin = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter(), time.thread_time()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        """The first batch of a step begins it."""
        step, rest = divmod(number, self._num_batches)
        if rest:
            return
        if step == _WARMUP + self._num_steps and self._num_profiled:
            self._waits = False
            torch.cuda.synchronize()
            self._profile.start()
            self._profiled_at = time.perf_counter()
        self._begin = self._now()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
    ) -> None:
        """The last batch of a step ends it."""
        step, rest = divmod(number, self._num_batches)
        if rest == self._num_batches - 1 and _WARMUP <= step < _WARMUP + self._num_steps:
            wall, own = self._now()
            self.seconds.append((wall - self._begin[0], own - self._begin[1]))

    def on_train_end(self, *_: Any) -> None:
        """Adds up the kernels."""
        if not self._num_profiled:
            return
        torch.cuda.synchronize()
        self.wall_seconds = time.perf_counter() - self._profiled_at
        self._profile.stop()
        events = self._profile.key_averages()
        self.kernel_seconds = sum(getattr(e, "self_device_time_total", 0.0) for e in events) / 1e6


def _trained(
    num_layers: int, width: int, rows: int, is_pipeline: bool, num_steps: int, num_profiled: int
) -> _Timed:
    """Trains once: steps to warm up, steps that are timed, and steps that are profiled."""
    L.seed_everything(5, verbose=False)
    how: dict[str, Any] = {}
    # Plain Lightning takes one microbatch after the other, as batches of their own.
    num_batches, size = (1, _MICROBATCHES * rows) if is_pipeline else (_MICROBATCHES, rows)
    timed = _Timed(num_batches, num_steps, num_profiled, bool(num_profiled))
    if is_pipeline:
        how["strategy"] = PipeShiftStrategy(
            microbatches=_MICROBATCHES, parallel_devices=[torch.device("cuda", 0)], profile_steps=0
        )
    else:
        how["accumulate_grad_batches"] = _MICROBATCHES
    sample = torch.linspace(-1, 1, width, dtype=torch.bfloat16)
    L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_steps=_WARMUP + num_steps + num_profiled,
        callbacks=[timed],
        **how,
        **QUIET,  # type: ignore[arg-type]
    ).fit(Tower(num_layers, width), DataLoader(Repeated(sample), batch_size=size))
    return timed


def profiled(num_layers: int, width: int, rows: int, num_steps: int) -> dict[str, Any]:
    """How busy the GPU is in plain Lightning and as a pipeline of one stage.

    Args:
        num_layers: how many.
        width: of each.
        rows: of a microbatch: with 2048 of width 4096, one takes an H100 about 10 ms.
        num_steps: how many are timed, and as many are profiled.
    """
    found: dict[str, Any] = {}
    for is_pipeline in (False, True):
        timed = _trained(num_layers, width, rows, is_pipeline, num_steps, num_steps)
        found["pipeline" if is_pipeline else "plain"] = {
            "seconds_of_a_microbatch": median(s for s, _ in timed.seconds) / _MICROBATCHES,
            "seconds_of_kernels_of_a_microbatch": timed.kernel_seconds / num_steps / _MICROBATCHES,
            "seconds_of_the_profiled_steps": timed.wall_seconds,
            "busy": timed.kernel_seconds / timed.wall_seconds,
        }
    return found


def processor_share(num_layers: int, num_steps: int) -> dict[str, Any]:
    """The processor's time for a microbatch of tiny layers, beyond plain Lightning's: at most 1 ms
    with 24 layers.
    """
    own = {}
    for is_pipeline in (False, True):
        timed = _trained(num_layers, 32, 8, is_pipeline, num_steps, 0)
        own[is_pipeline] = median(s for _, s in timed.seconds) / _MICROBATCHES
    return {
        "plain_seconds_of_a_microbatch": own[False],
        "seconds_of_a_microbatch": own[True],
        "more_milliseconds": 1e3 * (own[True] - own[False]),
        "layers": num_layers,
    }
