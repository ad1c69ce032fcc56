"""A device that is not there, and computes asynchronously: for tests on a machine without a GPU.

Inside ``with SimulatedDevice() as device``, tensors can be on a device of that name. Their memory
is the host's, so the numbers are those of a CPU, and every operation is carried out at once. What
is simulated is what a program may rely on. Each operation on tensors of the device belongs to the
stream that is current in its thread; each event, wait and synchronisation orders streams and host
as on a GPU; pinned copies run beside the host; freed memory goes to the next allocation of its
stream, whoever else still uses it. If two operations use the same memory and nothing orders them,
it is an error: :class:`DataRaceError`, with both operations and the lines that asked for them.

Why not queue the operations, and carry them out late, in random orders, so that a missing wait
shows as a wrong number? A wrong number needs the unlucky order; it may be overwritten, multiplied
by zero or compared to a tolerance before anybody looks; and it does not say which wait is missing.
The order that is proved here is proved for all orders at once, by a single run, and reported at the
operation that breaks it. And nothing has to be known of an operation's result before it has been
carried out. (See :mod:`.ordering` for the method.) Chance decides one thing only: how often
an event is asked before it says that it has been reached.

All threads of the host count as one: what one thread has waited for is known to the others.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.compat.torch_private import (
    storage_key_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.devices.interception import Functions, MemoryPlace, Operations
from lightning_pipeshift.devices.ordering import HOST, Clock, History, Ordering, Region
from lightning_pipeshift.devices.streams import Event, SharedEvent, simulating

T = TypeVar("T")

# Parts of the names of files whose lines ask for no operation.
_NOT_ASKING = (
    "/torch/",
    "/contextlib",
    "/devices/simulated.py",
    "/devices/interception.py",
    "/compat/torch_private.py",
)

_FIRST_GPU: Final = torch.device("cuda", 0)
COMPUTE: Final = "the compute stream"


class DataRaceError(Exception):
    """Operations that use the same memory at the same time."""


@dataclass
class _Memory:
    """A storage.

    Args:
        reference: keeps the storage's identity from being given to another one.
        stream: the stream on which it was allocated; ``None`` in host memory.
        history: its accesses.
        is_pinned: whether it is pinned host memory.
        kept_for: streams that the allocator was told of.
    """

    reference: StorageWeakRef
    stream: str | None = None
    history: History = field(default_factory=list)
    is_pinned: bool = False
    kept_for: set[str] = field(default_factory=set)


class _Event:
    """An event of the simulated device."""

    def __init__(self, device: SimulatedDevice, clock: Clock, number: int, at: int) -> None:
        self._device = device
        self._clock = clock
        self._at = at
        self._num_denials = random.Random(f"{device.seed} {number}").randrange(4)

    def query(self) -> bool:
        """See :class:`~lightning_pipeshift.devices.streams.Event`."""
        if self._num_denials and not self._device.knows(self._clock):
            self._num_denials -= 1
            return False
        self._device.order(HOST, self._clock)
        return True

    def wait(self) -> None:
        """See :class:`~lightning_pipeshift.devices.streams.Event`."""
        self._device.order(self._device.stream, self._clock)

    def synchronize(self) -> None:
        """See :class:`~lightning_pipeshift.devices.streams.Event`."""
        self._device.note("event", self._device.num_done - self._at)
        self._device.order(HOST, self._clock)

    def elapsed_time(self, end: _Event) -> float:
        """See :class:`~lightning_pipeshift.devices.streams.Event`. Each operation takes a
        millisecond.
        """
        if not self._device.knows(end._clock):
            raise RuntimeError("the device has not reached the event")
        return float(end._at - self._at)


class _SharedEvent:
    """An event of the simulated device for which others can wait."""

    def __init__(self, device: SimulatedDevice, handle: Any) -> None:
        self.handle = handle
        self._device = device
        self._clock: Clock = {}

    def record(self) -> None:
        """See :class:`~lightning_pipeshift.devices.streams.SharedEvent`."""
        self._clock = self._device.now()

    def wait(self) -> None:
        """See :class:`~lightning_pipeshift.devices.streams.SharedEvent`."""
        self._device.order(self._device.stream, self._clock)


class SimulatedDevice:
    """Context in which there is such a device. It is the public way to choose it: all code that
    asks :mod:`.streams` for this device gets it, in all threads.

    Args:
        seed: decides how often events are asked before they have been reached.
        device: its name.
    """

    is_asynchronous = True

    def __init__(self, seed: int = 0, device: torch.device = _FIRST_GPU) -> None:
        self.seed: int = seed
        self.device: torch.device = device
        self.races: list[str] = []
        """The data races so far, in words."""
        self.num_done = 0
        """How many operations the device was given."""
        self._num_events = 0
        self._shared_events: dict[Any, _SharedEvent] = {}
        self._ordering = Ordering()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._memory: dict[int, _Memory] = {}
        self._num_allocated = 0
        self._stack = ExitStack()

    def __enter__(self) -> SimulatedDevice:
        self._stack.enter_context(simulating(self.device, self))
        self._stack.enter_context(self._modes())
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._stack.close()
        if self.races and kind is None:
            raise DataRaceError("\n".join(self.races))

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with Operations(self), Functions(self):
            yield

    def note(self, what: str, num_behind: int = 0) -> None:
        """Called when the host waits for the device.

        Args:
            what: the operation.
            num_behind: how many operations the device has left to do after the point waited for.
        """

    def inside(self, function: Callable[..., T]) -> Callable[..., T]:
        """Wraps a function that a backward calls, for example a hook: torch switches function modes
        off there, and with them what tensors say of their device.
        """

        def call(*args: Any, **kwargs: Any) -> T:
            with Functions(self):
                return function(*args, **kwargs)

        return call

    # --- what `streams` asks for ---

    def record_event(self, is_timed: bool) -> Event:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""
        with self._lock:
            self._num_events += 1
            clock = self._ordering.now(self.stream)
            return _Event(self, clock, self._num_events, self.num_done)

    def shared_event(self, handle: Any) -> SharedEvent:
        """See :class:`~lightning_pipeshift.devices.streams.Device`. What another process does is
        not simulated here, so an event of its own orders nothing.
        """
        with self._lock:
            handle = handle or (os.getpid(), len(self._shared_events))
            return self._shared_events.setdefault(handle, _SharedEvent(self, handle))

    @contextmanager
    def side_stream(self, work: str) -> Iterator[None]:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""
        before, self._local.stream = self.stream, f"the stream {work!r}"
        try:
            yield
        finally:
            self._local.stream = before

    def keep_for_stream(self, tensor: Tensor) -> None:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""
        with self._lock:
            self._memory_of(tensor).kept_for.add(self.stream)

    def synchronize(self) -> None:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""
        self.note("synchronize")
        with self._lock:
            for stream in self._ordering.streams:
                self._ordering.wait(HOST, self._ordering.now(stream))

    def on_this_device(self, function: Callable[[], T]) -> Callable[[], T]:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""

        def call() -> T:
            with self._modes():
                return function()

        return call

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""
        with self._lock:
            found = self._memory_of(memory)
            found.is_pinned = True
            return partial(self._unpin, found)

    def _unpin(self, memory: _Memory) -> None:
        with self._lock:
            whole = Region(memory.history, 0, sys.maxsize)
            self.races += self._ordering.access(HOST, "unpinning", [], [whole])

    # --- order ---

    @property
    def stream(self) -> str:
        """This thread's current stream."""
        return getattr(self._local, "stream", COMPUTE)

    def now(self) -> Clock:
        """What precedes the work that this thread queues next."""
        with self._lock:
            return self._ordering.now(self.stream)

    def order(self, timeline: str, clock: Clock) -> None:
        """Orders later work of a timeline after that which a clock knows."""
        with self._lock:
            self._ordering.wait(timeline, clock)

    def knows(self, clock: Clock) -> bool:
        """Whether the host knows that the work that a clock knows is complete."""
        with self._lock:
            return self._ordering.is_known(clock)

    def _wait_for_stream(self) -> None:
        self._ordering.wait(HOST, self._ordering.now(self.stream))

    # --- where a tensor is ---

    def take(self, *tensors: Any) -> None:
        """Puts tensors on the device. Their values are complete."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.put(tensor, MemoryPlace(True))
                self._memory_of(tensor).history = []

    def put(self, tensor: Tensor, place: MemoryPlace) -> None:
        """Says where a new tensor is."""
        with self._lock, suppress(NotImplementedError):
            if place.is_there:
                self._collect_freed()
            memory = self._memory_of(tensor)
            memory.is_pinned = place.is_pinned
            if place.is_there:
                memory.stream, memory.history = self.stream, self._ordering.allocate(self.stream)
            else:
                memory.stream, memory.history = None, []

    def has(self, tensor: Any) -> bool:
        """Whether a tensor is on the device."""
        memory = self._known(tensor)
        return memory is not None and memory.stream is not None

    def is_pinned(self, tensor: Any) -> bool:
        """Whether a tensor is in pinned host memory."""
        memory = self._known(tensor)
        return memory is not None and memory.is_pinned

    def _known(self, tensor: Any) -> _Memory | None:
        if not isinstance(tensor, Tensor) or not self._memory:
            return None
        with without_torch_function_of_subclasses():
            try:
                return self._memory.get(storage_key_of(tensor))
            except NotImplementedError:  # no storage: sparse, or a functional wrapper
                return None

    def _memory_of(self, tensor: Tensor) -> _Memory:
        """The record of a tensor's memory; of memory seen for the first time, a new one."""
        with without_torch_function_of_subclasses():
            key = storage_key_of(tensor)
            memory = self._memory.get(key)
            if memory is None:
                memory = _Memory(StorageWeakRef(tensor.untyped_storage()))
                self._memory[key] = memory
        return memory

    def _collect_freed(self) -> None:
        """Finds the memory that has been freed. With much memory not at each allocation, as that
        would take too long: then some races are missed.
        """
        self._num_allocated += 1
        if self._num_allocated * 64 < len(self._memory):
            return
        self._num_allocated = 0
        for key, memory in list(self._memory.items()):
            if memory.reference.expired():
                del self._memory[key]
                if memory.stream is not None:
                    self._ordering.free(memory.history, memory.stream, memory.kept_for)

    def check(self, name: str, tensors: list[Tensor]) -> None:
        """Called for each operation on tensors of the device, with all that it is given."""

    # --- operations ---

    @contextmanager
    def placing(self, place: MemoryPlace) -> Iterator[None]:
        """Context in which the results of operations are put there."""
        before, self._local.place = self.place, place
        try:
            yield
        finally:
            self._local.place = before

    @property
    def place(self) -> MemoryPlace | None:
        """Where this thread's operations are to put their results, if it is said."""
        return getattr(self._local, "place", None)

    def access(self, name: str, reads: list[Tensor], writes: list[Tensor], is_there: bool) -> None:
        """Notes an operation on tensors that exist."""
        timeline = self.stream if is_there else HOST
        with self._lock:
            what = f"{name.removeprefix('aten::')} ({_asked_for_at()})"
            regions = ([*self._regions(reads)], [*self._regions(writes)])
            self.races += self._ordering.access(timeline, what, *regions)

    def _regions(self, tensors: list[Tensor]) -> Iterator[Region]:
        for tensor in tensors:
            with suppress(NotImplementedError):  # no storage
                if tensor.is_meta or not tensor.numel():
                    continue
                size = tensor.element_size()
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                length = 1 + int(sum((num - 1) * step for num, step in steps))
                begin = int(tensor.storage_offset()) * size
                yield Region(self._memory_of(tensor).history, begin, begin + length * size)

    def copy(self, name: str, to: list[Tensor], source: list[Tensor], waits: bool) -> None:
        """Notes a copy between the host and the device, which are the tensors' places already.

        Args:
            name: the operation.
            to: the target.
            source: the source.
            waits: whether the caller wants it to be complete when it returns.
        """
        from_device = any(map(self.has, source))
        is_beside = all(map(self.is_pinned, to if from_device else source)) and not waits
        if from_device:
            self.access(name, source, to, True)
        else:
            self.access(name, source if is_beside else [], to, True)
            if not is_beside:
                # The values have been put aside when the call returns.
                self.access(name, source, [], False)
        # To memory that is not pinned, a copy always waits.
        if waits or (from_device and not is_beside):
            self.note("copy to the host" if from_device else "copy to the device")
            with self._lock:
                self._wait_for_stream()

    def wait_for_value(self, name: str) -> None:
        """Notes that the host waits for a value."""
        self.note(name.removeprefix("aten::"))
        with self._lock:
            self._wait_for_stream()


def _asked_for_at() -> str:
    """The line that asked for an operation: the innermost one that is not torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _NOT_ASKING):
            break
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
