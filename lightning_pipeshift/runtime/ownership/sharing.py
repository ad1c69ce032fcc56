"""Parameters that several stages hold: tied weights, and those that code between layers uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import SharedWeights


def shared_weights(
    root: nn.Module, layers: Iterable[nn.Module], uses: Iterable[ParameterUse]
) -> tuple[SharedWeights, ...]:
    """The parameters and buffers that do not belong to exactly one layer, for the planner.

    Args:
        root: the model.
        layers: its layers.
        uses: its parameters.
    """
    buffers = {id(buffer): buffer for buffer in root.buffers()}
    for layer in layers:
        for buffer in layer.buffers():
            buffers.pop(id(buffer), None)
    sizes: dict[tuple[tuple[int, ...], bool, bool], int] = {
        ((), False, True): bytes_of(buffers.values())
    }
    for use in uses:
        if use.everywhere or len(use.layers) > 1:
            key = tuple(sorted(use.layers)), use.parameter.requires_grad, use.everywhere
            sizes[key] = sizes.get(key, 0) + use.parameter.nbytes
    found = []
    for (users, is_trained, everywhere), size in sizes.items():
        is_sent = is_trained and not everywhere
        found.append(SharedWeights(users, is_sent * size, size, is_trained, everywhere))
    return tuple(each for each in found if each.num_bytes)


def require_same_sharers(
    uses: Sequence[ParameterUse], before: Placement, after: Placement, schedule: str
) -> None:
    """Checks that the same stages share each trained parameter before and after a move.

    Args:
        uses: all parameters of the model.
        before: the owners of the layers.
        after: those after the move.
        schedule: the name of the schedule, for the message.

    Raises:
        PlanError: other stages would share one.
    """
    for vm, counts in enumerate(before.counts):
        old, new = before.stages(vm), after.stages(vm)
        for use in uses if old != new else ():
            now, then = (use.holders(stage_of, len(counts)) for stage_of in (old, new))
            if use.parameter.requires_grad and now != then and max(len(now), len(then)) > 1:
                raise PlanError(
                    f"schedule={schedule!r}: the parameter {use.name!r} is shared by layers on the"
                    f" stages {', '.join(map(str, now))}, and would be on"
                    f" {', '.join(map(str, then))}. Only layers whose parameters stay with the same"
                    " stages, or move as a whole, can change their owner. Leave these layers where"
                    " they are, or use schedule='1f1b'."
                )
