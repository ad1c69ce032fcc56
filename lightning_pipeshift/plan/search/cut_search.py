"""The best cut of a virtual machine, with the recomputation of its layers and the handling of every
saved tensor, of optimizer state and of weights.

The search of stages proposes cuts, as if layers saved only a part of their tensors: it does not
know what moves. The best of these, and of cuts near them, is found with
:mod:`~lightning_pipeshift.plan.search.assignment_search`. Without ``MemoryCompression`` nothing
moves, and layers are kept or recomputed as a whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_pipeshift.errors import BudgetError, without_stack
from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.search.assignment_search import AssignmentSearch
from lightning_pipeshift.plan.search.boundaries import cuts_to_try, is_between_blocks
from lightning_pipeshift.plan.search.budget_error import over_budget
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.plan.search.infeasible import nothing_fits
from lightning_pipeshift.plan.search.problem import Compressed, Problem
from lightning_pipeshift.plan.search.stages import Staged, between_blocks, neighbours, stages_of


def best_split(
    problem: Problem, counts: Sequence[int] | None = None, start: Sequence[Cut] = ()
) -> Compressed:
    """The best cut of a virtual machine that is found, with the handling of its saved tensors.

    Args:
        problem: the virtual machine's.
        counts: the layers per stage, if they are fixed.
        start: cuts to try as well, such as the one in force.

    Raises:
        PlanError: nothing fits, and no saved tensor may be swapped.
        BudgetError: nothing fits; the message contains a budget for the first cut.
    """
    workload = problem.workload
    if counts is None:
        return _of_proposals(problem, [cut.counts for cut in start])
    try:
        return fastest(problem, [tuple(counts)])
    except BudgetError:
        if problem.policy is not None:
            raise
        # The memory is an estimate, and the user's cut is not: what holds least is tried.
        cut = Cut(tuple(counts))
        least = cut if problem.recompute == "none" else workload.everything_recomputed(counts)
        of = problem.footprints.of
        return Compressed(least, (), of(least), of(cut))


def _of_proposals(problem: Problem, given: Sequence[Counts]) -> Compressed:
    """The best of the proposed cuts, and of those near them. A new one inside of a block has to be
    much faster than the others: see :attr:`Effort.worth_inside`.
    """
    proposals = _proposals(problem, given)
    usual = [c for c in proposals if c in given or is_between_blocks(problem.profile, c)]
    inside = [counts for counts in proposals if counts not in usual]
    found: list[tuple[float, Compressed]] = []
    error: BudgetError | None = None
    for cuts, worth in ((usual, 1.0), (inside, problem.effort.worth_inside)):
        # The step without swaps and recomputation is a lower bound.
        least = min(problem.workload.step_seconds([*map(Cut, cuts)]), default=math.inf)
        if not cuts or (found and worth * least >= found[0][0]):
            continue
        try:
            made = fastest(problem, cuts, _worthwhile(problem))
            found.append((worth * made.seconds, made))
        except BudgetError as nothing:
            error = error or without_stack(nothing)
    if found:
        return min(found, key=lambda each: each[0])[1]
    if problem.policy is None:
        raise nothing_fits(problem.workload, problem.recompute)
    assert error is not None
    raise error


def _proposals(problem: Problem, given: Sequence[Counts]) -> list[Counts]:
    """Cuts to begin with: the best ones for several assumptions on the needed memory, the even
    one, and the given ones.
    """
    workload, possible = problem.workload, problem.profile.possible_cuts
    given = [counts for counts in given if workload.is_allowed(Cut(counts))]
    found: list[Counts] = []
    for part in problem.effort.saved_parts if problem.policy is not None else (1.0,):
        # As if the layers saved only a part of their tensors.
        saved, outside = part * workload.saved_bytes, part * workload.outside_bytes
        assumed = replace(workload, saved_bytes=saved, outside_bytes=outside)
        found += _best_of(problem, assumed, given)
    if found and problem.policy is None:
        return found
    if not found:
        boundless = replace(workload, usable_bytes=np.full(workload.num_stages, np.inf))
        found += _best_of(problem, boundless, given)
    found.append(uniform(workload.num_layers, workload.num_stages, possible))
    found += given
    return [c for c in dict.fromkeys(found) if workload.is_allowed(Cut(c))]


def _best_of(problem: Problem, workload: Workload, given: Sequence[Counts]) -> list[Counts]:
    """The best cut between blocks, unless one inside of a block is much faster; empty if nothing
    fits.
    """

    def search(allowed: frozenset[int] | None) -> list[Staged]:
        between = replace(workload, allowed=allowed)
        return stages_of(between, problem.recompute, given, problem.effort)

    how = _worthwhile(problem), workload.allowed, problem.effort.worth_inside
    return [each.cut.counts for each in between_blocks(search, *how)]


def _worthwhile(problem: Problem) -> frozenset[int]:
    return cuts_to_try(problem.profile, problem.workload.num_stages)


def fastest(problem: Problem, cuts: Sequence[Counts], allowed: Collection[int] = ()) -> Compressed:
    """The fastest of some cuts of a virtual machine, and of those near it, with the handling of its
    saved tensors; of optimizer state, as much is in host memory as is faster than to move or
    recompute more saved tensors, or as is needed for anything to fit; of weights, as much as is
    needed for that.

    Args:
        problem: the virtual machine's.
        cuts: layers per stage.
        allowed: the boundaries for cuts near them; empty if only the given ones are.

    Raises:
        BudgetError: no cut fits; the message contains a budget for the first.
    """
    state, weights = movable(problem, "optimizer_bytes"), movable(problem, "waiting_bytes")
    found: Compressed | None = None
    error: BudgetError | None = None
    attempts: list[dict[str, Any]] = [{}]
    attempts += [{"optimizer_on_host": state}] if state else []
    attempts += [{"optimizer_on_host": state, "weights_on_host": weights}] if weights else []
    for moving in attempts:
        if "weights_on_host" in moving and found is not None:
            break
        try:
            moved = _with_caution(replace(problem, **moving), cuts, frozenset(allowed))
        except BudgetError as nothing_fits:
            error = without_stack(nothing_fits)
            continue
        for name in reversed(moving):
            moved = _with_less_moved(problem, moved, name)
        if found is None or moved.seconds < found.seconds:
            found = moved
        if found.seconds <= problem.effort.close * found.uncompressed.timeline.step_seconds:
            break
    if found is None:
        assert error is not None
        raise error
    return found


def movable(problem: Problem, what: str) -> frozenset[int]:
    """The layers of which something may be in host memory while it is not used.

    Args:
        problem: the virtual machine's.
        what: the field of the workload with its bytes: ``"optimizer_bytes"`` or
            ``"waiting_bytes"``.
    """
    workload = problem.workload
    if problem.policy is None or problem.profile.state_stays or workload.is_asynchronous:
        return frozenset()
    if not all(limit.host_bytes for limit in problem.limits):
        return frozenset()
    sizes, least = getattr(workload, what), problem.effort.smallest_bytes
    return frozenset(layer for layer, size in enumerate(sizes) if size >= least)


def _with_less_moved(problem: Problem, moved: Compressed, name: str) -> Compressed:
    """The same with as much optimizer state, or weights, on the device as fits. All layers' are
    idle for the same time, so what is transferred fastest has the largest slack: small layers move
    first.

    Args:
        problem: the virtual machine's.
        moved: with all that may move in host memory.
        name: the cut's field that is to become smaller.
    """
    of_weights = name == "weights_on_host"
    workload, bounds = problem.workload, moved.cut.bounds
    sizes = workload.waiting_bytes if of_weights else workload.optimizer_bytes
    now = moved
    for stage in range(len(problem.limits)):
        others = getattr(now.cut, name).difference(range(*bounds[stage : stage + 2]))
        own = sorted(getattr(now.cut, name) - others, key=lambda layer: (sizes[layer], layer))

        def first(count: int, others: frozenset[int] = others, own: list[int] = own) -> Compressed:
            on_host: Any = {name: others.union(own[:count])}
            cut = replace(moved.cut, **on_host)
            footprint = problem.footprints.of(cut, moved.swaps)
            return Compressed(cut, moved.swaps, footprint, moved.uncompressed)

        def fits(count: int, first: Callable[[int], Compressed] = first) -> bool:
            return problem.fits(first(count).footprint)

        now = first(bisect_left(range(len(own)), True, key=fits))
    return now


def _with_caution(problem: Problem, cuts: Sequence[Counts], allowed: frozenset[int]) -> Compressed:
    """As :func:`fastest`, with the times of swaps multiplied by the problem's caution, if there is
    such a plan.
    """
    for caution in dict.fromkeys((problem.caution if problem.policy is not None else 1.0, 1.0)):
        careful = replace(problem, links=problem.links.slowed(caution))
        best, nearest = _climbed(careful, cuts, allowed)
        if best is not None:
            return best
    raise over_budget(problem, nearest.footprint)


def _climbed(
    problem: Problem, cuts: Sequence[Counts], allowed: frozenset[int]
) -> tuple[Compressed | None, Compressed]:
    """The fastest of some cuts, and of those near it, if any fits; and the first that does not, or
    else the fastest.
    """
    workload = problem.workload
    most, num_trials = problem.most_trials, 0
    bounds: dict[Counts, float] = {}
    best: tuple[float, float] = (math.inf, math.inf)
    found: Compressed | None = None
    unfit: Compressed | None = None
    while new := [counts for counts in cuts if counts not in bounds]:
        before = best
        # The step without swaps and recomputation is a lower bound.
        seconds = workload.step_seconds([Cut(counts) for counts in new])
        bounds |= dict(zip(new, seconds, strict=True))
        for counts in sorted(new, key=bounds.__getitem__):
            is_over = found is not None and num_trials > most
            if is_over or (not best[0] and bounds[counts] * problem.effort.close >= best[1]):
                break
            search = AssignmentSearch(problem, Cut(counts))
            assigned, assignments = search.best(), search.assignments
            num_trials += assignments.num_trials
            excess = assignments.score(assigned).excess_bytes
            made = assignments.result(assigned)
            if excess and unfit is None:
                unfit = made
            # If nothing fits yet, what is nearest to it.
            if (excess, made.seconds) < best:
                best, found = (excess, made.seconds), made
        if best == before or not allowed or found is None:
            break
        between = replace(workload, allowed=allowed)
        near = neighbours(between, found.cut.counts, problem.effort.cuts_moved)
        cuts = [counts for counts in near if between.is_allowed(Cut(counts))]
    assert found is not None
    return None if best[0] else found, unfit or found
