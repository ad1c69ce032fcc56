"""Decisions of all ranks at the end of a step, each because at least one rank asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_pipeshift.runtime.comm.channels import Channels, PostedSum
from lightning_pipeshift.runtime.ownership.plan_change import Changes
from lightning_pipeshift.runtime.step.listeners import StepListener, Traces
from lightning_pipeshift.runtime.step.step_report import Report
from lightning_pipeshift.runtime.step.training_batch import TrainingBatch


class Votes(StepListener):
    """Counts in each step how many ranks want the run to end, have requests to carry out, or object
    to the plan that is coming. The sum travels while the step computes.

    Args:
        world: connects all ranks.
        changes: the coming plan, which is given up if any rank objects to it.
        asks_to_end: whether this rank wants the run to end.
        has_requests: whether this rank has requests or decisions for all ranks.
        refuse: called with the reason if the coming plan is given up.
    """

    def __init__(
        self,
        world: Channels,
        changes: Changes,
        asks_to_end: Callable[[], bool],
        has_requests: Callable[[], bool],
        refuse: Callable[[str], None],
    ) -> None:
        self._world = world
        self._changes = changes
        self._asks_to_end = asks_to_end
        self._has_requests = has_requests
        self._refuse = refuse
        self._objection = ""
        self._posted: PostedSum
        self.are_for_end = False
        """Whether any rank wanted the run to end in the last step."""
        self.are_for_requests = False
        """Whether any rank had requests in the last step."""

    def before_step(self, given: TrainingBatch, traces: Traces) -> None:
        """See :class:`StepListener`."""
        self._objection = self._changes.objection()
        mine = [self._asks_to_end(), self._has_requests(), bool(self._objection)]
        self._posted = self._world.post_sum(torch.tensor(mine).float())

    def after_step(self, given: TrainingBatch, traces: Traces, report: Report) -> None:
        """See :class:`StepListener`."""
        for_end, for_requests, against_plan = self._posted.wait().tolist()
        self.are_for_end, self.are_for_requests = bool(for_end), bool(for_requests)
        if against_plan:
            # The reason may have been found on another virtual machine.
            found = self._world.share_object(self._world.gather_objects(self._objection), source=0)
            self._changes.cancel()
            self._refuse(next(filter(None, found)))
