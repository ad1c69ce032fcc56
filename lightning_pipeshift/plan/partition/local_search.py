"""The best cut: candidates from the exact solvers, improved on the simulator.

The estimates in ``dynamic_programming`` do not include that transfers and compute overlap only in
part, nor how a schedule starts and ends. The simulator does, and evaluates many cuts at once.
So there are several candidates, and the cuts of the best ones are shifted by a layer or two while
that makes one of them faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.workload import ROUNDING, Counts, Cut, Workload
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.partition.dynamic_programming import PartitionDP
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.partition.infeasible import nothing_fits
from lightning_pipeshift.plan.partition.recomputation import Recomputation

RECOMPUTE: Final = ("auto", "full", "none")
"""The options for recomputation: where it pays, everything, or never."""


def best_cut(
    workload: Workload,
    recompute: str = "auto",
    start: Sequence[Cut] = (),
    *,
    effort: Effort = USUAL,
) -> Cut:
    """The cut with the least step time, by the simulator, of those that fit.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        recompute: ``"auto"``: the layers with which the step is fastest within the memory;
            ``"full"``: all layers, where that frees memory; ``"none"``: none.
        start: cuts to try as well, such as the one in force.
        effort: the limits of the search.

    Of equally fast cuts, the one that recomputes fewer layers is taken, then one that is among
    ``start``, then the more even one. Raises PlanError if nothing fits; its message contains the
    lacking memory, and remedies.
    """
    if recompute not in RECOMPUTE:
        words = ", ".join(map(repr, RECOMPUTE))
        raise PlanError(f"recompute={recompute!r}; choose one of {words}")
    is_boundless = not np.isfinite(workload.usable_bytes).any()
    is_needless = recompute == "auto" and is_boundless
    recomputation = Recomputation(workload, "none" if is_needless else recompute)
    programme = PartitionDP.of(workload, recomputation.seconds)
    candidates = [solution.counts for solution in programme.fastest(effort.cuts_improved)]
    if not candidates:
        raise nothing_fits(workload, recompute)
    search = _Search(workload, recomputation, effort)
    search.add(candidates)
    if not workload.objective.is_pace:
        hiding = PartitionDP.of(workload, recomputation.seconds, hides_forwards=True)
        search.add(solution.counts for solution in hiding.fastest(effort.cuts_improved))
    # The even cut, so that the result is never worse than that.
    even = Cut(uniform(workload.num_layers, workload.num_stages))
    search.add(cut.counts for cut in [*start, even])
    search.climb()
    return search.best([cut.counts for cut in start])


def best_cut_of(
    workload: Workload,
    worthwhile: frozenset[int],
    recompute: str = "auto",
    start: Sequence[Cut] = (),
    *,
    effort: Effort = USUAL,
) -> Cut:
    """The best cut at worthwhile boundaries, unless one at another boundary is much faster.

    Args:
        workload: see :func:`best_cut`, as for ``recompute``, ``start`` and ``effort``.
        worthwhile: some of the boundaries that may be cut.
    """
    anywhere = best_cut(workload, recompute, start, effort=effort)
    between = replace(workload, allowed=worthwhile)
    given = [cut for cut in start if between.is_allowed(cut)]
    try:
        best = best_cut(between, recompute, given, effort=effort)
    except PlanError:
        return anywhere
    seconds = workload.step_seconds([best, anywhere])
    return best if seconds[0] <= effort.worth_inside * seconds[1] else anywhere


def fixed_cut(workload: Workload, counts: Counts, recompute: str) -> Cut:
    """The cut with given counts and the recomputation that takes the least time.

    Raises PlanError if it does not fit."""
    cuts = Recomputation(workload, recompute).cuts([counts])
    if cuts:
        return cuts[0]
    least = Cut(counts) if recompute == "none" else workload.everything_recomputed(counts)
    held, usable = workload.memory_bytes(least), workload.usable_bytes
    stage = max(range(len(held)), key=lambda stage: held[stage] - usable[stage])
    raise PlanError(
        f"the partition {list(counts)} needs {held[stage]:.3g} bytes on stage {stage}, whose "
        f"device has {usable[stage]:.3g}; give that stage fewer layers, or use partition='auto'"
    )


def neighbours(
    workload: Workload, counts: Counts, most_moved: int = USUAL.cuts_moved
) -> list[Counts]:
    """The allowed cuts that are a step away: one boundary between stages moves to the next one or
    two that may be cut, or a run of up to ``most_moved`` neighbouring ones to the next one.
    """
    allowed = range(workload.num_layers) if workload.allowed is None else workload.allowed
    inner = sorted(b for b in allowed if 0 < b < workload.num_layers)
    points = np.array([0, *inner, workload.num_layers])
    steps = steps_of_cuts(workload.num_stages - 1, most_moved)
    places = np.zeros((len(steps), len(counts) + 1), dtype=np.intp)
    places[:, 1:-1] = np.searchsorted(points, np.cumsum(counts)[:-1]) + steps
    places[:, -1] = len(points) - 1
    places = places[(np.diff(places) >= 0).all(axis=1)]
    return [tuple(row) for row in np.diff(points[places]).tolist()]


class _Search:
    """The evaluated cuts, one for each tuple of counts."""

    def __init__(self, workload: Workload, recomputation: Recomputation, effort: Effort) -> None:
        self._workload = workload
        self._effort = effort
        self._recomputation = recomputation
        self._seconds: dict[Counts, float] = {}
        self._cuts: dict[Counts, Cut] = {}

    @property
    def least_seconds(self) -> float:
        return min(self._seconds.values())

    def add(self, candidates: Iterable[Counts]) -> None:
        """Times the cuts with these counts, if they are allowed and fit."""
        new = [counts for counts in dict.fromkeys(candidates) if counts not in self._seconds]
        self._seconds.update(dict.fromkeys(new, math.inf))
        allowed = [counts for counts in new if self._workload.is_allowed(Cut(counts))]
        cuts = self._recomputation.cuts(allowed)
        for cut, seconds in zip(cuts, self._workload.step_seconds(cuts), strict=True):
            self._seconds[cut.counts] = seconds
            self._cuts[cut.counts] = cut

    def climb(self) -> None:
        """Moves from each of the best cuts to its best neighbour, while that is faster."""
        front = sorted(self._cuts, key=self._order)[: self._effort.cuts_improved]
        been = set(front)
        while front:
            most = self._effort.cuts_moved
            around = [neighbours(self._workload, counts, most) for counts in front]
            self.add(chain.from_iterable(around))
            ahead = []
            for counts, near in zip(front, around, strict=True):
                best = min(near, key=self._order, default=counts)
                is_better = self._seconds[best] * ROUNDING < self._seconds[counts]
                if is_better and best not in been:
                    been.add(best)
                    ahead.append(best)
            front = ahead

    def best(self, known: Sequence[Counts]) -> Cut:
        """The fastest of all cuts; of equally fast ones see :func:`best_cut`."""
        least = self.least_seconds * ROUNDING
        fastest = [counts for counts in self._cuts if self._seconds[counts] <= least]

        def preference(counts: Counts) -> tuple[object, ...]:
            # The last: more layers on earlier stages, as in a uniform split.
            cut = self._cuts[counts]
            return (
                len(cut.recompute),
                counts not in known,
                sum(count**2 for count in counts),
                [-count for count in counts],
            )

        return self._cuts[min(fastest, key=preference)]

    def _order(self, counts: Counts) -> tuple[float, Counts]:
        return self._seconds[counts], counts


@lru_cache(maxsize=64)
def steps_of_cuts(num_cuts: int, most_moved: int) -> NDArray[np.intp]:
    """(N, num_cuts): one cut moved by one or two steps, or a run of up to ``most_moved``
    neighbouring ones by one, which moves layers between stages that are not neighbours.
    """
    cuts = np.arange(num_cuts)
    first, last = (ends[:, None] for ends in np.triu_indices(num_cuts))
    is_short = last - first < most_moved
    runs = ((first <= cuts) & (cuts <= last)).astype(np.intp)[is_short[:, 0]]
    single = np.eye(num_cuts, dtype=np.intp)
    return np.concatenate([-runs, runs, -2 * single, 2 * single])
