"""``pipeshift timeline``: draws a recorded step and what its plan expected."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_pipeshift.commands.brief_errors import brief_errors
from lightning_pipeshift.files import printable
from lightning_pipeshift.timeline.recording import Recording
from lightning_pipeshift.timeline.text import draw


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pipeshift timeline``, which imports neither torch nor Lightning."""
    parser = argparse.ArgumentParser(
        prog="pipeshift timeline",
        description="Shows a step that `PipelineTimeline()` has recorded, stage by stage, next to "
        "what the plan in force expected of it. The same file opens in https://ui.perfetto.dev.",
    )
    parser.add_argument(
        "file", type=Path, metavar="RUN.json", help="`pipeshift/timeline-STEP.json` of a run"
    )
    with brief_errors():
        options = parser.parse_args(sys.argv[2:] if arguments is None else arguments)
        print(printable(draw(Recording.load(options.file))))
