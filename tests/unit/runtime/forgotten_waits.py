"""Takes waits out of the package's code, to see that a test notices."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest


class Forgetful:
    """An event one of whose methods does nothing.

    Args:
        event: does the others.
        method: the name of the one.
    """

    def __init__(self, event: Any, method: str) -> None:
        self._remembered = event
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == self._method else getattr(self._remembered, name)


def forget(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    function: str,
    method: str,
    number: int = 0,
    maker: str = "record_event",
) -> None:
    """Takes a wait out of a function: the event that it records has a method that does nothing.

    Args:
        monkeypatch: undoes it.
        module: of the function.
        function: its name.
        method: ``"wait"``, ``"synchronize"``, or ``"query"``, which then always says that the event
            has been reached.
        number: which of the events that the function records, in the order of the lines.
        maker: what makes the event: ``"record_event"``, or ``"shared_event"``.
    """
    record = vars(module)[maker]
    lines = [
        call.lineno
        for body in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(body, ast.FunctionDef) and body.name == function
        for call in ast.walk(body)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == maker
    ]
    line = sorted(lines)[number]

    def recorded(*args: Any, **kwargs: Any) -> Any:
        event = record(*args, **kwargs)
        return Forgetful(event, method) if sys._getframe(1).f_lineno == line else event

    monkeypatch.setattr(module, maker, recorded)
