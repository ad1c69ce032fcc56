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
from dataclasses import dataclass

import numpy as np

from lightning_pipeshift.plan.workload import Cut, Numbers, Workload, running_sums


def fastest_cuts(
    workload: Workload,
    most: int = 8,
    again: Numbers | None = None,
    drained: frozenset[int] | None = None,
    slack: float = 0.05,
) -> list[Cut]:
    """The cut with the least :meth:`Workload.estimate` without recomputation, and near ones.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        most: how many cuts, at most.
        again: (S, L + 1, L + 1) seconds that stage s recomputes in order to have room for the
            layers from b to e, at ``[s, b, e]``: infinite where it can't. ``None``: nothing is
            recomputed, and what has no room as it is, is out.
        drained: the stages that own no layer; ``None``: any.
        slack: how much more than the best the others may take.

    Returns the best one first. The others are on the Pareto front of pace and sum: the best of
    their pace. Empty where nothing fits.
    """
    programme = _Programme.of(workload, again, drained)
    solution = programme.solve(math.inf)
    if solution is None:
        return []
    rest = workload.microbatches - 1
    least_pace, least_sum = programme.least_pace(), solution.sum
    found: list[_Solution] = []
    best = math.inf
    limit = math.inf
    # The one that bounds the others best, next to the first: where the pace is least.
    for first in (solution, programme.solve(least_pace)):
        assert first is not None, "a pace that some cut has"
        found.append(first)
        best = min(best, first.seconds(rest))
    while True:
        if rest:
            limit = min(limit, (best * (1 + slack) - least_sum) / rest)
        if limit < least_pace:
            break
        solution = programme.solve(limit)
        if solution is None:
            break
        found.append(solution)
        best = min(best, solution.seconds(rest))
        # Lower paces have sums at least as large.
        least_sum = solution.sum
        limit = math.nextafter(solution.pace, -math.inf)
    ordered = sorted(set(found), key=lambda one: (one.seconds(rest), one.counts))
    near = [one for one in ordered if one.seconds(rest) <= best * (1 + slack)]
    return [Cut(one.counts) for one in near[:most]]


@dataclass(frozen=True, slots=True)
class _Solution:
    sum: float
    pace: float
    counts: tuple[int, ...]

    def seconds(self, rest: int) -> float:
        return self.sum + rest * self.pace


@dataclass(frozen=True, slots=True)
class _Programme:
    """What stage s adds with the layers from b to e, at ``[s, b, e]``; infinite where it can't."""

    sums: Numbers
    paces: Numbers

    @classmethod
    def of(
        cls, workload: Workload, again: Numbers | None, drained: frozenset[int] | None
    ) -> _Programme:
        num_stages, num_layers = workload.num_stages, workload.num_layers
        begins, ends = np.ogrid[: num_layers + 1, : num_layers + 1]
        last = np.arange(num_stages)[:, None, None] == num_stages - 1
        possible = np.broadcast_to(begins <= ends, (num_stages, num_layers + 1, num_layers + 1))
        if workload.allowed is not None:
            allowed = [b in workload.allowed or b in (0, num_layers) for b in range(num_layers + 1)]
            possible = possible & (last | np.array(allowed))
        if drained is not None:
            empty = np.array([s in drained for s in range(num_stages)])[:, None, None]
            possible = possible & (empty == (begins == ends))
        if again is None:
            held = range_bytes(workload)
            again = np.where(held <= workload.room_bytes[:, None, None], 0.0, math.inf)
        runs = (begins < ends) | last
        extra = workload.forward_extra + workload.backward_extra
        slots = _of_ranges(workload.forward + workload.backward) + extra[:, None, None] * runs
        paces = np.where(possible, slots + again, math.inf)
        sums = np.where(np.isfinite(paces), slots, math.inf)
        # A link belongs to the stage in front of it.
        links = [workload.payload_seconds[:, None, :], workload.gradient_seconds[:, None, :]]
        sums[:-1] += links[0] + links[1]
        paces[:-1] = np.maximum(paces[:-1], np.maximum(*links))
        return cls(sums, paces)

    def solve(self, limit: float) -> _Solution | None:
        """The least sum at a pace of at most ``limit``."""
        sums = np.where(self.paces <= limit, self.sums, math.inf)
        num_stages, num_ends = sums.shape[:2]
        everywhere = np.arange(num_ends)
        # What the stages so far take, by the boundary at which they end.
        best = sums[0, 0]
        origins = []
        for stage in range(1, num_stages):
            whole = best[:, None] + sums[stage]
            origin = whole.argmin(axis=0)
            origins.append(origin)
            best = whole[origin, everywhere]
        if not math.isfinite(best[-1]):
            return None
        bounds = [num_ends - 1]
        for origin in reversed(origins):
            bounds.append(int(origin[bounds[-1]]))
        bounds = [0, *reversed(bounds)]
        pace = self.paces[range(num_stages), bounds[:-1], bounds[1:]].max()
        counts = tuple(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
        return _Solution(float(best[-1]), float(pace), counts)

    def least_pace(self) -> float:
        """The least pace of all cuts; infinite where there is none."""
        best = self.paces[0, 0]
        for paces in self.paces[1:]:
            best = np.maximum(best[:, None], paces).min(axis=0)
        return float(best[-1])


def range_bytes(workload: Workload) -> Numbers:
    """(S, L + 1, L + 1): what stage s holds with the layers from b to e, none recomputed."""
    in_flight = np.array(workload.in_flight)[:, None]
    return _of_ranges(workload.static_bytes + in_flight * workload.saved_bytes)


def _of_ranges(table: Numbers) -> Numbers:
    """(S, L) as (S, L + 1, L + 1): the sum from b to e, at ``[s, b, e]``."""
    sums = running_sums(table)
    ranges: Numbers = np.asarray(sums[:, None, :] - sums[:, :, None], float)
    return ranges
