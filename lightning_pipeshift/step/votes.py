"""Decisions of all ranks at the end of a step, each because at least one rank asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_pipeshift.runtime.comm.channels import Channels, PostedSum


class Votes:
    """Counts in each step how many ranks want the run to end, or have requests to carry out. The
    sum travels while the step computes.

    Args:
        world: connects all ranks.
        asks_to_end: whether this rank wants the run to end.
        has_requests: whether this rank has requests or decisions for all ranks.
    """

    def __init__(
        self, world: Channels, asks_to_end: Callable[[], bool], has_requests: Callable[[], bool]
    ) -> None:
        self._world = world
        self._asks_to_end = asks_to_end
        self._has_requests = has_requests
        self._posted: PostedSum
        self.are_for_end = False
        """Whether any rank wanted the run to end in the last step."""
        self.are_for_requests = False
        """Whether any rank had requests in the last step."""

    def before_step(self) -> None:
        """Begins to count. Every rank calls this."""
        mine = [self._asks_to_end(), self._has_requests()]
        self._posted = self._world.post_sum(torch.tensor(mine).float())

    def after_step(self) -> None:
        """Waits for the numbers. Every rank calls this."""
        for_end, for_requests = self._posted.wait().tolist()
        self.are_for_end, self.are_for_requests = bool(for_end), bool(for_requests)
