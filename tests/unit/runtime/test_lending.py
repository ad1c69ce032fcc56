"""Blocks of saved tensors at other ranks, in parts: there, and back as the same bits."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.devices import shared_memory as beside_module
from lightning_pipeshift.devices.shared_memory import Address, address_here
from lightning_pipeshift.errors import BudgetError, StageFailedError
from lightning_pipeshift.model.saved.codec import codec_named
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.plan.schedule.actions import parse_row
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.offload import activation_store as store_module
from lightning_pipeshift.runtime.offload import lending as lending_module
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore, StagePolicy
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.offload.targets import OffloadedBlock
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.unit.model.codec_bound import largest_error
from tests.unit.runtime.stages import connect

T = TypeVar("T")

CPU = torch.device("cpu")
NO_LIMIT = float("inf")


def nothing() -> None:
    pass


@pytest.fixture(params=["over the network", "directly"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether blocks are sent, or put into memory of the other process; of the ranks to come."""
    found: str = request.param
    monkeypatch.setenv("BLOCKS_GO", found)
    return found


def own_address() -> Address | None:
    return address_here(CPU) if os.environ["BLOCKS_GO"] == "directly" else None


# --- both ends ---


class Waited(Threads):
    """Threads whose end can be waited for."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.futures: list[Future[Any]] = []
        super().__init__("lending", self.errors.append)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        future = super().submit(function)
        self.futures.append(future)
        return future


class House:
    """A rank that takes blocks of others, and keeps count."""

    def __init__(self, channels: Channels, guests: Sequence[int] = (0,)) -> None:
        self.channels = channels
        self.counts = [0]
        self._lock = threading.Lock()
        self.threads = Waited()
        self.lender = Lender(channels.swaps, CPU, self.threads, self._count, own_address())
        for guest in guests:
            self.lender.serve(guest)
            # Saying it twice is as good as once.
            self.lender.serve(guest)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.counts.append(self.counts[-1] + num_bytes)

    def answer(self) -> list[int]:
        """Tells stage 0 what is held now, as often as it asks; returns what was held, in turn."""
        while self.channels.receive_object(0) == "how much?":
            self.channels.send_object(self.counts[-1], 0)
            self.channels.settle()
        return self.end()

    def end(self) -> list[int]:
        """Waits until every guest has said goodbye; returns what was held, in turn."""
        for future in self.threads.futures:
            future.result(timeout=LIMIT_SECONDS)
        assert not self.threads.errors
        assert all(pool.used_bytes == 0 for pool in self.lender.pools.values())
        return self.counts


class Guest:
    """A rank whose blocks are at others."""

    def __init__(
        self,
        channels: Channels,
        houses: Sequence[int],
        shares: Sequence[float] = (),
        codec: str | None = None,
    ) -> None:
        self.channels = channels
        self.errors: list[BaseException] = []
        self.borrowers = {
            house: Borrower(house, channels.swaps, self.errors.append, CPU, own_address())
            for house in houses
        }
        self.place = RemoteTarget(self.borrowers, shares, codec_named(codec))

    def put(self, memory: Tensor) -> OffloadedBlock:
        return self.place.put(memory, nothing)

    def held(self, house: int) -> int:
        """The bytes that another rank holds now."""
        self.channels.send_object("how much?", house)
        self.channels.settle()
        found: int = self.channels.receive_object(house)
        return found

    def held_in_time(self, house: int, num_bytes: int) -> bool:
        """Whether it comes to hold so much; what was said last may be on its way yet."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.held(house) != num_bytes:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def settle(self) -> None:
        """Waits until all requests so far have been sent."""
        for borrower in self.borrowers.values():
            # A block that is forgotten on its way is asked to be freed when it has arrived.
            for thread in (borrower.back, borrower.there, borrower.back):
                thread.submit(lambda: None).result(LIMIT_SECONDS)

    def leave(self) -> None:
        """Says goodbye."""
        for house, borrower in self.borrowers.items():
            borrower.close()
            self.channels.send_object("goodbye", house)
        self.channels.settle()
        assert not self.errors
        num_direct = sum(borrower.num_direct for borrower in self.borrowers.values())
        assert bool(num_direct) == (own_address() is not None)


def fetched(parcel: OffloadedBlock, like: Tensor) -> Tensor:
    """A block that has come back."""
    memory = torch.empty_like(like)
    parcel.fetch(memory).wait()
    parcel.forget()
    return memory


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()


def kinds() -> dict[str, Tensor]:
    """Vectors, as blocks are."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(1000, generator=generator)
    return {
        "float": numbers,
        "relu": numbers.relu(),
        "zeros": torch.zeros(500),
        "mask": numbers > 0,
        "double": numbers.double() / 3,
        "bfloat16": numbers.bfloat16(),
        "int64": torch.arange(777),
        "uint8": torch.arange(256).to(torch.uint8)[:251].clone(),
        "complex": torch.complex(numbers, -numbers),
        "nan": torch.full((33,), float("nan")),
        "one": torch.ones(1),
        "a byte": torch.ones(1, dtype=torch.bool),
        "large": torch.randn(300_000, generator=generator),
    }


# --- there and back ---


def there_and_back(shares: tuple[float, ...], codec: str | None) -> Any:
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()
    guest = Guest(channels, (1, 2), shares, codec)
    blocks = kinds()
    parcels = {name: guest.put(block.clone()) for name, block in blocks.items()}
    order = list(blocks)
    random.Random(5).shuffle(order)
    found = {}
    # Some one by one, some all at once.
    for name in order[:4]:
        found[name] = fetched(parcels[name], blocks[name])
    coming = {name: torch.empty_like(blocks[name]) for name in order[4:]}
    tickets = {name: parcels[name].fetch(memory) for name, memory in coming.items()}
    for name, ticket in tickets.items():
        ticket.wait()
        assert ticket.is_done()
        parcels[name].forget()
    found |= coming
    assert all(parcel.leaving.is_done() for parcel in parcels.values())
    guest.leave()
    return {name: bits(found[name]) for name in blocks}


@pytest.mark.parametrize("codec", [None, "lossless"])
@pytest.mark.parametrize("shares", [(), (1.0, 3.0)])
def test_blocks_come_back_as_the_same_bits_in_any_order(
    shares: tuple[float, ...], codec: str | None
) -> None:
    found, *counts = run_ranks(there_and_back, 3, shares, codec)
    for name, block in kinds().items():
        assert found[name] == bits(block), name
    sent = [sum(max(0, b - a) for a, b in itertools.pairwise(c)) for c in counts]
    total = sum(block.nbytes for block in kinds().values())
    if codec is None:
        assert sum(sent) == total
    else:
        assert sum(sent) < total
    first = shares[0] / sum(shares) if shares else 0.5
    assert sent[0] == pytest.approx(first * sum(sent), rel=1e-3)
    for count in counts:
        assert count[-1] == 0
        assert min(count) == 0
        assert max(count) > 0


def lossy() -> Any:
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()
    guest = Guest(channels, (1, 2), (2.0, 1.0), "8bit")
    block = kinds()["float"]
    parcel = guest.put(block.clone())
    parcel.leaving.wait()
    found = fetched(parcel, block)
    guest.leave()
    return found


def test_what_loses_bits_travels_smaller_and_is_as_near_as_it_says() -> None:
    found, *counts = run_ranks(lossy, 3)
    block = kinds()["float"]
    codec = codec_named("8bit")
    assert codec is not None
    assert 0 < float((found - block).abs().max()) <= largest_error(block)
    size = codec.encode(block).num_bytes
    assert size < 0.3 * block.nbytes
    used = [max(count) for count in counts]
    assert sum(used) == size
    assert used[0] == pytest.approx(2 * used[1], abs=2)


def told(num: int) -> Any:
    """Who wants to know when a block has left, or is back, is told: once, and after all parts."""
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()
    guest = Guest(channels, (1, 2))
    found: list[str] = []
    lock = threading.Lock()

    def note(what: str) -> None:
        with lock:
            found.append(what)

    results = []
    for number in range(num):
        block = torch.full((1000,), float(number))
        parcel = guest.place.put(block, lambda n=number: note(f"left {n}"))  # type: ignore[misc]
        parcel.leaving.wait()
        memory = torch.zeros(1000)

        parcel.fetch(memory).wait()
        results.append(bool((memory == number).all()))
        note(f"back {number}")
        parcel.forget()
    guest.leave()
    return found, results


def test_who_wants_to_know_is_told_once_and_when_all_parts_are_there() -> None:
    (found, results), *_ = run_ranks(told, 3, 10)
    assert found == [f"{what} {number}" for number in range(10) for what in ("left", "back")]
    assert results == [True] * 10


def freed(num: int) -> Any:
    """Whether a block's memory is free when who wants to know is told that it has left."""
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()
    guest = Guest(channels, (1, 2))
    found: list[bool] = []
    for _ in range(num):
        block = torch.ones(1000)
        storage, go = StorageWeakRef(block.untyped_storage()), threading.Event()

        def note(storage: StorageWeakRef = storage) -> None:
            found.append(storage.expired())

        for borrower in guest.borrowers.values():
            borrower.there.submit(partial(go.wait, LIMIT_SECONDS))
        parcel = guest.place.put(block, note)
        del block
        go.set()
        parcel.leaving.wait()
        parcel.forget()
    guest.leave()
    return found


def test_the_memory_of_a_block_that_has_left_is_free() -> None:
    here, *_ = run_ranks(freed, 3, 20)
    assert here == [True] * 20


def each_others(num: int) -> Any:
    """Every rank lends to the others, and borrows from them, at the same time."""
    channels, _ = connect()
    me, others = channels.stage, [s for s in range(channels.num_stages) if s != channels.stage]
    house = House(channels, others)
    guest = Guest(channels, others)
    dice = random.Random(me)
    waiting: list[tuple[int, OffloadedBlock, Tensor]] = []
    num_wrong = 0
    for number in range(num):
        block = torch.full((dice.randint(1, 5000),), 1000 * me + number, dtype=torch.int16)
        waiting.append((1000 * me + number, guest.put(block), torch.empty_like(block)))
        while len(waiting) > dice.randint(0, 8):
            value, parcel, memory = waiting.pop(dice.randrange(len(waiting)))
            # As the store does: not before it has left.
            parcel.leaving.wait()
            if dice.random() < 0.3:
                parcel.forget()
                continue
            parcel.fetch(memory).wait()
            parcel.forget()
            num_wrong += not bool((memory == value).all())
    for _, parcel, _ in waiting:
        parcel.forget()
    guest.settle()
    for borrower in guest.borrowers.values():
        borrower.close()
    counts = house.end()
    assert not guest.errors
    return num_wrong, counts[-1], max(counts) > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_lend_to_each_other(world_size: int) -> None:
    expected = (0, 0, True)
    assert run_ranks(each_others, world_size, 60) == [expected] * world_size


# --- what is held ---


def counted() -> Any:
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()
    guest = Guest(channels, (1,))
    blocks = [torch.full((100 * n,), n, dtype=torch.uint8) for n in (1, 2, 3, 4)]
    parcels = [guest.put(block) for block in blocks]
    for parcel in parcels:
        parcel.leaving.wait()
    assert guest.held_in_time(1, 1000)
    assert fetched(parcels[1], blocks[1]).tolist() == [2] * 200
    assert guest.held_in_time(1, 800)
    # Never fetched.
    parcels[3].forget()
    assert guest.held_in_time(1, 400)
    # Forgotten while it comes, or after it came: once.
    memory = torch.empty_like(blocks[2])
    ticket = parcels[2].fetch(memory)
    parcels[2].forget()
    ticket.wait()
    parcels[2].forget()
    assert memory.tolist() == [3] * 300
    assert guest.held_in_time(1, 100)
    parcels[0].forget()
    assert guest.held_in_time(1, 0)
    guest.leave()
    return None


def test_what_a_lender_holds_is_counted_up_and_down() -> None:
    _, counts = run_ranks(counted, 2)
    assert counts[-1] == 0
    assert max(counts) == 1000
    # What comes, comes in order; what goes, when it goes.
    assert counts[:5] == [0, 100, 300, 600, 1000]
    assert counts[5:] == [800, 400, 100, 0]


def forgotten(num: int) -> Any:
    """Forgotten at once, maybe before it has left."""
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()
    guest = Guest(channels, (1, 2), (1.0, 2.0))
    for number in range(num):
        guest.put(torch.full((10_000,), float(number))).forget()
    guest.settle()
    # What comes behind is as good as ever.
    found = fetched(guest.put(torch.arange(9.0)), torch.arange(9.0)).tolist()
    assert all(guest.held_in_time(house, 0) for house in (1, 2))
    guest.leave()
    return found


def test_what_is_forgotten_without_being_fetched_frees_the_lender() -> None:
    found, *counts = run_ranks(forgotten, 3, 20)
    assert found == list(range(9))
    for count in counts:
        # What nobody wants any more before it is sent need not come.
        assert 1 + 2 <= len(count) <= 1 + 2 * 21
        assert count[-1] == 0


# --- with stores at both ends ---


def with_stores() -> Any:
    """Stage 0 saves more than it has room for; stage 1 has room, and counts it."""
    channels, _ = connect()
    if channels.stage:
        store = ActivationStore(StagePolicy(10_000))
        threads = Waited()
        Lender(channels.swaps, CPU, threads, store.lend, own_address()).serve(0)
        for future in threads.futures:
            future.result(timeout=LIMIT_SECONDS)
        return store.traffic.peak_bytes, store.held_bytes
    guest = Guest(channels, (1,))
    place = guest.place
    places = {(layer, 0): (place,) for layer in range(5)}
    store = ActivationStore(StagePolicy(2000, places, None, dict.fromkeys(range(5), 800)))
    row = parse_row("F0 B0")
    found = []
    store.begin_step(row)
    store.begin_action(0, row[0])
    table = SavedTable(0, store)
    saved = []
    for layer in range(5):
        store.before_layer(layer)
        saved.append(table.save(torch.full((200,), float(layer)), layer, 0, frozenset()))
        store.after_layer(layer)
    store.end_action(row[0])
    store.begin_action(1, row[1])
    while saved:
        found.append(saved.pop().get().unique().tolist())
        store.advance()
    store.end_action(row[1])
    assert store.held_bytes == 0
    for borrower in guest.borrowers.values():
        borrower.close()
    return found, store.traffic.peak_bytes, store.traffic.moved_bytes


def test_a_store_that_lends_and_a_store_that_borrows() -> None:
    (found, peak, moved), (lent_peak, lent) = run_ranks(with_stores, 2)
    assert found == [[4.0], [3.0], [2.0], [1.0], [0.0]]
    assert peak <= 2000
    assert moved >= 3 * 800
    # What stays with stage 0 until the end need not have come.
    assert 2 * 800 <= lent_peak <= 5 * 800
    assert lent == 0


def lends_what_it_has_not() -> Any:
    store_module._PATIENCE_SECONDS = 0.1  # type: ignore[misc]
    channels, _ = connect()
    if channels.stage:
        store, threads = ActivationStore(StagePolicy(1000)), Waited()
        Lender(channels.swaps, CPU, threads, store.lend, own_address()).serve(0)
        with pytest.raises(BudgetError, match="another stage would exceed it"):
            threads.futures[0].result(timeout=LIMIT_SECONDS)
        channels.send_object("refused", 0)
        channels.settle()
        return [type(error).__name__ for error in threads.errors]
    guest = Guest(channels, (1,))
    # What nobody refers to need not arrive.
    parcel = guest.put(torch.zeros(2000, dtype=torch.uint8))
    assert channels.receive_object(1) == "refused"
    del parcel, guest
    return None


def test_a_lender_without_room_says_so() -> None:
    assert run_ranks(lends_what_it_has_not, 2)[1] == ["BudgetError"]


# --- memory of another process ---


def of_many_sizes(num: int) -> Any:
    channels, _ = connect()
    if channels.stage:
        house = House(channels)
        pool = house.lender.pools[0]
        most = 0
        while channels.receive_object(0) == "how much?":
            free = sum(size * len(unused) for size, unused in pool._free.items())
            most = max(most, pool.used_bytes + free)
            channels.send_object(house.counts[-1], 0)
            channels.settle()
        return house.end(), pool.peak_bytes, most
    guest = Guest(channels, (1,))
    (borrower,) = guest.borrowers.values()
    most = 0
    for number in range(num):
        blocks = [torch.full((size,), float(number)) for size in (1000 + 8 * number, 500)]
        parcels = [guest.put(block) for block in blocks]
        for block, parcel in zip(blocks, parcels, strict=True):
            assert torch.equal(fetched(parcel, block), block)
        assert guest.held_in_time(1, 0)
        most = max(most, len(borrower._opened))
    guest.leave()
    return most


def test_rooms_that_are_not_used_again_are_given_back(way: str) -> None:
    """Of which each is of another size: no more is kept than was in use at one time."""
    opened, (_, peak, most) = run_ranks(of_many_sizes, 2, 30)
    assert 0 < most <= peak
    assert opened <= (4 if way == "directly" else 0)


def many_at_once(num: int) -> Any:
    channels, _ = connect()
    if channels.stage:
        house = House(channels)
        most = 0
        while not channels.receive_object(0):
            most = max(most, len(house.lender.pools[0]._files))
        house.end()
        return most
    guest = Guest(channels, (1,))
    parcels = []
    for number in range(num):
        parcels.append(guest.put(torch.full((100,), float(number))))
        parcels[-1].leaving.wait()
        channels.send_object(False, 1)
    for parcel in parcels:
        parcel.forget()
    channels.send_object(True, 1)
    guest.borrowers[1].close()
    channels.settle()
    return None


def test_no_more_than_a_file_or_two_is_open_at_a_time() -> None:
    assert run_ranks(many_at_once, 2, 100)[1] <= 2


def cannot_open() -> Any:
    channels, _ = connect()
    if channels.stage:
        return House(channels).answer()

    def fails(*_: Any) -> None:
        raise OSError("the door is locked")

    lending_module.opened = fails  # type: ignore[assignment,attr-defined]
    said: list[str] = []
    errors: list[BaseException] = []
    borrower = Borrower(1, channels.swaps, errors.append, CPU, own_address(), said.append)
    place = RemoteTarget({1: borrower})
    blocks = [torch.full((1000,), float(number)) for number in range(5)]
    parcels = [place.put(block, nothing) for block in blocks]
    for block, parcel in zip(blocks, parcels, strict=True):
        assert torch.equal(fetched(parcel, block), block)
    borrower.close()
    channels.send_object("goodbye", 1)
    channels.settle()
    assert not errors
    return said, borrower.num_direct


def test_what_cannot_be_opened_is_sent_and_said_once(way: str) -> None:
    (said, num_direct), counts = run_ranks(cannot_open, 2)
    assert num_direct == 0
    assert counts[-1] == 0
    if way == "directly":
        (message,) = said
        assert "stage 1 cannot be written to directly (the door is locked)" in message
    else:
        assert not said


def cannot_share() -> Any:
    channels, _ = connect()
    if channels.stage:

        def fails(*_: Any) -> None:
            raise RuntimeError("the allocator does not share")

        beside_module.SharedBufferPool._handle = fails  # type: ignore[method-assign, assignment]
        return House(channels).answer()
    said: list[str] = []
    errors: list[BaseException] = []
    borrower = Borrower(1, channels.swaps, errors.append, CPU, own_address(), said.append)
    place = RemoteTarget({1: borrower})
    blocks = [torch.full((1000,), float(number)) for number in range(3)]
    parcels = [place.put(block, nothing) for block in blocks]
    for block, parcel in zip(blocks, parcels, strict=True):
        assert torch.equal(fetched(parcel, block), block)
    borrower.close()
    channels.send_object("goodbye", 1)
    channels.settle()
    assert not errors
    return said


def test_memory_that_cannot_be_shared_is_sent_and_said_once(way: str) -> None:
    said, counts = run_ranks(cannot_share, 2)
    assert counts[-1] == 0
    assert len(said) == (way == "directly")
    assert all("directly (the allocator does not share)" in message for message in said)


# --- the compute of both ends ---


class Streams:
    """Stands in for a GPU's streams: knows what is done on which of them."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.found: list[tuple[str, bool]] = []

    @contextmanager
    def aside(self, _: torch.device) -> Iterator[None]:
        before = getattr(self.current, "is_aside", False)
        self.current.is_aside = True
        yield
        self.current.is_aside = before

    def watch(self, owner: Any, name: str) -> None:
        """Notes where a function is called."""
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.found.append((name, getattr(self.current, "is_aside", False)))
            return function(*args, **kwargs)

        setattr(owner, name, call)


def beside_the_compute() -> list[tuple[str, bool]]:
    channels, _ = connect()
    streams = Streams()
    for module in (beside_module, lending_module):
        module.aside = streams.aside  # type: ignore[attr-defined]
    # What touches a GPU's memory: allocates, exports, opens, copies, decodes.
    streams.watch(beside_module.SharedBufferPool, "_made")
    streams.watch(beside_module.SharedBufferPool, "opening")
    streams.watch(lending_module, "opened")
    streams.watch(Lane, "send_tensor")
    streams.watch(lending_module._RemoteBlock, "_decode")
    streams.watch(Tensor, "copy_")
    if channels.stage:
        House(channels).answer()
        return streams.found
    guest = Guest(channels, (1,), codec="lossless")
    begun = len(streams.found)
    blocks = [torch.full((1000,), float(number)) for number in range(3)]
    parcels = [guest.put(block) for block in blocks]
    targets = [torch.empty_like(block) for block in blocks]
    for parcel, target in zip(parcels, targets, strict=True):
        parcel.fetch(target).wait()
    found = streams.found[begun:]
    assert all(torch.equal(*pair) for pair in zip(blocks, targets, strict=True))
    guest.leave()
    return found


def test_nothing_is_done_on_the_stream_of_the_compute(way: str) -> None:
    """It may wait for a payload of a rank which waits for this one's block."""
    for found, wanted in zip(
        run_ranks(beside_the_compute, 2),
        [{"_decode", "copy_"}, {"_made"}],
        strict=True,
    ):
        names = {name for name, _ in found}
        assert wanted <= names
        assert names & {"opening", "opened", "send_tensor"}
        assert [name for name, is_aside in found if not is_aside] == []


# --- who can share memory ---


@pytest.mark.parametrize(("there", "is_peer"), [(1, False), (0, True), (0, False)])
def test_a_gpu_reaches_itself_and_its_peers(
    there: int, is_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA says that a GPU is no peer of its own."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a != b and is_peer)
    room = SimpleNamespace(device=torch.device("cuda", there))
    handle = (lambda: room, ())
    here = torch.device("cuda", 1)
    if there == 1 or is_peer:
        found: Any = beside_module.opened(handle, here)
        assert found is room
    else:
        with pytest.raises(RuntimeError, match="cuda:1 cannot reach cuda:0"):
            beside_module.opened(handle, here)


def visible(monkeypatch: pytest.MonkeyPatch, *uuids: str, **environment: str) -> Address | None:
    """The address of a process that sees these GPUs."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda place: SimpleNamespace(uuid=uuids[place]) if uuids[place] else SimpleNamespace(),
    )
    return address_here(torch.device("cuda", 0))


def test_processes_share_memory_if_they_see_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = visible(monkeypatch, "a", "b")
    assert found is not None
    # However that is written.
    assert found == visible(monkeypatch, "a", "b", CUDA_VISIBLE_DEVICES="0,1")
    # A GPU's place among those that a process sees is its name in a handle.
    assert found != visible(monkeypatch, "b", "a")
    assert found != visible(monkeypatch, "a")
    # Without UUIDs there are variables to go by.
    unnamed = visible(monkeypatch, "", "")
    assert unnamed == visible(monkeypatch, "", "")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        assert unnamed != visible(monkeypatch, "", "", **{name: "1,0"})


# --- failures ---


def lender_dies(when: str) -> None:
    channels, _ = connect()
    # Who is connected here may be connecting elsewhere yet.
    channels.gather(None)
    if channels.stage == 1:
        house = House(channels)
        if when == "before it comes":
            os.kill(os.getpid(), signal.SIGKILL)
        while house.counts[-1] < 4000:
            time.sleep(0.001)
        # Until it is here, not only announced.
        assert channels.receive_object(0) == "it has left"
        os.kill(os.getpid(), signal.SIGKILL)
    if channels.stage == 2:
        House(channels)
        channels.receive_object(1)
    guest = Guest(channels, (1, 2))
    try:
        block = torch.ones(2000)
        if when == "before it comes":
            # Large: it cannot all be under way already.
            block = torch.ones(20_000_000)
        parcel = guest.put(block)
        parcel.leaving.wait()
        # Nobody waits for this to arrive: who gets it dies, and what was there may be back by then.
        channels.send_object("it has left", 1)
        while True:
            parcel.fetch(torch.empty_like(block)).wait()
            parcel = guest.put(block)
            parcel.leaving.wait()
    finally:
        # Those who do not wait for it hear of it too, once for each way.
        assert 1 <= len(guest.errors) <= 2
        assert all(isinstance(error, StageFailedError) for error in guest.errors)


@pytest.mark.parametrize("when", ["before it comes", "while it is there"])
def test_a_lender_that_dies_is_an_error_of_the_borrower(when: str) -> None:
    borrower, lender, other = run_ranks(lender_dies, 3, when, expect_failure=True)
    assert lender.error_type == "Died", lender
    assert borrower.error_type == StageFailedError.__name__, borrower
    assert "Rank 1" in borrower.message
    assert other.error_type == StageFailedError.__name__, other


def borrower_dies() -> Any:
    channels, _ = connect()
    if channels.stage == 0:
        house = House(channels, guests=(1,))
        for future in house.threads.futures:
            with pytest.raises(StageFailedError, match="Rank 1"):
                future.result(timeout=LIMIT_SECONDS)
        return len(house.threads.errors)
    guest = Guest(channels, (0,))
    guest.put(torch.ones(1000)).leaving.wait()
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_borrower_that_dies_ends_the_lenders_threads() -> None:
    lender, borrower = run_ranks(borrower_dies, 2, expect_failure=True)
    assert borrower.error_type == "Died", borrower
    assert lender.value == 2, lender
