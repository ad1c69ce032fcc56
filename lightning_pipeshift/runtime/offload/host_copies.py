"""Host memory for tensors that are on the device only for a part of each step."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.runtime.offload.copying import BufferPool
from lightning_pipeshift.text import ceil_bytes_text


@dataclass
class Traffic:
    """Statistics of tensors that move.

    Args:
        device_bytes: the bytes of them that are on the device.
        peak_bytes: the peak of these.
        moved_bytes: the sum of the bytes moved out, over all steps.
    """

    device_bytes: int = 0
    peak_bytes: int = 0
    moved_bytes: int = 0

    def count(self, num_bytes: int) -> None:
        """Counts bytes that come to the device; negative when they leave it."""
        self.device_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)


def host_memory_like(pool: BufferPool, tensor: Tensor, of: str) -> Tensor:
    """Host memory for a tensor's values, of the same shape, strides and type.

    Args:
        pool: the host's memory.
        tensor: a dense one.
        of: the owner of the values, for the message of an error.

    Raises:
        BudgetError: the host has too little memory.
    """
    if not pool.claim(tensor.nbytes):
        raise BudgetError(
            f"The host has no memory for {ceil_bytes_text(tensor.nbytes)} more of {of}:"
            f" {ceil_bytes_text(pool.limit_bytes)} are allowed for all that moves there. Raise"
            " `host_budget`."
        )
    buffer = pool.take(tensor.nbytes)
    return buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, each once."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Type, shape and strides."""
    return tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True)
class _Home:
    """A tensor's memory on the host.

    Args:
        tensor: the tensor.
        values: of the same shape and layout.
    """

    tensor: weakref.ref[Tensor]
    values: Tensor


class HostCopies:
    """The memory on the host of tensors that come and go: each has its own for as long as it lives.

    Args:
        pool: the host's memory.
        of: the owner of the tensors, for messages.
    """

    def __init__(self, pool: BufferPool, of: str) -> None:
        self._pool = pool
        self._of = of
        self._homes: dict[int, _Home] = {}
        """By the identity of the tensor."""
        # Sizes of homes whose tensors are gone: any thread may free one at any time.
        self._dropped: deque[tuple[int, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """The bytes in host memory."""
        self._bury()
        return sum(home.values.nbytes for home in self._homes.values())

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is its own on the host."""
        home = self._homes.get(id(tensor))
        return (
            home is not None
            and home.tensor() is tensor
            and tensor.data_ptr() == home.values.data_ptr()
        )

    def memory_of(self, tensor: Tensor) -> Tensor:
        """A tensor's memory on the host, which it gets when this is called first."""
        self._bury()
        key, home = id(tensor), self._homes.get(id(tensor))
        if home is not None and layout_of(home.values) == layout_of(tensor):
            return home.values
        if home is not None:
            self.forget(tensor)
        values = host_memory_like(self._pool, tensor, self._of)
        gone = partial(self._note_dropped, key, tensor.nbytes)
        self._homes[key] = _Home(weakref.ref(tensor, gone), values)
        return values

    def forget(self, tensor: Tensor) -> None:
        """Gives up a tensor's memory on the host."""
        home = self._homes.pop(id(tensor))
        self._pool.unclaim(home.values.nbytes)

    def _note_dropped(self, key: int, num_bytes: int, _: Any) -> None:
        self._dropped.append((key, num_bytes))

    def _bury(self) -> None:
        """Forgets the homes of tensors that are gone. Their buffers are not used for anything else,
        as others may have aliases of them.
        """
        while self._dropped:
            key, num_bytes = self._dropped.popleft()
            self._pool.unclaim(num_bytes)
            home = self._homes.get(key)
            # Another tensor may have the identity by now.
            if home is not None and home.tensor() is None:
                del self._homes[key]
