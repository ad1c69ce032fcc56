"""The connections between the stages of one virtual machine.

Payloads and their gradients travel in two directions between neighbours. On gloo, one group carries
everything and tags keep the tensors apart; between GPUs of one host, tensors go through memory that
both ranks can reach, where that is possible (see :mod:`.memory_link`). NCCL has no tags and matches
by order, and an operation that waits would block those after it; so each direction between two
neighbours has its own communicator, on which both ends proceed in microbatch order. Everything else
is sent through a lane.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.devices.host_memory import pinned_like
from lightning_pipeshift.model.execution.transfer import Fetch
from lightning_pipeshift.plan.inputs.flow import TensorSpec
from lightning_pipeshift.plan.inputs.traffic import BULK, GRADIENTS, PIPELINE
from lightning_pipeshift.runtime.comm.groups import Group, StageGroups
from lightning_pipeshift.runtime.comm.lane import (
    Lane,
    Line,
    Paced,
    PostedObject,
    Sent,
    as_bytes,
    finish,
)
from lightning_pipeshift.runtime.comm.memory_link import (
    Arrival,
    MemoryEnd,
    MemoryLink,
    ranks_with_shared_memory,
)
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, Purpose
from lightning_pipeshift.runtime.comm.sockets import (
    Opened,
    ends_soon,
    keep_for_ever,
    shut_down,
)
from lightning_pipeshift.runtime.comm.specs import dtype_named, is_dense
from lightning_pipeshift.runtime.comm.threads import InOrder
from lightning_pipeshift.runtime.comm.turns import BACKGROUND, LaneTraffic, Turns, Urgency
from lightning_pipeshift.runtime.comm.waits import Watched, complete
from lightning_pipeshift.runtime.offload.shared_memory import Address

# The numbers of lanes.
_MEASUREMENTS = 8
_SHARED = 9
# Two for each purpose, behind those of all other lanes: a record's are 10 and 11.
_FIRST_OF_LINKS = 16
# The urgency of swapped tensors that come back, before all gradients, and of those that are swapped
# out, behind them.
_BACK = -1
_OUT = BACKGROUND.lane - 1


def lane_name(number: int) -> str:
    """The name of the lane with which a block competes, by the lane's number in its urgency."""
    names = {
        _BACK: f"{PIPELINE.name} (swaps)",
        _OUT: f"{BULK.name} (swaps)",
        BACKGROUND.lane: BULK.name,
    }
    return names.get(number) or GRADIENTS[number].name


class Direction(enum.IntEnum):
    """The direction in which a tensor travels between neighbours."""

    PAYLOAD = 0
    GRADIENT = 1


class Layout:
    """How the tensors of one payload, or their gradients, lie in memory.

    The receiver knows the shape without a message, but not the order in which kernels lay out the
    dimensions. So the sender sends the strides once, before the first payload of a kind, and values
    arrive with the layout they had.
    """

    __slots__ = ("_header", "strides")

    def __init__(self) -> None:
        self.strides: list[tuple[int, ...]] | None = None
        self._header: tuple[Tensor, Any, Watched, int, Sequence[TensorSpec]] | None = None

    @property
    def is_new(self) -> bool:
        """Whether the strides have neither been received nor their receive posted."""
        return self.strides is None and self._header is None

    def expect(
        self, header: Tensor, work: Any, watched: Watched, peer: int, specs: Sequence[TensorSpec]
    ) -> None:
        """Reads the layout from a message whose receive is posted."""
        self._header = (header, work, watched, peer, specs)

    def known(self) -> list[tuple[int, ...]]:
        """The strides of each tensor; waits for them."""
        if self.strides is None:
            assert self._header is not None
            header, work, watched, peer, specs = self._header
            with watched(peer):
                complete(work)
            numbers = iter(header.tolist())
            self.strides = [tuple(next(numbers) for _ in spec.shape) for spec in specs]
            self._header = None
        return self.strides


@dataclass
class Receipt:
    """A posted receive."""

    flat: Tensor
    spec: TensorSpec
    work: Any
    watched: Watched
    peer: int
    layout: Layout
    number: int
    staging: Tensor | None = None
    arrival: Arrival | None = None

    def wait(self) -> Tensor:
        """The tensor; waits for it."""
        if self.work is not None:
            with self.watched(self.peer):
                complete(self.work)
        if self.arrival is not None:
            self.arrival.wait()
        if self.staging is not None:
            self.flat.copy_(self.staging, non_blocking=True)
        return _as_it_was(self.flat, self.spec.shape, self.layout.known()[self.number])


@dataclass
class PostedSum:
    """A sum over all stages that has begun."""

    vector: Tensor
    work: Any
    watched: Watched

    def wait(self) -> Tensor:
        """The sum; waits for it."""
        if self.work is not None:
            finish(self.work, self.watched)
        return self.vector


def connect_devices(devices: ProcessGroups, machines: Sequence[Sequence[int]]) -> None:
    """Makes the groups in which payloads travel from device to device. Every rank of the job calls
    this.

    Args:
        devices: gets the groups; with gloo, :class:`Lanes` has made all that is needed.
        machines: the ranks of each virtual machine, in stage order.
    """
    if devices.backend == "gloo":
        return
    pairs = [pair for ranks in machines for pair in pairwise(ranks)]
    devices.want(Purpose.PAYLOAD, pairs)
    devices.want(Purpose.GRADIENT, pairs)


class Channels(Lane):
    """One stage's connections.

    Args:
        ranks: the global ranks of the virtual machine's stages, in stage order.
        stage: this stage.
        device: where tensors live.
        watched: the context to communicate in.
        groups: those of ``ranks``.
        devices: carry tensors from device to device, from :func:`connect_devices` on. By
            default, and with gloo, tensors on a GPU go through host memory, or through memory
            that two ranks share: see :meth:`share_memory`.
        turns: of this rank's large messages.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        device: torch.device,
        watched: Watched,
        groups: StageGroups,
        devices: ProcessGroups | None = None,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(ranks, stage, groups.pipeline.control, watched)
        self.device = device
        self._devices = devices if devices is not None and devices.backend != "gloo" else None
        self._staged = self._devices is None and device.type != "cpu"
        self._staging = InOrder("send")
        self._transfers = [
            group if group is not None else Group(None, frozenset())
            for group in (groups.swaps, groups.bulk)
        ]
        self.turns = turns or Turns()
        self.measurements = Lane(ranks, stage, self.control, watched, _MEASUREMENTS)
        """Apart from what is sent in steps."""
        self.shared = Lane(ranks, stage, self.control, watched, _SHARED)
        """For the gradients of parameters that several stages of an asynchronous pipeline hold."""
        self._pipeline_sockets = groups.pipeline.sockets
        self._sockets = self._pipeline_sockets.union(*(one.sockets for one in self._transfers))
        self.shares_memory_with: frozenset[int] = frozenset()
        """The ranks to which tensors go through memory that both can reach."""
        self._links: dict[tuple[Purpose, int], MemoryLink] = {}
        self.num_done = 0
        """How many actions this stage has completed."""
        # Collectives that have started and may not be complete yet.
        self._under_way: list[Any] = []

    def reorder(self, machines: Sequence[Sequence[int]]) -> None:
        """Gives the ranks of each virtual machine other stages. Every rank of the job calls this,
        when no payload is under way.

        Args:
            machines: the ranks of each virtual machine, in their new stage order.
        """
        rank = self.ranks[self.stage]
        (ranks,) = (ranks for ranks in machines if rank in ranks)
        lanes = [lane for link in self._links.values() for lane in (link.messages, link.answers)]
        for lane in (self, self.measurements, self.shared, *lanes):
            lane.number_stages(ranks, ranks.index(rank))
        if self._devices is not None:
            connect_devices(self._devices, machines)
            self.open_lines()

    @property
    def backend(self) -> str:
        """The backend that carries payloads: ``"gloo"`` or ``"nccl"``."""
        return "gloo" if self._devices is None else self._devices.backend

    def open_lines(self) -> None:
        """Sends one byte to each neighbour and back, from the first stage to the last, where
        payloads go from device to device. Every stage calls this.

        NCCL makes a communicator at its first use, and both ends wait for each other there: if one
        stage first sends a payload and the other first posts the receive of a gradient, both would
        wait for ever.
        """
        if self._devices is None:
            return
        with self._devices.connecting():
            for left in range(self.num_stages - 1):
                if self.stage not in (left, left + 1):
                    continue
                neighbour = left + (self.stage == left)
                for direction in Direction:
                    group, member = self._line(neighbour, direction)
                    byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                    sends = (self.stage == left) == (direction is Direction.PAYLOAD)
                    transfer = group.send if sends else group.recv
                    with self.watched(self.ranks[neighbour]):
                        complete(transfer([byte], member, 0))

    def share_memory(self, address: Address | None) -> None:
        """Finds out with which stages this one can share its device's memory; from then on, tensors
        go to them through that. Every stage calls this.

        Args:
            address: that of this process; ``None`` to share no memory.
        """
        if self._devices is None:
            self.shares_memory_with = ranks_with_shared_memory(self, address, self.device)

    def is_direct(self, stage: int) -> bool:
        """Whether tensors of a device go to another stage without passing through host memory."""
        return self._devices is not None or self.ranks[stage] in self.shares_memory_with

    def _link(self, stage: int, purpose: Purpose) -> MemoryLink | None:
        """Returns the link to a stage; ``None`` if no memory is shared with it."""
        rank = self.ranks[stage]
        if rank not in self.shares_memory_with:
            return None
        link = self._links.get((purpose, rank))
        if link is None:
            first = _FIRST_OF_LINKS + 2 * list(Purpose).index(purpose)
            messages, answers = (
                Lane(self.ranks, self.stage, self.control, self.watched, number)
                for number in (first, first + 1)
            )
            link = MemoryLink(MemoryEnd(self.device), messages, answers, rank)
            self._links[purpose, rank] = link
        return link

    def bulk(self, number: int = 0) -> Lane:
        """A lane for large transfers that are not urgent: tensors wait while any other large
        message does. Only one thread at a time may use it for the same stage and direction.

        Args:
            number: the lane's number; different lanes do not wait for each other.
        """
        group = self._transfers[1]
        if group.control is None:
            # Ranks of several virtual machines have no connections for it.
            group = Group(self.control, self._pipeline_sockets)
        return self._transfer_lane(group, number, BACKGROUND)

    def swaps(self, number: int, comes_back: bool) -> Lane:
        """A lane for swapped tensors, as :meth:`bulk`.

        Args:
            number: the lane's number.
            comes_back: whether it carries those that a backward needs next. They go before all
                gradients; those that are swapped out, behind them.
        """
        urgency = Urgency(_BACK if comes_back else _OUT)
        return self._transfer_lane(self._transfers[not comes_back], number, urgency)

    def _transfer_lane(self, group: Group, number: int, urgency: Urgency) -> Lane:
        paced = Paced(self.turns, urgency)
        return Lane(self.ranks, self.stage, group.control, self.watched, number, paced)

    @property
    def traffic(self) -> dict[str, LaneTraffic]:
        """Counts of the blocks that this rank has sent on each lane, by its name."""
        return {lane_name(lane): traffic for lane, traffic in self.turns.traffic.items()}

    @property
    def payload_sockets(self) -> Opened:
        """The connections that payloads travel on, if gloo carries them all."""
        is_gloo = self._devices is None and not self.shares_memory_with
        return self._pipeline_sockets if is_gloo else frozenset()

    def interrupt_transfers(self) -> None:
        """Ends the connections of :meth:`bulk` and :meth:`swaps`, here and for the peers."""
        for group in self._transfers:
            shut_down(group.sockets)

    def close(self) -> None:
        """Closes the connections; peers that wait on them see an error at once."""
        self._staging.close()
        shut_down(self._sockets)
        if not all(map(ends_soon, self._under_way)):
            keep_for_ever(self.control)
        self._links.clear()
        for lane in (self.measurements, self.shared, self):
            lane.release()
        self._transfers = []

    # --- payloads and gradients ---

    def send(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        direction: Direction,
        to: int,
        layout: Layout | None = None,
    ) -> Sent:
        """Sends tensors to a neighbour, without waiting.

        Args:
            tensors: what to send.
            specs: their shapes and types.
            direction: whether they are a payload or gradients.
            to: the neighbour.
            layout: their layout in memory as last sent to the neighbour; by default it is sent with
                these tensors.
        """
        layout = layout or Layout()
        sent = Sent(self.watched, self.ranks[to])
        line = self._line(to, direction)
        tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
        if layout.strides is None:
            layout.strides = [tensor.stride() for tensor in tensors]
            header = _header(specs, self._message_device)
            if header.numel():
                header.copy_(torch.tensor([n for strides in layout.strides for n in strides]))
                work = self._post_send(header, to, line, _HEADER_TAG + int(direction))
                sent.works.append((work, header))
        flats = [
            _flat(tensor, strides) for tensor, strides in zip(tensors, layout.strides, strict=True)
        ]

        def post(flats: Sequence[Tensor]) -> None:
            for number, (flat, spec) in enumerate(zip(flats, specs, strict=True)):
                if spec.num_bytes:
                    work = self._post_send(flat, to, line, _tag(direction, number))
                    sent.works.append((work, flat))

        link = self._link(to, _PURPOSE[direction]) if any(map(len, flats)) else None
        if link is not None:
            sent.first = partial(link.settle, link.send(flats))
        elif self._staged:
            # gloo needs the values in host memory: a thread waits until they are there.
            fetch = Fetch(flats, is_kept=False)
            sent.first = self._staging.submit(lambda: post(fetch.wait())).result
        else:
            post(flats)
        return sent

    @property
    def _message_device(self) -> torch.device:
        return torch.device("cpu") if self._devices is None else self.device

    def post_receive(
        self,
        specs: Sequence[TensorSpec],
        direction: Direction,
        source: int,
        layout: Layout | None = None,
    ) -> list[Receipt]:
        """Posts the receives of what a neighbour sends. The arguments are those of :meth:`send`
        there, but for ``source``, the neighbour.
        """
        layout = layout or Layout()
        peer = self.ranks[source]
        group, member = self._line(source, direction)
        if layout.is_new:
            header = _header(specs, self._message_device)
            work = None
            if header.numel():
                with self.watched(peer):
                    work = group.recv([as_bytes(header)], member, _HEADER_TAG + int(direction))
                layout.expect(header, work, self.watched, peer, specs)
            else:
                layout.strides = [() for _ in specs]
        flats = [
            torch.empty(
                spec.num_bytes // spec.itemsize, dtype=dtype_named(spec.dtype), device=self.device
            )
            for spec in specs
        ]
        link = self._link(source, _PURPOSE[direction]) if any(map(len, flats)) else None
        arrival = link.post_receive(flats) if link is not None else None
        receipts = []
        for number, (flat, spec) in enumerate(zip(flats, specs, strict=True)):
            work = staging = None
            if self._staged and arrival is None:
                staging = pinned_like(flat)
            if spec.num_bytes and arrival is None:
                with self.watched(peer):
                    work = group.recv(
                        [as_bytes(flat if staging is None else staging)],
                        member,
                        _tag(direction, number),
                    )
            receipts.append(
                Receipt(flat, spec, work, self.watched, peer, layout, number, staging, arrival)
            )
        return receipts

    def _line(self, neighbour: int, direction: Direction) -> Line:
        if self._devices is None:
            return self._line_to(neighbour)
        return self._devices.line(
            _PURPOSE[direction], self.ranks[self.stage], self.ranks[neighbour]
        )

    # --- single tensors ---

    def send_on_device(self, tensor: Tensor, to: int, purpose: Purpose = Purpose.SHARED) -> None:
        """Sends one tensor to any stage, in the group that the two stages have for a purpose; from
        device to device if payloads are sent so. Kernels queued after this call may change the
        tensor.
        """
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        link = self._link(to, purpose)
        if link is not None:
            # The other stage has received the one before, or will before anything else.
            link.settle()
            link.send([flat])
        elif self._devices is None:
            self.send_tensor(tensor, to)
        elif flat.numel():
            line = self._devices.line(purpose, self.ranks[self.stage], self.ranks[to])
            work = self._post_send(flat, to, line, 0)
            with self.watched(self.ranks[to]):
                complete(work)

    def post_on_device(self, tensor: Tensor, to: int) -> None:
        """As :meth:`send_on_device`, without waiting for the other stage; from the memory of a CPU
        it waits, rather than take memory for a copy.
        """
        if self.is_direct(to) or tensor.device.type == "cpu":
            self.send_on_device(tensor, to)
            return
        self._object_sends.append(self._post_tensor(tensor, to))

    def receive_on_device(
        self, like: Tensor, source: int, purpose: Purpose = Purpose.SHARED
    ) -> Tensor:
        """Returns the tensor that stage ``source`` sends with :meth:`send_on_device`, of the shape
        and type of ``like``, on this stage's device.
        """
        link = self._link(source, purpose)
        if link is None and self._devices is None:
            return self.receive_tensor(like, source).to(self.device)
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if link is not None:
            link.post_receive([tensor.view(-1)]).wait()
        elif tensor.numel():
            assert self._devices is not None
            rank, peer = self.ranks[self.stage], self.ranks[source]
            group, member = self._devices.line(purpose, rank, peer)
            with self.watched(peer):
                complete(group.recv([as_bytes(tensor.view(-1))], member, 0))
        return tensor

    @contextmanager
    def links(self, pairs: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Context in which pairs of stages have groups to measure their links. Every rank of the
        job calls this.
        """
        ranks = [tuple(self.ranks[stage] for stage in pair) for pair in pairs]
        if self._devices is not None:
            self._devices.want(Purpose.LINKS, ranks)
        yield
        for key in [key for key in self._links if key[0] is Purpose.LINKS]:
            link = self._links.pop(key)
            link.settle()
            link.answers.settle()
            link.end.close()
        if self._devices is not None:
            self._devices.want(Purpose.LINKS, [])

    def settle(self, all_but: int = 0) -> None:
        """See :class:`Lane`."""
        super().settle(all_but)
        for link in self._links.values():
            link.answers.settle()

    # --- all stages together ---

    def share_object(self, obj: Any, source: int, posted: PostedObject | None = None) -> Any:
        """Every stage calls this; every stage gets the object of ``source``.

        Args:
            obj: picklable; only that of ``source`` counts.
            source: a stage.
            posted: what :meth:`post_object` returned, if it was called before.
        """
        if self.stage != source:
            return self.receive_object(source, posted)
        self.settle()
        for to in range(self.num_stages):
            if to != source:
                self.send_object(obj, to)
        return obj

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """Every stage calls this; stage 0 gets the objects of all stages, in stage order, all
        others ``None``.
        """
        if self.stage:
            self.send_object(obj, 0)
            return None
        return [obj, *(self.receive_object(stage) for stage in range(1, self.num_stages))]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of a CPU vector over the stages, with the same bits on each."""
        return self.post_sum(vector).wait()

    def post_sum(self, vector: Tensor) -> PostedSum:
        """Begins :meth:`sum` without waiting for it."""
        work = None
        if self.num_stages > 1:
            with self.watched(None):
                work = dist.all_reduce(vector, group=self.control, async_op=True)
            self._under_way = [one for one in self._under_way if not one.is_completed()]
            self._under_way.append(work)
        return PostedSum(vector, work, self.watched)

    def gather_int(self, value: int) -> list[int]:
        """Every stage's value, in stage order."""
        if self.num_stages == 1:
            return [value]
        parts = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        own = torch.tensor([value], dtype=torch.int64)
        with self.watched(None):
            work = dist.all_gather(parts, own, group=self.control, async_op=True)
        self._under_way.append(work)
        finish(work, self.watched)
        return [int(parts[member]) for member in self._members]


_PURPOSE = {Direction.PAYLOAD: Purpose.PAYLOAD, Direction.GRADIENT: Purpose.GRADIENT}

# Apart from the tensors' tags, which are small numbers.
_HEADER_TAG = 1 << 19


def _tag(direction: Direction, number: int) -> int:
    return 2 * number + int(direction)


def _header(specs: Sequence[TensorSpec], device: torch.device) -> Tensor:
    """An empty tensor for the strides of tensors."""
    return torch.empty(sum(len(spec.shape) for spec in specs), dtype=torch.int64, device=device)


def _flat(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The elements of a tensor as a vector: in the order of its memory where that has neither gaps
    nor overlaps, else in the order of its dimensions.

    Args:
        tensor: the tensor.
        strides: those that have been sent to the other side.
    """
    tensor = tensor.detach()
    if not is_dense(tuple(tensor.shape), strides):
        return tensor.contiguous().flatten()
    if tensor.stride() != strides:
        laid_out = torch.empty_strided(
            tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
        )
        tensor = laid_out.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _as_it_was(flat: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor with the strides that it had at the sender."""
    if is_dense(shape, strides):
        # Not a view of the vector: autograd treats views specially.
        return flat.new_empty(0).set_(flat.untyped_storage(), 0, shape, strides)
    whole = flat.view(shape)
    sizes = [1 if step == 0 else size for size, step in zip(shape, strides, strict=True)]
    for dimension, size in enumerate(sizes):
        whole = whole.narrow(dimension, 0, size)
    ordered = sorted((step, size) for step, size in zip(strides, sizes, strict=True) if size > 1)
    for (step, size), (larger, _) in pairwise(ordered):
        if larger < step * size:
            # Its elements overlap, so no code may write to it anyway.
            return flat.view(shape)
    with_gaps = torch.empty_strided(sizes, strides, dtype=flat.dtype, device=flat.device)
    return with_gaps.copy_(whole).expand(shape)
