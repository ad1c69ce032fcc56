"""Documents that a user may have edited: read into dataclasses, and written as text.

The dataclasses say what a document has: their fields, the types of these, and what the constructors
check. pydantic checks the types, without conversions: ``"4"`` is no number, and ``true`` neither.
Python's own error for a damaged file is a KeyError; the errors of this module contain the field,
the value found, and the allowed values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter
from pydantic import ValidationError as PydanticError

from lightning_pipeshift.errors import PipeShiftError, PlanError
from lightning_pipeshift.files import MOST_BYTES, parse_json, read_text, shortened

T = TypeVar("T")

# What is allowed, by the types of pydantic's errors.
_ALLOWED: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number that is finite",
    "string_type": 'a text; a number goes in quotes, as "4090"',
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "an object",
    "dataclass_type": "an object",
}


class Document(Generic[T]):
    """The reader and writer of one kind of document.

    Args:
        of: the dataclass that a document becomes.
        name: of the document, in errors.
        again: what to do if a document cannot be used, such as ``make the plan again``.
        version: the only one that is read; None: these documents have no version.
    """

    def __init__(self, of: type[T], name: str, again: str = "", version: int | None = None) -> None:
        self._of = of
        self._name = name
        self._again = again
        self._version = version

    @cached_property
    def _adapter(self) -> TypeAdapter[list[T]]:
        # A list, as pydantic takes a configuration for dataclasses from what they are in.
        return TypeAdapter(
            list[self._of],  # type: ignore[name-defined]
            config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False),
        )

    def load(self, path: str | Path) -> T:
        """The value of a JSON document's file. Raises PlanError, naming the file."""
        text = read_document(path, self._name)
        try:
            return self.read(self.parse(text))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def parse(self, text: str) -> Any:
        """The content of a JSON document, for :meth:`read`. Raises PlanError if it is none."""
        try:
            return parse_json(text)
        except ValueError as error:
            raise PlanError(
                f"{self._name} is not a JSON document: {error}; take an undamaged copy, or"
                f" {self._again}"
            ) from error

    def read(self, value: Any) -> T:
        """The value of a document that was parsed.

        Raises:
            PlanError: it is damaged, or of another version.
        """
        # Before the fields: those of another version may have other names.
        if self._version is not None and isinstance(value, dict):
            version = value.get("version")
            if version != self._version:
                raise PlanError(
                    f"{self._name}: field 'version' is {shown(version)}; this PipeShift reads"
                    f" version {self._version}: {self._again}, or use the version that made it"
                )
            value = {name: part for name, part in value.items() if name != "version"}
        try:
            # As JSON: there pydantic takes lists for tuples, and still converts nothing else.
            return self._adapter.validate_json(json.dumps([value], default=str))[0]
        except PydanticError as error:
            raise PlanError(self._message(error)) from None
        except (PipeShiftError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PlanError(f"{self._name}: {error}") from error

    def entries(self, value: T) -> dict[str, Any]:
        """A value as what JSON has, with its version, without fields that have their default."""
        found = self._adapter.dump_python([value], exclude_defaults=True, warnings=False)[0]
        return found if self._version is None else {"version": self._version, **found}

    def _message(self, error: PydanticError) -> str:
        """The first error, with its place in the document."""
        first = error.errors(include_url=False)[0]
        kind, text, value = (
            first["type"],
            first["msg"].removeprefix("Value error, "),
            first["input"],
        )
        place = list(first["loc"][1:])
        field = ""
        if kind == "missing":
            text = f" has no field {place.pop()!r}; add it"
            text += f", or {self._again}" if self._again else ""
        elif kind == "unexpected_keyword_argument":
            text = f" has an unknown field {shortened(repr(place.pop()))}; remove it"
        elif kind == "value_error" and isinstance(value, dict):
            text = f": {text}"
        else:
            if kind != "dataclass_type":
                # The last name, and its index in what has that name.
                at = max(i for i, key in enumerate(place) if isinstance(key, str))
                field = f": field {_path('', place[at:])!r}"
                del place[at:]
            allowed = _ALLOWED.get(kind, text.removeprefix("Input should be "))
            text = f" is {shown(value)}; it must be {allowed}"
        return _path(f"{self._name}: " if place else self._name, place) + field + text


def _path(path: str, place: Iterable[int | str]) -> str:
    """Extends a path, as ``the plan: layers[1]`` by ``.tensors`` and ``[0]``."""
    for key in place:
        if isinstance(key, int):
            path += f"[{key}]"
        elif key.isidentifier():
            path += f".{key}" if path and path[-1] != " " else key
        else:
            path += f"[{shortened(repr(key))}]"
    return path


def read_document(path: str | Path, name: str, most: int = MOST_BYTES) -> str:
    """The text of a document.

    Args:
        path: the file.
        name: of the document, in errors.
        most: how many bytes it may have.

    Raises:
        PlanError: it is not a file, too large, or not text.
    """
    try:
        return read_text(path, most)
    except (OSError, ValueError) as error:
        raise PlanError(f"{name} {str(path)!r} cannot be read: {error}") from error


def as_json(value: Any, by_line: Collection[str]) -> str:
    """A JSON document, to be read, edited and compared: one field per line.

    Args:
        value: an object.
        by_line: the fields, in it or in each other, of which each entry has a line of its own.
    """
    return _lines(value, by_line, "") + "\n"


def _lines(value: Any, by_line: Collection[str], margin: str) -> str:
    inner = margin + "  "

    def text(name: str, part: Any) -> str:
        return _lines(part, by_line, inner) if part and name in by_line else json.dumps(part)

    if isinstance(value, dict):
        entries = [f"{json.dumps(name)}: {text(name, part)}" for name, part in value.items()]
    else:
        entries = [text("", part) for part in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(inner + entry for entry in entries) + f"\n{margin}{end}"


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
