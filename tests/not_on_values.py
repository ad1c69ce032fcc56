"""The tests that ``core="values"`` cannot run yet, each with its kind.

With ``PIPESHIFT_CORE=values`` in the environment, all other tests run on that core, and these are
left out. ``pytest --listed`` runs these only: one that passes belongs in the list no longer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

ON_VALUES = os.environ.get("PIPESHIFT_CORE") == "values"
"""Whether tests run on it that do not name their core."""

KINDS = {
    "asynchronous": "the asynchronous schedule",
    "migration": "layers that change their owners while training runs",
    "memory": "MemoryCompression, and memory plans",
    "recomputation": "plans that recompute layers",
    "measured": "plans from measured layers, and runs that only measure",
    "trace": "the core that follows a step ahead: its errors, its log, and what it does internally",
}
"""What is not there yet, or belongs to the other core."""

LISTED: dict[str, str] = {}
"""Node ids, or the part of them in front of a ``[`` or a ``::``, and the kind of each."""


def entry_of(node_id: str, listed: dict[str, str]) -> str | None:
    """The entry of a test in a list like :data:`LISTED`; ``None`` if it has none."""
    parts = [node_id[: match.start()] for match in re.finditer(r"\[|::", node_id)]
    return next((part for part in (*parts, node_id) if part in listed), None)


def unused(listed: Iterable[str], used: set[str], collected: Sequence[str]) -> list[str]:
    """The entries that match no test, of files that were collected as a whole.

    Args:
        listed: the entries.
        used: those that match a test.
        collected: what pytest was given: files, folders, or tests, below the root.
    """
    whole = [path for path in collected if "::" not in path]
    return [
        entry
        for entry in listed
        if entry not in used
        and any(PurePath(entry.partition("::")[0]).is_relative_to(path) for path in whole)
    ]
