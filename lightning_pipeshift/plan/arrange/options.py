"""The options that a user gives to the strategy, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from lightning_pipeshift.plan.arrange.request import PlanRequest
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.partition import PartitionSpec
from lightning_pipeshift.plan.inputs.policies import Policy
from lightning_pipeshift.plan.inputs.topology import VirtualMachinesSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`~lightning_pipeshift.PipeShiftStrategy`, which explains them. Made
    once, by the strategy, which has checked them.

    Args:
        plan: has been read, if it was given as a file.
        batch_shares: the plan's, where the plan has some.
    """

    virtual_machines: VirtualMachinesSpec = "auto"
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = "1f1b"
    partition: PartitionSpec = "auto"
    plan: Plan | None = None
    batch_shares: Sequence[float] | None = None
    recompute: Literal["auto", "full", "none"] = "auto"
    profile_steps: int = 20
    gradient_aggregation: Literal["auto", "ring", "allreduce"] = "auto"
    process_group_backend: Literal["nccl", "gloo"] | None = None
    timeout: timedelta | None = None
    heartbeat_timeout: float = 10.0
    stall_timeout: float = 60.0

    @property
    def ranks(self) -> VirtualMachinesSpec:
        """The number of virtual machines, or the ranks of each: the plan's, if it has them."""
        planned = self.plan.ranks if self.plan is not None else None
        return planned or self.virtual_machines

    @property
    def depths(self) -> list[int] | None:
        """The number of stages of each virtual machine; ``None`` where no option fixes them."""
        if self.plan is not None:
            return [len(counts) for counts in self.plan.placement.counts]
        if not isinstance(self.partition, list | tuple):
            return None
        rows = [counts for counts in self.partition if isinstance(counts, list | tuple)]
        return list(map(len, rows)) if rows and len(rows) == len(self.partition) else None

    def request(self, batch_samples: float, policy: Policy | None) -> PlanRequest:
        """The same for a planner.

        Args:
            batch_samples: of a virtual machine's batch.
            policy: decides how saved tensors are handled; ``None`` without ``MemoryCompression``.
        """
        partition: Any = self.partition
        if isinstance(partition, list | tuple):
            rows = partition if isinstance(partition[0], list | tuple) else [partition]
            partition = tuple(tuple(counts) for counts in rows)
        machines: Any = self.virtual_machines
        if isinstance(machines, list | tuple):
            machines = tuple(map(tuple, machines))
        return PlanRequest(
            virtual_machines=machines,
            microbatches=self.microbatches,
            schedule=self.schedule,
            recompute=self.recompute,
            partition=partition,
            batch_shares=tuple(self.batch_shares) if self.batch_shares else None,
            batch_samples=batch_samples,
            policy=policy,
        )
