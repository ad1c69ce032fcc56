"""Which layers a stage recomputes, so that it has room for the others' saved tensors.

Recomputation makes a stage slower and its memory smaller, whatever the other stages do. So for a
range of layers on a stage one choice is best: the layers that take the least time together, among
those that free enough (a knapsack problem). Who searches for a cut then has to search the cuts
only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.workload import Cut, Numbers, Workload, sums_of_ranges

# A front longer than this is thinned out: better a hair from the optimum than out of time.
_LONGEST_FRONT = 1024


def bytes_freed(workload: Workload) -> Numbers:
    """(S, L): by how much stage s holds less at its peak if it recomputes layer l.

    Zero where that frees nothing; see :meth:`Workload.memory_bytes`."""
    in_flight = np.array(workload.in_flight)[:, None]
    freed = (in_flight - 1) * workload.saved_bytes - in_flight * workload.input_bytes
    recomputes = np.array([s in workload.recomputing for s in range(workload.num_stages)])
    possible: Numbers = np.maximum(freed, 0.0) * recomputes[:, None]
    return possible


def bytes_held(workload: Workload, recompute: str) -> Numbers:
    """(S, L + 1, L + 1): what stage s holds at the least with the layers from b to e, at
    ``[s, b, e]``.

    Args:
        workload: the layers and stages.
        recompute: ``"none"``, ``"full"`` (all layers, where that can free memory) or ``"auto"``
            (any layers).
    """
    in_flight = np.array(workload.in_flight)[:, None]
    held = workload.static_bytes + in_flight * workload.saved_bytes
    if recompute == "auto":
        held = held - bytes_freed(workload)
    elif recompute == "full":
        again = sorted(workload.recomputing)
        inputs = in_flight[again] * workload.input_bytes
        held[again] = workload.static_bytes + workload.saved_bytes + inputs
    return sums_of_ranges(held)


class Recomputation:
    """What each stage recomputes, for each range of layers.

    Args:
        workload: the layers and stages.
        recompute: ``"none"``, ``"full"`` or ``"auto"``.
        longest_seconds: a range that takes a stage longer for a microbatch is of no interest, and
            counts as one that does not fit.

    Attributes:
        seconds: (S, L + 1, L + 1), what stage s recomputes with the layers from b to e, at
            ``[s, b, e]``; infinite where it has no room for them. With ``"auto"`` at least this,
            and exactly this once the range has been settled.
    """

    def __init__(
        self, workload: Workload, recompute: str, longest_seconds: float = math.inf
    ) -> None:
        self._workload = workload
        self._recompute = recompute
        self._freed = bytes_freed(workload)
        room = workload.room_bytes[:, None, None]
        fits = bytes_held(workload, recompute) <= room
        self.seconds: Numbers = np.where(fits, 0.0, math.inf)
        self._lacking: Numbers = np.zeros_like(self.seconds)
        self._chosen: dict[tuple[int, int, int], tuple[int, ...]] = {}
        if recompute == "full":
            for s in workload.recomputing:
                self.seconds[s] += sums_of_ranges(workload.forward[s])
        elif recompute == "auto":
            self._lacking = np.maximum(bytes_held(workload, "none") - room, 0.0)
            slots = sums_of_ranges(workload.forward + workload.backward)
            self.seconds[(self._lacking > 0) & (slots > longest_seconds)] = math.inf
            for s in range(workload.num_stages):
                self._bound(s)

    def settle(self, cuts: Iterable[Sequence[int]]) -> bool:
        """Makes :attr:`seconds` exact for the ranges of these cuts (counts per stage).

        Returns whether any of it was less before."""
        rose = False
        for counts in cuts:
            begin = 0
            for s, count in enumerate(counts):
                rose |= self._settle(s, begin, begin + count)
                begin += count
        return rose

    def cut(self, counts: Sequence[int]) -> Cut | None:
        """The cut with these counts that takes the least time; ``None`` if it does not fit."""
        if self._recompute == "full":
            cut = self._workload.everything_recomputed(counts)
            return cut if self._workload.fits(cut) else None
        self.settle([counts])
        layers: list[int] = []
        begin = 0
        for s, count in enumerate(counts):
            if not math.isfinite(self.seconds[s, begin, begin + count]):
                return None
            layers += self._chosen.get((s, begin, begin + count), ())
            begin += count
        return Cut(tuple(counts), frozenset(layers))

    def fewest(self, stage: int, begin: int, end: int) -> tuple[int, ...]:
        """The layers that a stage recomputes for a range if they are to be as few as possible."""
        if self._recompute != "auto" or self._lacking[stage, begin, end] == 0:
            return ()
        seconds = self._workload.forward[stage, begin:end]
        # All seconds together weigh less than one layer.
        return self._cover(stage, begin, end, 1.0 + seconds / (1.0 + 2.0 * seconds.sum()))

    def _settle(self, stage: int, begin: int, end: int) -> bool:
        where = (stage, begin, end)
        before = self.seconds[where]
        if self._lacking[where] == 0 or where in self._chosen or not math.isfinite(before):
            return False
        seconds = self._workload.forward[stage, begin:end]
        layers = self._chosen[where] = self._cover(stage, begin, end, seconds)
        self.seconds[where] = seconds[[layer - begin for layer in layers]].sum()
        return bool(self.seconds[where] > before)

    def _cover(self, stage: int, begin: int, end: int, weights: Numbers) -> tuple[int, ...]:
        freed = self._freed[stage, begin:end]
        chosen = lightest_cover(freed, weights, self._lacking[stage, begin, end])
        return tuple(begin + index for index in chosen)

    def _bound(self, stage: int) -> None:
        """A lower bound for all ranges of a stage: the layers that free most for their time, and of
        the last one only as much as is needed.
        """
        begins, ends = np.nonzero((self._lacking[stage] > 0) & np.isfinite(self.seconds[stage]))
        if not len(begins):
            return
        freed, seconds = self._freed[stage], self._workload.forward[stage]
        order = _best_first(freed, seconds)
        own = (order >= begins[:, None]) & (order < ends[:, None])
        gains = freed[order] * own
        before = gains.cumsum(axis=1) - gains
        used = np.clip(self._lacking[stage, begins, ends][:, None] - before, 0.0, gains)
        self.seconds[stage, begins, ends] = used @ (seconds[order] / freed[order])


def lightest_cover(gains: Numbers, weights: Numbers, needed: float) -> list[int]:
    """The items with the least sum of weights whose gains add up to at least ``needed``.

    Goes through the items and keeps the Pareto front of (weight, gain) (Nemhauser and Ullmann,
    Discrete dynamic programming and capital allocation, Management Science 1969); what can't get
    there any more, or not at less weight than is known to be enough, is left out.

    Args:
        gains: of each item, at least 0; all of them together are enough.
        weights: of each item, at least 0.
        needed: the gain.
    """
    order = _best_first(gains, weights)
    gains, weights = gains[order], weights[order]
    left = [*np.cumsum(gains[::-1])[::-1], 0.0]
    # What is to come has no better ratio than the next.
    ratios = [*(weights / gains), 0.0]
    gain, weight = np.zeros(1), np.zeros(1)
    taken = np.zeros((1, len(order)), dtype=bool)
    enough = math.inf
    best = ~taken[0]
    for item in range(len(order)):
        more = taken.copy()
        more[:, item] = True
        gain = np.concatenate([gain, gain + gains[item]])
        weight = np.concatenate([weight, weight + weights[item]])
        taken = np.concatenate([taken, more])
        complete = np.flatnonzero((gain >= needed) & (weight < enough))
        if len(complete):
            first = complete[weight[complete].argmin()]
            enough, best = float(weight[first]), taken[first]
        least = weight + (needed - gain) * ratios[item + 1]
        # The last of rounding: a sum in another order is another sum.
        alive = (gain < needed) & (gain + left[item + 1] * (1 + 1e-9) >= needed) & (least < enough)
        gain, weight, taken = gain[alive], weight[alive], taken[alive]
        ahead = np.lexsort((-gain, weight))
        gain, weight, taken = gain[ahead], weight[ahead], taken[ahead]
        front = np.ones(len(gain), dtype=bool)
        front[1:] = gain[1:] > np.maximum.accumulate(gain)[:-1]
        gain, weight, taken = gain[front], weight[front], taken[front]
        if len(gain) > _LONGEST_FRONT:
            kept = np.linspace(0, len(gain) - 1, _LONGEST_FRONT).astype(int)
            gain, weight, taken = gain[kept], weight[kept], taken[kept]
    return sorted(int(index) for index in order[best])


def _best_first(gains: Numbers, weights: Numbers) -> NDArray[np.intp]:
    """The items that gain anything, those with the most for their weight first."""
    useful = np.flatnonzero(gains > 0)
    return useful[np.argsort(weights[useful] / gains[useful], kind="stable")]
