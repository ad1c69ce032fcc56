"""Copies between a device's memory and other memory, concurrently with the compute.

On a GPU they run on side streams, one for each direction, and events order them with the compute;
on a CPU, which stands for a device in tests and trains small models, the same copies are made by a
thread for each direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch

from lightning_pipeshift.devices.streams import Event, is_asynchronous, record_event, side_stream
from lightning_pipeshift.runtime.comm.threads import InOrder

Done = Callable[[], None]


class Ticket(Protocol):
    """A copy in progress."""

    def is_done(self) -> bool:
        """Whether the copy is complete."""

    def wait(self) -> None:
        """Makes the compute wait until the copy is complete."""

    def precede(self) -> None:
        """Makes another copy, whose work calls this, wait until this one is complete."""


class Copier:
    """Makes copies in the order in which they are submitted, in each direction."""

    takes_processor = True
    """Whether its copies need the processor that computes."""

    def out(self, work: Callable[[], Any], done: Done) -> Ticket:
        """Copies from the device, after the compute submitted so far.

        Args:
            work: copies from the device.
            done: called afterwards, possibly in another thread, by copiers that use threads; with
                others the caller checks the ticket.
        """
        return self._submit("out", work, done)

    def back(self, work: Callable[[], Any], done: Done) -> Ticket:
        """As :meth:`out`, for copies to the device."""
        return self._submit("back", work, done)

    def _submit(self, way: str, work: Callable[[], Any], done: Done) -> Ticket:
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until all copies so far are complete, unless the copies themselves keep their
        memory alive.
        """

    def close(self) -> None:
        """Closes the copier when the copies in progress are complete."""


class ThreadTicket:
    """A ticket for work of one or more threads.

    Args:
        futures: of their calls.
    """

    def __init__(self, *futures: Future[Any]) -> None:
        self._futures = futures

    def is_done(self) -> bool:
        """See :class:`Ticket`."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """See :class:`Ticket`."""
        for future in self._futures:
            future.result()

    precede = wait


class ThreadCopier(Copier):
    """Copies by threads, whose work holds its tensors.

    Args:
        on_error: called in a thread that has failed.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._threads = {way: InOrder(f"swap {way}", on_error) for way in ("out", "back")}

    def _submit(self, way: str, work: Callable[[], Any], done: Done) -> Ticket:
        def run() -> None:
            with torch.no_grad():
                work()

        future = self._threads[way].submit(run)
        # Called in the thread itself, before or after threads that wait for the future continue:
        # both orders are correct.
        future.add_done_callback(lambda done_one: done() if not done_one.exception() else None)
        return ThreadTicket(future)

    def close(self) -> None:
        """See :class:`Copier`."""
        for thread in self._threads.values():
            thread.close()


class _StreamTicket:
    """A ticket for work of a stream.

    Args:
        event: recorded after the work.
        let_go: called when memory that the work uses may be reused.
    """

    def __init__(self, event: Event, let_go: Callable[[], Any]) -> None:
        self._event = event
        self._let_go = let_go

    def is_done(self) -> bool:
        is_done = self._event.query()
        if is_done:
            self._let_go()
        return is_done

    def wait(self) -> None:
        self._event.wait()
        # The compute reuses the memory after the copy.
        self._let_go()

    def precede(self) -> None:
        self._event.wait()


class StreamCopier(Copier):
    """Copies on side streams of a GPU, from any thread whose current stream is the compute's.

    Args:
        device: the GPU.
    """

    takes_processor = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Copies in progress of each stream, in its order, with all tensors that they read and
        # write: the allocator would give a tensor without references (a prefetch that is no longer
        # needed) to the compute at once.
        self._under_way: dict[str, dict[int, tuple[Event, Callable[[], Any]]]] = {
            "out": {},
            "back": {},
        }
        self._numbers = itertools.count()

    def _submit(self, way: str, work: Callable[[], Any], done: Done) -> Ticket:
        # At that point the source has been computed, and the target is no longer in use.
        is_ready = record_event(self._device)
        with side_stream(self._device, way), torch.no_grad():
            is_ready.wait()
            work()
            event = record_event(self._device)
        for one_after_the_other in self._under_way.values():
            for number, (earlier, _) in list(one_after_the_other.items()):
                # Those behind it are not complete either. Asking all of them each time would take
                # the host longer, the further the device is behind it.
                if not earlier.query():
                    break
                one_after_the_other.pop(number, None)
        # Several threads submit copies.
        number, under_way = next(self._numbers), self._under_way[way]
        under_way[number] = event, work
        return _StreamTicket(event, partial(under_way.pop, number, None))

    def finish(self) -> None:
        """See :class:`Copier`."""
        for way in self._under_way:
            with side_stream(self._device, way):
                record_event(self._device).synchronize()

    def close(self) -> None:
        """See :class:`Copier`."""
        self.finish()
        for under_way in self._under_way.values():
            under_way.clear()


def nothing() -> None:
    """The callback of copies whose end needs no handling; or work, to wait for all before it."""


def copier_of(
    device: torch.device, on_error: Callable[[BaseException], None] | None = None
) -> Copier:
    """The copier for a device."""
    return StreamCopier(device) if is_asynchronous(device) else ThreadCopier(on_error)
