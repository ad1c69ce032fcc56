"""The step that a plan expects, as a recording that can be compared with a measured one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_pipeshift.plan.cost.simulator import Span
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.document.text_timeline import rows_of_stages
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.timeline.recording import REPORT, Mark, RankRecord, Recording, What


def expected(plan: Plan, step: int = 0, num_steps: int = 1) -> Recording | None:
    """The plan's prediction of a step as a recording.

    Args:
        plan: the plan.
        step: the first batch.
        num_steps: how many minibatches of an asynchronous pipeline, from the middle of its run; of
            other pipelines, 1.

    Returns:
        ``None`` if no layer's time is known.
    """
    if not plan.is_measured:
        return None
    timelines = [plan.timeline(vm) for vm in range(plan.placement.num_virtual_machines)]
    begin, end = 0.0, max(timeline.step_seconds for timeline in timelines)
    shift, exposed = 0, 0.0
    if plan.is_asynchronous:
        first = max(len(timeline.rows) for timeline in timelines)
        forward = Action(Kind.FORWARD, first)
        begin = next(span.start for span in timelines[0].rows[0] if span.action == forward)
        pace = plan.prediction.step_seconds if plan.prediction is not None else end
        end = begin + num_steps * pace
        shift = step - first
    elif plan.prediction is not None:
        exposed = plan.prediction.exposed_seconds
    records: list[RankRecord] = []
    for vm, timeline in enumerate(timelines):
        num_stages = plan.placement.num_stages(vm)
        for stage, row in enumerate(rows_of_stages(timeline, num_stages)):
            sends = [span for sent in timeline.transfers[stage::num_stages] for span in sent]
            marks = list(_marks(row, sends, begin, end, shift))
            if exposed:
                marks.append(Mark(What.SUMS, "sums of gradients", end, end + exposed))
            rank = plan.ranks[vm][stage] if plan.ranks else len(records)
            kind = plan.kinds[vm][stage] if plan.kinds else ""
            records.append(
                RankRecord(rank, vm, stage, "", kind, begin, end + exposed, tuple(marks))
            )
    return Recording(step, num_steps, tuple(records)).from_zero()


# Stands for the end of the step, for which stages that are done wait.
_AFTER: Final = Action(Kind.RECEIVE_PAYLOAD, 0)


def _marks(
    row: Sequence[Span], sends: Sequence[Span], begin: float, end: float, shift: int
) -> Iterator[Mark]:
    """The marks of one stage, as far as they are between two times."""
    before = 0.0
    spans = [*row, Span(_AFTER, end, end)]
    for span in spans:
        name = _name(span.action, shift) if span.action is not _AFTER else REPORT
        for what, a, b in ((What.WAIT, before, span.start), (What.ACTION, span.start, span.end)):
            a, b = max(a, begin), min(b, end)
            if b > a:
                yield Mark(what, name, a, b)
        before = span.end
    for send in sends:
        if begin <= send.start < end:
            # It does not keep the stage from computing.
            yield Mark(What.ACTION, _name(send.action, shift), send.start, send.start)


def _name(action: Action, shift: int) -> str:
    return str(replace(action, microbatch=max(0, action.microbatch + shift)))
