"""The input of the search for the best cut of a virtual machine, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_model import Footprint, Footprints, links_of
from lightning_pipeshift.plan.cost.memory_timeline import Links
from lightning_pipeshift.plan.cost.workload import ROUNDING, Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.inputs.policies import Policy
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Swap


class MemoryLimits(NamedTuple):
    """The memory of a stage's device, and its part of the host's memory.

    Args:
        budget_bytes: of the device.
        host_bytes: of the host, for swapped tensors.
    """

    budget_bytes: float
    host_bytes: float


@dataclass(frozen=True, eq=False)
class Problem:
    """The input of the search.

    Args:
        profile: of the model.
        workload: of the virtual machine.
        links: of the virtual machine.
        limits: of its stages.
        policy: is called first; ``None`` without ``MemoryCompression``: then layers are kept or
            recomputed as a whole, and nothing moves.
        recompute: ``"auto"``, ``"full"`` or ``"none"``.
        optimizer_on_host: the layers whose optimizer state is in host memory between two steps.
        weights_on_host: the layers whose weights are in host memory while they wait.
        caution: see :class:`~lightning_pipeshift.plan.search.request.PlanRequest`, as for
            ``effort``.
    """

    profile: Profile
    workload: Workload
    links: Links
    limits: tuple[MemoryLimits, ...]
    policy: Policy | None
    recompute: str = "auto"
    caution: float = 2.0
    optimizer_on_host: frozenset[int] = frozenset()
    weights_on_host: frozenset[int] = frozenset()
    effort: Effort = USUAL

    @classmethod
    def of(
        cls,
        profile: Profile,
        workload: Workload,
        cluster: Cluster,
        ranks: Sequence[int],
        policy: Policy | None,
        recompute: str = "auto",
        caution: float = 2.0,
        effort: Effort = USUAL,
    ) -> Problem:
        """The problem of a virtual machine whose stages are these ranks of a cluster."""
        devices = [cluster.devices[rank] for rank in ranks]
        limits = tuple(MemoryLimits(device.usable_bytes, device.host_bytes) for device in devices)
        links = links_of(cluster, ranks) if policy is not None else Links()
        if policy is None:
            layers = tuple(replace(layer, tensors=()) for layer in profile.layers)
            profile = replace(profile, layers=layers)
        how = policy, recompute, caution
        return cls(profile, workload, links, limits, *how, effort=effort)

    @cached_property
    def footprints(self) -> Footprints:
        """The footprints of all plans for it."""
        return Footprints(self.profile, self.workload, self.links)

    @cached_property
    def sizes(self) -> dict[tuple[int, int], float]:
        """The bytes of each saved tensor for a microbatch, by layer and number."""
        return {
            (layer, number): size
            for layer, sizes in enumerate(self.footprints.sizes)
            for number, size in sizes.items()
            if size
        }

    @property
    def most_trials(self) -> int:
        """How many assignments of its saved tensors are tried."""
        schedule = self.workload.clock_for(False).schedule
        return self.effort.trials(len(self.sizes), sum(map(len, schedule)))

    def lacking_bytes(self, found: Footprint) -> list[tuple[float, float]]:
        """The bytes that a plan lacks on each stage's device, and on its host; rounding errors are
        ignored, as sums depend on their order.
        """
        return [
            (
                max(0.0, peak / ROUNDING - limit.budget_bytes),
                max(0.0, trace.host_bytes / ROUNDING - limit.host_bytes),
            )
            for peak, trace, limit in zip(found.peak_bytes, found.traces, self.limits, strict=True)
        ]

    def fits(self, found: Footprint) -> bool:
        """Whether a plan keeps all limits."""
        return not any(map(any, self.lacking_bytes(found)))

    def spare_bytes(self, found: Footprint) -> list[float]:
        """The bytes that a plan leaves on each stage's device; negative where it lacks them."""
        return [
            limit.budget_bytes - peak
            for peak, limit in zip(found.peak_bytes, self.limits, strict=True)
        ]


@dataclass(frozen=True)
class Compressed:
    """A virtual machine's cut, and how its saved tensors are handled.

    Args:
        cut: the owners of the layers, and the recomputed layers.
        swaps: the swapped tensors.
        footprint: time and memory of the plan.
        uncompressed: those without swaps and recomputation.
    """

    cut: Cut
    swaps: tuple[Swap, ...]
    footprint: Footprint
    uncompressed: Footprint

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.footprint.seconds
