"""Stands in for torch's own streams and events, for a simulated device.

So the code that runs on a real accelerator runs on the simulated one. These objects take what
torch's take and no more, and refuse the rest with torch's messages: what takes anything hides a
fault until the first run on a GPU.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from lightning_pipeshift.devices import cuda
from tests.simulated.ordering import Clock

if TYPE_CHECKING:
    from tests.simulated.device import SimulatedDevice

COMPUTE = "the compute stream"


class Stream:
    """``torch.Stream`` of a simulated device.

    Args:
        device: whose. Other devices of the simulated one's type have streams, too, but no memory.
    """

    simulated: ClassVar[SimulatedDevice]

    def __init__(self, device: Any = None) -> None:
        streams = self.simulated.torch
        self.device = torch.device(self.simulated.device.type, streams.index_of(device))
        self.device_index: int = self.device.index
        self.stream_id = len(streams.all)
        # `side_stream` knows what for, and torch's streams have no names.
        work = sys._getframe(1).f_locals.get("work", self.stream_id)
        self.what = f"the stream {work!r}"
        streams.all.append(self)

    @property
    def name(self) -> str:
        """Its timeline. In each simulated process this is another stream."""
        return self.simulated.here(self.what)


class _Recorded(NamedTuple):
    """What an event knows once it is recorded.

    Args:
        clock: the work before it.
        at: how many operations the device was given before it.
        device: its stream's.
    """

    clock: Clock
    at: int
    device: torch.device


class Event:
    """``torch.Event`` of a simulated device."""

    simulated: ClassVar[SimulatedDevice]

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._type = self.simulated.device.type if device is None else torch.device(device).type
        self._is_timed = enable_timing
        self._recorded: _Recorded | None = None
        self._num_denials = 0

    def record(self, stream: Any = None) -> None:
        """Puts the event after all work that is queued on a stream."""
        on = self._stream(stream, "recording")
        if self._recorded is not None and self._recorded.device != on.device:
            raise RuntimeError(
                f"Event device index {self._recorded.device.index} does not match recording "
                f"stream's device index {on.device_index}."
            )
        simulated = self.simulated
        clock, number = simulated.clock_of_event(on.name)
        self._recorded = _Recorded(clock, simulated.num_done, on.device)
        self._num_denials = random.Random(f"{simulated.seed} {number}").randrange(4)

    def wait(self, stream: Any = None) -> None:
        """Orders a stream's later work after the event. As in torch, an event that is not recorded
        orders nothing, and counts as reached.
        """
        on = self._stream(stream, "blocking")
        if self._recorded is not None:
            self.simulated.order(on.name, self._recorded.clock)

    def query(self) -> bool:
        """Whether the device has reached the event."""
        if self._recorded is None:
            return True
        if self._num_denials and not self.simulated.knows(self._recorded.clock):
            self._num_denials -= 1
            return False
        self.simulated.order(self.simulated.host, self._recorded.clock)
        return True

    def synchronize(self) -> None:
        """Returns when the device has reached the event."""
        if self._recorded is not None:
            self.simulated.note("event", self.simulated.num_done - self._recorded.at)
            self.simulated.order(self.simulated.host, self._recorded.clock)

    def elapsed_time(self, other: Any) -> float:
        """The milliseconds to another event, of which each operation takes one."""
        if type(other) is not torch.Event:
            raise RuntimeError("expected other to be a torch.Event object")
        end_event: Any = other
        begin, end = self._recorded, end_event._recorded
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if begin is None or end is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.simulated.knows(begin.clock) and self.simulated.knows(end.clock)):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if begin.device != end.device:
            raise RuntimeError("CUDA error: invalid resource handle")
        return float(end.at - begin.at)

    def _stream(self, stream: Any, what: str) -> Stream:
        if stream is None:
            return self.simulated.torch.current_stream()
        if not isinstance(stream, Stream):
            # Torch reads any object's memory as that of a stream.
            raise TypeError(f"expected stream to be a torch.Stream object, not {type(stream)}")
        if stream.device.type != self._type:
            raise RuntimeError(
                f"Event device type {self._type.upper()} does not match {what} stream's device "
                f"type {stream.device.type.upper()}."
            )
        return stream


class StreamsOfTorch:
    """What ``torch.accelerator`` knows of a simulated device's streams. As in torch, each thread
    has a current device, first that of index 0, and a current stream of each device.
    """

    def __init__(self, simulated: SimulatedDevice) -> None:
        self._simulated = simulated
        self._compute: dict[int, Stream] = {}
        self._stream_class = type("Stream", (Stream,), {"simulated": simulated})
        self._event_class = type("Event", (Event,), {"simulated": simulated})
        self.all: list[Stream] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which torch has these streams and events."""
        functions = (
            self.current_stream,
            self.set_stream,
            self.current_device_index,
            self.set_device_index,
            self.device_index,
            self.synchronize,
        )
        replaced: list[tuple[Any, str, Any]] = [
            *((torch.accelerator, function.__name__, function) for function in functions),
            (torch.get_device_module(self._simulated.device), "synchronize", self.synchronize),
            (torch, "Stream", self._stream_class),
            (torch, "Event", self._event_class),
            (Tensor, "record_stream", lambda *args: self._simulated.keep_for_stream(*args)),
            (cuda, "pin", self._simulated.pin),
            (cuda, "SharedEvent", self._simulated.shared_event),
        ]
        with ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value))
            with self.device_index(self._simulated.device.index):
                yield

    def index_of(self, device: Any) -> int:
        """The index of a device, which may be given as its index; ``None`` is the current one."""
        if isinstance(device, int):
            return device
        found = self.current_device_index()
        if device is not None:
            device = torch.device(device)
            if device.type != self._simulated.device.type:
                raise ValueError(
                    f"{device.type} doesn't match the current accelerator "
                    f"{self._simulated.device.type}."
                )
            found = found if device.index is None else device.index
        return found

    # --- the functions of `torch.accelerator` ---

    def current_device_index(self) -> int:
        return getattr(self._simulated.local, "index", 0)

    def set_device_index(self, device: Any) -> None:
        self._simulated.local.index = self.index_of(device)

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before = self.current_device_index()
        self.set_device_index(index)
        try:
            yield
        finally:
            self.set_device_index(before)

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        current: dict[int, Stream] = vars(self._simulated.local).setdefault("streams", {})
        return current.get(index) or self._compute_stream(index)

    def set_stream(self, stream: Any) -> None:
        if not isinstance(stream, Stream):
            raise TypeError("_accelerator_setStream(): incompatible function arguments.")
        vars(self._simulated.local).setdefault("streams", {})[stream.device_index] = stream
        self.set_device_index(stream.device_index)

    def synchronize(self, device: Any = None) -> None:
        index = self.index_of(device)
        self._compute_stream(index)
        names = [stream.name for stream in self.all if stream.device_index == index]
        self._simulated.wait_for_streams(names)

    def _compute_stream(self, index: int) -> Stream:
        if index not in self._compute:
            stream = self._stream_class(index)
            is_own = stream.device == self._simulated.device
            stream.what = COMPUTE if is_own else f"{COMPUTE} of {stream.device}"
            # Of two threads that come here at once, both use the stream of the first.
            return self._compute.setdefault(index, stream)
        return self._compute[index]
