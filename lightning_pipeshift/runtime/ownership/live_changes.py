"""The changes of the plan in an asynchronous pipeline, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdate
from lightning_pipeshift.runtime.ownership.live_migration import LiveMigration
from lightning_pipeshift.runtime.recording.recorder import Recorder


class LiveChanges:
    """Changes of the plan on one rank.

    A change begins when the one before it has surely ended on every stage: by a rule that depends
    on the numbers of minibatches only, so that all stages agree without a message. With a cut-over
    ``c``, the last minibatch on the old owners is ``c - 1``, and ``N`` stages have run its backward
    before their turns for minibatch ``c + N - 1``.

    Args:
        num_stages: of the deepest virtual machine.
        start: starts to move layers for a plan, given the minibatch before whose forward it is
            announced.
    """

    def __init__(self, num_stages: int, start: Callable[[Plan, int], LiveMigration]) -> None:
        self._num_stages = num_stages
        self._start = start
        self._wanted: deque[Plan] = deque()
        self._plan: Plan | None = None
        self._migration: LiveMigration | None = None
        self._recorder: Recorder | None = None
        # The cut-over of the last change that has begun, and the number of its update.
        self._last = self._last_update = -(2**62)

    @property
    def last(self) -> Plan | None:
        """The plan that will be in force after all changes; ``None`` if that is the present one."""
        return self._wanted[-1] if self._wanted else self._plan

    @property
    def next(self) -> Plan | None:
        """The plan whose layers are on their way, and that is not in force yet."""
        return self._plan

    def request(self, wanted: Iterable[Plan]) -> None:
        """Asks for plans, one after the other, in place of those that have not begun. Every stage
        calls this before the same minibatch.
        """
        self._wanted = deque(wanted)

    @property
    def migration(self) -> LiveMigration | None:
        """The move of layers that is under way, if there is one."""
        return self._migration

    def record(self, recorder: Recorder | None) -> None:
        """Sets who takes notes of waits for layers."""
        self._recorder = recorder
        if self._migration is not None:
            self._migration.recorder = recorder

    @property
    def layers(self) -> frozenset[int]:
        """The layers that come to this stage or leave it in that move; empty when it is over."""
        return self._migration.layers if self._migration is not None else frozenset()

    def before_turn(
        self, minibatch: int, update: int, ends_update: bool
    ) -> tuple[Plan | None, list[LateUpdate]]:
        """Prepares the stage for its next forward.

        Args:
            minibatch: its number.
            update: the number of the update that its gradient is part of.
            ends_update: whether it is the last one of that update.

        Returns:
            the plan that comes into force with it, if one does, and updates that are to be made
            before it.
        """
        begins: Plan | None = None
        late: list[LateUpdate] = []
        migration = self._migration
        if migration is not None:
            late = migration.before_turn(minibatch, update, ends_update)
            if migration.begin == minibatch:
                begins, self._plan = self._plan, None
                self._last, self._last_update = minibatch, migration.update
        is_due = minibatch >= self._last + self._num_stages - 1 and update > self._last_update
        if self._wanted and self._plan is None and is_due:
            if self._migration is not None:
                self._migration.finish()
            self._plan = self._wanted.popleft()
            self._migration = self._start(self._plan, minibatch)
            self._migration.recorder = self._recorder
            self._migration.before_turn(minibatch, update, ends_update)
        return begins, late

    def settle(self, minibatch: int) -> list[LateUpdate]:
        """Called when the pipeline is empty; see :meth:`LiveMigration.settle`."""
        return self._migration.settle(minibatch) if self._migration is not None else []

    @property
    def num_waiting(self) -> int:
        """How many changes, or parts of one, are not in force."""
        return len(self._wanted) + (self._plan is not None)

    def cancel(self) -> None:
        """Gives up the changes that have not begun, on all stages."""
        self._wanted.clear()
        if self._migration is not None and self._plan is not None:
            self._migration.cancel()
        self._plan = self._migration = None

    def abandon(self) -> None:
        """Lets the threads of a move end, after an error."""
        if self._migration is not None:
            self._migration.abandon()

    def withhold(self, tag: Any) -> None:
        """See :meth:`LiveMigration.withhold`."""
        if self._migration is not None:
            self._migration.withhold(tag)
