"""The search of a virtual machine's stages: which device is which stage, and the layers of each.

A state is an order of the devices and the number of layers of each stage. The simulator times many
states in one pass. The best few are moved to the best state nearby, until none gets better: first
the boundaries between stages, and then, if the order is free, the devices, each time with the best
boundaries for them. A stage that lacks memory recomputes what takes the least time for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Counts, Cut
from lightning_pipeshift.plan.cost.sums import Numbers, sums_of_ranges
from lightning_pipeshift.plan.cost.workload import ROUNDING, Places, Workload
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.plan.search.infeasible import nothing_fits
from lightning_pipeshift.plan.search.orders import Order, distinct_orders, num_orders
from lightning_pipeshift.plan.search.ranges import least_sum, narrowest, ranges_of
from lightning_pipeshift.plan.search.recomputation import RECOMPUTE, Recomputation

State = tuple[Order, Counts]


class Staged(NamedTuple):
    """A result of the search.

    Args:
        seconds: of a step, by the simulator.
        order: the device of each stage.
        cut: the layers of each stage, and what they recompute.
    """

    seconds: float
    order: Order
    cut: Cut


class StageSearch:
    """The search for one virtual machine.

    Args:
        workload: the workload of an order of its devices.
        recompute: see :data:`~.recomputation.RECOMPUTE`.
        alike: for each rank, see :func:`~.orders.interchangeable`; ``None``: no two are.
        effort: the limits of the search.
    """

    def __init__(
        self,
        workload: Callable[[Order], Workload],
        recompute: str = "auto",
        alike: Sequence[int] | None = None,
        effort: Effort = USUAL,
    ) -> None:
        self._workload, self._recompute = workload, recompute
        self._alike, self._effort = alike, effort
        self._of_order: dict[Order, tuple[Workload, Recomputation]] = {}
        #: The seconds of all states so far.
        self._known: dict[State, float] = {}

    def first(self, order: Order, given: Sequence[Counts] = ()) -> float:
        """Times cuts to begin with, and returns the seconds of the best; infinite if none fits.

        They are the even one, the given ones, and for several limits of what the slowest stage or
        link takes for a microbatch, the one of which a microbatch takes least time in all stages.
        """
        workload, _ = self._at(order)
        sums, paces = self._ranges(order)
        counts = [*given, uniform(workload.num_layers, workload.num_stages)]
        least, even = narrowest(paces)
        if math.isfinite(least):
            _, quick = least_sum(sums)
            counts += [even, quick]
            slowest = float(paces[ranges_of(quick)].max())
            for limit in np.geomspace(max(least, 1e-300), max(slowest, 1e-300), 10)[1:-1]:
                counts.append(least_sum(np.where(paces <= limit * ROUNDING, sums, math.inf))[1])
        states = [(order, each) for each in dict.fromkeys(counts)]
        self._time(states)
        return min(self._known[state] for state in states)

    def improve(self, orders: Iterable[Order], reorders: bool = False) -> None:
        """Improves the best of the known states of some orders, as far as that goes.

        Args:
            orders: the orders; :meth:`first` has been called for each.
            reorders: whether other orders are tried too.
        """
        of_order: dict[Order, list[State]] = {order: [] for order in orders}
        for state in self._known:
            of_order[state[0]].append(state)
        starts = []
        for states in of_order.values():
            states.sort(key=self._known.__getitem__)
            ends = self._improve(states[: self._effort.cuts_improved])
            starts.append(min([states[0], *ends], key=self._known.__getitem__))
        seen: set[Order] = set()
        starts = sorted(starts, key=self._known.__getitem__)[: self._effort.orders_improved]
        for start in starts if reorders else ():
            # As long as exchanges of stages help.
            while self._pattern(start[0]) not in seen:
                seen.add(self._pattern(start[0]))
                near = list(self._reordered(start))
                self._time(near)
                # A device in another place needs other layers: one step is tried for each.
                some = self._fastest(near, 4 * self._effort.orders_cut)
                stepped = self._step(some)
                ends = self._improve(self._fastest(stepped, self._effort.orders_cut))
                end = min(ends, key=self._known.__getitem__, default=start)
                if self._known[end] * self._effort.close >= self._known[start]:
                    break
                start = end

    def _fastest(self, states: Iterable[State], most: int) -> list[State]:
        """The fastest states that fit, one for each order."""
        best: dict[Order, State] = {}
        for state in sorted(states, key=self._known.__getitem__):
            if math.isfinite(self._known[state]):
                best.setdefault(state[0], state)
        return list(best.values())[:most]

    def found(self, given: Sequence[Counts] = ()) -> list[Staged]:
        """The best cut of each of the best orders that fit, the fastest first. Of equally fast
        cuts, the one
        that recomputes fewer layers, then a given one, then the more even one.
        """
        of_order: dict[Order, list[State]] = {}
        for state in self._ranked():
            of_order.setdefault(state[0], []).append(state)
        best = []
        for order, states in list(of_order.items())[: self._effort.orders_kept]:
            limit = self._known[states[0]] * ROUNDING
            equal = (counts for _, counts in states if self._known[order, counts] <= limit)
            cuts = map(self._at(order)[1].cut, equal)
            best.append(Staged(self._known[states[0]], order, min(cuts, key=_preference(given))))
        return best

    # Their time.

    def _at(self, order: Order) -> tuple[Workload, Recomputation]:
        if order not in self._of_order:
            workload = self._workload(order)
            self._of_order[order] = workload, Recomputation(workload, self._recompute)
        return self._of_order[order]

    def _ranked(self) -> Iterator[State]:
        """The known states that fit, the fastest first."""
        fits = [state for state, seconds in self._known.items() if math.isfinite(seconds)]
        return iter(sorted(fits, key=self._known.__getitem__))

    def _time(self, states: Iterable[State]) -> None:
        """Times states; infinite where something does not fit."""
        by_order: dict[Order, list[Counts]] = {}
        for order, counts in dict.fromkeys(states):
            if (order, counts) not in self._known:
                self._known[order, counts] = math.inf
                by_order.setdefault(order, []).append(counts)
        timed: list[State] = []
        columns: list[list[Numbers]] = []
        for order, rows in by_order.items():
            workload, recomputation = self._at(order)
            bounds = np.zeros((workload.num_stages + 1, len(rows)), dtype=np.intp)
            np.cumsum(rows, axis=1, out=bounds[1:].T)
            again = recomputation.seconds(bounds)
            fits = np.isfinite(again).all(axis=0)
            if fits.any():
                timed += [(order, rows[number]) for number in np.flatnonzero(fits).tolist()]
                columns.append(workload.columns(bounds[:, fits], again[:, fits]))
        if timed:
            # All orders have the same schedule, so one clock.
            joined = [np.concatenate(each, axis=1) for each in zip(*columns, strict=True)]
            self._known.update(zip(timed, workload.timed(joined).tolist(), strict=True))

    def _ranges(self, order: Order) -> tuple[Numbers, Numbers]:
        """(S, L + 1, L + 1) each: the seconds of a microbatch on stage s with the layers from b to
        e and on the link after it, and the longer of the two; infinite if they do not fit.
        """
        workload, recomputation = self._at(order)
        slots = sums_of_ranges(workload.forward + workload.backward)
        slots += (workload.forward_extra + workload.backward_extra)[:, None, None]
        for stage in slots[:-1]:
            # A stage without layers passes the payload on.
            np.fill_diagonal(stage, 0.0)
        sums, paces = np.where(recomputation.fits, slots, math.inf), slots
        there, back = workload.payload_seconds[:, None], workload.gradient_seconds[:, None]
        sums[:-1] += there + back
        paces[:-1] = np.maximum(paces[:-1], np.maximum(there, back))
        return sums, np.where(recomputation.fits, paces, math.inf)

    # What is near.

    def _improve(self, states: Sequence[State]) -> list[State]:
        """Moves the boundaries of each state while that makes a step shorter."""
        active, ends = list(states), []
        while active:
            after = self._step(active)
            ends += [state for state, found in zip(active, after, strict=True) if found == state]
            moved = zip(active, after, strict=True)
            active = list(dict.fromkeys(found for state, found in moved if found != state))
        return ends

    def _step(self, states: Sequence[State]) -> list[State]:
        """Each state with the best boundaries near its own; itself if these are no better."""
        near = [self._moved(state) for state in states]
        self._time(each for moved in near for each in moved)
        best = [min(moved, key=self._known.__getitem__) for moved in near]
        return [
            found if self._known[found] * ROUNDING < self._known[state] else state
            for state, found in zip(states, best, strict=True)
        ]

    def _moved(self, state: State) -> list[State]:
        order, counts = state
        near = neighbours(self._at(order)[0], counts, self._effort.cuts_moved)
        return [state, *((order, each) for each in near)]

    def _reordered(self, state: State) -> Iterator[State]:
        """The same boundaries, or numbers of layers by device, with other orders: all, if there are
        few, or else with two stages exchanged, or one moved to another place.
        """
        order, counts = state
        of_device = dict(zip(order, counts, strict=True))
        seen = {self._pattern(order)}
        for other in self._orders(order):
            if (pattern := self._pattern(other)) not in seen:
                seen.add(pattern)
                yield other, counts
                yield other, tuple(of_device[rank] for rank in other)

    def _orders(self, order: Order) -> Iterator[Order]:
        alike = self._pattern(order)
        if num_orders(alike) <= self._effort.orders:
            yield from distinct_orders(order, alike)
            return
        for one, rank in enumerate(order):
            rest = order[:one] + order[one + 1 :]
            for place in range(len(order)):
                swapped = list(order)
                swapped[one], swapped[place] = swapped[place], rank
                yield tuple(swapped)
                yield (*rest[:place], rank, *rest[place:])

    def _pattern(self, order: Order) -> Order:
        """Equal for orders that differ by interchangeable devices only."""
        return order if self._alike is None else tuple(self._alike[rank] for rank in order)


def _preference(given: Sequence[Counts]) -> Callable[[Cut], tuple[object, ...]]:
    # The last: more layers on earlier stages, as in a uniform split.
    return lambda cut: (
        len(cut.recompute),
        cut.counts not in given,
        sum(count**2 for count in cut.counts),
        [-count for count in cut.counts],
    )


def between_blocks(
    search: Callable[[frozenset[int] | None], list[Staged]],
    worthwhile: frozenset[int],
    possible: frozenset[int] | None,
    worth: float,
) -> list[Staged]:
    """Returns the best stages with cuts between blocks; those with cuts anywhere, if their step is
    shorter by more than the factor ``worth``, or if no cut between blocks fits.

    Args:
        search: finds stages, given the boundaries that may be cut.
        worthwhile: the boundaries between blocks.
        possible: all that may be cut.
        worth: the factor, 1 or more; with 1, other cuts are tried only if nothing fits.
    """
    best, anywhere = search(worthwhile), []
    if not best or (worthwhile != possible and worth > 1):
        anywhere = search(possible)
    if anywhere and (not best or worth * anywhere[0].seconds < best[0].seconds):
        return anywhere
    return best


def stages_of(
    workload: Workload,
    recompute: str = "auto",
    given: Sequence[Counts] = (),
    effort: Effort = USUAL,
) -> list[Staged]:
    """The best cut of a virtual machine in the order of its workload; empty if nothing fits. The
    arguments are those of :func:`best_cut`.
    """
    order = tuple(range(workload.num_stages))
    search = StageSearch(lambda _: workload, recompute, effort=effort)
    search.first(order, given)
    search.improve([order])
    return search.found(given)


def best_cut(
    workload: Workload,
    recompute: str = "auto",
    given: Sequence[Counts] = (),
    *,
    effort: Effort = USUAL,
) -> Cut:
    """The cut of a virtual machine with the least step time, by the simulator, of those that fit.

    Args:
        workload: the layers, the stages in their order, and the boundaries that may be cut.
        recompute: see :data:`~.recomputation.RECOMPUTE`.
        given: cuts to try as well, such as the one in force.
        effort: the limits of the search.

    Raises PlanError if nothing fits; its message contains the lacking memory, and remedies.
    """
    if recompute not in RECOMPUTE:
        words = ", ".join(map(repr, RECOMPUTE))
        raise PlanError(f"recompute={recompute!r}; choose one of {words}")
    found = stages_of(workload, recompute, given, effort)
    if not found:
        raise nothing_fits(workload, recompute)
    return found[0].cut


# Cuts near one.


def points_of(workload: Workload) -> Places:
    """The boundaries that may be cut, and both ends of the model."""
    inner = range(1, workload.num_layers) if workload.allowed is None else workload.allowed
    between = sorted(b for b in inner if 0 < b < workload.num_layers)
    return np.array([0, *between, workload.num_layers])


@lru_cache(maxsize=64)
def _steps(num_cuts: int, most_moved: int) -> Places:
    """(N, num_cuts): one cut moved by one or two steps, or a run of up to ``most_moved``
    neighbouring ones by one, which moves layers between stages that are not neighbours.
    """
    cuts = np.arange(num_cuts)
    first, last = (ends[:, None] for ends in np.triu_indices(num_cuts))
    is_short = last - first < most_moved
    runs: NDArray[np.intp] = ((first <= cuts) & (cuts <= last)).astype(np.intp)[is_short[:, 0]]
    single = np.eye(num_cuts, dtype=np.intp)
    return np.concatenate([-runs, runs, -2 * single, 2 * single])


def neighbours(
    workload: Workload, counts: Counts, most_moved: int = USUAL.cuts_moved
) -> list[Counts]:
    """The allowed cuts that are a step away: one boundary between stages moves to the next one or
    two that may be cut, or a run of up to ``most_moved`` neighbouring ones to the next one.
    """
    points = points_of(workload)
    steps = _steps(workload.num_stages - 1, most_moved)
    places = np.tile(np.searchsorted(points, np.cumsum([0, *counts])), (len(steps), 1))
    places[:, 1:-1] += steps
    places = places[(np.diff(places, axis=1) >= 0).all(axis=1)]
    return list(map(tuple, np.diff(points[places], axis=1).tolist()))
