"""Checks that users can run on their own models, and ranks for tests of their own.

``check_model`` trains a model for some steps on one stage and on several, and reports whether the
bits agree and what it found; ``pipeshift check`` does so for a configuration. ``run_ranks`` calls a
function as the ranks of one job, each a process, and returns what each rank returned.
"""

from lightning_pipeshift.testing.checking import check_model
from lightning_pipeshift.testing.findings import (
    Findings,
    FoundBoundary,
    FoundCode,
    FoundLayer,
    FoundTensor,
)
from lightning_pipeshift.testing.ranks import (
    Launched,
    LaunchFailed,
    RanksFailed,
    launch_script,
    launch_torchrun,
    run_ranks,
)
from lightning_pipeshift.testing.report import CheckedRun, CheckReport, Difference, Failure
from lightning_pipeshift.testing.sleeping import SleepingLayer
from lightning_pipeshift.testing.splits import Split
from lightning_pipeshift.testing.workers import Outcome

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
    "LaunchFailed",
    "Launched",
    "Outcome",
    "RanksFailed",
    "SleepingLayer",
    "Split",
    "check_model",
    "launch_script",
    "launch_torchrun",
    "run_ranks",
]
