"""Searches for the best assignment of saved tensors to offload targets, for a cut of a virtual
machine.

CN114880130B, after MPress (HPCA 2023), steps 2 to 4: device-to-device swaps where the time is
short, host swaps where there is time for them, recomputation where both cost more, and any fitting
alternative if memory or time is missing. Here the simulator also models the stages' idle time, so
the search finds that a recomputation in it costs nothing.

Stages that lack memory use one way after the other, each for as many units as its cost per byte
stays low; then as much as fits is kept again, and units change one by one while that helps. A unit
is what of a layer is handled together: its tensors that take more than their share of its forward
to compute, or the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_timeline import HOST
from lightning_pipeshift.plan.search.assignment import Assigned, Assignments, Score, Tensor, Way
from lightning_pipeshift.plan.search.policy_choices import chosen
from lightning_pipeshift.plan.search.problem import Problem

Unit = list[Tensor]

Target = Way | Literal["keep"]
KEEP: Final = "keep"


class AssignmentSearch:
    """The search for one cut.

    Args:
        problem: the virtual machine's.
        cut: the layers of each stage.
    """

    def __init__(self, problem: Problem, cut: Cut) -> None:
        self._problem, self._links, self._effort = problem, problem.links, problem.effort
        self.assignments = Assignments(problem, cut)
        self._score, self._sizes = self.assignments.score, problem.sizes
        self._owner, self._stages = self.assignments.owner, self.assignments.stages
        #: The stages that have memory to lend.
        spare = problem.spare_bytes(self.assignments.uncompressed)
        self._roomy = [stage for stage in self._stages if spare[stage] > 0]
        #: By stage and way, the last known cost of a freed byte.
        self._rates: dict[tuple[int, Way], float] = {}
        self._fixed, kept = chosen(self.assignments)
        spares = {
            (layer, tensor.number): tensor.spares
            for layer, profile in enumerate(problem.profile.layers)
            for tensor in profile.tensors
        }
        #: By stage, what the policy leaves open.
        self._units: list[list[Unit]] = [[] for _ in self._stages]
        for layer, keys in sorted(self.assignments.tensors.items()):
            saved = sum(self._sizes[key] for key in keys)
            open_keys = [key for key in keys if key not in self._fixed and key not in kept]
            costly = [k for k in open_keys if spares.get(k, 0.0) * saved > self._sizes[k]]
            others = [key for key in open_keys if key not in costly]
            self._units[self._owner[layer]] += [unit for unit in (costly, others) if unit]

    def best(self) -> Assigned:
        """The best assignment that is found; it may exceed a budget."""
        start = dict(self._fixed)
        if not self._score(start).excess_bytes:
            return start
        found = [self._relaxed(self._filled(start))]
        if self._score(found[0]).excess_bytes:
            # Tensors of any size: if nothing else fits, small ones are swapped too.
            known = {way: None for stage in self._stages for way in self._ways_of(stage)}
            for preferred in known:
                everything = dict(start)
                for unit in itertools.chain(*self._units):
                    ways = sorted(
                        self._ways(unit), key=lambda way: (way != preferred, way is not None)
                    )
                    everything |= {key: way for way in ways[:1] for key in unit}
                found.append(self._relaxed(self._filled(everything)))
        return min(map(self._improved, sorted(found, key=self._score)[:2]), key=self._score)

    @property
    def _is_over(self) -> bool:
        """Whether enough has been tried."""
        return self.assignments.num_trials > self._problem.most_trials

    def _is_good(self, score: Score) -> bool:
        # The step without swaps is a lower bound.
        least = self.assignments.uncompressed.timeline.step_seconds
        return not score.excess_bytes and score.seconds <= self._effort.close * least

    # What may change.

    def _ways(self, unit: Unit) -> list[Way]:
        """How a unit may be handled, if it is not kept."""
        return self._ways_of(self._owner[unit[0][0]])

    def _ways_of(self, stage: int) -> list[Way]:
        ways: list[Way] = []
        if self._links.rate(stage, HOST) and self._problem.limits[stage].host_bytes:
            ways.append(())
        ways += [(other,) for other in self._stages if self._links.rate(stage, other)]
        together = tuple(other for other in self._roomy if self._links.rate(stage, other))
        ways += [together] if len(together) > 1 else []
        return ways if self._problem.recompute == "none" else [*ways, None]

    def _target(self, key: Tensor, way: Target) -> Target:
        """Where a tensor goes if its unit goes there; small ones do not move."""
        is_small = self._sizes[key] < self._effort.smallest_bytes
        return KEEP if is_small and way is not None else way

    def _with(self, assigned: Assigned, keys: Iterable[Tensor], way: Target) -> dict[Tensor, Way]:
        """The same with another way for some tensors."""
        changed = dict(assigned)
        for key in keys:
            changed.pop(key, None)
            target = self._target(key, way)
            if target != KEEP:
                changed[key] = target
        return changed

    # Until it fits.

    def _filled(self, start: Assigned) -> Assigned:
        """Frees memory stage by stage, each time in the way of the lowest cost per byte, until all
        stages fit.
        """
        now = start
        while True:
            before = now
            for stage in self._short_stages(now):
                now = self._with_more(now, stage)
            if now is before or self._is_over:
                return now

    def _short_stages(self, assigned: Assigned) -> list[int]:
        """The stages that lack memory, and those whose tensors make others lack it."""
        lacking = self.assignments.lacking(assigned)
        borrowing = {
            self._owner[layer]
            for (layer, _), way in assigned.items()
            if way and not lacking.isdisjoint(way)
        }
        return sorted(lacking | borrowing)

    def _with_more(self, now: Assigned, stage: int) -> Assigned:
        """Frees memory of a stage in the best way, as long as no other becomes better."""
        score = self._score(now)
        # Rates hardly ever fall as memory fills up: an earlier one is a lower bound.
        known = {way: self._rates.get((stage, way), 0.0) for way in self._ways_of(stage)}
        candidates: dict[Way, list[Unit]] = {}
        for way in sorted(known, key=known.__getitem__):
            if any(known[tried] <= known[way] for tried in candidates):
                break
            rate = math.inf
            if units := self._candidates(now, stage, way):
                rate = _rate(score, self._score(self._with(now, units[0], way)))
            if math.isfinite(rate):
                candidates[way] = units
            known[way] = self._rates[stage, way] = rate
        if not candidates:
            return now
        best = min(candidates, key=known.__getitem__)
        second = sorted(filter(math.isfinite, known.values()))[:2][-1]
        # A rate at which all stages together would lose next to nothing.
        free = (self._effort.close - 1) * score.seconds / max(score.excess_bytes, 1.0)
        limit = max(self._effort.alike * known[best], second, free)
        units, count = candidates[best], 1
        now = self._with(now, units[0], best)
        while count < len(units) and stage in self._short_stages(now):
            last, count = count, min(2 * count, len(units))
            more = self._with(now, itertools.chain(*units[last:count]), best)
            if _rate(self._score(now), self._score(more)) > limit:
                break
            now = more
        return now

    def _candidates(self, now: Assigned, stage: int, way: Way) -> list[Unit]:
        """Units that may change to a way, the best first: for a recomputation those that free most
        for their time; for swaps those with the longest time until they are needed.
        """
        # What a stage without room has been lent goes elsewhere.
        lacking = self.assignments.lacking(now)

        def may_change(key: Tensor) -> bool:
            if self._target(key, way) == now.get(key, KEEP) or self._target(key, way) == KEEP:
                return False
            return way is None or key not in now or bool(lacking & {*(now[key] or ())})

        units = [unit for unit in self._units[stage] if any(map(may_change, unit))]
        if way is not None:
            return [[key for key in unit if may_change(key)] for unit in units]
        seconds = self._problem.workload.forward[stage]

        def price(unit: Unit) -> float:
            freed = math.fsum(self._sizes[key] for key in unit if key not in now)
            return float(seconds[unit[0][0]]) / freed if freed else math.inf

        return sorted(units, key=price)

    def _relaxed(self, assigned: Assigned) -> Assigned:
        """Keeps as much as fits: whole units first, then tensors, small ones first."""
        now = assigned
        if self._score(now).excess_bytes:
            return now
        for units in self._units:
            # The last layer's tensors have the least time for transfers.
            now = self._without_most(now, units[::-1])
            moved = [[key] for key in itertools.chain(*units) if now.get(key) is not None]
            moved.sort(key=lambda unit: (self._sizes[unit[0]], -unit[0][0]))
            now = self._without_most(now, moved)
        return now

    def _without_most(self, assigned: Assigned, units: Sequence[Unit]) -> Assigned:
        """Keeps as many units, from the first on, as fit."""
        units = [unit for unit in units if any(key in assigned for key in unit)]

        def without(count: int) -> Assigned:
            return self._with(assigned, itertools.chain(*units[:count]), KEEP)

        return without(_most(len(units), lambda n: not self._score(without(n)).excess_bytes))

    # Until no change helps.

    def _improved(self, assigned: Assigned) -> Assigned:
        """Changes one unit after the other, while that helps."""
        now, score, improves = assigned, self._score(assigned), True
        while improves and not self._is_good(score):
            improves = False
            for stage in self._stages:
                for changed in self._steps(now, stage):
                    if self._is_over:
                        break
                    if (after := self._score(changed)) < score:
                        now, score, improves = changed, after, True
                        break
        return self._relaxed(now)

    def _steps(self, now: Assigned, stage: int) -> Iterator[Assigned]:
        """Assignments that differ in one unit of a stage, or in all of a layer; among equal ones
        only the first and the last are tried.
        """
        noise = math.log(self._effort.alike)
        alike: dict[tuple[object, ...], list[Unit]] = {}
        by_layer = itertools.groupby(self._units[stage], lambda unit: unit[0][0])
        layers = [list(itertools.chain(*units)) for _, units in by_layer]
        # Where nothing fits yet, tensors may go different ways.
        is_short = self._score(now).excess_bytes
        alone = [[key] for layer in layers for key in layer] if is_short else []
        for unit in [*self._units[stage], *layers, *alone]:
            seconds = float(self._problem.workload.forward[stage, unit[0][0]])
            # Equal for times that differ by measurement noise only.
            roughly = round(math.log(seconds) / noise) if seconds > 0 else None
            state = tuple((self._sizes[key], now.get(key, KEEP)) for key in unit)
            alike.setdefault((state, roughly), []).append(unit)
        for units in alike.values():
            for unit in units[:1] + units[1:][-1:]:
                targets: list[Target] = [*self._ways_of(stage), KEEP]
                for target in targets:
                    yield self._with(now, unit, target)


def _most(count: int, is_possible: Callable[[int], bool]) -> int:
    """The largest number up to ``count`` for which something is possible; 0 always is."""
    fewest = 0
    while fewest < count:
        middle = (fewest + count + 1) // 2
        if is_possible(middle):
            fewest = middle
        else:
            count = middle - 1
    return fewest


def _rate(before: Score, after: Score) -> float:
    """The seconds that a change costs for each freed byte; infinite if it frees none."""
    gain = before.excess_bytes - after.excess_bytes
    return max(0.0, after.seconds - before.seconds) / gain if gain > 0 else math.inf
