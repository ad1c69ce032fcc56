"""Searches for the best assignment of saved tensors to offload targets, for a cut of a virtual
machine.

The search is greedy, over groups of tensors (those of one layer that are handled equally), and then
tensor by tensor. Every step of it is evaluated by
:mod:`~lightning_pipeshift.plan.cost.memory_model`, so the search and the prediction agree. See
:mod:`~lightning_pipeshift.plan.offload.planner` for its purpose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.memory_model import Footprint, Footprints, links_of, tensors_of
from lightning_pipeshift.plan.cost.memory_timeline import HOST, Links, StageTrace
from lightning_pipeshift.plan.cost.workload import Cut, Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.policies import Policy, TensorRecord
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Choice, Swap
from lightning_pipeshift.plan.offload.peers import Lenders, mappings, shares_of
from lightning_pipeshift.plan.schedule.actions import Kind

SMALLEST_BYTES: Final = 1 << 16
"""A smaller tensor is swapped only if nothing else fits."""

_MOST_ROUNDS: Final = 200
_MOST_IMPROVED: Final = 2
_MOST_TRIALS: Final = 2000

ROUNDING: Final = 1 + 1e-9
"""Sums depend on their order by rounding: exceeding a budget by less than this factor is allowed.
"""

_CLOSE: Final = 1.001
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
        policy: is called first.
        recompute: ``"auto"``, ``"full"`` or ``"none"``.
    """

    profile: Profile
    workload: Workload
    links: Links
    limits: tuple[MemoryLimits, ...]
    policy: Policy
    recompute: str = "auto"

    @classmethod
    def of(
        cls,
        profile: Profile,
        workload: Workload,
        cluster: Cluster,
        ranks: Sequence[int],
        policy: Policy,
        recompute: str = "auto",
    ) -> Problem:
        """The problem of a virtual machine whose stages are these ranks of a cluster."""
        devices = [cluster.devices[rank] for rank in ranks]
        limits = tuple(MemoryLimits(device.usable_bytes, device.host_bytes) for device in devices)
        return cls(profile, workload, links_of(cluster, ranks), limits, policy, recompute)

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
        return self.footprint.timeline.step_seconds + self.footprint.late_seconds


class Score(NamedTuple):
    """How good an assignment is; lower is better, compared by the first entry first."""

    excess_bytes: float
    """The bytes above the budgets, of all stages."""
    seconds: float
    """The seconds of the step, plus the weighted time of links."""


Way = Lenders | None
"""The target of a tensor: these stages; ``()``: the host. ``None``: it is recomputed."""

Assigned = Mapping[tuple[int, int], Way]
"""The targets of tensors, by layer and number, without those that are kept."""


class Search:
    """The search for one cut."""

    def __init__(self, problem: Problem, cut: Cut) -> None:
        self._problem = problem
        self._cut = cut
        self._workload = problem.workload
        self._links = problem.links
        self._limits = problem.limits
        self._sizes = problem.sizes
        self._owner = {
            layer: stage
            for stage in range(self._workload.num_stages)
            for layer in range(cut.bounds[stage], cut.bounds[stage + 1])
        }
        self._known: dict[frozenset[tuple[tuple[int, int], Way]], tuple[Footprint, Score]] = {}
        self._num_trials = 0
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
            self._num_trials += 1
            found = self._problem.footprints.of(self._cut_of(assigned), self._swaps(assigned))
            known = self._known[key] = found, self._scored(assigned, found)
        return known

    def traces(self, assigned: Assigned) -> Iterator[tuple[StageTrace, MemoryLimits]]:
        """Yields each stage's trace, and its memory."""
        return zip(self.footprint(assigned).traces, self._limits, strict=True)

    def _scored(self, assigned: Assigned, found: Footprint) -> Score:
        excess = 0.0
        for peak, trace, limit in zip(found.peak_bytes, found.traces, self._limits, strict=True):
            # Rounding errors are ignored, as sums depend on their order.
            excess += max(0.0, peak / ROUNDING - limit.budget_bytes)
            excess += max(0.0, trace.host_bytes / ROUNDING - limit.host_bytes)
        links = sum(self._way_seconds(key, way) for key, way in assigned.items() if way is not None)
        again = {layer for (layer, _), way in assigned.items() if way is None}
        work = sum(float(self._workload.forward[self._owner[layer], layer]) for layer in again)
        seconds = found.timeline.step_seconds + found.late_seconds
        return Score(excess, seconds + _LINK_WEIGHT * (2 * links + work))

    def _way_seconds(self, key: tuple[int, int], way: Lenders) -> float:
        stage, size = self._owner[key[0]], self._sizes[key]
        if not way:
            return self._links.seconds(stage, HOST, size)
        shares = shares_of(stage, way, self._links)
        return max(
            self._links.seconds(stage, lender, size * share / sum(shares))
            for lender, share in zip(way, shares, strict=True)
        )

    def _cut_of(self, assigned: Assigned) -> Cut:
        again = {layer for (layer, _), way in assigned.items() if way is None}
        return replace(self._cut, recompute=frozenset(again))

    def _swaps(self, assigned: Assigned) -> tuple[Swap, ...]:
        groups: dict[tuple[int, Lenders], list[int]] = {}
        for (layer, number), way in sorted(assigned.items(), key=lambda item: item[0]):
            if way is not None:
                groups.setdefault((layer, way), []).append(number)
        return tuple(
            Swap(
                layer,
                tuple(numbers),
                way,
                shares_of(self._owner[layer], way, self._links) if len(way) > 1 else (),
            )
            for (layer, way), numbers in groups.items()
        )

    def result(self, assigned: Assigned) -> Compressed:
        """The result for an assignment."""
        return Compressed(
            self._cut_of(assigned),
            self._swaps(assigned),
            self.footprint(assigned),
            self.uncompressed,
        )

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
            if key[0] in again:
                fixed[key] = None
                self._stays.discard(key)
        # Layers that must not be recomputed, as some of their tensors are swapped or kept.
        self._bound = {layer for layer, _ in {*fixed, *self._stays} if layer not in again}
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
        found = []
        for lenders in self._mappings():
            self._lenders = lenders
            found.append(self._relaxed(self._greedy(start)))
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

    def _ways(self, layer: int) -> list[Way]:
        """The possible targets of a layer's tensors."""
        stage = self._owner[layer]
        found: list[Way] = []
        if self._links.rate(stage, HOST) and self._limits[stage].host_bytes:
            found.append(())
        found += self._lenders.get(stage, ())
        found += [
            (other,)
            for other in range(self._workload.num_stages)
            if self._links.rate(stage, other) and (other,) not in found
        ]
        if self._problem.recompute != "none" and layer not in self._bound:
            found.append(None)
        return found

    def _with(
        self, assigned: Assigned, keys: Iterable[tuple[int, int]], way: Way
    ) -> dict[tuple[int, int], Way]:
        """The same with another target for some tensors; those too small to move are kept."""
        changed = dict(assigned)
        for key in keys:
            changed.pop(key, None)
            if way is None or self._sizes[key] >= SMALLEST_BYTES:
                changed[key] = way
        return changed

    def _greedy(self, start: Assigned) -> Assigned:
        """Repeats the choice of the layer and target with the lowest cost per freed byte, until all
        stages fit.
        """
        now: Assigned = dict(start)
        score = self.score(start)
        for _ in range(_MOST_ROUNDS):
            if not score.excess_bytes:
                break
            options: list[tuple[float, float, int, Assigned, Score]] = []
            for stage in self._in_excess(now):
                for changed in self._steps(now, stage):
                    after = self.score(changed)
                    gain = score.excess_bytes - after.excess_bytes
                    if gain > 0:
                        cost = max(0.0, after.seconds - score.seconds)
                        options.append((cost / gain, -gain, len(options), changed, after))
            if not options:
                break
            _, _, _, now, score = min(options, key=lambda option: option[:3])
        return now

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
                layer in self._bound,
            )
            alike.setdefault(signature, []).append(layer)
        for layers in alike.values():
            for layer in sorted({layers[0], layers[-1]}):
                for part, rest in self._parts(now, groups[layer], one_by_one):
                    for way in self._ways(layer):
                        if way is not None or not one_by_one:
                            yield self._with(rest, part, way)
                    yield {key: way for key, way in rest.items() if key not in part}

    def _parts(
        self, now: Assigned, keys: Sequence[tuple[int, int]], one_by_one: bool
    ) -> Iterator[tuple[Sequence[tuple[int, int]], Assigned]]:
        """Tensors of a layer that may change their target together, each with its assignment."""
        if not one_by_one:
            yield keys, now
        elif len(keys) > 1:
            # Then no tensor of the layer is recomputed.
            rest = {key: way for key, way in now.items() if way is not None or key not in keys}
            # One of each group of equal tensors.
            alike = {(self._sizes[key], now.get(key, "stays")): key for key in keys}
            for one in alike.values():
                yield [one], rest

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
                    after = self.score(changed)
                    if after < score:
                        now, score = changed, after
                        break
            if not score < before:
                break
        return self._relaxed(now)

    def _is_good(self, score: Score) -> bool:
        # The step without swaps is a lower bound.
        least = self.uncompressed.timeline.step_seconds
        return not score.excess_bytes and score.seconds <= _CLOSE * least

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
                if self._num_trials > _MOST_TRIALS:
                    return None
                other = self._improved(self._relaxed(self._greedy(changed)))
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
            tensors = [key for keys in groups.values() for key in keys if now.get(key) is not None]
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

    def _mappings(self) -> list[dict[int, list[Lenders]]]:
        """The best mappings of stages to lenders, by how well they fill spare memory and links (the
        source's mapping search).
        """
        found = self.footprint(self._fixed)
        spare = [
            limit.budget_bytes - peak
            for peak, limit in zip(found.peak_bytes, self._limits, strict=True)
        ]
        needs = {stage: -left for stage, left in enumerate(spare) if left < 0}
        return [
            {stage: [lenders] for stage, lenders in mapping.items() if lenders}
            for mapping in mappings(needs, spare, self._links)
        ]


def _roughly(seconds: float) -> int | None:
    """A key that is equal for times that differ by measurement noise only."""
    return round(math.log(seconds) / math.log(_LIKE_SECONDS)) if seconds > 0 else None
