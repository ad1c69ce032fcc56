"""Contents of messages in device memory that two stages share: see :mod:`.memory_link`.

The frame of such a message says in which buffer the content is; the receiver copies it from there,
and answers, so that the sender may use the buffer again.
"""

from __future__ import annotations

import pickle
from collections import deque

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import num_other_uses
from lightning_pipeshift.runtime.comm.frames import Form, Packed
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd, Taken, Written
from lightning_pipeshift.runtime.comm.messages import packed, unpickled


class SharedBuffers:
    """A stage's buffers for all other stages, and what it has opened of theirs.

    Args:
        device: where this stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # By stage, and by the size of the content: a buffer is at most twice as large.
        self._ends: dict[tuple[int, int], MemoryEnd] = {}
        self._answers: deque[tuple[MemoryEnd, Taken]] = deque()

    def write(self, to: int, content: Tensor) -> Packed:
        """Returns the content of a message that another stage copies from a buffer of this one.
        Work that is queued from now on may change the tensor.

        Args:
            to: the stage.
            content: the tensor.

        Raises:
            RuntimeError: memory of this device cannot be shared.
        """
        self._reuse()
        is_view = num_other_uses(content) > 0
        data, strides = packed(content.detach())
        size = data.numel().bit_length()
        said = pickle.dumps((size, data.numel(), self._end(to, size).write([data])))
        frame = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return Packed(Form.IN_BUFFER, frame, None, frame.numel(), strides, is_view)

    def read(self, source: int, said: Tensor) -> tuple[Tensor, bytes]:
        """Returns the bytes that another stage has written, in this device's memory, and the answer
        to it.

        Args:
            source: the stage.
            said: what its frame says.

        Raises:
            OSError, RuntimeError: its memory cannot be reached from here.
        """
        message: tuple[int, int, Written] = unpickled(said)
        size, num_bytes, written = message
        found = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        answer = self._end(source, size).take(written, [found])
        return found, pickle.dumps((size, answer))

    def note_answer(self, source: int, said: Tensor) -> None:
        """Notes the answer of a stage to what this one has written; called in any thread."""
        size, answer = unpickled(said)
        self._answers.append((self._ends[source, size], answer))

    def _reuse(self) -> None:
        """Makes buffers free that other stages have copied from."""
        while self._answers:
            end, answer = self._answers.popleft()
            end.give_back(answer)

    def _end(self, stage: int, size: int) -> MemoryEnd:
        end = self._ends.get((stage, size))
        if end is None:
            end = self._ends[stage, size] = MemoryEnd(self.device)
        return end

    def close(self) -> None:
        """Destroys all events. Every message has been answered, or the run ends with an error."""
        self._reuse()
        for end in self._ends.values():
            end.close()
