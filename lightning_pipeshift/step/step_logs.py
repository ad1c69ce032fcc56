"""Keeps the values that each microbatch's step logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pipeshift.model.user_state.logs import LoggedValue, LogRecorder
from lightning_pipeshift.values.gathering import kept
from lightning_pipeshift.values.value import running


class StepLogs(LogRecorder):
    """Records what each microbatch logs: their steps may run in parts, in turns."""

    def __init__(self, root: nn.Module) -> None:
        self._by_step: dict[Any, list[LoggedValue]] = {}
        super().__init__(root)
        self.current = _Copies()

    @property
    def records(self) -> list[LoggedValue]:
        """The logs of the step that runs now."""
        return self._by_step.setdefault(running(), [])

    @records.setter
    def records(self, records: list[LoggedValue]) -> None:
        self._by_step[running()] = records

    def take(self) -> list[LoggedValue]:
        """Returns the logs of the step that runs now, and forgets them."""
        return self._by_step.pop(running(), [])


class _Copies:
    """Copies logged values: :class:`~lightning_pipeshift.model.user_state.logs.Values` for a
    step on values.
    """

    def kept_value(self, leaf: Any) -> Any:
        """A copy of a value."""
        return kept(leaf)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for code other than the user's."""
        yield
