"""A lane sends objects, and tensors through host memory, between any two members of a process
group.

Values go through the mailbox; everything else (results, plans, parts of checkpoints,
layers that move) is sent through a lane.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.runtime.comm.blocks import blocks_of, send_blocks
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.comm.turns import Turns, Urgency
from lightning_pipeshift.runtime.comm.waits import Watched, complete

# How often a rank that waits for a collective checks whether the run has failed.
_LOOKS_EVERY = timedelta(seconds=0.5)

_FIRST_TAG = 1 << 20
_HEADER_BYTES = 8
# The size of an object's first message: a step's usual report needs no second one.
_INLINE_BYTES = 4096
_SMALL_BYTES = 1024


class Subject(IntEnum):
    """The purpose of a lane's messages. Lanes of one group share its connections; each purpose has
    tags of its own, so a lane receives only messages of its own purpose.
    """

    REPORTS = 0
    """Results, plans, and all else that stages tell each other in between."""
    MOVES = 1
    """Layers that move."""
    RECEIPTS = 2
    """That they have arrived: two stages may each get layers of the other."""
    LENT = 3
    """Blocks of saved tensors on their way to a stage that lends memory."""
    RETURNED = 4
    """Those blocks on their way back, with requests for blocks in the opposite direction."""
    ANSWERS = 5
    """Of lenders, to announcements of blocks."""
    MEASUREMENTS = 6
    """Made apart from what is sent in steps."""
    RECORDS = 7
    """Of a timeline."""
    PINGS = 8
    """Between the clocks of a timeline's ranks."""


def finish(work: Any, watched: Watched) -> None:
    """Waits for a collective of gloo.

    gloo may lose a collective whose connections are shut down meanwhile, and reports nothing. So
    this waits in short intervals, and calls ``watched`` between them.
    """
    while True:
        with watched(None):
            try:
                work.wait(_LOOKS_EVERY)
                return
            except RuntimeError:
                if work.is_completed():
                    # Since the interval ended, perhaps: then this was no error. If it failed, it
                    # raises its own error again.
                    work.wait()
                    return


def gathered(
    obj: Any, group: Any, watched: Watched, posted: Callable[[Any], object] = lambda _: None
) -> list[Any]:
    """Returns the object that each member of a group passed, in the order of the members. Every
    member calls this.

    Args:
        obj: picklable.
        group: a gloo group.
        watched: the context to communicate in.
        posted: is told of each operation that has begun.
    """

    def from_all(mine: Tensor) -> list[Tensor]:
        parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        with watched(None):
            work = dist.all_gather(parts, mine, group=group, async_op=True)
        posted(work)
        finish(work, watched)
        return parts

    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = from_all(torch.tensor([data.numel()]))
    longest = max(int(size) for size in sizes)
    parts = from_all(torch.cat([data, data.new_zeros(longest - data.numel())]))
    return [
        pickle.loads(part[: int(size)].numpy().tobytes())
        for part, size in zip(parts, sizes, strict=True)
    ]


@dataclass
class Sent:
    """A send in progress; keeps the tensor alive.

    Args:
        watched: the context to communicate in.
        peer: the rank that it is sent to.
        works: the posted operations.
    """

    watched: Watched
    peer: int
    works: list[tuple[Any, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the tensors may be reused."""
        with self.watched(self.peer):
            for work, _ in self.works:
                complete(work)
        self.works.clear()


class _Head(NamedTuple):
    """A tensor's description, sent before the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]

    def like(self) -> Tensor:
        """A tensor of this kind, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Pickler(pickle.Pickler):
    """Writes small tensors in host memory as their bytes: torch writes a zip file for each, which
    takes far longer than sending it.
    """

    def reducer_override(self, obj: Any) -> Any:
        is_small = type(obj) is Tensor and obj.device.type == "cpu" and obj.nbytes <= _SMALL_BYTES
        if not is_small or obj.layout is not torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_conj() or obj.is_neg() or obj.is_quantized:
            return NotImplemented
        data = obj.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _unpickled, (data, obj.dtype, tuple(obj.shape))


def _unpickled(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@dataclass(frozen=True)
class Paced:
    """When the blocks of large tensors are sent.

    Args:
        turns: of this rank's large messages.
        urgency: of the blocks.
    """

    turns: Turns
    urgency: Urgency


class Lane:
    """One stage's end of a gloo group.

    Args:
        ranks: the global ranks of the stages, in stage order.
        stage: this stage.
        control: the process group.
        watched: the context to communicate in.
        subject: of its messages.
        paced: if given, a tensor that :meth:`send_tensor` sends leaves in blocks, each when it is
            its turn. Both ends have one, or none has.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        control: Any,
        watched: Watched,
        subject: Subject = Subject.REPORTS,
        paced: Paced | None = None,
    ) -> None:
        self.control = control
        self.watched = watched
        self._paced = paced
        self._object_sends: list[Sent] = []
        self._object_tag = _FIRST_TAG + 2 * subject
        self._tensor_tag = self._object_tag + 1
        self.number_stages(ranks, stage)

    def number_stages(self, ranks: Sequence[int], stage: int) -> None:
        """Sets which rank is which stage. What is under way stays with the ranks that it is for."""
        self.ranks = list(ranks)
        self.stage = stage
        # Torch numbers a group's members by their ranks, whatever order they were given in.
        self._members = [sorted(self.ranks).index(rank) for rank in self.ranks]

    @property
    def num_stages(self) -> int:
        """How many stages the virtual machine has."""
        return len(self.ranks)

    def _post_send(self, data: Tensor, to: int, tag: int) -> Any:
        # Posting fails if the peer has already ended. The group's own method: torch's function
        # around it takes longer than the sending.
        with self.watched(self.ranks[to]):
            return self.control.send([data], self._members[to], tag)

    def send_object(self, obj: Any, to: int) -> None:
        """Sends a picklable object to stage ``to``, without waiting."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        first = torch.zeros(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        first[:_HEADER_BYTES].view(torch.int64)[0] = len(data)
        inline = data[:_INLINE_BYTES]
        first[_HEADER_BYTES : _HEADER_BYTES + len(inline)] = inline
        sent = Sent(self.watched, self.ranks[to])
        for part in (first, data[_INLINE_BYTES:]):
            if len(part):
                work = self._post_send(part, to, self._object_tag)
                sent.works.append((work, part))
        self._object_sends.append(sent)

    def receive_object(self, source: int) -> Any:
        """Waits for an object from stage ``source``."""
        first = torch.empty(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        self._receive(first, source, self._object_tag)
        size = int(first[:_HEADER_BYTES].view(torch.int64)[0])
        data = first[_HEADER_BYTES : _HEADER_BYTES + min(size, _INLINE_BYTES)]
        if size > _INLINE_BYTES:
            rest = torch.empty(size - _INLINE_BYTES, dtype=torch.uint8)
            self._receive(rest, source, self._object_tag)
            data = torch.cat([data, rest])
        return pickle.loads(data.numpy().tobytes())

    def send_tensor(self, tensor: Tensor, to: int) -> None:
        """Sends one tensor to stage ``to`` through host memory, and waits until its memory may be
        reused.
        """
        if self._paced is None:
            self._post_tensor(tensor, to).wait()
            return
        send_blocks(
            _in_host(tensor),
            lambda block: self.control.send([block], self._members[to], self._tensor_tag),
            self._paced.turns,
            self.ranks[to],
            self._paced.urgency,
            self.watched,
        )

    def _post_tensor(self, tensor: Tensor, to: int) -> Sent:
        sent = Sent(self.watched, self.ranks[to])
        flat = _in_host(tensor)
        if flat.numel():
            work = self._post_send(flat, to, self._tensor_tag)
            sent.works.append((work, flat))
        return sent

    def receive_tensor(self, like: Tensor, source: int) -> Tensor:
        """Waits for a tensor of the shape, type and layout of ``like``; returns it on the CPU."""
        tensor = host_buffer(tuple(like.shape), like.dtype)
        self.receive_into(tensor, source)
        stride = layout_of(like)
        # Kernels may add up in another order for another layout.
        is_same = tensor.stride() == stride
        return tensor if is_same else tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)

    def receive_into(self, tensor: Tensor, source: int) -> None:
        """Waits for a tensor, and receives it into a contiguous tensor on the CPU."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        if self._paced is not None:
            with self.watched(self.ranks[source]):
                works = [
                    self.control.recv([block], self._members[source], self._tensor_tag)
                    for block in blocks_of(flat)
                ]
                for work in works:
                    complete(work)
        elif flat.numel():
            self._receive(flat, source, self._tensor_tag)

    def send_values(self, values: Mapping[Any, Any], to: int) -> None:
        """Sends named values: tensors, whose shapes the receiver need not know, one at a time, and
        other picklable objects. Waits as :meth:`send_tensor` does.
        """
        self.send_object(_heads(values), to)
        self.settle()
        for value in values.values():
            if isinstance(value, Tensor):
                self.send_tensor(value, to)

    def receive_values(self, source: int) -> Iterator[tuple[Any, Any]]:
        """Yields what :meth:`send_values` sends, name by name; tensors are on the CPU. The caller
        has to exhaust the iterator.
        """
        heads = self.receive_object(source)
        if not isinstance(heads, dict):
            raise StageFailedError(
                f"Rank {self.ranks[source]} is elsewhere in the program: this rank collects values"
                f" of all stages, and got a {type(heads).__name__} instead. Every rank has to call"
                " `save_checkpoint` and the like, not only `if trainer.is_global_zero`."
            )
        for name, head in heads.items():
            if isinstance(head, _Head):
                yield name, self.receive_tensor(head.like(), source)
            else:
                yield name, head

    def _receive(self, buffer: Tensor, source: int, tag: int) -> None:
        with self.watched(self.ranks[source]):
            complete(self.control.recv([buffer], self._members[source], tag))

    def release(self) -> None:
        """Lets go of the group, and of what is being sent. The lane is not used any more."""
        self._object_sends.clear()
        self.control = None

    def settle(self, all_but: int = 0) -> None:
        """Waits for the sends of objects, but not for the last ``all_but`` of them."""
        while len(self._object_sends) > all_but:
            self._object_sends.pop(0).wait()


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy of a tensor."""
    shape, stride = tensor.shape, tensor.stride()
    if tensor.is_contiguous():
        return stride
    plain = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return torch.empty_like(plain).stride()


def _in_host(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in host memory."""
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    return values.contiguous().reshape(-1).view(torch.uint8)


def _heads(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values, with descriptions in place of tensors."""
    return {
        name: _Head(tuple(value.shape), value.dtype, layout_of(value))
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }
