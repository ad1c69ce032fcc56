"""The fastest cuts for a given order of the stages, exactly: dynamic programming.

Stages work in parallel, so a step takes the time of one microbatch through all of them and back,
plus the time of the slowest stage (or link), the *pace*, for each other microbatch. This is
:meth:`Workload.estimate`::

    seconds = sum of the stages and links + (microbatches - 1) * pace

For a given limit on the pace this is a sum over the stages, for which the best whole is made of
best parts: a dynamic programme over (stage, boundary). The limit is then lowered, from each
solution's own pace to just below it, along the Pareto front of (pace, sum), until no lower pace can
compensate for the larger sum. (Zheng et al., Alpa, OSDI 2022, section 5.2, tries every possible
pace.)

An asynchronous pipeline counts as a step of very many microbatches: its pace decides.

In this estimate every stage waits for all others. Another one, of the same form, lets it compute
meanwhile; its best cuts are often better, and the simulator chooses among those of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_pipeshift.plan.cost.workload import Numbers, Workload
from lightning_pipeshift.plan.partition.ranges import (
    Solution,
    least_chain,
    narrowest,
    ranges_of,
)

_ENDLESS: Final = 1000
"""The number of microbatches that stands for an asynchronous pipeline's minibatches."""


@dataclass(frozen=True, slots=True)
class PartitionDP:
    """The cost of each stage with each range of layers, and the search for the best total.

    Args:
        sums: (S, L + 1, L + 1), the seconds of a microbatch on stage s with the layers from b to e,
            and on the link after it, at ``[s, b, e]``; infinite if that is not possible.
        paces: (S, L + 1, L + 1), the seconds of the slower of the two, likewise.
        microbatches: of a step.
    """

    sums: Numbers
    paces: Numbers
    microbatches: int

    @classmethod
    def of(cls, workload: Workload, again: Numbers, hides_forwards: bool = False) -> PartitionDP:
        """The dynamic programme of a workload.

        Args:
            workload: the layers, stages and boundaries.
            again: (S, L + 1, L + 1), the seconds that a stage recomputes; infinite if it has too
                little memory.
            hides_forwards: the second estimate. While the first microbatch passes through the later
                stages, a stage runs as many more forwards as it may have in flight: so these are
                not in its pace.
        """
        forward, backward = workload.range_seconds
        slots = forward + backward
        paces = slots + again
        if hides_forwards and workload.microbatches > 1:
            ahead = np.array(workload.in_flight)[:, None, None] - 1
            paces = paces - forward * (ahead / (workload.microbatches - 1))
        possible = workload.possible_ranges & np.isfinite(again)
        sums = np.where(possible, slots, math.inf)
        paces = np.where(possible, paces, math.inf)
        # A link belongs to the stage before it.
        there, back = workload.payload_seconds[:, None], workload.gradient_seconds[:, None]
        sums[:-1] += there + back
        paces[:-1] = np.maximum(paces[:-1], np.maximum(there, back))
        is_endless = workload.objective.is_pace
        return cls(sums, paces, _ENDLESS if is_endless else workload.microbatches)

    def fastest(self, most: int, slack: float = 0.05) -> list[Solution]:
        """The best solution, and others of the Pareto front of pace and sum.

        Args:
            most: how many, at most.
            slack: by how much the others may exceed the best, relative to it.

        Returns the best one first; empty if nothing is possible.
        """
        least_pace, _ = narrowest(self.paces)
        if not math.isfinite(least_pace):
            return []
        # The two ends of the front bound the solutions between them.
        ends = [self._solve(math.inf), self._solve(least_pace)]
        found = {solution for solution in ends if solution is not None}
        best = min(found).seconds
        least_sum = min(solution.sum for solution in found)
        limit = math.inf
        rest = self.microbatches - 1
        while True:
            if rest:
                limit = min(limit, (best * (1 + slack) - least_sum) / rest)
            solution = self._solve(limit) if limit >= least_pace else None
            if solution is None:
                break
            found.add(solution)
            best = min(best, solution.seconds)
            # A lower pace has a sum at least as large.
            least_sum = solution.sum
            limit = math.nextafter(solution.pace, -math.inf)
        return [one for one in sorted(found) if one.seconds <= best * (1 + slack)][:most]

    def _solve(self, limit: float) -> Solution | None:
        """The least sum at a pace of at most ``limit`` seconds; ``None`` if there is none."""
        sums = np.where(self.paces <= limit, self.sums, math.inf)
        total, counts = least_chain(sums.shape, lambda s, before: before + sums[s])
        if not math.isfinite(total):
            return None
        pace = float(self.paces[ranges_of(counts)].max())
        return Solution(total + (self.microbatches - 1) * pace, counts, pace, total)
