"""Runs a schedule without a clock: finds a possible order of its actions, and how far it gets."""

from lightning_pipeshift.plan.schedule.actions import Action, Schedule, num_chunks_of


def execution_order(schedule: Schedule) -> list[tuple[int, int]]:
    """An order in which the actions can happen, as (stage, index in the stage's row).

    Posting a receive and sending never block; a compute action waits until the neighbour's matching
    send has happened. If the schedule deadlocks, the order ends there: it is shorter than the
    schedule.
    """
    counts = len(schedule), num_chunks_of(schedule)
    positions = [0] * len(schedule)
    delivered: set[tuple[int, Action]] = set()
    order: list[tuple[int, int]] = []
    before = -1
    while len(order) > before:
        before = len(order)
        for stage, row in enumerate(schedule):
            while positions[stage] < len(row):
                action = row[positions[stage]]
                needed = action.receive_needed(stage, *counts)
                if needed is not None and (stage, needed) not in delivered:
                    break
                if action.kind.is_send and (there := action.counterpart(stage, *counts)):
                    delivered.add(there)
                order.append((stage, positions[stage]))
                positions[stage] += 1
    return order
