"""Automatic changes of the plan: what each one expected, and what was measured. A value; JSON on
disk. The log, ``pipeshift move``, ``pipeshift timeline`` and the loggers show these figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_pipeshift.documents import Document
from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.files import write_text
from lightning_pipeshift.text import seconds_text

FILE: Final = "decisions.json"
"""The file's name, in the folder of the recorded steps."""

_VERSION: Final = 2

KEPT: Final = "kept"
UNDONE: Final = "undone"
REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True)
class Change:
    """An automatic change of the plan. Seconds are those of a step, means over the steps measured.

    Args:
        what: what changes, in words.
        before_seconds: measured under the plan before; estimated if no step has run under it.
        expected_seconds: expected under the new plan.
        step: the number of the first step under it, from 0; or of the step in which it was refused.
        after_seconds: measured under the new plan; ``None`` as long as it is not known.
        verdict: ``"kept"``, ``"undone"`` or ``"refused"``; empty as long as it is not known.
        reason: why it was refused, or is kept or undone.
        is_estimated: whether the seconds before are estimated.

    Raises:
        PlanError: the verdict is none of these.
    """

    what: str
    before_seconds: float
    expected_seconds: float
    step: int = 0
    after_seconds: float | None = None
    verdict: str = ""
    reason: str = ""
    is_estimated: bool = False

    def __post_init__(self) -> None:
        if self.verdict not in ("", KEPT, UNDONE, REFUSED):
            raise PlanError(f"verdict={self.verdict!r}: it is {KEPT!r}, {UNDONE!r} or {REFUSED!r}")

    def __str__(self) -> str:
        before, expected = map(seconds_text, (self.before_seconds, self.expected_seconds))
        took = "would take" if self.is_estimated else "took"
        text = f"{self.what}: a step {took} {before}, and {expected} is expected"
        if self.after_seconds is not None:
            text += f"; it takes {seconds_text(self.after_seconds)}"
        if self.verdict:
            text += f"; {self.verdict}"
        return text + (f", as {self.reason.rstrip('.')}" if self.reason else "")

    @property
    def entries(self) -> dict[str, Any]:
        """The fields that are known."""
        found = asdict(self).items()
        return {
            name: value for name, value in found if value not in (None, "") and value is not False
        }


@dataclass(frozen=True, slots=True)
class _Changes:
    decisions: tuple[Change, ...]


_DOCUMENT: Final = Document(_Changes, "the decisions of a run", "record them again", _VERSION)


def save(changes: Iterable[Change], folder: Path) -> None:
    """Writes a run's changes into a folder. Raises OSError."""
    entries = {"version": _VERSION, "decisions": [each.entries for each in changes]}
    write_text(folder / FILE, json.dumps(entries, indent=1))


def load(folder: Path) -> tuple[Change, ...]:
    """The changes in a folder; none without a file. Raises PlanError if it is damaged."""
    path = folder / FILE
    return _DOCUMENT.load(path).decisions if path.exists() else ()
