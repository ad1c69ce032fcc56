"""The actions that a schedule consists of.

An action is one thing that a stage does. It has a text form and its inverse, so that a schedule is
a table of strings: it prints, parses, diffs, and is tested without a process. Only the tables below
define which action needs which: ``communication``, checker, simulator and executor use them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from lightning_pipeshift.errors import ScheduleError


class Kind(enum.Enum):
    """The kind of an action: an arrow on the left receives, one on the right sends, none computes.

    A receive is *posted* by its action and awaited by the compute action that needs it. A send only
    waits until earlier sends have been received.
    """

    FORWARD = "F"
    """Run the forward. Except on stage 0, waits for its RECEIVE_PAYLOAD."""
    BACKWARD = "B"
    """Run the backward. Except on the last stage, waits for its RECEIVE_GRADIENT."""
    RECOMPUTE = "R"
    """Recompute the forwards whose saved tensors were dropped, for the next backward. Does not
    wait: it fills the time in which a stage waits for a gradient."""
    RECEIVE_PAYLOAD = ">F"
    """Post the receive of a payload from the previous stage; pairs with that stage's
    SEND_PAYLOAD."""
    SEND_PAYLOAD = "F>"
    """Send the forward's payload to the next stage; pairs with that stage's RECEIVE_PAYLOAD."""
    RECEIVE_GRADIENT = ">B"
    """Post the receive of a gradient from the next stage; pairs with that stage's SEND_GRADIENT."""
    SEND_GRADIENT = "B>"
    """Send the payload's gradient to the previous stage; pairs with that stage's
    RECEIVE_GRADIENT."""

    @property
    def is_receive(self) -> bool:
        return self.value.startswith(">")

    @property
    def is_send(self) -> bool:
        return self.value.endswith(">")

    @property
    def is_compute(self) -> bool:
        return not (self.is_receive or self.is_send)


_RECEIVE_NEEDED: Final = {
    Kind.FORWARD: Kind.RECEIVE_PAYLOAD,
    Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
}
_SEND_CAUSED: Final = {Kind.FORWARD: Kind.SEND_PAYLOAD, Kind.BACKWARD: Kind.SEND_GRADIENT}
_PAIR: Final = {
    Kind.SEND_PAYLOAD: Kind.RECEIVE_PAYLOAD,
    Kind.RECEIVE_PAYLOAD: Kind.SEND_PAYLOAD,
    Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT,
    Kind.RECEIVE_GRADIENT: Kind.SEND_GRADIENT,
}
# Payloads flow towards the last stage, gradients towards stage 0.
_STEPS_TO_NEIGHBOUR: Final = {
    Kind.SEND_PAYLOAD: 1,
    Kind.RECEIVE_PAYLOAD: -1,
    Kind.SEND_GRADIENT: -1,
    Kind.RECEIVE_GRADIENT: 1,
}

# ASCII digits only: int() would also accept the digits of other scripts.
_TEXT: Final = re.compile(r"(>?[A-Z])([0-9]+)(>?)")


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a stage for one microbatch: ``F3``, ``>B0``, ``F3>``."""

    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.microbatch < 0:
            raise ScheduleError(
                f"an action for microbatch {self.microbatch}; microbatches are counted from 0"
            )

    def __str__(self) -> str:
        mark = self.kind.value
        if self.kind.is_send:
            return f"{mark[:-1]}{self.microbatch}>"
        return f"{mark}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``. Raises ScheduleError for a text that is no action."""
        match = _TEXT.fullmatch(text)
        mark = match[1] + match[3] if match else ""
        kind = next((kind for kind in Kind if kind.value == mark), None)
        if match is None or kind is None:
            known = " ".join(str(cls(kind, 3)) for kind in Kind)
            raise ScheduleError(
                f"{text!r} is no action; the actions (here of microbatch 3) are: {known}"
            )
        return cls(kind, int(match[2]))

    def neighbour(self, stage: int) -> int:
        """The stage at the other end of this send or receive; may be one past either end."""
        return stage + _STEPS_TO_NEIGHBOUR[self.kind]

    def pair(self) -> Action:
        """For a send, the neighbour's receive; for a receive, the neighbour's send."""
        return Action(_PAIR[self.kind], self.microbatch)

    def receive_needed(self, stage: int, num_stages: int) -> Action | None:
        """The receive that this action waits for on ``stage``, if any."""
        return self._communication(_RECEIVE_NEEDED.get(self.kind), stage, num_stages)

    def send_caused(self, stage: int, num_stages: int) -> Action | None:
        """The send of this action's result on ``stage``, if any."""
        return self._communication(_SEND_CAUSED.get(self.kind), stage, num_stages)

    def _communication(self, kind: Kind | None, stage: int, num_stages: int) -> Action | None:
        if kind is None:
            return None
        action = Action(kind, self.microbatch)
        return action if 0 <= action.neighbour(stage) < num_stages else None


Row = tuple[Action, ...]
"""The actions of one stage, in order."""

Schedule = tuple[Row, ...]
"""The rows of all stages."""


def parse_row(text: str) -> Row:
    """``"F0 F1 B0"`` as actions. Raises ScheduleError for a text that is no action."""
    return tuple(Action.parse(word) for word in text.split())


def format_row(row: Row) -> str:
    """The inverse of parse_row."""
    return " ".join(map(str, row))
