"""Measures what copies to the host take from the compute.

Where the device is a CPU, the threads that copy saved tensors need the processor that computes, and
so does all that the store does for each of them. A GPU copies by itself, but the host has to ask it
to: for each tensor that takes the time of some kernels' launches, whatever its size, and while many
short kernels run the GPU waits for the host.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Final

import torch

from lightning_pipeshift.devices.streams import is_asynchronous, synchronize
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore, StagePolicy
from lightning_pipeshift.runtime.offload.copying import nothing
from lightning_pipeshift.runtime.offload.targets import LocalTarget

_TRIED_BYTES: Final = (1 << 12, 1 << 20)
"""The sizes of tensors: the smaller ones cost what each tensor does, whatever its size."""
_NUM_TENSORS: Final = 12
_TRIES: Final = 6

_ROW: Final = (*(Action(Kind.FORWARD, n) for n in range(3)), Action(Kind.BACKWARD, 0))
"""Of microbatch 0 nothing is prefetched before its backward."""


def copy_costs(device: torch.device, host: LocalTarget) -> tuple[float, float]:
    """The seconds that the compute lacks for each copy of a saved tensor, and for each byte of it:
    processor time with what is copied compared to what stays, of the whole process if the copier
    needs the processor, and otherwise of the thread that computes, or launches what is computed.

    Args:
        device: the device.
        host: the host's memory.
    """

    def usual(size: int, moves: bool) -> float:
        """The median of a few tries, without the first one: it takes memory that others reuse."""
        tries = [_seconds(device, size, host, moves) for _ in range(_TRIES)]
        return median(tries[1:])

    def per_copy(size: int) -> float:
        return max(0.0, usual(size, True) - usual(size, False)) / (2 * _NUM_TENSORS)

    least, most = _TRIED_BYTES
    if is_asynchronous(device):
        return per_copy(least), 0.0
    small, large = per_copy(least), per_copy(most)
    per_byte = max(0.0, large - small) / (most - least)
    return max(0.0, small - least * per_byte), per_byte


def _seconds(device: torch.device, size: int, host: LocalTarget, moves: bool) -> float:
    """The processor time in which tensors are saved, go to the host if they move, and come back."""
    places = {(0, number): (host,) for number in range(_NUM_TENSORS)} if moves else {}
    copier = host.copier
    store = ActivationStore(StagePolicy(float("inf"), places))
    table = SavedTable(0, store)
    now = time.process_time if copier.takes_processor else time.thread_time
    begun = now()
    store.begin_step(_ROW)
    store.begin_action(0, _ROW[0])
    saved = [
        table.save(torch.zeros(size, dtype=torch.uint8, device=device), 0, number, frozenset())
        for number in range(_NUM_TENSORS)
    ]
    store.after_layer(0)
    # All that was submitted before has left.
    copier.out(nothing, nothing).wait()
    paused = now()
    synchronize(device)
    begun += now() - paused
    store.advance()
    store.begin_action(3, _ROW[3])
    for each in reversed(saved):
        each.get()
    saved.clear()
    store.end_action(_ROW[3])
    copier.out(nothing, nothing).wait()
    return now() - begun
