"""What is in a frame, and what a receiver makes of it."""

from __future__ import annotations

import pytest
import torch

from lightning_pipeshift.runtime.comm.frames import (
    Form,
    frame_of,
    kind_and_size,
    new_frame,
    packed_for_host,
    read_head,
    split,
)
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Message, Place

ROOM_BYTES = 1 << 17
PLACE = Place("layers.3", 7, "train.py:12")


@pytest.mark.parametrize("size", [1, 5000, 18_000, 32_768])
def test_what_arrives_has_memory_of_its_own(size: int) -> None:
    """Who saves a received tensor may compress, or count, all of its memory."""
    sent, key = torch.arange(float(size)), Key(1, 4, 2, Kind.VALUE, 0, 9)
    frame = frame_of(key, PLACE, packed_for_host(sent, ROOM_BYTES))
    landing = new_frame(ROOM_BYTES)
    landing[: frame.numel()] = frame
    kind, form, num_bytes = kind_and_size(landing)
    assert (kind, form, num_bytes) == (Kind.VALUE, Form.IN_FRAME, sent.nbytes)
    header, content = split(landing, num_bytes)
    landing.fill_(255)
    head = read_head(header, 1)
    assert (head.key, head.place) == (key, PLACE)
    found = Message(content, head.strides, head.place, head.is_view).tensor(sent.dtype, (size,))
    assert torch.equal(found, sent)
    assert found.untyped_storage().nbytes() == sent.nbytes
