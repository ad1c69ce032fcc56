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

import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_pipeshift.compat.torch_private import (
    READ_NUMBER,
    UNIQUE,
    TorchDispatchMode,
    parse_to,
    pytree,
    schema_of,
    storage_key_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.devices.ordering import HOST, Clock, History, Ordering, Region
from lightning_pipeshift.devices.streams import Event, simulating

T = TypeVar("T")

COMPUTE: Final = "the compute stream"
CPU: Final = torch.device("cpu")

# What reads values to go on with them: it waits for the device.
_READS = frozenset(
    {
        READ_NUMBER,
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::repeat_interleave",
        "aten::unique_consecutive",
        "aten::unique_dim",
        UNIQUE,
    }
)
# What does not touch the values of the tensors that it is given, and of those that it makes.
_READS_NOTHING = re.compile("aten::(new_.*|.*_like|set_|resize_)")
_WRITES_NOTHING = re.compile("aten::(new_)?empty.*|aten::(set_|resize_)")


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
    history: History = field(default_factory=History)
    is_pinned: bool = False
    kept_for: set[str] = field(default_factory=set)


class _Place(NamedTuple):
    """Where an operation is to put its results.

    Args:
        is_there: on the device.
        is_pinned: in pinned memory.
        waits: for a copy: whether it is to be complete when the call returns.
    """

    is_there: bool
    is_pinned: bool = False
    waits: bool = True


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


class SimulatedDevice:
    """Context in which there is such a device. It is the public way to choose it: all code that
    asks :mod:`.streams` for this device gets it, in all threads.

    Args:
        seed: decides how often events are asked before they have been reached.
        device: its name.
    """

    is_asynchronous = True

    def __init__(
        self,
        seed: int = 0,
        device: torch.device = torch.device("cuda", 0),  # noqa: B008
    ) -> None:
        self.seed = seed
        self.device = device
        self.races: list[str] = []
        """The data races so far, in words."""
        self.num_done = 0
        """How many operations the device was given."""
        self._num_events = 0
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
        with _Operations(self), _Functions(self):
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
            with _Functions(self):
                return function(*args, **kwargs)

        return call

    # --- what `streams` asks for ---

    def record_event(self, is_timed: bool) -> Event:
        """See :class:`~lightning_pipeshift.devices.streams.Device`."""
        with self._lock:
            self._num_events += 1
            clock = self._ordering.now(self.stream)
            return _Event(self, clock, self._num_events, self.num_done)

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
                self.put(tensor, _Place(True))
                self._memory_of(tensor).history = History()

    def put(self, tensor: Tensor, place: _Place) -> None:
        """Says where a new tensor is."""
        with self._lock, suppress(NotImplementedError):
            if place.is_there:
                self._collect_freed()
            memory = self._memory_of(tensor)
            memory.is_pinned = place.is_pinned
            if place.is_there:
                memory.stream, memory.history = self.stream, self._ordering.allocate(self.stream)
            else:
                memory.stream, memory.history = None, History()

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
    def placing(self, place: _Place) -> Iterator[None]:
        """Context in which the results of operations are put there."""
        before, self._local.place = self.place, place
        try:
            yield
        finally:
            self._local.place = before

    @property
    def place(self) -> _Place | None:
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
        if name != __file__ and "/torch/" not in name and "/contextlib" not in name:
            break
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):
    """Sees what torch's kernels are given, the backward's too."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device, kwargs = self._device, kwargs or {}
        name: str = function.name().partition(".")[0]
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        others: list[Tensor] = []
        arguments = schema_of(function).arguments
        given = [*zip(arguments, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in arguments if one.name in kwargs]
        for argument, value in given:
            alias = argument.alias_info
            part = reads if alias is None else writes if alias.is_write else others
            part += _tensors(value)
        if _READS_NOTHING.fullmatch(name):
            others += reads + writes
            reads, writes = [], []
        place = device.place
        is_there = any(map(device.has, reads + writes + others))
        if name == "aten::copy_" and device.has(args[0]) != device.has(args[1]):
            waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            device.copy(name, [args[0]], [args[1]], waits)
            device.num_done += 1
            return function(*args, **kwargs)
        if place is not None and name == "aten::clone" and place.is_there != is_there:
            result = function(*args, **kwargs)
            device.put(result, place)
            device.copy(name, [result], [args[0]], place.waits)
            device.num_done += 1
            return result
        goes_there = place.is_there if place is not None and not (reads or writes) else is_there
        device.num_done += goes_there
        device.access(name, reads, writes, goes_there)
        if is_there:
            self._check(name, args, reads + writes)
        results = function(*args, **kwargs)
        made = [x for x in _tensors(results) if not _is_among(x, reads + writes + others)]
        for tensor in made:
            if place is not None or goes_there:
                device.put(tensor, place if place is not None else _Place(True))
        if made and not _WRITES_NOTHING.fullmatch(name):
            device.access(name, [], made, goes_there)
        return results

    def _check(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        by_mask = name == "aten::index" and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name in _READS or by_mask:
            self._device.wait_for_value(name)
        self._device.check(name, tensors)


def _is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    """Whether a tensor has the memory of one of some others."""
    try:
        return storage_key_of(tensor) in {storage_key_of(other) for other in others}
    except NotImplementedError:
        return False


class _Functions(TorchFunctionMode):
    """Sees what asks where a tensor is, and what moves one."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device, kwargs = self._device, dict(kwargs or {})
        own: Any = args[0] if args else None
        if function in _QUESTIONS:
            is_there = device.has(own)
            return _QUESTIONS[function](device, own) if is_there else function(*args, **kwargs)
        if function is Tensor.pin_memory:
            with device.placing(_Place(False, is_pinned=True)):
                return own.clone()
        if function is Tensor.is_pinned:
            return device.is_pinned(own)
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            # No kernel runs for these.
            device.access(function.__name__, [own], [], device.has(own))
            if device.has(own):
                device.wait_for_value(function.__name__)
        if function is Tensor.cpu:
            return self._moved(own, CPU, waits=True)
        if function is parse_to:
            return function(*args, **kwargs)
        if function is Tensor.to:
            return self._to(*args, **kwargs)
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        named += [torch.device(kwargs["device"])] if isinstance(kwargs.get("device"), str) else []
        is_pinned = kwargs.pop("pin_memory", False)
        # This mode may be active twice, in a hook: then the outer one has said where.
        if (not named and not is_pinned) or device.place is not None:
            return function(*args, **kwargs)
        args = [CPU if isinstance(x, torch.device) else x for x in args]
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU if named[0].type != "meta" else named[0]
        place = _Place(bool(named) and named[0].type == device.device.type, is_pinned)
        with device.placing(place):
            result = function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and place.is_there:
            device.wait_for_value("a tensor of numbers")
            device.take(result)
        return result

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device: torch.device | None = None
        others: list[Any] = []
        for value in args:
            if isinstance(value, str | torch.device):
                device = torch.device(value)
            elif isinstance(value, Tensor):
                device = self._device.device if self._device.has(value) else CPU
                others.append(value.dtype)
            else:
                others.append(value)
        if kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
        waits = not (kwargs.pop("non_blocking", False) or True in others)
        moved = tensor if device is None else self._moved(tensor, device, waits)
        kwargs.pop("device", None)
        others = [value for value in others if not isinstance(value, bool)]
        to: Any = Tensor.to
        return to(moved, *others, **kwargs) if others or kwargs else moved

    def _moved(self, tensor: Tensor, device: torch.device, waits: bool) -> Tensor:
        if device.type == "meta":
            return Tensor.to(tensor, device)
        goes_there = device.type == self._device.device.type
        if tensor.is_meta or self._device.has(tensor) == goes_there:
            return tensor
        with self._device.placing(_Place(goes_there, waits=waits)):
            return tensor.clone()


_QUESTIONS: dict[Any, Callable[[SimulatedDevice, Tensor], Any]] = {
    Tensor.device.__get__: lambda device, _: device.device,
    Tensor.is_cuda.__get__: lambda device, _: device.device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda *_: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda device, _: device.device.index,
}
