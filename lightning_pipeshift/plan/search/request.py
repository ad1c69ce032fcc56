"""The input of a planner, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.prediction import Prediction
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.inputs.policies import Policy
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.schedule.asynchronous import require_equal_depths
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, INTERLEAVED
from lightning_pipeshift.plan.search.groupings import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The settings that the user has fixed; all others are left to the planner.

    Args:
        virtual_machines: how many, or the ranks of each in stage order.
        microbatches: slices of a virtual machine's batch; 1 for an asynchronous schedule.
        schedule: by name.
        recompute: ``"full"``: all layers for which that frees memory; ``"auto"``: those that don't
            fit otherwise; ``"none"``. (No recomputation is free in an asynchronous pipeline, as no
            stage waits for the first gradients of a step.)
        partition: ``"auto"``, ``"uniform"``, or for each virtual machine the layers per stage; one
            row is for all of them.
        batch_shares: how the global batch is divided; ``None``: chosen by the planner, if it may.
        may_share: whether the planner may choose unequal shares.
        batch_samples: of a virtual machine's DataLoader batch. A global batch has that times the
            number of virtual machines.
        step_samples: of a global batch, however many virtual machines share it, in equal parts of
            whole samples; ``None``: see ``batch_samples``.
        policy: decides what happens to saved tensors; ``None`` without ``MemoryCompression``.
        may_reorder: whether the ranks of a virtual machine may become its stages in another order
            than the one in which they are given.
        caution: the factor for the times of swaps under which a plan still works, if there is one.
            Ranks that share a host share its memory's bandwidth; and with a plan whose transfers
            all end just in time, the compute would wait for most of them.
        effort: the limits of the search.

    Raises PlanError if these contradict each other.
    """

    virtual_machines: int | Literal["auto"] | Groups = "auto"
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = "1f1b"
    recompute: str = "auto"
    partition: Literal["auto", "uniform"] | tuple[tuple[int, ...], ...] = "auto"
    batch_shares: tuple[float, ...] | None = None
    batch_samples: float = 1.0
    step_samples: float | None = None
    policy: Policy | None = None
    may_share: bool = True
    may_reorder: bool = False
    caution: float = 2.0
    effort: Effort = USUAL

    def __post_init__(self) -> None:
        for samples in (self.batch_samples, self.step_samples):
            if samples is not None and not (math.isfinite(samples) and samples > 0):
                raise PlanError(f"a batch of {samples} samples; a batch has 1 or more")
        if not (math.isfinite(self.caution) and self.caution >= 1):
            raise PlanError(f"caution={self.caution}; allowed are finite factors from 1 on")
        for name in ("virtual_machines", "microbatches"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise PlanError(f"{name}={value}; allowed are 'auto' and whole numbers from 1 on")
        if self.schedule in INTERLEAVED:
            raise PlanError(
                f"schedule={self.schedule!r}: the planner does not choose devices for stages with"
                " several ranges of layers. Use another schedule, or let a run with this one choose"
                " the layers of each stage (`partition='auto'`)"
            )
        if self.schedule in ASYNCHRONOUS:
            if self.microbatches not in ("auto", 1):
                raise PlanError(
                    f"schedule={self.schedule!r} with microbatches={self.microbatches}; an"
                    " asynchronous pipeline does not split a batch: omit 'microbatches'"
                )
            object.__setattr__(self, "microbatches", 1)
        if self.ranks is not None:
            require_equal_depths(self.schedule, map(len, self.ranks))
        if not isinstance(self.partition, str):
            require_equal_depths(self.schedule, map(len, self.partition))
        counts = self._counts
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{name} is for {count}" for name, count in counts.items())
            raise PlanError(
                f"{found} virtual machines; give all of them for the same number, or omit some of "
                "these settings"
            )

    @property
    def num_virtual_machines(self) -> int | None:
        """The requested number of virtual machines; ``None``: left to the planner."""
        return next(iter(self._counts.values()), None)

    @property
    def ranks(self) -> Groups | None:
        """The ranks of each virtual machine in stage order, if they are fixed."""
        return None if isinstance(self.virtual_machines, int | str) else self.virtual_machines

    def total_samples(self, num_virtual_machines: int) -> float:
        """The samples of a global batch."""
        if self.step_samples is not None:
            return self.step_samples
        return self.batch_samples * num_virtual_machines

    def can_divide(self, num_virtual_machines: int) -> bool:
        """Whether so many virtual machines get equal batches of whole samples."""
        return self.step_samples is None or self.step_samples % num_virtual_machines == 0

    @property
    def chooses_shares(self) -> bool:
        """Whether the planner chooses how the global batch is divided."""
        return self.batch_shares is None and self.may_share

    @property
    def has_order(self) -> bool:
        """Whether the ranks of each stage are fixed."""
        return self.ranks is not None and not self.may_reorder

    def counts(self, vm: int) -> tuple[int, ...] | None:
        """A virtual machine's layers per stage, if they are fixed."""
        if isinstance(self.partition, str):
            return None
        return self.partition[vm if len(self.partition) > 1 else 0]

    def depths(self, num_ranks: int) -> list[int] | None:
        """The number of stages of each virtual machine, if that is fixed.

        Raises PlanError if these are not all of the ranks."""
        if isinstance(self.partition, str):
            return None
        depths = list(map(len, self.partition))
        if len(depths) == 1:
            depths *= self.num_virtual_machines or max(1, num_ranks // depths[0])
        if sum(depths) != num_ranks:
            raise PlanError(
                f"a partition for {sum(depths)} stages on {num_ranks} devices; it needs one stage"
                " for each"
            )
        return depths

    @property
    def _counts(self) -> dict[str, int]:
        """The number of virtual machines that each of the settings implies, if it implies one."""
        found: dict[str, int] = {}
        if isinstance(self.virtual_machines, int):
            found["virtual_machines"] = self.virtual_machines
        elif self.ranks is not None:
            found["virtual_machines"] = len(self.ranks)
        if not isinstance(self.partition, str) and len(self.partition) > 1:
            found["partition"] = len(self.partition)
        if self.batch_shares is not None:
            found["batch_shares"] = len(self.batch_shares)
        return found


@dataclass(frozen=True, slots=True)
class Tried:
    """The best that was found with pipelines of some depth.

    Args:
        num_stages: of the deepest pipeline.
        samples_per_second: of all virtual machines together, without swaps; 0 if nothing fits.
        limit: what keeps it from more, in words.
    """

    num_stages: int
    samples_per_second: float
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A planner's result, and its prediction. Tuples are per virtual machine.

    Args:
        ranks: in stage order.
        cuts: of the layers.
        microbatches: slices of a virtual machine's batch.
        schedule: by name.
        batch_shares: how the global batch is divided; ``None``: equally.
        prediction: of a step.
        samples_per_second: of all virtual machines together.
        swaps: saved tensors that are swapped; empty if none are.
        tried: what else was found, the fastest first.
    """

    ranks: Groups
    cuts: tuple[Cut, ...]
    microbatches: int
    schedule: str
    batch_shares: tuple[float, ...] | None
    prediction: Prediction
    samples_per_second: float
    swaps: tuple[tuple[Swap, ...], ...] = ()
    tried: tuple[Tried, ...] = field(default=(), compare=False)
