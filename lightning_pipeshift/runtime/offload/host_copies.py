"""Host memory for tensors that are on the device only for a part of each step, and their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.runtime.offload.copying import Done, Ticket, nothing
from lightning_pipeshift.text import ceil_bytes_text


@dataclass
class Traffic:
    """The account of tensors that move, and its statistics.

    Args:
        device_bytes: the bytes of them that are on the device.
        peak_bytes: the peak of these.
        moved_bytes: the sum of the bytes moved out, over all steps.
        waited_seconds: how long the compute has waited for copies to finish.
        num_evicted: how many blocks were evicted although the plan keeps them here.
    """

    device_bytes: int = 0
    peak_bytes: int = 0
    moved_bytes: int = 0
    waited_seconds: float = 0.0
    num_evicted: int = 0

    def count(self, num_bytes: int) -> None:
        """Counts bytes that come to the device; negative when they leave it."""
        self.device_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)


class Copies:
    """Copies of a layer's tensors, all in one direction. They are one task: a thread wakes up once
    for a layer.

    Args:
        submit: gives the task to a copier.
        parts: for each tensor, what copies it, and what gives it its new memory afterwards.
        then: called when all of them have it.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], Any], Done], Ticket],
        parts: Sequence[tuple[Callable[[], object], Callable[[], object]]],
        then: Callable[[], object] = nothing,
    ) -> None:
        copies = [copy for copy, _ in parts]

        def work() -> None:
            for copy in copies:
                copy()

        self._ends = [*(end for _, end in parts), then]
        self._ticket = submit(work, nothing)

    def is_done(self) -> bool:
        """Whether the copies are complete."""
        return self._ticket.is_done()

    def finish(self) -> None:
        """Waits for the copies, and gives the tensors their new memory, if they have not got it."""
        ends, self._ends = self._ends, []
        if ends:
            self._ticket.wait()
        for end in ends:
            end()


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


def is_at(tensor: Tensor, memory: Tensor) -> bool:
    """Whether a tensor's memory is this one, with the same layout."""
    return _layout_of(tensor) == _layout_of(memory) and tensor.data_ptr() == memory.data_ptr()


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class HostCopies:
    """The memory on the host of tensors that come and go: each has its own for as long as it lives.

    A buffer is not used for anything else afterwards, as others may have aliases of it.

    Args:
        pool: the host's memory.
        of: the owner of the tensors, for messages.
    """

    def __init__(self, pool: BufferPool, of: str) -> None:
        self._pool = pool
        self._of = of
        self._homes: Any = WeakTensorKeyDictionary()
        self._claimed_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes in host memory."""
        self.settle()
        return self._claimed_bytes

    def settle(self) -> None:
        """Gives up the memory of tensors that are gone: any thread may drop one at any time."""
        living_bytes = sum(home.nbytes for home in self._homes.values())
        self._pool.unclaim(self._claimed_bytes - living_bytes)
        self._claimed_bytes = living_bytes

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is its own on the host."""
        home = self._homes.get(tensor)
        return home is not None and tensor.data_ptr() == home.data_ptr()

    def memory_of(self, tensor: Tensor) -> Tensor:
        """A dense tensor's memory on the host, of the same shape, strides and type, which it gets
        when this is called first.

        Raises:
            BudgetError: the host has too little memory.
        """
        home: Tensor | None = self._homes.get(tensor)
        if home is not None and _layout_of(home) == _layout_of(tensor):
            return home
        if home is not None:
            self.forget(tensor)
        pool = self._pool
        if not pool.claim(tensor.nbytes):
            self.settle()
            if not pool.claim(tensor.nbytes):
                raise BudgetError(
                    f"The host has no memory for {ceil_bytes_text(tensor.nbytes)} more of"
                    f" {self._of}: {ceil_bytes_text(pool.limit_bytes)} are allowed for all that"
                    " moves there. Raise `host_budget`."
                )
        self._claimed_bytes += tensor.nbytes
        buffer = pool.take(tensor.nbytes).view(tensor.dtype)
        home = self._homes[tensor] = buffer.as_strided(tensor.shape, tensor.stride())
        return home

    def forget(self, tensor: Tensor) -> None:
        """Gives up a tensor's memory on the host."""
        del self._homes[tensor]
