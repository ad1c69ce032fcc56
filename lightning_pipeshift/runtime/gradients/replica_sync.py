"""Finds the parameters that correspond across the virtual machines, and gives them the same
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_pipeshift.compat.module_private import buffers_of
from lightning_pipeshift.model.parameters.uses import (
    ParameterUse,
    give_buffer,
    other_state,
    take_other_state,
)
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.gradients.aggregation import GradientGroup


def holder_ranks(use: ParameterUse, placement: Placement, topology: Topology) -> list[list[int]]:
    """The ranks that hold a parameter, for every virtual machine, by ascending stage."""
    found = []
    for vm, ranks in enumerate(topology.ranks):
        stage_of = placement.stages(vm)
        found.append([ranks[stage] for stage in use.holders(stage_of, len(ranks))])
    return found


def gradient_groups(
    uses: Sequence[ParameterUse], placement: Placement, topology: Topology
) -> list[GradientGroup]:
    """One group for each shared parameter, over the first of its holders in each virtual machine,
    and one for each layer, over its owners, in call order. The same on every rank.
    """
    own: dict[int, list[int]] = {}
    for place, use in enumerate(uses):
        if not use.is_shared:
            own.setdefault(use.layers[0], []).append(place)
    groups = []
    # First in the list, so last in the order of backwards: their gradients are summed over the
    # stages before they are summed over the virtual machines, which is at the step's end. In any
    # other position, the layers would wait for them where sums have to start in one order.
    for number, use in enumerate(uses):
        if use.is_shared:
            first = [ranks[0] for ranks in holder_ranks(use, placement, topology)]
            group = placement.num_layers + number
            groups.append(GradientGroup(group, [use.parameter], [number], first, is_hooked=False))
    groups += [
        GradientGroup(
            layer,
            [uses[place].parameter for place in places],
            places,
            [ranks[placement.stage_of(vm, layer)] for vm, ranks in enumerate(topology.ranks)],
        )
        for layer, places in sorted(own.items())
    ]
    return groups


@torch.no_grad()
def match_replicas(
    replicas: Replicas,
    placement: Placement,
    layers: Sequence[nn.Module],
    outside: Mapping[str, nn.Module],
    uses: Sequence[ParameterUse],
) -> None:
    """Gives the holders in all other virtual machines the values of the first one. Every rank calls
    this.

    Args:
        replicas: the virtual machines.
        placement: the owners of the layers.
        layers: the layers, in call order; their state other than parameters is matched.
        outside: the modules that contain them, by name; their own buffers are matched.
        uses: the parameters to match.
    """
    world, topology = replicas.world, replicas.topology
    for use in uses:
        (source, *_), *others = holder_ranks(use, placement, topology)
        targets = [rank for ranks in others for rank in ranks]
        if replicas.rank == source:
            for to in targets:
                world.send_tensor(use.parameter, to)
        elif replicas.rank in targets:
            use.parameter.copy_(world.receive_tensor(use.parameter, source))
    first, *_ = topology.ranks[0]
    buffers = {
        (owner, name): buffer
        for owner, module in outside.items()
        for name, buffer in buffers_of(module).items()
    }
    if buffers and replicas.rank == first:
        for ranks in topology.ranks[1:]:
            for to in ranks:
                world.send_values(buffers, to)
    elif buffers and replicas.vm:
        for (owner, name), value in world.receive_values(first):
            give_buffer(outside[owner], name, value)
    for index, layer in enumerate(layers):
        source, *targets = [
            ranks[placement.stage_of(vm, index)] for vm, ranks in enumerate(topology.ranks)
        ]
        if replicas.rank == source:
            state = other_state(layer)
            for to in targets if state else []:
                world.send_values(state, to)
        elif replicas.rank in targets and other_state(layer):
            take_other_state(layer, dict(world.receive_values(source)))
