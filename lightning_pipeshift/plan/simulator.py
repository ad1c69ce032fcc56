"""Runs a schedule against a clock, to know what a plan costs before it is tried.

The same actions that the executor runs, and the same rules of what waits for what. A stage computes
one action at a time. A transfer starts when its send does (directly after the compute action that
made it), or when the link is free: each boundary has one link per direction, which carries one
transfer after the other. Links and compute overlap.
"""

import math
from dataclasses import dataclass, fields

from lightning_pipeshift.errors import PlanError, ScheduleError
from lightning_pipeshift.plan.action import Action, Kind, Row, Schedule
from lightning_pipeshift.plan.lowering import with_communication
from lightning_pipeshift.plan.order import execution_order


@dataclass(frozen=True, slots=True)
class Costs:
    """What a microbatch costs: per stage to compute, per boundary between stages to transfer."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    payload_seconds: tuple[float, ...]
    gradient_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        num_stages = len(self.forward_seconds)
        if num_stages < 1:
            raise PlanError("costs of 0 stages; there is at least 1")
        allowed = {
            "backward_seconds": num_stages,
            "payload_seconds": num_stages - 1,
            "gradient_seconds": num_stages - 1,
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


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it starts and ends, in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a step looks like. All tuples are per stage."""

    rows: tuple[tuple[Span, ...], ...]
    """Compute actions, in order."""
    transfers: tuple[tuple[Span, ...], ...]
    """What the stage sends, in order: from the start of the transfer until the neighbour has it."""
    step_seconds: float
    idle_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    """The most microbatches whose forward has begun and whose backward has not ended, so whose
    activations are held. Zero where there are no backwards: nothing is held."""


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule; communication is added where it has none.

    Raises ScheduleError where the schedule deadlocks, or where the costs are of another number of
    stages.
    """
    if len(schedule) != costs.num_stages:
        raise ScheduleError(
            f"a schedule of {len(schedule)} stages and costs of {costs.num_stages}; they must agree"
        )
    if all(action.kind.is_compute for row in schedule for action in row):
        schedule = with_communication(schedule)
    order = execution_order(schedule)
    if len(order) < sum(map(len, schedule)):
        raise ScheduleError("the schedule deadlocks; check() draws where")

    compute_seconds = {
        Kind.FORWARD: costs.forward_seconds,
        Kind.BACKWARD: costs.backward_seconds,
    }
    free = [0.0] * len(schedule)
    link_free: dict[tuple[int, Kind], float] = {}
    arrived: dict[tuple[int, Action], float] = {}
    rows: list[list[Span]] = [[] for _ in schedule]
    transfers: list[list[Span]] = [[] for _ in schedule]
    for stage, index in order:
        action = schedule[stage][index]
        if action.kind.is_compute:
            needed = action.receive_needed(stage, len(schedule))
            start = max(free[stage], arrived[stage, needed] if needed else 0.0)
            free[stage] = start + compute_seconds[action.kind][stage]
            rows[stage].append(Span(action, start, free[stage]))
        elif action.kind.is_send:
            start = max(free[stage], link_free.get((stage, action.kind), 0.0))
            end = start + _transfer_seconds(action, stage, costs)
            link_free[stage, action.kind] = end
            arrived[action.neighbour(stage), action.pair()] = end
            transfers[stage].append(Span(action, start, end))

    step_seconds = max(free)
    busy = [sum(compute_seconds[s.action.kind][i] for s in row) for i, row in enumerate(rows)]
    return Timeline(
        rows=tuple(map(tuple, rows)),
        transfers=tuple(map(tuple, transfers)),
        step_seconds=step_seconds,
        # Rounding can leave a fully busy stage a hair below zero.
        idle_seconds=tuple(max(0.0, step_seconds - seconds) for seconds in busy),
        peak_in_flight=tuple(map(_peak_in_flight, schedule)),
    )


def _transfer_seconds(send: Action, stage: int, costs: Costs) -> float:
    # The boundary between stages b and b + 1 is number b.
    boundary = min(stage, send.neighbour(stage))
    if send.kind is Kind.SEND_PAYLOAD:
        return costs.payload_seconds[boundary]
    return costs.gradient_seconds[boundary]


def _peak_in_flight(row: Row) -> int:
    if not any(action.kind is Kind.BACKWARD for action in row):
        return 0
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    in_flight = peak = 0
    for action in row:
        in_flight += change.get(action.kind, 0)
        peak = max(peak, in_flight)
    return peak
