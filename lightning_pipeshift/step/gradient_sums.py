"""Which ranks sum which gradients over the virtual machines, by what means, and on which lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.turns import Urgency
from lightning_pipeshift.runtime.gradients.aggregation import (
    MOST_LANES_OF_COLLECTIVES,
    Aggregation,
    AllReduce,
    GradientGroup,
)
from lightning_pipeshift.runtime.gradients.device_rings import DeviceRings
from lightning_pipeshift.runtime.gradients.lanes import equal_shares, lanes_by_share
from lightning_pipeshift.runtime.gradients.replica_sync import gradient_groups
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.planning.make_plan import Settings


class GradientSums:
    """Makes what sums the gradients of one rank.

    Args:
        rings: this rank's part in the rings of the virtual machines, where there are several.
        groups: the groups for sums over them.
        channels: this stage's connections.
        replicas: the virtual machines.
        settings: the user's options.
        are_together: whether all ranks are at the same step when gradients are summed.
        say: takes a message for the user.
    """

    def __init__(
        self,
        rings: Rings | None,
        groups: ProcessGroups,
        channels: Channels,
        replicas: Replicas,
        settings: Settings,
        are_together: bool,
        say: Callable[[str], None],
    ) -> None:
        self._rings = rings
        self._groups = groups
        self._channels = channels
        self._replicas = replicas
        self._settings = settings
        self._are_together = are_together
        self._say = say

    def aggregation(self, uses: list[ParameterUse], plan: Plan, is_new: bool = True) -> Aggregation:
        """The sums of a training under a plan. Every rank calls this.

        Args:
            uses: of the parameters.
            plan: the plan.
            is_new: whether it is the run's first one.
        """
        assert self._rings is not None
        placement = plan.placement
        groups = gradient_groups(uses, placement, self._replicas.topology)
        mine = [group for group in groups if self._replicas.rank in group.members]
        owners = list(dict.fromkeys(tuple(group.members) for group in groups))
        kind, why = self._settings.aggregation(self._groups.backend, len(owners), placement)
        if is_new:
            self._say(f"gradient_aggregation is {kind!r}: {why}.")
        device, watched = self._channels.device, self._channels.watched
        is_gloo = self._groups.backend == "gloo"
        agree = self._replicas.world.post_sum if self._are_together and not is_gloo else None
        num_lanes = _give_lanes(groups, plan)
        if is_gloo:
            device = torch.device("cpu")
            if kind == "ring":
                if is_new:
                    self._rings.open_lanes(num_lanes)
                return Aggregation(
                    mine, self._rings.start, agree, len(uses), device, in_order=False
                )
        self._groups.want(owners, min(num_lanes, MOST_LANES_OF_COLLECTIVES))
        sums: Any = AllReduce(self._groups, watched)
        if kind == "ring":
            sums = DeviceRings(self._groups, self._replicas.rank, watched)
        return Aggregation(mine, sums.start, agree, len(uses), device, in_order=True)


def _give_lanes(groups: Sequence[GradientGroup], plan: Plan) -> int:
    """Sets the urgency of each group's messages. Returns how many lanes there is use for.

    Args:
        groups: all of them, in an order that is the same on every rank.
        plan: the plan.
    """
    # The same on every rank, or members of a ring would use different lanes: so parameters
    # count that the rank does not hold.
    sizes = [0] * plan.placement.num_layers
    for group in groups:
        if group.is_hooked:
            sizes[group.number] = bytes_of(group.trained)
    lanes = lanes_by_share(sizes, plan.lane_shares or equal_shares(sizes))
    for group in groups:
        # The step ends when the sums of shared parameters are there.
        if group.is_hooked:
            group.urgencies = tuple(
                (part.end, Urgency(part.lane, group.number)) for part in lanes[group.number]
            )
    return len(equal_shares(sizes))
