"""The package's own threads, locks and queues, run one at a time in every order, on a simulated
device on which a thread knows only what it has waited for or was told.

Two threads that hold the same lock one after the other need not run in both orders: only if one
writes what the other reads or writes. So the attributes of the objects that they share are
followed, and a thread is told only what comes with the values that it reads.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_pipeshift.devices.streams import on_this_device
from tests.simulated.device import SimulatedDevice
from tests.simulated.ordering import join
from tests.unit.runtime.every_order import Run, Step

_NAME = "(its name)"


class OrderedThreads:
    """Stands in for ``threading`` and ``queue`` in modules.

    Args:
        order: which thread runs.
        device: is told what threads tell each other.
    """

    def __init__(self, order: Run, device: SimulatedDevice) -> None:
        self.order = order
        self.device = device
        device.are_threads_apart = True
        device.at_allocator = lambda stream: order.touch(("allocator", stream), True)
        order.at_end_of_step = self._end_step
        # By task: the locks that it holds.
        self.held: defaultdict[Any, list[Lock]] = defaultdict(list)
        self._known: defaultdict[Hashable, dict[str, int]] = defaultdict(dict)
        # What the task that holds a lock has written: it tells of it when it gives the lock back.
        self._to_tell: defaultdict[Any, set[Hashable]] = defaultdict(set)
        # The collections that this step has come across, as they were, and what to tell of them.
        self._before: dict[Hashable, tuple[Any, Any, dict[str, int] | None]] = {}

    def replace_in(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Lets modules use these instead of Python's own, until ``monkeypatch`` undoes it."""
        kinds = {
            "Lock": self.lock,
            "RLock": self.lock,
            "Condition": self.condition,
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

    def follow(self, monkeypatch: pytest.MonkeyPatch, *classes: type) -> None:
        """Sees who reads and writes the attributes of a class's objects."""

        followed: dict[type, frozenset[str]] = {}

        def get(me: Any, name: str) -> Any:
            value = object.__getattribute__(me, name)
            own = object.__getattribute__(me, "__dict__")
            if name in own or name in followed.get(type(me), ()):
                self._read(self._name(me, name), value)
            return value

        def put(me: Any, name: str, value: Any) -> None:
            object.__setattr__(me, name, value)
            if isinstance(value, Lock):
                value.guards_attributes = True
            self.touch(self._name(me, name), True)

        for one in classes:
            slots = (getattr(each, "__slots__", ()) for each in one.__mro__)
            followed[one] = frozenset(itertools.chain.from_iterable(slots))
            monkeypatch.setattr(one, "__getattribute__", get, raising=False)
            monkeypatch.setattr(one, "__setattr__", put, raising=False)

    def _name(self, owner: Any, attribute: str) -> Hashable:
        own = object.__getattribute__(owner, "__dict__")
        if _NAME not in own:
            own[_NAME] = self.order.new_name(type(owner).__name__)
        return own[_NAME], attribute

    def _read(self, name: Hashable, value: Any) -> None:
        if isinstance(value, Lock | Queue | Future):
            return
        self.touch(name, isinstance(value, itertools.count))
        if isinstance(value, dict | list | deque | set) and name not in self._before:
            told = None if self.held[self.order.current] else self.device.told()
            self._before[name] = value, _identities(value), told

    def touch(self, name: Hashable, writes: bool) -> None:
        """Notes that the current task reads or writes what it shares with others."""
        self.order.touch(name, writes)
        self.device.heard(self._known[name])
        if writes:
            self._tell(name, None if self.held[self.order.current] else self.device.told())

    def _tell(self, name: Hashable, told: dict[str, int] | None) -> None:
        if told is None:
            self._to_tell[self.order.current].add(name)
        else:
            join(self._known[name], told)

    def _find_changes(self) -> None:
        for name, (value, before, told) in self._before.items():
            if _identities(value) != before:
                self.order.touch(name, True)
                self._tell(name, told)
        self._before.clear()

    def end_section(self) -> None:
        """Called when the current task is about to give back its last lock."""
        self._find_changes()
        told = self.device.told()
        for name in self._to_tell.pop(self.order.current, ()):
            join(self._known[name], told)

    def _end_step(self) -> None:
        self._find_changes()
        self.device.collect_freed()
        for lock in self.held[self.order.current]:
            self.order.touch(lock.name, True)

    def lock(self) -> Lock:
        """A lock that its thread may acquire again."""
        return Lock(self)

    def condition(self) -> Condition:
        """See :class:`threading.Condition`."""
        return Condition(self)

    def queue(self) -> Queue:
        """See :class:`queue.SimpleQueue`."""
        return Queue(self)

    def future(self) -> Future:
        """See :class:`concurrent.futures.Future`."""
        return Future(self)

    def pool(self, name: str) -> Any:
        """Stands in for ``runtime.comm.threads.Threads``: a thread for each call."""

        def submit(function: Callable[[], Any]) -> None:
            self.order.start(name, on_this_device(function))

        return SimpleNamespace(submit=submit)

    def thread(self, target: Callable[[], Any], name: str, **_: Any) -> Any:
        """See :class:`threading.Thread`."""
        return SimpleNamespace(start=lambda: self.order.start(name, target))


def _identities(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _identities(each)) for key, each in value.items()]
    if isinstance(value, list | deque):
        return [_identities(each) for each in value]
    return set(value) if isinstance(value, set) else id(value)


class Lock:
    """See :class:`threading.RLock`."""

    guards_attributes = False
    """Whether all that it guards are attributes that are followed."""

    def __init__(self, threads: OrderedThreads) -> None:
        self._threads = threads
        self._order = threads.order
        self.name = self._order.new_name("lock")
        self._owner: Any = None
        self._count = 0
        self._since: Step | None = None
        self._released: Step | None = None

    def acquire(self) -> None:
        """See :class:`threading.RLock`."""
        if self._owner is not self._order.current:
            self._order.wait_until(lambda: self._owner is None, "a lock")
            self._taken(1)
        else:
            self._count += 1

    def _taken(self, count: int) -> None:
        self._owner, self._count = self._order.current, count
        self._since = self._order.step
        self._threads.held[self._owner].append(self)
        if self._released is not None:
            self._order.step.freed_by.append(self._released)
        if self.guards_attributes:
            self._order.touch(self.name, False)
        else:
            self._threads.touch(self.name, True)

    def release(self) -> None:
        """See :class:`threading.RLock`."""
        self._count -= 1
        if not self._count:
            if self._since is not self._order.step:
                self._released = self._order.step
            held = self._threads.held[self._owner]
            if len(held) == 1:
                self._threads.end_section()
            held.remove(self)
            self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """See :class:`threading.Condition`."""

    def __init__(self, threads: OrderedThreads) -> None:
        super().__init__(threads)
        self._notified: list[Step] = []

    def wait(self) -> None:
        """See :class:`threading.Condition`."""
        count, self._count = self._count, 1
        number = len(self._notified)
        self._order.touch((self.name, "news"), False)
        self.release()
        self._order.wait_until(
            lambda: len(self._notified) > number and self._owner is None, "another thread's news"
        )
        self._order.step.after.append(self._notified[number])
        self._taken(count)

    def notify_all(self) -> None:
        """See :class:`threading.Condition`."""
        self._order.touch((self.name, "news"), True)
        self._notified.append(self._order.step)


class Queue:
    """See :class:`queue.SimpleQueue`."""

    def __init__(self, threads: OrderedThreads) -> None:
        self._order, self._device = threads.order, threads.device
        self._name = threads.order.new_name("queue")
        self._items: deque[tuple[Step, dict[str, int], Any]] = deque()

    def put(self, item: Any) -> None:
        """See :class:`queue.SimpleQueue`."""
        self._order.point()
        self._order.touch((self._name, "last"), True)
        self._items.append((self._order.step, self._device.told(), item))

    def get(self, timeout: float | None = None) -> Any:
        """See :class:`queue.SimpleQueue`."""
        self._order.wait_until(lambda: bool(self._items), f"an item of the {self._name}")
        self._order.touch((self._name, "first"), True)
        step, told, item = self._items.popleft()
        self._order.step.after.append(step)
        self._device.heard(told)
        return item


class Future:
    """See :class:`concurrent.futures.Future`."""

    def __init__(self, threads: OrderedThreads) -> None:
        self._threads = threads
        self._name = threads.order.new_name("future")
        self._result: Any = None
        self._error: BaseException | None = None
        self._end: Step | None = None
        self._calls: list[Callable[[Any], object]] = []

    def set_result(self, result: Any, error: BaseException | None = None) -> None:
        """See :class:`concurrent.futures.Future`."""
        order = self._threads.order
        order.point()
        self._threads.touch(self._name, True)
        self._result, self._error, self._end = result, error, order.step
        for call in self._calls:
            call(self)

    def set_exception(self, error: BaseException) -> None:
        """See :class:`concurrent.futures.Future`."""
        self.set_result(None, error)

    def done(self) -> bool:
        """See :class:`concurrent.futures.Future`."""
        self._threads.order.point()
        self._threads.order.touch(self._name, False)
        if self._end is not None:
            self._threads.touch(self._name, False)
        return self._end is not None

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """See :class:`concurrent.futures.Future`."""
        if self.done():
            call(self)
        else:
            self._threads.touch(self._name, True)
            self._calls.append(call)

    def exception(self) -> BaseException | None:
        """See :class:`concurrent.futures.Future`: of a call that has ended."""
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        """See :class:`concurrent.futures.Future`."""
        order = self._threads.order
        order.wait_until(lambda: self._end is not None, "the end of a call")
        assert self._end is not None
        order.step.after.append(self._end)
        self._threads.touch(self._name, False)
        if self._error is not None:
            raise self._error
        return self._result
