"""Replaces the plan in force: another plan is first requested, then prepared during a step, then in
force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from torch.optim import Optimizer

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.planning.make_plan import check_order
from lightning_pipeshift.runtime.planning.move_parts import CutOver
from lightning_pipeshift.runtime.recording.watcher import Watcher
from lightning_pipeshift.runtime.step.listeners import StepListener, Traces
from lightning_pipeshift.runtime.step.step_report import Report
from lightning_pipeshift.runtime.step.trace_cache import TraceCache
from lightning_pipeshift.runtime.step.training_batch import TrainingBatch


class _Prepared(NamedTuple):
    """A plan that will be in force with the next step, and the layers on their way for it."""

    wanted: CutOver
    migration: Migration


class Changes(StepListener):
    """Changes of the plan on one rank.

    Args:
        vm: its virtual machine.
        trace_cache: has the layers that steps call.
        move: prepares the move of layers for a plan, given the optimizers of the run.
        put_in_force: puts a plan in force, from a microbatch of the step on.
    """

    def __init__(
        self,
        vm: int,
        trace_cache: TraceCache,
        move: Callable[[Plan, Sequence[Optimizer]], Migration],
        put_in_force: Callable[[Plan, int], None],
    ) -> None:
        self._vm = vm
        self._trace_cache = trace_cache
        self._move = move
        self._put_in_force = put_in_force
        self._prepared: _Prepared | None = None
        # The plans that the next steps prepare, and the steps after them put in force.
        self._wanted: deque[CutOver] = deque()
        self._is_checked = True
        self.migration: Migration | None = None
        """The move of layers to new owners that the current step carries out."""
        self.seconds = 0.0
        """How long this stage has waited because of the last change."""
        self.recorder: Watcher | None = None
        """Takes notes of these waits."""

    @property
    def last(self) -> Plan | None:
        """The plan that will be in force after all requested changes; ``None`` if that is the
        present one.
        """
        return self._wanted[-1].plan if self._wanted else self.next

    @property
    def next(self) -> Plan | None:
        """The plan that will be in force with the next step, if it is another one."""
        return self._prepared.wanted.plan if self._prepared is not None else None

    def request(self, wanted: Iterable[CutOver]) -> None:
        """Asks for plans, one after the other, in place of those that no step has prepared."""
        self._wanted = deque(wanted)
        self._is_checked = False

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

    def objection(self) -> str:
        """The reason why a requested plan is impossible, in words; empty if all are possible."""
        new, self._is_checked = () if self._is_checked else tuple(self._wanted), True
        return self.objection_to(new)

    def objection_to(self, wanted: Iterable[CutOver]) -> str:
        """The reason why one of these plans is impossible, in words; empty if all are possible."""
        gates = self._trace_cache.gates
        try:
            for each, trace in product(wanted, self._trace_cache.traces()):
                check_order(trace.flow, each.plan.placement, self._vm, gates)
        except LayerError as error:
            return str(error)
        return ""

    def before_step(self, given: TrainingBatch, traces: Traces) -> None:
        """Puts the plan in force whose layers are to move with this step, and begins to prepare the
        next one while this plan is in force.
        """
        if self._prepared is not None:
            ((plan, first), self.migration), self._prepared = self._prepared, None
            self.migration.recorder = self.recorder
            # State that user code writes between layers reaches the other stages at the end of the
            # step only, so all microbatches need the same owner.
            written = {
                layer for trace in traces if trace is not None for layer in trace.state.values()
            }
            if written & self.migration.moving:
                first = 0
            first = self.migration.begin(given.keeps_gradients, min(first, len(traces)))
            self._put_in_force(plan, first)
        if self._wanted:
            wanted = self._wanted.popleft()
            self._prepared = _Prepared(wanted, self._move(wanted.plan, given.optimizers))

    def finish(self) -> bool:
        """Waits until all layers have arrived; returns whether any were moving."""
        if self.migration is None:
            return False
        self.migration.finish()
        self.seconds = self.migration.exposed_seconds
        self.migration = None
        return True

    def after_step(self, given: TrainingBatch, traces: Traces, report: Report) -> None:
        """See :class:`StepListener`."""
        if given.accumulation.goes_on:
            self.weights_are_final()

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
