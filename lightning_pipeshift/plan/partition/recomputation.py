"""Chooses the layers that a stage recomputes, so that the saved tensors of its other layers fit.

Recomputation makes a stage slower and its memory smaller, regardless of the other stages. So for a
range of layers on a stage one choice is best: among the sets of layers that free enough memory, the
one that takes the least time (a knapsack problem). A search for a cut then has to search the cuts
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.workload import (
    ROUNDING,
    Counts,
    Cut,
    Numbers,
    Workload,
    sums_of_ranges,
)

# A front longer than this is thinned: a nearly optimal result is better than a very slow one.
_LONGEST_FRONT = 512


def bytes_held(workload: Workload, recompute: str) -> Numbers:
    """(S, L + 1, L + 1): the least bytes that stage s holds with the layers from b to e, at ``[s,
    b, e]``.

    Args:
        workload: the layers and stages.
        recompute: ``"none"``, ``"full"`` (all layers, where that can free memory) or ``"auto"``
            (any layers).
    """
    held = workload.kept_bytes
    if recompute != "none":
        least = -np.inf if recompute == "full" else 0.0
        held = held - np.maximum(workload.freed_bytes, least)
    return sums_of_ranges(held) + workload.message_bytes


class Recomputation:
    """The recomputation of each stage, for each range of layers.

    Args:
        workload: the layers and stages.
        recompute: ``"none"``, ``"full"`` or ``"auto"``.
        longest_seconds: a range that takes a stage longer for a microbatch counts as one that does
            not fit.

    Attributes:
        seconds: (S, L + 1, L + 1), the seconds that stage s recomputes with the layers from b to e,
            at ``[s, b, e]``; infinite if they do not fit. With ``"auto"`` a lower bound, which is
            exact once the range has been settled.
    """

    def __init__(
        self, workload: Workload, recompute: str, longest_seconds: float = math.inf
    ) -> None:
        self._workload = workload
        self._recompute = recompute
        self._freed = np.maximum(workload.freed_bytes, 0.0)
        usable = workload.usable_bytes[:, None, None]
        fits = bytes_held(workload, recompute) <= usable
        self.seconds: Numbers = np.where(fits, 0.0, math.inf)
        self._lacking: Numbers = np.zeros_like(self.seconds)
        self._chosen: dict[tuple[int, int, int], tuple[int, ...]] = {}
        if recompute == "full":
            for s in workload.recomputing:
                self.seconds[s] += sums_of_ranges(workload.forward[s])
        elif recompute == "auto":
            self._lacking = np.maximum(bytes_held(workload, "none") - usable, 0.0)
            forward, backward = workload.range_seconds
            too_long = forward + backward > longest_seconds
            self.seconds[(self._lacking > 0) & too_long] = math.inf
            for s in range(workload.num_stages):
                self._bound(s)

    def settle(self, cuts: Sequence[Counts]) -> bool:
        """Makes :attr:`seconds` exact for the ranges of these cuts, by their counts.

        Returns whether any value was lower before."""
        if not cuts:
            return False
        stages, begins, ends = self._ranges(cuts)
        lacking = self._lacking[stages, begins, ends] > 0
        lacking &= np.isfinite(self.seconds[stages, begins, ends])
        rose = False
        for number, stage in np.argwhere(lacking).tolist():
            rose |= self._settle((stage, int(begins[number, stage]), int(ends[number, stage])))
        return rose

    def cuts(self, cuts: Sequence[Counts]) -> list[Cut]:
        """The fastest cuts with these counts, without those that don't fit."""
        if self._recompute == "full":
            return [self._workload.everything_recomputed(counts) for counts in self._fitting(cuts)]
        self.settle(cuts)
        if not self._chosen:
            return [Cut(counts) for counts in self._fitting(cuts)]
        return [
            Cut(
                counts,
                frozenset(
                    layer
                    for s, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0)))
                    for layer in self._chosen.get((s, begin, end), ())
                ),
            )
            for counts in self._fitting(cuts)
        ]

    def _fitting(self, cuts: Sequence[Counts]) -> list[Counts]:
        if not cuts:
            return []
        unfit = np.isinf(self.seconds[self._ranges(cuts)]).sum(axis=1)
        return [counts for counts, stages in zip(cuts, unfit, strict=True) if not stages]

    def _ranges(self, cuts: Sequence[Counts]) -> tuple[NDArray[np.intp], ...]:
        """The indices of the cuts' ranges in :attr:`seconds`: (cuts, S)."""
        counts = np.array(cuts, dtype=np.intp)
        ends = counts.cumsum(axis=1)
        return np.arange(counts.shape[1]), ends - counts, ends

    def _settle(self, where: tuple[int, int, int]) -> bool:
        if where in self._chosen:
            return False
        stage, begin, end = where
        before = self.seconds[where]
        seconds = self._workload.forward[stage, begin:end]
        chosen = lightest_cover(self._freed[stage, begin:end], seconds, self._lacking[where])
        self._chosen[where] = tuple(begin + index for index in chosen)
        self.seconds[where] = seconds[chosen].sum()
        return bool(self.seconds[where] > before)

    def _bound(self, stage: int) -> None:
        """A lower bound for all ranges of a stage: the layers that free most for their time, and
        only the needed fraction of the last one.
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
    Discrete dynamic programming and capital allocation, Management Science 1969); items that can no
    longer reach ``needed``, or not at less weight than a known solution, are dropped.

    Args:
        gains: of each item, at least 0; all of them together are enough.
        weights: of each item, at least 0.
        needed: the gain.
    """
    order = _best_first(gains, weights).tolist()
    left = float(gains.sum())
    # Partial solutions that are not yet enough, by weight: (weight, gain, items).
    front: list[tuple[float, float, int]] = [(0.0, 0.0, 0)]
    enough, best = math.inf, (1 << len(order)) - 1
    for number, item in enumerate(order):
        gain, weight = float(gains[item]), float(weights[item])
        left -= gain
        # No later item has a better ratio than the next one.
        following = order[number + 1] if number + 1 < len(order) else None
        ratio = math.inf if following is None else float(weights[following] / gains[following])
        longer: list[tuple[float, float, int]] = []
        more = [(w + weight, g + gain, items | 1 << number) for w, g, items in front]
        furthest = -1.0
        for state in sorted(front + more, key=_by_weight):
            w, g, items = state
            if w >= enough:
                break
            if g >= needed:
                enough, best = w, items
                break
            # Tolerates rounding: sums in different orders differ.
            if g > furthest and g + left * ROUNDING >= needed:
                furthest = g
                if w + (needed - g) * ratio < enough:
                    longer.append(state)
        front = longer if len(longer) <= _LONGEST_FRONT else longer[:: len(longer) // 256]
    return sorted(item for number, item in enumerate(order) if best >> number & 1)


def _by_weight(state: tuple[float, float, int]) -> tuple[float, float]:
    return state[0], -state[1]


def _best_first(gains: Numbers, weights: Numbers) -> NDArray[np.intp]:
    """The items that gain anything, those with the most for their weight first."""
    useful = np.flatnonzero(gains > 0)
    return useful[np.argsort(weights[useful] / gains[useful], kind="stable")]
