"""The cut with the best pace of an asynchronous pipeline, exactly: dynamic programming.

The pace is at least the time of the slowest stage or link, and at least the mean time of
neighbouring stages with the links between them (:func:`steady_pace`). For a given limit on it, what
matters of the stages so far is a single number, by how much the worst run of stages that ends here
exceeds the limit (J. Kadane's maximum subarray)::

    excess after a stage = its seconds - limit + max(0, excess before it + the link between)

It must never be above 0, and the smaller, the better for all that follows: so there is a dynamic
programme over (stage, boundary) that finds a cut within the limit, if there is one. The least limit
is found by bisection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_pipeshift.plan.cost.pace import steady_pace
from lightning_pipeshift.plan.cost.workload import Counts, Numbers, Workload
from lightning_pipeshift.plan.partition.ranges import (
    Solution,
    least_chain,
    narrowest,
    ranges_of,
)

_PRECISION = 1e-9
"""Of the pace, relative to it."""


@dataclass(frozen=True, slots=True)
class PaceDP:
    """The cost of each stage with each range of layers, and the search for the best pace.

    Args:
        forward: (S, L + 1, L + 1), the seconds of stage s with the layers from b to e, at ``[s, b,
            e]``; infinite if that is not possible.
        backward: likewise.
        again: likewise, of a recomputation.
        payload: (S - 1, L + 1), the seconds of the link after a stage that ends at a boundary.
        gradient: likewise.
    """

    forward: Numbers
    backward: Numbers
    again: Numbers
    payload: Numbers
    gradient: Numbers

    @classmethod
    def of(cls, workload: Workload, again: Numbers) -> PaceDP:
        """The dynamic programme of a workload.

        Args:
            workload: the layers, stages and boundaries.
            again: (S, L + 1, L + 1), the seconds that a stage recomputes; infinite if it has too
                little memory.
        """
        forward, backward = workload.range_seconds
        possible = np.where(workload.possible_ranges, again, math.inf)
        links = workload.payload_seconds, workload.gradient_seconds
        return cls(forward, backward, possible, *links)

    def fastest(self, most: int, slack: float = 0.05) -> list[Solution]:
        """The best solution, and others that the search passed.

        Args:
            most: how many, at most.
            slack: by how much the others may exceed the best, relative to it.

        Returns the best one first; empty if nothing is possible.
        """
        alone = self.forward + self.backward + self.again
        alone[:-1] = np.maximum(alone[:-1], np.maximum(self.payload, self.gradient)[:, None])
        least, counts = narrowest(alone)
        if not math.isfinite(least):
            return []
        found = {self._solution(counts)}
        while (limit := min(found).seconds) - least > _PRECISION * limit:
            middle = (limit + least) / 2
            within = self._within(middle, alone)
            solution = None if within is None else self._solution(within)
            # Rounding may have let it pass a little above the limit.
            if solution is None or solution.seconds >= limit:
                least = middle
            else:
                found.add(solution)
        return [one for one in sorted(found) if one.seconds <= limit * (1 + slack)][:most]

    def _within(self, limit: float, alone: Numbers) -> Counts | None:
        """A cut whose pace is within the limit; ``None`` if there is none."""
        links = np.pad(self.payload + self.gradient, ((0, 1), (0, 0)))

        def extended(stage: int, before: Numbers) -> Numbers:
            excess = self.forward[stage] + self.backward[stage] - limit + np.maximum(before, 0.0)
            fits = (alone[stage] <= limit) & (excess + self.again[stage] <= 0)
            return np.where(fits, excess + links[stage], math.inf)

        excess, counts = least_chain(alone.shape, extended)
        return counts if math.isfinite(excess) else None

    def _solution(self, counts: Counts) -> Solution:
        where = ranges_of(counts)
        cuts = where[0][:-1], where[2][:-1]
        costs = [self.forward[where], self.backward[where], self.payload[cuts], self.gradient[cuts]]
        pace = float(steady_pace([*costs, self.again[where]]))
        return Solution(pace, counts, pace, float(sum(map(np.sum, costs))))
