"""Updates of shared parameters in an asynchronous pipeline.

A parameter that several stages hold (tied weights, or one that code between layers uses) has one
gradient for a minibatch: the sum over its holders. It is added up on its way upstream, as the
minibatch's backward goes from stage to stage, so the first holder has it when its own backward is
over, and makes the update as usual. The others get the sum with the next payloads, and make the
same update before the forward in which the first holder uses it. So no stage waits, and the
parameter has the same values on all holders in each minibatch: as old as the weights of the first
holder.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import SharedWeights
from lightning_pipeshift.plan.schedule.cut_over import newest_update
from lightning_pipeshift.runtime.comm.lane import Sent
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdate
from lightning_pipeshift.runtime.ownership.holdings import Holdings


def shared_weights(
    root: nn.Module, layers: Iterable[nn.Module], uses: Iterable[ParameterUse], device: torch.device
) -> tuple[SharedWeights, ...]:
    """The parameters and buffers that do not belong to exactly one layer, for the planner.

    Args:
        root: the model.
        layers: its layers.
        uses: its parameters.
        device: that of the stages. Gradients on their way are in host memory.
    """
    buffers = {id(buffer): buffer for buffer in root.buffers()}
    for layer in layers:
        for buffer in layer.buffers():
            buffers.pop(id(buffer), None)
    sizes: dict[tuple[tuple[int, ...], bool, bool], int] = {
        ((), False, True): bytes_of(buffers.values())
    }
    for use in uses:
        everywhere = use.everywhere or not use.layers
        if everywhere or len(use.layers) > 1:
            key = tuple(sorted(use.layers)), use.parameter.requires_grad, everywhere
            sizes[key] = sizes.get(key, 0) + use.parameter.nbytes
    found = []
    for (users, is_trained, everywhere), size in sizes.items():
        is_sent = is_trained and not everywhere and device.type == "cpu"
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


class SharedUpdates:
    """The updates of one stage's shared parameters whose gradients come from an earlier stage.

    Args:
        holdings: the stage's tensors.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._awaited: dict[int, deque[tuple[int, Any]]] = {}
        """By the first holder: the last minibatch of each update, and its tag."""
        self._sent: deque[tuple[int, list[Sent]]] = deque()
        """The messages that are being sent, by the last minibatch of their update."""

    def _shared_with(self, first: int, other: int) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters that two stages hold, and no stage before them."""
        return [
            (use.name, use.parameter)
            for use in self._holdings.shared
            if use.parameter.requires_grad
            and (holders := self._holdings.holders_of(use.parameter))[0] == first
            and other in holders[1:]
        ]

    def pass_on(self, minibatch: int, tag: Any) -> None:
        """Sends gradients to the other holders, where this stage is the first. Called before an
        update of this stage.

        Args:
            minibatch: the last one of the update.
            tag: comes back with the update.
        """
        channels = self._holdings.channels
        # The others have run their forward of this minibatch, so they have taken what they needed
        # for it.
        taken = newest_update(minibatch, channels.stage, channels.num_stages)
        while self._sent and self._sent[0][0] <= taken:
            for sent in self._sent.popleft()[1]:
                sent.wait()
        copies: dict[str, Tensor] = {}
        for stage in range(channels.num_stages):
            if stage < channels.stage and self._shared_with(stage, channels.stage):
                self._awaited.setdefault(stage, deque()).append((minibatch, tag))
            shared = self._shared_with(channels.stage, stage)
            for name, parameter in shared:
                # The update may change the gradient itself, by clipping for example.
                if name not in copies and parameter.grad is not None:
                    copies[name] = parameter.grad.clone()
            if shared:
                values = {name: copies.get(name) for name, _ in shared}
                self._sent.append((minibatch, channels.shared.post_values(values, stage)))

    def due(self, minibatch: int) -> list[LateUpdate]:
        """The updates that have to be made before the forward of a minibatch. Waits for their
        gradients, which are sent before the minibatch's payload.
        """
        num_stages, found = self._holdings.channels.num_stages, []
        for source, updates in self._awaited.items():
            while updates and updates[0][0] <= newest_update(minibatch, source, num_stages):
                found.append(self._receive(source, updates.popleft()[1]))
        return found

    def rest(self) -> list[LateUpdate]:
        """The updates that are still to be made when the pipeline is empty."""
        return self.due(sys.maxsize)

    def _receive(self, source: int, tag: Any) -> LateUpdate:
        channels = self._holdings.channels
        received = dict(channels.shared.receive_values(source))
        gradients = [
            (parameter, received[name].to(channels.device))
            for name, parameter in self._shared_with(source, channels.stage)
            if received[name] is not None
        ]
        return LateUpdate(tag, gradients)
