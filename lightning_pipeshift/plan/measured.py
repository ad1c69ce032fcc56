"""What has been measured of a run: the model, the machines, and which of them is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipeshift.plan.cluster import Cluster
from lightning_pipeshift.plan.draft import prediction_of
from lightning_pipeshift.plan.plan import Plan
from lightning_pipeshift.plan.prediction import Prediction
from lightning_pipeshift.plan.profile import Profile

Memory = Sequence[Sequence[float]]
"""Peaks in bytes, per virtual machine and stage."""


@dataclass(frozen=True)
class Measured:
    """What there is to plan with.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        by_tensor: whether saved tensors are looked after one by one.
    """

    profile: Profile
    cluster: Cluster
    ranks: Sequence[Sequence[int]]
    by_tensor: bool = False

    def prediction(self, plan: Plan) -> Prediction:
        """What the simulator says of a plan."""
        return prediction_of(plan, self.profile, self.cluster, self.ranks, self.by_tensor)

    def compared(self, plan: Plan, step_seconds: float) -> Measured:
        """The same, with what a step took beyond what the simulator makes of its parts: the way of
        a message through the system, the wait for a core. It counts for every plan alike.

        Args:
            plan: under which the step ran.
            step_seconds: what it took.
        """
        more = step_seconds - self.prediction(plan).step_seconds
        if more <= 0:
            return self
        profile = replace(self.profile, step_seconds=self.profile.step_seconds + more)
        return replace(self, profile=profile)

    def move_seconds(self, old: Plan, new: Plan) -> float:
        """How long the layers that change their owners are under way, one by one."""
        seconds = 0.0
        for vm, ranks in enumerate(self.ranks):
            for index, layer in enumerate(self.profile.layers):
                source = ranks[old.placement.stage_of(vm, index)]
                to = ranks[new.placement.stage_of(vm, index)]
                seconds += self.cluster.link(source, to).seconds(layer.static_bytes)
        return seconds

    def fits(self, memory_bytes: Memory) -> bool:
        """Whether every device has room for that."""
        return all(held <= room for _, _, held, room in self._places(memory_bytes))

    def lacking(self, memory_bytes: Memory) -> str:
        """In words, where most is missing."""
        places = [
            (held - room, vm, stage, held) for vm, stage, held, room in self._places(memory_bytes)
        ]
        lacks, vm, stage, held = max(places)
        return (
            f"stage {stage} of virtual machine {vm} would hold {held / 1e6:.1f} MB, which is"
            f" {lacks / 1e6:.1f} MB more than it has room for; leave it fewer layers, or let more"
            " of them be recomputed"
        )

    def _places(self, memory_bytes: Memory) -> list[tuple[int, int, float, float]]:
        return [
            (vm, stage, held, self.cluster.devices[rank].room_bytes)
            for vm, (ranks, peaks) in enumerate(zip(self.ranks, memory_bytes, strict=True))
            for stage, (rank, held) in enumerate(zip(ranks, peaks, strict=True))
        ]
