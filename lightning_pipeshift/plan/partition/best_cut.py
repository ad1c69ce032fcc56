"""The best cut of a virtual machine for a given order of its stages.

The search begins with cuts by dynamic programming, in which every stage waits for all others, or
computes meanwhile; and with the even cut, so that the result is never worse than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import ROUNDING, Workload
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.partition.infeasible import nothing_fits
from lightning_pipeshift.plan.partition.ranges import least_sum, narrowest, ranges_of
from lightning_pipeshift.plan.partition.recomputation import Recomputation
from lightning_pipeshift.plan.partition.search import Search, points_of, steps_of_cuts

RECOMPUTE: Final = ("auto", "full", "none")
"""The options for recomputation: where it pays, everything, or never."""

_ENDLESS: Final = 1000
"""The number of microbatches that stands for an asynchronous pipeline's minibatches."""

_SLACK: Final = 0.05
_PACE_SLACK: Final = 0.2
"""By how much an estimate may exceed the least: neighbours wait for each other, too, and it matters
most in an asynchronous pipeline."""

_MOST_FIRST: Final = 8
"""How many cuts a search begins with, at most, of each estimate."""


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
    first = first_cuts(workload, recomputation.seconds)
    if not first:
        raise nothing_fits(workload, recompute)
    if not workload.objective.is_pace:
        first += first_cuts(workload, recomputation.seconds, hides_forwards=True)
    even = uniform(workload.num_layers, workload.num_stages)
    given = [cut.counts for cut in start]
    first += [counts for counts in (*given, even) if workload.is_allowed(Cut(counts))]
    known: dict[Cut, float] = {}

    def least_of(candidates: Iterable[Counts]) -> float:
        new = [counts for counts in dict.fromkeys(candidates) if workload.is_allowed(Cut(counts))]
        cuts = [cut for cut in recomputation.cuts(new) if cut not in known]
        known.update(zip(cuts, workload.step_seconds(cuts), strict=True))
        return min(known.values())

    found = Search(workload, recomputation, effort=effort).improved(first)
    seconds = least_of([*first, *found])
    # The search has a lower bound for the time of recomputation.
    while True:
        best = min(known, key=known.__getitem__)
        before, seconds = seconds, least_of(neighbours(workload, best.counts, effort.cuts_moved))
        if seconds * ROUNDING >= before:
            break

    def preference(cut: Cut) -> tuple[object, ...]:
        # The last: more layers on earlier stages, as in a uniform split.
        return (
            len(cut.recompute),
            cut.counts not in given,
            sum(count**2 for count in cut.counts),
            [-count for count in cut.counts],
        )

    fastest = (cut for cut, taken in known.items() if taken <= seconds * ROUNDING)
    return min(fastest, key=preference)


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
    held, usable = workload.memory.peak_bytes(least), workload.usable_bytes
    stage = max(range(len(held)), key=lambda stage: held[stage] - usable[stage])
    raise PlanError(
        f"the partition {list(counts)} needs {held[stage]:.3g} bytes on stage {stage}, whose "
        f"device has {usable[stage]:.3g}; give that stage fewer layers, or use partition='auto'"
    )


def first_cuts(workload: Workload, again: Numbers, hides_forwards: bool = False) -> list[Counts]:
    """Cuts to begin with, the best by an estimate first; empty if none fits.

    A step takes the sum of all stages and links for one microbatch, plus the slowest of them, the
    *pace*, for each other one (:meth:`Workload.estimate`); an asynchronous pipeline counts as a
    step of very many microbatches. For a given limit of the pace, the cut with the least sum is
    found by dynamic programming over (stage, boundary). The limit is lowered, from each solution's
    own pace to just below it, until no lower pace can compensate for the larger sum. (Zheng et al.,
    Alpa, OSDI 2022, section 5.2, tries every possible pace.)

    Args:
        workload: the layers, stages and boundaries.
        again: (S, L + 1, L + 1), the seconds that a stage recomputes; infinite if it has too little
            memory.
        hides_forwards: while the first microbatch passes through the later stages, a stage runs as
            many more forwards as it may have in flight: so these are not in its pace.
    """
    forward, backward = workload.range_seconds
    slots = forward + backward
    paces = slots + again
    if hides_forwards and workload.microbatches > 1:
        ahead = np.array(workload.in_flight)[:, None, None] - 1
        paces = paces - forward * (ahead / (workload.microbatches - 1))
    possible = workload.possible_ranges & np.isfinite(again)
    sums, paces = (np.where(possible, table, math.inf) for table in (slots, paces))
    # A link belongs to the stage before it.
    there, back = workload.payload_seconds[:, None], workload.gradient_seconds[:, None]
    sums[:-1] += there + back
    paces[:-1] = np.maximum(paces[:-1], np.maximum(there, back))
    is_pace = workload.objective.is_pace
    rest = (_ENDLESS if is_pace else workload.microbatches) - 1
    worth = 1 + (_PACE_SLACK if is_pace else _SLACK)
    found: dict[Counts, float] = {}

    def solved(limit: float) -> tuple[float, float]:
        total, counts = least_sum(np.where(paces <= limit, sums, math.inf))
        pace = float(paces[ranges_of(counts)].max())
        found[counts] = total + rest * pace
        return total, pace

    least_pace, _ = narrowest(paces)
    if not math.isfinite(least_pace):
        return []
    # Both ends bound what is between them.
    solved(least_pace)
    limit = math.inf
    while limit >= least_pace:
        total, pace = solved(limit)
        limit = math.nextafter(pace, -math.inf)
        if rest:
            limit = min(limit, (worth * min(found.values()) - total) / rest)
    most = worth * min(found.values())
    within = [counts for counts in found if found[counts] <= most]
    return sorted(within, key=found.__getitem__)[:_MOST_FIRST]


def neighbours(
    workload: Workload, counts: Counts, most_moved: int = USUAL.cuts_moved
) -> list[Counts]:
    """The allowed cuts that are a step away: one boundary between stages moves to the next one or
    two that may be cut, or a run of up to ``most_moved`` neighbouring ones to the next one.
    """
    points = points_of(workload)
    steps = steps_of_cuts(workload.num_stages - 1, most_moved)
    places = np.tile(np.searchsorted(points, np.cumsum([0, *counts])), (len(steps), 1))
    places[:, 1:-1] += steps
    places = places[(np.diff(places, axis=1) >= 0).all(axis=1)]
    return [tuple(row) for row in np.diff(points[places], axis=1).tolist()]
