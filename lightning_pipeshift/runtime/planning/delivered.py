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

_MOST_DOUBLED: Final = 16
"""A rank that stays slow is probed after so many times as many windows at the latest."""

_FASTER: Final = 1.05
"""Steps that are so many times as fast as at the last probe may mean that the rank has recovered.
"""

_PROBED_PART: Final = 0.05
"""The part of the time that probes may take."""

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
    its own layers do not show how fast it is. Each probe that finds it slow doubles the time to
    the next one, unless steps get faster meanwhile. If it gets layers by a probe and loses them
    again soon, it waits twice as long from the beginning.
    """

    def __init__(self) -> None:
        self._after = self._wait = _PROBED_AFTER
        # When it was probed last, and what a window took then.
        self._probed, self._took = 0, 0.0
        self._num_held = 0
        self._num_free: float = math.inf
        # How long a probe may take by now.
        self._most = 0.0

    def seconds(self, is_held: bool, is_slow: bool, window_seconds: float) -> float:
        """How long to probe now; 0 if it is not time to. Called once in each window of steps.

        Args:
            is_held: whether the rank counts as slow since layers were taken from it: no longer once
                a probe has found that it has recovered.
            is_slow: whether its own layers show that it still is: no probe is needed for that.
            window_seconds: how long the latest window took.
        """
        if not is_held:
            self._num_held, self._num_free, self._most = 0, self._num_free + 1, 0.0
            return 0.0
        if not self._num_held:
            self._after *= 2 if self._num_free <= 4 * self._after else 1
            self._wait, self._probed, self._took = self._after, 0, 0.0
        self._num_held, self._num_free = self._num_held + 1, 0
        wait = self._after if _FASTER * window_seconds < self._took else self._wait
        part = _PROBED_PART * self._after / wait
        self._most = min(self._most + part * window_seconds, _MOST_SECONDS)
        if is_slow or self._num_held - self._probed < wait or self._most < _LEAST_SECONDS:
            return 0.0
        self._probed, self._took = self._num_held, window_seconds
        self._wait = min(2 * self._wait, _MOST_DOUBLED * self._after)
        seconds, self._most = self._most, 0.0
        return seconds
