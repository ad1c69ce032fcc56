"""Documents that a user may have edited: read with errors that name the field, written atomically.

Python's own error for a damaged file is a KeyError; the errors of this module contain the field,
the value found, and the allowed values.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.files import MOST_BYTES, read_text, temporary_next_to


class Fields:
    """One JSON object's fields: all known, each of its type. Raises PlanError otherwise.

    Args:
        value: the value that was read.
        where: its name in errors.
        known: the fields that it must have.
        optional: further fields that it may have.
        instead: an alternative remedy for a missing field.
    """

    def __init__(
        self,
        value: object,
        where: str,
        known: Iterable[str],
        optional: Iterable[str] = (),
        instead: str = "or make the plan again",
    ) -> None:
        required = tuple(known)
        known = (*required, *optional)
        if not isinstance(value, dict):
            raise PlanError(
                f"{where} is {shown(value)}; it must be an object with {', '.join(known)}"
            )
        for name in required:
            if name not in value:
                remedy = ", ".join(filter(None, ("add it", instead)))
                raise PlanError(f"{where} has no field {name!r}; {remedy}")
        for name in value:
            if name not in known:
                raise PlanError(
                    f"{where} has an unknown field {name!r}; allowed: {', '.join(known)}"
                )
        self._value = value
        self._where = where

    def __contains__(self, name: str) -> bool:
        """Whether an optional field is present."""
        return name in self._value

    def text(self, name: str) -> str:
        value = self._value[name]
        if not isinstance(value, str):
            self.fail(name, "a text")
        return str(value)

    def integer(self, name: str) -> int:
        value = self._value[name]
        if not _is_integer(value):
            self.fail(name, "a whole number of at most 18 digits")
        return int(value)

    def number(self, name: str) -> float:
        value = self._value[name]
        if type(value) not in (int, float):
            self.fail(name, "a number")
        try:
            return float(value)
        except OverflowError:
            self.fail(name, "a number of at most 308 digits")

    def items(self, name: str) -> list[object]:
        value = self._value[name]
        if not isinstance(value, list):
            self.fail(name, "a list")
        return list(value)

    def integer_rows(self, name: str) -> tuple[tuple[int, ...], ...]:
        rows = self.items(name)
        for row in rows:
            if not isinstance(row, list) or not all(map(_is_integer, row)):
                self.fail(name, "a list of lists of whole numbers of at most 18 digits")
        return tuple(tuple(row) for row in rows if isinstance(row, list))

    def numbers(self, name: str) -> tuple[float, ...]:
        row = self.items(name)
        if any(type(item) not in (int, float) for item in row):
            self.fail(name, "a list of numbers")
        try:
            return tuple(float(item) for item in row if isinstance(item, (int, float)))
        except OverflowError:
            self.fail(name, "a list of numbers of at most 308 digits")

    def integers(self, name: str) -> tuple[int, ...]:
        row = self.items(name)
        if not all(map(_is_integer, row)):
            self.fail(name, "a list of whole numbers of at most 18 digits")
        return tuple(item for item in row if isinstance(item, int))

    def entries(self, name: str) -> dict[str, object]:
        """An object whose names are not known in advance."""
        value = self._value[name]
        if not isinstance(value, dict):
            self.fail(name, "an object")
        return dict(value)

    def value(self, name: str) -> object:
        """A field of any type, which the caller checks."""
        return self._value[name]

    def fail(self, name: str, allowed: str) -> NoReturn:
        """Raises the PlanError for a wrong field."""
        found = shown(self._value[name])
        raise PlanError(f"{self._where}: field {name!r} is {found}; it must be {allowed}")


def _is_integer(value: object) -> bool:
    # In Python, JSON's true is an int.
    return type(value) is int and abs(value) < 10**18


def read_document(path: str | Path, what: str, most: int = MOST_BYTES) -> str:
    """The text of a document.

    Args:
        path: the file.
        what: its name in errors.
        most: how many bytes it may have.

    Raises:
        PlanError: it is not a file, too large, or not text.
    """
    try:
        return read_text(path, most)
    except (OSError, ValueError) as error:
        raise PlanError(f"{what} {str(path)!r} cannot be read: {error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Writes to a temporary file first, so that no reader ever sees a partial document."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_next_to(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def shown(value: object) -> str:
    """A value for a message: its beginning, if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # YAML has dates, JSON has none; and numbers can have too many digits.
        try:
            text = repr(value)
        except (ValueError, RecursionError):
            text = f"a very long {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + " ..."
