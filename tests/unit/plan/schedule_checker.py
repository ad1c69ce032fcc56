"""Proves of a schedule that it runs every action once, and neither deadlocks nor leaks.

A wrong schedule would hang a cluster, or train on part of the batch. The error message draws the
whole grid, with an arrow at the wrong action.
"""

from collections import Counter
from itertools import pairwise
from typing import NoReturn

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Schedule
from lightning_pipeshift.plan.schedule.execution_order import execution_order


def check(schedule: Schedule) -> None:
    """Raises ScheduleError unless the schedule (with its communication) can run and is complete.

    - Every stage does the forward and the backward of every microbatch exactly once, the forward
      first; or, where the schedule has no backward at all, the forward exactly once.
    - A recomputation, where there is one, comes once, between the two.
    - Every send has one receive, every receive one send, and per neighbour and direction their
      orders agree.
    - A receive is posted before the compute action that needs it, a send follows the one that makes
      its data.
    - Executed, with receives and sends that don't block, every stage reaches the end of its row.
    """
    if not any(schedule):
        raise ScheduleError("an empty schedule; it needs at least one stage and one microbatch")
    _check_compute(schedule)
    _check_pairs(schedule)
    _check_places(schedule)
    _check_orders(schedule)
    _check_reaches_end(schedule)


def grid(schedule: Schedule, stage: int, index: int) -> str:
    """The schedule, a stage per line and the columns aligned, with an arrow under one action.

    ``index`` may be one past the row's end, if an action is missing.
    """
    texts = [[str(action) for action in row] for row in schedule]
    width = max(len(text) for row in texts for text in row)
    lines = []
    for s, row in enumerate(texts):
        head = f"stage {s}: "
        lines.append((head + " ".join(text.ljust(width) for text in row)).rstrip())
        if s == stage:
            lines.append(" " * (len(head) + index * (width + 1)) + "^^ here")
    return "\n".join(lines)


def _check_compute(schedule: Schedule) -> None:
    actions = [action for row in schedule for action in row]
    num_microbatches = 1 + max(action.microbatch for action in actions)
    trains = any(action.kind is Kind.BACKWARD for action in actions)
    kinds = (Kind.FORWARD, Kind.BACKWARD) if trains else (Kind.FORWARD,)
    letters = " and ".join(kind.value for kind in kinds)
    for stage, row in enumerate(schedule):
        places: dict[Action, int] = {}
        for index, action in enumerate(row):
            if action in places:
                _fail(schedule, stage, index, f"does {action} again; it is allowed once")
            places[action] = index
        for microbatch in range(num_microbatches):
            needed = [Action(kind, microbatch) for kind in kinds]
            for action in needed:
                if action not in places:
                    what = f"never does {action}; every stage does {letters} of each microbatch"
                    what += f", 0 to {num_microbatches - 1}"
                    _fail(schedule, stage, len(row), what)
            in_order = [*pairwise(needed)]
            recompute = Action(Kind.RECOMPUTE, microbatch)
            if recompute in places:
                if not trains:
                    what = f"does {recompute}, but has no backward that needs it"
                    _fail(schedule, stage, places[recompute], what)
                in_order.append((Action(Kind.FORWARD, microbatch), recompute))
                in_order.append((recompute, Action(Kind.BACKWARD, microbatch)))
            for first, second in in_order:
                if places[first] > places[second]:
                    what = f"does {second} before {first}"
                    _fail(schedule, stage, places[second], what)


def _check_pairs(schedule: Schedule) -> None:
    rows, num_stages = [set(row) for row in schedule], len(schedule)
    for stage, row in enumerate(schedule):
        for index, action in enumerate(row):
            if action.kind.is_compute:
                continue
            there = action.counterpart(stage, num_stages)
            if there is None:
                _fail(schedule, stage, index, f"does {action}, but has no neighbour there")
            if there[1] not in rows[there[0]]:
                what = f"does {action}, but stage {there[0]} never does {there[1]}"
                _fail(schedule, stage, index, what)


def _check_places(schedule: Schedule) -> None:
    num_stages = len(schedule)
    for stage, row in enumerate(schedule):
        places = {action: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            receive = action.receive_needed(stage, num_stages)
            if receive is not None and places.get(receive, index) >= index:
                _fail(
                    schedule,
                    stage,
                    index,
                    f"does {action} without posting {receive} first; "
                    "with_communication() places it",
                )
            send = action.send_caused(stage, num_stages)
            if send is not None and places.get(send, index + 1) < index:
                _fail(schedule, stage, places[send], f"does {send} before {action}, which makes it")


def _check_orders(schedule: Schedule) -> None:
    num_stages = len(schedule)
    # The sends of each kind from one stage to another, and what they are received by.
    lines: dict[tuple[Kind, int, int], list[tuple[Action, Action]]] = {}
    for stage, row in enumerate(schedule):
        for send in row:
            if send.kind.is_send and (there := send.counterpart(stage, num_stages)):
                lines.setdefault((send.kind, stage, there[0]), []).append((send, there[1]))
    for (_, stage, neighbour), pairs in lines.items():
        expected = {receive for _, receive in pairs}
        posted = [action for action in schedule[neighbour] if action in expected]
        for found, (send, receive) in zip(posted, pairs, strict=True):
            if found != receive:
                _fail(
                    schedule,
                    neighbour,
                    schedule[neighbour].index(found),
                    f"posts {found} where stage {stage} sends {send}; "
                    "transfers match by order, so the orders must agree",
                )


def _check_reaches_end(schedule: Schedule) -> None:
    num_stages = len(schedule)
    reached = Counter(stage for stage, _ in execution_order(schedule))
    waits = []
    for stage, row in enumerate(schedule):
        if reached[stage] < len(row):
            action = row[reached[stage]]
            receive = action.receive_needed(stage, num_stages)
            assert receive is not None, "only an action that needs a receive can wait"
            there = receive.counterpart(stage, num_stages)
            assert there is not None
            send = f"{there[1]} of stage {there[0]}"
            waits.append((stage, reached[stage], f"{action} of stage {stage} waits for {send}"))
    if waits:
        stage, index, _ = waits[0]
        _fail(
            schedule,
            stage,
            index,
            "makes no progress, a deadlock: " + ", ".join(w for *_, w in waits),
        )


def _fail(schedule: Schedule, stage: int, index: int, what: str) -> NoReturn:
    raise ScheduleError(f"stage {stage} {what}\n{grid(schedule, stage, index)}")
