"""The Gantt chart of a step: what its plan expects above what was measured."""

from __future__ import annotations

from typing import Any, Final

from lightning_pipeshift.pictures.figure import new_figure
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.text import seconds_text
from lightning_pipeshift.timeline.compared import Compared
from lightning_pipeshift.timeline.recording import RankRecord, Recording, What
from lightning_pipeshift.timeline.shares import mean, shares_of
from lightning_pipeshift.timeline.text import headline

_COLOURS: Final = {
    Kind.FORWARD: "#4878cf",
    Kind.BACKWARD: "#6acc65",
    Kind.RECOMPUTE: "#b47cc7",
}
_NAMES: Final = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.RECOMPUTE: "forward again",
}
_WAIT, _SEND, _SUMS = "#e4e4e4", "#c4ad66", "#d65f5f"
_HEIGHT: Final = 0.8
# A narrower bar has no room for a number, as a part of the chart's width.
_LEAST_WIDTH: Final = 0.018


def gantt(measured: Recording) -> Any:
    """The chart as a ``matplotlib.figure.Figure``: the plan's step at the left, if it predicts one,
    and the measured one at the right, on the same scale.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    compared = Compared.of(measured)
    charts = [(compared.measured, "measured")]
    if compared.expected is not None:
        charts.insert(0, (compared.expected, "predicted"))
    num_rows = len(compared.measured.ranks)
    figure = new_figure(8.0 * len(charts), 2.0 + 0.6 * num_rows)
    axes = figure.subplots(1, len(charts), squeeze=False, sharex=True)[0]
    unit, factor = _unit(max(each.seconds for each, _ in charts))
    for axis, (recording, title) in zip(axes, charts, strict=True):
        shares = shares_of(recording)
        for row, record in enumerate(recording.ranks):
            _draw(axis, row, record, factor, max(each.seconds for each, _ in charts) * factor)
        axis.set_title(f"{title}: {seconds_text(recording.seconds)}\n{mean(shares)}")
        axis.set_xlabel(f"{unit} since the step began")
        axis.set_ylim(num_rows - 0.5, -0.5)
        axis.set_yticks(range(num_rows), [_name(record, recording) for record in recording.ranks])
        right = axis.secondary_yaxis("right")
        right.set_yticks(
            range(num_rows),
            [
                f"{s.bubble:.0%} bubble, {s.exposed:.0%} exposed\n{s.recompute:.0%} recomputation"
                for s in shares
            ],
            fontsize="small",
        )
        right.tick_params(length=0)
    axes[-1].set_xlim(0, max(each.seconds for each, _ in charts) * factor)
    figure.suptitle(f"PipeShift, {headline(compared)}")
    _legend(figure, [record for each, _ in charts for record in each.ranks])
    return figure


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def _name(record: RankRecord, recording: Recording) -> str:
    several = len({each.vm for each in recording.ranks}) > 1
    return f"{record.vm}.{record.stage}" if several else f"stage {record.stage}"


def _draw(axis: Any, row: int, record: RankRecord, factor: float, width: float) -> None:
    low = row - _HEIGHT / 2
    for mark in record.marks:
        colour = _colour(mark.what, mark.action.kind if mark.action is not None else None)
        if colour is None or mark.seconds <= 0:
            continue
        begin, length = mark.begin * factor, mark.seconds * factor
        axis.broken_barh([(begin, length)], (low, _HEIGHT), facecolors=colour, linewidth=0)
    for span in record.spans:
        begin, length = span.start * factor, (span.end - span.start) * factor
        axis.broken_barh(
            [(begin, length)], (low, _HEIGHT), facecolors="none", edgecolors="white", linewidth=0.7
        )
        label = span.action.label
        if length >= _LEAST_WIDTH * width * len(label):
            axis.text(begin + length / 2, row, label, ha="center", va="center", fontsize="small")


def _colour(what: str, kind: Kind | None) -> str | None:
    if kind is not None:
        return _COLOURS.get(kind, _SEND)
    return {What.WAIT: _WAIT, What.SUMS: _SUMS, What.MOVES: _SUMS}.get(what)


def _legend(figure: Any, records: list[RankRecord]) -> None:
    """Only what is in the chart, below it."""
    from matplotlib.patches import Patch

    kinds = {span.action.kind for record in records for span in record.spans}
    whats = {mark.what for record in records for mark in record.marks if mark.seconds > 0}
    patches = [
        Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in kinds
    ]
    patches.append(Patch(color=_WAIT, label="waits for another stage"))
    patches.append(Patch(color=_SEND, label="sends"))
    if whats & {What.SUMS, What.MOVES}:
        patches.append(Patch(color=_SUMS, label="waits for gradients or layers"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
