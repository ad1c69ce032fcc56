"""The frame of a message: which message it is, where in the program it belongs, and its content if
that is small.

A larger content is sent behind the frame, without a copy, or is in memory that both stages reach.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import num_other_uses
from lightning_pipeshift.model.tensors.transfer import Fetch
from lightning_pipeshift.runtime.comm.messages import MOST_DIMS, Key, Kind, Place, packed

# What follows is at a multiple of 64 bytes, as new tensors are.
_HEAD = struct.Struct(f"<2q4b3qQq64s96s{MOST_DIMS}q4x")
# Of the same: the kind, the form, and the number of bytes.
_KIND_AND_FORM = struct.Struct("<16x2b34xq")
_LABEL_BYTES, _LINE_BYTES = 64, 96
# The strides of a tensor that is contiguous, or whose layout does not travel.
_CONTIGUOUS = -1


class Form(enum.IntEnum):
    """Where the content of a message is."""

    NOTHING = 0
    IN_FRAME = 1
    BEHIND = 2
    IN_BUFFER = 3


# By number: faster than `Form(number)`, for every message.
_FORMS, _KINDS = tuple(Form), tuple(Kind)


class Packed(NamedTuple):
    """The content of a message, as it is sent.

    Args:
        form: where the bytes are.
        data: in the frame; of a form that has none there, empty.
        behind: the bytes that are sent behind the frame, on their way to the host.
        num_bytes: how many bytes the receiver gets of it by gloo.
        strides: of the tensor; ``None`` if they are those of a new one.
        is_view: whether something else has the tensor's memory.
    """

    form: Form
    data: Tensor
    behind: Fetch | None = None
    num_bytes: int = 0
    strides: tuple[int, ...] | None = None
    is_view: bool = False


class Head(NamedTuple):
    """The decoded header of a frame. For the fields see :class:`Packed`."""

    key: Key
    place: Place
    form: Form
    num_bytes: int
    strides: tuple[int, ...] | None
    is_view: bool


def new_frame(room_bytes: int) -> Tensor:
    """Returns memory for a frame with so many bytes of content."""
    # Also where user code has set another default device.
    return torch.empty(_HEAD.size + room_bytes, dtype=torch.uint8, device="cpu")


def packed_for_host(content: Tensor | bytes | None, room_bytes: int) -> Packed:
    """Returns the content of a message that goes through host memory.

    Args:
        content: a tensor, bytes, or ``None`` for a gradient that is not defined.
        room_bytes: what is larger is sent behind the frame, as is all that a device has.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    if content is None:
        return Packed(Form.NOTHING, nothing)
    if isinstance(content, bytes):
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else nothing
        strides, is_view = None, False
    else:
        is_view = num_other_uses(content) > 0
        data, strides = packed(content.detach())
    is_on_host = data.device.type == "cpu"
    if data.numel() <= room_bytes * is_on_host:
        data = data if is_on_host else nothing
        return Packed(Form.IN_FRAME, data, None, data.numel(), strides, is_view)
    fetch = Fetch(data, is_kept=False)
    return Packed(Form.BEHIND, nothing, fetch, data.numel(), strides, is_view)


def frame_of(key: Key, place: Place, content: Packed) -> Tensor:
    """Returns the frame of a message, with a copy of what of its content is in the frame."""
    data, strides = content.data, content.strides
    frame = new_frame(data.numel())
    _HEAD.pack_into(
        frame.numpy().data,
        0,
        key.step,
        key.turn,
        key.kind,
        content.form,
        _CONTIGUOUS if strides is None else len(strides),
        content.is_view,
        key.part,
        key.serial,
        key.read_in,
        place.digest,
        content.num_bytes,
        _end_of(place.label, _LABEL_BYTES),
        _end_of(place.line, _LINE_BYTES),
        *((strides or ()) + (0,) * MOST_DIMS)[:MOST_DIMS],
    )
    if data.numel():
        frame[_HEAD.size :] = data
    return frame


def kind_and_size(frame: Tensor) -> tuple[Kind, Form, int]:
    """Returns of a frame what decides what to do with it: its kind, its form, and how many bytes of
    content come by gloo.
    """
    kind, form, num_bytes = _KIND_AND_FORM.unpack_from(frame.numpy().data)
    return _KINDS[kind], _FORMS[form], num_bytes


def split(frame: Tensor, num_bytes: int) -> tuple[bytes, Tensor]:
    """Returns copies of a frame's header, and of the content that is in it. A content must not
    share its memory with anything: who saves it may compress, or count, all of that.
    """
    return frame.numpy()[: _HEAD.size].tobytes(), frame[_HEAD.size : _HEAD.size + num_bytes].clone()


def read_head(header: bytes, source: int) -> Head:
    """Returns a decoded header.

    Args:
        header: of the frame.
        source: the stage that has sent it.
    """
    step, turn, kind, form, num_dims, is_view, part, serial, read_in, *rest = _HEAD.unpack(header)
    digest, num_bytes, label, line, *strides = rest
    key = Key(source, step, turn, _KINDS[kind], part, serial, read_in)
    place = Place(_text(label), digest, _text(line))
    kept = None if num_dims == _CONTIGUOUS else tuple(strides[:num_dims])
    return Head(key, place, _FORMS[form], num_bytes, kept, bool(is_view))


def label_in_frame(label: str) -> str:
    """Returns a place's label as it arrives: its end, if it is long."""
    return _text(_end_of(label, _LABEL_BYTES))


def _end_of(text: str, num_bytes: int) -> bytes:
    """The end of a text that fits into so many bytes."""
    return text.encode()[-num_bytes:].decode(errors="ignore").encode()


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode()
