"""Searches the order of a virtual machine's stages together with their cut.

A device in another place needs other layers, so an order is only as good as its cut. The simulator
times many candidates in one pass, each of them an order with a cut: stages are exchanged, and the
cuts of the best orders are moved, until no exchange makes a step shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.arrange.stage_order import Order, distinct_orders, num_orders
from lightning_pipeshift.plan.cost.workload import (
    AT_ONCE,
    ROUNDING,
    Counts,
    LongNumbers,
    Numbers,
    Workload,
    crossing_seconds,
    running_sums,
)
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.partition.local_search import steps_of_cuts
from lightning_pipeshift.plan.partition.recomputation import Recomputation

Places = NDArray[np.intp]


class _Candidates(NamedTuple):
    """N orders with a cut each."""

    orders: Places
    """(N, S): the device of each stage, by its number in the machine."""
    bounds: Places
    """(N, S + 1): the stages' ends, by their numbers among the boundaries that may be cut."""

    def chosen(self, which: Any) -> _Candidates:
        """Some of them, by their numbers, or an array of booleans."""
        return _Candidates(self.orders[which], self.bounds[which])


class OrderSearch:
    """The search for one virtual machine.

    Args:
        profile: of the model.
        links: the machines, with the bandwidth that there is for this virtual machine.
        machine: its ranks.
        alike: for each of them, see :func:`~.stage_order.interchangeable`.
        workload: the workload of an order of the ranks.
        share: the size of a microbatch, relative to the measured size.
        recompute: ``"none"``, ``"full"`` or ``"auto"``.
        effort: the limits of the search.
    """

    def __init__(
        self,
        profile: Profile,
        links: Cluster,
        machine: Order,
        alike: Sequence[int],
        workload: Callable[[Order], Workload],
        share: float = 1.0,
        recompute: str = "auto",
        effort: Effort = USUAL,
    ) -> None:
        self._machine, self._alike, self._effort = machine, alike, effort
        self._workload = given = workload(machine)
        size, last = len(machine), len(machine) - 1
        inner = range(1, given.num_layers) if given.allowed is None else given.allowed
        self._points = np.array([0, *sorted(inner), given.num_layers])
        num_points = len(self._points)
        between = np.ix_(self._points, self._points)
        # By device: the seconds of the layers before each boundary.
        self._forward: LongNumbers = np.zeros((size, num_points), np.longdouble)
        self._backward: LongNumbers = np.zeros((size, num_points), np.longdouble)
        # By device and stage.
        self._extra: Numbers = np.zeros((2, size, size))
        self._again: Numbers = np.zeros((size, size, num_points, num_points))
        for turn in range(size):
            # Each device on each stage, once.
            there = workload(machine[turn:] + machine[:turn])
            again = np.where(
                there.possible_ranges, Recomputation(there, recompute).seconds, math.inf
            )
            forward, backward = running_sums(there.forward), running_sums(there.backward)
            for stage in range(size):
                device = (turn + stage) % size
                self._forward[device] = forward[stage, self._points]
                self._backward[device] = backward[stage, self._points]
                self._extra[:, device, stage] = (
                    there.forward_extra[stage],
                    there.backward_extra[stage],
                )
                self._again[device, stage] = again[stage][between]
        # By two devices, to the next stage and back.
        self._crossing: Numbers = np.zeros((size, size, 2, num_points))
        for a, one in enumerate(machine):
            for b, other in enumerate(machine):
                seconds = crossing_seconds(profile, links.link(one, other), share)
                self._crossing[a, b] = seconds[:, self._points]
        self._stages, self._is_last = np.arange(size), np.arange(size) == last

    def best(self, starts: Sequence[tuple[Order, Counts]]) -> list[tuple[Order, Counts]]:
        """The best orders that are found, each with a cut, the fastest first; empty if none fits.

        Args:
            starts: orders to begin with, each with a cut, whether that fits or not.
        """
        orders = [[self._machine.index(rank) for rank in order] for order, _ in starts]
        ends = [np.cumsum([0, *counts]) for _, counts in starts]
        at = np.searchsorted(self._points, np.array(ends))
        begun, seconds = self._with_best_cuts(_Candidates(np.array(orders), at))
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
                tuple(self._machine[device] for device in found.orders[0].tolist()),
                tuple(np.diff(self._points[found.bounds[0]]).tolist()),
            )
            for _, found in ranked
        ]

    # --- candidates near one ---

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
        return self._with_best_cuts(near.chosen(list(first.values())))

    def _orders(self, order: Places) -> Iterator[list[int]]:
        """The orders to try after one: all, if there are few, or else with two stages exchanged, or
        one moved to another place.
        """
        now = order.tolist()
        alike = [self._alike[device] for device in now]
        if num_orders(alike) <= self._effort.orders:
            yield from map(list, distinct_orders(tuple(now), alike))
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

    # --- cuts ---

    def _with_best_cuts(self, now: _Candidates) -> tuple[_Candidates, Numbers]:
        """The candidates, whose cuts have been moved while that makes a step shorter."""
        seconds = self._seconds(now)
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
        size = len(self._machine)
        steps = np.concatenate(
            [
                np.zeros((1, size - 1), np.intp),
                steps_of_cuts(size - 1, self._effort.cuts_moved),
            ]
        )
        bounds = np.repeat(now.bounds[:, None], len(steps), axis=1)
        bounds[:, :, 1:-1] += steps
        bounds = bounds.reshape(-1, size + 1)
        all_near = _Candidates(np.repeat(now.orders, len(steps), axis=0), bounds)
        is_cut = (np.diff(bounds, axis=1) >= 0).all(axis=1)
        seconds = np.full(len(bounds), math.inf)
        seconds[is_cut] = self._seconds(all_near.chosen(is_cut))
        table = seconds.reshape(len(now.orders), len(steps))
        best = table.argmin(axis=1) + np.arange(len(table)) * len(steps)
        return all_near.chosen(best), seconds[best]

    # --- their time ---

    def _seconds(self, found: _Candidates) -> Numbers:
        """(N,): the simulated seconds of a step; infinite where something does not fit."""
        seconds = np.full(len(found.orders), math.inf)
        begins, ends = found.bounds[:, :-1], found.bounds[:, 1:]
        again = self._again[found.orders, self._stages, begins, ends]
        fits = np.flatnonzero(np.isfinite(again).all(axis=1))
        for begin in range(0, len(fits), AT_ONCE):
            some = fits[begin : begin + AT_ONCE]
            costs = self._costs(found.chosen(some), again[some])
            clock = self._workload.clock_for(bool(costs[-1].any()))
            seconds[some] = clock.step_seconds(costs)
        return seconds

    def _costs(self, found: _Candidates, again: Numbers) -> tuple[Numbers, ...]:
        """The fields of :class:`~lightning_pipeshift.plan.cost.simulator.Costs`, with a column for
        each candidate.
        """
        orders, begins, ends = found.orders, found.bounds[:, :-1], found.bounds[:, 1:]
        runs = (begins < ends) | self._is_last
        forward, backward = (
            np.asarray(sums[orders, ends] - sums[orders, begins], float)
            + extra[orders, self._stages] * runs
            for sums, extra in zip((self._forward, self._backward), self._extra, strict=True)
        )
        crossing = self._crossing[orders[:, :-1], orders[:, 1:], :, ends[:, :-1]]
        costs = (forward, backward, crossing[..., 0], crossing[..., 1], again)
        return tuple(np.ascontiguousarray(each.T) for each in costs)
