"""Draws what was measured of a step below what its plan expects, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_pipeshift.errors import explained
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.document.text_timeline import Scale, draw_row, legend, line_of
from lightning_pipeshift.text import seconds_text
from lightning_pipeshift.timeline.compared import Compared
from lightning_pipeshift.timeline.recording import Recording
from lightning_pipeshift.timeline.shares import Shares, mean, shares_of

_WIDTH: Final = 100
_GRID_WIDTH: Final = 56


def draw(measured: Recording) -> str:
    """A recording as lines of text, in the style of a plan: for each stage the step by its plan,
    and the same step as it was measured, on one scale.
    """
    compared = Compared.of(measured)
    both = [each for each in (compared.expected, compared.measured) if each is not None]
    spans = [record.spans for each in both for record in each.ranks if record.spans]
    if not spans:
        return "nothing of this step was recorded: no stage has run an action"
    end = max(each.seconds for each in both)
    scale = Scale.fitting(spans, end, _GRID_WIDTH)
    lines = [headline(compared)]
    for each, title in ((compared.expected, "predicted"), (compared.measured, "measured")):
        if each is not None:
            lines += ["", *_drawn(each, title, scale)]
    plan = Plan.from_json(measured.plan) if measured.plan else None
    lines += ["", *legend(plan is not None and plan.is_asynchronous, spans)]
    return explained("\n".join(line.rstrip() for line in lines))


def headline(compared: Compared) -> str:
    """The times of a step, and where they went on average."""
    measured, expected = compared.measured, compared.expected
    number = measured.num_steps
    unit = "a step" if number == 1 else f"{number} minibatches"
    last = measured.step + number - 1
    which = f"step {measured.step}" if number == 1 else f"minibatches {measured.step} to {last}"
    said = f"{which}: {seconds_text(measured.seconds)}"
    if expected is None:
        return f"{said} (no layer is measured, so there is no prediction)"
    return f"{said}, and {seconds_text(expected.seconds)} predicted for {unit}"


def remark(shares: Shares) -> str:
    """The shares of a stage, in short."""
    return (
        f"{shares.bubble:4.0%} bubble {shares.exposed:4.0%} exposed {shares.recompute:4.0%} again"
    )


def _drawn(recording: Recording, title: str, scale: Scale) -> Iterator[str]:
    shares = shares_of(recording)
    yield f"── {title}: {mean(shares)} ".ljust(_WIDTH, "─")
    several = len({record.vm for record in recording.ranks}) > 1
    vm = -1
    for record, share in zip(recording.ranks, shares, strict=True):
        if several and record.vm != vm:
            vm = record.vm
            yield f"      virtual machine {vm}"
        drawing = draw_row(record.spans, recording.seconds, scale, _GRID_WIDTH)
        yield line_of(record.stage, drawing, remark(share))
