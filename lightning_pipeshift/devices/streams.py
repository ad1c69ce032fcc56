"""Streams and events: the order in which a device does what is queued on it.

They are those of ``torch.Stream``, ``torch.Event`` and ``torch.accelerator``, so CUDA, ROCm and XPU
share this code. A CPU computes while it is called: there everything queued is complete at once, and
callers need not ask what kind of device they have.

A thread queues its work on its current stream. That is the compute stream, unless the thread is
inside :func:`side_stream`. Events order the work of one stream with that of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pipeshift.devices import cuda

T = TypeVar("T")


class Event:
    """A point in the work of a stream: behind all that is queued on the current one when the event
    is made. A CPU has reached it at once.

    It holds torch's event and does not inherit from it: torch's ``elapsed_time`` takes no subclass.

    Args:
        device: the stream's.
        is_timed: whether the event's time is wanted.
    """

    handle: Any = "a CPU's"
    """See :class:`.cuda.SharedEvent`, whose part an event of a CPU plays, too."""

    def __init__(self, device: torch.device, is_timed: bool = False) -> None:
        self._device = device
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=is_timed)
        self.record()

    def record(self) -> None:
        """Moves the event behind all work that is queued on the current stream."""
        if self._event is not None:
            self._event.record(torch.accelerator.current_stream(self._device))
        self.seconds = time.perf_counter()
        """When the host came here."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Makes the work that this thread queues from now on run after it. Returns at once."""
        if self._event is not None:
            # Torch's own default is a stream of the thread's current device.
            self._event.wait(torch.accelerator.current_stream(self._device))

    def synchronize(self) -> None:
        """Returns when the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """The milliseconds from this event to a later one. Both were made with ``is_timed``, and
        have been reached.
        """
        if self._event is None or end._event is None:
            return 1000 * (end.seconds - self.seconds)
        return self._event.elapsed_time(end._event)


SharedEvent = cuda.SharedEvent | Event

# Torch hands out the same 32 streams of a GPU in turn: code that takes a new one for each plan or
# copy soon gets one on which other work waits. By device and kind of work.
_side_streams: dict[tuple[torch.device, str], torch.Stream] = {}
# Of the simulated devices: what a function needs, to run in another thread.
_for_threads: list[Callable[[Callable[[], Any]], Callable[[], Any]]] = []


@contextmanager
def simulating(for_threads: Callable[[Callable[[], Any]], Callable[[], Any]]) -> Iterator[None]:
    """Context in which torch's streams and events are those of a simulation: see :mod:`.simulated`.

    Args:
        for_threads: wraps a function that another thread is to call.
    """
    _side_streams.clear()
    _for_threads.append(for_threads)
    try:
        yield
    finally:
        _for_threads.remove(for_threads)
        _side_streams.clear()


def is_asynchronous(device: torch.device) -> bool:
    """Whether a call returns before the device has done the work."""
    return device.type != "cpu"


def record_event(device: torch.device, is_timed: bool = False) -> Event:
    """An event after all work that has been queued on the current stream.

    Args:
        device: the stream's.
        is_timed: whether the event's time is wanted: see :func:`elapsed_seconds`.
    """
    return Event(device, is_timed)


def shared_event(device: torch.device, handle: Any = None) -> SharedEvent:
    """A new event for which other processes on this host can wait; or one of theirs.

    Args:
        device: this process's.
        handle: that of the other process's event.

    Raises:
        RuntimeError: events of this device cannot be shared.
    """
    return cuda.SharedEvent(device, handle) if is_asynchronous(device) else Event(device)


def start_of_clock(device: torch.device) -> tuple[Event, float]:
    """Returns an event, and the reading of ``time.perf_counter`` when the device reached it.

    Args:
        device: what is queued on it is waited for; with nothing queued, the device reaches an event
            when the host records it.
    """
    synchronize(device)
    event = record_event(device, is_timed=True)
    return event, event.seconds


def elapsed_seconds(begin: Event, end: Event) -> float | None:
    """The time between two events; ``None`` while the device has not reached both."""
    return begin.elapsed_time(end) / 1000 if end.query() and begin.query() else None


def side_stream(device: torch.device, work: str) -> AbstractContextManager[None]:
    """Context in which this thread queues its work on a stream beside the compute.

    Nothing orders the work with that of other streams except events. Memory that is allocated here
    belongs to this stream: once it is free, the stream's next work may get it at once.

    Args:
        device: the stream's.
        work: the name of a kind of work, which has one stream in this process.
    """
    return stream_beside(device, work) if is_asynchronous(device) else nullcontext()


@contextmanager
def stream_beside(device: torch.device, work: str) -> Iterator[None]:
    """Does the work of :func:`side_stream` for an accelerator."""
    stream = _side_streams.get((device, work))
    if stream is None:
        # Of two threads that come here at once, both use the stream of the first.
        stream = _side_streams.setdefault((device, work), torch.Stream(device))
    # Not `with stream`: a stream object can be entered only once at a time, and several threads use
    # this one.
    before = torch.accelerator.current_stream(device)
    with torch.accelerator.device_index(before.device_index):
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def keep_for_stream(tensor: Tensor) -> None:
    """Lets a tensor's memory, when it is freed, be reused only after the work that is queued on the
    current stream by then. For memory that was allocated on another stream.
    """
    if is_asynchronous(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def synchronize(device: torch.device) -> None:
    """Returns when the device has done all work that was queued."""
    if is_asynchronous(device):
        torch.accelerator.synchronize(device)


def pin(memory: Tensor, device: torch.device) -> Callable[[], None]:
    """Pins host memory for copies of a device that run beside its compute; returns what undoes it.

    Raises:
        RuntimeError: it cannot be pinned.
    """
    if not is_asynchronous(device):
        raise RuntimeError("only memory that an accelerator copies from or to can be pinned")
    return cuda.pin(memory)


def on_this_device(function: Callable[[], T]) -> Callable[[], T]:
    """Wraps a function so that it runs with the current GPU of the calling thread: a new thread
    starts with the first GPU, and would create a context of some hundred megabytes there.
    """
    for wrap in list(_for_threads):
        function = wrap(function)
    kind = initialized_accelerator()
    if kind is None:
        return function
    return on_device(torch.device(kind, torch.accelerator.current_device_index()), function)


def on_device(device: torch.device, function: Callable[[], T]) -> Callable[[], T]:
    """Wraps a function so that it runs with a GPU as the current one."""

    def call() -> T:
        torch.accelerator.set_device_index(device)
        return function()

    return call


def initialized_accelerator() -> str | None:
    """The type of the accelerator that this process has used; ``None`` if it has used none."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    # The module of some accelerators (MPS) cannot say.
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    return kind.type if is_initialized is not None and is_initialized() else None
