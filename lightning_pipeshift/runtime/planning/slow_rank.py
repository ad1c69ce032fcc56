"""Remembers how slow a rank was when layers were taken from it, and finds out when it is over.

With less to do, or nothing, the rank's own layers do not show how fast it is: a device with a CPU
quota then looks as fast as one without. So the times before hold until it gets layers again, and
now and then it is probed. If it gets layers by that and loses them again soon, it waits twice as
long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

import torch

from lightning_pipeshift.runtime.planning.delivered import recent
from lightning_pipeshift.runtime.planning.probe import time_slices
from lightning_pipeshift.runtime.planning.profile_fitting import RankFigures, Times

_SLOWER: Final = 1.1
"""A rank that was so many times as slow before layers were taken from it may be fast again. By a
probe that takes no longer than this it is.
"""

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


class ProbeTimes:
    """When a rank that gave layers away is probed, and for how long."""

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


class SlowRank:
    """This rank's speed since layers were taken from it, as far as it is known.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.slice_seconds: float | None = None
        """Of a slice of the probe before training."""
        self.is_undone = False
        """Whether the next change of the plan undoes the one before it."""
        # The layers that this rank has owned last, their times, and those of all layers that it
        # owned before some of them were taken from it.
        self._own: frozenset[int] = frozenset()
        self._times: Mapping[int, Times] = {}
        self._earlier: Mapping[int, Times] = {}
        # These times as they were before this rank's layers changed.
        self._earlier_before: Mapping[int, Times] = {}
        # Whether the latest probe has found it as fast as before training; and how many times as
        # long its slices took, with the relative standard error.
        self._has_recovered = False
        self._slowdown: float | None = None
        self._doubt = 0.0
        self._probe_times = ProbeTimes()

    def earlier(
        self, own: frozenset[int], times: Mapping[int, Times], error: float
    ) -> Mapping[int, Times]:
        """The times that this rank had before layers were taken from it, which hold until it gets
        layers again. If it is surely slower than by these, it counts as slower: steps from before
        it became slow may be in their mean.

        Args:
            own: the layers that it owns.
            times: theirs.
            error: their relative standard error.
        """
        if own != self._own:
            held, self._earlier = self._earlier, {}
            if self.is_undone:
                self._earlier = self._earlier_before
            elif own < self._own:
                self._earlier = self._times
            self._earlier_before, self.is_undone, self._has_recovered = held, False, False
        elif self._earlier and times:
            now, before = (sum(sum(by[n]) for n in times) for by in (times, self._earlier))
            more = max(1.0, now / before / (1 + 2 * error)) if before else 1.0
            self._earlier = {n: (more * f, more * b) for n, (f, b) in self._earlier.items()}
        if times:
            self._times = times
        self._own = own
        return {} if self._has_recovered else self._earlier

    def probed(
        self, own: Collection[int], figures: RankFigures, window_seconds: float
    ) -> RankFigures:
        """The figures of this rank. If it counts as slow since layers were taken from it, and does
        not look slow now, it is probed now and then, until it has recovered. Called once in each
        window of steps.

        Args:
            own: the layers that it owns.
            figures: without any probe.
            window_seconds: how long a window takes.
        """
        before, now = (
            sum(sum(times[layer]) for layer in own if layer in times)
            for times in (figures.earlier, figures.times)
        )
        is_held = bool(figures.earlier) or (not own and not self._has_recovered)
        if own and not is_held:
            self._slowdown = None
        is_slow = bool(before) and before < _SLOWER * now
        seconds = self._probe_times.seconds(is_held, is_slow, window_seconds)
        if seconds and self.slice_seconds:
            self._probe(seconds, self.slice_seconds)
        if self._slowdown is None or is_slow:
            return figures
        # Without layers, the few operations around them do not say how fast the rank is.
        error = figures.error if own else self._doubt
        return replace(figures, earlier={}, slowdown=self._slowdown, error=error)

    def _probe(self, seconds: float, usual: float) -> None:
        slices: list[float] = []
        taken, limit = 0.0, _SLOWER * usual
        while more := self._probe_times.lasts(slices, taken, seconds, limit):
            slices += time_slices(self._device, more)
            taken += more
        # For a rank that counts as slow even one pause is evidence. What other programs add now
        # and then is in the times of all ranks' layers.
        found, mean = recent(slices, len(slices)), fmean(slices)
        self._slowdown = mean / usual if mean > limit else 1.0
        self._doubt = found.error / found.mean if found.mean else 0.0
        self._has_recovered = mean <= limit
