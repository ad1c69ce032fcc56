"""How many bytes of tensors really live on a stage's device while a run trains.

Counted from the tensors themselves, by a dispatch mode, and not from what the runtime believes. The
devices are CPUs here, so what stands for the host's memory is left out: the pool of host buffers,
and the frames of messages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as L
import torch

from lightning_pipeshift.model.measuring.live_bytes import LiveBytes
from lightning_pipeshift.runtime.comm.mailbox import Mailbox


class LivingBytes(L.Callback):
    """Counts the bytes of each step, from its first operation to the end of the optimizer's step.

    Attributes:
        peaks: the largest number of bytes that lived at once, in each step; with those that the
            stage holds for others.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._live: _OnDevice | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._live is None:
            self._live = _OnDevice(trainer.strategy.pipeline.memory)
        self._live.peak_bytes = 0
        self._live.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        assert self._live is not None
        self._live.__exit__(None, None, None)
        self.peaks.append(self._live.peak_bytes)


class _OnDevice(LiveBytes):
    """Args:
    memory: the stage's ``StageMemory``; ``None`` without a budget.
    """

    def __init__(self, memory: Any) -> None:
        super().__init__(torch.device("cpu"))
        self._memory = memory
        if memory is not None:
            pool, store = memory._host, memory.store
            pool._made = partial(self._made_on_host, pool._made)
            # Other threads make buffers, too, in which tensors come back.
            store._call_back = partial(self._called_back, store._call_back)

        post = Mailbox._send_packed

        def unseen(*args: Any) -> None:
            with torch._C._DisableTorchDispatch():
                post(*args)

        Mailbox._send_packed = unseen  # type: ignore[assignment,method-assign]

    def note(self, values: Any) -> None:
        super().note(values)
        if self._memory is not None:
            held = self.num_bytes + self._memory.store._lent_bytes
            self.peak_bytes = max(self.peak_bytes, held)

    def _made_on_host(self, make: Any, num_bytes: int) -> torch.Tensor:
        # Without dispatch, so that the buffer is not seen before it is left out.
        with torch._C._DisableTorchDispatch():
            buffer: torch.Tensor = make(num_bytes)
        self.leave_out([buffer])
        return buffer

    def _called_back(self, call_back: Any, block: Any) -> None:
        call_back(block)
        self.note([block.move.buffer])


def room_bytes(strategy: Any) -> int:
    """What a stage leaves free of its budget for batches, and for the layer that runs."""
    pipeline = strategy.pipeline
    stage = pipeline.channels.stage
    own = pipeline.plan.placement.layers_of(pipeline.vm, stage)
    counted = pipeline.planning.stage_bytes(pipeline.plan, pipeline.vm, stage)
    found: int = counted.room(own)
    return found
