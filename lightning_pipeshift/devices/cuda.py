"""Features that only CUDA and ROCm have: shared memory, peers, and pinned pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

FORKED_LATER: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""The environment of a process that is forked later: looking for a GPU must not initialise CUDA,
which does not survive a fork.
"""


def visible_devices() -> tuple[str, ...]:
    """The GPUs that this process sees, in its order, by their UUIDs."""
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    found = tuple(str(getattr(each, "uuid", "")) for each in properties)
    if all(found):
        return found
    # This build of torch does not know the UUIDs. The variable that selects GPUs works on ROCm,
    # too.
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return tuple(os.environ.get(name, "all") for name in names)


def exported(memory: Tensor) -> Any:
    """A picklable handle with which another process on this host opens a GPU's memory.

    CUDA ties the current streams of both ends together: the other process's waits for the work that
    is queued on this one.

    Raises:
        RuntimeError: the memory cannot be shared.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    if not memory.is_cuda:
        # Torch would send a copy.
        raise RuntimeError(f"memory of {memory.device.type} devices cannot be shared")
    return reduce_tensor(memory)


def imported(handle: Any, device: torch.device) -> Tensor:
    """Opens another process's memory.

    Args:
        handle: made by :func:`exported`.
        device: this process's GPU, which is to read and write the memory.

    Raises:
        RuntimeError: it cannot be opened, or the GPU does not reach it.
    """
    rebuild: Callable[..., Tensor]
    rebuild, arguments = handle
    memory = rebuild(*arguments)
    here, there = device.index or 0, memory.device.index or 0
    # Peer access exists only between different GPUs.
    if here != there and not torch.cuda.can_device_access_peer(here, there):
        raise RuntimeError(f"{device} cannot reach {memory.device}")
    return memory


class SharedEvent:
    """An event for which other processes on this host can wait. It is recorded again and again:
    between two records, whoever waits for it has to say that its wait is queued.

    Args:
        device: this process's GPU.
        handle: that of another process's event; ``None`` for a new one.

    Raises:
        RuntimeError: the event cannot be shared.
    """

    def __init__(self, device: torch.device, handle: Any = None) -> None:
        self._device = device
        if handle is not None:
            self._event = torch.cuda.Event.from_ipc_handle(device, handle)
            return
        self._event = torch.cuda.Event(interprocess=True)
        # Torch makes the event itself here, on the current GPU.
        with torch.cuda.device(device):
            self.handle: Any = self._event.ipc_handle()
            """Picklable: opens the event in another process. An opened event has none."""

    def record(self) -> None:
        """Moves the event behind all work that is queued on the current stream."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Makes the work that this thread queues from now on run after the event as it was recorded
        last. Returns at once.
        """
        self._event.wait(torch.cuda.current_stream(self._device))


def pin(memory: Tensor) -> Callable[[], None]:
    """Pins whole pages of host memory; returns what undoes it.

    Raises:
        RuntimeError: they cannot be pinned.
    """
    address = memory.data_ptr()
    failure = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))
    if failure:
        # CUDA reports an error again with the next kernel, which has nothing to do with it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"CUDA's error {failure} when pinning {memory.nbytes} bytes")
    return partial(_unpin, address)


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
