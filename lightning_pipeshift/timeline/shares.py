"""Where the time of a step goes on each stage: compute, recomputation, bubble, communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.timeline.recording import REPORT, RankRecord, Recording, What, sender_of


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a step's time on one stage, or their means over stages; they add up to 1.

    Args:
        forward: forwards.
        backward: backwards.
        recompute: forwards that run again.
        bubble: waits for other stages that had not sent yet what was waited for, and the time in
            which this rank was done and others were not.
        exposed: communication that no compute hides: waits for what was on its way, sends that wait
            for earlier ones, gradients of other virtual machines, layers that move.
        other: the optimizer, data, hooks, and the code around the actions.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    other: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.bubble:.0%} bubble, {self.exposed:.0%} exposed communication, "
            f"{self.recompute:.0%} recomputation"
        )


def shares_of(recording: Recording) -> list[Shares]:
    """The shares of each rank, in the order of the recording."""
    sent = _sends(recording)
    return [_of_rank(record, recording, sent) for record in recording.ranks]


def mean(shares: list[Shares]) -> Shares:
    """The mean of the shares of some ranks."""
    names = [field.name for field in fields(Shares)]
    return Shares(*(sum(getattr(one, name) for one in shares) / len(shares) for name in names))


Sends = Mapping[tuple[int, int, Action], float]
"""When each send was ready to leave, by virtual machine, stage and action."""


def _sends(recording: Recording) -> Sends:
    found = {}
    for record in recording.ranks:
        for mark in record.of(What.ACTION):
            action = mark.action
            if action is not None and action.kind.is_send:
                found[record.vm, record.stage, action] = mark.begin
    return found


def _of_rank(record: RankRecord, recording: Recording, sent: Sends) -> Shares:
    by_kind = dict.fromkeys(Kind, 0.0)
    for mark in record.of(What.ACTION):
        action = mark.action
        assert action is not None
        by_kind[action.kind] += mark.seconds
    exposed = sum(seconds for kind, seconds in by_kind.items() if kind.is_send)
    exposed += sum(mark.seconds for mark in record.of(What.SUMS, What.MOVES))
    bubble = (record.begin - recording.begin) + (recording.end - record.end)
    for mark in record.of(What.WAIT):
        # Until the last stage has its results, it computes.
        ready = mark.end
        if mark.name != REPORT:
            action = Action.parse(mark.name)
            there = record.stage + (-1 if action.kind is Kind.FORWARD else 1)
            ready = sent.get((record.vm, there, sender_of(action)), mark.begin)
        late = min(max(ready, mark.begin), mark.end)
        bubble += late - mark.begin
        exposed += mark.end - late
    # Waits inside of a forward (its layer's update is not there yet) are no compute.
    inside = record.inner_seconds
    forward = by_kind[Kind.FORWARD] - inside
    total = recording.seconds or 1.0
    backward = by_kind[Kind.BACKWARD] + by_kind[Kind.WEIGHTS]
    again = by_kind[Kind.RECOMPUTE]
    known = forward + backward + again + bubble + exposed
    parts = (forward, backward, again, bubble, exposed, max(0.0, recording.seconds - known))
    return Shares(*(part / total for part in parts))
