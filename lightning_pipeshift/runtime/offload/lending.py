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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.model.saved.codec import Codec
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.comm.threads import InOrder, Threads
from lightning_pipeshift.runtime.offload.copying import Done, Ticket
from lightning_pipeshift.runtime.offload.shared_memory import (
    Address,
    Opening,
    SharedBufferPool,
    aside,
    copy,
    opened,
)
from lightning_pipeshift.runtime.offload.targets import Coding, OffloadedBlock

# The lanes of blocks: the first to the lenders, the second back. Requests for a block and the
# returned blocks travel in opposite directions on the second. On the third, lenders answer
# announcements of blocks.
_THERE, _BACK, _ANSWERS = 1, 2, 3

_CPU = torch.device("cpu")

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
        lanes: makes the lane with a number, given whether blocks come back on it.
        device: where to keep the blocks.
        threads: their threads wait for other stages.
        take_room: called with the bytes of a block that arrives, and, negative, of one that leaves.
        address: that of this process; ``None`` to have every block sent.
    """

    def __init__(
        self,
        lanes: Callable[[int, bool], Lane],
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
        lane, pool = self._lanes(_THERE, False), self.pools[stage]
        last: Tensor | None = None
        while True:
            put = lane.receive_object(stage)
            if last is not None:
                # The borrower announces its next block only after opening the last buffer.
                pool.was_opened(last)
            if put is None:
                break
            pool.is_shared = put.address is not None and put.address == self._address
            buffer = self._held.get(put.key)
            if buffer is None:
                # Requests to free blocks, made before this announcement, arrive on another lane.
                # Until they are carried out, more memory would be in use than was reserved.
                with self._changed:
                    while self._num_answered[stage] < put.num_asked:
                        self._changed.wait()
                # On the compute stream: this stage may have to offload tensors that it computes.
                self._take_room(put.num_bytes)
            with aside(self._device):
                if buffer is None:
                    pool.claim(put.num_bytes)
                    buffer = pool.take(put.num_bytes)
                opening = self._opening(put, buffer, stage)
            if isinstance(opening, Opening):
                last = buffer
                self._hold(put.key, buffer)
                continue
            staging = buffer
            if buffer.device.type != "cpu":
                staging = host_buffer((put.num_bytes,), torch.uint8)
            lane.receive_into(staging, stage)
            if staging is not buffer:
                copy(buffer, staging, self._device)
            self._hold(put.key, buffer)
        pool.clear()

    def _opening(self, put: _Put, buffer: Tensor, stage: int) -> Opening | str | None:
        """Answers the announcement of a block, if its sender wants to copy it directly; returns the
        answer.
        """
        if put.address is None:
            return None
        opening = _opening(self.pools[stage], buffer)
        answers = self._lanes(_ANSWERS, False)
        answers.send_object(opening, stage)
        answers.settle()
        return opening

    def _hold(self, key: Key, buffer: Tensor) -> None:
        with self._changed:
            self._held[key] = buffer
            self._changed.notify_all()

    def _answer(self, stage: int) -> None:
        try:
            self._answer_all(stage)
        finally:
            # However this ends, no block may wait for one that never arrives.
            with self._changed:
                self._num_answered[stage] = math.inf
                self._changed.notify_all()

    def _answer_all(self, stage: int) -> None:
        lane, pool = self._lanes(_BACK, True), self.pools[stage]
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
            with self._changed:
                self._num_answered[stage] += 1
                self._changed.notify_all()


def _opening(pool: SharedBufferPool, buffer: Tensor) -> Opening | str | None:
    """The answer to the announcement of a block: how to open its buffer, or why that is impossible;
    ``None`` if the two processes cannot share memory.
    """
    try:
        return pool.opening(buffer) if pool.is_shared else None
    except RuntimeError as error:
        # The allocator's settings (`expandable_segments`) or a container may forbid it.
        pool.is_shared = False
        return str(error)


class Borrower:
    """This stage's end of the lanes to a stage that keeps blocks for it.

    Args:
        stage: the lender.
        lanes: makes the lane with a number, given whether blocks come back on it.
        limit_bytes: how much the lender has reserved for this stage.
        on_error: called in a thread that has failed.
        device: that of this stage.
        address: that of this process; ``None`` to send every block.
        say: called once with the reason if direct copies fail.
    """

    def __init__(
        self,
        stage: int,
        lanes: Callable[[int, bool], Lane],
        limit_bytes: float,
        on_error: Callable[[BaseException], None],
        device: torch.device = _CPU,
        address: Address | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.stage = stage
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lanes = lanes
        self._numbers = itertools.count()
        # Guards all attributes below, and the bytes above.
        self._changed = threading.Condition()
        self.device = device
        self._address = address
        self._say = say
        # The lender's buffers that this process has opened, by their numbers.
        self._opened: dict[int, Tensor] = {}
        # The blocks that have arrived, with their buffers; ``None`` if only the lender knows the
        # buffer.
        self._arrived: dict[Key, Tensor | None] = {}
        # With their bytes, which the lender has to free before they can be claimed again.
        self._forgotten: dict[Key, int] = {}
        self._num_asked = 0
        self._failure: BaseException | None = None
        self.num_direct = 0
        """How many blocks were copied directly."""
        self.there = InOrder(f"to stage {stage}", on_error)
        self.back = InOrder(f"from stage {stage}", on_error)

    def claim(self, num_bytes: int) -> bool:
        """Reserves memory at the lender; returns whether that was possible."""
        with self._changed:
            if self.used_bytes + num_bytes > self.limit_bytes:
                return False
            self.used_bytes += num_bytes
            return True

    def unclaim(self, num_bytes: int) -> None:
        """Undoes :meth:`claim`."""
        with self._changed:
            self.used_bytes -= num_bytes

    def key(self) -> Key:
        """A new key, which no other block of this stage has."""
        return self._lanes(_THERE, False).stage, next(self._numbers)

    def send(self, key: Key, block: Tensor) -> None:
        """Sends or copies a block's part to the lender; returns when its memory may be reused."""
        with self._changed:
            if key in self._forgotten:
                self.used_bytes -= self._forgotten.pop(key)
                return
        try:
            buffer = self._buffer(key, block.numel())
            if buffer is not None:
                copy(buffer, block, self.device)
                self.num_direct += 1
            else:
                self._lanes(_THERE, False).send_tensor(block, self.stage)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise
        with self._changed:
            if key not in self._forgotten:
                self._arrived[key] = buffer
                self._changed.notify_all()
                return
            num_bytes = self._forgotten.pop(key)
        self.back.submit(partial(self._ask, key, False, num_bytes))

    def _buffer(self, key: Key, num_bytes: int) -> Tensor | None:
        """Announces a block; returns the buffer to copy it to, or ``None`` if it is to be sent."""
        lane = self._lanes(_THERE, False)
        with self._changed:
            num_asked = self._num_asked
        lane.send_object(_Put(key, num_bytes, self._address, num_asked), self.stage)
        lane.settle()
        if self._address is None:
            return None
        opening: Opening | str | None = self._lanes(_ANSWERS, False).receive_object(self.stage)
        if not isinstance(opening, Opening):
            self._address = None
            if opening is not None:
                self._say_why(opening)
            return None
        for number in opening.gone:
            self._opened.pop(number, None)
        if opening.handle is not None:
            try:
                self._opened[opening.number] = opened(opening.handle, self.device)
            except (OSError, RuntimeError) as error:
                self._address = None
                self._say_why(error)
                # The lender has a buffer for the block already, and finds it by the key.
                return self._buffer(key, num_bytes)
        return self._opened[opening.number]

    def _say_why(self, reason: object) -> None:
        self._say(
            f"memory of stage {self.stage} cannot be written to directly ({reason}), so blocks "
            "swapped there are sent over the network."
        )

    def take(self, key: Key, block: Tensor) -> None:
        """Fetches a part back, which may still be on its way to the lender."""
        with self._changed:
            while key not in self._arrived:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
            buffer = self._arrived.pop(key)
        if buffer is not None:
            copy(block, buffer, self.device)
            self._ask(key, is_wanted=False)
            return
        lane = self._ask(key, is_wanted=True)
        if block.device.type == "cpu":
            lane.receive_into(block, self.stage)
        else:
            copy(block, lane.receive_tensor(block, self.stage), self.device)

    def forget(self, key: Key, num_bytes: int) -> None:
        """Lets the lender free a part, which may still be on its way there, and unclaims it."""
        with self._changed:
            if key not in self._arrived:
                # The thread that sends it sees this, and does not send it, or asks to free it.
                self._forgotten[key] = num_bytes
                return
            del self._arrived[key]
        self._ask(key, False, num_bytes)

    def _ask(self, key: Key, is_wanted: bool, unclaimed: int = 0) -> Lane:
        with self._changed:
            # Together: a block that is claimed now is announced behind this request.
            self._num_asked += 1
            self.used_bytes -= unclaimed
        lane = self._lanes(_BACK, True)
        lane.send_object((key, is_wanted), self.stage)
        lane.settle()
        return lane

    def close(self) -> None:
        """Tells the other stage to stop serving this one."""
        self.there.submit(self._leave)
        self.there.close()

    def _leave(self) -> None:
        self._say_goodbye(_THERE)
        # All requests for the other lane have been submitted only now.
        self.back.submit(partial(self._say_goodbye, _BACK))
        self.back.close()

    def _say_goodbye(self, number: int) -> None:
        lane = self._lanes(number, number == _BACK)
        lane.send_object(None, self.stage)
        lane.settle()


class _Together:
    """A ticket for work of several threads.

    Args:
        submits: each submits a part of the work to a thread, which then calls the argument.
        done: called when all parts are done.
    """

    def __init__(self, submits: Sequence[Callable[[Callable[[], None]], Any]], done: Done) -> None:
        self._left = len(submits)
        self._lock = threading.Lock()
        self._done = done
        self._futures = [submit(self._one_is_done) for submit in submits]

    def _one_is_done(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._done()

    def is_done(self) -> bool:
        """See :class:`~lightning_pipeshift.runtime.offload.copying.Ticket`."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """See :class:`~lightning_pipeshift.runtime.offload.copying.Ticket`."""
        for future in self._futures:
            future.result()


class RemoteTarget:
    """Ranks with free memory, each of which takes a part of every block.

    Args:
        borrowers: this stage's ends of the lanes to them.
        shares: the relative sizes of their parts.
        codec: compresses blocks for the transfer.
    """

    def __init__(
        self, borrowers: Mapping[int, Borrower], shares: Sequence[float] = (), codec: Any = None
    ) -> None:
        self.borrowers = dict(borrowers)
        self.codec: Codec | None = codec
        self._split = Swap(0, (0,), tuple(self.borrowers), tuple(shares))

    def sizes(self, num_bytes: int) -> list[tuple[Borrower, int]]:
        """The number of a block's bytes for each rank."""
        return [(self.borrowers[stage], size) for stage, size in self._split.parts(num_bytes)]

    def put(self, memory: Tensor, done: Done) -> OffloadedBlock | None:
        """See :class:`~lightning_pipeshift.runtime.offload.targets.OffloadTarget`."""
        sizes = self.sizes(memory.nbytes)
        for index, (borrower, size) in enumerate(sizes):
            if not borrower.claim(size):
                for other, claimed in sizes[:index]:
                    other.unclaim(claimed)
                return None
        return _RemoteBlock(self, memory, done)


class _RemoteBlock:
    """A block offloaded to other ranks: for each of them a key, and the part's size."""

    def __init__(self, place: RemoteTarget, memory: Tensor, done: Done) -> None:
        self._coding = Coding(place.codec)
        self._was_taken = False
        parts = self._coding.encode(memory)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        claims = {borrower.stage: size for borrower, size in place.sizes(memory.nbytes)}
        self._blocks = [
            (borrower, borrower.key(), size) for borrower, size in place.sizes(whole.numel())
        ]
        for borrower, _, size in self._blocks:
            borrower.unclaim(claims[borrower.stage] - size)
        self.leaving: Ticket = self._each(whole, lambda to: to.there, Borrower.send, done)

    def _each(
        self,
        whole: Tensor,
        line: Callable[[Borrower], InOrder],
        act: Callable[[Borrower, Key, Tensor], None],
        done: Done,
    ) -> Ticket:
        """Runs ``act`` on each rank's part in a thread for that rank, after the compute so far."""
        is_ready = record_event(whole.device)

        def submit(borrower: Borrower, key: Key, block: Tensor, then: Callable[[], None]) -> Any:
            blocks = [block]

            def work() -> None:
                is_ready.synchronize()
                with aside(borrower.device):
                    # Not held any longer: `then` may allocate as much again.
                    act(borrower, key, blocks.pop())
                # On the compute stream: the store may start to fetch another block.
                then()

            return line(borrower).submit(work)

        parts = whole.split([size for _, _, size in self._blocks])
        return _Together(
            [
                partial(submit, borrower, key, part)
                for (borrower, key, _), part in zip(self._blocks, parts, strict=True)
            ],
            done,
        )

    def fetch(self, memory: Tensor, done: Done) -> Ticket:
        """See :class:`OffloadedBlock`."""
        self._was_taken = True
        total = sum(size for _, _, size in self._blocks)
        whole = memory.view(torch.uint8)
        if self._coding.is_encoded:
            whole = torch.empty(total, dtype=torch.uint8, device=memory.device)

        def take(borrower: Borrower, key: Key, block: Tensor) -> None:
            borrower.take(key, block)
            borrower.unclaim(block.numel())

        def finish() -> None:
            if self._coding.is_encoded:
                with aside(memory.device):
                    self._decode(whole, memory)
            done()

        # At that point, earlier uses of this memory are complete.
        return self._each(whole, lambda to: to.back, take, finish)

    def _decode(self, whole: Tensor, memory: Tensor) -> None:
        with torch.no_grad():
            self._coding.decode(memory, _reader(whole))
        record_event(memory.device).synchronize()

    def forget(self) -> None:
        """See :class:`OffloadedBlock`."""
        if self._was_taken:
            return
        for borrower, key, size in self._blocks:
            borrower.back.submit(partial(borrower.forget, key, size))


def _reader(whole: Tensor) -> Callable[[Tensor], None]:
    """Fills vectors with the bytes of another, from its beginning on."""
    begin = 0

    def read(part: Tensor) -> None:
        nonlocal begin
        part.copy_(whole[begin : begin + part.numel()])
        begin += part.numel()

    return read
