"""Decides how every saved tensor is handled, so that each stage keeps its budget at the least cost
in step time.

CN114880130B, after MPress (HPCA 2023), steps 2 to 4: device-to-device swaps where the time is
short, host swaps where there is time for them, recomputation where both cost more, and any fitting
alternative if memory or time is missing; the mappings of lenders are enumerated and scored; and the
plan is tried on the simulator and improved until it no longer improves. Here the simulator also
models the stages' idle time, so the search finds that a recomputation in it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from lightning_pipeshift.errors import BudgetError, PlanError
from lightning_pipeshift.plan.cost.workload import ROUNDING, Counts, Cut
from lightning_pipeshift.plan.inputs.policies import TensorRecord
from lightning_pipeshift.plan.inputs.saved_tensors import Choice, Swap
from lightning_pipeshift.plan.offload.assignment_search import (
    CLOSE,
    SMALLEST_BYTES,
    Assigned,
    Compressed,
    Problem,
    Search,
    most_trials,
)
from lightning_pipeshift.plan.partition.boundaries import cuts_to_try
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.partition.local_search import best_cut_of, fixed_cut, neighbours
from lightning_pipeshift.plan.schedule.asynchronous import weight_versions
from lightning_pipeshift.text import ceil_bytes_text

PARTS: Final = (0.0, 0.5, 1.0)
"""The fractions of their saved tensors that must fit on stages in searches for virtual machines,
orders and cuts, if tensors may be swapped: 0 if all may be, 1 if none is."""


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
    if problem.policy is None:
        # Without `MemoryCompression` nothing moves.
        cut = _unswapped(problem, counts, start)
        footprint = problem.footprints.of(cut)
        return Compressed(cut, (), footprint, footprint)
    if counts is not None:
        return fastest(problem, [counts])
    return fastest(problem, candidates(problem, start), _worthwhile(problem))


def _unswapped(problem: Problem, counts: Sequence[int] | None, start: Sequence[Cut]) -> Cut:
    """The best cut without swaps, whose recomputation follows from the cut."""
    workload, recompute = problem.workload, problem.recompute
    if counts is None:
        return best_cut_of(workload, _worthwhile(problem), recompute, start)
    try:
        return fixed_cut(workload, tuple(counts), recompute)
    except PlanError:
        # The memory is an estimate, and the user's cut is not: what holds least is tried.
        return Cut(tuple(counts)) if recompute == "none" else workload.everything_recomputed(counts)


def candidates(problem: Problem, start: Sequence[Cut] = ()) -> list[Counts]:
    """Cuts to try with swaps: the best ones for several assumptions on the needed memory, the even
    one, and the given ones.
    """
    workload = problem.workload
    boundless = replace(workload, usable_bytes=np.full(workload.num_stages, np.inf))
    found = []
    for given in (workload.with_saved(part) for part in PARTS):
        with suppress(PlanError):
            found.append(best_cut_of(given, _worthwhile(problem), problem.recompute).counts)
    if not found:
        found.append(best_cut_of(boundless, _worthwhile(problem), problem.recompute).counts)
    even = uniform(workload.num_layers, workload.num_stages, problem.profile.possible_cuts)
    found += [cut.counts for cut in (Cut(even), *start) if workload.is_allowed(cut)]
    return list(dict.fromkeys(found))


def _worthwhile(problem: Problem) -> frozenset[int]:
    return cuts_to_try(problem.profile, problem.workload.num_stages)


def fastest(
    problem: Problem, cuts: Sequence[Sequence[int]], allowed: Collection[int] = ()
) -> Compressed:
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
            moved = _fastest(replace(problem, **moving), cuts, allowed)
        except BudgetError as nothing_fits:
            error = nothing_fits
            continue
        for name in reversed(moving):
            moved = _with_less_moved(problem, moved, name)
        if found is None or moved.seconds < found.seconds:
            found = moved
        if found.seconds <= CLOSE * found.uncompressed.timeline.step_seconds:
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
    if problem.profile.state_stays or workload.objective.is_pace:
        return frozenset()
    if not all(limit.host_bytes for limit in problem.limits):
        return frozenset()
    sizes = getattr(workload, what)
    return frozenset(layer for layer, size in enumerate(sizes) if size >= SMALLEST_BYTES)


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

        fewest, most = 0, len(own)
        while fewest < most:
            middle = (fewest + most) // 2
            if _fits(problem, first(middle)):
                most = middle
            else:
                fewest = middle + 1
        now = first(fewest)
    return now


def _fits(problem: Problem, found: Compressed) -> bool:
    footprint = found.footprint
    return all(
        peak <= ROUNDING * limit.budget_bytes and trace.host_bytes <= ROUNDING * limit.host_bytes
        for peak, trace, limit in zip(
            footprint.peak_bytes, footprint.traces, problem.limits, strict=True
        )
    )


def _fastest(
    problem: Problem, cuts: Sequence[Sequence[int]], allowed: Collection[int] = ()
) -> Compressed:
    """The fastest of some cuts of a virtual machine, and of those near it, with the handling of its
    saved tensors.

    The step without swaps is a lower bound: cuts that are slower than what was found need not be
    searched.

    Args:
        problem: the virtual machine's.
        cuts: layers per stage.
        allowed: the boundaries for cuts near them; empty if only the given ones are.

    Raises:
        BudgetError: no cut fits; the message contains a budget for the first.
    """
    for caution in dict.fromkeys((problem.caution, 1.0)):
        careful = Compression(replace(problem, links=problem.links.slowed(caution)))
        best, error = careful.fastest(list(map(tuple, cuts)), frozenset(allowed))
        if best is not None:
            return best
    assert error is not None
    raise error


class Compression:
    """Searches for the best assignment for one virtual machine.

    Args:
        problem: the virtual machine's.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._limits = problem.limits
        self._num_trials = 0
        self._most_trials = most_trials(len(problem.sizes))

    def compressed(self, counts: Sequence[int]) -> Compressed:
        """The best result for a cut.

        Raises:
            BudgetError: nothing fits; the message contains a budget that would.
        """
        search, best = self._searched(counts)
        if search.score(best).excess_bytes > 0:
            raise self._nothing_fits(search, best)
        return search.result(best)

    def fastest(
        self, cuts: Sequence[Counts], allowed: frozenset[int] = frozenset()
    ) -> tuple[Compressed | None, BudgetError | None]:
        """The fastest of some cuts, and of those near it, if any fits; the error of the first that
        does not.

        Args:
            cuts: layers per stage.
            allowed: the boundaries for cuts near them.
        """
        workload = self._problem.workload
        bounds: dict[Counts, float] = {}
        best: tuple[float, float] = (math.inf, math.inf)
        found: Compressed | None = None
        error: BudgetError | None = None
        while new := [counts for counts in cuts if counts not in bounds]:
            before = best
            seconds = workload.step_seconds([Cut(counts) for counts in new])
            bounds |= dict(zip(new, seconds, strict=True))
            for counts in sorted(new, key=bounds.__getitem__):
                is_over = found is not None and self._num_trials > self._most_trials
                if is_over or (not best[0] and bounds[counts] * CLOSE >= best[1]):
                    break
                search, assigned = self._searched(counts)
                excess, made = search.score(assigned).excess_bytes, search.result(assigned)
                if excess and error is None:
                    error = self._nothing_fits(search, assigned)
                # If nothing fits yet, what is nearest to it.
                if (excess, made.seconds) < best:
                    best, found = (excess, made.seconds), made
            if best == before or not allowed or found is None:
                break
            cuts = neighbours(replace(workload, allowed=allowed), found.cut.counts)
        return (found, error) if not best[0] else (None, error)

    def _searched(self, counts: Sequence[int]) -> tuple[Search, Assigned]:
        search = Search(self._problem, Cut(tuple(counts)))
        best = search.best()
        self._num_trials += search.num_trials
        return search, best

    def records(self, counts: Sequence[int]) -> Iterator[TensorRecord]:
        """Every saved tensor of a cut, as policies see it."""
        return Search(self._problem, Cut(tuple(counts))).records()

    def follows(self, cut: Cut, swaps: Sequence[Swap]) -> bool:
        """Whether all tensors are handled as the policy chooses.

        Args:
            cut: the owners of the layers, and the recomputed layers.
            swaps: the swapped tensors.
        """
        search = Search(self._problem, Cut(cut.counts))
        ways = {key: Choice.RECOMPUTE for key in self._problem.sizes if key[0] in cut.recompute}
        ways |= {(swap.layer, number): swap.choice for swap in swaps for number in swap.tensors}
        return all(ways.get(key, Choice.KEEP) is choice for key, choice in search.asked.items())

    def _nothing_fits(self, search: Search, best: Assigned) -> BudgetError:
        found = search.footprint(best)
        lacking = [
            peak / ROUNDING - limit.budget_bytes
            for peak, limit in zip(found.peak_bytes, self._limits, strict=True)
        ]
        if max(lacking) <= 0:
            return self._host_is_short(search, best)
        stage = max(range(len(lacking)), key=lacking.__getitem__)
        needed = max(found.peak_bytes)
        static, budget = found.static_bytes[stage], self._limits[stage].budget_bytes
        num_versions = self._problem.workload.num_versions[stage]
        weights = f"{num_versions} versions of the weights" if num_versions > 1 else "weights"
        remedies = [f"a budget of {ceil_bytes_text(needed)} would do"]
        fewest = weight_versions("async-2bw", len(lacking))[stage]
        if num_versions > fewest:
            remedies.append(f"so may schedule='async-2bw', which keeps {fewest} versions")
        if static >= budget:
            remedies.append("so would more stages, as weights and the optimizer's state fill it")
        else:
            remedies.append("so may smaller microbatches")
        if any(trace.host_bytes > limit.host_bytes for trace, limit in search.traces(best)) or (
            not any(limit.host_bytes for limit in self._limits)
        ):
            remedies.append("or more host memory (`host_budget`)")
        state, own_weights = " the optimizer's state", f"{weights}, "
        if self._problem.weights_on_host:
            own_weights = "the weights of two layers at a time, "
        if self._problem.optimizer_on_host or self._problem.weights_on_host:
            state = ""
        elif stays := self._problem.profile.state_stays:
            state += f" (which stays on the device: {stays})"
        has, peak, fixed = map(ceil_bytes_text, (budget, found.peak_bytes[stage], static))
        return BudgetError(
            f"No plan keeps the memory budget: stage {stage} has {has}, and needs {peak} in the"
            f" best plan found, {fixed} of it for {own_weights}gradients,{state} and messages"
            f" between stages. What would help: {'; '.join(remedies)}."
        )

    def _host_is_short(self, search: Search, best: Assigned) -> BudgetError:
        stage, (trace, limit) = max(
            enumerate(search.traces(best)),
            key=lambda one: one[1][0].host_bytes - one[1][1].host_bytes,
        )
        has, needs = map(ceil_bytes_text, (limit.host_bytes, trace.host_bytes))
        return BudgetError(
            f"No plan keeps the memory budget: the host of stage {stage} has {has} for swapped"
            f" tensors (`host_budget`), and the best plan found needs {needs}. What would help:"
            f" {needs} there, or a larger budget on the device, so that less has to move."
        )
