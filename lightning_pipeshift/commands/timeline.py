"""``pipeshift timeline``: draws a recorded step and what its plan expected, or writes a page about
a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_pipeshift.commands.brief_errors import brief_errors
from lightning_pipeshift.commands.report_page import page
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.files import printable, write_text
from lightning_pipeshift.step.control_files import FOLDER
from lightning_pipeshift.timeline import outcomes
from lightning_pipeshift.timeline.recording import Recording
from lightning_pipeshift.timeline.text import draw


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pipeshift timeline``, which imports neither torch nor Lightning."""
    parser = argparse.ArgumentParser(
        prog="pipeshift timeline",
        description="Shows a step that `PipelineTimeline()` has recorded, stage by stage, next to "
        "what the plan in force expected of it. The same file opens in https://ui.perfetto.dev. Of "
        "a run's folder, writes one HTML page: its plans before and after each move, step times, "
        "stages, memory and lanes, expected and measured. The page needs no network.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run's folder, or `pipeshift/timeline-STEP.json`"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="the page; by default `pipeshift/report.html`"
    )
    options = parser.parse_args(sys.argv[2:] if arguments is None else arguments)
    with brief_errors():
        if not options.run.is_dir():
            print(printable(draw(Recording.load(options.run))))
            return
        folder, recordings = recordings_of(options.run)
        path = options.html or folder / "report.html"
        title = f"PipeShift: {options.run.resolve().name}"
        write_text(path, page(title, recordings, outcomes.load(folder)))
        print(f"written to {path}")


def recordings_of(run: Path) -> tuple[Path, list[Recording]]:
    """The folder of a run's recordings, and these in the order of their steps.

    Args:
        run: the run's own folder, or that of the recordings.

    Raises:
        ConfigurationError: there are none.
        PlanError: one is damaged.
    """
    for folder in (run / FOLDER, run):
        if paths := list(folder.glob("timeline-*.json")):
            found = [Recording.load(path) for path in paths]
            return folder, sorted(found, key=lambda each: each.step)
    raise ConfigurationError(
        f"No step of a run is recorded in {str(run)!r}: there is no `{FOLDER}/timeline-*.json`."
        " Pass the logger's folder of a run whose Trainer has the callback `PipelineTimeline()`,"
        " and that was longer than its `every_n_steps`."
    )
