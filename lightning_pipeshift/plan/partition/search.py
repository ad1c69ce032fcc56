"""Searches the cut of a virtual machine, alone or together with the order of its stages.

The simulator times many candidates in one pass, each of them an order of the devices with a cut:
boundaries between stages move, and stages are exchanged, until nothing near makes a step shorter.
A device in another place needs other layers, so an order is only as good as its cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.cut import Counts
from lightning_pipeshift.plan.cost.sums import LongNumbers, Numbers, running_sums
from lightning_pipeshift.plan.cost.workload import AT_ONCE, ROUNDING, Workload
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.partition.orders import Order, distinct_orders, num_orders
from lightning_pipeshift.plan.partition.recomputation import Recomputation

Places = NDArray[np.intp]


def points_of(workload: Workload) -> Places:
    """The boundaries that may be cut, and both ends of the model."""
    inner = range(1, workload.num_layers) if workload.allowed is None else workload.allowed
    between = sorted(b for b in inner if 0 < b < workload.num_layers)
    return np.array([0, *between, workload.num_layers])


@lru_cache(maxsize=64)
def steps_of_cuts(num_cuts: int, most_moved: int) -> Places:
    """(N, num_cuts): one cut moved by one or two steps, or a run of up to ``most_moved``
    neighbouring ones by one, which moves layers between stages that are not neighbours.
    """
    cuts = np.arange(num_cuts)
    first, last = (ends[:, None] for ends in np.triu_indices(num_cuts))
    is_short = last - first < most_moved
    runs = ((first <= cuts) & (cuts <= last)).astype(np.intp)[is_short[:, 0]]
    single = np.eye(num_cuts, dtype=np.intp)
    return np.concatenate([-runs, runs, -2 * single, 2 * single])


class Reordering(NamedTuple):
    """The costs of the other orders of a virtual machine's stages.

    Args:
        turned: the workloads of all orders that begin with another device than the given one, and
            go on with those after it, and then with those before it; in the order of their first.
        crossing: (S, S, 2, L + 1), the seconds of a payload and of its gradient from each device to
            each other one, at each boundary.
        latency: (S, S), the part of them that does not depend on the size of a microbatch.
        alike: for each device, see :func:`~.orders.interchangeable`.
    """

    turned: Sequence[Workload]
    crossing: Numbers
    latency: Numbers
    alike: Sequence[int]


class _Candidates(NamedTuple):
    """N orders with a cut each."""

    orders: Places
    """(N, S): the device of each stage, by its number in the given order."""
    bounds: Places
    """(N, S + 1): the stages' ends, by their numbers among the boundaries that may be cut."""

    def chosen(self, which: Any) -> _Candidates:
        """Some of them, by their numbers, or an array of booleans."""
        return _Candidates(self.orders[which], self.bounds[which])


class Search:
    """The search for one virtual machine.

    Args:
        workload: of its devices in their given order.
        recomputation: of that workload.
        reordering: for other orders; ``None``: the order is fixed.
        recompute: ``"none"``, ``"full"`` or ``"auto"``, for other orders.
        effort: the limits of the search.
    """

    def __init__(
        self,
        workload: Workload,
        recomputation: Recomputation,
        reordering: Reordering | None = None,
        recompute: str = "auto",
        effort: Effort = USUAL,
    ) -> None:
        self._workload, self._effort = workload, effort
        self._points = points = points_of(workload)
        size = workload.num_stages
        self._stages, self._is_last = np.arange(size), np.arange(size) == size - 1
        self._alike: Sequence[int] = range(size)
        workloads = [workload]
        # By two devices, to the next stage and back.
        self._crossing: Numbers = np.zeros((size, size, 2, len(points)))
        self._latency: Numbers = np.zeros((size, size))
        if reordering is None:
            here, there = self._stages[:-1], self._stages[1:]
            self._crossing[here, there, 0] = workload.payload_seconds[:, points]
            self._crossing[here, there, 1] = workload.gradient_seconds[:, points]
            self._latency[here, there] = workload.once_seconds[2, : size - 1]
        else:
            workloads += reordering.turned
            self._crossing = reordering.crossing[..., points]
            self._latency, self._alike = reordering.latency, reordering.alike
        # By device, the seconds of the layers before each boundary: forward and backward.
        self._layers: LongNumbers = np.zeros((2, size, len(points)), np.longdouble)
        for pass_, table in enumerate((workload.forward, workload.backward)):
            self._layers[pass_] = running_sums(table)[:, points]
        # By turn and stage: the turn of device d on stage s is d - s.
        self._extra: Numbers = np.array([[w.forward_extra, w.backward_extra] for w in workloads])
        self._once: Numbers = np.array(
            [np.broadcast_to(w.once_seconds[:2], (2, size)) for w in workloads]
        )
        self._again: Numbers = np.zeros((len(workloads), size, len(points), len(points)))
        for turn, each in enumerate(workloads):
            found = recomputation if not turn else Recomputation(each, recompute)
            again = np.where(each.possible_ranges, found.seconds, math.inf)
            self._again[turn] = again[:, points[:, None], points]

    def improved(self, starts: Iterable[Counts]) -> list[Counts]:
        """The best cuts of the given order among the starts, each improved as far as that goes."""
        begun = self._of_counts([(range(len(self._stages)), counts) for counts in starts])
        seconds = self._seconds(begun)
        best = np.argsort(seconds, kind="stable")[: self._effort.cuts_improved]
        found, _ = self._with_best_cuts(begun.chosen(best), seconds[best])
        return [tuple(row) for row in np.diff(self._points[found.bounds], axis=1).tolist()]

    def best_orders(self, starts: Sequence[tuple[Order, Counts]]) -> list[tuple[Order, Counts]]:
        """The best orders that are found, each with a cut, the fastest first; empty if none fits.

        Args:
            starts: orders of the devices, by their numbers, to begin with, each with a cut, whether
                that fits or not.
        """
        begun = self._of_counts(starts)
        begun, seconds = self._with_best_cuts(begun, self._seconds(begun))
        known: dict[tuple[int, ...], tuple[float, _Candidates]] = {}

        def note(found: _Candidates, seconds: Numbers) -> None:
            for number in np.flatnonzero(np.isfinite(seconds)).tolist():
                key = self._pattern(found.orders[number])
                if key not in known or seconds[number] < known[key][0]:
                    known[key] = seconds[number], found.chosen([number])

        note(begun, seconds)
        seen: set[tuple[int, ...]] = set()
        for number in np.argsort(seconds, kind="stable").tolist():
            start, least = begun.chosen([number]), float(seconds[number])
            while (pattern := self._pattern(start.orders[0])) not in seen:
                seen.add(pattern)
                near, after = self._exchanged(start)
                if not len(after):
                    break
                note(near, after)
                best = int(after.argmin())
                if after[best] * self._effort.close >= least:
                    break
                start, least = near.chosen([best]), float(after[best])
        ranked = sorted(known.values(), key=lambda each: each[0])
        return [
            (
                tuple(found.orders[0].tolist()),
                tuple(np.diff(self._points[found.bounds[0]]).tolist()),
            )
            for _, found in ranked
        ]

    def _of_counts(self, starts: Sequence[tuple[Sequence[int], Counts]]) -> _Candidates:
        ends = np.array([np.cumsum([0, *counts]) for _, counts in starts])
        orders = np.array([list(order) for order, _ in starts], dtype=np.intp)
        return _Candidates(orders, np.searchsorted(self._points, ends))

    # Orders near one.

    def _exchanged(self, now: _Candidates) -> tuple[_Candidates, Numbers]:
        """The most promising orders near one, each with its best cut, and their seconds."""
        order, bounds = now.orders[0], now.bounds[0]
        held = np.diff(bounds)[np.argsort(order)]
        orders = np.array(list(self._orders(order)), dtype=np.intp).reshape(-1, len(order))
        # The stages keep their layers, or the devices their number of layers.
        kept = np.broadcast_to(bounds, (len(orders), len(bounds)))
        moved = np.zeros_like(kept)
        np.cumsum(held[orders], axis=1, out=moved[:, 1:])
        both = _Candidates(np.concatenate([orders, orders]), np.concatenate([kept, moved]))
        near, seconds = self._after_a_step(both)
        place = np.argsort(seconds, kind="stable")
        first: dict[tuple[int, ...], int] = {}
        for number in place[np.isfinite(seconds[place])].tolist():
            first.setdefault(self._pattern(near.orders[number]), number)
            if len(first) >= self._effort.orders_cut:
                break
        chosen = list(first.values())
        return self._with_best_cuts(near.chosen(chosen), seconds[chosen])

    def _orders(self, order: Places) -> Iterator[Sequence[int]]:
        """The orders to try after one: all, if there are few, or else with two stages exchanged, or
        one moved to another place.
        """
        now = order.tolist()
        alike = [self._alike[device] for device in now]
        if num_orders(alike) <= self._effort.orders:
            yield from distinct_orders(tuple(now), alike)
            return
        seen = {tuple(alike)}
        size = range(len(now))
        for one in size:
            for other in size:
                changed = [device for device in now if device != now[one]]
                changed.insert(other, now[one])
                swapped = list(now)
                swapped[one], swapped[other] = now[other], now[one]
                for found in (swapped, changed):
                    pattern = self._pattern(found)
                    if pattern not in seen:
                        seen.add(pattern)
                        yield found

    def _pattern(self, order: Sequence[int] | Places) -> tuple[int, ...]:
        """Equal for orders that differ by interchangeable devices only."""
        return tuple(self._alike[device] for device in order)

    # Cuts near one.

    def _with_best_cuts(self, now: _Candidates, seconds: Numbers) -> tuple[_Candidates, Numbers]:
        """The candidates, whose cuts have been moved while that makes a step shorter."""
        active = np.ones(len(seconds), dtype=bool)
        while active.any():
            near, after = self._after_a_step(now.chosen(active))
            is_better = after * ROUNDING < seconds[active]
            active[active] = is_better
            now.orders[active], now.bounds[active] = near.chosen(is_better)
            seconds[active] = after[is_better]
        return now, seconds

    def _after_a_step(self, now: _Candidates) -> tuple[_Candidates, Numbers]:
        """Each with the best of the cuts near its own, and the seconds."""
        near = self._around(now)
        table = self._seconds(near).reshape(len(now.orders), -1)
        best = table.argmin(axis=1) + np.arange(len(table)) * table.shape[1]
        return near.chosen(best), table.ravel()[best]

    def _around(self, now: _Candidates) -> _Candidates:
        """Each with its own cut and those near it; some of these are impossible."""
        size = len(self._stages)
        steps = steps_of_cuts(size - 1, self._effort.cuts_moved)
        bounds = np.repeat(now.bounds[:, None], len(steps) + 1, axis=1)
        bounds[:, 1:, 1:-1] += steps
        return _Candidates(
            np.repeat(now.orders, len(steps) + 1, axis=0), bounds.reshape(-1, size + 1)
        )

    # Their time.

    def _seconds(self, found: _Candidates) -> Numbers:
        """(N,): the simulated seconds of a step; infinite where something does not fit."""
        seconds = np.full(len(found.orders), math.inf)
        fits = np.flatnonzero((np.diff(found.bounds, axis=1) >= 0).all(axis=1))
        _, _, again = self._places(found.chosen(fits))
        fits = fits[np.isfinite(again).all(axis=1)]
        for begin in range(0, len(fits), AT_ONCE):
            some = fits[begin : begin + AT_ONCE]
            columns = self._columns(found.chosen(some))
            clock = self._workload.clock_for(bool(columns[-1].any()))
            seconds[some] = clock.step_seconds(columns)
        return seconds

    def _places(self, found: _Candidates) -> tuple[Places, Places, Numbers]:
        """(N, S) each: the turn of each stage's device, whether it runs anything, and the seconds
        that it recomputes.
        """
        begins, ends = found.bounds[:, :-1], found.bounds[:, 1:]
        turns = (found.orders - self._stages) % len(self._stages)
        again = self._again[turns, self._stages, begins, ends]
        return turns, (begins < ends) | self._is_last, again

    def _columns(self, found: _Candidates) -> list[Numbers]:
        """The fields of :class:`~lightning_pipeshift.plan.cost.simulator.Costs`, with a column for
        each candidate, for each size of microbatches.
        """
        orders, begins, ends = found.orders, found.bounds[:, :-1], found.bounds[:, 1:]
        turns, runs, again = self._places(found)
        places = turns[:, None], np.arange(2)[:, None], self._stages
        layers = np.asarray(self._layers[:, orders, ends] - self._layers[:, orders, begins], float)
        compute = np.moveaxis(layers, 0, 1) + self._extra[places] * runs[:, None]
        compute_once = self._once[places] * runs[:, None]
        between = orders[:, :-1], orders[:, 1:]
        crossing = self._crossing[between[0], between[1], :, ends[:, :-1]].swapaxes(1, 2)
        crossing_once = self._latency[between][:, None] * (crossing > 0)
        by_size = []
        for size in dict.fromkeys(self._workload.sizes):
            actions, messages = (
                seconds if size == 1 else size * seconds + (1 - size) * once
                for seconds, once in ((compute, compute_once), (crossing, crossing_once))
            )
            columns = (actions[:, 0], actions[:, 1], messages[:, 0], messages[:, 1], size * again)
            by_size.append([np.ascontiguousarray(each.T) for each in columns])
        return [np.concatenate(each) for each in zip(*by_size, strict=True)]
