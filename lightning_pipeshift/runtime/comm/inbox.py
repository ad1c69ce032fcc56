"""Receives the messages of other stages, in a thread for each of these stages.

The threads only receive. Frames are decoded in the thread of the step, when it looks for a message:
a thread that runs much Python code makes the step wait for the interpreter.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.devices.host_memory import pinned_like
from lightning_pipeshift.devices.streams import is_asynchronous, on_this_device
from lightning_pipeshift.runtime.comm.frames import (
    Form,
    kind_and_size,
    new_frame,
    read_head,
    split,
)
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Message, Place
from lightning_pipeshift.runtime.comm.sends import FRAME_TAG, PAYLOAD_TAG
from lightning_pipeshift.runtime.comm.waits import Watched, complete

Received = tuple[int, bytes, Tensor]
"""The stage that has sent a message, its header, and its content."""


class Inbox:
    """The messages that other stages have sent and this stage has not used yet.

    Args:
        group: a gloo group of the virtual machine's ranks.
        members: the group's member for each stage.
        ranks: the global rank of each stage.
        sources: the stages to receive from.
        room_bytes: the most bytes of content in a frame.
        watched: the context to communicate in.
        device: where this stage computes.
        handle: called in the thread of a source with a message that is no program's: its key, its
            place, and its content.
        in_buffer: returns what a message's content is that is in shared memory: called with the
            source and with what the frame says.
    """

    def __init__(
        self,
        group: Any,
        members: Sequence[int],
        ranks: Sequence[int],
        sources: Iterable[int],
        room_bytes: int,
        watched: Watched,
        device: torch.device,
        handle: Callable[[Key, Place, Any], None],
        in_buffer: Callable[[int, Tensor], Tensor],
    ) -> None:
        self._group, self._members, self._ranks = group, members, ranks
        self._watched, self._device = watched, device
        self._handle, self._in_buffer = handle, in_buffer
        self.counts = [0] * len(ranks)
        """How many messages of programs have come from each stage."""
        self._room_bytes = room_bytes
        self.error: BaseException | None = None
        """Of a thread that could not receive, or send."""
        self._came: deque[Received] = deque()
        self._messages: dict[Key, Message] = {}
        # The number of the latest message, by source, step, turn and whether it is a gradient.
        self._latest: dict[tuple[int, ...], int] = {}
        # A signal's handler may save a checkpoint in the middle of it.
        self._decoding = threading.RLock()
        self._arrived = threading.Condition()
        self._num_waiting = 0
        self._threads = [
            threading.Thread(target=on_this_device(partial(self._receive_all, source)), daemon=True)
            for source in sources
        ]

    def start(self) -> None:
        """Begins to receive."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until every source has said that nothing follows."""
        for thread in self._threads:
            thread.join()

    def fail(self, error: BaseException) -> None:
        """Ends all waits, with an error."""
        self.error = self.error or error
        self._wake()

    # --- in the threads ---

    def _receive_all(self, source: int) -> None:
        try:
            # What is sent may be shorter.
            frame = new_frame(self._room_bytes)
            while self._receive(source, frame):
                pass
        except BaseException as error:
            self.fail(error)

    def _receive(self, source: int, frame: Tensor) -> bool:
        self._complete(frame, source, FRAME_TAG)
        kind, form, num_bytes = kind_and_size(frame)
        header, content = split(frame, 0 if form is Form.BEHIND else num_bytes)
        if form is Form.BEHIND:
            content = self._host_memory(num_bytes)
            self._complete(content, source, PAYLOAD_TAG)
        if kind.is_of_program:
            self._came.append((source, header, content))
            # Not before: what counts can be found.
            self.counts[source] += 1
        else:
            key, place, *_ = read_head(header, source)
            self._handle(key, place, content)
        self._wake()
        return kind is not Kind.END

    def _wake(self) -> None:
        # Who begins to wait looks for messages behind this count, so none is missed.
        if self._num_waiting:
            with self._arrived:
                self._arrived.notify_all()

    def _complete(self, buffer: Tensor, source: int, tag: int) -> None:
        with self._watched(self._ranks[source]):
            complete(self._group.recv([buffer], self._members[source], tag))

    def _host_memory(self, num_bytes: int) -> Tensor:
        like = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        if is_asynchronous(self._device):
            # As every thread that is new to a device.
            return on_this_device(partial(pinned_like, like))()
        return torch.empty_like(like, device="cpu")

    # --- in the step ---

    def wait(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition holds, which what comes may change; returns whether it does.

        Args:
            is_there: the condition.
            seconds: how long to wait at most.
        """
        with self._arrived:
            self._num_waiting += 1
            try:
                return self._arrived.wait_for(is_there, seconds)
            finally:
                self._num_waiting -= 1

    def has(self, key: Key) -> bool:
        """Whether a message has come."""
        self._decode()
        return key in self._messages

    def is_past(self, key: Key) -> bool:
        """Whether a message has come that its source sends behind this one: values come by rising
        numbers, gradients by falling ones.
        """
        latest = self._latest.get(_direction(key))
        if latest is None:
            return False
        return latest < key.serial if key.kind is Kind.GRADIENT else latest > key.serial

    def pop(self, key: Key) -> Message | None:
        """Returns a message, which is taken by that; ``None`` if it has not come. One that came
        while something was found that its source sent behind it is there by now.
        """
        self._decode()
        return self._messages.pop(key, None)

    def untaken(self) -> list[tuple[Key, Message]]:
        """The messages that are not taken."""
        self._decode()
        return list(self._messages.items())

    def forget_reads(self, oldest: int) -> None:
        """Drops what was read in runs before one."""
        self._decode()
        for key in [x for x in self._messages if x.kind is Kind.READ and x.read_in < oldest]:
            del self._messages[key]

    def end_run(self, step: int) -> None:
        """No message of a run is awaited any more."""
        self._latest = {at: last for at, last in self._latest.items() if at[1] != step}

    def _decode(self) -> None:
        """Decodes what has come."""
        with self._decoding:
            while self._came:
                source, header, content = self._came.popleft()
                key, place, form, _, strides, is_view = read_head(header, source)
                found: Any = None if form is Form.NOTHING else content
                if form is Form.IN_BUFFER:
                    found = partial(self._in_buffer, source, content)
                if key.kind is not Kind.READ:
                    self._latest[_direction(key)] = key.serial
                elif found is None and key in self._messages:
                    # That there is nothing to read may be said after it has come.
                    continue
                self._messages[key] = Message(found, strides, place, is_view)


def _direction(key: Key) -> tuple[int, ...]:
    is_gradient = key.kind is Kind.GRADIENT
    return key.source, key.step, key.turn, is_gradient, key.part if is_gradient else 0
