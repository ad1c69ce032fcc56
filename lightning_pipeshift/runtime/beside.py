"""Memory of this process that another one on the same host can write to and read from directly.

A tensor that goes to another device of the same host is copied once, by the process that needs the
room, over the link between the two devices: no message carries it, and no other process takes part.
On a GPU the memory is shared by CUDA IPC; on a CPU, which stands for a device in tests and trains
small models, as a file in memory only.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.host import process_space
from lightning_pipeshift.runtime.copying import Rooms
from lightning_pipeshift.runtime.side_streams import side_stream


@dataclass(frozen=True)
class Address:
    """Where a process is: two with equal addresses can share memory.

    Args:
        host: the running system, the user, and the namespace of process numbers.
        devices: the GPUs that the process sees, in its order; empty on a CPU.
        kind: the kind of device.
    """

    host: str
    devices: str
    kind: str


def address_here(device: torch.device) -> Address | None:
    """This process's address; ``None`` where memory cannot be shared."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        space = process_space()
    except OSError:
        return None
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all") if device.type == "cuda" else ""
    return Address(space, devices, device.type)


class Opening(NamedTuple):
    """A message to another process, with which it opens a room.

    Args:
        number: identifies the room.
        handle: opens the room; ``None`` where it has been sent before.
        gone: numbers of rooms that no longer exist.
    """

    number: int
    handle: Any
    gone: Sequence[int]


class SharedRooms(Rooms):
    """Rooms that one other process can open.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, float("inf"), is_tight=True)
        self.is_shared = False
        """Whether the other process is going to open the rooms that are made from here on."""
        # By the address of a room's memory: the number by which the other process knows it, and the
        # object that keeps it open until then.
        self._numbers: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._next_number = itertools.count()
        self._gone: list[int] = []

    def opening(self, room: Tensor) -> Opening | None:
        """The message with which the other process opens a room; ``None`` if the room cannot be
        shared.
        """
        handle: Any = None
        number = self._numbers.get(room.data_ptr())
        if number is None:
            handle = self._handle(room)
            if handle is None:
                return None
            number = self._numbers[room.data_ptr()] = next(self._next_number)
        gone, self._gone = self._gone, []
        return Opening(number, handle, gone)

    def _handle(self, room: Tensor) -> Any:
        if self.device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            return reduce_tensor(room)
        file = self._files.get(room.data_ptr())
        return None if file is None else (os.getpid(), file, room.numel())

    def was_opened(self, room: Tensor) -> None:
        """Called when the other process no longer needs the handle."""
        file = self._files.pop(room.data_ptr(), None)
        if file is not None:
            os.close(file)

    def _drop(self, room: Tensor) -> None:
        self.was_opened(room)
        number = self._numbers.pop(room.data_ptr(), None)
        if number is not None:
            self._gone.append(number)

    def _made(self, num_bytes: int) -> Tensor:
        if self.device.type == "cuda" or not self.is_shared:
            return super()._made(num_bytes)
        try:
            file = os.memfd_create("pipeshift")
        except OSError:  # too many files, say
            return super()._made(num_bytes)
        os.ftruncate(file, num_bytes)
        room = _mapped(os.getpid(), file, num_bytes)
        self._files[room.data_ptr()] = file
        return room


def _mapped(process: int, file: int, num_bytes: int) -> Tensor:
    path = f"/proc/{process}/fd/{file}"
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def opened(handle: Any, device: torch.device) -> Tensor:
    """The room that another process's handle refers to, as a vector of bytes.

    Args:
        handle: that of its :class:`Opening`.
        device: this process's own.

    Raises:
        OSError, RuntimeError: it cannot be opened from here.
    """
    if device.type == "cuda":
        rebuild: Callable[..., Tensor]
        rebuild, arguments = handle
        room = rebuild(*arguments)
        if not torch.cuda.can_device_access_peer(device.index or 0, room.device.index or 0):
            raise RuntimeError(f"{device} cannot reach {room.device}")
        return room
    return _mapped(*handle)


def copy(target: Tensor, source: Tensor) -> None:
    """Copies bytes in the calling thread; returns when the copy is complete."""
    with torch.no_grad():
        if target.device.type != "cuda":
            target.copy_(source)
            return
        # A stream of its own, on this process's device: the copy does not wait for the compute.
        own = source.device if source.device.type == "cuda" else target.device
        stream = side_stream(own, "beside")
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
