"""A layer that sleeps, and saves large tensors for its backward.

Real tensors, really copied by what moves them. How many bytes of them are alive is counted by the
storages themselves, so it means the same whoever keeps them: PipeShift, ``torch.utils.checkpoint``
or ``save_on_cpu``.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.placements import TakingTurns
from lightning_pipeshift.testing.sleeping import plain_sgd

NUM_TENSORS = 4


class Alive:
    """Bytes that this process's layers have saved and that are still in memory, and their peak.

    PipeShift tries layers before training, and takes back what that changes of user code's numbers;
    memory is freed later than that. So the counts are not Python's numbers.
    """

    def __init__(self) -> None:
        self._peak, self._now = ctypes.c_int64(0), ctypes.c_int64(0)
        # Tensors are freed by whichever thread lets go of them last.
        self._lock = threading.RLock()

    @property
    def peak_bytes(self) -> int:
        """The most since the last :meth:`restart_peak`."""
        return self._peak.value

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor's memory until it is freed. One without values has none."""
        if type(tensor) is not Tensor:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        with self._lock:
            self._now.value += size
            self._peak.value = max(self._peak.value, self._now.value)
        weakref.finalize(storage, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        with self._lock:
            self._now.value -= size

    def restart_peak(self) -> None:
        """The peak from here on."""
        with self._lock:
            self._peak.value = self._now.value


alive = Alive()
"""Of this process."""


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int, sleeps: tuple[float, float]) -> Tensor:
        begun = time.perf_counter()
        length = num_bytes // NUM_TENSORS // 4
        saved = [torch.full((length,), float(number)) for number in range(NUM_TENSORS)]
        for tensor in saved:
            alive.add(tensor)
        ctx.save_for_backward(*saved)
        ctx.seconds = sleeps[1]
        # A layer computes while it makes what it saves.
        time.sleep(max(0.0, sleeps[0] - (time.perf_counter() - begun)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for number, tensor in enumerate(ctx.saved_tensors):
            if tensor[0] != number or tensor[-1] != number:
                raise AssertionError("a saved tensor has changed")
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Holding(nn.Module):
    """A layer that costs time and memory, and little processor.

    Args:
        width: of what comes in and goes out.
        num_bytes: that it saves for a microbatch.
        sleeps: seconds of its forward and of its backward.
    """

    def __init__(self, width: int, num_bytes: int, sleeps: tuple[float, float]) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.sleeps = sleeps
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        held: Tensor = _Holds.apply(self.linear(x), self.num_bytes, self.sleeps)
        return held


class Holder(L.LightningModule):
    """Such layers, one after the other.

    Args:
        num_layers: how many.
        width: of each.
        num_bytes: that each saves for a microbatch.
        sleeps: seconds of a forward and of a backward.
    """

    def __init__(
        self, num_layers: int, width: int, num_bytes: int, sleeps: tuple[float, float]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Holding(width, num_bytes, sleeps) for _ in range(num_layers))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        for number, layer in enumerate(self.layers):
            x = self.run(number, layer, x)
        return F.mse_loss(x, target)

    def run(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        """Calls a layer."""
        found: Tensor = layer(x)
        return found

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return plain_sgd(self.parameters())


class PeakTurns(TakingTurns):
    """Contenders that take turns, and the most bytes of saved tensors alive in each timed step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.peaks: dict[str, list[int]] = {}
        self._counts = False

    def on_train_batch_start(self, *args: Any) -> None:
        """A step begins."""
        super().on_train_batch_start(*args)
        if self._turns and self._left == self._num_steps + 1:
            # The steps before were on the way from the other contender's plan to this one's.
            self._counts = True
        if self._counts:
            alive.restart_peak()

    def on_train_batch_end(self, *args: Any) -> None:
        """A step is over."""
        if self._counts:
            self.peaks.setdefault(self._turns[0], []).append(alive.peak_bytes)
            self._counts = self._left > 1
        super().on_train_batch_end(*args)
