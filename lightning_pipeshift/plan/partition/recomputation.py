"""Chooses the layers that a stage recomputes, so that the saved tensors of its other layers fit.

Recomputation makes a stage slower and its memory smaller, regardless of the other stages. So for a
range of layers on a stage one choice is best: among the sets of layers that free enough memory, the
one that takes the least time (a knapsack problem). The search for a cut uses a lower bound of that
time, and only the cuts that it finds get a set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.cost.sums import Numbers, sums_of_ranges
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.partition.ranges import ranges_of


def bytes_held(workload: Workload, recompute: str) -> Numbers:
    """(S, L + 1, L + 1): the least bytes that stage s holds with the layers from b to e, at ``[s,
    b, e]``.

    Args:
        workload: the layers and stages.
        recompute: ``"none"``, ``"full"`` (all layers, where that can free memory) or ``"auto"``
            (any layers).
    """
    memory = workload.memory
    held = memory.kept_bytes
    if recompute != "none":
        least = -np.inf if recompute == "full" else 0.0
        held = held - np.maximum(memory.freed_bytes, least)
    return sums_of_ranges(held) + memory.besides_bytes


class Recomputation:
    """The recomputation of each stage, for each range of layers.

    Args:
        workload: the layers and stages.
        recompute: ``"none"``, ``"full"`` or ``"auto"``.

    Attributes:
        seconds: (S, L + 1, L + 1), the seconds that stage s recomputes with the layers from b to e,
            at ``[s, b, e]``; infinite if they do not fit. With ``"auto"`` a lower bound, for the
            ranges that the workload allows.
    """

    def __init__(self, workload: Workload, recompute: str) -> None:
        self._workload = workload
        self._recompute = recompute
        self._freed = np.maximum(workload.memory.freed_bytes, 0.0)
        usable = workload.usable_bytes[:, None, None]
        fits = bytes_held(workload, recompute) <= usable
        self.seconds: Numbers = np.where(fits, 0.0, math.inf)
        self._lacking: Numbers = np.zeros_like(self.seconds)
        self._chosen: dict[tuple[int, ...], list[int]] = {}
        if recompute == "full":
            for s in workload.recomputing:
                self.seconds[s] += sums_of_ranges(workload.forward[s])
        elif recompute == "auto":
            self._lacking = np.maximum(bytes_held(workload, "none") - usable, 0.0)
            for s in range(workload.num_stages):
                self._bound(s)

    def cuts(self, cuts: Sequence[Counts]) -> list[Cut]:
        """The cuts with these counts, and with little recomputation, of those that fit."""
        if not cuts:
            return []
        seconds = self.seconds[ranges_of(cuts)].sum(axis=1)
        fitting = [cuts[number] for number in np.flatnonzero(np.isfinite(seconds)).tolist()]
        if self._recompute == "full":
            return [self._workload.everything_recomputed(counts) for counts in fitting]
        return [Cut(counts, self._layers(counts)) for counts in fitting]

    def _layers(self, counts: Counts) -> frozenset[int]:
        """The layers that are recomputed in a cut."""
        found: list[int] = []
        for stage, begin, end in np.transpose(ranges_of(counts)).tolist():
            where = stage, begin, end
            if self._lacking[where] > 0:
                if where not in self._chosen:
                    seconds = self._workload.forward[stage, begin:end]
                    chosen = light_cover(
                        self._freed[stage, begin:end], seconds, self._lacking[where]
                    )
                    self._chosen[where] = [begin + index for index in chosen]
                found += self._chosen[where]
        return frozenset(found)

    def _bound(self, stage: int) -> None:
        """A lower bound for all ranges of a stage: the layers that free most for their time, and
        only the needed fraction of the last one.
        """
        needed = (self._lacking[stage] > 0) & np.isfinite(self.seconds[stage])
        begins, ends = np.nonzero(needed & self._workload.possible_ranges[stage])
        if not len(begins):
            return
        freed, seconds = self._freed[stage], self._workload.forward[stage]
        order = _best_first(freed, seconds)
        own = (order >= begins[:, None]) & (order < ends[:, None])
        gains = freed[order] * own
        before = gains.cumsum(axis=1) - gains
        used = np.clip(self._lacking[stage, begins, ends][:, None] - before, 0.0, gains)
        self.seconds[stage, begins, ends] = used @ (seconds[order] / freed[order])


def light_cover(gains: Numbers, weights: Numbers, needed: float) -> list[int]:
    """Items with a small sum of weights whose gains add up to at least ``needed``: at most twice
    the least sum (Csirik et al., Heuristics for the 0-1 min-knapsack problem, Acta Cybernetica
    1991).

    Goes through the items, those with the most gain for their weight first. One that would be
    enough, with those taken before, completes a solution, without those that are then superfluous;
    any other is taken.

    Args:
        gains: of each item, at least 0; all of them together are enough.
        weights: of each item, at least 0.
        needed: the gain, above 0.
    """
    order = _best_first(gains, weights).tolist()
    taken: list[int] = []
    least, best = math.inf, order
    left, spent = needed, 0.0
    for item in order:
        if gains[item] < left:
            taken.append(item)
            left, spent = left - gains[item], spent + weights[item]
            continue
        chosen, more = [*taken, item], gains[item] - left
        for other in reversed(taken):
            if gains[other] <= more:
                chosen.remove(other)
                more -= gains[other]
        if (total := float(weights[chosen].sum())) < least:
            least, best = total, chosen
    return sorted(best)


def _best_first(gains: Numbers, weights: Numbers) -> NDArray[np.intp]:
    """The items that gain anything, those with the most for their weight first."""
    useful = np.flatnonzero(gains > 0)
    return useful[np.argsort(weights[useful] / gains[useful], kind="stable")]
