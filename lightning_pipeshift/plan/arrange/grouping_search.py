"""Chooses groupings of devices: the number of virtual machines, their devices and the order of
these, the microbatches and the shares of the batch, with a first cut of each.

Each choice depends on the others, and there are too many combinations. So all useful groupings are
first evaluated in closed form; the orders of the best are tried on the simulator; and for the best
of those, cuts, microbatches and shares are searched thoroughly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from lightning_pipeshift.errors import PlanError, without_stack
from lightning_pipeshift.plan.arrange.batch_shares import balanced_shares
from lightning_pipeshift.plan.arrange.evaluator import Candidate, Cuts, Evaluator
from lightning_pipeshift.plan.arrange.groupings import (
    Groups,
    candidate_counts,
    groupings,
    ring_order,
)
from lightning_pipeshift.plan.arrange.num_microbatches import (
    fewest,
    numbers_of_slices,
    resliced,
    slices,
)
from lightning_pipeshift.plan.arrange.request import Arrangement, Tried
from lightning_pipeshift.plan.arrange.stage_order import OrderSearch
from lightning_pipeshift.plan.cost.pace import Objective
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.schedule.asynchronous import require_equal_depths
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS


class _Look(NamedTuple):
    """A grouping's evaluation."""

    rate: float
    """Samples per second."""
    placed: Candidate
    cuts: Cuts
    orders: tuple[Groups, ...] = ()
    """Orders of the stages whose step time is near the best."""

    @property
    def depth(self) -> int:
        """The number of stages of the deepest virtual machine."""
        return max(map(len, self.placed.ranks))


class GroupingSearch:
    """Chooses one arrangement without swaps from all groupings.

    Args:
        placer: evaluates them.
    """

    def __init__(self, placer: Evaluator) -> None:
        self._placer = placer
        self._profile = placer.profile
        self._cluster = placer.cluster
        self._request = placer.request
        self._effort = placer.request.effort
        self._orders = OrderSearch(placer)
        self._tried: dict[int, Tried] = {}

    def best(self) -> Arrangement:
        """The arrangement with the most samples per second, by the simulator.

        Raises:
            PlanError: no allowed arrangement fits in memory, or has the requested number of virtual
                machines.
            ConfigurationError: the request has unknown ranks, or one rank twice.
        """
        second, finished = self._effort.groupings_simulated, self._effort.groupings_finished
        if self._cluster.num_ranks > self._effort.few_ranks:
            second //= 6 if self._is_large else 3
        if self._is_large:
            finished = 1
        first = self._first_looks()
        # The best of each depth is simulated too: what is said of a depth comes from the same model
        # as the choice.
        of_depths = {look.depth: look for look in sorted(first, key=lambda look: look.rate)}
        chosen = {id(look): look for look in [*_highest(first, second), *of_depths.values()]}
        again = [self._second_look(look) for look in chosen.values()]
        for look in again:
            self._note(look)
        found = [self._finished(look) for look in _highest(again, finished)]
        best = max(found, key=lambda one: one.samples_per_second)
        placed = self._placer.placed(best.ranks, best.microbatches, best.batch_shares)
        self._note(_Look(best.samples_per_second, placed, best.cuts), is_final=True)
        tried = sorted(self._tried.values(), key=lambda one: -one.samples_per_second)
        return replace(best, tried=tuple(tried))

    def _note(self, look: _Look, is_final: bool = False) -> None:
        """Keeps the best evaluation of each depth, and what limits it."""
        placed, depth = look.placed, look.depth
        known = self._tried.get(depth)
        if known is not None and known.samples_per_second >= look.rate and not is_final:
            return
        cost, pairs = self._placer.simulator, set(zip(placed.workloads, look.cuts, strict=True))
        alone = max(cost.alone(workload, cut) for workload, cut in pairs)
        again = max(
            max(workload.costs(cut).recompute_seconds, default=0.0) * workload.microbatches
            for workload, cut in pairs
        )
        total = self._placer.total(len(placed.ranks))
        besides = self._profile.step_seconds
        busy = total / sum(self._placer.powers) / self._profile.samples
        lost = {
            "gradients are waited for": cost.step(placed, look.cuts) - besides - alone,
            "recomputation, for memory": again,
            "stages wait for each other": alone - again - busy,
        }
        limit = max(lost, key=lambda name: lost[name])
        if lost[limit] < (1 - self._effort.promising) * alone:
            limit = "all devices compute nearly all the time"
        self._tried[depth] = Tried(depth, look.rate, limit)

    def _first_looks(self) -> list[_Look]:
        """The groupings that fit, with their samples per second in closed form."""
        all_groups = sorted(self._groupings(), key=lambda groups: -self._most_per_second(groups))
        errors: dict[Groups, PlanError] = {}
        seen: list[_Look] = []
        for groups in all_groups:
            if self._is_hopeless(groups, seen):
                continue
            try:
                seen.append(self._first_look(groups))
            except PlanError as error:
                errors[groups] = without_stack(error)
                depth = max(map(len, groups))
                self._tried.setdefault(depth, Tried(depth, 0.0, "does not fit in memory"))
        if not seen:
            # The error of the grouping that is nearest to fitting is the most useful.
            nearest = max(errors, key=self._least_usable_bytes)
            slices = max(numbers_of_slices(self._request, max(map(len, nearest))))
            placed = self._placer.placed(nearest, slices, self._request.batch_shares)
            self._placer.cuts(placed, careful=True)
            raise errors[nearest]
        return seen

    def _is_hopeless(self, groups: Groups, seen: Sequence[_Look]) -> bool:
        """Whether a grouping cannot come near the best of those evaluated."""
        if self._cluster.num_ranks <= self._effort.few_ranks or not seen:
            return False
        promising = self._effort.promising * max(look.rate for look in seen)
        if self._most_per_second(groups) < promising:
            return True
        # With many devices, deeper pipelines have larger bubbles, and hide their rings better. Once
        # the first effect is larger, it is so for all deeper pipelines.
        best: dict[int, float] = {}
        for look in seen:
            count = len(look.placed.ranks)
            best[count] = max(best.get(count, 0.0), look.rate)
        shallower = [rate for count, rate in best.items() if count > len(groups)]
        return self._is_large and any(rate < promising for rate in shallower)

    def _groupings(self) -> Iterator[Groups]:
        """The groupings that the request allows."""
        request, num_ranks = self._request, self._cluster.num_ranks
        if request.ranks is not None:
            topology = Topology(request.ranks)
            if topology.num_ranks != num_ranks:
                raise PlanError(
                    f"virtual machines of {topology.num_ranks} ranks on {num_ranks} devices; name"
                    f" each of the ranks 0 to {num_ranks - 1} once"
                )
            yield topology.ranks
            return
        depths = request.depths(num_ranks)
        counts = candidate_counts(self._cluster.devices, self._effort)
        if depths is not None:
            counts = (len(depths),)
        elif request.num_virtual_machines is not None:
            counts = (request.num_virtual_machines,)
        divides = tuple(count for count in counts if request.can_divide(count))
        if not divides:
            raise PlanError(
                f"the {request.step_samples:g} samples of a step cannot be divided equally among"
                f" {' or '.join(map(str, counts))} virtual machines; change the number of either"
            )
        counts = divides
        refused, is_possible = None, False
        for count in counts:
            if count > num_ranks:
                raise PlanError(
                    f"{count} virtual machines on {num_ranks} devices; each has at least one device"
                )
            for groups in groupings(
                self._cluster, count, self._placer.powers, self._orders.alike, depths, self._effort
            ):
                try:
                    require_equal_depths(request.schedule, map(len, groups))
                except PlanError as error:
                    refused = without_stack(error)
                    continue
                is_possible = True
                yield self._numbered(groups)
        if refused is not None and not is_possible:
            raise refused

    def _numbered(self, groups: Groups) -> Groups:
        """The same groups in their order in the rings, as far as the request allows."""
        shares = self._request.batch_shares
        if not isinstance(self._request.partition, str):
            return groups
        if shares is None:
            groups = ring_order(self._cluster, groups, self._effort.stages)
            if self._request.schedule in ASYNCHRONOUS:
                # The ring stays the same, with one of the deepest virtual machines first.
                first = max(range(len(groups)), key=lambda vm: (len(groups[vm]), -vm))
                groups = groups[first:] + groups[:first]
            return groups
        # The larger shares are for the faster ones.
        fastest = sorted(
            groups, key=lambda ranks: -sum(self._placer.powers[rank] for rank in ranks)
        )
        largest = sorted(range(len(shares)), key=lambda vm: -shares[vm])
        of_vm = dict(zip(largest, fastest, strict=True))
        return tuple(of_vm[vm] for vm in range(len(shares)))

    def _most_per_second(self, groups: Groups) -> float:
        """Samples per second if all stages took equal time and messages took no time: an upper
        bound for all cuts.
        """
        slices = max(numbers_of_slices(self._request, max(map(len, groups))))
        objective = Objective.of(self._request.schedule, slices)
        per_sample = [
            objective.seconds(1 / max(powers), 1 / sum(powers)) / slices / self._profile.samples
            for powers in ([self._placer.powers[rank] for rank in ranks] for ranks in groups)
        ]
        total = self._placer.total(len(groups))
        if self._request.batch_shares is None:
            seconds = total / sum(1 / seconds for seconds in per_sample)
        else:
            sizes = self._placer.sizes(len(groups), self._request.batch_shares)
            seconds = max(size * each for size, each in zip(sizes, per_sample, strict=True))
        return total / (seconds + self._profile.step_seconds)

    def _least_usable_bytes(self, groups: Groups) -> float:
        devices = self._cluster.devices
        return min(math.fsum(devices[rank].usable_bytes for rank in ranks) for ranks in groups)

    def _first_look(self, groups: Groups) -> _Look:
        """Evaluates a grouping in closed form, with its microbatches, order and shares."""
        cost = self._placer.closed_form
        if self._profile.static_bytes > self._least_usable_bytes(groups):
            raise PlanError("the model alone is larger than a virtual machine")
        placed = self._sliced(groups)
        if not self._is_large or self._request.has_order:
            placed = self._orders.in_best_of(placed, self._orders.ranked(placed, cost, 0))
        placed, cuts = balanced_shares(self._placer, placed, cost)
        return _Look(self._placer.rate(placed, cuts, cost), placed, cuts)

    def _second_look(self, look: _Look) -> _Look:
        """Evaluates a grouping by the simulator, with the best of all orders of its stages."""
        placed, cuts, cost = look.placed, look.cuts, self._placer.simulator
        if self._is_large:
            return _Look(self._placer.rate(placed, cuts, cost), placed, cuts)
        ranked = self._orders.ranked(placed, cost, self._effort.orders)
        placed, cuts = balanced_shares(
            self._placer, self._orders.in_best_of(placed, ranked[:1]), cost
        )
        orders = tuple(
            ranks for ranks, step in ranked[: self._effort.orders_cut] if math.isfinite(step)
        )
        return _Look(self._placer.rate(placed, cuts, cost), placed, cuts, orders)

    def _finished(self, look: _Look) -> Arrangement:
        """Finds the best order, microbatches, shares and cuts of a grouping."""
        cost, placed = self._placer.simulator, look.placed
        if self._is_large:
            ranked = self._orders.ranked(placed, cost, self._effort.orders)
            placed = self._orders.in_best_of(placed, ranked)
        elif self._cluster.num_ranks <= self._effort.few_ranks:
            # Which of the best orders is the best may depend on the exact cuts.
            cut = []
            for ranks in look.orders:
                # The shares were found for one of them.
                with suppress(PlanError):
                    cut.append(self._cut_with_care(self._orders.in_order(placed, ranks)))
            ranked = [(one.ranks, one.prediction.step_seconds) for one in cut]
            placed = self._orders.in_best_of(placed, ranked)
        else:
            placed = self._orders.in_best_of(placed, self._orders.ranked(placed, cost, 0))
        if not self._is_large and placed.num_actions <= self._effort.actions_simulated:
            placed, _ = balanced_shares(self._placer, resliced(self._placer, placed), cost)
        found = self._cut_with_care(placed)
        if placed.batch_shares != self._request.batch_shares:
            with suppress(PlanError):
                equal = self._cut_with_care(self._placer.placed(placed.ranks, placed.microbatches))
                if (
                    found.samples_per_second
                    < self._effort.worth_changing * equal.samples_per_second
                ):
                    return equal
        return found

    def _cut_with_care(self, placed: Candidate) -> Arrangement:
        """Returns an arrangement with the best cuts that can be found in limited time."""
        found = self._placer.arrangement(placed, self._placer.cuts(placed))
        stages = sum(workload.num_stages for workload in set(placed.workloads))
        # The pace of an asynchronous pipeline is exact in closed form: nothing is simulated.
        is_pace = placed.workloads[0].objective.is_pace
        if stages > (self._effort.stages if is_pace else self._effort.stages_cut):
            return found
        # The best cut for each virtual machine need not be the best for the rings between them.
        careful = self._placer.arrangement(placed, self._placer.cuts(placed, careful=True))
        return max(careful, found, key=lambda one: one.samples_per_second)

    @property
    def _is_large(self) -> bool:
        """Whether there are too many devices for a thorough search."""
        return self._cluster.num_ranks > self._effort.stages

    # Slices of the batch.

    def _sliced(self, groups: Groups) -> Candidate:
        """A grouping with the best number of microbatches, as far as can be estimated before it is
        cut.

        Raises PlanError if it does not fit."""
        for shares in self._first_shares(groups):
            rates = slices(self._placer, groups, shares)
            # Smaller slices take less memory.
            for count in sorted({fewest(rates, self._effort.worth_changing), max(rates)}):
                placed = self._placer.placed(groups, count, shares)
                try:
                    self._placer.cuts(placed)
                    return placed
                except PlanError as found:
                    error = without_stack(found)
                if (other := self._orders.fitting(placed)) is not None:
                    return other
        raise error

    def _first_shares(self, groups: Groups) -> Iterator[tuple[float, ...] | None]:
        """Shares to try: equal ones, and if those do not fit, in proportion to compute power."""
        yield self._request.batch_shares
        if self._request.chooses_shares and not self._is_large:
            powers = tuple(
                math.fsum(self._placer.powers[rank] for rank in ranks) for ranks in groups
            )
            if max(powers) > self._effort.worth_changing * min(powers):
                yield powers


def _highest(looks: Sequence[_Look], most: int) -> list[_Look]:
    """The evaluations with the highest rates, the first of equal ones first."""
    return sorted(looks, key=lambda look: -look.rate)[:most]
