"""Replaces the plan in force: another plan is first requested, then prepared during a step, then in
force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.recording.recorder import Recorder


class _Prepared(NamedTuple):
    """A plan that will be in force with the next step, and the layers on their way for it."""

    plan: Plan
    migration: Migration


class Changes:
    """Changes of the plan on one rank.

    Args:
        move: prepares the move of layers for a plan, given the optimizers of the run.
        put_in_force: puts a plan in force.
    """

    def __init__(
        self,
        move: Callable[[Plan, Sequence[Optimizer]], Migration],
        put_in_force: Callable[[Plan], None],
    ) -> None:
        self._move = move
        self._put_in_force = put_in_force
        self._prepared: _Prepared | None = None
        # The plans that the next steps prepare, and the steps after them put in force.
        self._wanted: deque[Plan] = deque()
        self.migration: Migration | None = None
        """The move of layers to new owners that the current step carries out."""
        self.seconds = 0.0
        """How long this stage has waited because of the last change."""
        self.recorder: Recorder | None = None
        """Takes notes of these waits."""

    @property
    def last(self) -> Plan | None:
        """The plan that will be in force after all requested changes; ``None`` if that is the
        present one.
        """
        return self._wanted[-1] if self._wanted else self.next

    @property
    def next(self) -> Plan | None:
        """The plan that will be in force with the next step, if it is another one."""
        return self._prepared.plan if self._prepared is not None else None

    def request(self, wanted: Iterable[Plan]) -> None:
        """Asks for plans, one after the other, in place of those that no step has prepared."""
        self._wanted = deque(wanted)

    @property
    def held_twice(self) -> tuple[frozenset[int], frozenset[int]]:
        """The layers that this stage still holds, and another one owns already; and those of which
        it holds the weights in addition, as they will move with the next step.
        """
        nothing: frozenset[int] = frozenset()
        return (
            self.migration.leaving if self.migration is not None else nothing,
            self._prepared.migration.changing if self._prepared is not None else nothing,
        )

    # --- a step, in the order of the calls ---

    def before_step(self, optimizers: Sequence[Optimizer], keeps_gradients: bool) -> None:
        """Puts the plan in force whose layers are to move with this step, and begins to prepare the
        next one while this plan is in force.
        """
        if self._prepared is not None:
            (plan, self.migration), self._prepared = self._prepared, None
            self.migration.recorder = self.recorder
            self.migration.begin(keeps_gradients)
            self._put_in_force(plan)
        if self._wanted:
            wanted = self._wanted.popleft()
            self._prepared = _Prepared(wanted, self._move(wanted, optimizers))

    def finish(self) -> bool:
        """Waits until all layers have arrived; returns whether any were moving."""
        if self.migration is None:
            return False
        self.migration.finish()
        self.seconds = self.migration.exposed_seconds
        self.migration = None
        return True

    def weights_are_final(self) -> None:
        """Called when the weights are those with which the next step starts."""
        if self._prepared is not None:
            self._prepared.migration.start()

    # --- changes that are cancelled ---

    def abandon(self) -> None:
        """Cancels all changes: see :meth:`Migration.abandon`."""
        self._wanted.clear()
        if self._prepared is not None:
            self._prepared.migration.abandon()
        if self.migration is not None:
            self.migration.abandon()

    def cancel(self) -> None:
        """Cancels all changes on all stages, and waits for transfers in progress."""
        self._wanted.clear()
        if self._prepared is not None:
            self._prepared.migration.cancel()
            self._prepared = None
