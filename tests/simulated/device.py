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

New memory is written to when it is allocated, as in torch's deterministic mode. Threads may belong
to different processes that share the device, as ranks do: see :meth:`SimulatedDevice.process`. What
one host has waited for is known to another only if it was told. All threads of a process count as
one host, or each as one of its own: see :attr:`SimulatedDevice.are_threads_apart`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.compat.torch_private import storage_key_of, without_torch_function
from lightning_pipeshift.devices.streams import on_device, simulating
from tests.simulated.interception import Functions, MemoryPlace, Operations
from tests.simulated.ordering import HOST, Clock, History, Ordering, Region
from tests.simulated.torch_streams import Stream, StreamsOfTorch

T = TypeVar("T")

# Parts of the names of files whose lines ask for no operation.
_NOT_ASKING = (
    "/torch/",
    "/contextlib",
    "/tests/simulated/",
    "/compat/module_private.py",
    "/compat/torch_private.py",
)

_FIRST_GPU: Final = torch.device("cuda", 0)


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
        num_bytes: how much of the device's memory it is.
    """

    reference: StorageWeakRef
    stream: str | None = None
    history: History = field(default_factory=list)
    is_pinned: bool = False
    kept_for: set[str] = field(default_factory=set)
    num_bytes: int = 0


class SharedEvent:
    """An event for which other processes can wait, in place of the one of :mod:`.cuda`."""

    def __init__(self, simulated: SimulatedDevice, handle: Any) -> None:
        self.handle = handle
        self._simulated = simulated
        self._clock: Clock = {}

    def record(self) -> None:
        """Moves the event behind all work that is queued on the current stream."""
        self._clock, _ = self._simulated.clock_of_event(self._simulated.stream)

    def wait(self) -> None:
        """Orders the current stream's later work after the event."""
        for clock in self._simulated.clocks_before(self):
            self._simulated.order(self._simulated.stream, clock)


class SimulatedDevice:
    """Context in which there is such a device, for all code of all threads that uses torch's
    streams and events. It is the public way to choose it.

    Args:
        seed: decides how often events are asked before they have been reached.
        device: its name.
    """

    def __init__(self, seed: int = 0, device: torch.device = _FIRST_GPU) -> None:
        self.seed: int = seed
        self.device: torch.device = device
        self.races: list[str] = []
        """The data races so far, in words."""
        self.num_done = 0
        """How many operations the device was given."""
        self.allocated_bytes = 0
        """Those of the memory that was not known to be freed when it was last looked at."""
        self.are_threads_apart = False
        """Whether a thread knows only what it has waited for or :meth:`heard`."""
        self.at_allocator: Callable[[str], None] = lambda _: None
        """Called with a stream whose memory is allocated or freed."""
        self._num_events = 0
        self._shared_events: dict[Any, SharedEvent] = {}
        self._ordering = Ordering()
        # By process: those that have been used.
        self._hosts: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.RLock()
        self.local = threading.local()
        """The process, current device, streams and place of results of each thread."""
        self.torch = StreamsOfTorch(self)
        self._memory: dict[int, _Memory] = {}
        self._num_allocated = 0
        self._stack = ExitStack()

    def __enter__(self) -> SimulatedDevice:
        self._stack.enter_context(self.torch.in_place())
        self._stack.enter_context(simulating(self.on_this_device))
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

    def on_this_device(self, function: Callable[[], T]) -> Callable[[], T]:
        """Wraps a function that another thread is to call, where torch knows nothing of the device
        by itself.
        """

        process = getattr(self.local, "process", "")

        def call() -> T:
            with self._modes(), self.process(process):
                return function()

        device = torch.device(self.device.type, self.torch.current_device_index())
        return on_device(device, call)

    # --- what stands in for torch's own functions ---

    def clock_of_event(self, stream: str) -> tuple[Clock, int]:
        """The clock of an event that is recorded on a stream now, and the event's number."""
        with self._lock:
            self._num_events += 1
            return self._ordering.now(stream, self.host), self._num_events

    def shared_event(self, device: torch.device, handle: Any = None) -> SharedEvent:
        """Makes an event for which other processes can wait, or finds one by its handle."""
        with self._lock:
            handle = handle or (os.getpid(), len(self._shared_events))
            return self._shared_events.setdefault(handle, SharedEvent(self, handle))

    def clocks_before(self, event: SharedEvent) -> list[Clock]:
        """What a wait for an event orders work after. What a real process beside this one does is
        not simulated: its events are taken to be behind all that this process's events have told.
        """
        with self._lock:
            is_own = event.handle[0] == os.getpid()
            return [each._clock for each in ([event] if is_own else self._shared_events.values())]

    def wait_for_streams(self, streams: list[str]) -> None:
        """Notes that the host waits for all that is queued on some streams."""
        self.note("synchronize")
        with self._lock:
            for stream in streams:
                self._ordering.wait(self.host, self._ordering.now(stream, self.host))

    def keep_for_stream(self, tensor: Tensor, stream: Any) -> None:
        """Does the work of ``Tensor.record_stream``."""
        if not isinstance(stream, Stream):
            kind = type(stream).__name__
            raise TypeError(f"record_stream(): argument 's' must be Stream, not {kind}")
        if not self.has(tensor):
            raise NotImplementedError(
                "Could not run 'aten::record_stream' with arguments from the 'CPU' backend."
            )
        with self._lock:
            self._memory_of(tensor).kept_for.add(stream.name)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Does the work of :func:`.cuda.pin`."""
        with self._lock:
            if self.has(memory):
                raise RuntimeError(f"CUDA's error 1 when pinning {memory.nbytes} bytes")
            found = self._memory_of(memory)
            if found.is_pinned:
                raise RuntimeError(f"CUDA's error 712 when pinning {memory.nbytes} bytes")
            found.is_pinned = True
            return partial(self._unpin, found)

    def _unpin(self, memory: _Memory) -> None:
        with self._lock:
            memory.is_pinned = False
            whole = Region(memory.history, 0, sys.maxsize)
            self.races += self._ordering.access(self.host, self.host, "unpinning", [], [whole])

    # --- order ---

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        """Context in which this thread, and those that get work from it, are another process: it
        has streams and a host of its own, and memory that it shares.
        """
        before, self.local.process = getattr(self.local, "process", ""), name
        try:
            yield
        finally:
            self.local.process = before

    def here(self, name: str) -> str:
        """The name of a timeline of this thread's process."""
        process = getattr(self.local, "process", "")
        return f"{name} of {process}" if process else name

    @property
    def stream(self) -> str:
        """The name of this thread's current stream."""
        return self.torch.current_stream(self.device.index).name

    @property
    def host(self) -> str:
        """The timeline of this thread's own work."""
        host = whole = self.here(HOST)
        if self.are_threads_apart:
            host = f"{HOST} in thread {threading.current_thread().name!r}"
        self._hosts[whole].add(host)
        return host

    def told(self) -> Clock:
        """What this host knows, to tell another one: by a lock, a queue or a message."""
        with self._lock:
            return self._ordering.now(self.host, self.host)

    def heard(self, clock: Clock) -> None:
        """This host was told what another one knew."""
        self.order(self.host, clock)

    def order(self, timeline: str, clock: Clock) -> None:
        """Orders later work of a timeline after that which a clock knows."""
        with self._lock:
            self._ordering.wait(timeline, clock)

    def knows(self, clock: Clock) -> bool:
        """Whether this host knows that the work that a clock knows is complete."""
        with self._lock:
            return self._ordering.is_known(clock, self.host)

    def _wait_for_stream(self) -> None:
        self._ordering.wait(self.host, self._ordering.now(self.stream, self.host))

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
                # With much memory not at each allocation, as that would take too long: then some
                # races are missed.
                self._num_allocated += 1
                if self._num_allocated * 64 >= len(self._memory):
                    self._num_allocated = 0
                    self.collect_freed()
            memory = self._memory_of(tensor)
            memory.is_pinned = place.is_pinned
            if place.is_there:
                memory.stream = self.stream
                with without_torch_function():
                    num_bytes = tensor.untyped_storage().nbytes()
                self.allocated_bytes += num_bytes - memory.num_bytes
                memory.num_bytes = num_bytes
                self.at_allocator(self.stream)
                memory.history = self._ordering.allocate(self.stream, self.host)
            else:
                memory.stream, memory.history = None, []

    def is_named(self, name: torch.device) -> bool:
        """Whether a name is this device's.

        Raises:
            RuntimeError: it is that of another device of its type, where there is none.
        """
        if name.type == self.device.type and name.index not in (None, self.device.index):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return name.type == self.device.type

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
        with without_torch_function():
            try:
                return self._memory.get(storage_key_of(tensor))
            except NotImplementedError:  # no storage: sparse, or a functional wrapper
                return None

    def _memory_of(self, tensor: Tensor) -> _Memory:
        """The record of a tensor's memory; of memory seen for the first time, a new one."""
        with without_torch_function():
            key = storage_key_of(tensor)
            memory = self._memory.get(key)
            if memory is None:
                memory = _Memory(StorageWeakRef(tensor.untyped_storage()))
                self._memory[key] = memory
        return memory

    def collect_freed(self) -> None:
        """Finds the memory that has been freed by now."""
        with self._lock:
            for key, memory in list(self._memory.items()):
                if memory.reference.expired():
                    del self._memory[key]
                    self.allocated_bytes -= memory.num_bytes
                    if memory.stream is not None:
                        self.at_allocator(memory.stream)
                        # Whichever host freed it has told the allocator.
                        hosts = {self.host} | self._hosts[self.here(HOST)]
                        self._ordering.free(memory.history, memory.stream, memory.kept_for, hosts)

    def refuse_mixed(self, name: str) -> None:
        """Called for an operation on tensors of the device and of the host.

        Raises:
            RuntimeError: torch's error.
        """
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device} and cpu! ({name})"
        )

    # --- operations ---

    @contextmanager
    def placing(self, place: MemoryPlace) -> Iterator[None]:
        """Context in which the results of operations are put there."""
        before, self.local.place = self.place, place
        try:
            yield
        finally:
            self.local.place = before

    @property
    def place(self) -> MemoryPlace | None:
        """Where this thread's operations are to put their results, if it is said."""
        return getattr(self.local, "place", None)

    def access(self, name: str, reads: list[Tensor], writes: list[Tensor], is_there: bool) -> None:
        """Notes an operation on tensors that exist."""
        timeline = self.stream if is_there else self.host
        # What is asked of the tensors here is no operation of the program's.
        with self._lock, without_torch_function():
            what = f"{name.removeprefix('aten::')} ({_asked_for_at()})"
            regions = ([*self._regions(reads)], [*self._regions(writes)])
            self.races += self._ordering.access(timeline, self.host, what, *regions)

    def _regions(self, tensors: list[Tensor]) -> Iterator[Region]:
        for tensor in tensors:
            with suppress(NotImplementedError):  # no storage
                if tensor.is_meta or not tensor.numel():
                    continue
                size = tensor.element_size()
                length = tensor.numel()
                if not tensor.is_contiguous():
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
    while frame.f_back is not None and not _may_ask(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _may_ask(file: str) -> bool:
    return not any(part in file for part in _NOT_ASKING)


@cache
def _short(file: str) -> str:
    return "/".join(file.split("/")[-2:])
