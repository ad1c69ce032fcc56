"""The tensors that a stage holds: the parameters and buffers of its own layers, and the shared
ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.module_private import buffers_of
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.absent import set_in_run
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.parameters.uses import (
    ParameterUse,
    flat_weights_forgotten,
    hold,
    other_state,
    release,
    slots_of,
    take_other_state,
)
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.ownership.held_gradients import HeldGradients
from lightning_pipeshift.runtime.ownership.owner_table import OwnerTable

log = logging.getLogger(__name__)


class Holdings(OwnerTable):
    """The parameters and buffers of one stage.

    Args:
        root: see :class:`OwnerTable`, as for the next ones.
        uses: all its parameters.
        layers: its layers, in call order.
        stage_of: the stage of each layer.
        channels: the stage's connections.
    """

    def __init__(
        self,
        root: nn.Module,
        uses: list[ParameterUse],
        layers: Sequence[nn.Module],
        stage_of: list[int],
        channels: Channels,
    ) -> None:
        super().__init__(root, uses, layers, stage_of, channels)
        self.state_on_host: frozenset[int] = frozenset()
        """The identities of parameters whose optimizer state is in host memory between steps."""
        self.is_common: Callable[[Tensor], bool] | None = None
        """Whether every stage has a buffer of a layer; ``None``: only the layer's owner has."""
        self.gradients = HeldGradients(self)
        """The gradients of the parameters."""

    def _buffers(self) -> list[tuple[Tensor, bool]]:
        """The buffers that the model has now (a layer may replace its own at any time), and whether
        this stage holds each. One that several layers refer to is held by the stages of all.
        """
        inside: dict[int, tuple[Tensor, bool]] = {}
        for layer, stage in self.layers:
            for module in layer.modules():
                is_here = stage == self.stage
                for buffer in buffers_of(module).values():
                    if buffer is not None:
                        _, is_held = inside.get(id(buffer), (buffer, False))
                        is_common = self.is_common is not None and self.is_common(buffer)
                        inside[id(buffer)] = (buffer, is_held or is_here or is_common)
        outside = {id(buffer): (buffer, True) for buffer in self.root.buffers()}
        return list((outside | inside).values())

    def _tensors(self) -> list[tuple[Tensor, bool]]:
        """All parameters and buffers, and whether this stage holds each."""
        parameters: list[tuple[Tensor, bool]] = [
            (use.parameter, self.stage in self.holders_of(use.parameter)) for use in self.uses
        ]
        return parameters + self._buffers()

    def obtain(self, deferred: DeferredInit) -> None:
        """Gets the values that this stage is to hold and lacks: from a stage that has them from an
        earlier run, or by initialising them. Every stage calls this.

        Raises:
            LayerError: no stage has them, and it is not known how to initialise them.
        """
        with torch.no_grad(), flat_weights_forgotten(self.root):
            self._fetch(deferred)
            for tensor, is_held in self._tensors():
                if is_held and deferred.knows(tensor):
                    hold(tensor, deferred.values(tensor))

    def _fetch(self, deferred: DeferredInit) -> None:
        channels = self.channels

        def is_lacking(tensor: Tensor) -> bool:
            return tensor.is_meta and not deferred.knows(tensor)

        parameters = [use.parameter for use in self.uses]
        lacking = [is_lacking(parameter) for parameter in parameters]
        for layer, _ in self.layers:
            lacking.append(any(map(is_lacking, [*layer.parameters(), *layer.buffers()])))
        there = torch.zeros(channels.num_stages, len(lacking))
        there[self.stage] = 1 - torch.tensor(lacking, dtype=torch.float32)
        # Each entry is one stage's value plus zeros.
        there = channels.sum(there.flatten()).view_as(there)
        for number, stages in enumerate(self.all_holders()):
            targets = [stage for stage in stages if not there[stage, number]]
            if not targets:
                continue
            sources = there[:, number].nonzero().flatten().tolist()
            if not sources:
                name = self.uses[number].name if number < len(parameters) else "a layer's buffer"
                raise LayerError(
                    f"No stage has the values of {name}: it is on the meta device everywhere, and "
                    "was not created in `configure_model`. Make the whole model there, or give "
                    "every parameter values in `__init__`."
                )
            for to in targets:
                self._pass(number, sources[0], to)

    def _pass(self, number: int, source: int, to: int) -> None:
        """Sends one entry of the list of :meth:`all_holders` to another stage."""
        channels = self.channels
        if number < len(self.uses):
            parameter = self.uses[number].parameter
            if self.stage == source:
                channels.send_tensor(parameter, to)
            elif self.stage == to:
                hold(parameter, channels.receive_tensor(parameter, source))
            return
        layer, _ = self.layers[number - len(self.uses)]
        if self.stage == source:
            channels.send_values(other_state(layer), to)
        elif self.stage == to:
            take_other_state(layer, dict(channels.receive_values(source)))

    def state_of(self, layer: nn.Module) -> dict[tuple[str, str], Any]:
        """A layer's state other than parameters, as far as only its owner has it."""
        state, is_common = other_state(layer), self.is_common
        if is_common is None:
            return state
        # Every stage has the attributes that a module's extra state is made of.
        return {path: x for path, x in state.items() if path[1] and (x is None or not is_common(x))}

    def settle(self, optimizers: Iterable[Optimizer], deferred: DeferredInit | None = None) -> None:
        """Moves the tensors that this stage holds to its device, and frees the others.

        Args:
            optimizers: their state is moved and freed, too.
            deferred: has the values of tensors that have not been initialised, if there are any.
        """
        device = self.channels.device
        names = {id(use.parameter): use.name for use in self.uses}
        names |= {id(buffer): name for name, buffer in self.root.named_buffers()}
        with torch.no_grad(), flat_weights_forgotten(self.root):
            for tensor, is_held in self._tensors():
                if is_held:
                    if tensor.device != device and not tensor.is_meta:
                        tensor.data = tensor.data.to(device)
                else:
                    self._release(tensor, names[id(tensor)])
        set_in_run(True)
        for optimizer in optimizers:
            for parameter in list(optimizer.state):
                if self.stage not in self.holders_of(parameter):
                    del optimizer.state[parameter]
            # State restored from a checkpoint, or made by the optimizer's constructor.
            optimizer_to_device(optimizer, device, deferred or DeferredInit(), self.state_on_host)

    def _release(self, tensor: Tensor, name: str) -> None:
        try:
            release(tensor, name)
        except RuntimeError as error:
            # Torch refuses while there is a weak reference to the tensor. That only costs memory.
            log.warning("PipeShift: a tensor of another stage remains here: %s", error)

    def make_whole(self) -> None:
        """Gives every stage the whole model again, on the CPU, one tensor at a time. Every stage
        calls this.
        """
        with torch.no_grad(), flat_weights_forgotten(self.root):
            for number, holders in enumerate(self.all_holders()):
                for to in range(self.channels.num_stages):
                    if to not in holders:
                        self._pass(number, holders[0], to)
        self.to_cpu()

    def to_cpu(self) -> None:
        """Moves the tensors that this stage holds to the CPU, and stops tracking which stage holds
        which tensor.
        """
        set_in_run(False)
        for slot in slots_of(self.root):
            tensor = slot.get()
            if tensor is not None and not tensor.is_meta and tensor.device.type != "cpu":
                tensor.data = tensor.data.cpu()

    def match_shared(self) -> None:
        """Gives every holder of a shared parameter the lowest holder's values. Every stage calls
        this.
        """
        for use in self.uses:
            holders = self.holders_of(use.parameter)
            if not use.is_shared or len(holders) < 2 or self.stage not in holders:
                continue
            if self.stage == holders[0]:
                for to in holders[1:]:
                    self.channels.send_tensor(use.parameter, to)
            else:
                values = self.channels.receive_tensor(use.parameter, holders[0])
                with torch.no_grad():
                    use.parameter.copy_(values)


def optimizer_to_device(
    optimizer: Optimizer,
    device: torch.device,
    deferred: DeferredInit,
    on_host: Collection[int] = (),
) -> None:
    """Moves an optimizer's state, and initialises deferred tensors. Step counters are on the CPU,
    unless a kernel of the optimizer reads them (``fused`` and ``capturable``).

    Args:
        optimizer: the optimizer.
        device: where its state is to be.
        deferred: has the values of tensors that are on the meta device.
        on_host: the identities of parameters whose state remains where it is.
    """
    kernel_counts = {
        parameter
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for parameter, entry in optimizer.state.items():
        if isinstance(entry, MutableMapping):
            for name, value in entry.items():
                if not isinstance(value, Tensor):
                    continue
                if deferred.knows(value):
                    entry[name] = value = deferred.values(value)
                stays = id(parameter) in on_host and value.numel() > 1
                if value.is_meta or stays or (name == "step" and parameter not in kernel_counts):
                    continue
                entry[name] = value.to(device)
