"""Says why nothing fits in memory, and what would."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.plan.dynamic import narrowest
from lightning_pipeshift.plan.recomputation import bytes_held
from lightning_pipeshift.plan.workload import Numbers, Workload


def nothing_fits(workload: Workload, recompute: str) -> PlanError:
    """The error for a workload of which no cut fits.

    Args:
        workload: the layers and stages.
        recompute: what the user allows, ``"auto"``, ``"full"`` or ``"none"``.
    """
    held = _held(workload, recompute)
    over, counts = narrowest(held - workload.room_bytes[:, None, None])
    ...
