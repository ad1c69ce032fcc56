"""Offload targets for saved tensors: here the host, or GPUs that this process copies to. Targets on
other ranks are in :mod:`lending`.

CN114880130B, after MPress (HPCA 2023): a tensor is cut into blocks in proportion to the bandwidth
of the links to the devices that take it, and a table has the location of each block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_pipeshift.model.saved.codec import Codec, Encoded
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.runtime.offload.copying import (
    BufferPool,
    Copier,
    Copy,
    Done,
    Ticket,
    nothing,
)


class OffloadedBlock(Protocol):
    """A block at its offload target, or on its way there."""

    leaving: Ticket

    def fetch(self, memory: Tensor, done: Done) -> Ticket:
        """Starts to fetch the block.

        Args:
            memory: the buffer to fetch it into.
            done: see :class:`~lightning_pipeshift.runtime.offload.copying.Copier`.
        """

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


class _Claimable(Protocol):
    """Memory that can be reserved."""

    def claim(self, num_bytes: int) -> bool:
        """Reserves ``num_bytes``; returns whether that was possible."""

    def unclaim(self, num_bytes: int) -> None:
        """Undoes :meth:`claim`."""


def claim_all(parts: Sequence[tuple[_Claimable, int]]) -> bool:
    """Reserves memory for all parts of a block, or for none; returns whether it did."""
    for index, (memory, size) in enumerate(parts):
        if not memory.claim(size):
            for other, claimed in parts[:index]:
                other.unclaim(claimed)
            return False
    return True


class LocalTarget:
    """Memory that this process can copy to: the host's, or that of other GPUs.

    Args:
        pools: buffer pools, each of which takes a part of every block.
        shares: the relative sizes of these parts.
        copier: makes the copies.
        codec: compresses blocks for the transfer.
    """

    def __init__(
        self,
        pools: Sequence[BufferPool],
        copier: Copier,
        shares: Sequence[float] = (),
        codec: Codec | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.copier = copier
        self.codec = codec
        self._split = Swap(0, (0,), tuple(range(len(self.pools))), tuple(shares))

    def sizes(self, num_bytes: int) -> list[tuple[BufferPool, int]]:
        """The number of a block's bytes for each buffer pool."""
        return [(self.pools[index], size) for index, size in self._split.parts(num_bytes)]

    def put(self, memory: Tensor, done: Done) -> OffloadedBlock | None:
        """See :class:`OffloadTarget`."""
        has_room = claim_all(self.sizes(memory.nbytes))
        return _LocalBlock(self, memory, done) if has_room else None


class _LocalBlock:
    def __init__(self, place: LocalTarget, memory: Tensor, done: Done) -> None:
        self._place = place
        self._coding = Coding(place.codec)
        self._buffers: list[tuple[BufferPool, Tensor]] = []
        self._coming: Copy | None = None
        self._is_forgotten = False
        self.leaving: Ticket = place.copier.out(partial(self._leave, memory), done)

    def _leave(self, memory: Tensor) -> None:
        place = self._place
        claimed = {id(pool): size for pool, size in place.sizes(memory.nbytes)}
        # A thread that is behind has less to do, unless a fetch waits for it.
        is_needed = not self._is_forgotten or self._coming is not None
        encoded = self._coding.encode(memory) if is_needed else []
        for flat in encoded:
            sizes = place.sizes(flat.numel())
            for (pool, size), block in zip(sizes, flat.split([n for _, n in sizes]), strict=True):
                buffer = pool.take(size)
                buffer.copy_(block, non_blocking=True)
                self._buffers.append((pool, buffer))
                claimed[id(pool)] -= size
        # The encoded block is smaller than the reserved buffer.
        for pool in place.pools:
            pool.unclaim(claimed.get(id(pool), 0))

    def fetch(self, memory: Tensor, done: Done) -> Ticket:
        """See :class:`OffloadedBlock`."""
        self._coming = self._place.copier.back(partial(self._come, memory), done)
        return self._coming

    def _come(self, memory: Tensor) -> None:
        self._coding.decode(memory, partial(self._collect, iter(self._buffers)))

    def _collect(self, buffers: Iterable[tuple[BufferPool, Tensor]], flat: Tensor) -> None:
        begin = 0
        for _, buffer in itertools.islice(buffers, len(self._place.sizes(flat.numel()))):
            flat[begin : begin + buffer.numel()].copy_(buffer, non_blocking=True)
            begin += buffer.numel()

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
        for pool, buffer in self._buffers:
            pool.give(buffer)
        self._buffers.clear()
