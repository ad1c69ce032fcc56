"""Chooses which of a virtual machine's devices is which stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.arrange.evaluator import Candidate, CostModel, Evaluator
from lightning_pipeshift.plan.arrange.groupings import Groups
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.inputs.topology import host_order
from lightning_pipeshift.plan.partition.orders import (
    Order,
    distinct_orders,
    interchangeable,
    num_orders,
    pattern,
)


class OrderSearch:
    """Finds orders of the stages of all virtual machines, each of the same devices as before.

    Args:
        placer: evaluates them.
    """

    def __init__(self, placer: Evaluator) -> None:
        self._placer = placer
        self._cluster, self._request = placer.cluster, placer.request
        self._effort = placer.request.effort
        self.alike = interchangeable(self._cluster)
        """For each rank, the first one that could take its place."""
        self._place = {rank: place for place, rank in enumerate(host_order(self._cluster.devices))}

    def in_order(self, placed: Candidate, ranks: Groups) -> Candidate:
        """Returns the choice with its stages in another order."""
        return self._placer.placed(ranks, placed.microbatches, placed.batch_shares)

    def _preferred(self, placed: Candidate) -> Groups:
        """The ranks in their own order, those of a host next to each other."""
        return tuple(tuple(sorted(ranks, key=self._place.__getitem__)) for ranks in placed.ranks)

    def in_best_of(self, placed: Candidate, ranked: Sequence[tuple[Groups, float]]) -> Candidate:
        """Returns the choice with its stages in the best of some orders.

        Args:
            placed: the choice.
            ranked: the orders with their step times, see :meth:`ranked`.
        """
        ranks = best_order(ranked, self._preferred(placed), self._effort.worth_changing)
        return placed if ranks == placed.ranks else self.in_order(placed, ranks)

    def ranked(self, placed: Candidate, cost: CostModel, most: int) -> list[tuple[Groups, float]]:
        """Returns orders of a choice's stages with their step times, the best first.

        Args:
            placed: the choice.
            cost: computes the step times.
            most: how many may be tried.
        """
        preferred = self._preferred(placed)
        if self._request.has_order or self._is_same_in_any_order(preferred):
            return [(placed.ranks, 1.0)]
        placer = self._placer
        # The time for a fixed number of orders varies from milliseconds to minutes.
        most = min(
            most,
            self._effort.actions // (placed.num_actions + 64),
            self._effort.actions // self._cluster.num_ranks // 2,
        )

        def seconds(ranks: Groups) -> float:
            try:
                changed = self.in_order(placed, ranks)
                return cost.step(changed, placer.cuts(changed))
            except PlanError:
                return math.inf

        starts = [placed.ranks]
        is_small = self._cluster.num_ranks <= self._effort.few_ranks
        if is_small and most and self._request.partition == "auto":
            starts += self._searched(placed, starts)
            most = 0 if len(preferred) == 1 else most
        return ranked_orders(preferred, starts, self.alike, seconds, most)

    def _searched(self, placed: Candidate, starts: Sequence[Groups]) -> list[Groups]:
        """The best orders of each virtual machine's stages, regardless of rings."""
        known: dict[Hashable, list[Order]] = {}
        found_orders = []
        for vm, (ranks, workload) in enumerate(zip(placed.ranks, placed.workloads, strict=True)):
            # Equal virtual machines are ordered equally: otherwise rings would be slower.
            alike = [self.alike[rank] for rank in ranks]
            key = workload, pattern(alike)
            if key not in known:
                begin = [each[vm] for each in starts] + self._sorted(ranks)[:2]
                found = self._placer.best_orders(placed, vm, begin, alike)
                known[key] = [tuple(map(ranks.index, order)) for order in found]
            orders = [tuple(ranks[place] for place in places) for places in known[key]]
            found_orders.append(orders)
        return list(zip(*found_orders, strict=False))

    def _is_same_in_any_order(self, groups: Groups) -> bool:
        """Whether no order is better than the ranks' own, with those of each host next to each
        other.
        """
        devices, cluster = self._cluster.devices, self._cluster
        is_uniform = not (cluster.ranks or cluster.hosts) and all(
            len({(devices[r].kind, devices[r].speed, devices[r].usable_bytes) for r in ranks}) == 1
            for ranks in groups
        )
        return is_uniform or all(len({self.alike[r] for r in ranks}) == 1 for ranks in groups)

    def fitting(self, placed: Candidate) -> Candidate | None:
        """Returns the choice with an order of stages in which each virtual machine fits in memory,
        or ``None``: the first stages hold more, the last ones less.
        """
        if self._request.has_order:
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
        """The orders that may be needed to fit in memory: all, if there are few."""
        yield from self._sorted(machine)
        alike = [self.alike[rank] for rank in machine]
        if num_orders(alike) <= self._effort.orders:
            yield from distinct_orders(machine, alike)

    def _sorted(self, machine: Order) -> list[Order]:
        """The orders by memory and by compute power, the largest first and the smallest first."""
        devices, powers = self._cluster.devices, self._placer.powers
        found = []
        for sign in (-1, 1):
            found.append(sorted(machine, key=lambda rank: sign * devices[rank].usable_bytes))
            found.append(sorted(machine, key=lambda rank: sign * powers[rank]))
        return list(map(tuple, found))


def ranked_orders(
    machines: Groups,
    starts: Sequence[Groups],
    alike: Sequence[int],
    step_seconds: Callable[[Groups], float],
    most: int = USUAL.orders,
) -> list[tuple[Groups, float]]:
    """Orders with their step times, the fastest first.

    All orders if there are few distinct ones, and otherwise the starts.

    Args:
        machines: the ranks of each virtual machine, in the preferred order.
        starts: orders of all virtual machines to try in any case.
        alike: for each rank, see :func:`interchangeable`.
        step_seconds: the simulated time of the orders of all virtual machines; infinite if they are
            not possible.
        most: the number of orders up to which all are tried.
    """
    tried: dict[Groups, float] = {}

    def attempt(orders: Groups) -> None:
        if orders not in tried:
            tried[orders] = step_seconds(orders)

    for start in (machines, *starts):
        attempt(start)
    named = [[alike[rank] for rank in machine] for machine in machines]
    if math.prod(map(num_orders, named)) <= most:
        for orders in product(*map(distinct_orders, machines, named)):
            attempt(orders)
    return sorted(tried.items(), key=lambda entry: entry[1])


def best_order(
    ranked: Sequence[tuple[Groups, float]], machines: Groups, worth: float = USUAL.worth_changing
) -> Groups:
    """The fastest order, or of those that are slower by less than the factor ``worth``, the one
    nearest to ``machines``.

    Args:
        ranked: orders with their step times, as of :func:`ranked_orders`.
        machines: the ranks of each virtual machine, in the preferred order.
    """
    limit = worth * min(seconds for _, seconds in ranked)
    within = [entry for entry in ranked if entry[1] <= limit]
    return min(within, key=lambda entry: (_num_out_of_order(entry[0], machines), entry[1]))[0]


def _num_out_of_order(orders: Groups, machines: Groups) -> int:
    """The number of pairs of stages in the opposite order."""
    count = 0
    for order, machine in zip(orders, machines, strict=True):
        place = {rank: number for number, rank in enumerate(machine)}
        count += sum(place[a] > place[b] for i, a in enumerate(order) for b in order[i + 1 :])
    return count
