"""Finds stages that wait for each other for ever, as their programs differ.

A stage that has waited for a second tells all others what it waits for, and how many messages it
has sent to and received from each of them. If nothing is under way between stages that all wait for
each other, and that is so twice in a row, none of them will ever go on (F. Mattern, "Algorithms for
distributed termination detection", 1987, section 5: the four counters).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.comm.messages import ADVICE, Place


class Wait(NamedTuple):
    """A stage's wait, as it tells it to the other stages.

    Args:
        number: of the wait; the same while it lasts.
        place: in the program.
        sources: the stages that could end it.
        sent: how many messages it has sent to each stage.
        received: how many messages it has received from each.
        phase: in which it waits: see :meth:`Mailbox.pass_phase`.
    """

    number: int
    place: Place
    sources: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    phase: int


class Circle(NamedTuple):
    """Stages that wait for each other.

    Args:
        waits: of each of them; empty if there are none.
        num_told: how often each stage had told of a wait by then.
    """

    waits: dict[int, Wait]
    num_told: tuple[int, ...]

    def lasts_since(self, before: Circle) -> bool:
        """Whether all of these stages have told again, since an earlier look, that they wait."""
        return bool(self.waits) and all(
            self.num_told[stage] > before.num_told[stage] for stage in self.waits
        )

    def error(self, name: Callable[[int], str]) -> LayerError:
        """Returns the error that says where each of these stages waits.

        Args:
            name: returns a stage's name.
        """
        each = "; ".join(
            f"{name(stage)} is at `{wait.place.label}` ({wait.place.line}) and waits for"
            f" {' or '.join(map(name, wait.sources))}"
            for stage, wait in sorted(self.waits.items())
        )
        return LayerError(
            f"The ranks run different programs, and wait for each other: {each}. {ADVICE}"
        )


NO_CIRCLE = Circle({}, ())


class Waits:
    """The latest wait that each stage has told of.

    Args:
        num_stages: how many there are.
    """

    def __init__(self, num_stages: int) -> None:
        self._waits: dict[int, Wait] = {}
        self._num_told = [0] * num_stages

    def note(self, stage: int, wait: Wait) -> None:
        """Notes what a stage tells."""
        self._waits[stage] = wait
        self._num_told[stage] += 1

    def circle(self, stage: int) -> Circle:
        """Returns all stages that a stage waits for, directly or not, with itself; none if one of
        them does not wait, or if a message is under way between them.
        """
        found: dict[int, Wait] = {}
        todo = [stage]
        while todo:
            one = todo.pop()
            if one in found:
                continue
            if one not in self._waits:
                return NO_CIRCLE
            found[one] = self._waits[one]
            todo += self._waits[one].sources
        for sender, wait in found.items():
            for receiver, other in found.items():
                if sender != receiver and wait.sent[receiver] != other.received[sender]:
                    return NO_CIRCLE
        return Circle(found, tuple(self._num_told))
