"""Reads a JSON document that a person may have edited, with errors that name the field.

Python's own error for a damaged file is a KeyError somewhere; ours says which field, what was
found, what is allowed.
"""

import json
from collections.abc import Iterable

from lightning_pipeshift.errors import PlanError


class Fields:
    """One JSON object's fields: all known, each of its type. Raises PlanError otherwise."""

    def __init__(self, value: object, where: str, known: Iterable[str]) -> None:
        known = tuple(known)
        if not isinstance(value, dict):
            raise PlanError(
                f"{where} is {_shown(value)}; it must be an object with {', '.join(known)}"
            )
        for name in known:
            if name not in value:
                raise PlanError(f"{where} has no field {name!r}; add it, or make the plan anew")
        for name in value:
            if name not in known:
                raise PlanError(
                    f"{where} has an unknown field {name!r}; allowed: {', '.join(known)}"
                )
        self._value = value
        self._where = where

    def text(self, name: str) -> str:
        value = self._value[name]
        if not isinstance(value, str):
            self._fail(name, "a text")
        return str(value)

    def integer(self, name: str) -> int:
        value = self._value[name]
        # JSON's true is an int to Python.
        if type(value) is not int:
            self._fail(name, "a whole number")
        return int(value)

    def number(self, name: str) -> float:
        value = self._value[name]
        if type(value) not in (int, float):
            self._fail(name, "a number")
        return float(value)

    def items(self, name: str) -> list[object]:
        value = self._value[name]
        if not isinstance(value, list):
            self._fail(name, "a list")
        return list(value)

    def integer_rows(self, name: str) -> tuple[tuple[int, ...], ...]:
        rows = self.items(name)
        for row in rows:
            if not isinstance(row, list) or any(type(item) is not int for item in row):
                self._fail(name, "a list of lists of whole numbers")
        return tuple(tuple(row) for row in rows if isinstance(row, list))

    def _fail(self, name: str, allowed: str) -> None:
        found = _shown(self._value[name])
        raise PlanError(f"{self._where}: field {name!r} is {found}; it must be {allowed}")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + " ..."
