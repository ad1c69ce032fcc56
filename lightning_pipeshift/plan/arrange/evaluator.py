"""Computes the workloads, cuts and seconds of a choice of ranks, microbatches and shares.

A thousand devices of a few kinds give only few workloads: results for one virtual machine are
cached for equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_pipeshift.errors import PlanError, without_stack
from lightning_pipeshift.plan.arrange.groupings import Groups
from lightning_pipeshift.plan.arrange.request import Arrangement, PlanRequest
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import (
    crossing_bytes,
    crossing_seconds,
    workload_of,
)
from lightning_pipeshift.plan.cost.prediction import Pipelines
from lightning_pipeshift.plan.cost.ring_contention import crowded, ring_seconds_per_byte
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.inputs.shares import shared_out
from lightning_pipeshift.plan.partition.best_cut import best_cut_of, first_cuts, fixed_cut
from lightning_pipeshift.plan.partition.boundaries import cuts_to_try
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.partition.orders import Order
from lightning_pipeshift.plan.partition.recomputation import Recomputation
from lightning_pipeshift.plan.partition.search import Reordering, Search

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

    @property
    def num_actions(self) -> int:
        """Stages times microbatches, of all distinct virtual machines."""
        return sum(w.num_stages * w.microbatches for w in set(self.workloads))


class CostModel(NamedTuple):
    """Computes the seconds of a step: in closed form, or by the simulator."""

    step: Callable[[Candidate, Cuts], float]
    alone: Callable[[Workload, Cut], float]
    """The seconds of one virtual machine, without the others."""


class Evaluator:
    """Evaluates choices, with a cache."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        ranks = range(cluster.num_ranks)
        self.powers = [_compute_power(profile, cluster, rank) for rank in ranks]
        self._workloads: dict[Hashable, Workload] = {}
        self._cuts: dict[Hashable, Cut | PlanError] = {}
        self._start: dict[Workload, Cut] = {}
        self._chosen: dict[Hashable, Cuts] = {}
        # These are large: only the last ones are cached.
        self._recomputation = lru_cache(maxsize=8)(
            lambda workload: Recomputation(workload, request.recompute)
        )
        self._paces: dict[Workload, tuple[float, Numbers]] = {}
        self.closed_form = CostModel(
            lambda placed, cuts: self._pipelines(placed, cuts).estimated_seconds,
            Workload.estimate,
        )
        self.simulator = CostModel(
            lambda placed, cuts: self._pipelines(placed, cuts).simulated_seconds,
            lambda workload, cut: workload.step_seconds([cut])[0],
        )

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
        self, links: Cluster, ranks: Sequence[int], samples: float, microbatches: int
    ) -> Workload:
        """The workload of one virtual machine.

        Args:
            links: see :class:`Candidate`.
            ranks: in stage order.
            samples: of its batch.
            microbatches: the number of slices of the batch.
        """
        devices = [links.devices[rank] for rank in ranks]
        slices = num_slices(samples, microbatches)
        key = (
            tuple((device.kind, device.speed, device.usable_bytes) for device in devices),
            tuple(links.link(one, other) for one, other in pairwise(ranks)),
            samples,
            slices,
        )
        if key not in self._workloads:
            self._workloads[key] = workload_of(
                self.profile,
                links,
                ranks,
                self.request.schedule,
                slices,
                samples / slices,
                cuts_to_try(self.profile, len(ranks)),
            )
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

    # Cuts.

    def cuts(self, placed: Candidate, careful: bool = False) -> Cuts:
        """A cut for each virtual machine: the best in closed form, or by a thorough search.

        The better of two, as the solvers do not model rings: one cut without the time of rings, and
        one with an estimate of it for each layer. Raises PlanError if a virtual machine does not
        fit in memory.
        """
        key = (placed.ranks, placed.microbatches, placed.batch_shares, careful)
        if key not in self._chosen:
            self._chosen[key] = self._solved(placed, None, careful)
            cost = self.simulator if careful else self.closed_form
            if len(placed.ranks) > 1 and self.request.partition == "auto":
                self._chosen[key] = self._against_rings(placed, self._chosen[key], careful, cost)
        return self._chosen[key]

    def _against_rings(self, placed: Candidate, cuts: Cuts, careful: bool, cost: CostModel) -> Cuts:
        """Better cuts, if rings take much of the step."""
        seconds = cost.step(placed, cuts)
        pairs = dict.fromkeys(zip(placed.workloads, cuts, strict=True))
        alone = max(cost.alone(workload, cut) for workload, cut in pairs)
        if seconds - self.profile.step_seconds <= self.request.effort.worth_changing * alone:
            return cuts
        others = self._solved(placed, self._hindrance(placed), careful)
        return others if cost.step(placed, others) < seconds else cuts

    def _solved(
        self, placed: Candidate, hindrance: Sequence[tuple[float, ...]] | None, careful: bool
    ) -> Cuts:
        unhindered = [None] * len(placed.workloads)
        return tuple(
            self._cut(vm, workload, per_byte, careful)
            for vm, (workload, per_byte) in enumerate(
                zip(placed.workloads, hindrance or unhindered, strict=True)
            )
        )

    def fits(self, placed: Candidate, vm: int, order: Sequence[int]) -> bool:
        """Whether the model fits in a virtual machine with another order of its stages."""
        size = self.sizes(len(placed.ranks), placed.batch_shares)[vm]
        workload = self.workload(placed.links, order, size, placed.microbatches)
        try:
            self._cut(vm, workload, None, careful=False)
        except PlanError:
            return False
        return True

    def _cut(
        self, vm: int, workload: Workload, per_byte: Sequence[float] | None, careful: bool
    ) -> Cut:
        """The cut of one virtual machine, cached for equal ones."""
        counts = self._fixed_counts(vm, workload)
        key = (workload, counts, per_byte, careful)
        if key not in self._cuts:
            try:
                self._cuts[key] = self._made(workload, counts, per_byte, careful)
            except PlanError as error:
                self._cuts[key] = without_stack(error)
        cut = self._cuts[key]
        if isinstance(cut, PlanError):
            # Raising it gives it a traceback.
            raise copy(cut)
        return cut

    def best_orders(
        self, placed: Candidate, vm: int, starts: Sequence[Order], alike: Sequence[int]
    ) -> list[Order]:
        """The best orders of a virtual machine's stages, regardless of rings, the fastest first.
        Their cuts are cached. Empty if the model fits in no order.

        Args:
            placed: the choice.
            vm: the virtual machine's number.
            starts: orders to begin with.
            alike: for each of its ranks, see :func:`~.orders.interchangeable`.
        """
        profile, request = self.profile, self.request
        machine, links = placed.ranks[vm], placed.links
        size = self.sizes(len(placed.ranks), placed.batch_shares)[vm]
        share = size / num_slices(size, placed.microbatches) / profile.samples
        between = [[links.link(one, other) for other in machine] for one in machine]
        across = crossing_bytes(profile, share)
        crossing = np.array([[crossing_seconds(across, each) for each in row] for row in between])
        latency = np.array([[each.latency_seconds for each in row] for row in between])
        turns = [machine[turn:] + machine[:turn] for turn in range(len(machine))]

        def workload(order: Order) -> Workload:
            return self.workload(placed.links, order, size, placed.microbatches)

        def anywhere(order: Order) -> Workload:
            return replace(workload(order), allowed=profile.possible_cuts)

        begin = []
        for order in dict.fromkeys(starts):
            try:
                counts = self._cut(vm, workload(order), None, careful=False).counts
            except PlanError:
                counts = uniform(profile.num_layers, len(order), profile.possible_cuts)
            begin.append((tuple(map(machine.index, order)), counts))
        for of in (workload, anywhere):
            own, *turned = map(of, turns)
            search = Search(
                own,
                Recomputation(own, request.recompute),
                Reordering(turned, crossing, latency, alike),
                request.recompute,
                request.effort,
            )
            if best := search.best_orders(begin)[: request.effort.orders_cut]:
                break
        self._chosen.clear()
        found = [(tuple(machine[place] for place in order), counts) for order, counts in best]
        for order, counts in found:
            key = workload(order)
            cut = fixed_cut(key, counts, request.recompute)
            self._cuts[key, None, None, False] = self._start[key] = cut
        return [order for order, _ in found]

    def _hindrance(self, placed: Candidate) -> tuple[tuple[float, ...], ...]:
        """The seconds by which a byte of gradients delays the end of each stage's step.

        Stage 0 ends its backward last, and the time of its rings is added. Each other stage can
        hide its rings until then: only the part that it cannot hide, if all stages took equal time,
        counts. In an asynchronous pipeline no stage waits for stage 0, and all of it counts."""
        num_bytes = sum(layer.gradient_bytes for layer in self.profile.layers)
        found = []
        per_byte = ring_seconds_per_byte(self.cluster, placed.ranks)
        if placed.workloads[0].objective.is_pace:
            return per_byte
        for workload, seconds in zip(placed.workloads, per_byte, strict=True):
            if workload not in self._paces:
                powers = 1 / np.maximum(workload.backward.sum(axis=1), 1e-30)
                self._paces[workload] = (float(1 / powers.sum()), powers / powers.sum())
            backward, parts = self._paces[workload]
            found.append(
                tuple(
                    each * max(0.0, 1 - stage * backward / (each * num_bytes * part))
                    if each * num_bytes * part
                    else 0.0
                    for stage, (each, part) in enumerate(zip(seconds, parts.tolist(), strict=True))
                )
            )
        return tuple(found)

    def _hindered(self, workload: Workload, per_byte: Sequence[float]) -> Workload:
        """A workload whose backward is longer by the time that its rings delay it."""
        sizes = [layer.gradient_bytes for layer in self.profile.layers]
        longer = np.outer(per_byte, sizes) / workload.microbatches
        return replace(workload, backward=workload.backward + longer)

    def _made(
        self,
        workload: Workload,
        counts: tuple[int, ...] | None,
        per_byte: Sequence[float] | None,
        careful: bool,
    ) -> Cut:
        if counts is not None:
            return fixed_cut(workload, counts, self.request.recompute)
        hindered = workload if per_byte is None else self._hindered(workload, per_byte)
        possible = self.profile.possible_cuts
        if careful:
            anywhere = replace(hindered, allowed=possible)
            between = cuts_to_try(self.profile, workload.num_stages)
            effort = self.request.effort
            start = [self._start[workload]] if workload in self._start else []
            return best_cut_of(anywhere, between, self.request.recompute, start, effort=effort)
        try:
            return self._quick_cut(workload, hindered)
        except PlanError:
            if workload.allowed == possible:
                raise
            return self._quick_cut(
                replace(workload, allowed=possible), replace(hindered, allowed=possible)
            )

    def _quick_cut(self, workload: Workload, hindered: Workload) -> Cut:
        """The best cut in closed form. The recomputation doesn't depend on rings."""
        recomputation = self._recomputation(workload)
        cuts = recomputation.cuts(first_cuts(hindered, recomputation.seconds))
        if not cuts:
            raise PlanError(f"no cut into {workload.num_stages} stages fits in memory")
        return min(cuts, key=hindered.estimate)

    def _fixed_counts(self, vm: int, workload: Workload) -> tuple[int, ...] | None:
        """The layers per stage, if they are fixed."""
        if self.request.partition == "uniform":
            return uniform(workload.num_layers, workload.num_stages, self.profile.possible_cuts)
        return self.request.counts(vm)

    # Seconds.

    def rate(self, placed: Candidate, cuts: Cuts, cost: CostModel) -> float:
        """Samples per second."""
        return _per_second(self.total(len(cuts)), cost.step(placed, cuts))

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


def _compute_power(profile: Profile, cluster: Cluster, rank: int) -> float:
    """The number of microbatches that a device would train per second, if it had the whole
    model.
    """
    times = profile.times_on(cluster.devices[rank])
    seconds = math.fsum(times.forward) + math.fsum(times.backward)
    return 1 / seconds if seconds else 1.0


def num_slices(samples: float, microbatches: int) -> int:
    """Returns into how many slices a batch is split: as many as it has samples, if there are fewer
    of them than microbatches.
    """
    return max(1, min(microbatches, int(samples)))


def _per_second(samples: float, seconds: float) -> float:
    return samples / seconds if seconds else math.inf
