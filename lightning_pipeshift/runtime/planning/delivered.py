"""Estimates how fast a device works, with all pauses in its work.

A CPU quota, a stopped virtual machine or another job does not make every layer slower: it stops the
process for some milliseconds now and then. Medians of layers' times do not contain these pauses, so
a device counts by the mean over whole steps. One long pause may be an accident: the largest value
counts only as much as the second largest (a winsorised mean, Tukey 1962).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final, NamedTuple

_BATCHES: Final = 10
"""The number of consecutive parts of the steps whose means say how sure the mean of all is."""

_FEWEST_BEFORE: Final = 3
"""Steps before a change of circumstances say that there is one if they are so many."""

_CLEAR: Final = 5.0
"""By so many standard errors means before and after a change differ."""

_PROBED_AFTER: Final = 4
"""The number of windows after which a rank without layers is probed, at first."""

_PROBED_PART: Final = 0.05
"""The part of the time that probes may take."""

_SURE: Final = 0.05
"""A probe has found a rank slow when its standard error is below this part of its mean."""

_LEAST_SECONDS: Final = 0.3
_MOST_SECONDS: Final = 3.0
"""A probe takes between so many seconds: three periods of a container's quota at least, and some
pauses of half a second if there is the time for that.
"""


class Estimate(NamedTuple):
    """A mean of the latest steps.

    Args:
        mean: of the steps' values.
        error: its standard error.
        num_steps: how many steps it is the mean of.
    """

    mean: float
    error: float = 0.0
    num_steps: int = 1


def recent(values: Sequence[float], fewest: int) -> Estimate:
    """The mean of as many of the latest steps as seem to be of the same circumstances.

    Pauses of half a second are rarer than short steps: only many steps say how much a device loses
    by them. Steps before a change say nothing.

    Args:
        values: one for each step, the latest last; at least one.
        fewest: how many of the latest steps count in any case.
    """
    count = len(values)
    while (later := _steps_since_change(values[-count:], max(fewest, 1))) < count:
        count = later
    return _estimate(values[-count:])


def _steps_since_change(values: Sequence[float], fewest: int) -> int:
    """How many of the latest steps, not fewer than given, are clearly of other circumstances than
    all before them; the number of values if none are.

    The change is sought where two means fit the steps best (least squares, Hawkins 1977), and both
    parts are taken to vary alike: a short one may lack rare pauses by chance.
    """
    values = _capped(values)
    count, mean = len(values), fmean(values)
    spread = sum((value - mean) ** 2 for value in values)
    newer = sum(values[-fewest:]) - fewest * mean
    # The part of the spread that two means explain, and the number of steps of the later one.
    most, at = 0.0, count
    for later in range(fewest, count - _FEWEST_BEFORE + 1):
        explained = newer**2 * count / (later * (count - later))
        if explained > most:
            most, at = explained, later
        newer += values[-later - 1] - mean
    # Steps of a simulated clock may be equal but for rounding.
    is_clear = count * most > _CLEAR**2 * (spread - most) + (1e-6 * mean * count) ** 2
    return at if is_clear else count


def _estimate(values: Sequence[float]) -> Estimate:
    """The error is that of the means of consecutive steps (batch means, Conway 1963): regular
    pauses are in all of them alike, and a disturbance that lasts for some steps is in one.
    """
    capped = _capped(values)
    size = -(-len(capped) // _BATCHES)
    means = [fmean(capped[at : at + size]) for at in range(0, len(capped), size)]
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return Estimate(fmean(capped), error, len(capped))


def _capped(values: Sequence[float]) -> list[float]:
    most = sorted(values)[-2:][0]
    return [min(value, most) if len(values) > 2 else value for value in values]


class ProbeTimes:
    """When a rank that gave layers away, as it was slow, is probed. With less to do, or nothing,
    its own layers do not show how fast it is. If it gets layers by that and loses them again soon,
    it waits twice as long.
    """

    def __init__(self) -> None:
        self._after = _PROBED_AFTER
        self._next = 0
        self._num_held = 0
        self._num_free: float = math.inf
        # How long a probe may take by now.
        self._most = 0.0

    def lasts(self, slices: Sequence[float], taken: float, seconds: float, limit: float) -> float:
        """How much longer a probe takes: until it has surely found the rank slow, and if it finds
        it fast, as long as a probe may take: rare pauses have to have the time to show. What it
        takes of the time for probes, the next one waits for.

        Args:
            slices: seconds of each slice so far.
            taken: how long they were to take in all.
            seconds: what :meth:`seconds` allowed it.
            limit: the mean seconds of a slice from which on the rank is slow.
        """
        # A pause makes it longer.
        taken = max(taken, sum(slices))
        self._most = seconds - taken
        if not slices:
            return _LEAST_SECONDS
        found = recent(slices, len(slices))
        if found.mean - 2 * found.error > limit and found.error < _SURE * found.mean:
            return 0.0
        most = seconds if fmean(slices) > limit else _MOST_SECONDS
        return max(0.0, min(taken, most - taken))

    def seconds(self, is_held: bool, is_slow: bool, window_seconds: float) -> float:
        """How long to probe now; 0 if it is not time to. Called once in each window of steps.

        Args:
            is_held: whether the rank counts as slow since layers were taken from it.
            is_slow: whether its own layers show that it still is: no probe is needed for that.
            window_seconds: how long a window takes.
        """
        if not is_held:
            self._num_held, self._num_free, self._most = 0, self._num_free + 1, 0.0
            return 0.0
        if not self._num_held:
            self._after *= 2 if self._num_free <= 2 * self._after else 1
            self._next = self._after
        self._num_held, self._num_free = self._num_held + 1, 0
        self._most = min(self._most + _PROBED_PART * window_seconds, _MOST_SECONDS)
        if is_slow or self._num_held < self._next or self._most < _LEAST_SECONDS:
            return 0.0
        self._next = self._num_held + self._after
        seconds, self._most = self._most, 0.0
        return seconds
