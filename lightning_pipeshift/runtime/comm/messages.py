"""The messages between the stages of a virtual machine.

Every message says which value, gradient or read it is, which operation of the program it belongs
to, and from which line of the user's code it was sent.
"""

from __future__ import annotations

import enum
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.tensors.transfer import to_device

_HOST = torch.device("cpu")
MOST_DIMS = 12
"""A tensor with more dimensions travels as a contiguous one."""

ADVICE = (
    "In a step every rank has to run the same operations and layers, with the same numbers, random"
    " draws and tensors: operations on values and calls of layers go in front of `if"
    " trainer.is_global_zero`. What only reads values (`loss.item()`, a print, `self.log` of a"
    " value) may be behind it."
)


class Kind(enum.IntEnum):
    """The kind of a message, by its content."""

    VALUE = 0
    READ = 1
    GRADIENT = 2
    WAIT = 3
    END = 4
    ASK = 5
    TOLD = 6
    PASSED = 7
    TAKEN = 8
    LABELLED = 9

    @property
    def is_of_program(self) -> bool:
        """Whether a step may wait for it: others are between the mailboxes."""
        return self not in _BETWEEN_MAILBOXES


_BETWEEN_MAILBOXES = frozenset({Kind.WAIT, Kind.END, Kind.ASK, Kind.PASSED, Kind.TAKEN})


class Key(NamedTuple):
    """Which message it is, on its way from one stage to another.

    Args:
        source: the stage that sends it.
        step: the number of the run of a schedule.
        turn: of the microbatch in it.
        kind: what it carries.
        part: how many backwards of the microbatch were over when its operation ran; of a read, how
            often the value was written to.
        serial: its number in the microbatch's program; of a read, the value's.
        read_in: of a read, the run in which the value is read, which may be later than its own.
    """

    source: int
    step: int
    turn: int
    kind: Kind
    part: int
    serial: int
    read_in: int = 0


class Place(NamedTuple):
    """Where in the program a message belongs.

    Args:
        label: the operation or layer.
        digest: of all operations before it in the microbatch.
        line: the user's file and line.
    """

    label: str
    digest: int
    line: str


def unpickled(data: Tensor) -> Any:
    """Returns the object whose pickle a tensor in host memory holds."""
    return pickle.loads(data.numpy().tobytes())


class Message(NamedTuple):
    """A message that was received.

    Args:
        data: the bytes, in the order in which they lie in memory: in host memory, or what brings
            them to this stage's device, once; ``None`` for a gradient that is not defined.
        strides: of the tensor; ``None`` if they are those of a new one.
        place: the sender's.
        is_view: whether something else had the tensor's memory. If not, autograd adds to a gradient
            in place, and the sum has its layout.
    """

    data: Tensor | Callable[[], Tensor] | None
    strides: tuple[int, ...] | None
    place: Place
    is_view: bool = False

    @property
    def content(self) -> Any:
        """The object whose pickle was sent."""
        assert isinstance(self.data, Tensor)
        return unpickled(self.data)

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], device: torch.device = _HOST
    ) -> Tensor:
        """The bytes as a tensor on a device, with the layout that it had. Nobody waits for the copy
        to the device: work that is queued from now on finds it complete.

        Raises:
            LayerError: they are of a tensor of another size.
        """
        assert self.data is not None
        data = self.data if isinstance(self.data, Tensor) else self.data()
        if self.strides is None and data.numel() != dtype.itemsize * math.prod(shape):
            raise LayerError(
                "The ranks run different programs: another rank has sent a value of another size"
                f" than {tuple(shape)}, {dtype}, for `{self.place.label}` ({self.place.line})."
                f" {ADVICE}"
            )
        flat: Tensor = to_device(data, device).view(dtype)
        if self.strides is None:
            return flat.view(tuple(shape))
        order = _dims_in_memory(shape, self.strides)
        found = torch.empty_strided(tuple(shape), self.strides, dtype=dtype, device=device)
        _core(found, order).copy_(flat.view([shape[dim] for dim in order]))
        # Not `view_as`: that gives a dimension of size 1 another stride.
        return torch.ops.aten.alias(found) if self.is_view else found


def _dims_in_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions that have bytes of their own, by falling stride."""
    dims = [dim for dim, size in enumerate(shape) if size > 1 and strides[dim]]
    return sorted(dims, key=lambda dim: -strides[dim])


def _core(tensor: Tensor, order: list[int]) -> Tensor:
    """A view of a tensor's bytes in the order in which they lie in memory."""
    kept = sorted(order)
    view = tensor[tuple(slice(None) if dim in order else 0 for dim in range(tensor.dim()))]
    return view.permute([kept.index(dim) for dim in order])


def packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """A tensor's bytes, where they are, and its strides if those of a new one are others."""
    strides, usual = None, [1]
    for size in reversed(tensor.shape[1:]):
        usual.insert(0, usual[0] * size)
    # `is_contiguous` does not tell: the stride of a dimension of size 1 decides which kernel runs.
    if tensor.stride() != tuple(usual) and 0 < tensor.dim() <= MOST_DIMS and tensor.numel():
        strides = tensor.stride()
        tensor = _core(tensor, _dims_in_memory(tensor.shape, strides))
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8), strides
