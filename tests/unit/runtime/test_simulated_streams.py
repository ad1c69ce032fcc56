"""What runs beside the compute, on a simulated device: the bits of a CPU, and no data race.

For each wait there is a test that misses it: without that wait, the simulated device reports a
race.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.devices import shared_memory
from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.devices.shared_memory import Address
from lightning_pipeshift.devices.streams import side_stream
from lightning_pipeshift.model.measuring import timing
from lightning_pipeshift.model.measuring.timing import Timer
from lightning_pipeshift.model.parameters.uses import parameter_uses
from lightning_pipeshift.model.saved.codec import codec_named
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.model.tensors import transfer
from lightning_pipeshift.model.tensors.transfer import Fetch, to_device, to_host
from lightning_pipeshift.plan.schedule.actions import Row
from lightning_pipeshift.runtime.comm import memory_link
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.gradients import aggregation, device_rings
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation, GradientGroup
from lightning_pipeshift.runtime.gradients.device_rings import DeviceRings
from lightning_pipeshift.runtime.offload import copying, lending
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore, StagePolicy
from lightning_pipeshift.runtime.offload.copying import StreamCopier
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.offload.targets import LocalTarget, OffloadTarget
from lightning_pipeshift.runtime.ownership import migration
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration, Turn
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.simulated.device import DataRaceError, SimulatedDevice
from tests.unit.runtime.forgotten_waits import forget
from tests.unit.runtime.stages import connect
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


def time_a_layer() -> tuple[float | None, float | None]:
    """The seconds of a layer's forward and backward, where each operation takes a millisecond."""
    timer = Timer(GPU)
    weight = torch.ones(3, device=GPU, requires_grad=True)
    output = timer.timed(0, lambda x: x * 2 * 3)(weight)
    begin = timer.now()
    output.sum().backward()
    timer.end_backward(begin)
    while timer.median("forward", 0) is None or timer.median("backward", 0) is None:
        timer.read()
    return timer.median("forward", 0), timer.median("backward", 0)


def test_times_are_read_when_the_device_has_reached_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        with SimulatedDevice(seed):
            forward, backward = time_a_layer()
        assert forward == pytest.approx(0.002)
        assert backward is not None
        assert backward >= 0.002
    forget(monkeypatch, timing, "now", "query")
    with pytest.raises(RuntimeError, match="must be completed"), SimulatedDevice(1):
        time_a_layer()


# --- saved tensors that move to the host ---


def step_that_offloads(
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    row: Row,
    place: OffloadTarget,
    budget: float = 1.3,
    after_layer: Callable[[ActivationStore], None] = lambda _: None,
    is_planned: bool = True,
) -> list[Tensor]:
    """The gradients of a stage whose saved tensors move.

    Args:
        device: where it computes.
        monkeypatch: undoes what this changes.
        row: the stage's actions.
        place: where they move to.
        budget: for saved tensors, in multiples of those of one microbatch.
        after_layer: called after each layer.
        is_planned: whether all of them are to move, or those for which there is no memory.
    """
    # A backward calls these two, and autograd the first from inside of an operation.
    monkeypatch.setattr(SavedTable, "save", device.inside(SavedTable.save))
    monkeypatch.setattr(ActivationStore, "fetch", device.inside(ActivationStore.fetch))
    layers = [layer.to(GPU) for layer in layers_of()]
    batch = batches(row)
    blocks = saved_by(layers_of(), batch[0])
    names = [(layer, number) for _, layer, number in blocks] if is_planned else []
    budget_bytes = budget * sum(blocks.values())
    store = ActivationStore(StagePolicy(budget_bytes, {name: [place] for name in names}, place))
    stage = Stage(layers, store, after_layer=lambda *_: after_layer(store))
    for _ in range(2):
        gradients = stage.step(row, [one.to(GPU) for one in batch])
    return [gradient.cpu() for gradient in gradients]


@contextmanager
def host_memory(codec: str | None = None) -> Iterator[OffloadTarget]:
    """A place for saved tensors in pinned memory."""
    copier = StreamCopier(GPU)
    rooms = BufferPool(CPU, float("inf"), GPU, copier.finish)
    yield LocalTarget(rooms, copier, codec=codec_named(codec))
    copier.close()
    rooms.clear()


def batches(row: Row) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator) for _ in {one.microbatch for one in row}]


@pytest.mark.parametrize("codec", [None, "lossless"])
@pytest.mark.parametrize("row", ROWS)
def test_swapped_tensors_come_back_as_they_were(
    row: str, codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Stage(layers_of()).step(ROWS[row], batches(ROWS[row]))
    for seed in range(2):
        with (
            monkeypatch.context() as patch,
            SimulatedDevice(seed) as device,
            host_memory(codec) as host,
        ):
            found = step_that_offloads(device, patch, ROWS[row], host)
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

    def try_all() -> None:
        # Whether a copy is late when it is needed depends on the seed, and on the room for others.
        for seed, budget in product(range(4), (1.5, 0.9)):
            with SimulatedDevice(seed) as device, host_memory() as host, monkeypatch.context() as m:
                step_that_offloads(device, m, ROWS["gpipe"], host, budget)

    with pytest.raises(DataRaceError):
        try_all()


def test_pinned_memory_is_freed_when_nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_and_unpin() -> None:
        with SimulatedDevice():
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

    copy_and_unpin()
    forget(monkeypatch, copying, "finish", "synchronize")
    with pytest.raises(DataRaceError, match="unpin"):
        copy_and_unpin()


def test_memory_is_kept_for_a_copy_that_nobody_wants_any_more() -> None:
    with SimulatedDevice(), host_memory() as host:
        parcel = host.put(torch.ones(100, device=GPU), lambda: None)
        assert parcel is not None
        parcel.leaving.wait()
        parcel.fetch(torch.empty(100, device=GPU))
        parcel.forget()
        torch.zeros(100, device=GPU)


# --- saved tensors that move to another stage ---


class Net:
    """Lanes between the stages of one process."""

    def __init__(self) -> None:
        self.messages: defaultdict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def of(self, stage: int) -> Callable[[int, bool], Any]:
        """The lanes of a stage, by number."""
        return partial(NetLane, self, stage)


class NetLane(NamedTuple):
    """Stands in for a :class:`Lane`: sends a tensor through host memory, as that does."""

    net: Net
    stage: int
    number: int
    comes_back: bool

    def send_object(self, obj: Any, to: int) -> None:
        self.net.messages[self.number, self.stage, to].put(obj)

    def receive_object(self, source: int) -> Any:
        return self.net.messages[self.number, source, self.stage].get(timeout=LIMIT_SECONDS)

    def settle(self) -> None: ...

    def send_tensor(self, tensor: Tensor, to: int) -> None:
        sent = tensor.detach().to("cpu").clone()
        self.net.messages[self.number, self.stage, to, "tensors"].put(sent)

    def receive_into(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self.receive_tensor(tensor, source))

    def receive_tensor(self, like: Tensor, source: int) -> Tensor:
        line = self.net.messages[self.number, source, self.stage, "tensors"]
        found: Tensor = line.get(timeout=LIMIT_SECONDS)
        assert found.shape == like.shape
        return found


class Lending:
    """A stage that borrows memory from another one on the same device.

    Args:
        monkeypatch: undoes what this changes.
        is_direct: whether blocks are copied to the other stage's memory, or sent.
        take_room: called with the bytes that the lender takes.
        device: that of the borrower.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        is_direct: bool,
        take_room: Callable[[int], None] = lambda _: None,
        device: torch.device = GPU,
    ) -> None:
        # In one process, a handle is the memory itself.
        monkeypatch.setattr(shared_memory, "exported", lambda memory: memory)
        monkeypatch.setattr(shared_memory, "imported", lambda handle, _: handle)
        address = Address("this process", (), "cuda") if is_direct else None
        self.errors: list[BaseException] = []
        net = Net()
        self.threads = Threads("lending", self.errors.append)
        self.lender = Lender(net.of(1), GPU, self.threads, take_room, address)
        self.lender.serve(0)
        self.borrower = Borrower(1, net.of(0), self.errors.append, device, address)

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
        parcel.fetch(memory).wait()
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
        pytest.param(lending, "_decode", True, "lossless", id="what is decoded is complete"),
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


@WAYS
@pytest.mark.parametrize("row", ROWS)
def test_swapped_tensors_come_back_from_another_stage(
    row: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that have sent one tensor fetch others: into memory of the compute."""
    expected = Stage(layers_of()).step(ROWS[row], batches(ROWS[row]))
    with SimulatedDevice() as device:
        lending = Lending(monkeypatch, is_direct)
        place = RemoteTarget({1: lending.borrower})
        found = step_that_offloads(device, monkeypatch, ROWS[row], place)
        lending.close()
    assert same(found, expected)


def test_who_makes_room_for_others_waits_for_its_own_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lender's thread moves tensors to the host that this stage may not have computed yet."""
    row = ROWS["middle of 1f1b"]
    expected = Stage(layers_of()).step(row, batches(row))
    stores: list[ActivationStore] = []
    is_back = threading.Event()

    def lend(size: int) -> None:
        stores[0].lend(size)
        if size < 0:
            is_back.set()

    with SimulatedDevice() as device, host_memory() as host:
        lending = Lending(monkeypatch, False, lend, CPU)
        place = RemoteTarget({1: lending.borrower})

        def lend_a_block(store: ActivationStore) -> None:
            stores[:] = [store]
            size = int(store.budget_bytes - store.held_bytes) + 1
            if store.traffic.num_evicted < 5 and size > 1000:
                parcel = place.put(torch.zeros(size, dtype=torch.uint8), lambda: None)
                assert parcel is not None
                parcel.leaving.wait()
                is_back.clear()
                parcel.forget()
                # The next layer needs the memory.
                assert is_back.wait(LIMIT_SECONDS)

        found = step_that_offloads(
            device, monkeypatch, row, host, 3.0, lend_a_block, is_planned=False
        )
        assert stores[0].traffic.num_evicted
        lending.close()
    assert same(found, expected)


# --- sums of gradients ---


class Done:
    def wait(self) -> None: ...

    def query(self) -> bool:
        return True


def sum_by_host(device: SimulatedDevice) -> list[Tensor]:
    """Gradients that are summed in host memory, with those of a replica that has the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(GPU)
    layers = [net[0], net[2]]
    groups = [
        GradientGroup(n, list(layer.parameters()), [2 * n, 2 * n + 1], [0, 1])
        for n, layer in enumerate(layers)
    ]

    def start(number: int, members: Sequence[int], buffer: Tensor, urgency: Any) -> Done:
        buffer.mul_(2)
        return Done()

    sums = Aggregation(groups, start, None, 4, CPU, in_order=False)
    # A hook of a parameter calls it.
    vars(sums)["notice"] = device.inside(sums.notice)
    for _ in range(3):
        net.zero_grad()
        sums.arm()
        net(torch.ones(2, 4, device=GPU)).square().sum().backward()
        sums.finish()
    sums.close()
    return [parameter.grad.cpu() for parameter in net.parameters() if parameter.grad is not None]


def test_gradients_are_summed_in_host_memory() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net(torch.ones(2, 4)).square().sum().backward()
    with SimulatedDevice() as device:
        found = sum_by_host(device)
    assert same(found, [2 * p.grad for p in net.parameters() if p.grad is not None])


def test_sums_in_host_memory_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, aggregation, "start", "synchronize")
    with pytest.raises(DataRaceError, match="mul_"), SimulatedDevice() as device:
        sum_by_host(device)


class Transfer(NamedTuple):
    """Stands in for ``dist.P2POp``."""

    kind: str
    tensor: Tensor
    peer: int
    group: Any


class TwoReplicas:
    """Stands in for ``torch.distributed`` on the first of two ranks whose vectors are equal."""

    P2POp, isend, irecv = Transfer, "send", "receive"

    def __init__(self, vector: Tensor) -> None:
        first, second = vector.split(len(vector) // 2)
        # In a ring, the other rank's own part comes first, then a part that is complete.
        self._parts = [part.to(GPU) for part in (second, 2 * first)]
        self._coming = iter(self._parts)

    def batch_isend_irecv(self, transfers: Sequence[Transfer]) -> list[Done]:
        for one in transfers:
            if one.kind == "send":
                one.tensor.clone()
            else:
                one.tensor.copy_(next(self._coming))
        return [Done()]


def sum_on_device(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A vector that is summed on a side stream with an equal one."""
    monkeypatch.setattr(device_rings, "dist", TwoReplicas(torch.arange(10.0)))
    groups: Any = SimpleNamespace(device=GPU, group=lambda *_: None)
    rings = DeviceRings(groups, 0, lambda _: nullcontext())
    vector = torch.arange(10.0, device=GPU) + 0
    under_way = rings.start(0, [0, 1], vector)
    torch.zeros(3, device=GPU)
    under_way.wait()
    return vector.mul(1).cpu()


def test_gradients_are_summed_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedDevice():
        found = sum_on_device(monkeypatch)
    assert torch.equal(found, 2 * torch.arange(10.0))


def test_memory_that_is_summed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that another one replaces may be freed before its sum is complete."""

    def start_and_forget() -> None:
        monkeypatch.setattr(device_rings, "dist", TwoReplicas(torch.arange(10.0)))
        groups: Any = SimpleNamespace(device=GPU, group=lambda *_: None)
        rings = DeviceRings(groups, 0, lambda _: nullcontext())
        rings.start(0, [0, 1], torch.arange(10.0, device=GPU))
        torch.zeros(10, device=GPU)

    with SimulatedDevice():
        start_and_forget()
    monkeypatch.setattr(device_rings, "keep_for_stream", lambda _: None)
    with pytest.raises(DataRaceError), SimulatedDevice():
        start_and_forget()


@pytest.mark.parametrize("number", [0, 1], ids=["for the compute", "for the sum"])
def test_sums_on_a_side_stream_wait(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, device_rings, "start", "wait", number)
    with pytest.raises(DataRaceError), SimulatedDevice():
        sum_on_device(monkeypatch)


# --- tensors that go through shared memory ---


def orders(num_written: int, num_taken: int, num_given: int) -> list[str]:
    """All orders in which messages are written (W), taken (T) and given back (G)."""
    found = [] if num_written or num_taken or num_given else [""]
    if num_given:
        found += [f"{each}G" for each in orders(num_written, num_taken, num_given - 1)]
    if num_taken > num_given:
        found += [f"{each}T" for each in orders(num_written, num_taken - 1, num_given)]
    if num_written > num_taken:
        found += [f"{each}W" for each in orders(num_written - 1, num_taken, num_given)]
    return found


def pass_through_memory(patch: pytest.MonkeyPatch, order: str) -> list[Tensor]:
    """Sends tensors from one rank to another in the same process; each computes on its own stream,
    and both write to what they have sent or received. Returns what has arrived.
    """
    patch.setattr(shared_memory, "exported", lambda memory: memory)
    patch.setattr(shared_memory, "imported", lambda handle, _: handle)
    ends = [MemoryEnd(GPU) for _ in range(2)]
    for rank, end in enumerate(ends):
        patch.setattr(end, "_aside", partial(side_stream, GPU, f"buffers of rank {rank}"))
    messages, answers, found = [], [], []
    with side_stream(GPU, "rank 0"):
        sent = torch.zeros(5, device=GPU)
    for each in order:
        with side_stream(GPU, "rank 1" if each == "T" else "rank 0"):
            if each == "W":
                sent += 1
                messages.append(ends[0].write([sent, sent.double() / 4]))
            elif each == "T":
                got = [torch.empty(5, device=GPU), torch.empty(5, dtype=torch.float64, device=GPU)]
                answers.append(ends[1].take(messages.pop(0), got))
                found.append(got[0] * got[1])
                got[0].zero_()
            else:
                ends[0].give_back(answers.pop(0))
    with side_stream(GPU, "rank 1"):
        return [each.cpu() for each in found]


@pytest.mark.parametrize("order", orders(3, 3, 3))
def test_tensors_go_through_shared_memory(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedDevice():
        found = pass_through_memory(monkeypatch, order)
    assert same(found, [torch.full((5,), n * n / 4, dtype=torch.float64) for n in (1, 2, 3)])


@pytest.mark.parametrize(
    ("function", "maker", "number"),
    [
        pytest.param("take", "shared_event", 1, id="the reader for the write"),
        pytest.param("give_back", "shared_event", 0, id="the buffer for the reader"),
        pytest.param("write", "record_event", 0, id="the next write for the buffer"),
    ],
)
def test_shared_memory_is_waited_for(
    function: str, maker: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch, memory_link, function, "wait", number, maker)
    with pytest.raises(DataRaceError, match="copy_"), SimulatedDevice():
        pass_through_memory(monkeypatch, "WTGWTG")


# --- layers that move ---


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.middle = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def moving(self, x: Tensor) -> Tensor:
        """What the layers that move compute."""
        found: Tensor = self.middle(self.first(x))
        return found


def train(net: Moving, optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    batch = torch.arange(12.0).view(3, 4).to(device)
    output: Tensor = net.second(net.moving(batch))
    output.square().sum().backward()
    optimizer.step()
    return output


def move_a_layer(forgets: bool) -> Any:
    """One of two stages. The second one gets the first layer, and gives it back: returns what the
    layer and its optimizer state are in the end, or the races.

    Args:
        forgets: whether moves do not wait for the compute.
    """
    by_host, board = connect()
    ranks = by_host.ranks
    groups = Lanes().between_stages(ranks)
    channels = Channels(ranks, by_host.stage, GPU, board.watched, groups)
    with pytest.MonkeyPatch.context() as patch:
        if forgets:
            forget(patch, migration, "_mark", "wait")
        try:
            with SimulatedDevice():
                return _moved(channels)
        except DataRaceError as error:
            return str(error)


def _moved(channels: Channels) -> dict[str, Tensor]:
    net = Moving().to(GPU)
    layers = [net.first, net.middle, net.second]
    optimizer = torch.optim.Adam(net.parameters())
    # Each stage computes all of it once, so that its device has work to do.
    train(net, optimizer, GPU)
    holdings = Holdings(net, parameter_uses(net, layers), layers, [0, 0, 1], channels)
    # As in a run: buffers have memory before their bytes come.
    holdings.is_common = lambda _: False
    holdings.settle([optimizer])
    errors: list[BaseException] = []
    threads = Threads("moves", errors.append)
    for owner in (1, 0):
        move = Migration(holdings, [owner, owner, 1], [optimizer], threads)
        move.send_newest(1)
        move.before_turn(Turn(1))
        if channels.stage == owner:
            move.await_layer(0)
            found = net.first(torch.ones(3, 4, device=GPU))
            move.await_layer(1)
            net.middle(found).square().sum().backward()
        move.finish()
        channels.gather(None)
    threads.close()
    assert not errors
    if channels.stage:
        return {}
    state = {name: x.cpu() for name, x in net.state_dict().items() if "second" not in name}
    for name, parameter in moved_parameters(net).items():
        assert parameter.grad is not None
        state[f"gradient of {name}"] = parameter.grad.cpu()
        state |= {f"{name} {key}": x.cpu() for key, x in optimizer.state[parameter].items()}
    return state


def moved_parameters(net: Moving) -> dict[str, nn.Parameter]:
    return {name: x for name, x in net.named_parameters() if "second" not in name}


def test_a_layer_moves_beside_the_compute() -> None:
    found, _ = run_ranks(move_a_layer, 2, False)
    assert not isinstance(found, str), found
    net = Moving()
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, CPU)
    for _ in range(2):
        optimizer.zero_grad()
        net.moving(torch.ones(3, 4)).square().sum().backward()
    for name, value in net.state_dict().items():
        assert "second" in name or torch.equal(found.pop(name), value), name
    for name, parameter in moved_parameters(net).items():
        assert parameter.grad is not None
        assert torch.equal(found.pop(f"gradient of {name}"), parameter.grad), name
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(found.pop(f"{name} {key}"), value), name
    assert not found


def test_a_move_waits_for_the_compute_of_both_stages() -> None:
    """What is sent has been computed, and the memory for what arrives is no longer in use."""
    for races in run_ranks(move_a_layer, 2, True):
        assert "nothing orders" in str(races)
        assert "'moves'" in races
