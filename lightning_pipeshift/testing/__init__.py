"""Checks that users can run on their own models: that PipeShift trains them unchanged.

``check_model`` trains a model for some steps on one stage and on several, and reports whether the
bits agree and what it found; ``pipeshift check`` does so for a configuration.
"""

from lightning_pipeshift.testing.checking import check_model
from lightning_pipeshift.testing.findings import (
    Findings,
    FoundBoundary,
    FoundCode,
    FoundLayer,
    FoundTensor,
)
from lightning_pipeshift.testing.report import CheckedRun, CheckReport, Difference, Failure
from lightning_pipeshift.testing.splits import Split

__all__ = [
    "CheckReport",
    "CheckedRun",
    "Difference",
    "Failure",
    "Findings",
    "FoundBoundary",
    "FoundCode",
    "FoundLayer",
    "FoundTensor",
    "Split",
    "check_model",
]
