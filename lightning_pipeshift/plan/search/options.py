"""The options that a user gives to the strategy, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.communication import Communication, require_word
from lightning_pipeshift.plan.inputs.policies import Policy
from lightning_pipeshift.plan.inputs.shares import check_shares
from lightning_pipeshift.plan.inputs.topology import VirtualMachinesSpec, check_spec
from lightning_pipeshift.plan.schedule.schedules import (
    ASYNCHRONOUS,
    INTERLEAVED,
    MOST_MICROBATCHES,
    schedule_named,
)
from lightning_pipeshift.plan.search.given_partition import PartitionSpec
from lightning_pipeshift.plan.search.recomputation import RECOMPUTE
from lightning_pipeshift.plan.search.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class Options(Communication):
    """The options of :class:`~lightning_pipeshift.PipeShiftStrategy`, which explains them. Made
    once, by the strategy. ``"auto"`` leaves a number to the planner; ``None`` is the usual one.

    Args:
        plan: has been read, if it was given as a file.
        schedule: replaced by the plan's.
        batch_shares: replaced by the plan's, if the plan has some.

    Raises:
        ConfigurationError: a value that is not allowed; the message lists those that are.
        ScheduleError: likewise, for the name of a schedule.
    """

    virtual_machines: VirtualMachinesSpec | None = None
    microbatches: int | Literal["auto"] | None = None
    schedule: str = "1f1b"
    partition: PartitionSpec = "auto"
    plan: Plan | None = None
    batch_shares: Sequence[float] | None = None
    recompute: Literal["auto", "full", "none"] = "auto"
    profile_steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_microbatches(self.microbatches)
        if self.partition not in ("auto", "uniform") and not isinstance(
            self.partition, list | tuple
        ):
            raise ConfigurationError(
                f"partition={self.partition!r}: allowed are 'auto', 'uniform', a list with the"
                " number of layers of each stage ([5, 4]), or one such list for each virtual"
                " machine."
            )
        require_word("recompute", self.recompute, RECOMPUTE)
        if not isinstance(self.plan, Plan | None):
            raise ConfigurationError(
                f"plan={self.plan!r}: pass a `Plan`, or the path of a file that `Plan.save` wrote."
            )
        if self.virtual_machines is not None:
            check_spec(self.virtual_machines)
        check_shares(self.batch_shares, None)
        _check_profile_steps(self.profile_steps)
        schedule_named(self.schedule)
        if self.is_asynchronous and self.microbatches not in (None, "auto", 1):
            raise ConfigurationError(
                f"schedule={self.schedule!r} and microbatches={self.microbatches!r}: an"
                " asynchronous pipeline has several batches in flight, and splits none of them."
                " Remove `microbatches`, or set it to 1."
            )
        if self.plan is None and self.schedule in INTERLEAVED:
            self._check_interleaved()
        if self.plan is not None:
            object.__setattr__(self, "schedule", self.plan.schedule)
        if self.plan is not None and self.plan.batch_shares:
            object.__setattr__(self, "batch_shares", list(self.plan.batch_shares))
        self._check_first_rank()

    def _check_interleaved(self) -> None:
        for name, what in (
            ("recompute", "full"),
            ("virtual_machines", "auto"),
            ("microbatches", "auto"),
        ):
            if getattr(self, name) == what:
                raise ConfigurationError(
                    f"schedule={self.schedule!r} and {name}={what!r}: that is for schedules in"
                    " which each stage has one range of layers. Leave it out, or use"
                    " schedule='1f1b'."
                )

    def _check_first_rank(self) -> None:
        """What the first rank decides travels down an asynchronous pipeline from its first stage
        on.
        """
        named = self.named_ranks
        if self.is_asynchronous and named is not None and named[0][0]:
            raise ConfigurationError(
                f"schedule={self.schedule!r} and the ranks {[list(ranks) for ranks in named]}:"
                " with an asynchronous schedule rank 0 is the first stage of the first virtual"
                " machine. Name it first, or start the processes in another order."
            )

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline does not drain between two batches."""
        return self.schedule in ASYNCHRONOUS

    @property
    def ranks(self) -> VirtualMachinesSpec | None:
        """The number of virtual machines, or the ranks of each: the plan's, if it has them."""
        planned = self.plan.ranks if self.plan is not None else None
        return planned or self.virtual_machines

    @property
    def named_ranks(self) -> Sequence[Sequence[int]] | None:
        """The ranks of each virtual machine, if the user has named them."""
        return None if isinstance(self.ranks, int | str | None) else self.ranks

    @property
    def is_free(self) -> bool:
        """Whether PipeShift chooses the owners of the layers."""
        return self.plan is None and self.partition == "auto"

    @property
    def may_reorder(self) -> bool:
        """Whether PipeShift chooses which rank of a virtual machine is which stage. The minibatches
        of an asynchronous schedule follow each other from the first rank on.
        """
        is_searched = not self.is_asynchronous and self.schedule not in INTERLEAVED
        return self.is_free and self.named_ranks is None and is_searched

    @property
    def leaves_numbers(self) -> bool:
        """Whether the planner chooses the number of virtual machines or of microbatches."""
        # An asynchronous pipeline splits no batch.
        splits = self.microbatches == "auto" and not self.is_asynchronous
        return self.plan is None and (self.virtual_machines == "auto" or splits)

    def num_microbatches(self, stages_per_vm: Sequence[int]) -> int:
        """The number of slices of a virtual machine's training batch, unless the planner chooses
        another one.
        """
        if self.plan is not None:
            return self.plan.microbatches
        if isinstance(self.microbatches, int):
            return self.microbatches
        if self.is_asynchronous:
            return 1
        # Enough that filling and draining the pipeline costs a fifth at most, while slices remain
        # large enough to compute efficiently.
        return 4 * max(stages_per_vm) if max(stages_per_vm) > 1 else 1

    @property
    def depths(self) -> list[int] | None:
        """The number of stages of each virtual machine; ``None`` where no option fixes them."""
        if self.plan is not None:
            return [len(counts) for counts in self.plan.placement.counts]
        if not isinstance(self.partition, list | tuple):
            return None
        rows = [counts for counts in self.partition if isinstance(counts, list | tuple)]
        return list(map(len, rows)) if rows and len(rows) == len(self.partition) else None

    @property
    def groups_devices(self) -> bool:
        """Whether PipeShift chooses which devices form each of several virtual machines."""
        count = self.ranks if isinstance(self.ranks, int) else len(self.depths or ())
        return self.named_ranks is None and count > 1

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
        machines: Any = self.virtual_machines or "auto"
        if isinstance(machines, list | tuple):
            machines = tuple(map(tuple, machines))
        return PlanRequest(
            virtual_machines=machines,
            microbatches=self.microbatches or "auto",
            schedule=self.schedule,
            recompute=self.recompute,
            partition=partition,
            batch_shares=tuple(self.batch_shares) if self.batch_shares else None,
            batch_samples=batch_samples,
            policy=policy,
        )


def _check_microbatches(number: Any) -> None:
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if number not in (None, "auto") and not (is_number and 1 <= number <= MOST_MICROBATCHES):
        raise ConfigurationError(
            f"microbatches={number!r}: a batch is split into at least 1 slice."
            f" Pass a whole number from 1 to {MOST_MICROBATCHES}, or 'auto' to leave it to the"
            " planner."
        )


def _check_profile_steps(steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigurationError(
            f"profile_steps={steps!r}: pass a whole number; 0 plans once, before the first step."
        )
