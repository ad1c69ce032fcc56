"""The page that ``pipeshift timeline`` writes: HTML with SVG and without scripts or other files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.text import bytes_text, seconds_text
from lightning_pipeshift.timeline.compared import Compared
from lightning_pipeshift.timeline.outcomes import Change
from lightning_pipeshift.timeline.recording import Recording, What
from lightning_pipeshift.timeline.shares import shares_of
from lightning_pipeshift.timeline.slow_ranks import slow_rank
from lightning_pipeshift.timeline.text import draw

_WIDTH, _HEIGHT, _EDGE = 900, 220, 40
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
pre { font: 12px/1.25 monospace; overflow-x: auto; background: #f6f6f6; padding: 1em; }
table { border-collapse: collapse; } th, td { padding: .2em .8em; text-align: right; }
th { border-bottom: 1px solid #888; } svg { width: 100%; }
svg text { font: 12px system-ui, sans-serif; }
.measured { stroke: #4878cf; } .predicted { stroke: #d65f5f; stroke-dasharray: 5 4; }
polyline { fill: none; stroke-width: 2; } .measured-point { fill: #4878cf; }
"""


def page(title: str, recordings: Sequence[Recording], changes: Sequence[Change] = ()) -> str:
    """The page of a run.

    Args:
        title: what the run is called.
        recordings: at least one, in the order of their steps.
        changes: the automatic changes of the plan, in the same order.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        (
            f"<p>{len(recordings)} recorded steps, from {recordings[0].step} to"
            f" {recordings[-1].step}.</p>"
        ),
        "<h2>Time of a step</h2>",
        *_step_times(recordings),
        "<h2>Stages</h2>",
        *_stages(recordings),
        "<h2>Lanes</h2>",
        *_lanes(recordings),
        "<h2>The last recorded step</h2>",
        _text(draw(recordings[-1])),
        "<h2>Decisions</h2>",
        *_decisions(changes),
        "<h2>Plans</h2>",
        *_plans(recordings),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _table(name: str, rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [f"<tr>{cells}</tr>"]
    for row in body:
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return f'<table id="{name}">{"".join(lines)}</table>'


def _step_times(recordings: Sequence[Recording]) -> Iterator[str]:
    """A plot over the steps: measured, and expected where the plan predicts anything."""
    measured = [(each.step, each.seconds / each.num_steps) for each in recordings]
    found = [(each.step, Compared.of(each).expected) for each in recordings]
    predicted = [(step, by.seconds / by.num_steps) for step, by in found if by is not None]
    top = max(seconds for _, seconds in [*measured, *predicted]) or 1.0
    first, last = measured[0][0], max(measured[-1][0], measured[0][0] + 1)

    def at(step: int, seconds: float) -> str:
        x = _EDGE + (step - first) / (last - first) * (_WIDTH - 2 * _EDGE)
        return f"{x:.1f},{_HEIGHT - _EDGE - seconds / top * (_HEIGHT - 2 * _EDGE):.1f}"

    yield f'<svg id="steps" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    low, high = _HEIGHT - _EDGE, _EDGE
    yield f'<path d="M{_EDGE} {high} V{low} H{_WIDTH - _EDGE}" fill="none" stroke="#888"/>'
    for name, points in (("measured", measured), ("predicted", predicted)):
        if points:
            text = " ".join(at(*point) for point in points)
            yield f'<polyline class="{name}" points="{text}"/>'
    for point in measured:
        x, y = at(*point).split(",")
        yield f'<circle class="measured-point" cx="{x}" cy="{y}" r="3"/>'
    yield f'<text x="{_EDGE}" y="{high - 8}">{escape(seconds_text(top))}</text>'
    yield f'<text x="{_EDGE}" y="{low + 18}">step {first}</text>'
    yield f'<text x="{_WIDTH - _EDGE}" y="{low + 18}" text-anchor="end">step {last}</text>'
    yield "</svg><p>Solid: measured. Dashed: expected by the plan in force.</p>"


def _stages(recordings: Sequence[Recording]) -> Iterator[str]:
    """A row for each stage in the first and in the last recorded step."""
    rows = [
        ["step", "stage", "rank", "host", "computes", "expected", "bubble", "exposed", "again"]
        + ["memory", "expected"]
    ]
    chosen = [recordings[0], *([recordings[-1]] if len(recordings) > 1 else [])]
    for each in chosen:
        found = Compared.of(each)
        expected = {(r.vm, r.stage): r for r in found.expected.ranks} if found.expected else {}
        plan = Plan.from_json(each.plan) if each.plan else None
        peaks = plan.prediction.memory_bytes if plan is not None and plan.prediction else ()
        for record, share in zip(each.ranks, shares_of(each), strict=True):
            wanted = expected.get((record.vm, record.stage))
            number = each.num_steps
            rows.append(
                [
                    str(each.step),
                    f"{record.vm}.{record.stage}",
                    str(record.rank),
                    record.host,
                    seconds_text(record.compute_seconds / number),
                    seconds_text(wanted.compute_seconds / number) if wanted else "-",
                    f"{share.bubble:.0%}",
                    f"{share.exposed:.0%}",
                    f"{share.recompute:.0%}",
                    bytes_text(record.peak_bytes) if record.memory else "-",
                    bytes_text(peaks[record.vm][record.stage]) if peaks else "-",
                ]
            )
    yield _table("stages", rows)
    yield (
        "<p>V.S is stage S of V, a virtual machine (one replica of the pipeline). On a CPU the"
        " memory is all of the process's, and what is expected is only the model's part.</p>"
    )
    if slow := slow_rank(recordings):
        yield f'<p id="slow">{escape(slow)}</p>'


def _lanes(recordings: Sequence[Recording]) -> Iterator[str]:
    """The bytes that blocks have carried in all recorded steps, by lane."""
    num_bytes: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for each in recordings:
        for record in each.ranks:
            for mark in record.of(What.BLOCK):
                num_bytes[mark.name] += mark.num_bytes
                seconds[mark.name] += mark.seconds
    if not num_bytes:
        yield "<p>No large blocks were sent: one pipeline, and nothing moved or was swapped.</p>"
        return
    rows = [["lane", "bytes in the recorded steps", "from ready to sent, added up"]]
    for lane in sorted(num_bytes):
        rows.append([lane, bytes_text(num_bytes[lane]), seconds_text(seconds[lane])])
    yield _table("lanes", rows)


def _decisions(changes: Sequence[Change]) -> Iterator[str]:
    """A row for each automatic change of the plan."""
    if not changes:
        yield "<p>No change of the plan was decided by measurements.</p>"
        return
    rows = [["step", "change", "measured before", "expected", "measured after", "verdict"]]
    for each in changes:
        figures = (each.before_seconds, each.expected_seconds, each.after_seconds)
        shown = [seconds_text(figure) if figure is not None else "-" for figure in figures]
        shown[0] += " (estimated)" * each.is_estimated
        verdict = ": ".join(filter(None, (each.verdict, each.reason))) or "-"
        rows.append([str(each.step), each.what, *shown, verdict])
    yield _table("decisions", rows)
    yield (
        "<p>Seconds of a step, means over the steps that were measured. What is missing was not"
        " measured: the plan changed again, or the run ended, before.</p>"
    )


def _plans(recordings: Sequence[Recording]) -> Iterator[str]:
    """The first plan, and each that differs from the one before it in the owners of layers."""
    spans: list[tuple[Plan, list[Recording]]] = []
    for each in recordings:
        if not each.plan:
            continue
        plan = Plan.from_json(each.plan)
        if spans and plan.is_like(spans[-1][0]):
            spans[-1][1].append(each)
        else:
            spans.append((plan, [each]))
    for number, (plan, under) in enumerate(spans):
        step = under[0].step
        title = f"From step {step} on" if number else f"At step {step}"
        yield f'<h3 class="plan">{title}</h3>'
        if moved := sorted({mark.name for r in under[0].ranks for mark in r.of(What.MOVE)}):
            yield f"<ul>{''.join(f'<li>{escape(name)}</li>' for name in moved)}</ul>"
        yield _text(str(plan))
