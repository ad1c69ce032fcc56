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
