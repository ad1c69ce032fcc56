"""Threads that wait for others, beside the one that computes.

Unlike those of ``concurrent.futures``, they do not keep a process alive whose run has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

Work = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class Threads:
    """As many threads as there is work that waits.

    Args:
        name: what the threads are called, before their number.
        on_error: called in a thread whose work has failed, for those who wait for something else
            than the work's end.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_error = on_error
        self._work: Work = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function in a thread of its own."""
        future: Future[T] = Future()
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(
                target=self._serve, name=f"{self._name}-{self._count}", daemon=True
            ).start()
        self._work.put((function, future))
        return future

    def close(self) -> None:
        """Lets every thread end when it has nothing left to do."""
        for _ in range(self._count):
            self._work.put(None)
        self._count = 0

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if self._on_error is not None:
                    self._on_error(error)
            del item, function, future
            self._idle.release()


class InOrder:
    """One thread that does one thing after the other.

    Args:
        name: what the thread is called.
        on_error: called in the thread when something has failed. What comes after that is not done.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_error = on_error
        self._work: Work = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function when all that was submitted before is done."""
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put((function, future))
        return future

    def close(self) -> None:
        """Lets the thread end when it has nothing left to do."""
        if self._thread is not None:
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            function, future = item
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(function())
            except BaseException as error:
                if self._failure is None:
                    self._failure = error
                    if self._on_error is not None:
                        self._on_error(error)
                future.set_exception(error)
            del item, function, future
