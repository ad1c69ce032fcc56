"""Times choices of virtual machines, microbatches and shares, each with its cuts.

A thousand devices of a few kinds give only few workloads: what is known of one virtual machine is
kept for equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.cost.prediction import Pipelines
from lightning_pipeshift.plan.cost.ring_contention import crowded
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.inputs.shares import shared_out
from lightning_pipeshift.plan.search.boundaries import cuts_to_try
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.plan.search.groupings import Groups
from lightning_pipeshift.plan.search.orders import Order, interchangeable, pattern
from lightning_pipeshift.plan.search.recomputation import Recomputation
from lightning_pipeshift.plan.search.request import Arrangement, PlanRequest
from lightning_pipeshift.plan.search.stages import Staged, StageSearch, between_blocks

Cuts = tuple[Cut, ...]
"""One for each virtual machine."""


class Candidate(NamedTuple):
    """Everything in a choice except the cuts."""

    ranks: Groups
    microbatches: int
    batch_shares: tuple[float, ...] | None
    links: Cluster
    """The machines, with the bandwidth that remains for each virtual machine on shared links."""
    workloads: tuple[Workload, ...]
    """One for each virtual machine; equal ones share one object."""


class Evaluator:
    """Times choices, and finds their cuts and orders."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.powers = [_compute_power(profile, cluster, rank) for rank in range(cluster.num_ranks)]
        self.alike = interchangeable(cluster)
        self._workloads: dict[Hashable, Workload] = {}
        self._of_shape: dict[Hashable, Workload] = {}
        self._staged: dict[Hashable, list[tuple[float, tuple[int, ...], Cut]]] = {}

    @property
    def is_large(self) -> bool:
        """Whether there are too many devices for a thorough search."""
        return self.cluster.num_ranks > self.request.effort.stages

    # Workloads.

    def placed(
        self,
        ranks: Sequence[Sequence[int]],
        microbatches: int,
        shares: Sequence[float] | None = None,
    ) -> Candidate:
        """Returns the workloads of a choice.

        Args:
            ranks: of each virtual machine, in stage order.
            microbatches: of a virtual machine's batch.
            shares: how the global batch is divided; ``None``: equally.
        """
        groups = tuple(map(tuple, ranks))
        sizes = self.sizes(len(groups), shares)
        links = crowded(self.cluster, groups)
        workloads = tuple(
            self.workload(links, machine, size, microbatches)
            for machine, size in zip(groups, sizes, strict=True)
        )
        return Candidate(groups, microbatches, self._named(shares, sizes), links, workloads)

    def workload(
        self,
        links: Cluster,
        ranks: Sequence[int],
        samples: float,
        microbatches: int,
        allowed: frozenset[int] | None = None,
    ) -> Workload:
        """The workload of one virtual machine.

        Args:
            links: see :class:`Candidate`.
            ranks: in stage order.
            samples: of its batch.
            microbatches: the number of slices of the batch; as many as samples, if these are fewer.
        """
        devices = [links.devices[rank] for rank in ranks]
        slices = max(1, min(microbatches, int(samples)))
        key = (
            tuple((device.kind, device.speed, device.usable_bytes) for device in devices),
            tuple(links.link(one, other) for one, other in pairwise(ranks)),
            samples,
            slices,
            allowed if allowed != self.profile.possible_cuts else None,
        )
        if key not in self._workloads:
            how = self.request.schedule, slices, samples / slices
            found = workload_of(self.profile, links, ranks, *how, allowed)
            # These depend on the stage, and not on its device.
            shape = len(ranks), samples, slices, found.allowed
            known = self._of_shape.setdefault(shape, found)
            vars(found).update(memory=known.memory, possible_ranges=known.possible_ranges)
            self._workloads[key] = found
        return self._workloads[key]

    def total(self, count: int) -> float:
        """The samples of a global batch of ``count`` virtual machines."""
        return self.request.total_samples(count)

    def sizes(self, count: int, shares: Sequence[float] | None) -> list[float]:
        """The number of samples of a global batch for each virtual machine."""
        total = self.total(count)
        if shares is None:
            return [total / count] * count
        if total != int(total):
            return [total * share / math.fsum(shares) for share in shares]
        return [float(size) for size in shared_out(int(total), shares)]

    def _named(
        self, shares: Sequence[float] | None, sizes: Sequence[float]
    ) -> tuple[float, ...] | None:
        """The shares in the smallest numbers with the same ratios."""
        if shares is None:
            return None
        if tuple(shares) == self.request.batch_shares:
            return tuple(shares)
        unit = math.gcd(*map(int, sizes)) if all(size == int(size) for size in sizes) else 1
        return tuple(size / unit for size in sizes)

    # Cuts and orders.

    def cuts(self, placed: Candidate, improves: bool = True) -> Cuts:
        """The best cut of each virtual machine.

        Args:
            placed: the choice.
            improves: whether more than the first cuts are tried.

        Raises PlanError if one does not fit in memory.
        """
        return tuple(
            self.staged(placed, vm, improves)[0].cut for vm in range(len(placed.workloads))
        )

    def staged(
        self,
        placed: Candidate,
        vm: int,
        improves: bool = True,
        starts: Sequence[Order] = (),
    ) -> list[Staged]:
        """The best stages of a virtual machine, the fastest first: one entry for each order.

        Args:
            placed: the choice.
            vm: the virtual machine's number.
            improves: whether more than the first cuts are tried.
            starts: other orders to begin with; empty: the order is fixed.

        Raises PlanError if nothing fits in memory.
        """
        machine = placed.ranks[vm]
        alike = [self.alike[rank] for rank in machine]
        if starts and len(set(alike)) == 1:
            starts = ()
        counts = self._fixed_counts(vm, len(machine))
        key = placed.workloads[vm], counts, improves, pattern(alike) if starts else None
        if key not in self._staged:
            found = self._searched(placed, vm, counts, improves, [machine, *starts])
            self._staged[key] = [
                (each.seconds, tuple(map(machine.index, each.order)), each.cut) for each in found
            ]
        if not self._staged[key]:
            raise PlanError("no cut fits in memory")
        return [
            Staged(seconds, tuple(machine[place] for place in places), cut)
            for seconds, places, cut in self._staged[key]
        ]

    def _searched(
        self,
        placed: Candidate,
        vm: int,
        counts: Counts | None,
        improves: bool,
        orders: Sequence[Order],
    ) -> list[Staged]:
        samples = self.sizes(len(placed.ranks), placed.batch_shares)[vm]
        request, effort = self.request, self.request.effort

        def workload(order: Order) -> Workload:
            return self.workload(placed.links, order, samples, placed.microbatches)

        if counts is not None:
            return self._with_counts(workload, orders, counts)

        def search(allowed: frozenset[int] | None) -> list[Staged]:
            def of(order: Order) -> Workload:
                return self.workload(placed.links, order, samples, placed.microbatches, allowed)

            found = StageSearch(of, request.recompute, self.alike, effort)
            for order in orders:
                found.first(order)
            if improves:
                found.improve(orders, len(orders) > 1 and not self.is_large)
            return found.found()

        # First cuts are between blocks, if these fit.
        worth = effort.worth_inside if improves else 1.0
        worthwhile = cuts_to_try(self.profile, len(orders[0]))
        return between_blocks(search, worthwhile, self.profile.possible_cuts, worth)

    def _with_counts(
        self, workload: Callable[[Order], Workload], orders: Sequence[Order], counts: Counts
    ) -> list[Staged]:
        """The orders in which a cut fits, the fastest first."""
        found = []
        for order in orders:
            there = workload(order)
            cut = Recomputation(there, self.request.recompute).cut(counts)
            if there.fits(cut):
                found.append(Staged(there.step_seconds([cut])[0], order, cut))
        if found:
            return sorted(found, key=lambda each: each.seconds)
        raise does_not_fit(workload(orders[0]), counts, self.request.recompute)

    def _fixed_counts(self, vm: int, num_stages: int) -> Counts | None:
        """The layers per stage, if they are fixed."""
        if self.request.partition == "uniform":
            return uniform(self.profile.num_layers, num_stages, self.profile.possible_cuts)
        return self.request.counts(vm)

    # Seconds.

    def seconds(self, placed: Candidate, cuts: Cuts) -> float:
        """The simulated seconds of a step without swaps."""
        return self._pipelines(placed, cuts).simulated_seconds

    def rate(self, placed: Candidate, cuts: Cuts) -> float:
        """Samples per second."""
        return _per_second(self.total(len(cuts)), self.seconds(placed, cuts))

    def arrangement(
        self, placed: Candidate, cuts: Cuts, swaps: tuple[tuple[Swap, ...], ...] = ()
    ) -> Arrangement:
        """The arrangement of a choice."""
        prediction = self._pipelines(placed, cuts).predicted(swaps)
        return Arrangement(
            ranks=placed.ranks,
            cuts=cuts,
            microbatches=placed.microbatches,
            schedule=self.request.schedule,
            batch_shares=placed.batch_shares,
            prediction=prediction,
            samples_per_second=_per_second(self.total(len(cuts)), prediction.step_seconds),
            swaps=swaps if any(swaps) else (),
        )

    def _pipelines(self, placed: Candidate, cuts: Cuts) -> Pipelines:
        return Pipelines(self.profile, self.cluster, placed.ranks, placed.workloads, cuts)


def does_not_fit(workload: Workload, counts: Counts, recompute: str) -> PlanError:
    """The error for a cut that a user has asked for."""
    least = Cut(counts) if recompute == "none" else workload.everything_recomputed(counts)
    held, usable = workload.memory.peak_bytes(least), workload.usable_bytes
    stage = max(range(len(held)), key=lambda stage: held[stage] - usable[stage])
    return PlanError(
        f"the partition {list(counts)} needs {held[stage]:.3g} bytes on stage {stage}, whose "
        f"device has {usable[stage]:.3g}; give that stage fewer layers, or use partition='auto'"
    )


def _compute_power(profile: Profile, cluster: Cluster, rank: int) -> float:
    """The number of microbatches that a device would train per second, if it had the whole
    model.
    """
    times = profile.times_on(cluster.devices[rank])
    seconds = math.fsum(times.forward) + math.fsum(times.backward)
    return 1 / seconds if seconds else 1.0


def _per_second(samples: float, seconds: float) -> float:
    return samples / seconds if seconds else math.inf
