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
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_pipeshift.devices import cuda

T = TypeVar("T")


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def wait(self) -> None:
        """Makes the work that this thread queues from now on run after it. Returns at once."""

    def synchronize(self) -> None:
        """Returns when the device has reached it."""

    def elapsed_time(self, end: Any) -> float:
        """The milliseconds from this event to a later one. Both were recorded with ``is_timed``,
        and have been reached.
        """


class SharedEvent(Protocol):
    """An event for which other processes on this host can wait. It is recorded again and again:
    between two records, whoever waits for it has to say that its wait is queued.
    """

    handle: Any
    """Picklable: opens the event in another process. An opened event has none."""

    def record(self) -> None:
        """Moves the event behind all work that is queued on the current stream."""

    def wait(self) -> None:
        """Makes the work that this thread queues from now on run after the event as it was recorded
        last. Returns at once.
        """


class HostEvent:
    """An event of a CPU, which has been reached when it is recorded."""

    handle: Any = "a CPU's"

    def __init__(self) -> None:
        self.record()

    def record(self) -> None:
        """See :class:`SharedEvent`."""
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """See :class:`Event`."""
        return True

    def wait(self) -> None:
        """See :class:`Event`."""

    def synchronize(self) -> None:
        """See :class:`Event`."""

    def elapsed_time(self, end: HostEvent) -> float:
        """See :class:`Event`."""
        return 1000 * (end.seconds - self.seconds)


class Host:
    """A CPU."""

    is_asynchronous = False

    def record_event(self, is_timed: bool) -> Event:
        """See :func:`record_event`."""
        return HostEvent()

    def shared_event(self, handle: Any) -> SharedEvent:
        """See :class:`Device`."""
        return HostEvent()

    def side_stream(self, work: str) -> AbstractContextManager[None]:
        """See :func:`side_stream`."""
        return nullcontext()

    def keep_for_stream(self, tensor: Tensor) -> None:
        """See :func:`keep_for_stream`."""

    def synchronize(self) -> None:
        """See :func:`synchronize`."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """See :func:`pin`."""
        raise RuntimeError("only memory that an accelerator copies from or to can be pinned")


class AcceleratorEvent:
    """An event of an accelerator, which is recorded on the current stream at once.

    It holds torch's event and does not inherit from it: torch's ``elapsed_time`` takes no subclass.

    Args:
        device: the accelerator.
        is_timed: whether the event's time is wanted.
    """

    def __init__(self, device: torch.device, is_timed: bool) -> None:
        self._device = device
        self._event = torch.Event(device, enable_timing=is_timed)
        self._event.record(torch.accelerator.current_stream(device))

    def query(self) -> bool:
        """See :class:`Event`."""
        return self._event.query()

    def wait(self) -> None:
        """See :class:`Event`."""
        # Torch's own default is a stream of the thread's current device.
        self._event.wait(torch.accelerator.current_stream(self._device))

    def synchronize(self) -> None:
        """See :class:`Event`."""
        self._event.synchronize()

    def elapsed_time(self, end: AcceleratorEvent) -> float:
        """See :class:`Event`."""
        return self._event.elapsed_time(end._event)


class Accelerator:
    """A GPU, or another device that torch calls an accelerator.

    Args:
        device: which one.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Torch hands out the same 32 streams of a GPU in turn: code that takes a new one for each
        # plan or copy soon gets one on which other work waits.
        self._side_streams: dict[str, torch.Stream] = {}

    def record_event(self, is_timed: bool) -> Event:
        """See :func:`record_event`."""
        return AcceleratorEvent(self._device, is_timed)

    def shared_event(self, handle: Any) -> SharedEvent:
        """See :class:`Device`."""
        return cuda.SharedEvent(self._device, handle)

    @contextmanager
    def side_stream(self, work: str) -> Iterator[None]:
        """See :func:`side_stream`."""
        stream = self._side_streams.get(work)
        if stream is None:
            # Of two threads that come here at once, both use the stream of the first.
            stream = self._side_streams.setdefault(work, torch.Stream(self._device))
        # Not `with stream`: a stream object can be entered only once at a time, and several threads
        # use this one.
        before = torch.accelerator.current_stream(self._device)
        with torch.accelerator.device_index(before.device_index):
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def keep_for_stream(self, tensor: Tensor) -> None:
        """See :func:`keep_for_stream`."""
        tensor.record_stream(torch.accelerator.current_stream(self._device))

    def synchronize(self) -> None:
        """See :func:`synchronize`."""
        torch.accelerator.synchronize(self._device)

    def on_this_device(self, function: Callable[[], T]) -> Callable[[], T]:
        """See :func:`on_this_device`."""

        def call() -> T:
            torch.accelerator.set_device_index(self._device)
            return function()

        return call

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """See :func:`pin`."""
        return cuda.pin(memory)


_HOST = Host()
_accelerator = cache(Accelerator)
# Of the simulated devices: what a function needs, to run in another thread.
_for_threads: list[Callable[[Callable[[], Any]], Callable[[], Any]]] = []


@contextmanager
def simulating(for_threads: Callable[[Callable[[], Any]], Callable[[], Any]]) -> Iterator[None]:
    """Context in which torch's streams and events are those of a simulation: see :mod:`.simulated`.

    Args:
        for_threads: wraps a function that another thread is to call.
    """
    _accelerator.cache_clear()
    _for_threads.append(for_threads)
    try:
        yield
    finally:
        _for_threads.remove(for_threads)
        _accelerator.cache_clear()


def _of(device: torch.device) -> Host | Accelerator:
    return _HOST if device.type == "cpu" else _accelerator(device)


def is_asynchronous(device: torch.device) -> bool:
    """Whether a call returns before the device has done the work."""
    return _of(device).is_asynchronous


def record_event(device: torch.device, is_timed: bool = False) -> Event:
    """An event after all work that has been queued on the current stream.

    Args:
        device: the stream's.
        is_timed: whether the event's time is wanted: see :func:`elapsed_seconds`.
    """
    return _of(device).record_event(is_timed)


def shared_event(device: torch.device, handle: Any = None) -> SharedEvent:
    """A new event for which other processes on this host can wait; or one of theirs.

    Args:
        device: this process's.
        handle: that of the other process's event.

    Raises:
        RuntimeError: events of this device cannot be shared.
    """
    return _of(device).shared_event(handle)


def start_of_clock(device: torch.device) -> tuple[Event, float]:
    """Returns an event, and the reading of ``time.perf_counter`` when the device reached it.

    Args:
        device: what is queued on it is waited for; with nothing queued, the device reaches an event
            when the host records it.
    """
    synchronize(device)
    event = record_event(device, is_timed=True)
    return event, event.seconds if isinstance(event, HostEvent) else time.perf_counter()


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
    return _of(device).side_stream(work)


def keep_for_stream(tensor: Tensor) -> None:
    """Keeps a tensor's memory, even if it is freed, until the current stream has done the work that
    is queued on it by then. For memory that was allocated on another stream.
    """
    _of(tensor.device).keep_for_stream(tensor)


def synchronize(device: torch.device) -> None:
    """Returns when the device has done all work that was queued."""
    _of(device).synchronize()


def pin(memory: Tensor, device: torch.device) -> Callable[[], None]:
    """Pins host memory for copies of a device that run beside its compute; returns what undoes it.

    Raises:
        RuntimeError: it cannot be pinned.
    """
    return _of(device).pin(memory)


def on_this_device(function: Callable[[], T]) -> Callable[[], T]:
    """Wraps a function so that it runs with the current GPU of the calling thread: a new thread
    starts with the first GPU, and would create a context of some hundred megabytes there.
    """
    for wrap in list(_for_threads):
        function = wrap(function)
    kind = initialized_accelerator()
    if kind is None:
        return function
    index = torch.accelerator.current_device_index()
    return _accelerator(torch.device(kind, index)).on_this_device(function)


def initialized_accelerator() -> str | None:
    """The type of the accelerator that this process has used; ``None`` if it has used none."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    # The module of some accelerators (MPS) cannot say.
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    return kind.type if is_initialized is not None and is_initialized() else None
