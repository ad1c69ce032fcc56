"""Explains out-of-memory errors: the layer in which they occur, and the budget that would have
helped.
"""

from __future__ import annotations

import re
from typing import Final

import torch

from lightning_pipeshift.errors import BudgetError

_ASKED: Final = re.compile(r"Tried to allocate ([0-9.]+) ([KMG]iB|bytes)")
_UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MARGIN: Final = 1.1


def explained(
    error: torch.OutOfMemoryError,
    where: str,
    action: str,
    layer: str,
    budget_bytes: float | None,
    total_bytes: float,
) -> BudgetError:
    """Returns the error for a step that has run out of memory.

    Args:
        error: torch's.
        where: the stage, in words.
        action: the action that failed, as text of a schedule.
        layer: the one that runs, or that has run last; empty before the first.
        budget_bytes: that of the device, if there is one.
        total_bytes: the device's memory; 0 where that is not known.
    """
    where_in_it = f"in the layer {layer!r}" if layer else "between layers"
    asked = _ASKED.search(str(error))
    lacking = float(asked[1]) * _UNITS[asked[2]] if asked else 0.0
    known = budget_bytes if budget_bytes is not None else total_bytes
    advice = "`MemoryCompression(budget=...)` with less than the device has"
    if known:
        # The failed allocation's size, and memory that fragmentation wastes in the allocator, are
        # missing.
        enough = max(known - _MARGIN * lacking, 0.5 * known) if lacking else 0.9 * known
        advice = f"`MemoryCompression(budget={enough / 1e9:.2f}e9)`"
        if budget_bytes is not None:
            advice += f" instead of {budget_bytes / 1e9:.2f}e9"
    return BudgetError(
        f"{where} has run out of memory {where_in_it} (action {action}):"
        f" {str(error).splitlines()[0]} What would have helped: {advice}, smaller"
        " microbatches, or more stages."
    )
