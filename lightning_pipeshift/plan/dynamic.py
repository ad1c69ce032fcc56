"""The fastest cuts for a given order of the stages, exactly: dynamic programming.

Stages work side by side, so a step takes as long as one microbatch on its way through all of them,
and then the slowest stage (or link) once more for each other microbatch (:meth:`Workload.estimate`)::

    seconds = sum of the stages and links + (microbatches - 1) * pace

For a given limit on the pace this is a sum over the stages, for which the best whole is made of
best parts: a dynamic programme over (stage, boundary). The limit then goes down, from each
solution's own pace to just below it, along the Pareto front of (pace, sum), until no lower pace can
make up for the sum. (Zheng et al., Alpa, OSDI 2022, section 5.2, tries every possible pace.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.recomputation import bytes_held
from lightning_pipeshift.plan.workload import Cut, Numbers, Workload, sums_of_ranges


def fastest_cuts(workload: Workload, most: int = 8) -> list[Cut]:
    """The cut with the least :meth:`Workload.estimate` of those that fit without recomputation, and
    others that come near it.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        most: how many cuts, at most.

    Returns the best one first; empty where nothing fits.
    """
    fits = bytes_held(workload, "none") <= workload.room_bytes[:, None, None]
    programme = Programme.of(workload, np.where(fits, 0.0, math.inf))
    return [Cut(solution.counts) for solution in programme.fastest(most)]


@dataclass(frozen=True, slots=True, order=True)
class Solution:
    """A cut and its estimate.

    Args:
        seconds: of a step.
        pace: of the slowest stage or link, for a microbatch.
        sum: of all stages and links.
        counts: the layers per stage.
    """

    seconds: float
    counts: tuple[int, ...]
    pace: float = field(compare=False)
    sum: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Programme:
    """What each stage adds with each range of layers, and the best way to add that up.

    Args:
        sums: (S, L + 1, L + 1), the seconds of a microbatch on stage s with the layers from b to e,
            and on the link behind it, at ``[s, b, e]``; infinite where that is not possible.
        paces: (S, L + 1, L + 1), the seconds of the slower of the two, likewise.
        microbatches: of a step.
    """

    sums: Numbers
    paces: Numbers
    microbatches: int

    @classmethod
    def of(cls, workload: Workload, again: Numbers) -> Programme:
        """The programme of a workload.

        Args:
            workload: the layers, stages and boundaries.
            again: (S, L + 1, L + 1), the seconds that a stage recomputes; infinite where it has no
                room.
        """
        possible = possible_ranges(workload) & np.isfinite(again)
        # A stage without layers runs none of the user's code; see Workload.costs.
        runs = np.broadcast_to(~np.eye(workload.num_layers + 1, dtype=bool), possible.shape).copy()
        runs[-1] = True
        extra = workload.forward_extra + workload.backward_extra
        slots = sums_of_ranges(workload.forward + workload.backward) + extra[:, None, None] * runs
        sums = np.where(possible, slots, math.inf)
        paces = np.where(possible, slots + again, math.inf)
        # A link belongs to the stage in front of it.
        there, back = workload.payload_seconds[:, None], workload.gradient_seconds[:, None]
        sums[:-1] += there + back
        paces[:-1] = np.maximum(paces[:-1], np.maximum(there, back))
        return cls(sums, paces, workload.microbatches)

    def fastest(
        self, most: int, drained: frozenset[int] | None = None, slack: float = 0.05
    ) -> list[Solution]:
        """The best solution, and others of the Pareto front of pace and sum.

        Args:
            most: how many, at most.
            drained: the stages that own no layer; ``None``: whichever is best.
            slack: how much more than the best the others may take, relative to it.

        Returns the best one first; empty where nothing is possible.
        """
        programme = self if drained is None else self._drained(drained)
        least_pace = narrowest(programme.paces)[0]
        if not math.isfinite(least_pace):
            return []
        # The two ends of the front bound what can be in between.
        ends = [programme.solve(math.inf), programme.solve(least_pace)]
        found = {solution for solution in ends if solution is not None}
        best = min(found).seconds
        least_sum = min(solution.sum for solution in found)
        limit = math.inf
        rest = self.microbatches - 1
        while True:
            if rest:
                limit = min(limit, (best * (1 + slack) - least_sum) / rest)
            solution = programme.solve(limit) if limit >= least_pace else None
            if solution is None:
                break
            found.add(solution)
            best = min(best, solution.seconds)
            # A lower pace has a sum at least as large.
            least_sum = solution.sum
            limit = math.nextafter(solution.pace, -math.inf)
        return [one for one in sorted(found) if one.seconds <= best * (1 + slack)][:most]

    def solve(self, limit: float) -> Solution | None:
        """The least sum at a pace of at most ``limit`` seconds; ``None`` where there is none."""
        sums = np.where(self.paces <= limit, self.sums, math.inf)
        # What the stages so far take, by the boundary at which they end.
        best = [sums[0, 0]]
        for stage in sums[1:]:
            best.append((best[-1][:, None] + stage).min(axis=0))
        total = float(best[-1][-1])
        if not math.isfinite(total):
            return None
        # Back: where did the last of them begin?
        bounds = [sums.shape[1] - 1]
        for before, stage in zip(best[-2::-1], sums[:0:-1], strict=True):
            bounds.append(int((before + stage[:, bounds[-1]]).argmin()))
        bounds = [0, *reversed(bounds)]
        counts = tuple(end - begin for begin, end in pairwise(bounds))
        pace = float(self.paces[range(len(sums)), bounds[:-1], bounds[1:]].max())
        return Solution(total + (self.microbatches - 1) * pace, counts, pace, total)

    def _drained(self, drained: frozenset[int]) -> Programme:
        """This one where these stages own no layer, and all others own some."""
        empty = np.eye(self.sums.shape[1], dtype=bool)
        given = np.array([s in drained for s in range(len(self.sums))])[:, None, None]
        paces = np.where(empty == given, self.paces, math.inf)
        return Programme(self.sums, paces, self.microbatches)


def possible_ranges(workload: Workload) -> NDArray[np.bool_]:
    """(S, L + 1, L + 1): whether stage s can have the layers from b to e, at ``[s, b, e]``, as far
    as the boundaries go.
    """
    num_stages, num_layers = workload.num_stages, workload.num_layers
    ends = np.full((num_stages, num_layers + 1), workload.allowed is None)
    ends[:, [0, -1, *sorted(workload.allowed or ())]] = True
    # The last stage is given no choice.
    ends[-1] = True
    begins_first = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool))
    return begins_first & ends[:, None, :]


def narrowest(table: Numbers) -> tuple[float, tuple[int, ...]]:
    """The counts whose largest entry is the least, and that entry.

    Args:
        table: (S, L + 1, L + 1), stage s with the layers from b to e, at ``[s, b, e]``; infinite
            where that is not possible.
    """
    best = [table[0, 0]]
    for stage in table[1:]:
        best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
    bounds = [table.shape[1] - 1]
    for before, stage in zip(best[-2::-1], table[:0:-1], strict=True):
        bounds.append(int(np.maximum(before, stage[:, bounds[-1]]).argmin()))
    bounds = [0, *reversed(bounds)]
    return float(best[-1][-1]), tuple(end - begin for begin, end in pairwise(bounds))
