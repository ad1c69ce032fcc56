"""Makes the plan for machines and a model: how many virtual machines, of which devices, in which
order, with which cuts, microbatches and shares of the batch.

Each choice depends on the others, and there are too many of all of them together. So all groupings
with a reason are looked at in closed form first; the orders of the best are tried on the simulator;
and the best of those are cut with care, sliced, and given their shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.balance import uniform
from lightning_pipeshift.plan.cluster import Cluster
from lightning_pipeshift.plan.dynamic import fastest_cuts
from lightning_pipeshift.plan.grouping import (
    Groups,
    candidate_counts,
    groupings,
    host_order,
    ring_order,
)
from lightning_pipeshift.plan.prediction import Prediction, crowded, estimated_seconds, predict
from lightning_pipeshift.plan.profile import Profile
from lightning_pipeshift.plan.search import best_cut
from lightning_pipeshift.plan.shares import shared_out
from lightning_pipeshift.plan.stage_order import (
    best_order,
    by_ratio,
    compute_power,
    interchangeable,
)
from lightning_pipeshift.plan.topology import Topology
from lightning_pipeshift.plan.workload import Cut, Workload, workload_of

Allowed = Callable[[int], frozenset[int] | None]
"""The boundaries that may be cut into a number of stages; ``None``: all."""

_WORTH_SHARES: Final = 1.02
"""How many times as many samples per second unequal shares must give."""

_WORTH_SLICES: Final = 1.01
"""How many times as many samples per second more microbatches must give."""

_MOST_ACTIONS: Final = 1 << 14
"""Stages times microbatches, where PipeShift chooses these: what the simulator takes a second for.
"""

_MOST_RESLICED: Final = 1 << 11
"""Up to so many of them, the simulator has a say in the number of microbatches."""

_MOST_SLICINGS: Final = 4
_MOST_ORDERS: Final = 120
_MOST_LOOKED_AT_TWICE: Final = ((8, 16), (64, 6), (math.inf, 3))
"""How many groupings are tried on the simulator, of how many ranks."""

_MOST_FINISHED: Final = 3

_ROUNDS: Final = 4
"""After so many corrections of the shares, what is left is the rounding to whole samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user has fixed, and what is left to the planner.

    Args:
        virtual_machines: how many, or the ranks of each in stage order.
        microbatches: slices of a virtual machine's batch.
        schedule: by name.
        recompute: ``"full"``: all layers where that frees memory; ``"auto"``: those that don't
            fit otherwise.
        partition: ``"auto"``, ``"uniform"``, or for each virtual machine the layers per stage.
        batch_shares: how the global batch is shared out; ``None``: as is best.
        batch_samples: of a virtual machine's DataLoader batch. A global batch has that times the
            number of virtual machines.
    """

    virtual_machines: int | Literal["auto"] | Groups = "auto"
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = "1f1b"
    recompute: str = "auto"
    partition: Literal["auto", "uniform"] | tuple[tuple[int, ...], ...] = "auto"
    batch_shares: tuple[float, ...] | None = None
    batch_samples: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.batch_samples) and self.batch_samples > 0):
            raise PlanError(
                f"a batch of {self.batch_samples} samples; a DataLoader's batch has at least 1"
            )
        for name in ("virtual_machines", "microbatches"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise PlanError(f"{name}={value}; allowed are 'auto' and numbers from 1 on")
        counts = {
            what: count
            for what, count in (
                ("virtual_machines", self.num_machines),
                ("partition", None if isinstance(self.partition, str) else len(self.partition)),
                ("batch_shares", None if self.batch_shares is None else len(self.batch_shares)),
            )
            if count is not None
        }
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{what} for {count}" for what, count in counts.items())
            raise PlanError(f"{found}: they must be for the same number of virtual machines")

    @property
    def num_machines(self) -> int | None:
        """How many virtual machines are asked for; ``None``: left to the planner."""
        if isinstance(self.virtual_machines, int):
            return self.virtual_machines
        return None if self.virtual_machines == "auto" else len(self.virtual_machines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """An answer, and what is expected of it. Tuples are per virtual machine.

    Args:
        ranks: in stage order.
        cuts: of the layers.
        microbatches: slices of a virtual machine's batch.
        schedule: by name.
        batch_shares: how the global batch is shared out; ``None``: equally.
        prediction: of a step.
        samples_per_second: of all virtual machines together.
    """

    ranks: Groups
    cuts: tuple[Cut, ...]
    microbatches: int
    schedule: str
    batch_shares: tuple[float, ...] | None
    prediction: Prediction
    samples_per_second: float


def arrange_all(
    profile: Profile, cluster: Cluster, wishes: Wishes, allowed: Allowed | None = None
) -> Arrangement:
    """The arrangement with the most samples per second, by the simulator.

    Args:
        profile: of the model.
        cluster: the machines.
        wishes: what is fixed.
        allowed: the boundaries that may be cut, where anything fits so.

    Raises:
        PlanError: nothing that is allowed fits in memory, or makes that many virtual machines.
    """
    return _Planner(profile, cluster, wishes, allowed).best()


def evaluate(
    profile: Profile,
    cluster: Cluster,
    wishes: Wishes,
    ranks: Sequence[Sequence[int]],
    cuts: Sequence[Cut],
    microbatches: int,
    batch_shares: Sequence[float] | None = None,
) -> Arrangement:
    """What is expected of an arrangement that somebody else has made, whether it fits or not.

    Args:
        profile: of the model.
        cluster: the machines.
        wishes: say what the schedule is, and how large a batch.
        ranks: of each virtual machine, in stage order.
        cuts: one for each of them.
        microbatches: slices of a virtual machine's batch.
        batch_shares: how the global batch is shared out; ``None``: equally.
    """
    planner = _Planner(profile, cluster, wishes, None)
    placed = planner.placed(ranks, microbatches, batch_shares)
    return planner.arrangement(placed, tuple(cuts))


class _Placed(NamedTuple):
    """Everything but the cuts."""

    ranks: Groups
    microbatches: int
    batch_shares: tuple[float, ...] | None
    workloads: tuple[Workload, ...]
    """One for each virtual machine: of those that are alike, the same object."""


_Cuts = tuple[Cut, ...]


class _Judge(NamedTuple):
    """Says what a step takes, in seconds: in closed form, or by the simulator."""

    step: Callable[[_Placed, _Cuts], float]
    alone: Callable[[Workload, Cut], float]
    """Of one virtual machine, without the others."""


class _Planner:
    """Knows what was worked out before: a thousand devices of a few kinds are few workloads."""

    def __init__(
        self, profile: Profile, cluster: Cluster, wishes: Wishes, allowed: Allowed | None
    ) -> None:
        self._profile = profile
        self._cluster = cluster
        self._wishes = wishes
        self._allowed = allowed or (lambda num_stages: None)
        self._powers = [compute_power(profile, cluster, rank) for rank in range(cluster.num_ranks)]
        self._alike = interchangeable(cluster)
        self._place = {rank: place for place, rank in enumerate(host_order(cluster))}
        self._workloads: dict[Hashable, Workload] = {}
        self._cuts: dict[Hashable, Cut | PlanError] = {}

    # From all groupings to one arrangement.

    def best(self) -> Arrangement:
        """See :func:`arrange_all`."""
        errors: list[tuple[float, PlanError]] = []
        seen: list[tuple[float, _Placed]] = []
        for groups in self._groupings():
            try:
                seen.append(self._first_look(groups))
            except PlanError as error:
                # The least bad is the one whose smallest virtual machine has the most room.
                errors.append((min(map(self._room_bytes, groups)), error))
        if not seen:
            raise max(errors, key=lambda entry: entry[0])[1]
        num_ranks = self._cluster.num_ranks
        most = next(most for limit, most in _MOST_LOOKED_AT_TWICE if num_ranks <= limit)
        again = [self._second_look(placed) for placed in _highest(seen, most)]
        finished = [self._finished(placed) for placed in _highest(again, _MOST_FINISHED)]
        return max(finished, key=lambda found: found.samples_per_second)

    def _groupings(self) -> Iterator[Groups]:
        """The ways to make virtual machines that the wishes leave."""
        wishes, num_ranks = self._wishes, self._cluster.num_ranks
        if not isinstance(wishes.virtual_machines, int | str):
            topology = Topology(wishes.virtual_machines)
            if topology.num_ranks != num_ranks:
                raise PlanError(
                    f"virtual machines of {topology.num_ranks} ranks on {num_ranks} devices; name"
                    f" each of the ranks 0 to {num_ranks - 1} once"
                )
            yield topology.ranks
            return
        counts = candidate_counts(self._cluster.devices)
        depths = None
        if not isinstance(wishes.partition, str):
            depths = list(map(len, wishes.partition))
            counts = (len(depths),)
            if sum(depths) != num_ranks:
                raise PlanError(
                    f"a partition for {sum(depths)} stages on {num_ranks} devices; it needs one"
                    " stage for each"
                )
        elif wishes.num_machines is not None:
            counts = (wishes.num_machines,)
        elif wishes.batch_shares is not None:
            counts = (len(wishes.batch_shares),)
        for count in counts:
            if count > num_ranks:
                raise PlanError(
                    f"{count} virtual machines on {num_ranks} devices; each has at least one device"
                )
            for groups in groupings(self._cluster, count, self._powers, self._alike, depths):
                yield self._numbered(groups)

    def _numbered(self, groups: Groups) -> Groups:
        """The same groups in the order in which rings pass them, as far as that is free."""
        if not isinstance(self._wishes.partition, str):
            return groups
        shares = self._wishes.batch_shares
        if shares is None:
            return ring_order(self._cluster, groups)
        # The larger shares are meant for the faster ones.
        fastest = sorted(groups, key=lambda ranks: -sum(self._powers[rank] for rank in ranks))
        largest = sorted(range(len(shares)), key=lambda vm: -shares[vm])
        of_vm = dict(zip(largest, fastest, strict=True))
        return tuple(of_vm[vm] for vm in range(len(shares)))

    def _first_look(self, groups: Groups) -> tuple[float, _Placed]:
        """A grouping's samples per second in closed form, with its slices, order and shares."""
        placed = self._in_best_order(self._sliced(groups), self._closed_form, 0)
        placed = self._shared_out(placed, self._closed_form)
        return self._rate(placed, self._closed_form), placed

    def _second_look(self, placed: _Placed) -> tuple[float, _Placed]:
        """Its samples per second by the simulator, its stages in the best of all orders."""
        # A fixed number of orders would be a blink for some and minutes for others.
        num_ranks = self._cluster.num_ranks
        actions = sum(w.num_stages * w.microbatches for w in set(placed.workloads))
        most = min(_MOST_ORDERS, _MOST_ACTIONS // (actions + 100), _MOST_ACTIONS // num_ranks // 2)
        placed = self._in_best_order(placed, self._simulator, most)
        return self._rate(placed, self._simulator), placed

    def _finished(self, placed: _Placed) -> Arrangement:
        """Sliced, shared out and cut as well as can be."""
        rates = self._slices(placed)
        if len(rates) > 1 and len(placed.ranks[0]) * max(rates) <= _MOST_RESLICED:
            best = sorted(rates, key=rates.__getitem__)[-_MOST_SLICINGS:]
            rates = {}
            for count in best:
                sliced = self.placed(placed.ranks, count, placed.batch_shares)
                # One of the best in closed form may not fit.
                with suppress(PlanError):
                    rates[count] = self._rate(sliced, self._simulator)
            placed = self.placed(placed.ranks, _fewest(rates), placed.batch_shares)
        placed = self._shared_out(placed, self._simulator)
        equal = self.placed(placed.ranks, placed.microbatches, self._wishes.batch_shares)
        found = self.arrangement(equal, self._cut(equal, careful=True))
        if placed.batch_shares != equal.batch_shares:
            other = self.arrangement(placed, self._cut(placed, careful=True))
            if other.samples_per_second >= _WORTH_SHARES * found.samples_per_second:
                return other
        return found

    # Orders of the stages.

    def _in_best_order(self, placed: _Placed, judge: _Judge, most: int) -> _Placed:
        """The same with its stages in the best order, of at most so many."""
        if not isinstance(self._wishes.virtual_machines, int | str):
            return placed
        preferred = tuple(
            tuple(sorted(ranks, key=self._place.__getitem__)) for ranks in placed.ranks
        )
        rule = tuple(
            by_ratio(self._profile, self._cluster, ranks, preferred[vm + 1 :] + preferred[:vm])
            for vm, ranks in enumerate(preferred)
        )
        if preferred == rule == placed.ranks and all(
            len({self._alike[rank] for rank in ranks}) == 1 for ranks in preferred
        ):
            return placed

        def in_order(ranks: Groups) -> _Placed:
            return self.placed(ranks, placed.microbatches, placed.batch_shares)

        def seconds(ranks: Groups) -> float:
            try:
                return self._seconds(in_order(ranks), judge)
            except PlanError:
                return math.inf

        # To compare orders it is enough that each device keeps its number of layers: much quicker.
        counts = {
            rank: count
            for ranks, cut in zip(placed.ranks, self._cut(placed), strict=True)
            for rank, count in zip(ranks, cut.counts, strict=True)
        }

        def estimate(ranks: Groups) -> float:
            cuts = [Cut(tuple(counts[rank] for rank in machine)) for machine in ranks]
            return self._closed_form.step(in_order(ranks), tuple(cuts))

        starts = (rule, placed.ranks)
        return in_order(best_order(preferred, starts, self._alike, seconds, estimate, most))

    # Slices of the batch.

    def _sliced(self, groups: Groups) -> _Placed:
        """A grouping with the best number of microbatches, in closed form.

        Raises PlanError where it fits with none."""
        shares = self._wishes.batch_shares
        rates = self._slices(self.placed(groups, 1, shares))
        error = None
        while rates:
            count = _fewest(rates)
            placed = self.placed(groups, count, shares)
            try:
                self._cut(placed)
            except PlanError as found:
                error = found
                del rates[count]
            else:
                return placed
        assert error is not None, "there is a number to try"
        raise error

    def _slices(self, placed: _Placed) -> dict[int, float]:
        """Numbers of microbatches, and samples per second in closed form.

        All under the cuts of one of them, where that fits: how many there are hardly moves the
        best cuts."""
        deepest = max(map(len, placed.ranks))
        counts = self._numbers_of_slices(deepest)
        if len(counts) == 1:
            return {counts[0]: 0.0}
        all_placed = [self.placed(placed.ranks, count, placed.batch_shares) for count in counts]
        common = [one for one in all_placed if one.microbatches <= deepest][-1]
        try:
            cuts = self._cut(common)
        except PlanError:
            cuts = None
        rates = {}
        for one in all_placed:
            try:
                seconds = self._closed_form.step(one, cuts or self._cut(one))
                rates[one.microbatches] = self._total(len(one.ranks)) / seconds
            except PlanError:
                rates[one.microbatches] = 0.0
        return rates

    def _numbers_of_slices(self, num_stages: int) -> list[int]:
        """What to try: powers of two, and those times the number of stages."""
        if isinstance(self._wishes.microbatches, int):
            return [self._wishes.microbatches]
        most = max(1, int(self._wishes.batch_samples))
        powers = [1 << exponent for exponent in range(most.bit_length())]
        counts = {most, *powers, *(num_stages * power for power in powers)}
        return sorted(
            count
            for count in counts
            if count == 1 or (count <= most and count * num_stages <= _MOST_ACTIONS)
        )

    # Shares of the batch.

    def _shared_out(self, placed: _Placed, judge: _Judge) -> _Placed:
        """With the shares under which all virtual machines take equally long, if that gains enough.

        What a step takes is not in proportion to the samples, so shares and times are found in
        turn: each share is corrected by how far its time is from the others'."""
        if self._wishes.batch_shares is not None or len(placed.ranks) == 1:
            return placed
        best = shared = self.placed(placed.ranks, placed.microbatches)
        least = self._seconds(best, judge) / _WORTH_SHARES
        for _ in range(_ROUNDS):
            pairs = list(zip(shared.workloads, self._cut(shared), strict=True))
            times = {pair: judge.alone(*pair) for pair in set(pairs)}
            if max(times.values()) <= _WORTH_SHARES * min(times.values()):
                break
            sizes = self._sizes(len(placed.ranks), shared.batch_shares)
            wanted = [size / times[pair] for size, pair in zip(sizes, pairs, strict=True)]
            shared = self.placed(placed.ranks, placed.microbatches, wanted)
            try:
                seconds = self._seconds(shared, judge)
            except PlanError:
                break
            if seconds < least:
                best, least = shared, seconds
        return best

    def _total(self, count: int) -> float:
        """The samples of a global batch."""
        return self._wishes.batch_samples * count

    def _sizes(self, count: int, shares: Sequence[float] | None) -> list[float]:
        """How many samples of a global batch each virtual machine takes."""
        total = self._total(count)
        if shares is None:
            return [self._wishes.batch_samples] * count
        if total != int(total):
            return [total * share / math.fsum(shares) for share in shares]
        return [float(size) for size in shared_out(int(total), shares)]

    # What a choice means.

    def placed(
        self,
        ranks: Sequence[Sequence[int]],
        microbatches: int,
        shares: Sequence[float] | None = None,
    ) -> _Placed:
        """The workloads that follow from the other choices."""
        groups = tuple(map(tuple, ranks))
        sizes = self._sizes(len(groups), shares)
        links = crowded(self._cluster, groups)
        workloads = tuple(
            self._workload(links, machine, size, microbatches)
            for machine, size in zip(groups, sizes, strict=True)
        )
        return _Placed(groups, microbatches, self._named(shares, sizes), workloads)

    def _named(
        self, shares: Sequence[float] | None, sizes: Sequence[float]
    ) -> tuple[float, ...] | None:
        """The shares in the smallest numbers that say the same."""
        if shares is None:
            return None
        if tuple(shares) == self._wishes.batch_shares:
            return tuple(shares)
        unit = math.gcd(*map(int, sizes)) if all(size == int(size) for size in sizes) else 1
        return tuple(size / unit for size in sizes)

    def _workload(
        self, cluster: Cluster, ranks: Sequence[int], samples: float, microbatches: int
    ) -> Workload:
        devices = [cluster.devices[rank] for rank in ranks]
        # A batch of fewer samples is cut into as many slices as it has samples.
        slices = max(1, min(microbatches, int(samples)))
        key = (
            tuple((device.kind, device.speed, device.room_bytes) for device in devices),
            tuple(cluster.link(one, other) for one, other in pairwise(ranks)),
            samples,
            slices,
        )
        if key not in self._workloads:
            self._workloads[key] = workload_of(
                self._profile,
                cluster,
                ranks,
                self._wishes.schedule,
                slices,
                samples / slices,
                self._allowed(len(ranks)),
            )
        return self._workloads[key]

    def _seconds(self, placed: _Placed, judge: _Judge) -> float:
        """What a step takes under quick cuts. Raises PlanError where it doesn't fit."""
        return judge.step(placed, self._cut(placed))

    def _rate(self, placed: _Placed, judge: _Judge) -> float:
        seconds = self._seconds(placed, judge)
        return self._total(len(placed.ranks)) / seconds if seconds else math.inf

    @property
    def _closed_form(self) -> _Judge:
        def step(placed: _Placed, cuts: _Cuts) -> float:
            return estimated_seconds(
                self._profile, self._cluster, placed.ranks, placed.workloads, cuts
            )

        return _Judge(step, Workload.estimate)

    @property
    def _simulator(self) -> _Judge:
        def step(placed: _Placed, cuts: _Cuts) -> float:
            return self._predicted(placed, cuts).step_seconds

        return _Judge(step, lambda workload, cut: workload.step_seconds([cut])[0])

    def _predicted(self, placed: _Placed, cuts: _Cuts) -> Prediction:
        return predict(self._profile, self._cluster, placed.ranks, placed.workloads, cuts)

    def arrangement(self, placed: _Placed, cuts: _Cuts) -> Arrangement:
        """The answer that these choices are."""
        prediction = self._predicted(placed, cuts)
        total = self._total(len(placed.ranks))
        seconds = prediction.step_seconds
        return Arrangement(
            ranks=placed.ranks,
            cuts=cuts,
            microbatches=placed.microbatches,
            schedule=self._wishes.schedule,
            batch_shares=placed.batch_shares,
            prediction=prediction,
            samples_per_second=total / seconds if seconds else math.inf,
        )

    # Cuts.

    def _cut(self, placed: _Placed, careful: bool = False) -> _Cuts:
        """A cut for each virtual machine, made once for each that differs.

        Raises PlanError where one doesn't fit in memory."""
        found = []
        for vm, workload in enumerate(placed.workloads):
            counts = self._counts(vm, workload)
            key = (workload, counts, careful)
            if key not in self._cuts:
                try:
                    if counts is not None:
                        self._cuts[key] = _recomputed(workload, counts, self._wishes.recompute)
                    elif careful:
                        self._cuts[key] = self._careful(workload)
                    else:
                        self._cuts[key] = self._quick(workload)
                except PlanError as error:
                    self._cuts[key] = error
            cut = self._cuts[key]
            if isinstance(cut, PlanError):
                raise cut
            found.append(cut)
        return tuple(found)

    def _counts(self, vm: int, workload: Workload) -> tuple[int, ...] | None:
        """The layers per stage, where they are fixed."""
        partition = self._wishes.partition
        if partition == "auto":
            return None
        if partition == "uniform":
            return uniform(workload.num_layers, workload.num_stages)
        return partition[vm]

    def _quick(self, workload: Workload) -> Cut:
        """The best in closed form; where memory is short, that is not enough."""
        recompute = self._wishes.recompute
        if recompute != "full":
            for choice in (workload, _anywhere(workload)):
                cuts = fastest_cuts(choice, most=1)
                if cuts:
                    return cuts[0]
        return self._careful(workload)

    def _careful(self, workload: Workload) -> Cut:
        recompute = self._wishes.recompute
        try:
            return best_cut(workload, recompute)
        except PlanError:
            if workload.allowed is None:
                raise
            return best_cut(_anywhere(workload), recompute)

    def _room_bytes(self, ranks: Sequence[int]) -> float:
        return math.fsum(self._cluster.devices[rank].room_bytes for rank in ranks)


def _anywhere(workload: Workload) -> Workload:
    return replace(workload, allowed=None)


def _recomputed(workload: Workload, counts: Sequence[int], recompute: str) -> Cut:
    """A cut whose counts are fixed: recomputed throughout, if it must be.

    Raises PlanError where it doesn't fit."""
    choices = [Cut(tuple(counts))] if recompute != "full" else []
    if recompute != "none":
        choices.append(workload.everything_recomputed(counts))
    for cut in choices:
        if workload.fits(cut):
            return cut
    held, room = workload.memory_bytes(choices[-1]), workload.room_bytes
    stage = max(range(len(held)), key=lambda stage: held[stage] - room[stage])
    raise PlanError(
        f"the partition {list(counts)} needs {held[stage]:.3g} bytes on stage {stage}, whose device"
        f" has {room[stage]:.3g}; give that stage fewer layers, or leave the partition to"
        " PipeShift"
    )


def _fewest(rates: Mapping[int, float]) -> int:
    """The fewest microbatches that are hardly worse than the best number."""
    limit = max(rates.values()) / _WORTH_SLICES
    return min(count for count, rate in rates.items() if rate >= limit)


def _highest(entries: Sequence[tuple[float, _Placed]], most: int) -> list[_Placed]:
    """Those with the highest figures, the first of equal ones first."""
    return [placed for _, placed in sorted(entries, key=lambda entry: -entry[0])[:most]]
