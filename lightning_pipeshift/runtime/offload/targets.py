"""Offload targets for saved tensors: here the host; other ranks are in :mod:`lending`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.model.saved.codec import Codec, Encoded
from lightning_pipeshift.runtime.offload.copying import Copier, Done, Ticket, nothing


class OffloadedBlock(Protocol):
    """A block at its offload target, or on its way there."""

    leaving: Ticket

    def fetch(self, memory: Tensor) -> Ticket:
        """Starts to fetch the block into a buffer."""

    def forget(self) -> None:
        """Frees the block at its target; copies in progress may still complete."""


class OffloadTarget(Protocol):
    """A place in memory that blocks can be offloaded to."""

    def put(self, memory: Tensor, done: Done) -> OffloadedBlock | None:
        """Starts to offload a block; returns ``None`` if there is no free memory.

        Args:
            memory: the block, as a vector. The caller must not write to it until it has been
                copied.
            done: see :class:`~lightning_pipeshift.runtime.offload.copying.Copier`.
        """


class Coding:
    """Encodes a block on its way to a target, and decodes it on its way back; targets keep bytes.

    Args:
        codec: ``None`` to transfer the block's own bytes.
    """

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._encoded: Encoded | None = None

    @property
    def is_encoded(self) -> bool:
        """Whether other bytes than the block's own are transferred."""
        return self._encoded is not None

    def encode(self, memory: Tensor) -> list[Tensor]:
        """The bytes to transfer, as one or more vectors. Called once."""
        parts: tuple[Tensor, ...] = (memory,)
        if self._codec is not None:
            encoded = self._codec.encode(memory)
            parts = encoded.parts
            self._encoded = encoded.without_values()
        return [part.view(torch.uint8) for part in parts]

    def decode(self, memory: Tensor, read: Callable[[Tensor], object]) -> None:
        """Restores the block.

        Args:
            memory: the buffer to write it to.
            read: fills a vector with the next of the bytes that were transferred.
        """
        if self._encoded is None:
            read(memory.view(torch.uint8))
            return
        assert self._codec is not None
        parts = tuple(torch.empty_like(p, device=memory.device) for p in self._encoded.parts)
        for part in parts:
            read(part.view(torch.uint8))
        memory.copy_(self._codec.decode(self._encoded.with_parts(parts)))


class LocalTarget:
    """Memory that this process can copy to: the host's.

    Args:
        pool: its buffers.
        copier: makes the copies.
        codec: compresses blocks for the transfer.
    """

    def __init__(self, pool: BufferPool, copier: Copier, codec: Codec | None = None) -> None:
        self.pool = pool
        self.copier = copier
        self.codec = codec

    def put(self, memory: Tensor, done: Done) -> OffloadedBlock | None:
        """See :class:`OffloadTarget`."""
        return _LocalBlock(self, memory, done) if self.pool.claim(memory.nbytes) else None


class _LocalBlock:
    def __init__(self, place: LocalTarget, memory: Tensor, done: Done) -> None:
        self._place = place
        self._coding = Coding(place.codec)
        self._buffers: list[Tensor] = []
        self._coming: Ticket | None = None
        self._is_forgotten = False
        self.leaving: Ticket = place.copier.out(partial(self._leave, memory), done)

    def _leave(self, memory: Tensor) -> None:
        pool, left_over = self._place.pool, memory.nbytes
        # A thread that is behind has less to do, unless a fetch waits for it.
        is_needed = not self._is_forgotten or self._coming is not None
        encoded = self._coding.encode(memory) if is_needed else []
        for flat in encoded:
            buffer = pool.take(flat.numel())
            buffer.copy_(flat, non_blocking=True)
            self._buffers.append(buffer)
            left_over -= flat.numel()
        # The encoded block is smaller than the reserved buffer.
        pool.unclaim(left_over)

    def fetch(self, memory: Tensor) -> Ticket:
        """See :class:`OffloadedBlock`."""
        self._coming = self._place.copier.back(partial(self._come, memory), nothing)
        return self._coming

    def _come(self, memory: Tensor) -> None:
        buffers = iter(self._buffers)
        self._coding.decode(memory, lambda flat: flat.copy_(next(buffers), non_blocking=True))

    def forget(self) -> None:
        """See :class:`OffloadedBlock`."""
        self._is_forgotten = True
        copies = (self.leaving, self._coming)
        if all(copy is None or copy.is_done() for copy in copies):
            self._give_back()
            return
        # Queued after the copies that use these buffers.
        self._place.copier.out(self._give_back, nothing)

    def _give_back(self) -> None:
        if self._coming is not None:
            self._coming.precede()
        for buffer in self._buffers:
            self._place.pool.give(buffer)
        self._buffers.clear()
