"""Blocks of saved tensors that move: where each is, and the copies in progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.model.saved.saved_tensors import SavedBlock
from lightning_pipeshift.plan.inputs.saved_tensors import place_in_forward
from lightning_pipeshift.runtime.offload.copying import Ticket
from lightning_pipeshift.runtime.offload.host_copies import Traffic
from lightning_pipeshift.runtime.offload.targets import OffloadedBlock, OffloadTarget
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What


class Block(SavedBlock):
    """A block in the table, and where it is."""

    __slots__ = ("has_come", "is_gone", "move", "offloaded")

    def __init__(self, tensor: Tensor, layer: int, number: int, microbatch: int) -> None:
        super().__init__(tensor, layer, number, microbatch)
        self.offloaded: OffloadedBlock | None = None
        """The block at its target, or on its way from here or back; ``None`` if it is here."""
        self.move: Move | None = None
        """The copy in progress, if one is wanted."""
        self.has_come = False
        """Whether the block was offloaded, and has been fetched back or is being fetched."""
        self.is_gone = False

    @property
    def is_here(self) -> bool:
        """Whether it is on the device, and does not leave it."""
        return self.offloaded is None

    @property
    def is_away(self) -> bool:
        """Whether it is at its target only."""
        return self.offloaded is not None and self.move is None

    @property
    def need(self) -> tuple[int, int, int]:
        """A sort key for the order in which backwards need the blocks: the first microbatch first,
        and in it the last layer first."""
        return self.microbatch, -self.layer, -place_in_forward(self.number)

    def end_offload(self) -> None:
        """Frees the block at its target. It is here, or on its way here, or not needed any more."""
        if self.offloaded is not None:
            self.offloaded.forget()
        if self.move is not None:
            self.move.buffer = None
        self.offloaded = self.move = None


@dataclass(eq=False)
class Move:
    """A copy of a block.

    Args:
        block: the block, whose :attr:`Block.move` this is until it ends or is not wanted any more.
        since: when it began, if that is recorded.
        buffer: where it is fetched to; ``None`` if it leaves.
    """

    block: Block
    since: float
    buffer: Tensor | None = None
    ticket: Ticket = field(init=False)

    @property
    def is_wanted(self) -> bool:
        """Whether it goes on, and its end is of interest."""
        return self.block.move is self


class BlockMover:
    """Copies blocks to their offload targets and back, and keeps the account of the device's bytes.
    It does what another class decides, while :attr:`lock` is held.

    Args:
        advance: uses memory that has become free.
        name_of: the name of a layer.
    """

    def __init__(self, advance: Callable[[], None], name_of: Callable[[int], str]) -> None:
        self._use_memory = advance
        self._name_of = name_of
        self.traffic = Traffic()
        self.recorder: Recorder | None = None
        """Takes notes of blocks that leave and come back."""
        self.lock: AbstractContextManager[Any] = threading.RLock()
        # In each direction they end in their order.
        self._leaving: deque[Move] = deque()
        self._coming: deque[Move] = deque()

    def _sent(self, block: Block, places: Iterable[OffloadTarget]) -> bool:
        memory = block.memory()
        if memory is None:
            return False
        move = Move(block, self._now())
        done = partial(self._end_meanwhile, move)
        for place in places:
            offloaded = place.put(memory, done)
            if offloaded is not None:
                self.traffic.moved_bytes += block.num_bytes
                block.offloaded, block.move, move.ticket = offloaded, move, offloaded.leaving
                self._leaving.append(move)
                return True
        return False

    def _call_back(self, block: Block) -> None:
        assert block.offloaded is not None
        block.has_come = True
        self.traffic.count(block.num_bytes)
        size = block.num_bytes // block.dtype.itemsize
        buffer = torch.empty(size, dtype=block.dtype, device=block.device)
        block.move = move = Move(block, self._now(), buffer)
        move.ticket = block.offloaded.fetch(buffer)
        self._coming.append(move)

    def _end(self, move: Move) -> None:
        """Called when a copy is complete: by the thread that has made it, or has waited for it."""
        with self.lock:
            if not move.is_wanted:
                return
            block, way = move.block, "out" if move.buffer is None else "back"
            block.move = None
            if move.buffer is None:
                block.leave()
                self.traffic.count(-block.num_bytes)
            else:
                block.come_back(move.buffer)
                block.end_offload()
                move.buffer = None
            if self.recorder is not None and move.since:
                name = f"{way} {self._name_of(block.layer)} {block.number} of microbatch"
                name, now = f"{name} {block.microbatch}", time.perf_counter()
                self.recorder.add(What.SWAP, name, move.since, now, num_bytes=block.num_bytes)

    def _end_meanwhile(self, move: Move) -> None:
        """Called by the thread that has copied the block."""
        self._end(move)
        # The compute thread may be waiting, so this thread uses the freed memory.
        self._use_memory()

    def _now(self) -> float:
        return time.perf_counter() if self.recorder is not None else 0.0

    def _let_stay(self, block: Block) -> None:
        if block.move is not None and block.move.buffer is None:
            block.end_offload()

    def _end_moves(self) -> None:
        """Called now and then: ends the moves whose copies are complete."""
        for moves in (self._leaving, self._coming):
            while moves and not (moves[0].is_wanted and not moves[0].ticket.is_done()):
                self._end(moves.popleft())

    @property
    def _is_any_leaving(self) -> bool:
        return any(move.is_wanted for move in self._leaving)

    def _first_move(self) -> Move | None:
        """The move to wait for: one that frees memory, if there is one."""
        return next((move for move in (*self._leaving, *self._coming) if move.is_wanted), None)
