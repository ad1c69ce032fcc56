"""Finds the layers that use each parameter, and frees the parameters that a stage does not need.

A parameter that exactly one layer has moves with that layer. All others are *shared*: loose
parameters (in no layer), and tied ones (in several layers, or in one and outside of layers). Their
gradients are summed over the stages in the order of plain autograd, so the sum has the same bits on
every split.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import (
    buffers_of,
    drop_weak_references,
    make_weak_references,
    parameters_of,
)
from lightning_pipeshift.model.parameters.absent import AbsentTensor, swap


class Slot(NamedTuple):
    """An attribute in the module tree that refers to a parameter or buffer."""

    table: dict[str, Any]
    """The module's own, of its parameters or buffers: it takes tensors of any class."""
    name: str
    is_buffer: bool

    def get(self) -> Tensor | None:
        """The tensor that the place refers to."""
        tensor: Tensor | None = self.table[self.name]
        return tensor


def slots_of(module: nn.Module) -> list[Slot]:
    """Returns every attribute in a module tree that refers to a parameter or buffer."""
    found: list[Slot] = []
    for owner in module.modules():
        tables: list[tuple[dict[str, Any], bool]] = [
            (parameters_of(owner), False),
            (buffers_of(owner), True),
        ]
        for table, is_buffer in tables:
            found += [Slot(table, name, is_buffer) for name, x in table.items() if x is not None]
    return found


@contextmanager
def substituted(slots: Iterable[Slot], tensor_of: Mapping[int, Tensor]) -> Iterator[None]:
    """Context in which the slots refer to other tensors, chosen by the identity of their own."""
    before = [(slot, slot.get()) for slot in slots]
    try:
        for slot, tensor in before:
            if tensor is not None and id(tensor) in tensor_of:
                slot.table[slot.name] = tensor_of[id(tensor)]
        yield
    finally:
        for slot, tensor in before:
            slot.table[slot.name] = tensor


@dataclass
class ParameterUse:
    """A parameter of the model.

    Args:
        name: its first qualified name.
        parameter: the tensor; the same object for the whole run, whichever stage has its values.
        layers: the indices of the layers whose modules refer to it, and of those in which there are
            copies of it.
        is_tied: whether several layers, or one and a module outside of layers, refer to it.
        everywhere: whether no layer refers to it, so that every stage has to hold it.
    """

    name: str
    parameter: nn.Parameter
    layers: tuple[int, ...]
    is_tied: bool = False
    everywhere: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several stages may hold it, and its gradient is then a sum over these."""
        return self.everywhere or self.is_tied or len(self.layers) > 1

    def holders(self, stage_of: list[int], num_stages: int) -> list[int]:
        """The stages that hold it, in order, given each layer's stage."""
        if self.everywhere:
            return list(range(num_stages))
        return sorted({stage_of[layer] for layer in self.layers})


def of_one_layer(uses: Iterable[ParameterUse]) -> dict[int, list[nn.Parameter]]:
    """The parameters that one layer only uses, by layer."""
    found: dict[int, list[nn.Parameter]] = {}
    for use in uses:
        if not use.is_shared:
            found.setdefault(use.layers[0], []).append(use.parameter)
    return found


def parameter_uses(
    root: nn.Module, layers: list[nn.Module], called: Container[int] | None = None
) -> list[ParameterUse]:
    """Returns every parameter of ``root`` in the order of ``root.named_parameters()``, with its
    users.

    Args:
        root: the LightningModule.
        layers: its layers, in call order.
        called: the indices of the layers that a training step calls; by default all.
    """
    members = [set(map(id, layer.parameters())) for layer in layers]
    modules = {id(module) for layer in layers for module in layer.modules()}
    outside = {
        id(parameter)
        for module in root.modules()
        for parameter in module.parameters(recurse=False)
        if id(module) not in modules
    }
    uses = []
    for name, parameter in root.named_parameters():
        inside = tuple(i for i, member in enumerate(members) if id(parameter) in member)
        is_tied = len(inside) + (id(parameter) in outside) > 1
        uses.append(ParameterUse(name, parameter, inside, is_tied, everywhere=not inside))
    use_of = {id(use.parameter): use for use in uses}
    for copied, original in copies_in(root, uses, called):
        for parameter, other in zip(copied.parameters(), original.parameters(), strict=True):
            # User code that combines the two (an average, a momentum update) runs on the stage of
            # the copy.
            use, also = use_of[id(other)], use_of[id(parameter)].layers
            use.layers = tuple(sorted({*use.layers, *also}))
    return uses


Pair = tuple[nn.Module, nn.Module]
"""A module that is a copy of another one, and that one."""


def copies_in(
    root: nn.Module, uses: Sequence[ParameterUse], called: Container[int] | None
) -> list[Pair]:
    """The modules that are copies of others, each with its original: a teacher and its student, a
    momentum encoder and its encoder, an average and the averaged module.

    A copy is of the same class and has parameters of the same names and shapes, and no gradient
    reaches it: its parameters are frozen, or no step calls it. Frozen blocks among trained blocks
    of the same class are no copies, and neither are many small modules that resemble a trained one.

    Args:
        root: the LightningModule.
        uses: its parameters.
        called: the indices of the layers that a training step calls; ``None`` for all.
    """
    idle = {
        id(use.parameter)
        for use in uses
        if not use.parameter.requires_grad
        or (called is not None and use.layers and not any(layer in called for layer in use.layers))
    }
    kind_of = {module: _kind_of(module) for module in root.modules()}
    trained: dict[Any, list[nn.Module]] = {}
    frozen: dict[Any, list[nn.Module]] = {}
    for module, kind in kind_of.items():
        are_idle = {id(parameter) in idle for parameter in module.parameters()}
        if len(are_idle) == 1:
            (frozen if are_idle.pop() else trained).setdefault(kind, []).append(module)

    def pairs_in(module: nn.Module, siblings: Sequence[nn.Module]) -> Iterator[Pair]:
        """The pairs of a module and its parts.

        Args:
            module: the module.
            siblings: the elements of the list that it is in.
        """
        kind = kind_of[module]
        originals, copies = trained.get(kind, []), frozen.get(kind, [])
        if copies and 1 / _MOST_COPIES <= len(originals) / len(copies) <= _MOST_COPIES:
            if module in copies and (apart := [x for x in originals if x not in siblings]):
                yield from ((module, original) for original in apart)
                return
            if sum(kind_of[each] == kind for each in siblings) > 2:
                # A list of more than two alike modules holds the blocks of one network, no copies.
                # The same is true of their parts. Two may be a student and its teacher.
                return
        children = list(module.children())
        for child in children:
            yield from pairs_in(child, children if isinstance(module, _LISTS) else ())

    return list(pairs_in(root, ()))


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Allows an average for each of several decays, or a teacher of several students.
_MOST_COPIES = 4


def _kind_of(module: nn.Module) -> Any:
    return type(module), tuple((name, p.shape) for name, p in module.named_parameters())


def hold(tensor: Tensor, data: Tensor) -> None:
    """Sets the values of a parameter or buffer that was on another stage. The object is
    unchanged.
    """
    if data.is_meta == tensor.is_meta and data.device.type == tensor.device.type:
        tensor.data = data
        return
    fresh = data
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(data, requires_grad=tensor.requires_grad)
    # `tensor.data = ...` refuses another backend.
    swap(tensor, fresh)


def give_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Sets a parameter's gradient, which is on the device also while the parameter's values are in
    host memory: torch refuses to set one of another device.
    """
    if gradient is None or gradient.device == parameter.device:
        parameter.grad = gradient
        return
    values = parameter.data
    # Takes the memory of one element.
    alike = torch.empty((), dtype=values.dtype, device=gradient.device).expand(values.shape)
    parameter.data = alike
    parameter.grad = gradient
    parameter.data = values


def release(tensor: Tensor, name: str) -> None:
    """Frees the values of a parameter or buffer. The object, its shape and its type remain, and
    writing to it takes effect on the stages that hold it.

    Args:
        tensor: the parameter or buffer.
        name: its name in the whole model.
    """
    if not isinstance(tensor, AbsentTensor):
        swap(tensor, AbsentTensor.like(tensor, name))
    tensor.grad = None


def other_state(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """A layer's state other than parameters: its modules' buffers (``None`` for an empty one), and
    under the name ``""`` the extra state that a module adds to a state dict.
    """
    found: dict[tuple[str, str], Any] = {}
    for owner, module in layer.named_modules():
        found |= {(owner, name): buffer for name, buffer in buffers_of(module).items()}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[owner, ""] = module.get_extra_state()
    return found


def take_other_state(layer: nn.Module, state: dict[tuple[str, str], Any]) -> None:
    """Loads the result of :func:`other_state` of another rank into a layer."""
    modules = dict(layer.named_modules())
    for (owner, name), value in state.items():
        if name:
            give_buffer(modules[owner], name, value)
        else:
            modules[owner].set_extra_state(value)


def give_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Sets a buffer's new values. If shape and type are unchanged, the buffer remains the same
    object.
    """
    buffers = buffers_of(module)
    before = buffers.get(name)
    if before is None or value is None:
        buffers[name] = value
    elif before.shape != value.shape or before.dtype is not value.dtype:
        buffers[name] = value.to(before.device) if not before.is_meta else value
    elif before.is_meta:
        hold(before, value)
    else:
        with torch.no_grad():
            before.copy_(value)


@contextmanager
def flat_weights_forgotten(*roots: nn.Module) -> Iterator[None]:
    """Context in which recurrent modules hold no weak references to their parameters.

    ``nn.LSTM`` and similar modules keep weak references for a fast path, and a tensor with weak
    references cannot be swapped.
    """
    modules = [each for root in roots for each in root.modules() if isinstance(each, nn.RNNBase)]
    for module in modules:
        drop_weak_references(module)
    try:
        yield
    finally:
        for module in modules:
            make_weak_references(module)
