"""What runs beside the compute, on a simulated device: the bits of a CPU, and no data race.

For each wait there is a test that misses it: without that wait, the simulated device reports a
race.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.devices import cuda
from lightning_pipeshift.devices.simulated import DataRaceError, SimulatedDevice
from lightning_pipeshift.devices.streams import on_this_device
from lightning_pipeshift.model.execution import transfer
from lightning_pipeshift.model.execution.timing import Timer
from lightning_pipeshift.model.execution.transfer import Fetch, to_device, to_host
from lightning_pipeshift.model.saved.codec import codec_named
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.plan.schedule.actions import Row
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.gradients import aggregation
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation, GradientGroup
from lightning_pipeshift.runtime.offload import copying, lending, shared_memory
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore, StagePolicy
from lightning_pipeshift.runtime.offload.copying import BufferPool, StreamCopier
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.offload.shared_memory import Address
from lightning_pipeshift.runtime.offload.targets import LocalTarget, OffloadTarget
from tests.harness import LIMIT_SECONDS
from tests.unit.runtime.forgotten_waits import forget
from tests.unit.runtime.test_activation_store import ROWS, Stage, layers_of, same, saved_by

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


# --- a structure's tensors, to the host and back ---


def there_and_back() -> list[Tensor]:
    value = torch.arange(6.0, device=GPU) * 3
    fetch = Fetch([value, value.sum(), value.int()])
    value.zero_()
    found = fetch.wait()
    again = to_host(to_device(found, GPU))
    assert all(map(torch.equal, found, again))
    return [tensor.clone() for tensor in found]


def test_a_structure_is_fetched_as_it_was() -> None:
    with SimulatedDevice():
        found = there_and_back()
    value = torch.arange(6.0) * 3
    assert same(found, [value, value.sum(), value.int()])


def test_a_fetch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, transfer, "__init__", "synchronize")
    with pytest.raises(DataRaceError, match="clone"), SimulatedDevice():
        there_and_back()


def test_times_are_read_when_the_device_has_reached_them() -> None:
    with SimulatedDevice():
        timer = Timer(GPU)
        weight = torch.ones(3, device=GPU, requires_grad=True)
        begin = timer.now()
        output = weight * 2
        timer.add("forward", 0, begin, timer.now())
        timer.watch_backward(0, [output])
        begin = timer.now()
        output.sum().backward()
        timer.end_backward(begin)
        while timer.quantile("backward", 0) is None:
            timer.read()
        forward = timer.quantile("forward", 0)
    assert forward is not None
    assert forward > 0


# --- saved tensors that move to the host ---


def swap_everything(
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    row: Row,
    budget: float = 1.3,
    codec: str | None = None,
) -> list[Tensor]:
    """The gradients of a stage whose saved tensors all move to pinned memory.

    Args:
        device: where it computes.
        monkeypatch: undoes what this changes.
        row: the stage's actions.
        budget: for saved tensors, in multiples of those of one microbatch.
        codec: makes them smaller.
    """
    # A backward calls these two, and autograd the first from inside of an operation.
    monkeypatch.setattr(SavedTable, "save", device.inside(SavedTable.save))
    monkeypatch.setattr(ActivationStore, "fetch", device.inside(ActivationStore.fetch))
    layers = [layer.to(GPU) for layer in layers_of()]
    copier = StreamCopier(GPU)
    rooms = BufferPool(CPU, float("inf"), GPU, copier.finish)
    host = LocalTarget([rooms], copier, codec=codec_named(codec))
    batch = batches(row)
    blocks = saved_by(layers_of(), batch[0])
    places: dict[tuple[int, int], Sequence[OffloadTarget]] = {
        (layer, number): [host] for _, layer, number in blocks
    }
    policy = StagePolicy(budget * sum(blocks.values()), places, host)
    stage = Stage(layers, ActivationStore(policy))
    for _ in range(2):
        gradients = stage.step(row, [one.to(GPU) for one in batch])
    copier.close()
    rooms.clear()
    return [gradient.cpu() for gradient in gradients]


def batches(row: Row) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator) for _ in {one.microbatch for one in row}]


@pytest.mark.parametrize("codec", [None, "lossless"])
@pytest.mark.parametrize("row", ROWS)
def test_swapped_tensors_come_back_as_they_were(
    row: str, codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Stage(layers_of()).step(ROWS[row], batches(ROWS[row]))
    for seed in range(3):
        with SimulatedDevice(seed) as device, monkeypatch.context() as patch:
            found = swap_everything(device, patch, ROWS[row], codec=codec)
        assert same(found, expected)


@pytest.mark.parametrize(
    ("number", "method"),
    [
        pytest.param(0, "wait", id="copies wait for the compute"),
        pytest.param(1, "wait", id="the compute waits for copies"),
        pytest.param(1, "query", id="memory is free when it has been copied"),
    ],
)
def test_swaps_wait(number: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, copying, "_submit", method, number)
    with pytest.raises(DataRaceError), SimulatedDevice() as device:
        swap_everything(device, monkeypatch, ROWS["middle of 1f1b"])


def test_pinned_memory_is_freed_when_nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, copying, "finish", "synchronize")
    with pytest.raises(DataRaceError, match="unpin"), SimulatedDevice():
        copier = StreamCopier(GPU)
        rooms = BufferPool(CPU, 100, GPU, copier.finish)
        assert rooms.claim(100)
        room = rooms.take(100)
        source = torch.ones(100, dtype=torch.uint8, device=GPU)
        copier.out(partial(room.copy_, source, non_blocking=True), lambda: None)
        rooms.give(room)
        del room
        copier.close()
        rooms.clear()


# --- saved tensors that move to another stage ---


class Net:
    """Lanes between the stages of one process."""

    def __init__(self) -> None:
        self.messages: defaultdict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def of(self, stage: int) -> Callable[[int], Any]:
        """The lanes of a stage, by number."""
        return partial(NetLane, self, stage)


class NetLane(NamedTuple):
    """Stands in for a :class:`Lane`: sends a tensor through host memory, as that does."""

    net: Net
    stage: int
    number: int

    def send_object(self, obj: Any, to: int) -> None:
        self.net.messages[self.number, self.stage, to].put(obj)

    def receive_object(self, source: int) -> Any:
        return self.net.messages[self.number, source, self.stage].get(timeout=LIMIT_SECONDS)

    def settle(self) -> None: ...

    def send_tensor(self, tensor: Tensor, to: int) -> None:
        self.send_object(tensor.detach().to("cpu").clone(), to)

    def receive_into(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self.receive_object(source))

    def receive_tensor(self, like: Tensor, source: int) -> Tensor:
        found: Tensor = self.receive_object(source)
        assert found.shape == like.shape
        return found


class Lending:
    """A stage that borrows memory from another one on the same device.

    Args:
        monkeypatch: undoes what this changes.
        is_direct: whether blocks are copied to the other stage's memory, or sent.
        take_room: called with the bytes that the lender takes.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        is_direct: bool,
        take_room: Callable[[int], None] = lambda _: None,
    ) -> None:
        # In one process, a handle is the memory itself.
        monkeypatch.setattr(cuda, "exported", lambda memory: memory)
        monkeypatch.setattr(cuda, "imported", lambda handle, _: handle)
        address = Address("this process", (), "cuda") if is_direct else None
        self.errors: list[BaseException] = []
        net = Net()
        self.threads = Threads("lending", self.errors.append)
        self.lender = Lender(net.of(1), GPU, self.threads, take_room, address)
        self.lender.serve(0)
        self.borrower = Borrower(1, net.of(0), 1e12, self.errors.append, GPU, address)

    def close(self) -> None:
        self.borrower.close()
        self.threads.close()
        assert not self.errors


def lend(
    monkeypatch: pytest.MonkeyPatch, is_direct: bool, codec: str | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Blocks before they were lent, and after they have come back."""
    lending = Lending(monkeypatch, is_direct)
    place = RemoteTarget({1: lending.borrower}, codec=codec_named(codec))
    found = []
    for number in range(4):
        block = torch.arange(100.0, device=GPU) * number
        parcel = place.put(block, lambda: None)
        assert parcel is not None
        parcel.leaving.wait()
        memory = torch.empty_like(block)
        parcel.fetch(memory, lambda: None).wait()
        found.append((block.cpu(), memory.mul(1).cpu()))
    lending.close()
    return found


WAYS = pytest.mark.parametrize("is_direct", [True, False], ids=["directly", "sent"])


@WAYS
@pytest.mark.parametrize("codec", [None, "lossless"])
def test_what_is_lent_comes_back(
    is_direct: bool, codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatedDevice():
        found = lend(monkeypatch, is_direct, codec)
    for number, (before, after) in enumerate(found):
        assert torch.equal(before, torch.arange(100.0) * number)
        assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("module", "function", "is_direct", "codec"),
    [
        pytest.param(lending, "_each", True, None, id="threads wait for the compute"),
        pytest.param(shared_memory, "copy", True, None, id="a copy is complete"),
        pytest.param(lending, "_unpack", True, "lossless", id="what is decoded is complete"),
    ],
)
def test_lending_waits(
    module: ModuleType,
    function: str,
    is_direct: bool,
    codec: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch, module, function, "synchronize")
    with pytest.raises(DataRaceError), SimulatedDevice():
        lend(monkeypatch, is_direct, codec)
