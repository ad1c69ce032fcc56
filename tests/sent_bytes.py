"""How many bytes a rank really sends to other stages, counted where they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_pipeshift.runtime.comm import channels
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd, Written


def count_bytes() -> Counter[str]:
    """Counts from here on what this process sends of payloads, their gradients and those of shared
    parameters, through memory and by gloo, and the buffers that others have to open.
    """
    sent: Counter[str] = Counter()
    post, write = Lane._post_send, MemoryEnd.write

    def posted(self: Lane, flat: Tensor, to: int, line: Any, tag: int) -> Any:
        if tag < channels._HEADER_TAG:
            sent["gloo"] += flat.nbytes
        return post(self, flat, to, line, tag)

    def written(self: MemoryEnd, tensors: Sequence[Tensor]) -> Written:
        sent["memory"] += sum(tensor.nbytes for tensor in tensors)
        message = write(self, tensors)
        sent["messages"] += 1
        sent["buffers"] += message.opening.handle is not None
        sent["buffers"] -= len(message.opening.gone)
        return message

    Lane._post_send, MemoryEnd.write = posted, written  # type: ignore[method-assign]
    return sent
