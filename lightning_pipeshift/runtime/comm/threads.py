"""Threads that wait for other ranks, concurrently with the compute thread.

Unlike those of ``concurrent.futures``, they do not keep a process alive after its run has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from lightning_pipeshift.devices.streams import on_this_device

T = TypeVar("T")

Work = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class Threads:
    """A pool with one thread for each call in progress.

    Args:
        name: the prefix of the threads' names.
        on_error: called in a thread whose call has failed, as the caller may not wait for the
            call's future.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_error = on_error
        self._work: Work = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function in a thread that runs no other call meanwhile."""
        future: Future[T] = Future()
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(
                target=self._serve, name=f"{self._name}-{self._count}", daemon=True
            ).start()
        self._work.put((on_this_device(function), future))
        return future

    def close(self) -> None:
        """Lets every thread end when it has no call left to make."""
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
    """A thread that makes one call after the other.

    Args:
        name: the thread's name.
        on_error: called in the thread when a call has failed. Later calls are not made.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_error = on_error
        self._work: Work = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function when all earlier calls are done."""
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put((on_this_device(function), future))
        return future

    def close(self) -> None:
        """Lets the thread end when it has no call left to make."""
        if self._thread is not None:
            self._work.put(None)

    def join(self) -> None:
        """Waits until the thread has ended, after :meth:`close`."""
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            function, future = item
            try:
                try:
                    if self._failure is not None:
                        raise self._failure
                    result = function()
                finally:
                    # Who hears of the end may count on the memory that the call used.
                    del item, function
                future.set_result(result)
            except BaseException as error:
                if self._failure is None:
                    self._failure = error
                    if self._on_error is not None:
                        self._on_error(error)
                future.set_exception(error)
            del future
