"""Draws a stage's actions over a step as one line of text.

A block begins with the number of its microbatch; a thin line is a forward, a heavy one a backward,
dots are idle time, waves run a forward again::

    0──1──······0━━━━━2──1━━━━━
    ···0──0━━━━━1──1━━━━━2──2━━
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_pipeshift.plan.cost.simulator import Span, Timeline
from lightning_pipeshift.plan.schedule.actions import Kind

_IDLE: Final = "·"
_LEFT_OUT: Final = " ⋯ "
_MOST_COLUMNS: Final = 6
"""For a forward: longer ones would only widen the drawing."""

_RECOMPUTED: Final = "       2~~  forward of {} 2 run again, for what its backward needs"
_WEIGHTS: Final = "       2══  gradients of weights that the backward of {} 2 has left for later"
_LEGEND: Final = "       2──  forward of {} 2    2━━  its backward    ···  idle    time runs right"


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of columns per second; one scale for all drawings that are compared."""

    columns_per_second: float

    @classmethod
    def fitting(cls, rows: Iterable[Sequence[Span]], end_seconds: float, width: int) -> Scale:
        """The scale that fills the width, but keeps a forward wide enough for its number.

        In a balanced plan a forward takes a whole number of columns, so that all blocks are
        aligned.
        """
        spans = [span for row in rows for span in row]
        forwards = sorted(
            span.end - span.start
            for span in spans
            if span.action.kind is Kind.FORWARD and span.end > span.start
        )
        digits = max(len(str(span.action.microbatch)) for span in spans)
        typical = forwards[len(forwards) // 2]
        columns = min(typical * width / end_seconds, _MOST_COLUMNS)
        if forwards[0] > 0.8 * forwards[-1]:
            columns = int(columns)
        return cls(max(digits + 1, columns) / typical)

    def column(self, seconds: float) -> int:
        return round(seconds * self.columns_per_second)


def rows_of_stages(timeline: Timeline, num_stages: int) -> list[tuple[Span, ...]]:
    """The compute actions of each stage, of all of its chunks of layers."""
    return [
        tuple(
            sorted(
                (span for row in timeline.rows[stage::num_stages] for span in row),
                key=lambda span: span.start,
            )
        )
        for stage in range(num_stages)
    ]


def draw_row(row: Sequence[Span], end_seconds: float, scale: Scale, width: int) -> str:
    """One stage's line. If it is wider than the width, its middle is omitted.

    The middle, because a pipeline fills at the left and drains at the right, and repeats itself
    between.
    """
    text = [_IDLE] * scale.column(end_seconds)
    for span in row:
        begin, end = scale.column(span.start), scale.column(span.end)
        line = span.action.kind.properties.line
        # A number cut in two would name another microbatch.
        label = str(span.action.microbatch)
        label = label if len(label) <= end - begin else ""
        text[begin:end] = label + line * (end - begin - len(label))
    drawing = "".join(text)
    if len(drawing) <= width:
        return drawing
    # More of the left: the visible part begins at a number.
    right = width // 3
    left = width - len(_LEFT_OUT) - right
    return drawing[:left] + _LEFT_OUT + drawing[-right:]


def line_of(stage: int, drawing: str, remark: str) -> str:
    """A stage's drawing with its number before it and a remark behind it."""
    return f"{stage:>5} │{drawing}│ {remark}"


def legend(
    is_asynchronous: bool, rows: Iterable[Iterable[Span]], recomputes: bool = False
) -> list[str]:
    """The lines that explain a drawing.

    Args:
        is_asynchronous: whether the pipeline is.
        rows: what is drawn.
        recomputes: whether layers run again, also if that is not drawn.
    """
    unit = "minibatch" if is_asynchronous else "microbatch"
    kinds = {span.action.kind for row in rows for span in row}
    lines = [_LEGEND]
    lines += [_RECOMPUTED] if recomputes or Kind.RECOMPUTE in kinds else []
    lines += [_WEIGHTS] if Kind.WEIGHTS in kinds else []
    return [line.format(unit) for line in lines]
