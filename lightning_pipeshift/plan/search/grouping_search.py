"""Chooses groupings of devices: the number of virtual machines, their devices and the order of
these, the microbatches and the shares of the batch, with the cuts of each.

Each choice depends on the others, and there are too many combinations. So all useful groupings are
timed with first cuts; of the best, orders, cuts, microbatches and shares are searched in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from lightning_pipeshift.errors import PlanError, without_stack
from lightning_pipeshift.plan.inputs.topology import Topology, host_order
from lightning_pipeshift.plan.schedule.asynchronous import require_equal_depths
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from lightning_pipeshift.plan.search.evaluator import Candidate, Cuts, Evaluator
from lightning_pipeshift.plan.search.groupings import (
    Groups,
    candidate_counts,
    groupings,
    ring_order,
)
from lightning_pipeshift.plan.search.orders import Order
from lightning_pipeshift.plan.search.request import Arrangement, PlanRequest, Tried
from lightning_pipeshift.plan.search.stages import best_cut


class _Look(NamedTuple):
    """A grouping with cuts, and its samples per second."""

    rate: float
    placed: Candidate
    cuts: Cuts

    @property
    def depth(self) -> int:
        """The number of stages of the deepest virtual machine."""
        return max(map(len, self.placed.ranks))


class GroupingSearch:
    """Chooses one arrangement without swaps from all groupings.

    Args:
        evaluator: times them.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._profile, self._cluster = evaluator.profile, evaluator.cluster
        self._request, self._effort = evaluator.request, evaluator.request.effort
        self._place = {rank: place for place, rank in enumerate(host_order(self._cluster.devices))}
        self._too_large: set[int] = set()

    def best(self) -> Arrangement:
        """The arrangement with the most samples per second, by the simulator.

        Raises:
            PlanError: no allowed arrangement fits in memory, or has the requested number of virtual
                machines.
            ConfigurationError: the request has unknown ranks, or one rank twice.
        """
        looks = self._first_looks()
        improved = [self._improved(look) for look in self._chosen(looks)]
        finished = [self._finished(look) for look in _highest(improved, self._num_finished)]
        best = _highest(finished, 1)[0]
        made = self._evaluator.arrangement(best.placed, best.cuts)
        return replace(made, tried=tuple(self._tried([best, *improved])))

    @property
    def _num_finished(self) -> int:
        return 1 if self._evaluator.is_large else self._effort.groupings_finished

    def _chosen(self, looks: Sequence[_Look]) -> list[_Look]:
        """The groupings whose orders and cuts are searched: the best ones, and of each depth the
        best one, so that what is said of a depth comes from the same search.
        """
        most = self._effort.groupings_improved
        if self._cluster.num_ranks > self._effort.few_ranks:
            most //= 4 if self._evaluator.is_large else 2
        of_depths = {look.depth: look for look in reversed(_highest(looks, len(looks)))}
        chosen = [*_highest(looks, most), *of_depths.values()]
        return list({id(look): look for look in chosen}.values())

    def _tried(self, looks: Sequence[_Look]) -> Iterator[Tried]:
        """The best of each depth, the fastest first, and what keeps it from more."""
        best: dict[int, _Look] = {}
        for look in looks:
            best.setdefault(look.depth, look)
            if look.rate > best[look.depth].rate and look is not looks[0]:
                best[look.depth] = look if best[look.depth] is not looks[0] else looks[0]
        for look in _highest(list(best.values()), len(best)):
            yield Tried(look.depth, look.rate, self._limit(look))
        yield from (
            Tried(depth, 0.0, "does not fit in memory") for depth in self._too_large - {*best}
        )

    def _limit(self, look: _Look) -> str:
        placed = look.placed
        pairs = dict.fromkeys(zip(placed.workloads, look.cuts, strict=True))
        alone = max(workload.step_seconds([cut])[0] for workload, cut in pairs)
        again = max(
            max(workload.costs(cut).recompute_seconds, default=0.0) * workload.microbatches
            for workload, cut in pairs
        )
        total, besides = self._evaluator.total(len(placed.ranks)), self._profile.step_seconds
        busy = total / sum(self._evaluator.powers) / self._profile.samples
        step = self._evaluator.seconds(placed, look.cuts)
        lost = {
            "gradients are waited for": step - besides - alone,
            "recomputation, for memory": again,
            "stages wait for each other": alone - again - busy,
        }
        limit = max(lost, key=lambda name: lost[name])
        if lost[limit] < (1 - self._effort.promising) * alone:
            return "all devices compute nearly all the time"
        return limit

    # All groupings.

    def _first_looks(self) -> list[_Look]:
        """The groupings that fit, with first cuts."""
        all_groups = sorted(self._groupings(), key=lambda groups: -self._most_per_second(groups))
        errors: dict[Groups, PlanError] = {}
        looks: list[_Look] = []
        for groups in all_groups:
            if looks and self._cluster.num_ranks > self._effort.few_ranks:
                # It cannot come near the best of those before.
                promising = self._effort.promising * max(look.rate for look in looks)
                if self._most_per_second(groups) < promising:
                    continue
            try:
                looks.append(self._look(groups))
            except PlanError as error:
                errors[groups] = without_stack(error)
                self._too_large.add(max(map(len, groups)))
        if not looks:
            # The error of the grouping that is nearest to fitting is the most useful.
            nearest = max(errors, key=self._least_usable_bytes)
            slices = max(numbers_of_slices(self._request, max(map(len, nearest))))
            shares = self._request.batch_shares
            for workload in self._evaluator.placed(nearest, slices, shares).workloads:
                if self._request.partition == "auto":
                    best_cut(workload, self._request.recompute, effort=self._effort)
            raise errors[nearest]
        return looks

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
        refused, is_possible = None, False
        for count in divides:
            if count > num_ranks:
                raise PlanError(
                    f"{count} virtual machines on {num_ranks} devices; each has at least one device"
                )
            how = self._evaluator.powers, self._evaluator.alike, depths, self._effort
            for groups in groupings(self._cluster, count, *how):
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
        fastest = sorted(groups, key=lambda ranks: -self._power(ranks))
        largest = sorted(range(len(shares)), key=lambda vm: -shares[vm])
        of_vm = dict(zip(largest, fastest, strict=True))
        return tuple(of_vm[vm] for vm in range(len(shares)))

    def _power(self, ranks: Order) -> float:
        return math.fsum(self._evaluator.powers[rank] for rank in ranks)

    def _most_per_second(self, groups: Groups) -> float:
        """Samples per second if all devices computed all the time, but for one microbatch that
        fills and drains the pipeline: an upper bound.
        """
        total, samples = self._evaluator.total(len(groups)), self._profile.samples
        slices = max(numbers_of_slices(self._request, max(map(len, groups))))
        sizes = self._evaluator.sizes(len(groups), self._request.batch_shares)
        fills = 0 if self._request.schedule in ASYNCHRONOUS else 1
        per_sample = []
        for ranks in groups:
            fastest = max(self._evaluator.powers[rank] for rank in ranks)
            rest = (slices - fills) / self._power(ranks)
            per_sample.append((fills / fastest + rest) / slices / samples)
        if self._request.batch_shares is None:
            seconds = total / sum(1 / each for each in per_sample)
        else:
            seconds = max(size * each for size, each in zip(sizes, per_sample, strict=True))
        return total / (seconds + self._profile.step_seconds)

    def _least_usable_bytes(self, groups: Groups) -> float:
        devices = self._cluster.devices
        return min(math.fsum(devices[rank].usable_bytes for rank in ranks) for ranks in groups)

    # One grouping.

    def _look(self, groups: Groups) -> _Look:
        """A grouping with first cuts, microbatches and shares; where it does not fit, with other
        orders of its stages.

        Raises PlanError if it does not fit."""
        if self._profile.static_bytes > self._least_usable_bytes(groups):
            raise PlanError("the model alone is larger than a virtual machine")
        error: PlanError | None = None
        for shares in self._first_shares(groups):
            try:
                return self._shared(self._sliced(groups, shares, reorders=False), improves=False)
            except PlanError as found:
                error = error or without_stack(found)
            if not self._request.has_order:
                with suppress(PlanError):
                    return self._sliced(groups, shares, reorders=True)
        assert error is not None
        raise error

    def _first_shares(self, groups: Groups) -> Iterator[tuple[float, ...] | None]:
        """Shares to try: equal ones, and if those do not fit, in proportion to compute power."""
        yield self._request.batch_shares
        if self._request.chooses_shares and not self._evaluator.is_large:
            powers = tuple(map(self._power, groups))
            if max(powers) > self._effort.worth_changing * min(powers):
                yield powers

    def _sliced(self, groups: Groups, shares: Sequence[float] | None, reorders: bool) -> _Look:
        """With the best number of microbatches: the fewest that are nearly as good as any."""
        looks: dict[int, _Look] = {}
        error: PlanError | None = None
        for count in self._numbers_to_try(max(map(len, groups))):
            placed = self._evaluator.placed(groups, count, shares)
            try:
                looks[count] = (
                    self._reordered(placed, 1.0) if reorders else self._with_cuts(placed, False)
                )
            except PlanError as found:
                error = without_stack(found)
        if error is not None and not looks:
            raise error
        return looks[
            fewest({n: look.rate for n, look in looks.items()}, self._effort.worth_changing)
        ]

    def _numbers_to_try(self, depth: int) -> list[int]:
        numbers = numbers_of_slices(self._request, depth)
        if not self._evaluator.is_large or len(numbers) < 4:
            return numbers
        usual = min(numbers, key=lambda number: abs(math.log(number / (4 * depth))))
        return sorted({usual, numbers[-1]})

    def _with_cuts(self, placed: Candidate, improves: bool) -> _Look:
        cuts = self._evaluator.cuts(placed, improves)
        return _Look(self._evaluator.rate(placed, cuts), placed, cuts)

    def _improved(self, look: _Look) -> _Look:
        """With the best order of the stages, and better cuts."""
        improved = look
        with suppress(PlanError):
            if self._request.has_order:
                improved = self._with_cuts(look.placed, improves=True)
            else:
                improved = self._reordered(look.placed, self._effort.worth_changing)
        improved = max(look, improved, key=lambda each: each.rate)
        return self._shared(improved, improves=not self._evaluator.is_large)

    def _reordered(self, placed: Candidate, worth: float) -> _Look:
        """With the best order of the stages of each virtual machine; with that of the hosts, unless
        another one is faster by more than ``worth``.
        """
        evaluator = self._evaluator
        is_deep = max(map(len, placed.ranks)) > self._effort.few_ranks
        of_vms = []
        for vm, ranks in enumerate(placed.ranks):
            near = tuple(sorted(ranks, key=self._place.__getitem__))
            staged = evaluator.staged(placed, vm, not is_deep, [near, *self._sorted(ranks)])
            limit = worth * staged[0].seconds
            usual = [each for each in staged if each.order == near and each.seconds <= limit]
            of_vms.append([*(usual or staged)[:1], *staged][: self._effort.orders_cut])
        looks = []
        # The best order of each may not be the best for the rings between them.
        few = [orders[:3] for orders in of_vms]
        is_few = len(few) <= 3
        for chosen in itertools.product(*few) if is_few else zip(*of_vms, strict=False):
            changed = evaluator.placed(
                [each.order for each in chosen], placed.microbatches, placed.batch_shares
            )
            cuts = tuple(each.cut for each in chosen)
            looks.append(_Look(evaluator.rate(changed, cuts), changed, cuts))
        best = max(look.rate for look in looks)
        return next(look for look in looks if look.rate * worth >= best)

    def _sorted(self, machine: Order) -> list[Order]:
        """The orders by memory, the largest first, by compute power, and by that upwards."""
        devices, powers = self._cluster.devices, self._evaluator.powers
        return [
            tuple(sorted(machine, key=lambda rank: -devices[rank].usable_bytes)),
            tuple(sorted(machine, key=lambda rank: -powers[rank])),
            tuple(sorted(machine, key=lambda rank: powers[rank])),
        ]

    def _finished(self, look: _Look) -> _Look:
        """With the best number of microbatches, and the best cuts and shares for it."""
        is_small = 1 < len(look.placed.ranks) <= self._cluster.num_ranks <= self._effort.few_ranks
        if is_small and not self._request.has_order:
            # Which order is the best may depend on the shares.
            with suppress(PlanError):
                again = self._reordered(look.placed, self._effort.worth_changing)
                look = max(look, again, key=lambda each: each.rate)
        placed = look.placed
        found = {placed.microbatches: look}
        for count in numbers_of_slices(self._request, look.depth):
            with suppress(PlanError):
                changed = self._evaluator.placed(placed.ranks, count, placed.batch_shares)
                found.setdefault(
                    count, self._with_cuts(changed, improves=not self._evaluator.is_large)
                )
        rates = {count: each.rate for count, each in found.items()}
        best = found[fewest(rates, self._effort.worth_changing)]
        return self._shared(best, improves=True)

    def _shared(self, look: _Look, improves: bool) -> _Look:
        """With shares of the batch under which all virtual machines take equal time, if that is
        faster by enough. A step's time is not proportional to its samples, so this alternates
        between shares and times.
        """
        placed, evaluator = look.placed, self._evaluator
        if not self._request.chooses_shares or len(placed.ranks) == 1:
            return look
        equal: _Look | None = look
        if placed.batch_shares is not None:
            equal = None
            with suppress(PlanError):
                even = evaluator.placed(placed.ranks, placed.microbatches)
                equal = self._with_cuts(even, improves)
        best = equal or look
        now = best
        for _ in range(3 if improves else 1):
            times = {
                pair: pair[0].step_seconds([pair[1]])[0]
                for pair in dict.fromkeys(zip(now.placed.workloads, now.cuts, strict=True))
            }
            if max(times.values()) <= self._effort.alike * min(times.values()):
                break
            sizes = evaluator.sizes(len(now.cuts), now.placed.batch_shares)
            pairs = zip(now.placed.workloads, now.cuts, strict=True)
            wished = [size / times[pair] for size, pair in zip(sizes, pairs, strict=True)]
            shared = evaluator.placed(placed.ranks, placed.microbatches, wished)
            try:
                now = self._with_cuts(shared, improves)
            except PlanError:
                break
            worth = self._effort.worth_changing if best is equal else 1.0
            if now.rate > worth * best.rate:
                best = now
        return best


def numbers_of_slices(request: PlanRequest, num_stages: int) -> list[int]:
    """The numbers of microbatches to try: powers of two, and those times the number of stages; or
    the requested number.

    Args:
        request: the request, which has the number of samples of a batch.
        num_stages: of the deepest pipeline.
    """
    if isinstance(request.microbatches, int):
        return [request.microbatches]
    most = max(1, int(request.step_samples or request.batch_samples))
    powers = [1 << exponent for exponent in range(most.bit_length())]
    counts = {most, *powers, *(num_stages * power for power in powers)}
    return sorted(
        count
        for count in counts
        if count == 1 or (count <= most and count * num_stages <= request.effort.actions)
    )


def fewest(rates: Mapping[int, float], worth: float) -> int:
    """The smallest number with at least the highest rate divided by ``worth``."""
    limit = max(rates.values()) / worth
    return min(count for count, rate in rates.items() if rate >= limit)


def _highest(looks: Sequence[_Look], most: int) -> list[_Look]:
    """The highest rates, the first of equal ones first."""
    return sorted(looks, key=lambda look: -look.rate)[:most]
