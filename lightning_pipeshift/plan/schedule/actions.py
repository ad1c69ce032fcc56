"""The actions that a schedule consists of.

An action is one thing that a stage does. It has a text form and its inverse, so that a schedule is
a table of strings: it prints, parses, diffs, and is tested without a process. All that is known of
a kind of action stands in one table, :data:`PROPERTIES`: the lowering, the checker,
the simulator, the drawings and the stage that carries actions out read it there.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from lightning_pipeshift.errors import ScheduleError


class Kind(enum.Enum):
    """The kind of an action: an arrow on the left receives, one on the right sends, none computes.

    A receive is *posted* by its action and awaited by the compute action that needs it. A send only
    waits until earlier sends have been received.
    """

    FORWARD = "F"
    """Run the forward. Except on the first stage, waits for its RECEIVE_PAYLOAD."""
    BACKWARD = "B"
    """Run the backward. Except on the last stage, waits for its RECEIVE_GRADIENT."""
    WEIGHTS = "W"
    """Compute the gradients of weights that the backward has left for later. No other action waits
    for it."""
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
        neighbour: for communication, how many stages further the other end is. Payloads flow
            towards the last stage, gradients towards the first.
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
    Kind.WEIGHTS: Properties(words="the gradients of the weights", line="═", in_flight=-1),
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
_TEXT: Final = re.compile(r"(>?[A-Z])([0-9]+)(?:\.([0-9]+))?(>?)")


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a stage for one microbatch: ``F3``, ``>B0``, ``F3>``.

    Where stages have several chunks of layers, for one of them: ``F3`` for chunk 0, ``F3.1`` for
    chunk 1.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.microbatch < 0 or self.chunk < 0:
            raise ScheduleError(
                f"an action for microbatch {self.microbatch} and chunk {self.chunk}; they are"
                " counted from 0"
            )

    def __str__(self) -> str:
        mark, of = self.kind.value, f"{self.microbatch}"
        if self.chunk:
            of += f".{self.chunk}"
        return f"{mark[:-1]}{of}>" if self.kind.is_send else f"{mark}{of}"

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

    def counterpart(
        self, stage: int, num_stages: int, num_chunks: int = 1
    ) -> tuple[int, Action] | None:
        """The other end of a send or receive on ``stage``: its stage, and its receive or send.
        ``None`` if there is no stage at that end. Behind the last stage of a chunk comes the first
        one of the next chunk.
        """
        pair = self.kind.properties.pair
        assert pair is not None, f"{self} is no send or receive"
        there = self.chunk * num_stages + stage + self.kind.properties.neighbour
        if not 0 <= there < num_stages * num_chunks:
            return None
        return there % num_stages, Action(pair, self.microbatch, there // num_stages)

    def receive_needed(self, stage: int, num_stages: int, num_chunks: int = 1) -> Action | None:
        """The receive that this action waits for on ``stage``, if any."""
        return self._communication(self.kind.properties.needs, stage, num_stages, num_chunks)

    def send_caused(self, stage: int, num_stages: int, num_chunks: int = 1) -> Action | None:
        """The send of this action's result on ``stage``, if any."""
        return self._communication(self.kind.properties.causes, stage, num_stages, num_chunks)

    def _communication(
        self, kind: Kind | None, stage: int, num_stages: int, num_chunks: int
    ) -> Action | None:
        if kind is None:
            return None
        there = self.chunk * num_stages + stage + kind.properties.neighbour
        is_any = 0 <= there < num_stages * num_chunks
        return Action(kind, self.microbatch, self.chunk) if is_any else None


Row = tuple[Action, ...]
"""The actions of one stage, in order."""

Schedule = tuple[Row, ...]
"""The rows of all stages."""


def num_chunks_of(schedule: Iterable[Row]) -> int:
    """How many chunks of layers each stage has."""
    return 1 + max((action.chunk for row in schedule for action in row), default=0)


def parse_row(text: str) -> Row:
    """``"F0 F1 B0"`` as actions. Raises ScheduleError for a text that is no action."""
    return tuple(Action.parse(word) for word in text.split())


def format_row(row: Row) -> str:
    """The inverse of parse_row."""
    return " ".join(map(str, row))
