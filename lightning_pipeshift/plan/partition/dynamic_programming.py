"""The fastest cuts for a given order of the stages, exactly: dynamic programming.

(For schedules of steps; ``pace_programming`` is for asynchronous pipelines.) Stages work in
parallel, so a step takes the time of one microbatch through all of them and back, plus the time of
the slowest stage (or link), the *pace*, for each other microbatch. This is
:meth:`Workload.estimate`::

    seconds = sum of the stages and links + (microbatches - 1) * pace

For a given limit on the pace this is a sum over the stages, for which the best whole is made of
best parts: a dynamic programme over (stage, boundary). The limit is then lowered, from each
solution's own pace to just below it, along the Pareto front of (pace, sum), until no lower pace can
compensate for the larger sum. (Zheng et al., Alpa, OSDI 2022, section 5.2, tries every possible
pace.)

In this estimate every stage waits for all others. Two more estimates, of the same form, let it
compute meanwhile; their best cuts are often better, and the simulator chooses among all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_pipeshift.plan.cost.workload import Counts, Cut, Numbers, Workload
from lightning_pipeshift.plan.partition.pace_programming import PaceDP
from lightning_pipeshift.plan.partition.ranges import (
    Solution,
    counts_of,
    narrowest,
    with_drained,
)
from lightning_pipeshift.plan.partition.recomputation import bytes_held


def fastest_cuts(workload: Workload, most: int = 8) -> list[Cut]:
    """Returns the cut with the least :meth:`Workload.estimate` of those that fit without
    recomputation, and others that are nearly as good.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        most: how many cuts, at most.

    Returns the best one first; empty if nothing fits.
    """
    fits = bytes_held(workload, "none") <= workload.usable_bytes[:, None, None]
    programme = programme_of(workload, np.where(fits, 0.0, math.inf))
    return [Cut(solution.counts) for solution in programme.fastest(most)]


def programme_of(workload: Workload, again: Numbers) -> PartitionDP | PaceDP:
    """The dynamic programme for a workload's objective; see :meth:`PartitionDP.of`."""
    return (PaceDP if workload.objective.is_pace else PartitionDP).of(workload, again)


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
        return cls(sums, paces, workload.microbatches)

    def fastest(
        self, most: int, drained: frozenset[int] | None = None, slack: float = 0.05
    ) -> list[Solution]:
        """The best solution, and others of the Pareto front of pace and sum.

        Args:
            most: how many, at most.
            drained: the stages that own no layer; ``None``: whichever is best.
            slack: by how much the others may exceed the best, relative to it.

        Returns the best one first; empty if nothing is possible.
        """
        programme = self
        if drained is not None:
            sums, paces = (with_drained(table, drained) for table in (self.sums, self.paces))
            programme = PartitionDP(sums, paces, self.microbatches)
        least_pace, _ = narrowest(programme.paces)
        if not math.isfinite(least_pace):
            return []
        # The two ends of the front bound the solutions between them.
        ends = [programme._solve(math.inf), programme._solve(least_pace)]
        found = {solution for solution in ends if solution is not None}
        best = min(found).seconds
        least_sum = min(solution.sum for solution in found)
        limit = math.inf
        rest = self.microbatches - 1
        while True:
            if rest:
                limit = min(limit, (best * (1 + slack) - least_sum) / rest)
            solution = programme._solve(limit) if limit >= least_pace else None
            if solution is None:
                break
            found.add(solution)
            best = min(best, solution.seconds)
            # A lower pace has a sum at least as large.
            least_sum = solution.sum
            limit = math.nextafter(solution.pace, -math.inf)
        return [one for one in sorted(found) if one.seconds <= best * (1 + slack)][:most]

    def with_head_start(self, most: int, limit: float, precision: float = 0.01) -> list[Counts]:
        """The best cuts by the third estimate, which is a lower bound: no stage starts before a
        microbatch has passed the stages before it, nor does the step end before the last one has
        gone back through them. The stages after it are ignored::

            seconds = maximum over stages of: sum of those before it + microbatches * its pace

        Args:
            most: how many, at most.
            limit: seconds; cuts that take longer are ignored.
            precision: of the least seconds, relative to them.

        Returns the best one first; empty if none is below the limit.
        """
        found: list[Counts] = []
        least = 0.0
        while limit - least > precision * limit:
            middle = (limit + least) / 2
            if (solution := self._within(middle)) is None:
                least = middle
            else:
                counts, limit = solution
                found.insert(0, counts)
        return found[:most]

    def _solve(self, limit: float) -> Solution | None:
        """The least sum at a pace of at most ``limit`` seconds; ``None`` if there is none."""
        sums = np.where(self.paces <= limit, self.sums, math.inf)
        # The seconds of the stages so far, by the boundary at which they end.
        best = [sums[0, 0]]
        for stage in sums[1:]:
            best.append((best[-1][:, None] + stage).min(axis=0))
        total = float(best[-1][-1])
        if not math.isfinite(total):
            return None
        bounds = [sums.shape[1] - 1]
        for before, stage in zip(best[-2::-1], sums[:0:-1], strict=True):
            bounds.insert(0, int((before + stage[:, bounds[0]]).argmin()))
        bounds.insert(0, 0)
        pace = float(self.paces[range(len(sums)), bounds[:-1], bounds[1:]].max())
        return Solution(total + (self.microbatches - 1) * pace, counts_of(bounds), pace, total)

    def _within(self, limit: float) -> tuple[Counts, float] | None:
        """A cut whose seconds by the third estimate are within the limit, and these seconds; of
        such cuts the one with the least sum. ``None`` if there is none.
        """
        takes = self.microbatches * self.paces

        def add(before: Numbers, take: Numbers, more: Numbers) -> Numbers:
            # A smaller sum before a stage is never worse: optimal substructure, here too.
            return np.where(before + take <= limit, before + more, math.inf)

        best = [add(np.zeros(1), takes[0, 0], self.sums[0, 0])]
        for take, more in zip(takes[1:], self.sums[1:], strict=True):
            best.append(add(best[-1][:, None], take, more).min(axis=0))
        if not best[-1][-1] <= limit:
            return None
        bounds = [self.sums.shape[1] - 1]
        for before, take, more in zip(best[-2::-1], takes[:0:-1], self.sums[:0:-1], strict=True):
            whole = add(before, take[:, bounds[0]], more[:, bounds[0]])
            bounds.insert(0, int(whole.argmin()))
        bounds.insert(0, 0)
        where = (range(len(takes)), bounds[:-1], bounds[1:])
        sums = self.sums[where].cumsum()
        ends = takes[where]
        ends[1:] += sums[:-1]
        return counts_of(bounds), float(max(ends.max(), sums[-1]))
