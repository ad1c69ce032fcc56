"""Bytes, seconds, names and tables as text for people. Imports neither torch nor Lightning."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from typing import Final

from lightning_pipeshift.errors import ConfigurationError, explained

_UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SIZES: Final = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b)?\s*", re.IGNORECASE)


def bytes_text(number: float) -> str:
    """Formats bytes, such as ``1.7 MB``."""
    for unit, size in _UNITS[:2]:
        # Megabytes up to ten thousand of them, so that a column is easy to compare.
        if number >= size * (10 if unit == "GB" else 0.1):
            return f"{number / size:.1f} {unit}"
    return f"{number / 1000:.1f} kB" if number >= 100 else f"{number:.0f} B" if number else "0"


def ceil_bytes_text(number: float) -> str:
    """Formats bytes that are recommended: rounded up, so that they are enough."""
    for unit, size in _UNITS:
        if number >= size:
            return f"{math.ceil(number / size * 100) / 100:.2f} {unit}"
    return f"{math.ceil(number)} bytes"


def seconds_text(number: float) -> str:
    """Formats seconds, such as ``549 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e-6:.3g} µs"


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table, with aligned columns.

    Args:
        rows: the header, and the cells of each further line.
        right: the columns that are aligned at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def count_text(number: int, one: str, many: str = "") -> str:
    """A number of things: ``"1 layer"``, ``"2 layers"``.

    Args:
        number: of them.
        one: the noun for one.
        many: the noun for several, if that is not ``one`` with an s.
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def layers_text(names: Sequence[str]) -> str:
    """A short text for some consecutive layers."""
    if len(names) < 3:
        return ", ".join(names) or "none"
    return f"{names[0]} to {names[-1]} ({len(names)})"


def bytes_of_text(name: str, size: float | str, least: float = 1.0) -> float | None:
    """A size in bytes; ``None`` for ``"auto"``.

    Args:
        name: the argument's.
        size: a number, or text with a unit.
        least: the smallest allowed value.

    Raises:
        ConfigurationError: it is not a size.
    """
    number: float | None = None
    if isinstance(size, str):
        if size.strip().lower() == "auto":
            return None
        match = _SIZE.fullmatch(size)
        if match is not None:
            number = float(match[1]) * _SIZES[(match[2] or "").lower()]
    elif isinstance(size, int | float) and not isinstance(size, bool):
        number = float(size)
    if number is None or not least <= number < float("inf"):
        raise ConfigurationError(
            f"MemoryCompression({name}={size!r}): pass bytes as a number of at least {least:g}, a"
            " text such as '20GB' or '512 MiB', or 'auto'."
        )
    return number


def capitalised(text: str) -> str:
    """Returns a text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def print_at_once(text: str) -> None:
    """Prints a message, whatever locks other threads hold."""
    os.write(2, f"PipeShift: {explained(text)}\n".encode(errors="replace"))
