"""Runs a schedule against a clock, to predict the time of a plan before it runs.

It uses the same actions as the executor, and the same rules about which action waits for which. A
stage computes one action at a time. A transfer starts with its send (directly after the compute
action that produces its data), or when the link is free: each boundary has one link per direction,
which carries one transfer after another. Links and compute overlap.

A planner needs the times of one schedule for many costs: a :class:`Clock` computes the order of the
actions once, and then adds numbers, or vectors with one entry for each of many costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.errors import PlanError, ScheduleError
from lightning_pipeshift.plan.cost.pace import steady_pace
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Schedule, num_chunks_of
from lightning_pipeshift.plan.schedule.communication import with_communication
from lightning_pipeshift.plan.schedule.execution_order import execution_order
from lightning_pipeshift.plan.schedule.schedules import (
    ASYNCHRONOUS,
    simulated_rows,
    with_recomputation,
)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a microbatch: per stage to compute, per boundary between stages to transfer."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    payload_seconds: tuple[float, ...]
    gradient_seconds: tuple[float, ...]
    recompute_seconds: tuple[float, ...] = ()
    """Per stage; empty if nothing is recomputed."""

    def __post_init__(self) -> None:
        num_stages = len(self.forward_seconds)
        if num_stages < 1:
            raise PlanError("costs of 0 stages; there is at least 1")
        allowed = {
            "backward_seconds": num_stages,
            "payload_seconds": num_stages - 1,
            "gradient_seconds": num_stages - 1,
            "recompute_seconds": num_stages if self.recompute_seconds else 0,
        }
        for name, length in allowed.items():
            if len(getattr(self, name)) != length:
                raise PlanError(
                    f"costs of {num_stages} stages with {len(getattr(self, name))} {name}; "
                    f"{length} are needed"
                )
        for field in fields(self):
            for value in getattr(self, field.name):
                if not (math.isfinite(value) and value >= 0):
                    raise PlanError(
                        f"costs with {value} among {field.name}; seconds are finite and at least 0"
                    )

    @property
    def num_stages(self) -> int:
        return len(self.forward_seconds)

    @property
    def recomputing_stages(self) -> frozenset[int]:
        """The stages that recompute anything."""
        return frozenset(s for s, seconds in enumerate(self.recompute_seconds) if seconds)


class Span(NamedTuple):
    """An action and when it starts and ends, in seconds since the step began."""

    action: Action
    start: float
    end: float


class Actions(tuple[Action, ...]):
    """Some of a stage's actions, in order."""

    @cached_property
    def held(self) -> NDArray[np.intp]:
        """(4, N): of each microbatch that has a backward, in the order of the forwards, the places
        of its forward, of what frees its tensors (its backward, or the gradients of weights that
        this has left), and of its recomputation (-1 if there is none), and its number.
        """
        of: dict[Kind, dict[int, int]] = {kind: {} for kind in Kind}
        for place, action in enumerate(self):
            of[action.kind][action.microbatch] = place
        again = of[Kind.RECOMPUTE]
        # Where layers run again, backwards stay whole.
        backwards = of[Kind.BACKWARD] if again else of[Kind.WEIGHTS] or of[Kind.BACKWARD]
        places = [
            (place, backwards[number], again.get(number, -1), number)
            for number, place in of[Kind.FORWARD].items()
            if number in backwards
        ]
        held: NDArray[np.intp] = np.array(places, dtype=np.intp).reshape(-1, 4).T
        return held


@dataclass(frozen=True, slots=True, eq=False)
class TimedRow:
    """Actions of a stage, and when each of them starts and ends, in seconds since the step began.

    A planner holds many: the actions are those of the schedule, for all of them, and arrays cost
    the garbage collector nothing.
    """

    actions: Actions
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The actions, as objects."""
        return tuple(map(Span, self.actions, self.starts.tolist(), self.ends.tolist()))


@dataclass(frozen=True, eq=False)
class Timeline:
    """The times of a step's actions, or of an asynchronous pipeline from filling to draining. All
    tuples are per stage; of stages with several chunks of layers, for each stage of each chunk.
    """

    computed: tuple[TimedRow, ...]
    """Compute actions."""
    sent: tuple[TimedRow, ...]
    """The stage's sends: from the start of the transfer until the neighbour has the data."""
    end_seconds: float
    """When the last action ends."""
    step_seconds: float
    """From the start of one step, or minibatch in an asynchronous pipeline, to that of the next."""
    idle_seconds: tuple[float, ...]
    """Of that time."""
    peak_in_flight: tuple[int, ...]
    """The peak number of microbatches whose forward has started and whose backward has not ended,
    so whose activations are held. Zero if there are no backwards: nothing is held."""

    @cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """The compute actions."""
        return tuple(row.spans for row in self.computed)

    @cached_property
    def transfers(self) -> tuple[tuple[Span, ...], ...]:
        """The sends."""
        return tuple(row.spans for row in self.sent)

    @property
    def is_one_step(self) -> bool:
        """Whether it is a step, and not many minibatches of an asynchronous pipeline."""
        return self.end_seconds == self.step_seconds


Costing = Sequence[Sequence[Any] | NDArray[np.float64]]
"""The fields of :class:`Costs`, each per stage or boundary: numbers, or vectors of them."""


class _Waves(NamedTuple):
    """The steps of a schedule in waves: the steps of one wave do not wait for each other, so that
    one array operation times all of them. Steps are counted in the order of the waves, from 1: step
    0 is the start.
    """

    rows: NDArray[np.intp]
    """For each step from 1 on, the index of its cost: a row of the concatenated fields of
    :class:`Costs`."""
    each: list[tuple[slice, NDArray[np.intp], NDArray[np.intp]]]
    """The steps of each wave, and for each of them the two that it waits for."""
    widest: int
    ends: NDArray[np.intp]
    """The last compute action of each stage."""
    members: list[list[tuple[Actions, NDArray[np.intp]]]]
    """The compute actions of each stage, or of each of its chunks, in their order, and its sends;
    with their steps."""


class Clock:
    """Times one schedule; adds communication if there is none.

    Args:
        schedule: the actions.
        is_endless: whether further minibatches follow each other as they do in these 1F1B rows, so
            that what counts is the pace.
        num_larger: how many microbatches come before those of another size, which have costs of
            their own (see :func:`columns`); ``None``: all are equal.

    Raises ScheduleError if the schedule deadlocks.
    """

    def __init__(
        self, schedule: Schedule, is_endless: bool = False, num_larger: int | None = None
    ) -> None:
        if all(action.kind.is_compute for row in schedule for action in row):
            schedule = with_communication(schedule)
        order = execution_order(schedule)
        if len(order) < sum(map(len, schedule)):
            raise ScheduleError("the schedule deadlocks; check() draws where")
        self.schedule = schedule
        self.is_endless = is_endless
        self.num_larger = num_larger
        self.num_chunks = num_chunks_of(schedule)
        self.num_stages = len(schedule) * self.num_chunks
        """Of costs: a stage with several chunks of layers counts once for each, behind all stages
        of the chunk before."""
        chunks = [
            [action for action in row if action.chunk == chunk]
            for chunk in range(self.num_chunks)
            for row in schedule
        ]
        self.peak_in_flight = tuple(map(_peak_in_flight, chunks))
        self._puts_off = any(map(_leaves_weights, schedule))
        self._order = order

    @cached_property
    def _waves(self) -> _Waves:
        # A resource, stage or link, that runs one step at a time, and its last step so far.
        last: dict[tuple[int, ...], int] = {}
        arrived: dict[tuple[int, Action], int] = {}
        # The first row of each kind, with the fields of Costs concatenated.
        sizes = 1 if self.num_larger is None else 2
        by_stage, by_boundary = sizes * self.num_stages, sizes * (self.num_stages - 1)
        first_row = np.cumsum([0, by_stage, by_stage, by_boundary, by_boundary, by_stage]).tolist()
        needs, waves, rows = [(0, 0)], [0], [0]
        counts, each = (len(self.schedule), self.num_chunks), range(self.num_stages)
        members: list[list[list[int]]] = [[[] for _ in each] for _ in range(2)]
        actions: list[list[list[Action]]] = [[[] for _ in each] for _ in range(2)]
        for stage, index in self._order:
            action = self.schedule[stage][index]
            own = action.chunk * len(self.schedule) + stage
            is_smaller = self.num_larger is not None and action.microbatch >= self.num_larger
            before, number = last.get((stage,), 0), len(needs)
            if action.kind.is_compute:
                received = action.receive_needed(stage, *counts)
                need = (before, arrived[stage, received] if received else 0)
                entry = own + is_smaller * self.num_stages
                last[stage,] = number
            elif action.kind.is_send and (there := action.counterpart(stage, *counts)):
                link = stage, there[0]
                need = (before, last.get(link, 0))
                # The boundary between stages b and b + 1 is number b.
                other = there[1].chunk * len(self.schedule) + there[0]
                entry = min(own, other) + is_smaller * (self.num_stages - 1)
                last[link] = arrived[there] = number
            else:
                continue
            members[action.kind.is_send][own].append(number)
            actions[action.kind.is_send][own].append(action)
            needs.append(need)
            waves.append(1 + max(waves[need[0]], waves[need[1]]))
            rows.append(first_row[_COLUMN[action.kind]] + entry)
        order = np.argsort(waves, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        one, other = place[np.array(needs)[order]].T
        begins = (np.flatnonzero(np.diff(np.array(waves)[order])) + 1).tolist()
        slices = [slice(a, b) for a, b in pairwise([*begins, len(order)])]
        return _Waves(
            rows=np.array(rows)[order[1:]],
            each=[(wave, one[wave], other[wave]) for wave in slices],
            widest=max((wave.stop - wave.start for wave in slices), default=0),
            ends=place[[last.get((stage,), 0) for stage in range(len(self.schedule))]],
            members=[
                [
                    (Actions(row), place[np.array(numbers, dtype=np.intp)])
                    for row, numbers in zip(*of_stages, strict=True)
                ]
                for of_stages in zip(actions, members, strict=True)
            ],
        )

    def _divided(self, costs: Costing) -> Costing:
        """The costs with those of the gradients of weights, where backwards leave them for later.
        On the first stage, backwards are whole.
        """
        if not self._puts_off:
            return costs
        forward, backward, *others = (np.asarray(field, np.float64) for field in costs)
        part = np.full(self.num_stages, _PART_OF_WEIGHTS)
        part[0] = 0.0
        part = np.tile(part, len(backward) // self.num_stages)
        weights = backward * part.reshape(-1, *[1] * (backward.ndim - 1))
        return [forward, backward - weights, *others, weights]

    def rows_of(
        self,
        costs: Costing,
        begins: Sequence[float] = (),
        first_action: Callable[[int, float], float] | None = None,
    ) -> tuple[list[TimedRow], list[TimedRow], list[float]]:
        """The compute actions of each stage, its sends, and the seconds in which it computes.

        Args:
            costs: the durations of the actions, a number for each stage or boundary.
            begins: when each stage may start; empty: at 0.
            first_action: the end of a stage's first action, given the stage and the start;
                ``None`` if it takes as long as the others of its kind.
        """
        waves, costs = self._waves, self._divided(costs)
        seconds = np.zeros(len(waves.rows) + 1)
        seconds[1:] = np.concatenate([np.asarray(field, np.float64) for field in costs])[waves.rows]
        ends, starts = seconds.copy(), np.zeros_like(seconds)
        of_stages = enumerate(waves.members[0])
        firsts = {int(steps[0]): stage for stage, (_, steps) in of_stages if len(steps)}
        for begin, step in zip(begins, firsts, strict=False):
            starts[step] = begin
        for wave, one, other in waves.each:
            start = np.maximum(ends[one], ends[other])
            starts[wave] = np.maximum(starts[wave], start) if begins else start
            ends[wave] += starts[wave]
            if first_action is not None:
                for step in firsts.keys() & range(wave.start, wave.stop):
                    ends[step] = first_action(firsts[step], float(starts[step]))
        computed, sent = (
            [TimedRow(actions, starts[steps], ends[steps]) for actions, steps in of_stages]
            for of_stages in waves.members
        )
        # Not the spans' differences: the sum of the given costs is exact if they are.
        busy = [math.fsum(seconds[steps].tolist()) for _, steps in waves.members[0]]
        return computed, sent, busy

    def step_seconds(self, costs: Costing) -> Any:
        """The time of a step or minibatch under each of many costs, as a vector.

        Args:
            costs: the durations of the actions, a vector for each stage or boundary.
        """
        if self.is_endless:
            return steady_pace(costs)
        waves, costs = self._waves, self._divided(costs)
        table = np.concatenate([np.asarray(field, np.float64) for field in costs if len(field)])
        # Each step's row holds its cost until its wave is computed, and then its end. (``take``
        # without buffers of its own, and without checks of the indices: it takes most of the time.)
        ends = np.zeros((len(waves.rows) + 1, table.shape[1]))
        table.take(waves.rows, axis=0, out=ends[1:], mode="clip")
        starts, others = np.empty((2, waves.widest, table.shape[1]))
        for wave, one, other in waves.each:
            start = ends.take(one, axis=0, out=starts[: len(one)], mode="clip")
            later = ends.take(other, axis=0, out=others[: len(one)], mode="clip")
            ends[wave] += np.maximum(start, later, out=start)
        return ends[waves.ends].max(axis=0)


# The place of each kind's costs in the result of `columns`, and behind them.
_COLUMN: Final = {
    kind: [field.name for field in fields(Costs)].index(kind.properties.cost)
    for kind in Kind
    if kind.properties.cost
} | {Kind.WEIGHTS: len(fields(Costs))}

_PART_OF_WEIGHTS: Final = 0.5
"""Of a backward: a product has two factors, and their gradients are products of the same size."""


@lru_cache(maxsize=256)
def clock(
    name: str,
    num_stages: int,
    num_microbatches: int,
    recomputing: frozenset[int] = frozenset(),
    num_larger: int | None = None,
) -> Clock:
    """Returns the clock of a schedule by its name; cached."""
    schedule = simulated_rows(name, num_stages, num_microbatches)
    return Clock(with_recomputation(schedule, recomputing), name in ASYNCHRONOUS, num_larger)


def simulate(schedule: Schedule | Clock, costs: Costs, *smaller: Costs) -> Timeline:
    """The timeline of a schedule; adds communication if there is none.

    Args:
        schedule: the actions.
        costs: of each microbatch.
        smaller: of the smaller ones, if the clock has some.

    Raises ScheduleError if the schedule deadlocks, or if the costs are of another number of stages.
    """
    timed = schedule if isinstance(schedule, Clock) else Clock(schedule)
    if timed.num_stages != costs.num_stages:
        raise ScheduleError(
            f"a schedule of {timed.num_stages} stages and costs of {costs.num_stages}; they must"
            " agree"
        )
    computed, sent, busy = timed.rows_of(columns(costs, *smaller))
    step_seconds = end_seconds = max(float(row.ends[-1]) if row else 0.0 for row in computed)
    # A stage computes one chunk at a time.
    num_stages = len(timed.schedule)
    busy = [math.fsum(busy[at % num_stages :: num_stages]) for at in range(len(busy))]
    if timed.is_endless:
        step_seconds = float(steady_pace(columns(costs)))
        num_minibatches = sum(action.kind is Kind.FORWARD for action in computed[0].actions)
        busy = [seconds / num_minibatches for seconds in busy]
    return Timeline(
        computed=tuple(computed),
        sent=tuple(sent),
        end_seconds=end_seconds,
        step_seconds=step_seconds,
        # Rounding can make the idle time of a fully busy stage slightly negative.
        idle_seconds=tuple(max(0.0, step_seconds - seconds) for seconds in busy),
        peak_in_flight=timed.peak_in_flight,
    )


def columns(*costs: Costs) -> tuple[tuple[float, ...], ...]:
    """The costs by field, as :meth:`Clock.run` takes them: those of the larger microbatches, and
    then of the smaller ones, if there are any.
    """
    by_size = [
        (
            each.forward_seconds,
            each.backward_seconds,
            each.payload_seconds,
            each.gradient_seconds,
            each.recompute_seconds or (0.0,) * each.num_stages,
        )
        for each in costs
    ]
    return tuple(sum(fields, ()) for fields in zip(*by_size, strict=True))


def _peak_in_flight(row: Sequence[Action]) -> int:
    if not any(action.kind is Kind.BACKWARD for action in row):
        return 0
    in_flight = peak = 0
    # What the gradients of weights need is held until they are computed.
    holds_on = Kind.BACKWARD if _leaves_weights(row) else None
    for action in row:
        in_flight += 0 if action.kind is holds_on else action.kind.properties.in_flight
        peak = max(peak, in_flight)
    return peak


def _leaves_weights(row: Sequence[Action]) -> bool:
    """Whether backwards leave the gradients of weights for later."""
    return any(action.kind is Kind.WEIGHTS for action in row)
