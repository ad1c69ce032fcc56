"""Replaces the plan in force. Another plan is first requested; then its layers are on their way to
their new owners; then it is in force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch.optim import Optimizer

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.ownership.live_migration import LiveMigration, Withheld
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.recording.recorder import Recorder


class Requests:
    """The plans that are to come into force on one rank, one after the other."""

    def __init__(self) -> None:
        self._wanted: deque[Plan] = deque()
        self.next: Plan | None = None
        """The plan whose layers are on their way, and that is not in force yet."""
        self._recorder: Recorder | None = None
        """Takes notes of waits for layers."""

    @property
    def last(self) -> Plan | None:
        """The plan that will be in force after all requested changes; ``None`` if that is the
        present one.
        """
        return self._wanted[-1] if self._wanted else self.next

    def record(self, recorder: Recorder | None) -> None:
        """Sets who takes notes of waits for layers; ``None``: nothing does."""
        self._recorder = recorder

    def request(self, wanted: Iterable[Plan]) -> None:
        """Asks for plans, one after the other, in place of those whose layers are not on their way.
        Every stage calls this at the same time.
        """
        self._wanted = deque(wanted)

    @property
    def on_their_way(self) -> frozenset[int]:
        """The layers that come to this stage or leave it while minibatches are in flight."""
        return frozenset()

    @property
    def held_twice(self) -> tuple[frozenset[int], frozenset[int]]:
        """The layers that this stage still holds, and another one owns already; and those of which
        it holds the weights in addition, as they will move with the next step.
        """
        return frozenset(), frozenset()

    @property
    def seconds(self) -> float:
        """How long this stage has waited because of the last change."""
        raise NotImplementedError

    def weights_are_final(self) -> None:
        """Called when the weights are those with which the next step starts."""

    def abandon(self) -> None:
        """Lets the threads of moves end, after an error or at the end of the run."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancels the changes that have not begun, on all stages, and waits for transfers."""
        raise NotImplementedError


class Changes(Requests):
    """Changes of the plan between two steps: a step prepares a change, and the next step puts it in
    force.

    Args:
        move: prepares the move of layers for a plan, given the optimizers of the run.
        put_in_force: puts a plan in force.
    """

    def __init__(
        self,
        move: Callable[[Plan, Sequence[Optimizer]], Migration],
        put_in_force: Callable[[Plan], None],
    ) -> None:
        super().__init__()
        self._move = move
        self._put_in_force = put_in_force
        self._prepared: Migration | None = None
        """The move of layers for the next plan."""
        self.migration: Migration | None = None
        """The move of layers to new owners that the current step carries out."""
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """See :class:`Requests`."""
        return self._seconds

    @property
    def held_twice(self) -> tuple[frozenset[int], frozenset[int]]:
        """See :class:`Requests`."""
        nothing: frozenset[int] = frozenset()
        return (
            self.migration.leaving if self.migration is not None else nothing,
            self._prepared.changing if self._prepared is not None else nothing,
        )

    # --- a step, in the order of the calls ---

    def before_step(self, optimizers: Sequence[Optimizer], keeps_gradients: bool) -> None:
        """Puts the plan in force whose layers are to move with this step, and begins to prepare the
        next one while this plan is in force.
        """
        if self._prepared is not None:
            assert self.next is not None
            self.migration, self._prepared = self._prepared, None
            plan, self.next = self.next, None
            self.migration.recorder = self._recorder
            self.migration.begin(keeps_gradients)
            self._put_in_force(plan)
        if self._wanted:
            plan = self._wanted.popleft()
            self._prepared = self._move(plan, optimizers)
            self.next = plan

    def finish(self) -> bool:
        """Waits until all layers have arrived; returns whether any were moving."""
        if self.migration is None:
            return False
        self.migration.finish()
        self._seconds = self.migration.exposed_seconds
        self.migration = None
        return True

    def weights_are_final(self) -> None:
        """See :class:`Requests`."""
        if self._prepared is not None:
            self._prepared.start()

    # --- changes that are cancelled ---

    def abandon(self) -> None:
        """See :class:`Requests`, and :meth:`Migration.abandon`."""
        self._wanted.clear()
        if self._prepared is not None:
            self._prepared.abandon()
        if self.migration is not None:
            self.migration.abandon()

    def cancel(self) -> None:
        """See :class:`Requests`."""
        self._wanted.clear()
        if self._prepared is not None:
            self._prepared.cancel()
            self._prepared = self.next = None


class LiveChanges(Requests):
    """Changes of the plan in an asynchronous pipeline.

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
        super().__init__()
        self._num_stages = num_stages
        self._start = start
        self.migration: LiveMigration | None = None
        """The last move of layers, if there was one."""
        # The cut-over of the last change that has begun, and the number of its update.
        self._last = self._last_update = -(2**62)

    def record(self, recorder: Recorder | None) -> None:
        """See :class:`Requests`. The move that has begun takes notes from now on, too."""
        super().record(recorder)
        if self.migration is not None:
            self.migration.recorder = recorder

    @property
    def seconds(self) -> float:
        """See :class:`Requests`."""
        return self.migration.exposed_seconds if self.migration is not None else 0.0

    @property
    def on_their_way(self) -> frozenset[int]:
        """See :class:`Requests`; empty when the move is over."""
        return self.migration.layers if self.migration is not None else frozenset()

    def before_turn(self, minibatch: int, update: int, ends_update: bool) -> Plan | None:
        """Prepares the stage for its next forward.

        Args:
            minibatch: its number.
            update: the number of the update that its gradient is part of.
            ends_update: whether it is the last one of that update.

        Returns:
            the plan that comes into force with it, if one does.
        """
        begins: Plan | None = None
        migration = self.migration
        if migration is not None:
            migration.before_turn(minibatch, update, ends_update)
            if migration.begin == minibatch:
                begins, self.next = self.next, None
                self._last, self._last_update = minibatch, migration.update
        is_due = minibatch >= self._last + self._num_stages - 1 and update > self._last_update
        if self._wanted and self.next is None and is_due:
            if self.migration is not None:
                self.migration.finish()
            self.next = self._wanted.popleft()
            self.migration = self._start(self.next, minibatch)
            self.migration.recorder = self._recorder
            self.migration.before_turn(minibatch, update, ends_update)
        return begins

    def settle(self, minibatch: int) -> None:
        """Called when the pipeline is empty; see :meth:`LiveMigration.settle`."""
        if self.migration is not None:
            self.migration.settle(minibatch)

    @property
    def num_waiting(self) -> int:
        """How many changes, or parts of one, are not in force."""
        return len(self._wanted) + (self.next is not None)

    def cancel(self) -> None:
        """See :class:`Requests`."""
        self._wanted.clear()
        if self.migration is not None and self.next is not None:
            self.migration.cancel()
        self.next = self.migration = None

    def abandon(self) -> None:
        """See :class:`Requests`."""
        if self.migration is not None:
            self.migration.abandon()

    def withheld(self) -> list[Withheld]:
        """See :meth:`LiveMigration.withheld`."""
        return self.migration.withheld() if self.migration is not None else []
