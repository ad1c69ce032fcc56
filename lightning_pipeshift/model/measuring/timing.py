"""Times every layer, forward and backward, while training runs.

A forward is timed around the layer's call. A backward is not a call: autograd runs the nodes of all
layers one after the other, the last first. So a hook on a layer's outputs marks the moment at which
the backward enters the layer; the layer's backward lasts until the backward enters the layer before
it, or ends. The user code between two layers counts for the earlier one.

On a GPU the marks are events in the stream, read after they have completed: no code waits for them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from lightning_pipeshift.devices.streams import Event, elapsed_seconds, record_event
from lightning_pipeshift.model.parameters.gradients import call_before_backward
from lightning_pipeshift.model.tensors.trees import leaves_of

# Of each interval the latest samples are kept.
_MOST_SAMPLES = 512

_WORK = ("forward", "backward")
# In place of a layer, where a backward waits for another stage.
_WAITS = -2


class Timer:
    """The times of one stage's layers and actions.

    Args:
        device: that of the stage.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: dict[tuple[str, int], deque[float]] = {}
        # How many there were, with those that were dropped.
        self._counts: Counter[tuple[str, int]] = Counter()
        # Marked intervals that have not been read yet.
        self._marked: list[tuple[tuple[str, int], Event, Event, bool]] = []
        # The layers' time that was read since the last interval around some.
        self._inside = 0.0
        self._entered: list[tuple[int, Event]] = []
        # The seconds of all forwards: of this thread's processor, and of the clock.
        self._ran, self._took = 0.0, 0.0

    def now(self) -> Event:
        """The moment at which the device reaches this point."""
        return record_event(self._device, is_timed=True)

    def add(self, what: str, number: int, begin: Any, end: Any, is_around: bool = False) -> None:
        """Adds an interval.

        Args:
            what: its name.
            number: distinguishes intervals of the same name; for ``"forward"`` and ``"backward"``
                the layer.
            begin: a result of :meth:`now`.
            end: likewise.
            is_around: whether the layers' intervals since the last such one lie in it. Only the
                rest of it counts: a pause in a layer is none outside of it.
        """
        self._marked.append(((what, number), begin, end, is_around))

    def timed(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward that is timed, and so is its backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin, ran, took = self.now(), time.thread_time(), time.perf_counter()
            result = forward(*args, **kwargs)
            self.add("forward", layer, begin, self.now())
            self._ran += time.thread_time() - ran
            self._took += time.perf_counter() - took
            self._time_backward(layer, leaves_of(result))
            return result

        return run

    def _time_backward(self, layer: int, results: Sequence[Any]) -> None:
        has_entered: list[bool] = []

        def enter() -> None:
            if not has_entered:
                has_entered.append(True)
                self._entered.append((layer, self.now()))

        call_before_backward(results, enter)

    def waits(self) -> None:
        """Called when a backward waits for another stage: up to the next layer, no time counts."""
        self._entered.append((_WAITS, self.now()))

    def end_backward(self, begin: Any) -> None:
        """Called when a backward has ended.

        Args:
            begin: its start; until it enters a layer it is in the code after the last one.
        """
        end = self.now()
        moments = [(-1, begin), *self._entered]
        for (layer, start), (_, stop) in zip(moments, [*moments[1:], (-1, end)], strict=True):
            if layer != _WAITS:
                self.add("backward", layer, start, stop)
        self._entered.clear()

    def read(self) -> float:
        """Reads the marked intervals that have ended by now.

        Returns:
            The seconds of those that are work of layers, and of the code behind the last one.
        """
        waiting, work = [], 0.0
        for entry in self._marked:
            key, begin, end, is_around = entry
            seconds = elapsed_seconds(begin, end)
            if seconds is None:
                waiting.append(entry)
                continue
            if key[0] in _WORK:
                work += seconds
                self._inside += seconds if key[1] >= 0 else 0.0
            elif is_around:
                seconds, self._inside = max(0.0, seconds - self._inside), 0.0
            self._samples.setdefault(key, deque(maxlen=_MOST_SAMPLES)).append(seconds)
            self._counts[key] += 1
        self._marked = waiting
        return work

    @property
    def typical_seconds(self) -> float:
        """The work in all samples, if each of a layer had taken as long as the median one."""
        return sum(
            self._counts[key] * median(found)
            for key, found in self._samples.items()
            if key[0] in _WORK
        )

    @property
    def ran(self) -> float:
        """In which part of the time of the layers' forwards this thread ran on a processor."""
        return min(1.0, self._ran / self._took) if self._took else 1.0

    def median(self, what: str, number: int = -1) -> float | None:
        """The median of an interval's samples: occasional disturbances of the machine do not change
        it; ``None`` if there are none.
        """
        samples = self._samples.get((what, number))
        return median(samples) if samples else None

    def forget(self) -> None:
        """Discards all samples, for example those of warm-up steps."""
        self._samples.clear()
        self._counts.clear()
        self._marked.clear()
        self._ran = self._took = self._inside = 0.0
