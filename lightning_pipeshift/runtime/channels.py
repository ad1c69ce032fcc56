"""The connections between the stages of one virtual machine.

Payloads and their gradients travel in two directions between neighbours. On gloo, one group carries
everything and tags keep the tensors apart. NCCL has no tags and matches by order, and an operation
that waits would block the ones behind it; so each direction between two neighbours has a
communicator of its own, on which both ends go in microbatch order. Small objects (results, plans,
checkpoints' parts) travel on the CPU.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.placeholder import Placeholder, dtype_named
from lightning_pipeshift.plan.flow import TensorSpec
from lightning_pipeshift.runtime.sockets import Opened, open_sockets, shut_down

# A context around communication with a rank (``None``: with several), which turns a broken
# connection into its reason.
Watched = Callable[[int | None], AbstractContextManager[None]]

# A process group, and a stage's rank in it. Its methods are called without torch's own wrappers
# around them, which take longer than the sending.
Line = tuple[Any, int]

_OBJECT_TAG = 1 << 20
_TENSOR_TAG = _OBJECT_TAG + 1
_HEADER_BYTES = 8
# What fits in the first message of an object, so that a step's usual report takes one.
_INLINE_BYTES = 4096


class Direction(enum.IntEnum):
    """Which way a tensor travels between neighbours."""

    PAYLOAD = 0
    GRADIENT = 1


@dataclass
class Receipt:
    """A posted receive."""

    buffer: Tensor
    work: Any
    watched: Watched
    peer: int
    staging: Tensor | None = None

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        if self.work is not None:
            with self.watched(self.peer):
                self.work.wait()
        if self.staging is not None:
            _flat(self.buffer).copy_(self.staging)
        return self.buffer


@dataclass
class Sent:
    """A send under way; it keeps the tensor alive."""

    watched: Watched
    peer: int
    works: list[tuple[Any, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the tensors may be reused."""
        with self.watched(self.peer):
            for work, _ in self.works:
                work.wait()
        self.works.clear()


@dataclass
class PostedObject:
    """The posted receive of an object's first message."""

    first: Tensor
    work: Any
    source: int


@dataclass
class PostedSum:
    """A sum over all stages that has begun."""

    vector: Tensor
    work: Any
    watched: Watched

    def wait(self) -> Tensor:
        """The sum, once it is there."""
        if self.work is not None:
            with self.watched(None):
                self.work.wait()
        return self.vector


class _Head(NamedTuple):
    """What is said of a tensor before it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> Tensor:
        """A tensor of this kind, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Groups:
    """The process groups that a virtual machine's stages talk in."""

    control: Any
    neighbours: dict[tuple[int, Direction], Any]
    sockets: Opened


def make_groups(ranks: Sequence[int], backend: str) -> Groups:
    """Makes the groups of a virtual machine. Every rank of the job calls this for every virtual
    machine, in the same order, whether it is a member or not.
    """
    before = open_sockets()
    control = dist.new_group(list(ranks), backend="gloo")
    neighbours = {}
    if backend == "nccl":
        for left in range(len(ranks) - 1):
            for direction in Direction:
                pair = list(ranks[left : left + 2])
                neighbours[left, direction] = dist.new_group(pair, backend="nccl")
    return Groups(control, neighbours, open_sockets() - before)


class Channels:
    """One stage's connections.

    Args:
        ranks: the global ranks of the virtual machine's stages, in stage order.
        stage: this stage.
        device: where tensors live.
        backend: ``"gloo"`` or ``"nccl"``. Tensors on a GPU go through host memory with gloo.
        watched: the context to communicate in.
        groups: what :func:`make_groups` made for ``ranks``.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        device: torch.device,
        backend: str,
        watched: Watched,
        groups: Groups,
    ) -> None:
        self.ranks = list(ranks)
        self.stage = stage
        self.device = device
        self.backend = backend
        self.watched = watched
        self._staged = backend == "gloo" and device.type != "cpu"
        self._object_sends: list[Sent] = []
        self.control = groups.control
        self._sockets = groups.sockets
        self._neighbours = dict(groups.neighbours)
        # Torch numbers a group's members by their ranks, whatever order they were given in.
        self._members = [sorted(self.ranks).index(rank) for rank in self.ranks]
        self._open_communicators()

    def _open_communicators(self) -> None:
        """Sends one byte over every communicator, from the first stage to the last.

        NCCL makes a communicator at its first use, and both ends wait for each other there: a stage
        that first sends a payload, and one that first posts the receive of a gradient, would wait
        for ever.
        """
        for (left, direction), group in self._neighbours.items():
            if self.stage not in (left, left + 1):
                continue
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            sends = (self.stage == left) == (direction is Direction.PAYLOAD)
            transfer = group.send if sends else group.recv
            neighbour = left + (self.stage == left)
            with self.watched(self.ranks[neighbour]):
                transfer([byte], self._line(neighbour, direction)[1], 0).wait()

    @property
    def num_stages(self) -> int:
        """How many stages the virtual machine has."""
        return len(self.ranks)

    def close(self) -> None:
        """Lets go of the connections; peers that wait on them see an error at once."""
        self._object_sends.clear()
        self._neighbours.clear()
        shut_down(self._sockets)
        self.control = None

    # --- payloads and gradients ---

    def send(
        self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], direction: Direction
    ) -> Sent:
        """Sends tensors to the neighbour that ``direction`` leads to, without waiting."""
        to = self.stage + 1 if direction is Direction.PAYLOAD else self.stage - 1
        sent = Sent(self.watched, self.ranks[to])
        for number, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            if spec.num_bytes == 0:
                continue
            flat = _flat(_laid_out(tensor, spec))
            if self._staged:
                flat = flat.cpu()
            line = self._line(to, direction)
            sent.works.append((self._post_send(flat, to, line, _tag(direction, number)), flat))
        return sent

    def post_receive(self, specs: Sequence[TensorSpec], direction: Direction) -> list[Receipt]:
        """Posts the receives of what the neighbour sends in ``direction``."""
        source = self.stage - 1 if direction is Direction.PAYLOAD else self.stage + 1
        receipts = []
        for number, spec in enumerate(specs):
            buffer = torch.empty_strided(
                spec.shape, spec.stride, dtype=dtype_named(spec.dtype), device=self.device
            )
            flat = _flat(buffer)
            staging = torch.empty_like(flat, device="cpu") if self._staged else None
            work = None
            if spec.num_bytes:
                group, peer = self._line(source, direction)
                with self.watched(self.ranks[source]):
                    work = group.recv(
                        [_bytes(flat if staging is None else staging)],
                        peer,
                        _tag(direction, number),
                    )
            receipts.append(Receipt(buffer, work, self.watched, self.ranks[source], staging))
        return receipts

    def _post_send(self, flat: Tensor, to: int, line: Line, tag: int) -> Any:
        group, peer = line
        # Where the peer is gone already, posting fails.
        with self.watched(self.ranks[to]):
            return group.send([_bytes(flat)], peer, tag)

    def _line(self, neighbour: int, direction: Direction) -> Line:
        if self.backend == "gloo":
            return self.control, self._members[neighbour]
        group = self._neighbours[min(self.stage, neighbour), direction]
        return group, int(self.ranks[neighbour] > self.ranks[self.stage])

    # --- small things, on the CPU ---

    def send_object(self, obj: Any, to: int) -> None:
        """Sends a picklable object to stage ``to``, without waiting."""
        buffer = io.BytesIO()
        pickle.dump(obj, buffer, protocol=pickle.HIGHEST_PROTOCOL)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        first = torch.zeros(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        first[:_HEADER_BYTES].view(torch.int64)[0] = len(data)
        inline = data[:_INLINE_BYTES]
        first[_HEADER_BYTES : _HEADER_BYTES + len(inline)] = inline
        sent = Sent(self.watched, self.ranks[to])
        for part in (first, data[_INLINE_BYTES:]):
            if len(part):
                work = self._post_send(part, to, (self.control, self._members[to]), _OBJECT_TAG)
                sent.works.append((work, part))
        self._object_sends.append(sent)

    def post_object(self, source: int) -> PostedObject:
        """Posts the receive of the next object from stage ``source``, so that it travels while this
        stage computes.
        """
        first = torch.empty(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        with self.watched(self.ranks[source]):
            work = self.control.recv([first], self._members[source], _OBJECT_TAG)
            return PostedObject(first, work, source)

    def receive_object(self, source: int, posted: PostedObject | None = None) -> Any:
        """Waits for an object from stage ``source``, whose receive may be posted already."""
        if posted is None:
            posted = self.post_object(source)
        with self.watched(self.ranks[source]):
            posted.work.wait()
        first = posted.first
        size = int(first[:_HEADER_BYTES].view(torch.int64)[0])
        data = first[_HEADER_BYTES : _HEADER_BYTES + min(size, _INLINE_BYTES)]
        if size > _INLINE_BYTES:
            rest = torch.empty(size - _INLINE_BYTES, dtype=torch.uint8)
            self._receive(rest, source, _OBJECT_TAG)
            data = torch.cat([data, rest])
        return pickle.loads(data.numpy().tobytes())

    def send_tensor(self, tensor: Tensor, to: int) -> None:
        """Sends one tensor to stage ``to`` by way of the CPU, and waits until it is on its way out
        of memory.
        """
        flat = (
            tensor.detach()
            .to("cpu")
            .resolve_conj()
            .resolve_neg()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
        )
        if flat.numel():
            with self.watched(self.ranks[to]):
                dist.send(flat, self.ranks[to], group=self.control, tag=_TENSOR_TAG)

    def receive_tensor(self, like: Tensor, source: int) -> Tensor:
        """Waits for a tensor of the shape and type of ``like``; returns it on the CPU."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        flat = tensor.reshape(-1).view(torch.uint8)
        if flat.numel():
            self._receive(flat, source, _TENSOR_TAG)
        return tensor

    def send_values(self, values: Mapping[Any, Any], to: int) -> None:
        """Sends what is found under some names: tensors, whose shapes the receiver need not know,
        one at a time, and other picklable things. Waits as :meth:`send_tensor` does.
        """
        heads = {
            name: _Head(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        self.send_object(heads, to)
        self.settle()
        for value in values.values():
            if isinstance(value, Tensor):
                self.send_tensor(value, to)

    def receive_values(self, source: int) -> Iterator[tuple[Any, Any]]:
        """Waits for what :meth:`send_values` sends, name by name; tensors are on the CPU. Has to be
        run through to its end.
        """
        for name, head in self.receive_object(source).items():
            if isinstance(head, _Head):
                yield name, self.receive_tensor(head.like(), source)
            else:
                yield name, head

    def _receive(self, buffer: Tensor, source: int, tag: int) -> None:
        with self.watched(self.ranks[source]):
            dist.recv(buffer, self.ranks[source], group=self.control, tag=tag)

    def share_object(self, obj: Any, source: int, posted: PostedObject | None = None) -> Any:
        """Every stage calls this; every stage gets what ``source`` passed.

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
        """Every stage calls this; stage 0 gets what each passed, in stage order, and the others
        ``None``.
        """
        if self.stage:
            self.send_object(obj, 0)
            return None
        return [obj, *(self.receive_object(stage) for stage in range(1, self.num_stages))]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of a CPU vector over the stages, with the same bits on each."""
        if self.num_stages > 1:
            with self.watched(None):
                dist.all_reduce(vector, group=self.control)
        return vector

    def post_sum(self, vector: Tensor) -> PostedSum:
        """Begins what :meth:`sum` does, beside whatever comes next."""
        work = None
        if self.num_stages > 1:
            with self.watched(None):
                work = dist.all_reduce(vector, group=self.control, async_op=True)
        return PostedSum(vector, work, self.watched)

    def gather_int(self, value: int) -> list[int]:
        """Every stage's value, in stage order."""
        if self.num_stages == 1:
            return [value]
        parts = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        with self.watched(None):
            dist.all_gather(parts, torch.tensor([value], dtype=torch.int64), group=self.control)
        return [int(parts[member]) for member in self._members]

    def settle(self) -> None:
        """Waits for the objects that are still under way."""
        sends, self._object_sends = self._object_sends, []
        for sent in sends:
            sent.wait()


def _tag(direction: Direction, number: int) -> int:
    return 2 * number + int(direction)


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a vector, whatever the order of its dimensions."""
    if tensor.is_contiguous():
        return tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _bytes(flat: Tensor) -> Tensor:
    """NCCL does not know every type; gloo copies memory and asks for none."""
    return flat if flat.device.type == "cpu" else flat.reshape(-1).view(torch.uint8)


def _laid_out(tensor: Tensor, spec: TensorSpec) -> Tensor:
    if isinstance(tensor, Placeholder):
        raise LayerError(
            f"A value to be sent was made of one that this stage does not have ({tensor!r})."
            " The step runs code again (in its backward) that depends on another stage's layers:"
            " put that code into one module and name it in `configure_layers()`."
        )
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.stride() == spec.stride and tensor.shape == spec.shape:
        return tensor
    laid_out = torch.empty_strided(
        spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(tensor)
