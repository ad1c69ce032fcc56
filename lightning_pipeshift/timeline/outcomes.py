"""Changes of the plan that were decided by measurements, and the results of these decisions. A
value; JSON on disk.
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

FILE: Final = "decisions.json"
"""The file's name, in the folder of the recorded steps."""

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Something that became known of a decision.

    Args:
        step: the number of the step in which it became known, from 0.
        step_seconds: of a step at that time, the median of those measured.
        expected_gain: the new plan is in force, and a step was expected to become so many times as
            fast.
        measured_gain: so many times as fast a step has become under the last new plan.
        refused_gain: the new plan was refused, though so much was expected of it.
        reason: why it was refused.

    Raises:
        PlanError: not exactly one of the three gains is set.
    """

    step: int
    step_seconds: float
    expected_gain: float | None = None
    measured_gain: float | None = None
    refused_gain: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        gains = (self.expected_gain, self.measured_gain, self.refused_gain)
        if sum(gain is not None for gain in gains) != 1:
            raise PlanError("one of expected_gain, measured_gain and refused_gain must be set")

    @property
    def gain(self) -> float:
        """Whichever gain is set."""
        return self.expected_gain or self.measured_gain or self.refused_gain or 0.0

    @property
    def entries(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class _Outcomes:
    decisions: tuple[Outcome, ...]


_DOCUMENT: Final = Document(_Outcomes, "the decisions of a run", "record them again", _VERSION)


def save(outcomes: Iterable[Outcome], folder: Path) -> None:
    """Writes a run's outcomes into a folder. Raises OSError."""
    entries = {"version": _VERSION, "decisions": [each.entries for each in outcomes]}
    write_text(folder / FILE, json.dumps(entries, indent=1))


def load(folder: Path) -> tuple[Outcome, ...]:
    """The outcomes in a folder; none without a file. Raises PlanError if it is damaged."""
    path = folder / FILE
    return _DOCUMENT.load(path).decisions if path.exists() else ()
