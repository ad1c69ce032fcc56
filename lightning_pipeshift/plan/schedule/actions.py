"""The actions that a schedule consists of.

An action is one thing that a stage does. It has a text form and its inverse, so that a schedule is
a table of strings: it prints, parses, diffs, and is tested without a process. All that is known of
a kind of action stands in one table, :data:`PROPERTIES`: the lowering, the checker,
the simulator, the drawings and the stage that carries actions out read it there.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.schedule.route import Place, Route


class Kind(enum.Enum):
    """The kind of an action: an arrow on the left receives, one on the right sends, none computes.

    A receive is *posted* by its action and awaited by the compute action that needs it. A send only
    waits until earlier sends have been received.
    """

    FORWARD = "F"
    """Run the forward. Except at the first place, waits for its RECEIVE_PAYLOAD."""
    BACKWARD = "B"
    """Run the backward. Except at the last place, waits for its RECEIVE_GRADIENT."""
    RECOMPUTE = "R"
    """Recompute the forwards whose saved tensors were dropped, for the next backward. Does not
    wait: it fills the time in which a stage waits for a gradient."""
    RECEIVE_PAYLOAD = ">F"
    """Post the receive of a payload from the previous place; pairs with that place's
    SEND_PAYLOAD."""
    SEND_PAYLOAD = "F>"
    """Send the forward's payload to the next place; pairs with that place's RECEIVE_PAYLOAD."""
    RECEIVE_GRADIENT = ">B"
    """Post the receive of a gradient from the next place; pairs with that place's SEND_GRADIENT."""
    SEND_GRADIENT = "B>"
    """Send the payload's gradient to the previous place; pairs with that place's
    RECEIVE_GRADIENT."""

    @cached_property
    def is_receive(self) -> bool:
        return self.value.startswith(">")

    @cached_property
    def is_send(self) -> bool:
        return self.value.endswith(">")

    @cached_property
    def is_compute(self) -> bool:
        return not (self.is_receive or self.is_send)

    @cached_property
    def properties(self) -> Properties:
        """The kind's properties."""
        return PROPERTIES[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The properties of a kind of action.

    Args:
        words: for messages.
        cost: the field of ``plan.cost.simulator.Costs`` with its seconds; empty for none.
        line: its line in drawings of a step.
        in_flight: by how much it changes the number of microbatches whose saved tensors are held.
        neighbour: for communication, how many places further on the route the other end is.
            Payloads flow towards the last place, gradients towards the first.
        pair: for communication, what the other end does.
        needs: the receive that it waits for.
        causes: the send of its result.
    """

    words: str
    cost: str = ""
    line: str = "?"
    in_flight: int = 0
    neighbour: int = 0
    pair: Kind | None = None
    needs: Kind | None = None
    causes: Kind | None = None


PROPERTIES: Final = {
    Kind.FORWARD: Properties(
        words="the forward",
        cost="forward_seconds",
        line="─",
        in_flight=1,
        needs=Kind.RECEIVE_PAYLOAD,
        causes=Kind.SEND_PAYLOAD,
    ),
    Kind.BACKWARD: Properties(
        words="the backward",
        cost="backward_seconds",
        line="━",
        in_flight=-1,
        needs=Kind.RECEIVE_GRADIENT,
        causes=Kind.SEND_GRADIENT,
    ),
    Kind.RECOMPUTE: Properties(words="the recomputation", cost="recompute_seconds", line="~"),
    Kind.RECEIVE_PAYLOAD: Properties(
        words="the receive of the payload",
        neighbour=-1,
        pair=Kind.SEND_PAYLOAD,
    ),
    Kind.SEND_PAYLOAD: Properties(
        words="the send of the payload",
        cost="payload_seconds",
        neighbour=1,
        pair=Kind.RECEIVE_PAYLOAD,
    ),
    Kind.RECEIVE_GRADIENT: Properties(
        words="the receive of the gradient",
        neighbour=1,
        pair=Kind.SEND_GRADIENT,
    ),
    Kind.SEND_GRADIENT: Properties(
        words="the send of the gradient",
        cost="gradient_seconds",
        neighbour=-1,
        pair=Kind.RECEIVE_GRADIENT,
    ),
}

# ASCII digits only: int() would also accept the digits of other scripts.
_TEXT: Final = re.compile(r"(>?[A-Z])([0-9]+)(?:\.([1-9][0-9]*))?(>?)")


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a stage for one microbatch: ``F3``, ``>B0``, ``F3>``; ``F3.1`` for the
    stage's second chunk.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.microbatch < 0 or self.chunk < 0:
            raise ScheduleError(
                f"an action for chunk {self.chunk} of microbatch {self.microbatch}; both are"
                " counted from 0"
            )

    def __str__(self) -> str:
        mark = self.kind.value
        return f"{mark[:-1]}{self.label}>" if self.kind.is_send else f"{mark}{self.label}"

    @property
    def label(self) -> str:
        """The microbatch, and the chunk unless it is the first: ``3``, ``3.1``."""
        return f"{self.microbatch}.{self.chunk}" if self.chunk else str(self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``. Raises ScheduleError for a text that is no action."""
        match = _TEXT.fullmatch(text)
        mark = match[1] + match[4] if match else ""
        kind = next((kind for kind in Kind if kind.value == mark), None)
        if match is None or kind is None:
            known = " ".join(str(cls(kind, 3)) for kind in Kind)
            raise ScheduleError(
                f"{text!r} is no action; the actions (here of microbatch 3) are: {known}"
            )
        return cls(kind, int(match[2]), int(match[3] or 0))

    def counterpart(self, stage: int, route: Route) -> tuple[int, Action] | None:
        """The other end of a send or receive on ``stage``: its stage, and its receive or send.
        ``None`` if there is no other stage at that end.
        """
        pair = self.kind.properties.pair
        assert pair is not None, f"{self} is no send or receive"
        there = self._other_end(self.kind, stage, route)
        return there and (there.stage, Action(pair, self.microbatch, there.chunk))

    def receive_needed(self, stage: int, route: Route) -> Action | None:
        """The receive that this action waits for on ``stage``, if any."""
        return self._communication(self.kind.properties.needs, stage, route)

    def send_caused(self, stage: int, route: Route) -> Action | None:
        """The send of this action's result on ``stage``, if any."""
        return self._communication(self.kind.properties.causes, stage, route)

    def _communication(self, kind: Kind | None, stage: int, route: Route) -> Action | None:
        if kind is None or self._other_end(kind, stage, route) is None:
            return None
        return Action(kind, self.microbatch, self.chunk)

    def _other_end(self, kind: Kind, stage: int, route: Route) -> Place | None:
        """The other end of a send or receive of this action's chunk; ``None`` if that is no other
        stage.
        """
        there = route.neighbour(Place(stage, self.chunk), kind.properties.neighbour)
        return None if there is None or there.stage == stage else there


Row = tuple[Action, ...]
"""The actions of one stage, in order."""

Schedule = tuple[Row, ...]
"""The rows of all stages."""


def route_of(schedule: Schedule) -> Route:
    """The route of a schedule's microbatches: stages hold as many chunks as it mentions."""
    chunks = (action.chunk for row in schedule for action in row)
    return Route(len(schedule), 1 + max(chunks, default=0))


def parse_row(text: str) -> Row:
    """``"F0 F1 B0"`` as actions. Raises ScheduleError for a text that is no action."""
    return tuple(Action.parse(word) for word in text.split())


def format_row(row: Row) -> str:
    """The inverse of parse_row."""
    return " ".join(map(str, row))
