"""Two processes that share a GPU's memory: every order of what is done with each buffer.

On the simulated device each stage is a process with streams of its own, which nothing orders with
those of the other but what their hosts wait for and tell each other, or events that both have. The
threads of both run in every order that makes a difference; in each of them the simulated device
proves that the bits are the same in every order in which the streams may carry out what is queued.
"""

from __future__ import annotations

import queue
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.devices import shared_memory
from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.devices.shared_memory import Address
from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.model.saved.codec import codec_named
from lightning_pipeshift.runtime.comm import memory_link
from lightning_pipeshift.runtime.comm import threads as threads_module
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd
from lightning_pipeshift.runtime.comm.threads import InOrder
from lightning_pipeshift.runtime.offload import copying, lending, saved_blocks
from lightning_pipeshift.runtime.offload.copying import ThreadTicket
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.offload.targets import OffloadedBlock
from tests.cases import some
from tests.simulated.device import DataRaceError, SimulatedDevice
from tests.unit.runtime.every_order import Run, every_order, some_orders
from tests.unit.runtime.forgotten_waits import forget
from tests.unit.runtime.ordered_threads import OrderedThreads
from tests.unit.runtime.test_activation_store import ROWS, Stage, layers_of, same
from tests.unit.runtime.test_simulated_streams import CPU, GPU, Net, batches, step_that_offloads

FOLLOWED = (BufferPool, Lender, Borrower, InOrder, ThreadTicket, lending._RemoteBlock)


class World(NamedTuple):
    """What the two processes of a run have in common.

    Args:
        order: of their threads.
        device: the GPU.
        patch: undoes changes when the run is over.
        threads: those of both.
        net: between the two.
    """

    order: Run
    device: SimulatedDevice
    patch: pytest.MonkeyPatch
    threads: OrderedThreads
    net: Net

    def run(self, *processes: Callable[[], None]) -> None:
        """Runs processes to their end."""
        for number, process in enumerate(processes):
            with self.device.process(f"stage {number}"):
                self.order.start(f"stage {number}", self.device.on_this_device(process))
        self.order.run()


@contextmanager
def world(order: Run, is_tied: bool = False) -> Iterator[World]:
    """Two processes and a GPU.

    Args:
        order: of their threads.
        is_tied: whether opening memory makes the current stream wait, as CUDA does, for the work on
            the stream on which the other process has exported it.
    """

    def imported(handle: Any, _: torch.device) -> Tensor:
        memory, event = handle
        if is_tied:
            event.wait()
        opened: Tensor = memory.detach()
        weakref.finalize(opened, close, memory)
        return opened

    def close(memory: Tensor) -> None:
        # Torch waits for the current stream, then it closes the memory.
        device.access("closing", [], [memory], True)
        device.wait_for_streams([device.stream])

    with pytest.MonkeyPatch.context() as patch, SimulatedDevice() as device:
        threads = OrderedThreads(order, device)
        threads.replace_in(patch, lending, copying, saved_blocks, threads_module)
        threads.follow(patch, *FOLLOWED)
        patch.setattr(queue, "SimpleQueue", threads.queue)
        patch.setattr(shared_memory, "exported", lambda memory: (memory, record_event(GPU)))
        patch.setattr(shared_memory, "imported", imported)
        yield World(order, device, patch, threads, Net())


# --- blocks that a stage lends to another one ---

BYTES = 40
"""Of most blocks."""

Borrow = Callable[[RemoteTarget, torch.device], None]


def there_and_back(
    place: RemoteTarget, where: torch.device, lengths: tuple[int, ...] = (10,)
) -> None:
    """Blocks leave and come back one after the other."""
    for value, length in enumerate(lengths):
        block = torch.arange(float(length), device=where) + value
        parcel = place.put(block, lambda: None)
        # As the store does: the memory is used for something else when the block has left.
        parcel.leaving.wait()
        del block
        fetch(parcel, where, length, value)


def fetch(parcel: OffloadedBlock, where: torch.device, length: int, value: int) -> None:
    memory = torch.empty(length, device=where)
    parcel.fetch(memory).wait()
    assert torch.equal(memory.mul(1).cpu(), torch.arange(float(length)) + value)
    parcel.forget()


def two_at_once(place: RemoteTarget, where: torch.device) -> None:
    """Those of two microbatches leave, and come back."""
    blocks = [torch.arange(10.0, device=where) + value for value in range(2)]
    parcels = [place.put(block, lambda: None) for block in blocks]
    for value, parcel in enumerate(parcels):
        parcel.leaving.wait()
        blocks[value] = torch.ones(10, device=where)
        fetch(parcel, where, 10, value)


def one_is_forgotten(place: RemoteTarget, where: torch.device) -> None:
    """A block is no longer needed while it leaves; then another one leaves."""
    parcel = place.put(torch.arange(10.0, device=where), lambda: None)
    parcel.forget()
    del parcel
    later = place.put(torch.arange(10.0, device=where) + 1, lambda: None)
    later.leaving.wait()
    fetch(later, where, 10, 1)


class Case(NamedTuple):
    """What a stage does with another one's memory.

    Args:
        borrow: given the place and where the blocks come from.
        limit_bytes: how much of the other stage's memory that takes at most.
    """

    borrow: Borrow
    limit_bytes: int


CASES = {
    "a buffer is used again": Case(partial(there_and_back, lengths=(10, 10)), BYTES),
    "a larger one takes its place": Case(partial(there_and_back, lengths=(10, 20)), 2 * BYTES),
    "two at once": Case(two_at_once, 2 * BYTES),
    "one is forgotten": Case(one_is_forgotten, 2 * BYTES),
}


def lend(
    order: Run,
    case: Case,
    is_direct: bool = True,
    where: torch.device = GPU,
    codec: str | None = None,
    is_tied: bool = False,
) -> None:
    """Runs a borrower and its lender in one order; for the rest see :func:`world`."""
    held = 0

    def take_room(num_bytes: int) -> None:
        nonlocal held
        held += num_bytes
        assert codec or held <= case.limit_bytes

    with world(order, is_tied) as both:
        address = Address("this host", (), "cuda") if is_direct else None

        def borrow() -> None:
            lanes = both.net.of(0)
            borrower = Borrower(1, lanes, order.fail, GPU, address)
            case.borrow(RemoteTarget({1: borrower}, codec=codec_named(codec)), where)
            borrower.close()

        def keep() -> None:
            pool: Any = both.threads.pool("lending")
            Lender(both.net.of(1), GPU, pool, take_room, address).serve(0)

        both.run(borrow, keep)
    assert order.is_known or not held


WAYS = pytest.mark.parametrize("is_direct", [True, False], ids=["directly", "sent"])
PLACES = pytest.mark.parametrize("where", [GPU, CPU], ids=["of the GPU", "of its host"])
REUSE = CASES["a buffer is used again"]


@WAYS
@pytest.mark.parametrize("case", CASES)
def test_blocks_come_back_in_every_order(case: str, is_direct: bool) -> None:
    every_order(partial(lend, case=CASES[case], is_direct=is_direct))


@WAYS
@pytest.mark.parametrize(
    ("where", "codec"), [(CPU, None), (CPU, "lossless"), (GPU, "lossless")], ids=str
)
def test_other_blocks_come_back_in_every_order(
    where: torch.device, codec: str | None, is_direct: bool
) -> None:
    every_order(partial(lend, case=REUSE, is_direct=is_direct, where=where, codec=codec))


def race_without(
    module: ModuleType,
    function: str,
    method: str,
    run: Callable[[Run], None],
    number: int = 0,
    maker: str = "record_event",
) -> str:
    """The first races without a wait, less the lines that asked for the operations; for the
    arguments see :func:`forget`.
    """
    with pytest.MonkeyPatch.context() as patch:
        forget(patch, module, function, method, number, maker)
        with pytest.raises(DataRaceError) as error:
            every_order(run)
    return re.sub(r" \(\w+/\w+\.py:\d+\)", "", str(error.value))


OTHERS = "the stream 'other ranks' of stage"


@PLACES
def test_a_buffer_is_lent_when_the_lenders_own_work_on_it_is_complete(where: torch.device) -> None:
    """Allocating it writes to it in torch's deterministic mode. A block that was copied there
    before would be lost.
    """
    run = partial(lend, case=REUSE, where=where)
    assert (
        f"copy_ on {OTHERS} 0, which writes: nothing orders it and empty on {OTHERS} 1, which "
        "writes"
    ) in race_without(shared_memory, "opening", "synchronize", run)


@PLACES
def test_a_buffer_is_opened_on_the_stream_of_the_copies(
    where: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own wait for the lender's work is one of the stream on which a buffer is opened."""
    forget(monkeypatch, shared_memory, "opening", "synchronize")
    every_order(partial(lend, case=REUSE, where=where, is_tied=True))


@pytest.mark.parametrize(
    ("module", "function", "codec", "race"),
    [
        pytest.param(
            lending,
            "_each",
            None,
            f"copy_ on {OTHERS} 0, which reads: nothing orders it and add on the compute stream",
            id="copies wait for the compute",
        ),
        pytest.param(
            shared_memory,
            "copy",
            None,
            f"nothing orders it and copy_ on {OTHERS} 0",
            id="copies are complete",
        ),
        pytest.param(
            lending,
            "_decode",
            "lossless",
            f"mul on the compute stream of stage 0, which reads: nothing orders it and copy_ on "
            f"{OTHERS} 0, which writes",
            id="what is decoded is complete",
        ),
    ],
)
def test_the_borrower_waits(
    module: ModuleType, function: str, codec: str | None, race: str
) -> None:
    run = partial(lend, case=REUSE, codec=codec)
    assert race in race_without(module, function, "synchronize", run)


def test_the_lender_waits_until_blocks_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would keep more than it has reserved, in some order."""
    real = lending._Put
    monkeypatch.setattr(lending, "_Put", lambda *args: real(*args)._replace(num_asked=0))
    with pytest.raises(AssertionError, match="80 <= 40"):
        every_order(partial(lend, case=REUSE))


# --- steps ---


@pytest.mark.parametrize(
    ("row", "budget", "is_direct"),
    some(product(["gpipe", "middle of 1f1b"], [1.3, 100.0], [True, False]), 4),
)
def test_steps_train_the_same_bits_in_some_orders(row: str, budget: float, is_direct: bool) -> None:
    """A stage's tensors leave and come back by its threads, as its store decides."""
    expected = Stage(layers_of()).step(ROWS[row], batches(ROWS[row]))

    def run(order: Run) -> None:
        with world(order) as both:
            address = Address("this host", (), "cuda") if is_direct else None

            def train() -> None:
                borrower = Borrower(1, both.net.of(0), order.fail, GPU, address)
                place = RemoteTarget({1: borrower})
                found = step_that_offloads(both.device, both.patch, ROWS[row], place, budget)
                borrower.close()
                assert same(found, expected)

            def keep() -> None:
                pool: Any = both.threads.pool("lending")
                Lender(both.net.of(1), GPU, pool, lambda _: None, address).serve(0)

            both.run(train, keep)

    some_orders(run, 2)


# --- tensors that go through shared memory ---


def exchange(order: Run, lengths: tuple[int, ...] = (10, 10, 100, 100, 100)) -> None:
    """A stage sends another one the payloads of microbatches. Both write to the memory again."""
    with world(order) as both:

        def send() -> None:
            end, sent = MemoryEnd(GPU), torch.zeros(max(lengths), device=GPU)
            messages, answers = (both.net.of(0)(lane, False) for lane in (0, 1))
            for number, length in enumerate(lengths):
                sent += 1
                messages.send_object(end.write([sent[:length]]), 1)
                # All but this one have been taken.
                if number:
                    end.give_back(answers.receive_object(1))
            end.give_back(answers.receive_object(1))
            end.close()

        def receive() -> None:
            end, found = MemoryEnd(GPU), []
            messages, answers = (both.net.of(1)(lane, False) for lane in (0, 1))
            for length in lengths:
                got = torch.empty(length, device=GPU)
                answers.send_object(end.take(messages.receive_object(0), [got]), 0)
                found.append(got * 1)
                got.zero_()
            # Not before: what its host has waited for would be told to the other one.
            for value, (length, got) in enumerate(zip(lengths, found, strict=True)):
                assert torch.equal(got.cpu(), torch.full((length,), value + 1.0))
            end.close()

        both.run(send, receive)


def test_payloads_arrive_in_every_order() -> None:
    every_order(exchange)


@pytest.mark.parametrize(
    ("function", "maker", "number"),
    [
        pytest.param("take", "shared_event", 1, id="the reader for the write"),
        pytest.param("give_back", "shared_event", 0, id="the buffer for the reader"),
        pytest.param("write", "record_event", 0, id="the write for the buffer"),
    ],
)
def test_payloads_wait(function: str, maker: str, number: int) -> None:
    assert race_without(memory_link, function, "wait", exchange, number, maker)
