"""Copies beside the compute: in their order, with tickets; and the memory that they are put in."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.runtime.offload.copying import (
    StreamCopier,
    ThreadCopier,
    Ticket,
    copier_of,
)
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS
from tests.simulated.device import SimulatedDevice

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
WAYS = ["out", "back"]


def nothing() -> None:
    pass


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# --- the copier ---


@pytest.mark.parametrize("way", WAYS)
def test_work_is_done_in_the_order_in_which_it_was_asked_for(way: str) -> None:
    copier = ThreadCopier()
    found: list[int] = []

    def work(number: int) -> None:
        # The earlier, the longer: were there two threads, a later one would overtake.
        time.sleep(0.002 * max(0, 5 - number))
        found.append(number)

    tickets = [getattr(copier, way)(partial(work, n), nothing) for n in range(30)]
    tickets[-1].wait()
    assert found == list(range(30))
    assert all(ticket.is_done() for ticket in tickets)
    copier.close()


@pytest.mark.parametrize("blocked", WAYS)
def test_the_two_directions_do_not_wait_for_each_other(blocked: str) -> None:
    (free,) = set(WAYS) - {blocked}
    copier, go = ThreadCopier(), threading.Event()
    held = getattr(copier, blocked)(go.wait, nothing)
    behind = getattr(copier, blocked)(nothing, nothing)
    getattr(copier, free)(nothing, nothing).wait()
    assert not held.is_done()
    assert not behind.is_done()
    go.set()
    behind.wait()
    assert held.is_done()
    copier.close()


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_goes_on_when_it_is_done_and_not_before(way: str) -> None:
    copier, go = ThreadCopier(), threading.Event()
    source, to = torch.arange(8.0), torch.zeros(8)

    def work() -> None:
        go.wait()
        to.copy_(source)

    ticket: Ticket = getattr(copier, way)(work, nothing)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(ticket.wait)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        assert not ticket.is_done()
        go.set()
        waiting.result(timeout=LIMIT_SECONDS)
    assert torch.equal(source, to)
    assert ticket.is_done()
    ticket.wait()
    copier.close()


def test_who_wants_to_know_is_told_after_the_work_whoever_comes_first() -> None:
    copier = ThreadCopier()
    told: list[str] = []
    for number in range(20):
        ticket = copier.out(
            partial(told.append, f"work {number}"), partial(told.append, f"done {number}")
        )
        if number % 2:
            ticket.wait()
    copier.out(nothing, nothing).wait()
    assert sorted(told) == sorted(f"{what} {n}" for what in ("work", "done") for n in range(20))
    for number in range(20):
        assert told.index(f"work {number}") < told.index(f"done {number}")
    copier.close()


def test_copies_leave_no_graph_behind() -> None:
    copier = ThreadCopier()
    source, to = torch.ones(3, requires_grad=True), torch.zeros(3)
    copier.out(lambda: to.copy_(source), nothing).wait()
    assert not to.requires_grad
    assert to.tolist() == [1.0] * 3
    copier.close()


def test_what_was_copied_is_not_held_afterwards() -> None:
    copier = ThreadCopier()
    source, to = torch.ones(100), torch.zeros(100)
    storage = StorageWeakRef(source.untyped_storage())
    ticket = copier.out(partial(to.copy_, source), nothing)
    del source
    # Behind the first one, so that the thread has put that away.
    copier.out(nothing, nothing).wait()
    assert storage.expired()
    assert ticket.is_done()
    copier.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_was_copied_is_free_when_who_wants_to_know_is_told(way: str) -> None:
    copier, go = ThreadCopier(), threading.Event()
    source, to = torch.ones(100), torch.zeros(100)
    storage = StorageWeakRef(source.untyped_storage())
    is_free: list[bool] = []

    def work(source: Tensor) -> None:
        go.wait()
        to.copy_(source)

    ticket = getattr(copier, way)(partial(work, source), lambda: is_free.append(storage.expired()))
    del source
    go.set()
    ticket.wait()
    getattr(copier, way)(nothing, nothing).wait()
    assert is_free == [True]
    copier.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_reported_once_and_ends_what_comes_behind_it(way: str) -> None:
    (other,) = set(WAYS) - {way}
    errors: list[BaseException] = []
    copier = ThreadCopier(errors.append)
    told: list[str] = []

    def fails() -> None:
        raise OSError("the first")

    before = getattr(copier, way)(nothing, lambda: told.append("before"))
    failing = getattr(copier, way)(fails, lambda: told.append("failing"))
    behind = [
        getattr(copier, way)(lambda: told.append("ran"), lambda: told.append("behind"))
        for _ in range(3)
    ]
    before.wait()
    for ticket in (failing, *behind):
        with pytest.raises(OSError, match="the first"):
            ticket.wait()
        assert ticket.is_done()
    assert told == ["before"]
    assert [str(error) for error in errors] == ["the first"]
    # The other direction has a thread of its own.
    getattr(copier, other)(lambda: told.append("other"), nothing).wait()
    assert told == ["before", "other"]
    copier.close()


def test_an_error_that_nobody_wants_to_hear_of_is_the_tickets() -> None:
    copier = ThreadCopier()

    def fails() -> None:
        raise OSError("quiet")

    with pytest.raises(OSError, match="quiet"):
        copier.out(fails, nothing).wait()
    copier.close()


def test_closing_lets_what_is_under_way_come_to_its_end() -> None:
    copier = ThreadCopier()
    copier.close()

    copier, go = ThreadCopier(), threading.Event()
    before = set(threading.enumerate())
    tickets = [copier.out(go.wait, nothing), copier.back(go.wait, nothing)]
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    copier.close()
    go.set()
    for ticket in tickets:
        ticket.wait()
    assert within(LIMIT_SECONDS, lambda: not any(thread.is_alive() for thread in own))


def test_a_copier_that_has_nothing_to_do_has_no_threads() -> None:
    before = threading.active_count()
    copier = copier_of(CPU)
    assert threading.active_count() == before
    copier.close()


# --- rooms ---


@pytest.mark.parametrize("end", ["the copy ends", "the ticket says so", "the compute waits"])
def test_memory_of_a_copy_under_way_is_not_freed(end: str) -> None:
    """Nobody wants what is coming back any more, and the stream still writes it."""
    with SimulatedDevice():
        copier = StreamCopier(GPU)
        target = torch.zeros(100, device=GPU)
        storage = StorageWeakRef(target.untyped_storage())
        source = torch.ones(100).pin_memory()
        ticket = copier.back(partial(target.copy_, source, non_blocking=True), nothing)
        del target
        assert not storage.expired()
        if end == "the compute waits":
            ticket.wait()
        elif end == "the ticket says so":
            while not ticket.is_done():
                assert not storage.expired()
        else:
            copier.finish()
            copier.out(nothing, nothing)
        assert storage.expired()
        # Which may get the memory.
        torch.zeros(100, device=GPU)
        copier.close()


def test_no_more_is_set_aside_than_there_is() -> None:
    rooms = BufferPool(CPU, 100)
    assert rooms.claim(60)
    assert not rooms.claim(41)
    assert rooms.claim(40)
    assert not rooms.claim(1)
    assert rooms.claim(0)
    assert (rooms.used_bytes, rooms.peak_bytes) == (100, 100)
    rooms.unclaim(60)
    assert (rooms.used_bytes, rooms.peak_bytes) == (40, 100)
    assert rooms.claim(60)


def test_rooms_without_a_limit_or_without_room() -> None:
    assert BufferPool(CPU, float("inf")).claim(1 << 60)
    none = BufferPool(CPU, 0)
    assert none.claim(0)
    assert not none.claim(1)
    assert none.peak_bytes == 0


def taken(rooms: BufferPool, num_bytes: int) -> Tensor:
    assert rooms.claim(num_bytes)
    return rooms.take(num_bytes)


def test_room_is_a_vector_of_bytes_that_is_used_again() -> None:
    rooms = BufferPool(CPU, 1000)
    first = taken(rooms, 300)
    assert (first.dtype, first.shape, first.device) == (torch.uint8, (300,), CPU)
    second = taken(rooms, 300)
    assert second.data_ptr() != first.data_ptr()
    address = first.data_ptr()
    rooms.give(first)
    assert rooms.used_bytes == 300
    del first
    assert taken(rooms, 300).data_ptr() == address
    assert rooms.used_bytes == 600


def test_rooms_of_other_sizes_make_place() -> None:
    rooms = BufferPool(CPU, 1000)
    given = [taken(rooms, size) for size in (500, 300, 200)]
    storages = [StorageWeakRef(room.untyped_storage()) for room in given]
    while given:
        rooms.give(given.pop())
    assert not any(storage.expired() for storage in storages), "they may be wanted again"
    room = taken(rooms, 400)
    # The largest first: one is enough.
    assert [storage.expired() for storage in storages] == [True, False, False]
    other = taken(rooms, 600)
    assert all(storage.expired() for storage in storages)
    assert rooms.used_bytes == room.numel() + other.numel() == rooms.limit_bytes


def test_rooms_that_are_in_use_stay() -> None:
    rooms = BufferPool(CPU, 1000)
    kept = taken(rooms, 500).fill_(7)
    rooms.give(taken(rooms, 300))
    assert not rooms.claim(501)
    taken(rooms, 500).fill_(1)
    assert kept.unique().tolist() == [7]


def test_clearing_gives_back_what_is_not_in_use() -> None:
    rooms = BufferPool(CPU, 1000)
    kept, given = taken(rooms, 300), taken(rooms, 300)
    storages = [StorageWeakRef(room.untyped_storage()) for room in (kept, given)]
    rooms.give(given)
    del given
    rooms.clear()
    assert [storage.expired() for storage in storages] == [False, True]
    assert rooms.used_bytes == 300
    # All but what is in use is free.
    taken(rooms, 700)


@pytest.mark.parametrize("seed", range(4))
def test_many_threads_never_have_more_than_there_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, sizes = 2000, (100, 250, 333, 900)
    rooms = BufferPool(CPU, limit)
    # All that was made, and what of it counts.
    made: dict[int, tuple[StorageWeakRef, int]] = {}
    real, lock, most = torch.empty, threading.Lock(), [0]

    def count(room: Tensor, num_bytes: int) -> int:
        storage = StorageWeakRef(room.untyped_storage())
        with lock:
            made[storage.cdata] = (storage, num_bytes)
            living = sum(size for storage, size in made.values() if not storage.expired())
            most[0] = max(most[0], living)
        return storage.cdata

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        room: Tensor = real(*args, **kwargs)
        count(room, room.numel())
        return room

    monkeypatch.setattr(torch, "empty", empty)
    failures: list[BaseException] = []
    refused = [0] * 4

    def life(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        try:
            for _ in range(150):
                size = dice.choice(sizes)
                if not rooms.claim(size):
                    refused[number] += 1
                    continue
                room = rooms.take(size).fill_(number)
                if dice.random() < 0.3:
                    time.sleep(0.0002)
                assert room.eq(number).all(), "another thread has the same room"
                # Until this thread lets go of it, it is here even if the rooms are rid of it.
                key = count(room, 0)
                rooms.give(room)
                del room
                with lock:
                    made[key] = (made[key][0], size)
                if dice.random() < 0.05:
                    rooms.clear()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=life, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert not failures
    assert rooms.used_bytes == 0
    assert 900 <= rooms.peak_bytes <= limit
    assert most[0] <= limit, "what there is, whether in use or not"
    assert rooms.claim(limit)


# --- pinned memory ---


class Driver:
    """Stands in for CUDA's runtime: pins memory, or can't."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_from: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self.num_asked = 0
        self._fails_from = fails_from
        self.has_error = False
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        zeros = torch.zeros
        monkeypatch.setattr(
            torch,
            "zeros",
            lambda *size, device=None: self.launch() if device == "cuda" else zeros(*size),
        )

    def launch(self) -> None:
        if self.has_error:
            self.has_error = False
            raise RuntimeError("out of memory, says the last call before this one")

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.num_asked += 1
        if self.num_asked >= self._fails_from:
            self.has_error = True
            return 2
        assert address % mmap.PAGESIZE == 0, "another room may be on the same page"
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("fails_from", [1, 3])
def test_where_memory_cannot_be_pinned_other_memory_does_and_it_is_said_once(
    fails_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, fails_from)
    said: list[str] = []
    rooms = BufferPool(CPU, 1000, GPU, say=said.append)
    kept = []
    for number in range(1, 6):
        room = taken(rooms, 100).fill_(number)
        assert (room.dtype, room.shape) == (torch.uint8, (100,))
        assert room.unique().tolist() == [number]
        assert len(said) == (number >= fails_from)
        kept.append(room)
    assert driver.num_asked == fails_from, "not tried again"
    assert len(driver.pinned) == fails_from - 1
    assert not driver.has_error, "the next kernel would fail for it"
    assert "error 2" in said[0]
    assert "ulimit" in said[0]
    assert "`host_budget`" in said[0]
    assert rooms.used_bytes == 500


def test_pinned_memory_is_as_large_as_asked_for_and_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    finished: list[int] = []
    rooms = BufferPool(CPU, 10_000, GPU, lambda: finished.append(len(driver.pinned)))
    first, second = taken(rooms, 5000), taken(rooms, 3000)
    # Torch's own allocator would have taken 8192 and 4096.
    assert sorted(driver.pinned.values()) == [3000, 5000]
    for room in (first, second):
        rooms.give(room)
    del room, first, second
    assert not finished
    # There is no place for both: the larger one goes, when no copy uses it.
    third = taken(rooms, 6000)
    assert sorted(driver.pinned.values()) == [3000, 6000]
    assert finished == [2]
    rooms.clear()
    assert list(driver.pinned.values()) == [6000]
    rooms.give(third)
    del third
    rooms.clear()
    assert not driver.pinned
    assert finished == [2, 2, 1]


def test_memory_is_pinned_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    rooms = BufferPool(CPU, 1000)
    taken(rooms, 100)
    assert driver.num_asked == 0
    rooms = BufferPool(CPU, 1000, pinned_for=GPU)
    rooms.give(taken(rooms, 100))
    taken(rooms, 100)
    assert driver.num_asked == 1, "what is used again is pinned already"
