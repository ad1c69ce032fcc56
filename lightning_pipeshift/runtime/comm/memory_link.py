"""Sends tensors between two ranks of one host through device memory that both can reach.

gloo carries a GPU's tensors through host memory: a copy to the host that the sender waits for, a
socket, and a copy to the device that the receiver waits for. Here the sender copies into a buffer
of its own device, which the receiver has opened once (by CUDA IPC), and the receiver copies out of
it. What goes through gloo is a small message that says in which buffer the tensors are, and another
one back when they have been taken. Two events for each buffer order the devices' work: the receiver
reads behind the write, the sender reuses the buffer behind the read. No host waits for a device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_pipeshift.devices.shared_memory import (
    Address,
    Opening,
    SharedBufferPool,
    opened,
)
from lightning_pipeshift.devices.streams import (
    SharedEvent,
    record_event,
    shared_event,
    side_stream,
    synchronize,
)
from lightning_pipeshift.runtime.comm.lane import Lane

log = logging.getLogger(__name__)

T = TypeVar("T")

# Where a tensor begins in a buffer: at a multiple of this, as kernels read 16 bytes at once.
_ALIGNMENT: Final = 256
# How many times as large buffers become where a payload has outgrown them, at least.
_GROWTH: Final = 1.25


class Written(NamedTuple):
    """A message: tensors are in a buffer.

    Args:
        opening: opens the buffer.
        event: the handle of the event behind the write; ``None`` if it has been sent before.
    """

    opening: Opening
    event: Any


class Taken(NamedTuple):
    """The answer: the tensors are being copied out of the buffer.

    Args:
        number: the buffer's.
        event: the handle of the event behind the read; ``None`` if it has been sent before.
    """

    number: int
    event: Any


class _Opened(NamedTuple):
    """The other rank's buffer, and its events."""

    memory: Tensor
    written: SharedEvent
    read: SharedEvent


class MemoryEnd:
    """One rank's buffers for another rank, and what it has opened of that rank's.

    Args:
        device: this rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = SharedBufferPool(device)
        self._pool.is_shared = True
        # By the buffers' numbers: those that the other rank has not taken the tensors out of yet,
        # and the events of all.
        self._full: dict[int, Tensor] = {}
        self._size = 0
        self._written: dict[int, SharedEvent] = {}
        self._read: dict[int, SharedEvent] = {}
        self._opened: dict[int, _Opened] = {}

    def _aside(self) -> AbstractContextManager[None]:
        # Buffers belong to a stream of their own, so that no work of other streams delays them.
        return side_stream(self.device, "buffers of payloads")

    def write(self, tensors: Sequence[Tensor]) -> Written:
        """Copies tensors into a buffer. Work queued after this call may change them.

        Args:
            tensors: contiguous vectors.

        Raises:
            RuntimeError: memory of this device cannot be shared.
        """
        # All of one size: the slices of a batch differ a little, and opening a buffer takes long.
        needed = _places(tensors)[-1]
        if needed > self._size:
            # What has grown may grow again.
            self._size = max(needed, int(_GROWTH * self._size) // _ALIGNMENT * _ALIGNMENT)
        with self._aside():
            self._pool.claim(self._size)
            buffer = self._pool.take(self._size)
            opening = self._pool.opening(buffer)
            is_free = record_event(self.device)
        if opening is None:
            raise RuntimeError("there is no more memory that processes can share")
        is_free.wait()
        with torch.no_grad():
            for part, tensor in _parts(buffer, tensors):
                part.copy_(tensor, non_blocking=True)
        handle = None
        if opening.handle is not None:
            event = self._written[opening.number] = shared_event(self.device)
            handle = event.handle
        self._written[opening.number].record()
        self._full[opening.number] = buffer
        self._forget(opening.gone)
        return Written(opening, handle)

    def _forget(self, numbers: Sequence[int]) -> None:
        """Destroys the events of buffers that are gone. The other rank's device may still have to
        reach a wait for one, before it reads: the stream of the buffers has waited for the reads.
        """
        if numbers:
            with self._aside():
                record_event(self.device).synchronize()
        for number in numbers:
            del self._written[number], self._read[number]

    def close(self) -> None:
        """Destroys all events. Every message has been answered, or the run ends with an error."""
        self._forget([number for number in self._read if number not in self._full])

    def take(self, message: Written, tensors: Sequence[Tensor]) -> Taken:
        """Copies what the other rank has written into tensors of this rank.

        Args:
            message: from :meth:`write` of the other rank.
            tensors: contiguous vectors, of the lengths and types of those there.

        Raises:
            OSError, RuntimeError: its memory cannot be reached from here.
        """
        opening, handle = message.opening, None
        for number in opening.gone:
            # Torch waits for the current stream before it closes the memory.
            with self._aside():
                self._opened[number].read.wait()
                del self._opened[number]
        if opening.handle is not None:
            with self._aside():
                memory = opened(opening.handle, self.device)
            read = shared_event(self.device)
            written = shared_event(memory.device, message.event)
            self._opened[opening.number] = _Opened(memory, written, read)
            handle = read.handle
        memory, written, read = self._opened[opening.number]
        written.wait()
        with torch.no_grad():
            for part, tensor in _parts(memory, tensors):
                tensor.copy_(part, non_blocking=True)
        read.record()
        return Taken(opening.number, handle)

    def give_back(self, answer: Taken) -> None:
        """Makes a buffer free for other tensors.

        Args:
            answer: from :meth:`take` of the other rank.
        """
        if answer.event is not None:
            self._read[answer.number] = shared_event(self.device, answer.event)
        buffer = self._full.pop(answer.number)
        self._pool.was_opened(buffer)
        with self._aside():
            self._read[answer.number].wait()
        self._pool.give(buffer)


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in a buffer, in bytes; and, last, the buffer's size."""
    places = [0]
    for tensor in tensors:
        places.append(-(-(places[-1] + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _parts(buffer: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a buffer for tensors that are not empty, each with the tensor's bytes."""
    for begin, tensor in zip(_places(tensors), tensors, strict=False):
        if tensor.nbytes:
            yield buffer[begin : begin + tensor.nbytes], tensor.view(torch.uint8)


def ranks_with_shared_memory(
    lane: Lane, addresses: Sequence[Address | None], device: torch.device
) -> frozenset[int]:
    """The ranks of a lane that can reach this rank's memory, and this rank theirs: each pair with
    equal addresses tries it. Every rank of the lane calls this.

    Args:
        lane: for objects.
        addresses: by stage, that of its process; ``None`` for one that shares no memory.
        device: this rank's.
    """
    address = addresses[lane.stage]
    ends = {
        stage: MemoryEnd(device)
        for stage, other in enumerate(addresses)
        if stage != lane.stage and address is not None and other == address
    }
    failures: dict[int, str] = {}
    # The second time the tensor comes in the same buffer: a copy of the first is no shared memory.
    for first in range(2):
        proof = torch.arange(first, first + 4, device=device)
        tried = {stage: end for stage, end in ends.items() if stage not in failures}
        for stage, end in tried.items():
            lane.send_object(_tried(partial(end.write, [proof])), stage)
        answers: dict[int, Taken | str] = {}
        for stage, end in tried.items():
            message: Written | str = lane.receive_object(stage)
            answers[stage] = _tried(partial(_checked, end, message, proof))
            lane.send_object(answers[stage], stage)
        for stage, end in tried.items():
            answer: Taken | str = lane.receive_object(stage)
            if isinstance(answer, str) or isinstance(answers[stage], str):
                failures[stage] = next(one for one in (answers[stage], answer) if type(one) is str)
            else:
                end.give_back(answer)
    for stage, reason in failures.items():
        log.warning(
            "PipeShift: the memory of the devices of ranks %d and %d cannot be shared (%s), so"
            " tensors between them go through the host's memory.",
            lane.ranks[lane.stage],
            lane.ranks[stage],
            reason,
        )
    lane.settle()
    # The buffers of the trial are freed: their memory may belong to other work from then on.
    synchronize(device)
    return frozenset(lane.ranks[stage] for stage in ends if stage not in failures)


def _checked(end: MemoryEnd, message: Written | str, expected: Tensor) -> Taken:
    if isinstance(message, str):
        raise RuntimeError(message)
    answer = end.take(message, [copy := torch.zeros_like(expected)])
    if not torch.equal(copy, expected):
        raise RuntimeError("other values arrive")
    return answer


def _tried(act: Callable[[], T]) -> T | str:
    """Returns the result of a function, or the message of its error."""
    try:
        return act()
    except (OSError, RuntimeError) as error:
        return str(error)
