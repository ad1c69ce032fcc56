"""Records what one rank does in a step, at as little cost as possible.

Nothing is computed while the step runs: a mark is a tuple in a list that was made before. On a GPU
the moments are events in the stream, as in :mod:`lightning_pipeshift.model.measuring.timing`; they
are read when the step is over, by :meth:`Recorder.record`. Steps that are not recorded have no
recorder: whoever could be recorded has a ``recorder`` that is ``None`` then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, Final, NamedTuple

import torch

from lightning_pipeshift.devices.streams import Event, record_event, start_of_clock
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.timeline.recording import Mark, Memory, RankRecord, What

_MOST_MARKS: Final = 20_000


class _Noted(NamedTuple):
    """A mark as it is noted: moments of the compute are events, others readings of the clock."""

    what: str
    name: str
    begin: Event | float
    end: Event | float
    peer: int = -1
    num_bytes: int = 0


class Recorder:
    """One rank's record of a step, or of some consecutive minibatches.

    Args:
        device: the rank's.
        used_bytes: returns how many bytes of the device are in use.
    """

    def __init__(self, device: torch.device, used_bytes: Callable[[], int]) -> None:
        self._device = device
        self._used_bytes = used_bytes
        self._noted: list[_Noted | None] = [None] * _MOST_MARKS
        self._readings: list[tuple[Event, int]] = []
        # A counter's step is atomic, so threads may note marks at the same time.
        self._numbers = count()
        self._num_dropped = 0
        self._is_over = False
        # How many parts of the step have not ended, which may be after the step.
        self._num_open = 0
        self._changed = threading.Condition()
        self.action: Action | None = None
        """That is under way."""
        # What was queued before is no part of the step.
        self._start, self._start_seconds = start_of_clock(device)
        self._begin = self._start
        self._end: Event | None = None

    def now(self) -> Event:
        """The moment at which the device reaches this point."""
        return record_event(self._device, is_timed=True)

    def add(
        self,
        what: str,
        name: str,
        begin: Event | float,
        end: Event | float,
        peer: int = -1,
        num_bytes: int = 0,
    ) -> None:
        """Notes a mark; any thread may call this, at any time.

        Args:
            what: see :class:`~lightning_pipeshift.timeline.recording.Mark`, as the others.
            name: see there.
            begin: a result of :meth:`now`, or of ``time.perf_counter``.
            end: likewise.
            peer: the rank at the other end.
            num_bytes: of what was sent.
        """
        if not self._is_over:
            self._note(_Noted(what, name, begin, end, peer, num_bytes))

    def _note(self, mark: _Noted) -> None:
        try:
            self._noted[next(self._numbers)] = mark
        except IndexError:
            self._num_dropped += 1

    @contextmanager
    def lasting(self, what: str, name: str, peer: int, num_bytes: int) -> Iterator[None]:
        """Context of something that begins in the step and may end after it: the record waits for
        its end. Any thread may enter it.

        Args:
            what: as for :meth:`add`, as the others.
            name: see there.
            peer: see there.
            num_bytes: see there.
        """
        with self._changed:
            begins_too_late = self._is_over
            self._num_open += not begins_too_late
        if begins_too_late:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
            self._note(_Noted(what, name, begin, time.perf_counter(), peer, num_bytes))
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    @contextmanager
    def section(self, what: str, name: str, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Context of a part of the step, around another one."""
        begin = self.now()
        with inner:
            yield
        self.add(what, name, begin, self.now())

    # --- actions ---

    def begin_action(self, action: Action) -> None:
        """An action begins, or goes on."""
        self.action, self._begin = action, self.now()

    def begin_work(self) -> None:
        """The action has got what it needs, and has not computed before."""
        self._begin = self.now()

    @contextmanager
    def waiting(
        self, name: str, computes: bool, inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Context of a wait for other stages, around another one.

        Args:
            name: of the action that waits, if none is under way.
            computes: whether the one under way has computed since it began, or waited last.
            inner: the other context.
        """
        begin = self.now()
        if self.action is not None:
            name = str(self.action)
            if computes:
                self.add(What.ACTION, name, self._begin, begin)
        with inner:
            yield
        self._begin = self.now()
        self.add(What.WAIT, name, begin, self._begin)

    def end_action(self, computes: bool) -> None:
        """The action is over, or will go on later.

        Args:
            computes: as for :meth:`waiting`.
        """
        action, self.action, end = self.action, None, self.now()
        if action is not None and computes and not self._is_over:
            self.add(What.ACTION, str(action), self._begin, end)
            self._readings.append((end, self._used_bytes()))

    # --- afterwards ---

    def stop(self) -> None:
        """Ends the record: marks that begin later are ignored."""
        self._end = self.now()
        with self._changed:
            self._is_over = True

    def record(self, rank: int, vm: int, stage: int, host: str) -> RankRecord:
        """The record, in seconds of this process's clock. Waits until the device is done, and all
        that is :meth:`lasting`.

        Args:
            rank: of this process.
            vm: its virtual machine.
            stage: its stage.
            host: its host's name.
        """
        assert self._end is not None, "the record has not been stopped"
        self._end.synchronize()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)
        noted = [each for each in self._noted if each is not None]
        self._noted = []
        return RankRecord(
            rank=rank,
            vm=vm,
            stage=stage,
            host=host,
            device=self._device.type,
            begin=self._start_seconds,
            end=self._seconds(self._end),
            marks=tuple(self._read(each) for each in noted),
            memory=tuple(Memory(self._seconds(at), used) for at, used in self._readings),
            num_dropped=self._num_dropped,
        )

    def _read(self, noted: _Noted) -> Mark:
        begin, end = self._seconds(noted.begin), self._seconds(noted.end)
        return Mark(noted.what, noted.name, begin, max(begin, end), noted.peer, noted.num_bytes)

    def _seconds(self, moment: Event | float) -> float:
        if isinstance(moment, float):
            return moment
        return self._start_seconds + self._start.elapsed_time(moment) / 1000
