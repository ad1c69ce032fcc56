"""The planner: chooses the number of virtual machines, the device of each stage, the cuts, and the
handling of every saved tensor.

Groupings of devices are found first, with cuts in closed form; then the virtual machines of each
are searched as a whole. CN114880130B, after MPress (HPCA 2023), step 3: the mappings of stages to
devices are enumerated and scored by how well they fill spare memory and links, and the best are
compressed and tried on the simulator. The source assumes that all stages take equal time on all
devices; here a mapping is also judged by the time of its step without swaps, which is a lower
bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_pipeshift.errors import BudgetError, PlanError, without_stack
from lightning_pipeshift.plan.arrange.evaluator import Candidate, Evaluator
from lightning_pipeshift.plan.arrange.grouping_search import GroupingSearch
from lightning_pipeshift.plan.arrange.request import Arrangement, PlanRequest
from lightning_pipeshift.plan.arrange.stage_order import (
    Order,
    distinct_orders,
    interchangeable,
    num_orders,
)
from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.offload.cut_search import best_split, fastest
from lightning_pipeshift.plan.offload.peers import mapping_score
from lightning_pipeshift.plan.offload.problem import Compressed, Problem
from lightning_pipeshift.plan.partition.boundaries import cuts_to_try
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS


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
    placer = Evaluator(profile, cluster, request)
    return placer.arrangement(placer.placed(ranks, microbatches, batch_shares), tuple(cuts))


def compressed(
    profile: Profile, cluster: Cluster, request: PlanRequest, arrangement: Arrangement
) -> Arrangement:
    """A given arrangement with swaps of saved tensors, on the same stages and with the same layers
    on each.

    Raises:
        BudgetError: it does not fit in memory; the message contains a budget that would.
    """
    return _Planner(profile, cluster, request).compressed(arrangement)


class _Option(NamedTuple):
    """An order of a virtual machine's stages, and a cut."""

    order: Order
    counts: tuple[int, ...]
    seconds: float
    """Those of the step, without swaps."""
    score: tuple[float, float]
    """That of the best mapping: :func:`~lightning_pipeshift.plan.offload.peers.mapping_score`."""

    def promise(self, alike: float) -> tuple[int, tuple[float, float], float]:
        """A sort key: lower is more promising. Steps that differ by less than the factor ``alike``
        count as equal until the swaps are known.
        """
        size = round(math.log(self.seconds, alike)) if self.seconds > 0 else 0
        return size, self.score, self.seconds


class _Planner:
    """See :func:`arrange`."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self._profile = profile
        self._cluster = cluster
        self._request = request
        self._placer = Evaluator(profile, cluster, request)
        self._alike = interchangeable(cluster)
        self._known: dict[Any, tuple[tuple[int, ...], Compressed]] = {}

    def best(self) -> Arrangement:
        """The best of the arrangements for several assumptions on the needed memory."""
        errors: list[PlanError | BudgetError] = []
        for assumed in self._assumptions():
            found = []
            for placer, start in self._starts(assumed, errors):
                if self._request.policy is None and placer is self._placer:
                    # It was found with the rings, and with the memory that there is.
                    found.append(start)
                if self._request.solver == "milp":
                    continue
                try:
                    found.append(self._mapped(placer, start))
                except BudgetError as error:
                    errors.append(without_stack(error))
            if found:
                return max(found, key=lambda one: one.samples_per_second)
        # Without a policy, that of the model as it is; with one, a budget that would do helps more
        # than that the weights do not fit.
        if self._request.policy is None:
            raise errors[0]
        raise next((error for error in errors if isinstance(error, BudgetError)), errors[0])

    def compressed(self, arrangement: Arrangement) -> Arrangement:
        """See :func:`compressed`."""
        placed = self._placed(arrangement, arrangement.ranks)
        found = [
            best_split(self._problem(placed, vm, ranks), cut.counts)
            for vm, (ranks, cut) in enumerate(zip(arrangement.ranks, arrangement.cuts, strict=True))
        ]
        return self._arrangement(arrangement, arrangement.ranks, found)

    # --- where to start ---

    def _assumptions(self) -> Iterator[list[Profile]]:
        """The model as if a part of its saved tensors took no memory; if nothing fits in that way,
        as if the optimizer's state took none either, and then weights that may wait on the host.
        """
        profile = self._profile
        if self._request.policy is None:
            yield [profile]
            # Nothing moves; but in its backward a stage may recompute layer by layer.
            if self._request.solver == "search":
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

    def _starts(
        self, assumed: Sequence[Profile], errors: list[PlanError | BudgetError]
    ) -> Iterator[tuple[Evaluator, Arrangement]]:
        """Arrangements, each with the evaluator of the profile for which it is the best; where
        nothing fits, adds the error to ``errors``.
        """
        seen = set()
        for profile in assumed:
            placer = self._placer
            if profile is not self._profile:
                placer = Evaluator(profile, self._cluster, self._request)
            try:
                start = GroupingSearch(placer).best()
            except PlanError as error:
                errors.append(without_stack(error))
                continue
            cuts = tuple(cut.counts for cut in start.cuts)
            key = start.ranks, cuts, start.microbatches, start.batch_shares
            if key not in seen:
                seen.add(key)
                yield placer, start

    def _placed(self, start: Arrangement, ranks: Sequence[Order]) -> Candidate:
        return self._placer.placed(ranks, start.microbatches, start.batch_shares)

    # --- one virtual machine ---

    def _mapped(self, placer: Evaluator, start: Arrangement) -> Arrangement:
        """A start's virtual machines, each in the best order of its stages."""
        placed = self._placed(start, start.ranks)
        orders, found = [], []
        for vm, ranks in enumerate(start.ranks):
            # Equal virtual machines are solved once and ordered equally: otherwise rings would be
            # slower.
            problem = self._problem(placed, vm, ranks)
            alike = _pattern([self._alike[rank] for rank in ranks])
            key = problem.workload, problem.links.key, problem.limits, alike
            if key not in self._known:
                order, made = self._best_order(placer, start, placed, vm)
                self._known[key] = tuple(map(ranks.index, order)), made
            places, made = self._known[key]
            orders.append(tuple(ranks[place] for place in places))
            found.append(made)
        self._known.clear()
        return self._arrangement(start, orders, found)

    def _best_order(
        self, placer: Evaluator, start: Arrangement, placed: Candidate, vm: int
    ) -> tuple[Order, Compressed]:
        """The best order that is found, and the handling of saved tensors in it."""
        given = start.ranks[vm]
        effort = self._request.effort
        options = self._options(placer, start, placed, vm)
        options.sort(key=lambda one: one.promise(effort.alike))
        # The best order for the step alone comes first: it may need no swaps.
        own = [option for option in options if option.order == given]
        others = [option for option in options if option.order != given]
        best: tuple[float, Order, Compressed] | None = None
        errors = []
        for option in own + others[: effort.orders_compressed]:
            reordered = 1.0 if option.order == given else effort.worth_changing
            # Swaps can only make a step longer.
            if best is not None and reordered * option.seconds >= best[0]:
                continue
            try:
                made = fastest(
                    self._problem(placed, vm, option.order), [option.counts], self._near(option)
                )
            except BudgetError as error:
                errors.append(without_stack(error))
                continue
            allowed = cuts_to_try(self._profile, len(given))
            is_worth_it = allowed.issuperset(made.cut.bounds[1:-1])
            # A start inside a block is so much faster than all others.
            is_worth_it |= made.cut.counts == start.cuts[vm].counts
            seconds = reordered * (1.0 if is_worth_it else effort.worth_inside) * made.seconds
            if best is None or seconds < best[0]:
                best = seconds, option.order, made
        if best is None:
            raise errors[0]
        return best[1:]

    def _near(self, option: _Option) -> frozenset[int]:
        """The boundaries for cuts near an option; none if the request fixes the cuts, or there are
        too many.
        """
        if self._request.partition != "auto" or len(option.order) > self._request.effort.stages_cut:
            return frozenset()
        return cuts_to_try(self._profile, len(option.order))

    def _options(
        self, placer: Evaluator, start: Arrangement, placed: Candidate, vm: int
    ) -> list[_Option]:
        """Orders of the stages, and cuts for each."""
        profile = self._profile
        found = []
        for order in self._orders(start.ranks[vm]):
            problem = self._problem(placed, vm, order)
            candidates = [start.cuts[vm].counts]
            with suppress(PlanError):
                ranks = (*start.ranks[:vm], order, *start.ranks[vm + 1 :])
                there = placer.placed(ranks, start.microbatches, start.batch_shares)
                candidates.append(placer.cuts(there)[vm].counts)
            if self._request.partition == "auto":
                candidates.append(uniform(profile.num_layers, len(order), profile.possible_cuts))
            for counts in dict.fromkeys(candidates):
                footprint = problem.footprints.of(Cut(counts))
                spare = problem.spare_bytes(footprint)
                needs = {stage: -left for stage, left in enumerate(spare) if left < 0}
                seconds = footprint.timeline.step_seconds
                score = mapping_score(needs, spare, problem.links, problem.effort)
                found.append(_Option(order, counts, seconds, score))
        return found

    def _orders(self, machine: Order) -> Iterator[Order]:
        """The orders of a virtual machine's stages to try, its own first."""
        yield machine
        # Without swaps, orders have been compared with the memory that there is.
        if self._request.has_order or self._request.policy is None:
            return
        alike = [self._alike[rank] for rank in machine]
        if num_orders(alike) <= self._request.effort.orders:
            yield from (order for order in distinct_orders(machine, alike) if order != machine)
            return
        pairs = itertools.combinations(range(len(machine)), 2)
        for one, other in itertools.islice(pairs, self._request.effort.orders):
            if alike[one] != alike[other]:
                order = list(machine)
                order[one], order[other] = order[other], order[one]
                yield tuple(order)

    def _problem(self, placed: Candidate, vm: int, order: Order) -> Problem:
        """The problem of a virtual machine with an order of its stages."""
        samples = self._placer.sizes(len(placed.ranks), placed.batch_shares)[vm]
        workload = self._placer.workload(placed.links, order, samples, placed.microbatches)
        request = self._request
        how = request.policy, request.recompute, request.caution, request.effort
        return Problem.of(self._profile, workload, placed.links, order, *how)

    # --- the result ---

    def _arrangement(
        self, start: Arrangement, ranks: Sequence[Order], found: Sequence[Compressed]
    ) -> Arrangement:
        placed = self._placed(start, ranks)
        cuts = tuple(each.cut for each in found)
        made = self._placer.arrangement(placed, cuts, tuple(each.swaps for each in found))
        return replace(made, tried=start.tried)


def _pattern(classes: Sequence[Any]) -> tuple[int, ...]:
    """Which elements are equal, without what they are: their numbers in the order in which they
    first occur.
    """
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(each, len(numbers)) for each in classes)


def _with_saved(profile: Profile, part: float) -> Profile:
    """The same model, as if layers saved only a part of their tensors."""
    if part == 1:
        return profile
    layers = tuple(
        replace(layer, saved_bytes=round(part * layer.saved_bytes), tensors=())
        for layer in profile.layers
    )
    return replace(profile, layers=layers)
