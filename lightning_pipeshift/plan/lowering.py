"""Adds the communication to a schedule of compute actions.

A schedule says what is computed; who must send what to whom follows from it, so nobody writes it by
hand.

A receive is posted by its action and awaited by the compute action that needs it. It is placed one
compute action early, so that the transfer overlaps that compute action::

    stage 0   F0 F0> F1 F1> ...
    stage 1   >F0 >F1 F0 ...          F1's payload travels while F0 runs

Not earlier: a posted receive holds its buffers. A send stands directly after what makes its data,
and waits for no more than that the neighbour has taken earlier ones of its kind.

Transfers between two neighbours in one direction match by order (NCCL has no tags). A row's
receives stand in the order of the compute actions that need them and its sends in the order of
those that cause them, so the orders agree wherever two neighbours run their forwards in one order,
and their backwards in one order. ``check`` proves it of a schedule.
"""

from lightning_pipeshift.plan.action import Action, Row, Schedule


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with every send and receive that its compute actions imply.

    Expects compute actions only. One stage has no neighbours, and comes back as it was.
    """
    num_stages = len(schedule)
    return tuple(_lowered(row, stage, num_stages) for stage, row in enumerate(schedule))


def _lowered(row: Row, stage: int, num_stages: int) -> Row:
    receives = [action.receive_needed(stage, num_stages) for action in row]
    # The first action has none before it, so its receive stands at the row's start, before the
    # second's.
    lowered: list[Action | None] = receives[:1]
    for action, next_receive in zip(row, [*receives, None][1:], strict=True):
        lowered += [next_receive, action, action.send_caused(stage, num_stages)]
    return tuple(action for action in lowered if action is not None)
