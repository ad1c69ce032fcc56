"""Replaces the plan in force. Another plan is first requested; then its layers are on their way to
their new owners; then it is in force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.ownership.migration import Migration, Moving, Turn
from lightning_pipeshift.runtime.recording.recorder import Recorder


class Changes:
    """The plans that are to come into force on one rank, one after the other.

    A change begins when the one before it has surely ended on every stage.

    Args:
        start: starts to move layers for a plan, given the turn at which every stage calls it.
    """

    def __init__(self, start: Callable[[Plan, Turn], Migration]) -> None:
        self._start = start
        self._wanted: deque[Plan] = deque()
        self.next: Plan | None = None
        """The plan whose layers are on their way, and that is not in force yet."""
        self.migration: Migration | None = None
        """The last move of layers that was begun, if there was one."""
        self._recorder: Recorder | None = None
        self._seconds = 0.0
        """Those of the change before the last."""

    @property
    def last(self) -> Plan | None:
        """The plan that will be in force after all requested changes; ``None`` if that is the
        present one.
        """
        return self._wanted[-1] if self._wanted else self.next

    @property
    def num_waiting(self) -> int:
        """How many changes, or parts of one, are not in force."""
        return len(self._wanted) + (self.next is not None)

    @property
    def moving(self) -> Moving:
        """The layers that take memory of this stage because they move."""
        return self.migration.moving if self.migration is not None else Moving()

    @property
    def seconds(self) -> float:
        """How long this stage has waited because of the last change that is in force."""
        migration = self.migration
        return (
            migration.exposed_seconds
            if migration is not None and migration.has_begun
            else self._seconds
        )

    def record(self, recorder: Recorder | None) -> None:
        """Sets who takes notes of waits for layers, also of a move that has begun; ``None``:
        nothing does.
        """
        self._recorder = recorder
        if self.migration is not None:
            self.migration.recorder = recorder

    def request(self, wanted: Iterable[Plan]) -> None:
        """Asks for plans, one after the other, in place of those whose layers are not on their way.
        Every stage calls this at the same time.
        """
        self._wanted = deque(wanted)

    # --- a turn, in the order of the calls ---

    def before_turn(self, turn: Turn) -> Plan | None:
        """Prepares the stage for its next turn; returns the plan that comes into force with it, if
        one does.
        """
        plan = None
        if self.migration is not None and self.migration.before_turn(turn):
            plan, self.next = self.next, None
        return plan

    def begin(self, turn: Turn) -> None:
        """Begins the next change, if there is one. Every stage calls this at the same turn."""
        is_over = self.migration is None or self.migration.is_over_by(turn)
        if self._wanted and self.next is None and is_over:
            if self.migration is not None:
                self.migration.finish()
                self._seconds = self.migration.exposed_seconds
            self.next = self._wanted.popleft()
            self.migration = self._start(self.next, turn)
            self.migration.recorder = self._recorder

    def weights_are_final(self, number: int) -> None:
        """Called when the weights are those of the next turn, unless user code changes them.

        Args:
            number: of that turn.
        """
        if self.migration is not None:
            self.migration.send_newest(number)

    # --- changes that are cancelled ---

    def cancel(self) -> None:
        """Cancels the changes that have not begun, on all stages, and waits for transfers."""
        self._wanted.clear()
        if self.migration is not None and self.next is not None:
            self.migration.cancel()
        self.next = None

    def abandon(self) -> None:
        """Lets the threads of moves end, after an error or at the end of the run."""
        if self.migration is not None:
            self.migration.abandon()
