"""Chooses the layers that a stage recomputes, so that the saved tensors of its other layers fit.

Recomputation makes a stage slower and its memory smaller, regardless of the other stages. So for a
range of layers on a stage there is one best choice: of the sets of layers that free enough memory,
the one that takes the least time (a knapsack problem).
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.cost.sums import Numbers, running_sums
from lightning_pipeshift.plan.cost.workload import Places, Workload

Recompute = Literal["auto", "full", "none"]

RECOMPUTE: Final = ("auto", "full", "none")
"""The options for recomputation: the layers with which the step is fastest within the memory, all
layers where that frees memory, or none."""


class Recomputation:
    """The recomputation of each stage, for each range of layers.

    Args:
        workload: the layers and stages.
        recompute: one of :data:`RECOMPUTE`.

    Attributes:
        held: (S, L + 1, L + 1), the least bytes that stage s holds with the layers from b to e, at
            ``[s, b, e]``; infinite if it can't have these layers.
    """

    def __init__(self, workload: Workload, recompute: str) -> None:
        self._workload = workload
        memory = workload.memory
        self._is_auto = recompute == "auto" and bool(np.isfinite(workload.usable_bytes).any())
        held = memory.kept_ranges
        if recompute == "full":
            held = memory.full_ranges
        elif self._is_auto:
            held = memory.least_ranges
        self.held: Numbers = np.where(workload.possible_ranges, held, math.inf)
        #: The seconds of each range, as far as they are known.
        fits = np.isfinite(self.held) & (self.held <= workload.usable_bytes[:, None, None])
        self._seconds: Numbers = np.where(fits, 0.0, math.inf)
        if recompute == "full":
            sums = running_sums(workload.forward)
            for stage in workload.recomputing:
                all_seconds = np.asarray(sums[stage] - sums[stage][:, None], float)
                self._seconds[stage] += np.where(fits[stage], all_seconds, 0.0)
        elif self._is_auto:
            lacks = memory.kept_ranges > workload.usable_bytes[:, None, None]
            self._seconds[fits & lacks] = math.nan
        self._recompute = recompute

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether a stage has enough memory for a range."""
        fits: NDArray[np.bool_] = ~np.isinf(self._seconds)
        return fits

    def seconds(self, bounds: Places) -> Numbers:
        """(S, N): the seconds of what each stage recomputes; infinite if it does not fit.

        Args:
            bounds: (S + 1, N), the stages' ends in each of many cuts.
        """
        where = np.arange(len(bounds) - 1)[:, None], bounds[:-1], bounds[1:]
        found = self._seconds[where]
        if np.isnan(found).any():
            stages = np.broadcast_to(where[0], found.shape)
            rows = np.stack([each[np.isnan(found)] for each in (stages, *where[1:])])
            unknown = np.unique(rows, axis=1)
            chosen = self._chosen(unknown)
            self._seconds[tuple(unknown)] = (chosen * self._workload.forward[unknown[0]]).sum(1)
            found = self._seconds[where]
        return found

    def cut(self, counts: Counts) -> Cut:
        """The cut with these counts that recomputes what takes the least time, if it fits."""
        if self._recompute == "full":
            return self._workload.everything_recomputed(counts)
        ends = np.cumsum(counts)
        rows = np.stack([np.arange(len(counts)), ends - np.array(counts), ends])
        lacks = self._lacking(rows) > 0
        if not self._is_auto or not lacks.any():
            return Cut(tuple(counts))
        layers = np.flatnonzero(self._chosen(rows[:, lacks]).any(axis=0)).tolist()
        return Cut(tuple(counts), frozenset(layers))

    def _lacking(self, rows: Places) -> Numbers:
        held = self._workload.memory.kept_ranges[tuple(rows)]
        lacking: Numbers = held - self._workload.usable_bytes[rows[0]]
        return lacking

    def _chosen(self, rows: Places) -> NDArray[np.bool_]:
        """(K, L): the layers that are recomputed in each of K ranges, which lack memory.

        The layers that free most for their time are taken until those left are few: the last one is
        the fastest that frees enough. Then what has become superfluous is given back.

        Args:
            rows: (3, K), stage, first layer and end of each.
        """
        stages, begins, ends = rows
        gains = np.maximum(self._workload.memory.freed_bytes, 0.0)[stages]
        layers, lacking = np.arange(gains.shape[1]), self._lacking(rows)[:, None]
        gains *= (layers >= begins[:, None]) & (layers < ends[:, None])
        seconds = self._workload.forward[stages]
        worth = np.where(gains > 0, seconds / np.maximum(gains, 1e-300), math.inf)
        order = np.argsort(worth, axis=1, kind="stable")
        sorted_gains = np.take_along_axis(gains, order, axis=1)
        freed = np.cumsum(sorted_gains, axis=1)
        is_taken = np.zeros(gains.shape, dtype=bool)
        np.put_along_axis(is_taken, order, (freed < lacking) & (sorted_gains > 0), axis=1)
        left = lacking[:, 0] - (gains * is_taken).sum(axis=1)
        enough = ~is_taken & (gains >= left[:, None]) & (gains > 0)
        last = np.where(enough, seconds, math.inf).argmin(axis=1)
        is_taken[np.arange(len(last)), last] |= enough.any(axis=1)
        more = (gains * is_taken).sum(axis=1) - lacking[:, 0]
        is_taken_at = np.take_along_axis(is_taken, order, axis=1).any(axis=0)
        for place in np.flatnonzero(is_taken_at)[::-1].tolist():
            layer = order[:, place]
            each = np.arange(len(layer)), layer
            is_spare = is_taken[each] & (gains[each] <= more)
            is_taken[each] &= ~is_spare
            more -= np.where(is_spare, gains[each], 0.0)
        return is_taken
