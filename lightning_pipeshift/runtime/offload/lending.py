"""Offloads blocks of saved tensors to the memory of other ranks.

CN114880130B, after MPress (HPCA 2023): a tensor is cut into blocks in proportion to the bandwidth
of the links to the ranks that take them. A rank on the same host allocates a buffer, and this rank
copies a block there; blocks for other hosts are sent.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_pipeshift.devices.shared_memory import (
    Address,
    Opening,
    SharedBufferPool,
    aside,
    copy,
    opened,
)
from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.model.saved.codec import Codec
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.runtime.comm.lane import Lane, Subject
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.comm.threads import InOrder, Threads
from lightning_pipeshift.runtime.offload.copying import Done, ThreadTicket, Ticket, nothing
from lightning_pipeshift.runtime.offload.targets import Coding, OffloadedBlock

_NOT_SENT: Final = -1
"""Stands for the number of a buffer, of a part that was forgotten before it was sent."""

T = TypeVar("T")

Key = tuple[int, int]
"""Identifies a block's part at its lender: the stage that owns it, and a number."""


class _Put(NamedTuple):
    """Announces a block."""

    key: Key
    num_bytes: int
    address: Address | None
    """That of the sending process, if it wants to copy the block there directly."""
    num_asked: int = 0
    """How many blocks the borrower had asked to be returned or freed when it announced this one."""


class Lender:
    """Keeps blocks of other stages, in memory that the plan reserves for them.

    Args:
        lanes: makes the lane for a subject, given whether blocks come back on it.
        device: where to keep the blocks.
        threads: their threads wait for other stages.
        take_room: called with the bytes of a block that arrives, and, negative, of one that leaves.
        address: that of this process; ``None`` to have every block sent.
    """

    def __init__(
        self,
        lanes: Callable[[Subject, bool], Lane],
        device: torch.device,
        threads: Threads,
        take_room: Callable[[int], None],
        address: Address | None = None,
    ) -> None:
        self._lanes = lanes
        self._device = device
        self._address = address
        # By borrowing stage: only that stage writes there, one block after another.
        self.pools: dict[int, SharedBufferPool] = {}
        self._threads = threads
        self._take_room = take_room
        self._held: dict[Key, Tensor] = {}
        # By borrowing stage: how many of its requests are complete.
        self._num_answered: dict[int, float] = {}
        self._changed = threading.Condition()

    def serve(self, stage: int) -> None:
        """From now on, receives the blocks that a stage sends, and returns them on request."""
        if stage not in self.pools:
            self.pools[stage] = SharedBufferPool(self._device)
            self._num_answered[stage] = 0.0
            self._threads.submit(partial(self._receive, stage))
            self._threads.submit(partial(self._answer, stage))

    def _receive(self, stage: int) -> None:
        lane, pool = self._lanes(Subject.LENT, False), self.pools[stage]
        last: Tensor | None = None
        while True:
            put = lane.receive_object(stage)
            if last is not None:
                # The borrower announces its next block only after opening the last buffer.
                pool.was_opened(last)
            if put is None:
                break
            pool.is_shared = put.address is not None and put.address == self._address
            # A block that could not be opened is announced again.
            buffer = self._held.pop(put.key, None)
            if buffer is None:
                # Requests to free blocks, made before this announcement, arrive on another lane.
                # Until they are carried out, more memory would be in use than was reserved.
                with self._changed:
                    while self._num_answered[stage] < put.num_asked:
                        self._changed.wait()
                # On the compute stream: this stage may have to offload tensors that it computes.
                self._take_room(put.num_bytes)
                with aside(self._device):
                    pool.claim(put.num_bytes)
                    buffer = pool.take(put.num_bytes)
            if self._may_open(put, buffer, stage):
                last = buffer
            elif buffer.device.type == "cpu":
                lane.receive_into(buffer, stage)
            else:
                staging = host_buffer((put.num_bytes,), torch.uint8)
                lane.receive_into(staging, stage)
                copy(buffer, staging, self._device)
            with self._changed:
                self._held[put.key] = buffer
                self._changed.notify_all()
        pool.clear()

    def _may_open(self, put: _Put, buffer: Tensor, stage: int) -> bool:
        """Answers the announcement of a block, if its sender wants to copy it directly: tells how
        to open its buffer, or why that is impossible, or ``None`` if the two processes cannot share
        memory. Returns whether the sender may open it.
        """
        if put.address is None:
            return False
        pool = self.pools[stage]
        answer: Opening | str | None
        try:
            with aside(self._device):
                answer = pool.opening(buffer) if pool.is_shared else None
        except RuntimeError as error:
            # The allocator's settings (`expandable_segments`) or a container may forbid it.
            answer, pool.is_shared = str(error), False
        answers = self._lanes(Subject.ANSWERS, False)
        answers.send_object(answer, stage)
        answers.settle()
        return isinstance(answer, Opening)

    def _answer(self, stage: int) -> None:
        lane, pool = self._lanes(Subject.RETURNED, True), self.pools[stage]
        try:
            while (asked := lane.receive_object(stage)) is not None:
                key, is_wanted = asked
                with self._changed:
                    while key not in self._held:
                        self._changed.wait()
                    buffer = self._held.pop(key)
                if is_wanted:
                    with aside(self._device):
                        lane.send_tensor(buffer, stage)
                pool.give(buffer)
                self._take_room(-buffer.numel())
                self._note_answered(stage, 1)
        finally:
            # However this ends, no block may wait for one that never arrives.
            self._note_answered(stage, math.inf)

    def _note_answered(self, stage: int, number: float) -> None:
        with self._changed:
            self._num_answered[stage] += number
            self._changed.notify_all()


class Borrower:
    """This stage's end of the lanes to a stage that keeps blocks for it.

    Args:
        stage: the lender.
        lanes: makes the lane for a subject, given whether blocks come back on it.
        on_error: called in a thread that has failed.
        device: that of this stage.
        address: that of this process; ``None`` to send every block.
        say: called once with the reason if direct copies fail.
    """

    def __init__(
        self,
        stage: int,
        lanes: Callable[[Subject, bool], Lane],
        on_error: Callable[[BaseException], None],
        device: torch.device,
        address: Address | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.stage = stage
        self._lanes = lanes
        self._numbers = itertools.count()
        self.device = device
        self._address = address
        self._say = say
        # The lender's buffers that this process has opened, by their numbers.
        self._opened: dict[int, Tensor] = {}
        self._num_asked = 0
        self.num_direct = 0
        """How many blocks were copied directly."""
        self.there = InOrder(f"to stage {stage}", on_error)
        self.back = InOrder(f"from stage {stage}", on_error)

    def key(self) -> Key:
        """A new key, which no other block of this stage has."""
        return self._lanes(Subject.LENT, False).stage, next(self._numbers)

    def send(self, key: Key, block: Tensor) -> int | None:
        """Sends or copies a block's part to the lender. Returns, when its memory may be reused, the
        number of the lender's buffer; ``None`` if this process has not opened it.
        """
        number = self._number(key, block.numel())
        if number is not None:
            copy(self._opened[number], block, self.device)
            self.num_direct += 1
        else:
            self._lanes(Subject.LENT, False).send_tensor(block, self.stage)
        return number

    def _number(self, key: Key, num_bytes: int) -> int | None:
        """Announces a block; returns the number of the buffer to copy it to, or ``None`` if it is
        to be sent.
        """
        self._tell(Subject.LENT, _Put(key, num_bytes, self._address, self._num_asked))
        if self._address is None:
            return None
        opening: Opening | str | None = self._lanes(Subject.ANSWERS, False).receive_object(
            self.stage
        )
        if not isinstance(opening, Opening):
            self._send_all(opening)
            return None
        for number in opening.gone:
            self._opened.pop(number, None)
        if opening.handle is not None:
            try:
                self._opened[opening.number] = opened(opening.handle, self.device)
            except (OSError, RuntimeError) as error:
                self._send_all(error)
                # The lender has a buffer for the block already, and finds it by the key.
                return self._number(key, num_bytes)
        return opening.number

    def _send_all(self, reason: object) -> None:
        """Sends every block from now on, and says why, if there is a reason."""
        self._address = None
        if reason is not None:
            self._say(
                f"memory of stage {self.stage} cannot be written to directly ({reason}), so blocks "
                "swapped there are sent over the network."
            )

    def take(self, key: Key, number: int | None, block: Tensor) -> None:
        """Fetches a part back, given the result of :meth:`send`, in the thread :attr:`back`."""
        if number is not None:
            copy(block, self._opened[number], self.device)
            self.ask(key, is_wanted=False)
            return
        lane = self.ask(key, is_wanted=True)
        if block.device.type == "cpu":
            lane.receive_into(block, self.stage)
        else:
            copy(block, lane.receive_tensor(block, self.stage), self.device)

    def ask(self, key: Key, is_wanted: bool) -> Lane:
        """Lets the lender free a part, after sending it if it is wanted. Called in the thread
        :attr:`back`, whose lane this returns.
        """
        # First: a block that is announced now may need the memory.
        self._num_asked += 1
        return self._tell(Subject.RETURNED, (key, is_wanted))

    def _tell(self, subject: Subject, message: Any) -> Lane:
        """Sends a message on a lane to the lender; returns the lane."""
        lane = self._lanes(subject, subject is Subject.RETURNED)
        lane.send_object(message, self.stage)
        lane.settle()
        return lane

    def close(self) -> None:
        """Tells the other stage to stop serving this one."""

        def leave() -> None:
            self._tell(Subject.LENT, None)
            # All requests for the other lane have been submitted only now.
            self.back.submit(partial(self._tell, Subject.RETURNED, None))
            self.back.close()

        self.there.submit(leave)
        self.there.close()


class RemoteTarget:
    """Ranks with free memory, each of which takes a part of every block. They wait until they have
    the memory, which the plan has reserved.

    Args:
        borrowers: this stage's ends of the lanes to them.
        shares: the relative sizes of their parts.
        codec: compresses blocks for the transfer.
    """

    def __init__(
        self,
        borrowers: Mapping[int, Borrower],
        shares: Sequence[float] = (),
        codec: Codec | None = None,
    ) -> None:
        self.borrowers = dict(borrowers)
        self.codec = codec
        self._split = Swap(0, (0,), tuple(self.borrowers), tuple(shares))

    def parts(self, num_bytes: int) -> list[_Part]:
        """A block's parts, one for each rank, of as many bytes in all."""
        sizes = [(self.borrowers[stage], size) for stage, size in self._split.parts(num_bytes)]
        return [_Part(borrower, borrower.key(), size) for borrower, size in sizes]

    def put(self, memory: Tensor, done: Done) -> OffloadedBlock:
        """See :class:`~lightning_pipeshift.runtime.offload.targets.OffloadTarget`."""
        return _RemoteBlock(self, memory, done)


class _Part(NamedTuple):
    """A part of a block, at one rank."""

    borrower: Borrower
    key: Key
    num_bytes: int


class _RemoteBlock:
    """A block offloaded to other ranks."""

    def __init__(self, place: RemoteTarget, memory: Tensor, done: Done) -> None:
        self._coding = Coding(place.codec)
        self._was_taken = self._is_forgotten = False
        encoded = self._coding.encode(memory)
        whole = encoded[0] if len(encoded) == 1 else torch.cat(encoded)
        self._parts = place.parts(whole.numel())
        self._sent = self._each(whole, lambda to: to.there, self._send, done)
        self.leaving: Ticket = ThreadTicket(*self._sent)

    def _each(
        self,
        whole: Tensor,
        line: Callable[[Borrower], InOrder],
        act: Callable[[int, Tensor], T],
        done: Done,
    ) -> list[Future[T]]:
        """Runs ``act`` with each part's index and bytes, in a thread for its rank, after the
        compute so far; and ``done`` after all of them.
        """
        is_ready = record_event(whole.device)
        # Who takes the last one is the last.
        ends: list[Done] = [done] + [nothing] * (len(self._parts) - 1)

        def work(index: int, blocks: list[Tensor]) -> T:
            is_ready.synchronize()
            with aside(self._parts[index].borrower.device):
                # Not held any longer: what is done at the end may allocate as much again.
                result = act(index, blocks.pop())
            # On the compute stream: the store may start to fetch another block.
            ends.pop()()
            return result

        blocks = whole.split([part.num_bytes for part in self._parts])
        return [
            line(part.borrower).submit(partial(work, index, [block]))
            for index, (part, block) in enumerate(zip(self._parts, blocks, strict=True))
        ]

    def _send(self, index: int, block: Tensor) -> int | None:
        part = self._parts[index]
        return _NOT_SENT if self._is_forgotten else part.borrower.send(part.key, block)

    def fetch(self, memory: Tensor) -> Ticket:
        """See :class:`OffloadedBlock`."""
        self._was_taken = True
        whole = memory.view(torch.uint8)
        if self._coding.is_encoded:
            total = sum(part.num_bytes for part in self._parts)
            whole = torch.empty(total, dtype=torch.uint8, device=memory.device)

        def take(index: int, block: Tensor) -> None:
            part = self._parts[index]
            part.borrower.take(part.key, self._sent[index].result(), block)

        def decode() -> None:
            if self._coding.is_encoded:
                with aside(memory.device):
                    self._decode(whole, memory)

        # At that point, earlier uses of this memory are complete.
        return ThreadTicket(*self._each(whole, lambda to: to.back, take, decode))

    def _decode(self, whole: Tensor, memory: Tensor) -> None:
        begin = 0

        def read(part: Tensor) -> None:
            nonlocal begin
            part.copy_(whole[begin : begin + part.numel()])
            begin += part.numel()

        with torch.no_grad():
            self._coding.decode(memory, read)
        record_event(memory.device).synchronize()

    def forget(self) -> None:
        """See :class:`OffloadedBlock`."""
        if not self._was_taken:
            self._is_forgotten = True
            for part, sent in zip(self._parts, self._sent, strict=True):
                sent.add_done_callback(partial(_free, part))


def _free(part: _Part, sent: Future[Any]) -> None:
    """Called when a part that is not needed any more has been sent, or has failed."""
    if sent.exception() is None and sent.result() != _NOT_SENT:
        part.borrower.back.submit(partial(part.borrower.ask, part.key, is_wanted=False))
