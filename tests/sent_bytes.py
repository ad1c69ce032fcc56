"""How many bytes a rank really sends to other stages, counted where they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from lightning_pipeshift.runtime.comm.frames import Form, Packed
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd, Written
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Place


def count_bytes() -> Counter[str]:
    """Counts from here on what this process sends of values and their gradients, through memory and
    by gloo, and the buffers that others have to open.
    """
    sent: Counter[str] = Counter()
    write, send = MemoryEnd.write, Mailbox._send_packed

    def written(self: MemoryEnd, tensors: Sequence[Tensor]) -> Written:
        sent["memory"] += sum(tensor.nbytes for tensor in tensors)
        message = write(self, tensors)
        sent["messages"] += 1
        sent["buffers"] += message.opening.handle is not None
        sent["buffers"] -= len(message.opening.gone)
        return message

    def sent_packed(self: Mailbox, to: int, key: Key, place: Place, content: Packed) -> None:
        if key.kind in (Kind.VALUE, Kind.GRADIENT) and content.form is not Form.IN_BUFFER:
            sent["gloo"] += content.num_bytes
        send(self, to, key, place, content)

    MemoryEnd.write = written  # type: ignore[method-assign]
    Mailbox._send_packed = sent_packed  # type: ignore[method-assign]
    return sent
