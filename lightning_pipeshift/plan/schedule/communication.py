"""Adds the communication to a schedule of compute actions.

A schedule of compute actions determines all sends and receives, so they are not written by hand.

A receive is posted by its action and awaited by the compute action that needs it. It is placed one
compute action early, so that the transfer overlaps that compute action::

    stage 0   F0 F0> F1 F1> ...
    stage 1   >F0 >F1 F0 ...          F1's payload travels while F0 runs

Not earlier, as a posted receive holds its buffers; and not before the action on whose result the
data depends, where that is the compute action before: the gradient of a microbatch comes only after
its payload was sent::

    stage 0   F0 F0> >B0 B0           one microbatch: nothing to overlap with

A send is placed directly after the action that
makes its data, and only waits until the neighbour has received earlier sends of its kind.

Transfers between two neighbours in one direction match by order. A row's
receives are in the order of the compute actions that need them, and its sends in the order of those
that cause them. So the orders agree if two neighbours run their forwards in the same order, and
their backwards in the same order. ``check`` proves that for a schedule.
"""

from lightning_pipeshift.plan.schedule.actions import Action, Row, Schedule, num_chunks_of


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with every send and receive that its compute actions imply.

    Expects compute actions only. The schedule of a single stage is returned unchanged.
    """
    counts = len(schedule), num_chunks_of(schedule)
    return tuple(_communicating(row, stage, *counts) for stage, row in enumerate(schedule))


def _communicating(row: Row, stage: int, num_stages: int, num_chunks: int) -> Row:
    receives = [action.receive_needed(stage, num_stages, num_chunks) for action in row]
    # No action precedes the first one, so its receive is at the row's start, before the second's.
    lowered: list[Action | None] = receives[:1]
    for action, next_receive in zip(row, [*receives, None][1:], strict=True):
        send = action.send_caused(stage, num_stages, num_chunks)
        depends = next_receive is not None and next_receive.microbatch == action.microbatch
        lowered += [action, send, next_receive] if depends else [next_receive, action, send]
    return tuple(action for action in lowered if action is not None)
