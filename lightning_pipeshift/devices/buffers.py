"""Buffers that copies use again and again: new memory costs more than a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_pipeshift.devices.host_memory import ask_for_large_pages, pinned_buffer


class BufferPool:
    """Reusable buffers for copies.

    Args:
        device: whose memory.
        limit_bytes: how much of it may be allocated.
        pinned_for: the GPU that reads and writes it concurrently with its compute; ``None`` if none
            does.
        finish: returns when no copy uses pinned memory that is to be freed.
        say: called once with a message if memory cannot be pinned.
        is_tight: whether used and unused buffers together never exceed the peak of those in use.
    """

    def __init__(
        self,
        device: torch.device,
        limit_bytes: float,
        pinned_for: torch.device | None = None,
        finish: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        is_tight: bool = False,
    ) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._pinned_for = pinned_for
        self._finish = finish
        self._say = say
        self._is_tight = is_tight
        self._lock = threading.Lock()
        # Unused buffers by their size, and their total size.
        self._free: dict[int, list[Tensor]] = {}
        self._free_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """The bytes of all buffers, those that are kept for reuse included."""
        return self.used_bytes + self._free_bytes

    def claim(self, num_bytes: int) -> bool:
        """Reserves ``num_bytes``; returns whether that was possible."""
        with self._lock:
            if self.used_bytes + num_bytes > self.limit_bytes:
                return False
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return True

    def unclaim(self, num_bytes: int) -> None:
        """Undoes :meth:`claim`."""
        with self._lock:
            self.used_bytes -= num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """Returns a buffer of reserved memory, as a vector of bytes."""
        with self._lock:
            unused = self._free.get(num_bytes)
            if unused:
                self._free_bytes -= num_bytes
                return unused.pop()
            # Buffers of other sizes are freed to stay below the limit.
            limit = self.peak_bytes if self._is_tight else self.limit_bytes
            while self._free_bytes and self.used_bytes + self._free_bytes > limit:
                self._give_one_back()
            return self._made(num_bytes)

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool, for reuse."""
        with self._lock:
            self.used_bytes -= buffer.numel()
            self._free_bytes += buffer.numel()
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        """Frees the unused buffers."""
        with self._lock:
            while self._free_bytes:
                self._give_one_back()

    def _give_one_back(self) -> None:
        size = max(size for size, buffers in self._free.items() if buffers)
        self._drop(self._free[size].pop())
        self._free_bytes -= size

    def _drop(self, buffer: Tensor) -> None:
        """Called with a buffer that will not be reused."""

    def _made(self, num_bytes: int) -> Tensor:
        if self._pinned_for is not None and num_bytes:
            try:
                return pinned_buffer(num_bytes, self._pinned_for, self._finish)
            except RuntimeError as error:
                self._pinned_for = None
                self._say(
                    f"host memory for swapped tensors cannot be pinned ({error}), so swaps are "
                    "slower, and do not overlap with the compute. Raise the limit of locked "
                    "memory (`ulimit -l`), or lower `host_budget`."
                )
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            ask_for_large_pages(buffer)
        return buffer
