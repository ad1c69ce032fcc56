"""Tables of the stages as text. Imports neither torch nor Lightning, for ``pipeshift status``."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, with aligned columns.

    Args:
        rows: the header, and the cells of each further line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def layers_text(names: Sequence[str]) -> str:
    """A short text for some consecutive layers."""
    if len(names) < 3:
        return ", ".join(names) or "none"
    return f"{names[0]} to {names[-1]} ({len(names)})"
