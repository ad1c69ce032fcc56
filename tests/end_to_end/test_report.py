"""`pipeshift timeline`: a page of recorded steps, as a browser without a network shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pipeshift.commands import timeline
from lightning_pipeshift.commands.report_page import page
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.timeline import outcomes
from lightning_pipeshift.timeline.chrome_trace import chrome_trace
from lightning_pipeshift.timeline.expected import expected
from lightning_pipeshift.timeline.outcomes import Change
from lightning_pipeshift.timeline.recording import Mark, Memory, Recording, What
from tests.unit.timeline.test_timeline import PLAN


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "this test needs a browser: `apt-get install chromium` (as .ci/run does)"
    return found


def as_measured(step: int, moved: bool = False) -> Recording:
    """What the plan expects, as if it had been measured; before or after a move."""
    plan = PLAN
    if moved:
        plan = replace(PLAN.with_placement(Placement(((3, 1),))), prediction=PLAN.prediction)
    found = expected(plan)
    assert found is not None
    first, last = found.ranks
    marks = [*first.marks, Mark(What.BLOCK, "bulk", 1.0, 1.5, 1, 2_500_000)]
    if moved:
        marks.append(Mark(What.MOVE, "layer <2>: stage 1 to 0", 0.0, 1.0))
    first = replace(first, host="one", marks=tuple(marks), memory=(Memory(1.0, 14_000_000),))
    return Recording(step, 1, (first, last), plan.to_json())


def test_a_browser_shows_the_page_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "pipeshift"
    folder.mkdir(parents=True)
    for recording in (as_measured(100), as_measured(137, moved=True), as_measured(200, moved=True)):
        (folder / f"timeline-{recording.step}.json").write_text(chrome_trace(recording))
    known = [
        Change("first", 3.0, 2.0, is_estimated=True),
        Change("a", 2.0, 1.4, 120, verdict="refused", reason="rank <1> lacks 3 MB"),
        Change("b", 2.0, 1.25, 137, after_seconds=1.5, verdict="kept"),
        Change("c", 1.5, 1.25, 200),
    ]
    outcomes.save(known, folder)
    timeline.main([str(tmp_path / "run")])
    path = folder / "report.html"
    assert str(path) in capsys.readouterr().out
    assert not re.search(r"(src|href|@import|url\()", path.read_text())
    picture = tmp_path / "page.png"
    common = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    common += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", "--dump-dom"]
    # A browser that hangs fails the test; the limit decides nothing else.
    done = subprocess.run(
        [*common, path.as_uri()], capture_output=True, text=True, check=True, timeout=300
    )
    shown = done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<title>PipeShift: run</title>" in shown
    assert shown.count("<circle") == 3
    assert shown.count('class="plan"') == 2
    assert "From step 137 on" in shown
    assert "<li>layer &lt;2&gt;: stage 1 to 0</li>" in shown
    assert "PipeShift plan: 4 layers" in shown
    assert "14.0 MB" in shown
    stages = shown.split('id="stages"')[1].split("</table>")[0]
    # A header, and two stages in the first and in the last step: what was expected was measured.
    assert stages.count("<tr>") == 5
    cells = re.findall(r"<td>(.*?)</td>", stages)
    assert cells[4] == cells[5]
    rows = shown.split('id="decisions"')[1].split("</table>")[0].split("<tr>")[2:]
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows] == [
        ["0", "first", "3 s (estimated)", "2 s", "-", "-"],
        ["120", "a", "2 s", "1.4 s", "-", "refused: rank &lt;1&gt; lacks 3 MB"],
        ["137", "b", "2 s", "1.25 s", "1.5 s", "kept"],
        ["200", "c", "1.5 s", "1.25 s", "-", "-"],
    ]
    lanes = shown.split('id="lanes"')[1].split("</table>")[0]
    assert "<td>bulk</td><td>7.5 MB</td>" in lanes


def test_the_page_names_the_rank_that_delivers_least() -> None:
    equal = as_measured(100)
    assert 'id="slow"' not in page("run", [equal])
    first, last = equal.ranks

    def twice(mark: Mark) -> Mark:
        is_action = mark.what == What.ACTION
        return replace(mark, end=mark.end + mark.seconds) if is_action else mark

    paused = replace(last, host="other", marks=tuple(map(twice, last.marks)))
    found = page("run", [replace(equal, ranks=(first, paused))])
    assert (
        '<p id="slow">Rank 1 on other is slow: in one second it delivers what the fastest rank does'
        " in 500 ms.</p>"
    ) in found
