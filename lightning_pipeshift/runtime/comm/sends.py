"""Messages on their way to other stages: their memory is kept, and must not change, until gloo has
sent it.

No step waits for a device to send. A payload of a device is copied to the host, and a thread waits
until it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.devices.streams import is_asynchronous
from lightning_pipeshift.model.tensors.transfer import Fetch
from lightning_pipeshift.runtime.comm.messages import Kind
from lightning_pipeshift.runtime.comm.threads import InOrder
from lightning_pipeshift.runtime.comm.waits import Watched, complete

FRAME_TAG, PAYLOAD_TAG = (1 << 22), (1 << 22) + 1


class Sends:
    """Sends a stage's messages by gloo, and keeps their memory until they have been sent.

    Args:
        group: a gloo group of the virtual machine's ranks.
        members: the group's member for each stage.
        ranks: the global rank of each stage.
        watched: the context to communicate in.
        device: where this stage computes.
        on_error: called in a thread that could not send.
    """

    def __init__(
        self,
        group: Any,
        members: Sequence[int],
        ranks: Sequence[int],
        watched: Watched,
        device: torch.device,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.device = device
        self.counts = [0] * len(ranks)
        """How many messages of the program were sent to each stage."""
        self._group, self._members, self._ranks = group, members, ranks
        self._watched = watched
        self._lock = threading.Lock()
        self._under_way: list[tuple[Any, Tensor, int]] = []
        # What takes much memory is let go of when it has been sent; a thread waits for that.
        self._release = InOrder("sent payloads", on_error)
        self._large: list[tuple[Kind, Future[None]]] = []
        # Payloads leave in the order of their frames; another thread waits for the device.
        self._staging = InOrder("payloads of a device", on_error)

    def send(self, to: int, kind: Kind, frame: Tensor, behind: Fetch | None) -> None:
        """Sends a message without waiting.

        Args:
            to: the stage.
            kind: of the message.
            frame: of the message; kept until the next flush.
            behind: the bytes that follow the frame, on their way to the host.
        """
        with self._lock:
            if kind.is_of_program:
                self.counts[to] += 1
            self._under_way.append((self._post(frame, to, FRAME_TAG), frame, to))
            if behind is not None:
                self._send_behind(to, kind, behind)

    def _send_behind(self, to: int, kind: Kind, fetch: Fetch) -> None:
        if is_asynchronous(self.device):
            self._staging.submit(partial(self._post_behind, to, fetch))
        else:
            self._large = [one for one in self._large if not one[1].done()]
            self._large.append((kind, self._post_behind(to, fetch)))

    def _post_behind(self, to: int, fetch: Fetch) -> Future[None]:
        data = fetch.wait()
        sent = self._post(data, to, PAYLOAD_TAG), data, to
        return self._release.submit(partial(self._complete, sent))

    def _post(self, data: Tensor, to: int, tag: int) -> Any:
        with self._watched(self._ranks[to]):
            return self._group.send([data], self._members[to], tag)

    def _complete(self, sent: tuple[Any, Tensor, int]) -> None:
        work, _, to = sent
        with self._watched(self._ranks[to]):
            complete(work)

    def await_large(self, kind: Kind, all_but: int = 0) -> None:
        """Waits until contents that follow their frames have been sent, and so take no memory.

        Args:
            kind: of their messages.
            all_but: so many, the latest ones, may still be on their way.
        """
        # Not while the lock is held: threads that receive send answers, and a send is over when
        # another stage has received.
        with self._lock:
            under_way = [sent for each, sent in self._large if each is kind]
        for sent in under_way[: max(0, len(under_way) - all_but)]:
            sent.result()

    def flush(self, all_but: int = 0) -> None:
        """Waits until everything has been sent: its memory may change then.

        Args:
            all_but: so many messages, the latest ones, may still be on their way.
        """
        with self._lock:
            end = max(0, len(self._under_way) - all_but)
            done, self._under_way = self._under_way[:end], self._under_way[end:]
            large, self._large = ([], self._large) if all_but else (self._large, [])
        for sent in done:
            self._complete(sent)
        for _, future in large:
            future.result()

    def close(self, check: Callable[[], None]) -> None:
        """Ends the threads, when they have sent everything. Raises what they could not do.

        Args:
            check: called in each thread behind all else; raises an error if there was one.
        """
        for line in (self._staging, self._release):
            line.submit(check).result()
            line.close()
            # A run that is over leaves no thread behind.
            line.join()
