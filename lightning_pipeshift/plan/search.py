"""Interim."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.dynamic import fastest_cuts
from lightning_pipeshift.plan.workload import Cut, Workload


def best_cut(workload: Workload, recompute: str = "auto", start: Sequence[Cut] = ()) -> Cut:
    """Interim: the fastest by estimate."""
    cuts = fastest_cuts(workload)
    if not cuts:
        raise PlanError("nothing fits")
    times = workload.step_seconds(cuts)
    return cuts[times.index(min(times))]
