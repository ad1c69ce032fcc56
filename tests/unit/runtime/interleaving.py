"""Runs functions that wait for each other in any order of their steps, as threads and processes
might, but one at a time and by a seed, so that an order that fails can be run again.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

_NUM_CHANGES: Final = 3
"""In how many places of a run by priorities the one that runs becomes the last one."""


class Stuck(AssertionError):
    """All tasks wait, for each other or for nothing."""


class _Stopped(BaseException):
    """Ends a task of a run that has failed."""


class _Task:
    def __init__(self, name: str, priority: float) -> None:
        self.name = name
        self.priority = priority
        self.go = threading.Semaphore(0)
        self.is_ready: Callable[[], bool] = _always
        self.waits_for = "its turn"


class Interleaving:
    """Tasks of which one runs at a time. At each point where one might wait, another may go on.

    Half of the seeds choose among those that can go on with equal chances. The others give each
    task a priority and change it a few times (PCT: Burckhardt et al., A Randomized Scheduler with
    Probabilistic Guarantees of Finding Bugs, ASPLOS 2010): so one task may be far ahead or behind.

    Args:
        seed: of the order.
        num_points: about how many points a run has.
    """

    def __init__(self, seed: int, num_points: int = 2000) -> None:
        self._draw = random.Random(seed)
        self._has_priorities = bool(seed % 2)
        self._changes = {self._draw.randrange(num_points) for _ in range(_NUM_CHANGES)}
        self._tasks: list[_Task] = []
        self._back = threading.Semaphore(0)
        self._current: _Task | None = None
        self._error: BaseException | None = None
        self.num_points = 0
        """How many points there were."""

    def start(self, name: str, function: Callable[[], Any]) -> None:
        """Adds a task, which begins when it is chosen."""
        task = _Task(name, self._draw.random())
        self._tasks.append(task)

        def run() -> None:
            task.go.acquire()
            try:
                if self._error is None:
                    function()
            except _Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error
            self._tasks.remove(task)
            self._back.release()

        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def current(self) -> object:
        """Identifies the task that runs."""
        return self._current

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Lets others run; returns when it is this task's turn and a condition holds."""
        task = self._current
        assert task is not None
        task.is_ready, task.waits_for = is_ready, what
        self._back.release()
        task.go.acquire()
        if self._error is not None:
            raise _Stopped

    def point(self) -> None:
        """Lets others run."""
        self.wait_until(_always, "its turn")

    def run(self) -> None:
        """Runs all tasks to their end.

        Raises:
            Stuck: none can go on.
            BaseException: that of a task.
        """
        while self._tasks:
            ready = [task for task in self._tasks if task.is_ready()]
            if not ready and self._error is None:
                lines = [f"{task.name} waits for {task.waits_for}" for task in self._tasks]
                self._error = Stuck("nobody can go on:\n" + "\n".join(lines))
            task = self._chosen(ready or self._tasks)
            self.num_points += 1
            self._current = task
            task.go.release()
            self._back.acquire()
        if self._error is not None:
            raise self._error

    def _chosen(self, ready: list[_Task]) -> _Task:
        if not self._has_priorities:
            return self._draw.choice(ready)
        task = max(ready, key=lambda one: one.priority)
        if self.num_points in self._changes:
            task.priority = min(one.priority for one in self._tasks) - 1
        return task


def _always() -> bool:
    return True


class Condition:
    """In the place of :class:`threading.Condition`: only one task runs at a time, so nothing has to
    be locked.
    """

    def __init__(self, order: Interleaving) -> None:
        self._order = order

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """See :class:`threading.Condition`."""
        self._order.wait_until(is_there, "what another thread brings")

    def notify_all(self) -> None:
        """See :class:`threading.Condition`."""
        self._order.point()


class Queue:
    """In the place of :class:`queue.SimpleQueue`."""

    def __init__(self, order: Interleaving) -> None:
        self._order = order
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """See :class:`queue.SimpleQueue`."""
        self._items.append(item)
        self._order.point()

    def get(self) -> Any:
        """See :class:`queue.SimpleQueue`."""
        self._order.wait_until(lambda: bool(self._items), "an item of a queue")
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """See :class:`queue.SimpleQueue`."""
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Threads:
    """In the place of ``runtime.comm.threads.Threads``: tasks."""

    def __init__(self, order: Interleaving, name: str) -> None:
        self._order = order
        self._name = name

    def submit(self, function: Callable[[], Any]) -> Future:
        """See ``runtime.comm.threads.Threads``."""
        future = Future(self._order)

        def run() -> None:
            function()
            future.is_over = True

        self._order.start(self._name, run)
        return future


class Future:
    """Of a task's end."""

    def __init__(self, order: Interleaving) -> None:
        self._order = order
        self.is_over = False

    def done(self) -> bool:
        """Whether the task has ended."""
        return self.is_over

    def result(self) -> None:
        """Waits for its end."""
        self._order.wait_until(self.done, "the end of a thread")


class Network:
    """Messages between stages, in order for each pair of stages and each lane.

    A send is complete when its receiver has taken it, as gloo's are.
    """

    def __init__(self, order: Interleaving) -> None:
        self._order = order
        self._messages: dict[tuple[Any, int, int], deque[Any]] = {}

    def line(self, lane: Any, source: int, to: int) -> deque[Any]:
        """What is under way."""
        return self._messages.setdefault((lane, source, to), deque())

    def send(self, lane: Any, source: int, to: int, message: Any) -> None:
        """Sends without waiting."""
        self.line(lane, source, to).append(message)
        self._order.point()

    def settle(self, lane: Any, source: int, to: int, all_but: int = 0) -> None:
        """Waits until all but some messages have been taken."""
        line = self.line(lane, source, to)
        what = f"stage {to} to take {lane} from stage {source}"
        self._order.wait_until(lambda: len(line) <= all_but, what)

    def receive(self, lane: Any, source: int, to: int) -> Any:
        """Waits for the next message."""
        line = self.line(lane, source, to)
        what = f"{lane} from stage {source} to stage {to}"
        self._order.wait_until(lambda: bool(line), what)
        return line.popleft()
