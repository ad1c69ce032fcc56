"""Memory of this process that another process on the same host can read and write directly.

A tensor that is offloaded to another device of the same host is copied once, by the process that
needs the memory, over the link between the two devices, without a message or another process. On a
GPU the memory is shared by CUDA IPC; on a CPU, which stands for a device in tests and trains small
models, it is a file in memory.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.devices.cuda import exported, imported, visible_devices
from lightning_pipeshift.devices.streams import record_event, side_stream
from lightning_pipeshift.host import process_space


@dataclass(frozen=True)
class Address:
    """The address of a process: two processes with equal addresses can share memory.

    Args:
        host: the running system, the user, and the namespace of process numbers.
        devices: the GPUs that the process sees, in its order, by their UUIDs; empty on a CPU. A
            handle names its GPU by its index in this order.
        kind: the kind of device.
    """

    host: str
    devices: tuple[str, ...]
    kind: str


def address_here(device: torch.device) -> Address | None:
    """This process's address; ``None`` if memory cannot be shared."""
    if not sys.platform.startswith("linux"):
        return None
    if (space := process_space()) is None:
        return None
    devices = () if device.type == "cpu" else visible_devices()
    return Address(space, devices, device.type)


def aside(device: torch.device) -> AbstractContextManager[None]:
    """Context in which this thread's work and allocations on a GPU are independent of the compute:
    for work that serves other ranks.

    A thread starts on the compute stream. Work that it submits there waits for everything the
    compute waits for; that may be another rank's payload, and that rank may wait for this thread.
    The same holds for memory that another process opens: see :func:`exported`.
    """
    return side_stream(device, "other ranks")


class Opening(NamedTuple):
    """A message that tells another process how to open a buffer.

    Args:
        number: identifies the buffer.
        handle: opens the buffer; ``None`` if it has been sent before.
        gone: numbers of buffers that no longer exist.
    """

    number: int
    handle: Any
    gone: Sequence[int]


class SharedBufferPool(BufferPool):
    """Buffers that one other process can open.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, float("inf"), is_tight=True)
        self.is_shared = False
        """Whether the other process opens the buffers that are allocated from now on."""
        # By the address of a buffer's memory: the number by which the other process knows it, and
        # the object that keeps the handle valid until the other process has opened it.
        self._numbers: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._next_number = itertools.count()
        self._gone: list[int] = []

    def opening(self, buffer: Tensor) -> Opening | None:
        """The message with which the other process opens a buffer; ``None`` if the buffer cannot be
        shared. Call it in :func:`aside`.

        Raises:
            RuntimeError: the GPU's memory cannot be shared.
        """
        handle: Any = None
        number = self._numbers.get(buffer.data_ptr())
        if number is None:
            # Allocating it may have written to it (torch's deterministic mode). Only messages order
            # the work of two processes, so what they tell of must be complete.
            record_event(self.device).synchronize()
            handle = self._handle(buffer)
            if handle is None:
                return None
            number = self._numbers[buffer.data_ptr()] = next(self._next_number)
        gone, self._gone = self._gone, []
        return Opening(number, handle, gone)

    def _handle(self, buffer: Tensor) -> Any:
        if self.device.type != "cpu":
            return exported(buffer)
        file = self._files.get(buffer.data_ptr())
        return None if file is None else (os.getpid(), file, buffer.numel())

    def was_opened(self, buffer: Tensor) -> None:
        """Called when the other process no longer needs the handle."""
        file = self._files.pop(buffer.data_ptr(), None)
        if file is not None:
            os.close(file)

    def _drop(self, buffer: Tensor) -> None:
        self.was_opened(buffer)
        number = self._numbers.pop(buffer.data_ptr(), None)
        if number is not None:
            self._gone.append(number)

    def _made(self, num_bytes: int) -> Tensor:
        if self.device.type != "cpu" or not self.is_shared:
            return super()._made(num_bytes)
        try:
            file = os.memfd_create("pipeshift")
        except OSError:  # for example, too many open files
            return super()._made(num_bytes)
        os.ftruncate(file, num_bytes)
        buffer = _mapped(os.getpid(), file, num_bytes)
        self._files[buffer.data_ptr()] = file
        return buffer


def _mapped(process: int, file: int, num_bytes: int) -> Tensor:
    path = f"/proc/{process}/fd/{file}"
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def opened(handle: Any, device: torch.device) -> Tensor:
    """Returns the buffer that another process's handle refers to, as a vector of bytes. Call it in
    :func:`aside`.

    Args:
        handle: that of its :class:`Opening`.
        device: this process's own.

    Raises:
        OSError, RuntimeError: it cannot be opened from here.
    """
    return _mapped(*handle) if device.type == "cpu" else imported(handle, device)


def copy(target: Tensor, source: Tensor, device: torch.device) -> None:
    """Copies bytes in the calling thread; returns when the copy is complete.

    Args:
        target: where to.
        source: where from.
        device: this process's own.
    """
    with torch.no_grad(), aside(device):
        target.copy_(source, non_blocking=True)
        record_event(device).synchronize()
