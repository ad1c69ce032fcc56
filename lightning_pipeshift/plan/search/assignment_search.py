"""Searches for the best assignment of saved tensors to offload targets, for a cut of a virtual
machine.

CN114880130B, after MPress (HPCA 2023), steps 2 to 4: device-to-device swaps where the time is
short, host swaps where there is time for them, recomputation where both cost more, and any fitting
alternative if memory or time is missing. Here the simulator also models the stages' idle time, so
the search finds that a recomputation in it costs nothing.

It begins with what is fixed, and with all recomputation that costs no time, so that stages with
idle time have memory to lend. Stages that lack memory then use one option after the other, each for
as many tensors as its cost per byte stays low; and the result is improved layer by layer, and
tensor by tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_timeline import HOST
from lightning_pipeshift.plan.search.assignment import Assigned, Assignments, Score, Tensor, Way
from lightning_pipeshift.plan.search.policy_choices import chosen
from lightning_pipeshift.plan.search.problem import Problem


class Option(NamedTuple):
    """How a layer's tensors may be handled: a :data:`Way`, or ``"keep"``.

    Args:
        costly: those that take more than their share of its forward to compute, by their bytes.
        others: the others.
    """

    costly: Way | Literal["keep"]
    others: Way | Literal["keep"]


KEEP: Final = Option("keep", "keep")
RECOMPUTE: Final = Option(None, None)


class AssignmentSearch:
    """The search for one cut.

    Args:
        problem: the virtual machine's.
        cut: the layers of each stage.
    """

    def __init__(self, problem: Problem, cut: Cut) -> None:
        self._problem = problem
        self._links = problem.links
        self.assignments = Assignments(problem, cut)
        self._score, self._sizes = self.assignments.score, problem.sizes
        self._owner = self.assignments.owner
        self._stages = self.assignments.stages
        self._effort = problem.effort
        self._most_trials = problem.most_trials
        #: The stages that have memory to lend.
        spare = problem.spare_bytes(self.assignments.uncompressed)
        self._roomy = [stage for stage in self._stages if spare[stage] > 0]
        #: By stage and option, the last known cost of a freed byte.
        self._rates: dict[tuple[int, Option], float] = {}
        self._spares = {
            (layer, tensor.number): tensor.spares
            for layer, profile in enumerate(problem.profile.layers)
            for tensor in profile.tensors
            if tensor.spares
        }
        saved = {
            layer: sum(self._sizes[key] for key in keys)
            for layer, keys in self.assignments.tensors.items()
        }
        self._costly = {
            key
            for key, size in self._sizes.items()
            if self._spares.get(key, 0.0) * saved[key[0]] > size
        }
        self._fixed, kept = chosen(self.assignments)
        #: By stage and layer, the tensors that the policy leaves open.
        self._groups: list[dict[int, list[Tensor]]] = [{} for _ in self._stages]
        for key in self._sizes:
            if key not in self._fixed and key not in kept:
                self._groups[self._owner[key[0]]].setdefault(key[0], []).append(key)

    def best(self) -> Assigned:
        """The best assignment that is found; it may exceed a budget."""
        start = dict(self._fixed)
        if not self._score(start).excess_bytes:
            return start
        found: list[Assigned] = []
        # With recomputation that costs no time, so that stages have memory to lend; and without.
        roomy = self._with_free_recomputation(start)
        for begin in (roomy, start) if roomy != start else (start,):
            found.append(self._relaxed(self._filled(begin)))
            score = self._score(found[-1])
            # Two beginnings at least: of equally fast ones, one may move and recompute less.
            is_good = self._is_good(score) and len(found) > 1
            if is_good or (self._is_over and not score.excess_bytes):
                break
        else:
            # Tensors of any size: if nothing else fits, small ones are swapped too.
            for way in (None, ()):
                keys = [
                    key
                    for groups in self._groups
                    for layer, keys in groups.items()
                    if Option(way, way) in self._options(layer)
                    for key in keys
                ]
                found.append(self._relaxed({**dict.fromkeys(keys, way), **start}))
        best = sorted(found, key=self._score)[:2]
        now = min((self._improved(one) for one in best), key=self._score)
        return self._improved(now, repairs=True)

    @property
    def _is_over(self) -> bool:
        """Whether enough has been tried."""
        return self.assignments.num_trials > self._most_trials

    def _is_good(self, score: Score) -> bool:
        # The step without swaps is a lower bound.
        least = self.assignments.uncompressed.timeline.step_seconds
        return not score.excess_bytes and score.seconds <= self._effort.close * least

    # --- what may change ---

    def _options(self, layer: int) -> list[Option]:
        """How a layer's tensors may be handled, if they are not kept."""
        stage = self._owner[layer]
        places: list[tuple[int, ...]] = []
        if self._links.rate(stage, HOST) and self._problem.limits[stage].host_bytes:
            places.append(())
        places += [(other,) for other in self._stages if self._links.rate(stage, other)]
        together = tuple(other for other in self._roomy if self._links.rate(stage, other))
        places += [together] if len(together) > 1 else []
        options = [Option(place, place) for place in places]
        if self._problem.recompute != "none":
            if not self._costly.isdisjoint(self.assignments.tensors.get(layer, ())):
                options += [Option("keep", None), *(Option(place, None) for place in places)]
            options.append(RECOMPUTE)
        return options

    def _way(self, key: Tensor, option: Option) -> Way | Literal["keep"]:
        """How a tensor is handled if its layer's option is this one; small ones do not move."""
        way = option.costly if key in self._costly else option.others
        is_small = self._sizes[key] < self._effort.smallest_bytes
        return "keep" if is_small and way is not None else way

    def _with(
        self, assigned: Assigned, keys: Iterable[Tensor], option: Option
    ) -> dict[Tensor, Way]:
        """The same with another option for some tensors."""
        changed = dict(assigned)
        for key in keys:
            changed.pop(key, None)
            way = self._way(key, option)
            if way != "keep":
                changed[key] = way
        return changed

    # --- where to begin ---

    def _with_free_recomputation(self, start: Assigned) -> Assigned:
        """Recomputes as many layers of each stage as make the step no longer."""
        now = start
        most = self._effort.close * self._score(start).seconds
        for stage in self._stages:
            groups = self._candidates(now, stage, RECOMPUTE)

            def with_first(count: int, now: Assigned = now, groups: Groups = groups) -> Assigned:
                return self._with(now, itertools.chain(*groups[:count]), RECOMPUTE)

            def is_free(count: int, more: Callable[[int], Assigned] = with_first) -> bool:
                return self._score(more(count)).seconds <= most

            now = with_first(_most(len(groups), is_free))
        return now

    # --- until it fits ---

    def _filled(self, start: Assigned) -> Assigned:
        """Frees memory stage by stage, each time with the option of the lowest cost per byte, until
        all stages fit.

        An option is used for as many tensors as its cost per byte stays low; so the number of
        trials depends on how many options there are, and how often one of them is used up, and
        hardly on the number of tensors.
        """
        now = start
        self._rates.clear()
        while True:
            before = now
            for stage in self._short_stages(now):
                now = self._with_more(now, stage)
            if now is before or self._is_over:
                break
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
        """Frees memory of a stage with the best option, as long as no other becomes better."""
        score = self._score(now)
        # A rate at which all stages together would lose next to nothing.
        free = (
            (self._effort.close - 1) * score.seconds / score.excess_bytes
            if score.excess_bytes
            else 0.0
        )
        # Rates hardly ever fall as memory fills up: an earlier one is a lower bound.
        known = {
            option: self._rates.get((stage, option), 0.0)
            for layer in self._groups[stage]
            for option in self._options(layer)
        }
        candidates: dict[Option, Groups] = {}
        for option in sorted(known, key=known.__getitem__):
            if any(known[tried] <= known[option] for tried in candidates):
                break
            rate = math.inf
            if groups := self._candidates(now, stage, option):
                rate = _rate(score, self._score(self._with(now, groups[0], option)))
            if math.isfinite(rate):
                candidates[option] = groups
            known[option] = self._rates[stage, option] = rate
        if not candidates:
            return now
        best = min(candidates, key=known.__getitem__)
        second = sorted(filter(math.isfinite, known.values()))[:2][-1]
        limit = max(self._effort.alike * known[best], second, free)
        groups, count = candidates[best], 1
        now = self._with(now, groups[0], best)
        while count < len(groups) and stage in self._short_stages(now):
            last, count = count, min(2 * count, len(groups))
            more = self._with(now, itertools.chain(*groups[last:count]), best)
            if _rate(self._score(now), self._score(more)) > limit:
                break
            now = more
        return now

    def _candidates(self, now: Assigned, stage: int, option: Option) -> Groups:
        """Tensors that may change to an option together, the best first: for a recomputation a
        layer each, those that free most for their time; for swaps a tensor each, those with the
        longest time until they are needed.
        """
        groups = [
            keys
            for layer, keys in self._groups[stage].items()
            if option in self._options(layer)
            and any(now.get(key, "keep") != self._way(key, option) for key in keys)
        ]
        if option.others is None:
            seconds = self._problem.workload.forward[stage]

            def price(keys: Sequence[Tensor]) -> float:
                freed = math.fsum(
                    self._sizes[key]
                    for key in keys
                    if key not in now and self._way(key, option) != "keep"
                )
                return float(seconds[keys[0][0]]) / freed if freed else math.inf

            return sorted(groups, key=price)
        # What a stage without room has been lent goes elsewhere.
        lacking = self.assignments.lacking(now)
        return [
            [key]
            for keys in groups
            for key in sorted(keys, key=lambda key: -self._sizes[key])
            if self._sizes[key] >= self._effort.smallest_bytes
            and (key not in now or (now[key] != option.others and lacking & {*(now[key] or ())}))
        ]

    def _relaxed(self, assigned: Assigned) -> Assigned:
        """Keeps as many tensors as fit: whole layers first, then tensors, small ones first."""
        now = assigned
        if self._score(now).excess_bytes:
            return now
        for groups in self._groups:
            layers = [[key for key in keys if key in now] for keys in groups.values()]
            # The last layer's tensors have the least time for transfers.
            now = self._without_most(now, [keys for keys in reversed(layers) if keys])
            # A dropped tensor that spares nothing would only take memory.
            tensors = [
                key
                for key in itertools.chain(*groups.values())
                if key in now and (now[key] is not None or key in self._spares)
            ]
            tensors.sort(key=lambda key: (self._sizes[key], -key[0]))
            now = self._without_most(now, [[key] for key in tensors])
        return now

    def _without_most(self, assigned: Assigned, groups: Groups) -> Assigned:
        """Keeps as many groups, from the first on, as fit."""

        def without(count: int) -> Assigned:
            return self._with(assigned, itertools.chain(*groups[:count]), KEEP)

        return without(_most(len(groups), lambda n: not self._score(without(n)).excess_bytes))

    # --- until no change helps ---

    def _improved(self, assigned: Assigned, repairs: bool = False) -> Assigned:
        """Changes one layer or tensor after the other, while that helps.

        Args:
            assigned: an assignment.
            repairs: whether other tensors are changed to fit again, and to be better, before a
                change is judged; this finds a way out of a local optimum.
        """
        now, score = assigned, self._score(assigned)
        improves = True
        while improves and not self._is_good(score):
            improves = False
            for stage, one_by_one in itertools.product(self._stages, (False, True)):
                for changed in self._steps(now, stage, one_by_one):
                    if self._is_over:
                        break
                    if repairs:
                        fits = self._filled(changed)
                        # Keeping what fits may undo the change, or be what makes it worthwhile.
                        ways = (self._improved(one) for one in (self._relaxed(fits), fits))
                        changed = min(ways, key=self._score)
                    if (after := self._score(changed)) < score:
                        now, score, improves = changed, after, True
                        break
        return self._relaxed(now)

    def _steps(self, now: Assigned, stage: int, one_by_one: bool) -> Iterator[Assigned]:
        """Assignments that differ in one layer of a stage, or in one tensor; among equal layers
        only the first and the last are tried.
        """
        groups = self._groups[stage]
        alike: dict[tuple[object, ...], list[int]] = {}
        noise = math.log(self._effort.alike)
        for layer, keys in sorted(groups.items()):
            seconds = float(self._problem.workload.forward[stage, layer])
            # Equal for times that differ by measurement noise only.
            roughly = round(math.log(seconds) / noise) if seconds > 0 else None
            state = tuple((self._sizes[key], now.get(key, "keep")) for key in keys)
            alike.setdefault((state, roughly), []).append(layer)
        for layer in itertools.chain(*(sorted({each[0], each[-1]}) for each in alike.values())):
            parts: Groups = [groups[layer]]
            if one_by_one:
                # One of each set of equal tensors.
                equal = {
                    (self._sizes[key], self._spares.get(key), now.get(key, "keep")): key
                    for key in groups[layer]
                }
                parts = [[key] for key in equal.values()] if len(groups[layer]) > 1 else []
            for part, option in itertools.product(parts, (*self._options(layer), KEEP)):
                yield self._with(now, part, option)


Groups = list[list[Tensor]]
"""Tensors that change together."""


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
