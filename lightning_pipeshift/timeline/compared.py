"""A recording and what its plan expects, under the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.timeline.expected import expected
from lightning_pipeshift.timeline.recording import REPORT, Mark, Recording, What


@dataclass(frozen=True, slots=True)
class Compared:
    """Both, with clocks that start at 0 and microbatches that are counted from 0.

    Args:
        measured: the recording.
        expected: the same step by the plan in force; ``None`` if that predicts nothing.
    """

    measured: Recording
    expected: Recording | None

    @classmethod
    def of(cls, measured: Recording) -> Compared:
        """Makes the comparison of a recording with its plan."""
        found = None
        measured = measured.from_zero()
        if measured.plan:
            plan = Plan.from_json(measured.plan)
            # An asynchronous pipeline counts minibatches since its run began.
            first = _first_forward(measured) if plan.is_asynchronous else measured.step
            found = expected(plan, first, measured.num_steps)
        numbers = [
            span.action.microbatch
            for each in (measured, found)
            if each is not None
            for record in each.ranks
            for span in record.spans
        ]
        least = min(numbers, default=0)
        return cls(_less(measured, least), _less(found, least) if found is not None else None)


def _first_forward(recording: Recording) -> int:
    return min(
        (
            span.action.microbatch
            for record in recording.ranks
            if record.stage == 0
            for span in record.spans
            if span.action.kind is Kind.FORWARD
        ),
        default=recording.step,
    )


def _less(recording: Recording, number: int) -> Recording:
    """The recording with smaller numbers of microbatches."""
    if not number:
        return recording

    def renamed(mark: Mark) -> Mark:
        if mark.what not in (What.ACTION, What.WAIT) or mark.name == REPORT:
            return mark
        action = Action.parse(mark.name)
        less = replace(action, microbatch=max(0, action.microbatch - number))
        return replace(mark, name=str(less))

    return replace(
        recording,
        ranks=tuple(
            replace(record, marks=tuple(map(renamed, record.marks))) for record in recording.ranks
        ),
    )
