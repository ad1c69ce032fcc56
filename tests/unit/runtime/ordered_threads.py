"""The package's own threads, locks and queues, run one at a time in an order that a seed decides,
on a simulated device on which a thread knows only what it has waited for or was told.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.simulated.device import SimulatedDevice
from tests.unit.runtime.interleaving import Interleaving


class OrderedThreads:
    """Stands in for ``threading`` and ``queue`` in modules.

    Args:
        order: which thread runs.
        device: is told what threads tell each other.
    """

    def __init__(self, order: Interleaving, device: SimulatedDevice) -> None:
        self.order = order
        self.device = device
        device.are_threads_apart = True
        self._names = itertools.count()

    def replace_in(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Lets modules use these instead of Python's own, until ``monkeypatch`` undoes it."""
        kinds = {
            "Lock": self.lock,
            "RLock": self.lock,
            "Condition": self.condition,
            "Semaphore": self.semaphore,
            "Thread": self.thread,
            "SimpleQueue": self.queue,
            "Future": self.future,
        }
        for module in modules:
            for name, kind in kinds.items():
                if name in vars(module):
                    monkeypatch.setattr(module, name, kind)
            if "threading" in vars(module):
                monkeypatch.setattr(module, "threading", SimpleNamespace(**kinds))

    def lock(self) -> Lock:
        """A lock that its thread may acquire again."""
        return Lock(self)

    def condition(self) -> Condition:
        """See :class:`threading.Condition`."""
        return Condition(self)

    def semaphore(self, value: int) -> Semaphore:
        """See :class:`threading.Semaphore`."""
        return Semaphore(self, value)

    def queue(self) -> Queue:
        """See :class:`queue.SimpleQueue`."""
        return Queue(self)

    def future(self) -> Future:
        """See :class:`concurrent.futures.Future`."""
        return Future(self)

    def thread(self, target: Callable[[], Any], name: str, **_: Any) -> Any:
        """See :class:`threading.Thread`."""
        name = f"{name} {next(self._names)}"
        return SimpleNamespace(start=lambda: self.order.start(name, target))


class _Told:
    """What threads have told by an object."""

    def __init__(self, threads: OrderedThreads) -> None:
        self.order = threads.order
        self._device = threads.device
        self._clock: dict[str, int] = {}

    def tell(self) -> None:
        """Whoever comes later knows what this thread knows."""
        for timeline, number in self._device.told().items():
            self._clock[timeline] = max(number, self._clock.get(timeline, 0))

    def hear(self) -> None:
        """This thread knows what was told."""
        self._device.heard(self._clock)


class Lock:
    """See :class:`threading.RLock`."""

    def __init__(self, threads: OrderedThreads) -> None:
        self._told = _Told(threads)
        self._order = threads.order
        self._owner: Any = None
        self._count = 0

    def acquire(self) -> None:
        """See :class:`threading.RLock`."""
        me = self._order.current
        if self._owner is not me:
            self._order.wait_until(lambda: self._owner is None, "a lock")
            self._owner = me
            self._told.hear()
        self._count += 1

    def release(self) -> None:
        """See :class:`threading.RLock`."""
        self._count -= 1
        if not self._count:
            self._told.tell()
            self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """See :class:`threading.Condition`."""

    def __init__(self, threads: OrderedThreads) -> None:
        super().__init__(threads)
        self._num_notified = 0

    def wait(self) -> None:
        """See :class:`threading.Condition`."""
        count, self._count = self._count, 1
        number = self._num_notified
        self.release()
        self._order.wait_until(lambda: self._num_notified > number, "another thread's news")
        self.acquire()
        self._count = count

    def notify_all(self) -> None:
        """See :class:`threading.Condition`."""
        self._num_notified += 1


class Semaphore:
    """See :class:`threading.Semaphore`."""

    def __init__(self, threads: OrderedThreads, value: int) -> None:
        self._told = _Told(threads)
        self._value = value

    def acquire(self, blocking: bool = True) -> bool:
        """See :class:`threading.Semaphore`."""
        if blocking:
            self._told.order.wait_until(lambda: self._value > 0, "a semaphore")
        if not self._value:
            return False
        self._value -= 1
        self._told.hear()
        return True

    def release(self) -> None:
        """See :class:`threading.Semaphore`."""
        self._told.tell()
        self._value += 1


class Queue:
    """See :class:`queue.SimpleQueue`."""

    def __init__(self, threads: OrderedThreads) -> None:
        self._threads = threads
        self._items: deque[tuple[_Told, Any]] = deque()

    def put(self, item: Any) -> None:
        """See :class:`queue.SimpleQueue`."""
        told = _Told(self._threads)
        told.tell()
        self._items.append((told, item))
        self._threads.order.point()

    def get(self, timeout: float | None = None) -> Any:
        """See :class:`queue.SimpleQueue`."""
        self._threads.order.wait_until(lambda: bool(self._items), "an item of a queue")
        told, item = self._items.popleft()
        told.hear()
        return item


class Future:
    """See :class:`concurrent.futures.Future`."""

    def __init__(self, threads: OrderedThreads) -> None:
        self._told = _Told(threads)
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_over = False

    def _end(self) -> None:
        self._told.tell()
        self._is_over = True
        self._told.order.point()

    def set_result(self, result: Any) -> None:
        """See :class:`concurrent.futures.Future`."""
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """See :class:`concurrent.futures.Future`."""
        self._error = error
        self._end()

    def done(self) -> bool:
        """See :class:`concurrent.futures.Future`."""
        self._told.order.point()
        if self._is_over:
            self._told.hear()
        return self._is_over

    def result(self, timeout: float | None = None) -> Any:
        """See :class:`concurrent.futures.Future`."""
        self._told.order.wait_until(lambda: self._is_over, "the end of a call")
        self._told.hear()
        if self._error is not None:
            raise self._error
        return self._result
