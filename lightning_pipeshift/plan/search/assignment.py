"""Evaluates how a cut's saved tensors are handled: the time and memory of each assignment, by
:mod:`~lightning_pipeshift.plan.cost.memory_model`, so the search and the prediction agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_model import Footprint
from lightning_pipeshift.plan.cost.memory_timeline import HOST, Links
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT, Swap
from lightning_pipeshift.plan.search.problem import Compressed, Problem

Tensor = tuple[int, int]
"""A saved tensor: its layer and its number."""

Way = tuple[int, ...] | None
"""The target of a tensor: these stages; ``()``: the host. ``None``: it is recomputed."""

Assigned = Mapping[Tensor, Way]
"""The targets of tensors, without those that are kept."""


class Score(NamedTuple):
    """How good an assignment is; lower is better, compared by the first entry first."""

    excess_bytes: float
    """The bytes above the budgets, of all stages."""
    seconds: float
    """The seconds of the step, plus the weighted time of links and recomputation."""


class _Part(NamedTuple):
    """The part of an assignment that is about one layer.

    Args:
        is_recomputed: whether it is recomputed.
        swaps: of its tensors.
        work_seconds: of its recomputation and transfers, there and back.
    """

    is_recomputed: bool
    swaps: tuple[Swap, ...]
    work_seconds: float


class Assignments:
    """The assignments of one cut.

    Args:
        problem: the virtual machine's.
        cut: the layers of each stage.
    """

    def __init__(self, problem: Problem, cut: Cut) -> None:
        self.problem = problem
        again: frozenset[int] = frozenset()
        if problem.recompute == "full" and problem.policy is None:
            again = problem.workload.everything_recomputed(cut.counts).recompute
        elif problem.recompute == "full":
            again = frozenset(range(problem.workload.num_layers))
        self.cut = Cut(cut.counts, again, problem.optimizer_on_host, problem.weights_on_host)
        self.sizes = problem.sizes
        bounds = self.cut.bounds
        self.stages = range(problem.workload.num_stages)
        self.owner = {
            layer: stage for stage in self.stages for layer in range(*bounds[stage : stage + 2])
        }
        self.tensors: dict[int, list[Tensor]] = {}
        """The tensors of each layer."""
        for key in self.sizes:
            self.tensors.setdefault(key[0], []).append(key)
        self.num_trials = 0
        """How many assignments have been evaluated."""
        self._known: dict[frozenset[tuple[Tensor, Way]], tuple[Footprint, Score]] = {}
        self._parts: dict[tuple[int, tuple[tuple[Tensor, Way], ...]], _Part] = {}
        self.uncompressed = problem.footprints.of(replace(self.cut, recompute=frozenset()))

    def footprint(self, assigned: Assigned) -> Footprint:
        """The time and memory of an assignment."""
        return self._evaluated(assigned)[0]

    def score(self, assigned: Assigned) -> Score:
        """The score of an assignment."""
        return self._evaluated(assigned)[1]

    def lacking(self, assigned: Assigned) -> frozenset[int]:
        """The stages of which the device, or the host, lacks memory."""
        lacking = self.problem.lacking_bytes(self.footprint(assigned))
        return frozenset(stage for stage in self.stages if any(lacking[stage]))

    def result(self, assigned: Assigned) -> Compressed:
        """The result for an assignment."""
        parts = self._parts_of(assigned)
        swaps = tuple(swap for part in parts.values() for swap in part.swaps)
        return Compressed(
            self._recomputing(parts), swaps, self.footprint(assigned), self.uncompressed
        )

    def _evaluated(self, assigned: Assigned) -> tuple[Footprint, Score]:
        key = frozenset(assigned.items())
        if key not in self._known:
            self.num_trials += 1
            parts = self._parts_of(assigned)
            swaps = [swap for part in parts.values() for swap in part.swaps]
            found = self.problem.footprints.of(self._recomputing(parts), swaps)
            work = math.fsum(part.work_seconds for part in parts.values())
            seconds = (
                found.timeline.step_seconds
                + found.late_seconds
                + self.problem.effort.work_weight * work
            )
            excess = math.fsum(map(sum, self.problem.lacking_bytes(found)))
            self._known[key] = found, Score(excess, seconds)
        return self._known[key]

    def _recomputing(self, parts: Mapping[int, _Part]) -> Cut:
        again = {layer for layer, part in parts.items() if part.is_recomputed}
        return replace(self.cut, recompute=self.cut.recompute | again)

    def _parts_of(self, assigned: Assigned) -> dict[int, _Part]:
        by_tensor = sorted(assigned.items(), key=itemgetter(0))
        by_layer = itertools.groupby(by_tensor, lambda item: item[0][0])
        return {layer: self._part(layer, tuple(ways)) for layer, ways in by_layer}

    def _part(self, layer: int, ways: tuple[tuple[Tensor, Way], ...]) -> _Part:
        if (layer, ways) not in self._parts:
            problem, stage = self.problem, self.owner[layer]
            is_recomputed = any(way is None for _, way in ways)
            work = is_recomputed * float(problem.workload.forward[stage, layer])
            groups: dict[tuple[int, ...], list[int]] = {}
            for key, way in ways:
                if way is not None:
                    groups.setdefault(way, []).append(key[1])
                    work += 2 * self._seconds(key, way)
            swaps = tuple(
                Swap(layer, tuple(numbers), way, _shares_of(stage, way, problem.links))
                for way, numbers in groups.items()
            )
            named = {key for key, _ in ways}
            kept = [key[1] for key in self.tensors[layer] if key not in named and key[1] < FRONT]
            if is_recomputed and kept:
                swaps += (Swap(layer, tuple(kept), stays=True),)
            self._parts[layer, ways] = _Part(is_recomputed, swaps, work)
        return self._parts[layer, ways]

    def _seconds(self, key: Tensor, way: tuple[int, ...]) -> float:
        stage, size, links = self.owner[key[0]], self.sizes[key], self.problem.links
        if not way:
            return links.seconds(stage, HOST, size)
        shares = _shares_of(stage, way, links) or (1.0,)
        parts = zip(way, shares, strict=True)
        return max(links.seconds(stage, to, size * part / sum(shares)) for to, part in parts)


def _shares_of(stage: int, lenders: tuple[int, ...], links: Links) -> tuple[float, ...]:
    """Blocks in proportion to the bandwidth of the links; empty for one lender."""
    rates = [links.rate(stage, lender) for lender in lenders]
    if len(rates) < 2:
        return ()
    if not all(map(math.isfinite, rates)):
        return (1.0,) * len(rates)
    return tuple(rate / min(rates) for rate in rates)
