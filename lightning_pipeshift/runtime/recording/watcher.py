"""The part of a :class:`~.recorder.Recorder` that those who are recorded use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_pipeshift.devices.streams import Event


class Watcher(Protocol):
    """Takes notes of a step that is recorded. In others the parts have none."""

    def now(self) -> Event:
        """The moment at which the device reaches this point."""

    def add(
        self,
        what: str,
        name: str,
        begin: Event | float,
        end: Event | float,
        peer: int = -1,
        num_bytes: int = 0,
    ) -> None:
        """Notes that something took some time: see
        :class:`~lightning_pipeshift.timeline.recording.Mark`.
        """

    def lasting(
        self, what: str, name: str, peer: int, num_bytes: int
    ) -> AbstractContextManager[Any]:
        """Context of something that begins in the step and may end after it."""
