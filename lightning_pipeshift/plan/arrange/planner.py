"""Makes the plan for machines and a model: the number of virtual machines, their devices and the
order of these, the cuts, the microbatches and the shares of the batch.

Each choice depends on the others, and there are too many combinations. So all groupings with a
reason are first evaluated in closed form; the orders of the best are tried on the simulator; and
for the best of those, cuts, microbatches and shares are searched thoroughly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.arrange.batch_shares import WORTH_SHARES, balanced_shares
from lightning_pipeshift.plan.arrange.evaluator import Candidate, Cuts, Evaluator, Judge
from lightning_pipeshift.plan.arrange.groupings import (
    MOST_STAGES,
    Groups,
    candidate_counts,
    groupings,
    host_order,
    ring_order,
)
from lightning_pipeshift.plan.arrange.num_microbatches import (
    fewest,
    numbers_of_slices,
    resliced,
    slices,
)
from lightning_pipeshift.plan.arrange.request import Allowed, Arrangement, PlanRequest
from lightning_pipeshift.plan.arrange.stage_order import (
    Order,
    best_order,
    by_ratio,
    distinct_orders,
    interchangeable,
    num_orders,
    ranked_orders,
)
from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.topology import Topology

__all__ = ["Allowed", "Arrangement", "PlanRequest", "arrange_all", "evaluate"]

_PROMISING: Final = 0.9
"""What can't reach this part of the best found so far in closed form is not looked at."""

_FEW: Final = 8
"""Of so many devices, everything is looked at."""

_MOST_ACTIONS: Final = 1 << 14
"""Stages times microbatches that are simulated to find the best order."""

_MOST_SIMULATED: Final = 1 << 11
"""Up to so many of them, the simulator has a say in orders, microbatches and shares."""

_MOST_CUT_WITH_CARE: Final = 32
"""Up to so many stages, cuts are improved on the simulator."""

_MOST_ORDERS: Final = 120
_MOST_REFINED: Final = 8
_MOST_SECOND_LOOKS: Final = ((_FEW, 16), (MOST_STAGES, 6), (math.inf, 3))
_MOST_FINISHED: Final = ((MOST_STAGES, 3), (math.inf, 1))
"""How many groupings are tried on the simulator, and how many are finished, by number of ranks."""


def arrange_all(
    profile: Profile, cluster: Cluster, wishes: PlanRequest, allowed: Allowed | None = None
) -> Arrangement:
    """The arrangement with the most samples per second, by the simulator.

    Args:
        profile: of the model.
        cluster: the machines.
        wishes: what is fixed.
        allowed: the boundaries that may be cut, where anything fits so.

    Raises:
        PlanError: nothing that is allowed fits in memory, or makes that many virtual machines.
        ConfigurationError: the wishes name ranks that aren't there, or one twice.
    """
    return _Planner(Evaluator(profile, cluster, wishes, allowed)).best()


def evaluate(
    profile: Profile,
    cluster: Cluster,
    wishes: PlanRequest,
    ranks: Sequence[Sequence[int]],
    cuts: Sequence[Cut],
    microbatches: int,
    batch_shares: Sequence[float] | None = None,
) -> Arrangement:
    """A given arrangement with its prediction, whether it fits in memory or not.

    Args:
        profile: of the model.
        cluster: the machines.
        wishes: say what the schedule is, and how large a batch.
        ranks: of each virtual machine, in stage order.
        cuts: one for each of them.
        microbatches: slices of a virtual machine's batch.
        batch_shares: how the global batch is shared out; ``None``: equally.
    """
    placer = Evaluator(profile, cluster, wishes, None)
    return placer.arrangement(placer.placed(ranks, microbatches, batch_shares), tuple(cuts))


class _Look(NamedTuple):
    """What one of the groupings comes to."""

    rate: float
    """Samples per second."""
    placed: Candidate
    cuts: Cuts
    orders: tuple[Groups, ...] = ()
    """Of the stages, that come near the best."""


class _Planner:
    """From all groupings to one arrangement."""

    def __init__(self, placer: Evaluator) -> None:
        self._placer = placer
        self._profile = placer.profile
        self._cluster = placer.cluster
        self._wishes = placer.wishes
        self._alike = interchangeable(self._cluster)
        self._place = {rank: place for place, rank in enumerate(host_order(self._cluster))}

    def best(self) -> Arrangement:
        """See :func:`arrange_all`."""
        second, finished = (
            next(most for limit, most in table if self._cluster.num_ranks <= limit)
            for table in (_MOST_SECOND_LOOKS, _MOST_FINISHED)
        )
        again = [self._second_look(look) for look in _highest(self._first_looks(), second)]
        found = [self._finished(look) for look in _highest(again, finished)]
        return max(found, key=lambda one: one.samples_per_second)

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
                errors[groups] = error
        if not seen:
            # What comes nearest to fitting tells the most.
            nearest = max(errors, key=self._least_room_bytes)
            slices = max(numbers_of_slices(self._wishes, max(map(len, nearest))))
            placed = self._placer.placed(nearest, slices, self._wishes.batch_shares)
            self._placer.cuts(placed, careful=True)
            raise errors[nearest]
        return seen

    def _is_hopeless(self, groups: Groups, seen: Sequence[_Look]) -> bool:
        """Whether it can't come near the best of those seen."""
        if self._cluster.num_ranks <= _FEW or not seen:
            return False
        promising = _PROMISING * max(look.rate for look in seen)
        if self._most_per_second(groups) < promising:
            return True
        # Of many devices: deeper pipelines have more of a bubble, and hide their rings better. Once
        # the one outweighs the other, it is so for still deeper ones.
        best: dict[int, float] = {}
        for look in seen:
            count = len(look.placed.ranks)
            best[count] = max(best.get(count, 0.0), look.rate)
        shallower = [rate for count, rate in best.items() if count > len(groups)]
        return self._is_large and any(rate < promising for rate in shallower)

    def _groupings(self) -> Iterator[Groups]:
        """The ways to make virtual machines that the wishes leave."""
        wishes, num_ranks = self._wishes, self._cluster.num_ranks
        if wishes.ranks is not None:
            topology = Topology(wishes.ranks)
            if topology.num_ranks != num_ranks:
                raise PlanError(
                    f"virtual machines of {topology.num_ranks} ranks on {num_ranks} devices; name"
                    f" each of the ranks 0 to {num_ranks - 1} once"
                )
            yield topology.ranks
            return
        depths = wishes.depths(num_ranks)
        counts = candidate_counts(self._cluster.devices)
        if depths is not None:
            counts = (len(depths),)
        elif wishes.num_virtual_machines is not None:
            counts = (wishes.num_virtual_machines,)
        for count in counts:
            if count > num_ranks:
                raise PlanError(
                    f"{count} virtual machines on {num_ranks} devices; each has at least one device"
                )
            for groups in groupings(self._cluster, count, self._placer.powers, self._alike, depths):
                yield self._numbered(groups)

    def _numbered(self, groups: Groups) -> Groups:
        """The same groups in the order in which rings pass them, as far as that is free."""
        shares = self._wishes.batch_shares
        if not isinstance(self._wishes.partition, str):
            return groups
        if shares is None:
            return ring_order(self._cluster, groups)
        # The larger shares are meant for the faster ones.
        fastest = sorted(
            groups, key=lambda ranks: -sum(self._placer.powers[rank] for rank in ranks)
        )
        largest = sorted(range(len(shares)), key=lambda vm: -shares[vm])
        of_vm = dict(zip(largest, fastest, strict=True))
        return tuple(of_vm[vm] for vm in range(len(shares)))

    def _most_per_second(self, groups: Groups) -> float:
        """Samples per second if every stage were as long as the others and messages took no time:
        no cut of it gives more.
        """
        slices = max(numbers_of_slices(self._wishes, max(map(len, groups))))
        # One microbatch through all stages, and the pace for each of the others.
        per_sample = [
            ((slices - 1) / sum(powers) + 1 / max(powers)) / slices / self._profile.samples
            for powers in ([self._placer.powers[rank] for rank in ranks] for ranks in groups)
        ]
        total = self._placer.total(len(groups))
        if self._wishes.batch_shares is None:
            seconds = total / sum(1 / seconds for seconds in per_sample)
        else:
            sizes = self._placer.sizes(len(groups), self._wishes.batch_shares)
            seconds = max(size * each for size, each in zip(sizes, per_sample, strict=True))
        return total / (seconds + self._profile.step_seconds)

    def _least_room_bytes(self, groups: Groups) -> float:
        devices = self._cluster.devices
        return min(math.fsum(devices[rank].room_bytes for rank in ranks) for ranks in groups)

    def _first_look(self, groups: Groups) -> _Look:
        """A grouping in closed form, with its slices, order and shares."""
        judge = self._placer.closed_form
        if sum(layer.static_bytes for layer in self._profile.layers) > self._least_room_bytes(
            groups
        ):
            raise PlanError("the model alone is larger than a virtual machine")
        if self._is_large and self._wishes.ranks is None:
            placed = self._sliced(self._by_rule(groups))
        else:
            placed = self._sliced(groups)
            placed = self._in_best_order(placed, self._ranked(placed, judge, 0))
        placed, cuts = balanced_shares(self._placer, placed, judge)
        return _Look(self._placer.rate(placed, cuts, judge), placed, cuts)

    def _second_look(self, look: _Look) -> _Look:
        """The same by the simulator, and its stages in the best of all orders."""
        placed, cuts, judge = look.placed, look.cuts, self._placer.simulator
        if self._is_large:
            return _Look(self._placer.rate(placed, cuts, judge), placed, cuts)
        ranked = self._ranked(placed, judge, _MOST_ORDERS)
        placed, cuts = balanced_shares(self._placer, self._in_best_order(placed, ranked[:1]), judge)
        orders = tuple(ranks for ranks, step in ranked[:_MOST_REFINED] if math.isfinite(step))
        return _Look(self._placer.rate(placed, cuts, judge), placed, cuts, orders)

    def _finished(self, look: _Look) -> Arrangement:
        """Ordered, sliced, shared out and cut as well as can be."""
        judge, placed = self._placer.simulator, look.placed
        if self._is_large:
            ranked = self._ranked(placed, judge, _MOST_ORDERS)
            placed = self._in_best_order(placed, ranked)
        elif self._cluster.num_ranks <= _FEW:
            # Which of the best orders is the best may depend on the very cuts.
            cut = []
            for ranks in look.orders:
                # Shares were found for one of them.
                with suppress(PlanError):
                    cut.append(self._cut_with_care(self._in_order(placed, ranks)))
            ranked = [(one.ranks, one.prediction.step_seconds) for one in cut]
            placed = self._in_best_order(placed, ranked)
        else:
            placed = self._in_best_order(placed, self._ranked(placed, judge, 0))
        if not self._is_large and self._num_actions(placed) <= _MOST_SIMULATED:
            placed, _ = balanced_shares(self._placer, resliced(self._placer, placed), judge)
        found = self._cut_with_care(placed)
        if placed.batch_shares != self._wishes.batch_shares:
            with suppress(PlanError):
                equal = self._cut_with_care(self._placer.placed(placed.ranks, placed.microbatches))
                if found.samples_per_second < WORTH_SHARES * equal.samples_per_second:
                    return equal
        return found

    def _cut_with_care(self, placed: Candidate) -> Arrangement:
        """With the best cuts that there is time for."""
        found = self._placer.arrangement(placed, self._placer.cuts(placed))
        stages = sum(workload.num_stages for workload in set(placed.workloads))
        if stages > _MOST_CUT_WITH_CARE:
            return found
        # The best for each virtual machine need not be for the rings between them.
        careful = self._placer.arrangement(placed, self._placer.cuts(placed, careful=True))
        return max(careful, found, key=lambda one: one.samples_per_second)

    @property
    def _is_large(self) -> bool:
        """Whether there are too many devices to be thorough."""
        return self._cluster.num_ranks > MOST_STAGES

    @staticmethod
    def _num_actions(placed: Candidate) -> int:
        """Stages times microbatches, of all virtual machines that differ."""
        return sum(w.num_stages * w.microbatches for w in set(placed.workloads))

    # Orders of the stages.

    def _in_order(self, placed: Candidate, ranks: Groups) -> Candidate:
        return self._placer.placed(ranks, placed.microbatches, placed.batch_shares)

    def _preferred(self, placed: Candidate) -> Groups:
        """The ranks in their own order, a host's next to each other."""
        return tuple(tuple(sorted(ranks, key=self._place.__getitem__)) for ranks in placed.ranks)

    def _in_best_order(
        self, placed: Candidate, ranked: Sequence[tuple[Groups, float]]
    ) -> Candidate:
        """The same with its stages in the best of these orders."""
        ranks = best_order(ranked, self._preferred(placed))
        return placed if ranks == placed.ranks else self._in_order(placed, ranks)

    def _ranked(self, placed: Candidate, judge: Judge, most: int) -> list[tuple[Groups, float]]:
        """Orders of the stages and what a step takes, the best first: at most so many are tried."""
        preferred = self._preferred(placed)
        if self._wishes.ranks is not None or self._is_same_in_any_order(preferred):
            return [(placed.ranks, 1.0)]
        placer = self._placer
        # A fixed number of orders would be a blink for some and minutes for others.
        most = min(
            most,
            _MOST_ACTIONS // (self._num_actions(placed) + 64),
            _MOST_ACTIONS // self._cluster.num_ranks // 2,
        )

        def seconds(ranks: Groups) -> float:
            try:
                changed = self._in_order(placed, ranks)
                return judge.step(changed, placer.cuts(changed))
            except PlanError:
                return math.inf

        starts = (self._by_rule(preferred), placed.ranks)
        if self._cluster.num_ranks <= _FEW:
            return ranked_orders(preferred, starts, self._alike, seconds, seconds, most)
        # To compare orders it is enough that each device keeps its number of layers: much quicker.
        counts = {
            rank: count
            for ranks, cut in zip(placed.ranks, placer.cuts(placed), strict=True)
            for rank, count in zip(ranks, cut.counts, strict=True)
        }

        def estimate(ranks: Groups) -> float:
            cuts = [Cut(tuple(counts[rank] for rank in machine)) for machine in ranks]
            return placer.closed_form.step(self._in_order(placed, ranks), tuple(cuts))

        return ranked_orders(preferred, starts, self._alike, seconds, estimate, most)

    def _by_rule(self, groups: Groups) -> Groups:
        """The groups in the order that the source has."""
        return tuple(
            by_ratio(self._profile, self._cluster, ranks, groups[vm + 1 :] + groups[:vm])
            for vm, ranks in enumerate(groups)
        )

    def _is_same_in_any_order(self, groups: Groups) -> bool:
        """Whether no order is better than the ranks' own, with each host's next to each other."""
        devices, cluster = self._cluster.devices, self._cluster
        is_uniform = not (cluster.ranks or cluster.hosts) and all(
            len({(devices[r].kind, devices[r].speed, devices[r].room_bytes) for r in ranks}) == 1
            for ranks in groups
        )
        return is_uniform or all(len({self._alike[r] for r in ranks}) == 1 for ranks in groups)

    # Slices of the batch.

    def _sliced(self, groups: Groups) -> Candidate:
        """A grouping with the best number of microbatches, as far as can be told before it is cut.

        Raises PlanError where it doesn't fit."""
        for shares in self._first_shares(groups):
            rates = slices(self._placer, groups, shares)
            # Smaller slices take less memory.
            for count in sorted({fewest(rates), max(rates)}):
                placed = self._placer.placed(groups, count, shares)
                try:
                    self._placer.cuts(placed)
                    return placed
                except PlanError as found:
                    error = found
                if (other := self._in_fitting_order(placed)) is not None:
                    return other
        raise error

    def _first_shares(self, groups: Groups) -> Iterator[tuple[float, ...] | None]:
        """Shares to try: equal ones, and if those don't fit, in proportion to compute power."""
        yield self._wishes.batch_shares
        if self._wishes.batch_shares is None and not self._is_large:
            powers = tuple(
                math.fsum(self._placer.powers[rank] for rank in ranks) for ranks in groups
            )
            if max(powers) > WORTH_SHARES * min(powers):
                yield powers

    def _in_fitting_order(self, placed: Candidate) -> Candidate | None:
        """With the stages of each virtual machine in an order in which it fits in memory, where
        there is one: the first stages hold more, and the last ones less.
        """
        if self._wishes.ranks is not None:
            return None
        ranks = []
        for vm, machine in enumerate(placed.ranks):
            fits = (
                order for order in self._orders(machine) if self._placer.fits(placed, vm, order)
            )
            order = next(fits, None)
            if order is None:
                return None
            ranks.append(order)
        return self._placer.placed(ranks, placed.microbatches, placed.batch_shares)

    def _orders(self, machine: Order) -> Iterator[Order]:
        """Those that memory may ask for: all, where there are few."""
        devices = self._cluster.devices
        for sign in (-1, 1):
            yield tuple(sorted(machine, key=lambda rank: sign * devices[rank].room_bytes))
            yield tuple(sorted(machine, key=lambda rank: sign * self._placer.powers[rank]))
        alike = [self._alike[rank] for rank in machine]
        if num_orders(alike) <= _MOST_ORDERS:
            yield from distinct_orders(machine, alike)


def _highest(looks: Sequence[_Look], most: int) -> list[_Look]:
    """Those with the highest rates, the first of equal ones first."""
    return sorted(looks, key=lambda look: -look.rate)[:most]
