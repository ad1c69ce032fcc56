"""Searches for the best assignment of saved tensors to offload targets, for a cut of a virtual
machine.

It begins with what is fixed, and with all recomputation that costs no time, so that stages with
idle time have memory to lend. Stages that lack memory then use one way to handle tensors after the
other, each for as many tensors as its cost per byte stays low; and the result is improved layer by
layer, and tensor by tensor. Every step of it is evaluated by
:mod:`~lightning_pipeshift.plan.cost.memory_model`, so the search and the prediction agree. See
:mod:`~lightning_pipeshift.plan.offload.planner` for its purpose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.memory_model import Footprint, Footprints, links_of, tensors_of
from lightning_pipeshift.plan.cost.memory_timeline import HOST, Links, StageTrace
from lightning_pipeshift.plan.cost.workload import ROUNDING, Cut, Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.policies import Policy, TensorRecord
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT, Choice, Swap
from lightning_pipeshift.plan.offload.peers import Lenders, mappings, shares_of
from lightning_pipeshift.plan.schedule.actions import Kind

SMALLEST_BYTES: Final = 1 << 16
"""A smaller tensor is swapped only if nothing else fits."""

_MOST_ROUNDS: Final = 200
_MOST_IMPROVED: Final = 2
_MOST_TRIALS: Final = 500
_MOST_TRIED_TENSORS: Final = 1 << 17
"""How many assignments are tried, and how many tensors these may have together: beyond that, a
result is not improved any more."""

CLOSE: Final = 1.001
"""A result within this factor of the lower bound is not improved further."""

_LIKE_SECONDS: Final = 1.2
"""Layers whose forwards differ by less than this factor count as equal."""

_LINK_WEIGHT: Final = 1e-3
"""The weight of a second of a link's time, in seconds of the step: of equally fast plans, the one
that moves less is better."""


class MemoryLimits(NamedTuple):
    """The memory of a stage's device, and its part of the host's memory.

    Args:
        budget_bytes: of the device.
        host_bytes: of the host, for swapped tensors.
    """

    budget_bytes: float
    host_bytes: float


@dataclass(frozen=True, eq=False)
class Problem:
    """The input of the search.

    Args:
        profile: of the model.
        workload: of the virtual machine.
        links: of the virtual machine.
        limits: of its stages.
        policy: is called first; ``None`` if no saved tensor may be swapped, as there is no
            ``MemoryCompression``.
        recompute: ``"auto"``, ``"full"`` or ``"none"``.
        optimizer_on_host: the layers whose optimizer state is in host memory between two steps.
        weights_on_host: the layers whose weights are in host memory while they wait.
        caution: see :class:`~lightning_pipeshift.plan.arrange.request.PlanRequest`.
    """

    profile: Profile
    workload: Workload
    links: Links
    limits: tuple[MemoryLimits, ...]
    policy: Policy | None
    recompute: str = "auto"
    caution: float = 2.0
    optimizer_on_host: frozenset[int] = frozenset()
    weights_on_host: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        profile: Profile,
        workload: Workload,
        cluster: Cluster,
        ranks: Sequence[int],
        policy: Policy | None,
        recompute: str = "auto",
        caution: float = 2.0,
    ) -> Problem:
        """The problem of a virtual machine whose stages are these ranks of a cluster."""
        devices = [cluster.devices[rank] for rank in ranks]
        limits = tuple(MemoryLimits(device.usable_bytes, device.host_bytes) for device in devices)
        return cls(profile, workload, links_of(cluster, ranks), limits, policy, recompute, caution)

    @cached_property
    def footprints(self) -> Footprints:
        """The footprints of all plans for it."""
        return Footprints(self.profile, self.workload, self.links)

    @cached_property
    def sizes(self) -> dict[tuple[int, int], float]:
        """The bytes of each saved tensor for a microbatch, by layer and number."""
        return {
            (layer, number): size
            for layer, sizes in enumerate(self.footprints.sizes)
            for number, size in sizes.items()
            if size
        }


@dataclass(frozen=True)
class Compressed:
    """A virtual machine's plan for its saved tensors.

    Args:
        cut: the owners of the layers, and the recomputed layers.
        swaps: the swapped tensors.
        footprint: time and memory of the plan.
        uncompressed: those without swaps.
    """

    cut: Cut
    swaps: tuple[Swap, ...]
    footprint: Footprint
    uncompressed: Footprint

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.footprint.seconds


class Score(NamedTuple):
    """How good an assignment is; lower is better, compared by the first entry first."""

    excess_bytes: float
    """The bytes above the budgets, of all stages."""
    seconds: float
    """The seconds of the step, plus the weighted time of links."""


Way = Lenders | None
"""The target of a tensor: these stages; ``()``: the host. ``None``: it is recomputed."""


@dataclass(frozen=True)
class Mixed:
    """A way for a whole layer: tensors that take more than their share of its forward to compute,
    by their bytes, are kept or swapped, and the others are recomputed from them.

    Args:
        held: the target of the former; ``None``: they are kept.
    """

    held: Lenders | None


Assigned = Mapping[tuple[int, int], Way]
"""The targets of tensors, by layer and number, without those that are kept."""


def most_trials(num_tensors: int) -> int:
    """How many assignments of this many tensors are tried."""
    return min(_MOST_TRIALS, _MOST_TRIED_TENSORS // max(1, num_tensors))


class _Part(NamedTuple):
    """The part of an assignment that is about one layer.

    Args:
        layer: the layer.
        is_recomputed: whether it is recomputed.
        swaps: of its tensors.
        work_seconds: of its recomputation and transfers, there and back.
    """

    layer: int
    is_recomputed: bool
    swaps: tuple[Swap, ...]
    work_seconds: float


class Search:
    """The search for one cut."""

    def __init__(self, problem: Problem, cut: Cut) -> None:
        self._problem = problem
        self._cut = cut = replace(
            cut,
            optimizer_on_host=problem.optimizer_on_host,
            weights_on_host=problem.weights_on_host,
        )
        self._workload = problem.workload
        self._links = problem.links
        self._limits = problem.limits
        self._sizes = problem.sizes
        self._owner = {
            layer: stage
            for stage in range(self._workload.num_stages)
            for layer in range(cut.bounds[stage], cut.bounds[stage + 1])
        }
        self._spares = {
            (layer, tensor.number): tensor.spares
            for layer, profile in enumerate(problem.profile.layers)
            for tensor in profile.tensors
            if tensor.spares
        }
        self._costly = {
            (layer, number)
            for (layer, number), spares in self._spares.items()
            if spares * sum(problem.footprints.sizes[layer].values())
            > self._sizes.get((layer, number), math.inf)
        }
        self._inside: dict[int, list[int]] = {}
        for layer, number in self._sizes:
            self._inside.setdefault(layer, []).append(number)
        self._known: dict[frozenset[tuple[tuple[int, int], Way]], tuple[Footprint, Score]] = {}
        self._parts: dict[tuple[int, tuple[tuple[int, Way], ...]], _Part] = {}
        self.num_trials = 0
        """How many assignments have been evaluated."""
        self._most_trials = most_trials(len(self._sizes))
        self.uncompressed = self.footprint({})
        self._lenders: dict[int, list[Lenders]] = {}
        self._fixed = self._asked()
        if problem.recompute == "full":
            self._fixed = dict.fromkeys(self._sizes, None)

    # --- the evaluation of an assignment ---

    def footprint(self, assigned: Assigned) -> Footprint:
        """The time and memory of an assignment."""
        return self._evaluated(assigned)[0]

    def score(self, assigned: Assigned) -> Score:
        """The score of an assignment."""
        return self._evaluated(assigned)[1]

    def _evaluated(self, assigned: Assigned) -> tuple[Footprint, Score]:
        key = frozenset(assigned.items())
        known = self._known.get(key)
        if known is None:
            self.num_trials += 1
            layers: dict[int, list[tuple[int, Way]]] = {}
            for (layer, number), way in assigned.items():
                layers.setdefault(layer, []).append((number, way))
            parts = [self._part(layer, tuple(sorted(layers[layer]))) for layer in sorted(layers)]
            again = frozenset(part.layer for part in parts if part.is_recomputed)
            swaps = [swap for part in parts for swap in part.swaps]
            found = self._problem.footprints.of(replace(self._cut, recompute=again), swaps)
            score = self._scored(found, math.fsum(part.work_seconds for part in parts))
            known = self._known[key] = found, score
        return known

    def _part(self, layer: int, ways: tuple[tuple[int, Way], ...]) -> _Part:
        """The part of an assignment that is about one layer, whose tensors go these ways."""
        if (layer, ways) not in self._parts:
            stage = self._owner[layer]
            is_recomputed = any(way is None for _, way in ways)
            work = 0.0
            kept: tuple[int, ...] = ()
            if is_recomputed:
                work = float(self._workload.forward[stage, layer])
                named = dict(ways)
                kept = tuple(
                    number
                    for number in self._inside[layer]
                    if number not in named and number < FRONT
                )
            groups: dict[Lenders, list[int]] = {}
            for number, way in ways:
                if way is not None:
                    groups.setdefault(way, []).append(number)
                    work += 2 * self._way_seconds((layer, number), way)
            swaps = tuple(
                Swap(
                    layer,
                    tuple(numbers),
                    way,
                    shares_of(stage, way, self._links) if len(way) > 1 else (),
                )
                for way, numbers in groups.items()
            )
            if kept:
                swaps += (Swap(layer, kept, stays=True),)
            self._parts[layer, ways] = _Part(layer, is_recomputed, swaps, work)
        return self._parts[layer, ways]

    def traces(self, assigned: Assigned) -> Iterator[tuple[StageTrace, MemoryLimits]]:
        """Yields each stage's trace, and its memory."""
        return zip(self.footprint(assigned).traces, self._limits, strict=True)

    def _scored(self, found: Footprint, work_seconds: float) -> Score:
        excess = 0.0
        for peak, trace, limit in zip(found.peak_bytes, found.traces, self._limits, strict=True):
            # Rounding errors are ignored, as sums depend on their order.
            excess += max(0.0, peak / ROUNDING - limit.budget_bytes)
            excess += max(0.0, trace.host_bytes / ROUNDING - limit.host_bytes)
        seconds = found.timeline.step_seconds + found.late_seconds
        return Score(excess, seconds + _LINK_WEIGHT * work_seconds)

    def _way_seconds(self, key: tuple[int, int], way: Lenders) -> float:
        stage, size = self._owner[key[0]], self._sizes[key]
        if not way:
            return self._links.seconds(stage, HOST, size)
        shares = shares_of(stage, way, self._links)
        return max(
            self._links.seconds(stage, lender, size * share / sum(shares))
            for lender, share in zip(way, shares, strict=True)
        )

    def result(self, assigned: Assigned) -> Compressed:
        """The result for an assignment."""
        again = frozenset(layer for (layer, _), way in assigned.items() if way is None)
        layers = itertools.groupby(sorted(assigned.items(), key=_by_key), lambda item: item[0][0])
        swaps = tuple(
            swap
            for layer, items in layers
            for swap in self._part(layer, tuple((key[1], way) for key, way in items)).swaps
        )
        cut = replace(self._cut, recompute=again)
        return Compressed(cut, swaps, self.footprint(assigned), self.uncompressed)

    # --- policies ---

    @property
    def asked(self) -> dict[tuple[int, int], Choice]:
        """The policy's choice for each tensor."""
        found = dict.fromkeys(self._stays, Choice.KEEP)
        for key, way in self._fixed.items():
            found[key] = Choice.RECOMPUTE if way is None else Choice.DEVICE if way else Choice.HOST
        return found

    def records(self) -> Iterator[TensorRecord]:
        """Every tensor, as policies see it."""
        in_flight = self._workload.in_flight
        for (layer, number), size in self._sizes.items():
            stage = self._owner[layer]
            profile = self._problem.profile.layers[layer]
            tensor = next(t for t in tensors_of(profile) if t.number == number)
            others = [s for s in range(self._workload.num_stages) if s != stage]
            yield TensorRecord(
                layer=profile.name,
                index=layer,
                number=number,
                num_bytes=round(size),
                shape=tensor.shape,
                dtype=tensor.dtype,
                maker=tensor.maker,
                stage=stage,
                in_flight=in_flight[stage],
                interval_seconds=self._interval(layer),
                recompute_seconds=float(self._workload.forward[stage, layer]),
                host_seconds=self._links.seconds(stage, HOST, size),
                device_seconds=min(
                    (self._links.seconds(stage, other, size) for other in others),
                    default=math.inf,
                ),
            )

    def _interval(self, layer: int) -> float:
        stage = self._owner[layer]
        row = self.uncompressed.timeline.rows[stage]
        forwards = {s.action.microbatch: s for s in row if s.action.kind is Kind.FORWARD}
        backwards = [s for s in row if s.action.kind is Kind.BACKWARD]
        own = range(self._cut.bounds[stage], self._cut.bounds[stage + 1])
        # The layers of the stage that run between its forward and its backward.
        later = [other for other in own if other > layer]
        between = float(sum(self._workload.forward[stage, later]))
        between += float(sum(self._workload.backward[stage, later]))
        gap = min((b.start - forwards[b.action.microbatch].end for b in backwards), default=0.0)
        return max(0.0, gap) + between

    def _asked(self) -> dict[tuple[int, int], Way]:
        """The targets that the policy chooses, and (in ``_stays``) the tensors that it keeps.

        Raises:
            PlanError: it chooses a target that cannot be reached.
        """
        self._stays: set[tuple[int, int]] = set()
        fixed: dict[tuple[int, int], Way] = {}
        again: set[int] = set()
        assert self._problem.policy is not None
        for record in self.records():
            key = record.index, record.number
            choice = self._problem.policy.choose(record)
            if choice is None:
                continue
            if choice is Choice.KEEP:
                self._stays.add(key)
            elif choice is Choice.RECOMPUTE:
                again.add(record.index)
            elif choice is Choice.HOST:
                self._require_way(record, choice, record.host_seconds)
                fixed[key] = ()
            elif choice is Choice.DEVICE:
                self._require_way(record, choice, record.device_seconds)
                fixed[key] = self._default_lenders(record.stage)
        for key in self._sizes:
            if key[0] in again and key not in fixed and key not in self._stays:
                fixed[key] = None
        return fixed

    def _require_way(self, record: TensorRecord, choice: Choice, seconds: float) -> None:
        if not math.isfinite(seconds):
            name = type(self._problem.policy).__name__
            raise PlanError(
                f"the policy {name} moves tensor {record.number} of layer {record.layer!r} with "
                f"{choice}, but it has no connection to stage {record.stage}. If "
                f"record.{choice.value}_seconds is infinite, return None or Choice.KEEP"
            )

    def _default_lenders(self, stage: int) -> Lenders:
        """The default lender for a stage: the one with the most free memory."""
        peaks = self.uncompressed.peak_bytes
        others = [s for s in range(self._workload.num_stages) if self._links.rate(stage, s)]
        return (max(others, key=lambda s: (self._limits[s].budget_bytes - peaks[s], -peaks[s])),)

    # --- the search ---

    def best(self) -> Assigned:
        """The best assignment that is found; it may exceed a budget."""
        start = dict(self._fixed)
        if not self.score(start).excess_bytes:
            return start
        found: list[Assigned] = []
        for begin, lenders in self._beginnings(start):
            self._lenders = lenders
            found.append(self._relaxed(self._filled(begin)))
            score = self.score(found[-1])
            # Both beginnings at least: of equally fast ones, one may move and recompute less.
            is_good = self._is_good(score) and len(found) > 1
            if is_good or (self._is_over and not score.excess_bytes):
                break
        else:
            # Tensors of any size: if nothing else fits, small ones are swapped too.
            last_resorts: tuple[Way, ...] = (None, ())
            for way in last_resorts:
                keys = [key for key in self._free() if way in self._ways(key[0])]
                found.append(self._relaxed({**dict.fromkeys(keys, way), **start}))
        best = sorted(found, key=self.score)[:_MOST_IMPROVED]
        return self._kicked(min((self._improved(one) for one in best), key=self.score))

    def _free(self) -> list[tuple[int, int]]:
        """The tensors that the policy leaves open."""
        return [key for key in self._sizes if key not in self._fixed and key not in self._stays]

    def _groups(self, stage: int | None = None) -> dict[int, list[tuple[int, int]]]:
        """The free tensors by layer, of one stage or of all."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for key in self._free():
            if stage is None or self._owner[key[0]] == stage:
                groups.setdefault(key[0], []).append(key)
        return groups

    def _ways(self, layer: int) -> list[Way | Mixed]:
        """The possible targets of a layer's tensors."""
        stage = self._owner[layer]
        found: list[Way | Mixed] = []
        if self._links.rate(stage, HOST) and self._limits[stage].host_bytes:
            found.append(())
        found += self._lenders.get(stage, ())
        found += [
            (other,)
            for other in range(self._workload.num_stages)
            if self._links.rate(stage, other) and (other,) not in found
        ]
        if self._problem.recompute != "none":
            if any((layer, number) in self._costly for number in self._inside.get(layer, ())):
                found += [Mixed(None), *(Mixed(way) for way in found if isinstance(way, tuple))]
            found.append(None)
        return found

    def _with(
        self, assigned: Assigned, keys: Iterable[tuple[int, int]], way: Way | Mixed
    ) -> dict[tuple[int, int], Way]:
        """The same with another target for some tensors; those too small to move are kept."""
        changed = dict(assigned)
        for key in keys:
            changed.pop(key, None)
            target = self._target(key, way)
            if target != "stays":
                changed[key] = target
        return changed

    def _target(self, key: tuple[int, int], way: Way | Mixed) -> Way | Literal["stays"]:
        """Where a tensor goes if its layer is handled in a way."""
        if isinstance(way, Mixed):
            if key not in self._costly:
                return None
            if way.held is None:
                return "stays"
            way = way.held
        if way is not None and self._sizes[key] < SMALLEST_BYTES:
            return "stays"
        return way

    def _beginnings(self, start: Assigned) -> Iterator[tuple[Assigned, dict[int, list[Lenders]]]]:
        """Assignments to begin with, each with lenders: what is fixed, or with all recomputation
        that costs no time, so that a stage with idle time has room for others.
        """
        roomy = self._with_free_recomputation(start)
        for lenders, other in itertools.zip_longest(self._mappings(start), self._mappings(roomy)):
            if roomy != start:
                yield roomy, other or {}
            yield start, lenders or {}

    def _with_free_recomputation(self, start: Assigned) -> Assigned:
        """Recomputes as many layers of each stage as make the step no longer."""
        now = dict(start)
        most = CLOSE * self.score(start).seconds
        for stage in range(self._workload.num_stages):
            groups = self._candidates(now, stage, None)
            fewest, many = 0, len(groups)
            while fewest < many:
                middle = (fewest + many + 1) // 2
                changed = self._with(now, itertools.chain(*groups[:middle]), None)
                if self.score(changed).seconds <= most:
                    fewest = middle
                else:
                    many = middle - 1
            now = self._with(now, itertools.chain(*groups[:fewest]), None)
        return now

    def _filled(self, start: Assigned) -> Assigned:
        """Frees memory stage by stage, each time in the way with the lowest cost per byte, until
        all stages fit.

        A way is used for as many tensors as its cost per byte stays low; so the number of trials
        depends on how many ways there are, and how often one of them is used up, and hardly on the
        number of tensors.
        """
        now: Assigned = dict(start)
        for _ in range(_MOST_ROUNDS):
            before = now
            for stage in self._in_excess(now):
                now = self._with_more(now, stage)
            if now is before or self._is_over:
                break
            # The memory that is left, which other stages may lend.
            self._lenders = self._mappings(now)[0]
        return now

    def _with_more(self, now: Assigned, stage: int) -> Assigned:
        """Frees memory of a stage in the best way, as long as no other way becomes better."""
        score = self.score(now)
        # A rate at which all stages together would lose next to nothing.
        free = (CLOSE - 1) * score.seconds / score.excess_bytes if score.excess_bytes else 0.0
        options: list[tuple[float, int, Way | Mixed, Any, Assigned]] = []
        for way in self._common_ways(stage):
            groups = self._candidates(now, stage, way)
            if groups:
                changed = self._with(now, groups[0], way)
                rate = _rate(score, self.score(changed))
                if math.isfinite(rate):
                    options.append((rate, len(options), way, groups, changed))
        if not options:
            return now
        rate, _, way, groups, now = min(options, key=lambda option: option[:2])
        next_rate = sorted(option[0] for option in options)[:2][-1]
        limit = max(_LIKE_SECONDS * rate, next_rate, free)
        count = 1
        while count < len(groups) and stage in self._in_excess(now):
            last, score = count, self.score(now)
            count = min(2 * count, len(groups))
            more = self._with(now, itertools.chain(*groups[last:count]), way)
            if _rate(score, self.score(more)) > limit:
                break
            now = more
        return now

    def _lacks(self, assigned: Assigned, stage: int) -> bool:
        """Whether a stage or its host exceeds its budget."""
        found, limit = self.footprint(assigned), self._limits[stage]
        return (
            found.peak_bytes[stage] / ROUNDING > limit.budget_bytes
            or found.traces[stage].host_bytes / ROUNDING > limit.host_bytes
        )

    def _common_ways(self, stage: int) -> list[Way | Mixed]:
        """The ways that are open to some layer of a stage; one set of lenders at most."""
        own = range(*self._cut.bounds[stage : stage + 2])
        ways = dict.fromkeys(way for layer in own for way in self._ways(layer))
        lenders = self._lenders.get(stage)

        def is_asked(way: Way | Mixed) -> bool:
            target = way.held if isinstance(way, Mixed) else way
            return not target or not lenders or target in lenders

        return [way for way in ways if is_asked(way)]

    def _candidates(
        self, now: Assigned, stage: int, way: Way | Mixed
    ) -> list[Sequence[tuple[int, int]]]:
        """Tensors that may change to a way together, the best first: for a recomputation a layer
        each, those that free most for their time; for swaps a tensor each, those with the longest
        time until they are needed.
        """
        groups = [
            (layer, keys)
            for layer, keys in self._groups(stage).items()
            if way in self._ways(layer)
            and any(now.get(key, "stays") != self._target(key, way) for key in keys)
        ]
        if way is None or isinstance(way, Mixed):
            seconds = self._workload.forward[stage]

            def price(group: tuple[int, list[tuple[int, int]]]) -> float:
                leaves = (
                    self._sizes[key]
                    for key in group[1]
                    if key not in now and self._target(key, way) != "stays"
                )
                freed = sum(leaves)
                return float(seconds[group[0]]) / freed if freed else math.inf

            return [keys for _, keys in sorted(groups, key=price)]
        # What a stage without room has been lent goes elsewhere.
        full = {s for s in range(self._workload.num_stages) if self._lacks(now, s)}
        return [
            [key]
            for _, keys in groups
            for key in sorted(keys, key=lambda key: -self._sizes[key])
            if self._sizes[key] >= SMALLEST_BYTES
            and (key not in now or (now[key] != way and full.intersection(now[key] or ())))
        ]

    def _in_excess(self, assigned: Assigned) -> list[int]:
        """The stages that exceed their budget, and those whose tensors cause others to exceed
        it.
        """
        found = self.footprint(assigned)
        stages = [
            stage
            for stage, (peak, limit) in enumerate(zip(found.peak_bytes, self._limits, strict=True))
            if peak > limit.budget_bytes
        ]
        borrowing = {
            self._owner[layer]
            for (layer, _), way in assigned.items()
            if way and any(lender in stages for lender in way)
        }
        full = {
            stage
            for stage, (trace, limit) in enumerate(zip(found.traces, self._limits, strict=True))
            if trace.host_bytes > limit.host_bytes
        }
        return sorted({*stages, *borrowing, *full})

    def _steps(
        self, now: Assigned, stage: int, one_by_one: bool = False
    ) -> Iterator[dict[tuple[int, int], Way]]:
        """Assignments that differ in one layer of a stage, or in one tensor; among equal layers
        only the first and the last are tried.
        """
        groups = self._groups(stage)
        alike: dict[tuple[object, ...], list[int]] = {}
        for layer, keys in sorted(groups.items()):
            signature = (
                tuple((self._sizes[key], now.get(key, "stays")) for key in keys),
                _roughly(float(self._workload.forward[stage, layer])),
            )
            alike.setdefault(signature, []).append(layer)
        for layers in alike.values():
            for layer in sorted({layers[0], layers[-1]}):
                for part in self._changeable(now, groups[layer], one_by_one):
                    for way in self._ways(layer):
                        yield self._with(now, part, way)
                    yield {key: way for key, way in now.items() if key not in part}

    def _changeable(
        self, now: Assigned, keys: Sequence[tuple[int, int]], one_by_one: bool
    ) -> Iterator[Sequence[tuple[int, int]]]:
        """Tensors of a layer that may change their target together."""
        if not one_by_one:
            yield keys
        elif len(keys) > 1:
            # One of each group of equal tensors.
            alike = {
                (self._sizes[key], self._spares.get(key, 0.0), now.get(key, "stays")): key
                for key in keys
            }
            for one in alike.values():
                yield [one]

    def _improved(self, assigned: Assigned) -> Assigned:
        """Improves an assignment layer by layer, and tensor by tensor, until no change helps."""
        now, score = dict(assigned), self.score(assigned)
        for _ in range(_MOST_ROUNDS):
            if self._is_good(score):
                break
            before = score
            for stage, one_by_one in itertools.product(
                range(self._workload.num_stages), (False, True)
            ):
                for changed in self._steps(now, stage, one_by_one):
                    if self._is_over:
                        break
                    after = self.score(changed)
                    if after < score:
                        now, score = changed, after
                        break
            if not score < before:
                break
        return self._relaxed(now)

    @property
    def _is_over(self) -> bool:
        """Whether enough has been tried."""
        return self.num_trials > self._most_trials

    def _is_good(self, score: Score) -> bool:
        # The step without swaps is a lower bound.
        least = self.uncompressed.timeline.step_seconds
        return not score.excess_bytes and score.seconds <= CLOSE * least

    def _kicked(self, assigned: Assigned) -> Assigned:
        """Leaves a local optimum: makes a change for the worse, repairs and improves the result,
        and repeats this until nothing better is found.
        """
        now = assigned
        while not self._is_good(self.score(now)):
            better = self._detour(now)
            if better is None:
                break
            now = better
        return now

    def _detour(self, now: Assigned) -> Assigned | None:
        """The first better result found in this way, if there are trials left."""
        for stage, one_by_one in itertools.product(range(self._workload.num_stages), (False, True)):
            for changed in self._steps(now, stage, one_by_one):
                if self._is_over:
                    return None
                other = self._improved(self._relaxed(self._filled(changed)))
                if self.score(other) < self.score(now):
                    return other
        return None

    def _relaxed(self, assigned: Assigned) -> dict[tuple[int, int], Way]:
        """Keeps as many tensors as fit: whole layers first, then tensors, small ones first."""
        now = dict(assigned)
        if self.score(now).excess_bytes:
            return now
        for stage in range(self._workload.num_stages):
            groups = self._groups(stage)
            layers = [[key for key in groups[layer] if key in now] for layer in groups]
            # The last layer's tensors have the least time for transfers.
            now = self._without_most(now, [keys for keys in reversed(layers) if keys])
            # A dropped tensor that spares nothing would only take memory.
            tensors = [
                key
                for keys in groups.values()
                for key in keys
                if key in now and (now[key] is not None or key in self._spares)
            ]
            tensors.sort(key=lambda key: (self._sizes[key], -key[0]))
            now = self._without_most(now, [[key] for key in tensors])
        return now

    def _without_most(
        self, assigned: Assigned, groups: Sequence[Sequence[tuple[int, int]]]
    ) -> dict[tuple[int, int], Way]:
        """Keeps as many groups, from the first on, as fit."""

        def without(count: int) -> dict[tuple[int, int], Way]:
            stays = {key for group in groups[:count] for key in group}
            return {key: way for key, way in assigned.items() if key not in stays}

        fewest, most = 0, len(groups)
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self.score(without(middle)).excess_bytes:
                most = middle - 1
            else:
                fewest = middle
        return without(fewest)

    # --- lenders ---

    def _mappings(self, assigned: Assigned) -> list[dict[int, list[Lenders]]]:
        """The best mappings of stages to lenders, by how well they fill spare memory and links (the
        source's mapping search).
        """
        found = self.footprint(assigned)
        spare = [
            limit.budget_bytes - peak
            for peak, limit in zip(found.peak_bytes, self._limits, strict=True)
        ]
        needs = {stage: -left for stage, left in enumerate(spare) if left < 0}
        return [
            {stage: [lenders] for stage, lenders in mapping.items() if lenders}
            for mapping in mappings(needs, spare, self._links)
        ]


def _by_key(item: tuple[tuple[int, int], Way]) -> tuple[int, int]:
    return item[0]


def _rate(before: Score, after: Score) -> float:
    """The seconds that a change costs for each freed byte; infinite if it frees none."""
    gain = before.excess_bytes - after.excess_bytes
    return max(0.0, after.seconds - before.seconds) / gain if gain > 0 else math.inf


def _roughly(seconds: float) -> int | None:
    """A key that is equal for times that differ by measurement noise only."""
    return round(math.log(seconds) / math.log(_LIKE_SECONDS)) if seconds > 0 else None
