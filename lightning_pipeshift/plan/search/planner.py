"""The planner: chooses the number of virtual machines, the device of each stage, the cuts, and the
handling of every saved tensor.

Groupings of devices are found first, as if all saved tensors left the device, or a part of them, or
none; then what moves is searched for the best orders of the stages of each virtual machine.
CN114880130B, after MPress (HPCA 2023), step 3: mappings of stages to devices are enumerated, and
the best are compressed and tried on the simulator. The source assumes that all stages take equal
time on all devices, and scores a mapping by how well it fills spare memory and links; here it is
judged by the time of its step without swaps, which is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lightning_pipeshift.errors import BudgetError, PlanError, without_stack
from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from lightning_pipeshift.plan.search.boundaries import cuts_to_try, is_between_blocks
from lightning_pipeshift.plan.search.cut_search import best_split, fastest
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.plan.search.evaluator import Candidate, Evaluator
from lightning_pipeshift.plan.search.grouping_search import GroupingSearch
from lightning_pipeshift.plan.search.orders import Order, pattern
from lightning_pipeshift.plan.search.problem import Compressed, Problem
from lightning_pipeshift.plan.search.request import Arrangement, PlanRequest


def arrange(profile: Profile, cluster: Cluster, request: PlanRequest) -> Arrangement:
    """The arrangement with the most samples per second, by the simulator; with swaps of saved
    tensors, if the request has a policy for them.

    Args:
        profile: of the model.
        cluster: the machines.
        request: the fixed settings.

    Raises:
        PlanError: no allowed arrangement fits in memory, or has the requested number of virtual
            machines.
        BudgetError: with a policy, if no arrangement fits in memory; the message contains a budget
            that would.
        ConfigurationError: the request has unknown ranks, or one rank twice.
    """
    return _Planner(profile, cluster, request).best()


def evaluate(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    ranks: Sequence[Sequence[int]],
    cuts: Sequence[Cut],
    microbatches: int,
    batch_shares: Sequence[float] | None = None,
) -> Arrangement:
    """A given arrangement with its prediction, whether it fits in memory or not.

    Args:
        profile: of the model.
        cluster: the machines.
        request: the request, which has the schedule and the batch size.
        ranks: of each virtual machine, in stage order.
        cuts: one for each of them.
        microbatches: slices of a virtual machine's batch.
        batch_shares: how the global batch is divided; ``None``: equally.
    """
    evaluator = Evaluator(profile, cluster, request)
    return evaluator.arrangement(evaluator.placed(ranks, microbatches, batch_shares), tuple(cuts))


def compressed(
    profile: Profile, cluster: Cluster, request: PlanRequest, arrangement: Arrangement
) -> Arrangement:
    """A given arrangement with swaps of saved tensors, on the same stages and with the same layers
    on each.

    Raises:
        BudgetError: it does not fit in memory; the message contains a budget that would.
    """
    return _Planner(profile, cluster, request).compressed(arrangement)


class _OrderWithCuts(NamedTuple):
    """An order of a virtual machine's stages, and cuts to begin with."""

    order: Order
    cuts: tuple[Counts, ...]
    seconds: float
    """Those of the fastest one's step, without swaps."""
    problem: Problem

    @property
    def lacking_bytes(self) -> float:
        """The bytes that all stages lack if everything is kept."""
        workload = self.problem.workload
        held = np.array([workload.memory.peak_bytes(Cut(counts)) for counts in self.cuts])
        return float(np.maximum(held - workload.usable_bytes, 0.0).sum(axis=1).min())


class _Planner:
    """See :func:`arrange`."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self._profile, self._cluster, self._request = profile, cluster, request
        self._evaluator = Evaluator(profile, cluster, request)
        #: The handling of saved tensors for orders and cuts; ``None`` where nothing fits.
        self._made: dict[Any, Compressed | None] = {}
        self._num_left = 0
        self._errors: list[PlanError | BudgetError] = []

    def best(self) -> Arrangement:
        """The best of the arrangements for several assumptions on the needed memory."""
        effort, best = self._request.effort, None
        for assumed in self._assumptions():
            starts: list[tuple[float, Evaluator, Arrangement]] = []
            for evaluator, start in self._starts(assumed):
                if self._request.policy is None and evaluator is self._evaluator:
                    # Nothing moves, and it was found with the memory that there is.
                    return start
                found = self._offloaded(evaluator, start, best)
                starts.append((found.samples_per_second if found else 0.0, evaluator, start))
                best = self._better(best, found)
                # The next starts are for less memory.
                if best is not None and self._reaches(best, start, effort.close):
                    break
            # Other orders: first where the own one is the best.
            self._num_left = effort.orders_compressed
            for _, evaluator, start in sorted(starts, key=lambda each: -each[0]):
                if self._request.has_order or self._request.policy is None:
                    break
                if best is None or not self._reaches(best, start, effort.worth_changing):
                    found = self._offloaded(evaluator, start, best, reorders=True)
                    best = self._better(best, found)
            if best is not None:
                return best
        # Without a policy, that of the model as it is; with one, a budget that would do helps more
        # than that the weights do not fit.
        of_budgets = [error for error in self._errors if isinstance(error, BudgetError)]
        raise (of_budgets if of_budgets and self._request.policy is not None else self._errors)[0]

    def compressed(self, arrangement: Arrangement) -> Arrangement:
        """See :func:`compressed`."""
        placed, found = self._placed(arrangement, arrangement.ranks), []
        for vm, ranks in enumerate(arrangement.ranks):
            problem = self._problem(placed, vm, ranks)
            found.append(best_split(problem, arrangement.cuts[vm].counts))
        return self._arrangement(arrangement, arrangement.ranks, found)

    # The starts.

    def _assumptions(self) -> Iterator[list[Profile]]:
        """The model as if a part of its saved tensors took no memory; if nothing fits in that way,
        as if the optimizer's state took none either, and then weights that may wait on the host.
        """
        profile = self._profile
        if self._request.policy is None:
            yield [profile]
            # Nothing moves; but in its backward a stage may recompute layer by layer.
            yield [_with_saved(profile, 0.0)]
            return
        yield [_with_saved(profile, part) for part in self._request.effort.saved_parts]
        if self._request.schedule in ASYNCHRONOUS:
            return
        if not profile.state_stays:
            layers = tuple(replace(layer, optimizer_bytes=0) for layer in profile.layers)
            profile = replace(profile, layers=layers)
            yield [_with_saved(profile, 0.0)]
        if any(layer.waiting_bytes for layer in profile.layers):
            layers = tuple(
                replace(
                    layer,
                    parameter_bytes=layer.parameter_bytes - layer.waiting_bytes,
                    waiting_bytes=0,
                )
                for layer in profile.layers
            )
            yield [_with_saved(replace(profile, layers=layers), 0.0)]

    def _starts(self, assumed: Sequence[Profile]) -> Iterator[tuple[Evaluator, Arrangement]]:
        """Arrangements, each with the evaluator of the profile for which it is the best; notes the
        errors where nothing fits.
        """
        seen = set()
        for profile in assumed:
            evaluator = self._evaluator
            if profile is not self._profile:
                evaluator = Evaluator(profile, self._cluster, self._request)
            try:
                start = GroupingSearch(evaluator).best()
            except PlanError as error:
                self._errors.append(without_stack(error))
                continue
            cuts = tuple(cut.counts for cut in start.cuts)
            key = start.ranks, cuts, start.microbatches, start.batch_shares
            if key not in seen:
                seen.add(key)
                yield evaluator, start

    def _placed(self, start: Arrangement, ranks: Sequence[Order]) -> Candidate:
        return self._evaluator.placed(ranks, start.microbatches, start.batch_shares)

    # One virtual machine.

    def _offloaded(
        self,
        evaluator: Evaluator,
        start: Arrangement,
        best: Arrangement | None,
        reorders: bool = False,
    ) -> Arrangement | None:
        """A start's virtual machines with the handling of their saved tensors; ``None`` if it does
        not fit, or cannot be better than the best so far.

        Args:
            evaluator: its evaluator.
            start: the start.
            best: the best so far.
            reorders: whether other orders of the stages are tried.
        """
        placed = self._placed(start, start.ranks)
        limit = math.inf
        if best is not None:
            limit = self._value(start) / start.samples_per_second / self._value(best)
            limit *= evaluator.total(len(start.ranks))
        known: dict[Any, tuple[tuple[int, ...], Compressed]] = {}
        orders, found = [], []
        for vm, ranks in enumerate(start.ranks):
            # Equal virtual machines are solved once and ordered equally: otherwise rings would be
            # slower.
            problem = self._problem(placed, vm, ranks)
            alike = [self._evaluator.alike[rank] for rank in ranks]
            key = *_key(problem), pattern(alike)
            if key not in known:
                options = self._options(evaluator, start, vm, reorders)
                made = self._best_order(options, limit)
                if made is None:
                    return None
                known[key] = tuple(map(ranks.index, made[0])), made[1]
            places, compressed = known[key]
            orders.append(tuple(ranks[place] for place in places))
            found.append(compressed)
        return self._arrangement(start, orders, found)

    def _options(
        self, evaluator: Evaluator, start: Arrangement, vm: int, reorders: bool
    ) -> list[_OrderWithCuts]:
        """The start's own order with its cut, and the best ones that the search of stages finds."""
        options = [self._option(start, vm, start.ranks[vm], start.cuts[vm].counts)]
        if reorders:
            there = evaluator.placed(start.ranks, start.microbatches, start.batch_shares)
            staged = evaluator.staged(there, vm, starts=[start.ranks[vm][::-1]])
            others = [self._option(start, vm, each.order, each.cut.counts) for each in staged]
            noise = math.log(self._request.effort.alike)
            # Of nearly equal ones, those that lack little memory.
            others.sort(key=lambda one: (round(math.log(one.seconds) / noise), one.lacking_bytes))
            options += others[: self._request.effort.orders_compressed]
        return options

    def _option(self, start: Arrangement, vm: int, order: Order, counts: Counts) -> _OrderWithCuts:
        ranks = (*start.ranks[:vm], order, *start.ranks[vm + 1 :])
        problem = self._problem(self._placed(start, ranks), vm, order)
        cuts = [counts]
        if self._request.partition == "auto":
            layers, possible = self._profile.num_layers, self._profile.possible_cuts
            more = start.cuts[vm].counts, uniform(layers, len(order), possible)
            # A start with a cut inside of a block is so much faster than all others.
            cuts += [each for each in more if is_between_blocks(self._profile, each)]
        cuts = list(dict.fromkeys(cuts))
        steps = problem.workload.step_seconds([Cut(each) for each in cuts])
        return _OrderWithCuts(order, tuple(cuts), min(steps), problem)

    def _best_order(
        self, options: Sequence[_OrderWithCuts], limit: float
    ) -> tuple[Order, Compressed] | None:
        """The best order of the options, and the handling of saved tensors in it; ``None`` if
        nothing fits in any, or a step takes at least ``limit`` seconds.
        """
        best: tuple[Order, Compressed] | None = None
        least = math.inf
        for option in options:
            # Swaps can only make a step longer.
            if option.seconds >= min(least, limit):
                continue
            if option is not options[0]:
                if self._num_left <= 0:
                    break
                self._num_left -= 1
            made = self._compressed(option)
            if made is not None and made.seconds < least:
                least, best = made.seconds, (option.order, made)
        return best

    def _compressed(self, option: _OrderWithCuts) -> Compressed | None:
        """The handling of saved tensors; ``None`` if nothing fits."""
        key = *_key(option.problem), option.cuts
        if key not in self._made:
            self._made[key] = None
            near: frozenset[int] = frozenset()
            is_deep = len(option.order) > self._request.effort.stages_cut
            if self._request.partition == "auto" and not is_deep:
                near = cuts_to_try(self._profile, len(option.order))
            try:
                self._made[key] = fastest(option.problem, option.cuts, near)
            except BudgetError as error:
                self._errors.append(without_stack(error))
        return self._made[key]

    def _problem(self, placed: Candidate, vm: int, order: Order) -> Problem:
        samples = self._evaluator.sizes(len(placed.ranks), placed.batch_shares)[vm]
        workload = self._evaluator.workload(placed.links, order, samples, placed.microbatches)
        request = self._request
        how = request.policy, request.recompute, request.caution, request.effort
        return Problem.of(self._profile, workload, placed.links, order, *how)

    # The result.

    def _value(self, arrangement: Arrangement) -> float:
        """Samples per second, and less if a cut is inside of a block: see
        :attr:`Effort.worth_inside`.
        """
        counts = {cut.counts for cut in arrangement.cuts}
        is_between = all(is_between_blocks(self._profile, each) for each in counts)
        worth = 1.0 if is_between else self._request.effort.worth_inside
        return arrangement.samples_per_second / worth

    def _better(self, best: Arrangement | None, other: Arrangement | None) -> Arrangement | None:
        """The better one; the first of equal ones."""
        if best is None or other is None:
            return best or other
        return max(best, other, key=self._value)

    def _reaches(self, one: Arrangement, other: Arrangement, factor: float) -> bool:
        """Whether an arrangement is worse than another one by this factor at most."""
        return factor * self._value(one) >= self._value(other)

    def _arrangement(
        self, start: Arrangement, ranks: Sequence[Order], found: Sequence[Compressed]
    ) -> Arrangement:
        placed = self._placed(start, ranks)
        cuts = tuple(each.cut for each in found)
        made = self._evaluator.arrangement(placed, cuts, tuple(each.swaps for each in found))
        return replace(made, tried=start.tried)


def _key(problem: Problem) -> tuple[Any, ...]:
    """Equal for equal problems of one model."""
    return problem.workload, problem.links.key, problem.limits


def _with_saved(profile: Profile, part: float) -> Profile:
    """The same model, as if layers saved only a part of their tensors."""
    if part == 1:
        return profile
    layers = tuple(
        replace(layer, saved_bytes=round(part * layer.saved_bytes), tensors=())
        for layer in profile.layers
    )
    return replace(profile, layers=layers)
