"""Replaces the plan in force: another plan is first requested, then prepared during a step, then in
force.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.planning.make_plan import check_order
from lightning_pipeshift.runtime.step.trace_cache import TraceCache


class CutOver(NamedTuple):
    """A plan, and the microbatch of a step from which on it is in force."""

    plan: Plan
    first: int


class _Prepared(NamedTuple):
    """A plan that will be in force with the next step, and the layers on their way for it."""

    wanted: CutOver
    migration: Migration


class Changes:
    """Changes of the plan on one rank.

    Args:
        vm: its virtual machine.
        follower: has the layers that steps call.
        threads: where to wait for other ranks.
        deferred: makes the tensors that are on the meta device.
    """

    def __init__(
        self, vm: int, follower: TraceCache, threads: Threads, deferred: DeferredInit
    ) -> None:
        self._vm = vm
        self._deferred = deferred
        self._follower = follower
        self._threads = threads
        self._prepared: _Prepared | None = None
        self.wanted: CutOver | None = None
        """The plan that the next step is to prepare, and the step after it to put in force."""
        self.migration: Migration | None = None
        """The move of layers to new owners that the current step carries out."""
        self.seconds = 0.0
        """How long this stage has waited because of the last change."""

    @property
    def last(self) -> Plan | None:
        """The plan that will be in force after all requested changes; ``None`` if that is the
        present one.
        """
        if self.wanted is not None:
            return self.wanted.plan
        return self._prepared.wanted.plan if self._prepared is not None else None

    @property
    def is_prepared(self) -> bool:
        """Whether another plan will be in force with the next step."""
        return self._prepared is not None

    # --- a step, in the order of the calls ---

    def objection(self) -> str:
        """The reason why the requested plan is impossible, in words; empty if it is possible."""
        return "" if self.wanted is None else self.objection_to(self.wanted.plan.placement)

    def objection_to(self, placement: Placement) -> str:
        """The reason why layers cannot be placed so, in words; empty if they can be."""
        try:
            for trace in self._follower.traces():
                check_order(trace.flow, placement, self._vm, self._follower.gates)
        except LayerError as error:
            return str(error)
        return ""

    def cut_over(self, keeps_gradients: bool, traces: Sequence[Trace | None]) -> CutOver | None:
        """The plan that comes into force with this step, if it differs from the present one.

        Args:
            keeps_gradients: whether gradients from before the step are still needed.
            traces: those of the step's microbatches.
        """
        if self._prepared is None:
            return None
        ((plan, first), self.migration), self._prepared = self._prepared, None
        # State that user code writes between layers reaches the other stages at the end of the
        # step only, so all microbatches need the same owner.
        written = {layer for trace in traces if trace is not None for layer in trace.state.values()}
        if written & self.migration.moving:
            first = 0
        first = self.migration.begin(keeps_gradients, min(first, len(traces)))
        return CutOver(plan, first)

    def prepare(self, holdings: Holdings, optimizers: Sequence[Optimizer]) -> None:
        """Starts the preparations that are possible while the old plan is in force."""
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            return
        stage_of = wanted.plan.placement.stages(self._vm)
        migration = Migration(holdings, stage_of, optimizers, self._threads, self._deferred)
        self._prepared = _Prepared(wanted, migration)

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
        if self._prepared is not None:
            self._prepared.migration.abandon()
        if self.migration is not None:
            self.migration.abandon()

    def cancel(self) -> None:
        """Cancels all changes on all stages, and waits for transfers in progress."""
        if self._prepared is not None:
            self._prepared.migration.cancel()
            self._prepared = None
