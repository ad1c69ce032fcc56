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

from lightning_pipeshift.compat.torch_private import (
    buffers_of,
    drop_weak_references,
    make_weak_references,
    parameters_of,
)
from lightning_pipeshift.model.parameters.remote_tensor import RemoteTensor, swap


class Slot(NamedTuple):
    """An attribute in the module tree that refers to a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    def put(self, tensor: Tensor | None) -> None:
        """Makes the place refer to ``tensor``, whatever its type."""
        (buffers_of if self.is_buffer else parameters_of)(self.module)[self.name] = tensor  # type: ignore[assignment]

    def get(self) -> Tensor | None:
        """The tensor that the place refers to."""
        return (buffers_of if self.is_buffer else parameters_of)(self.module)[self.name]


def slots_of(module: nn.Module) -> list[Slot]:
    """Returns every attribute in a module tree that refers to a parameter or buffer."""
    return [
        Slot(owner, name, is_buffer)
        for owner in module.modules()
        for is_buffer, table in ((False, parameters_of(owner)), (True, buffers_of(owner)))
        for name, tensor in table.items()
        if tensor is not None
    ]


@contextmanager
def substituted(slots: Iterable[Slot], tensor_of: Mapping[int, Tensor]) -> Iterator[None]:
    """Context in which the slots refer to other tensors, chosen by the identity of their own."""
    before = [(slot, slot.get()) for slot in slots]
    try:
        for slot, tensor in before:
            if tensor is not None and id(tensor) in tensor_of:
                slot.put(tensor_of[id(tensor)])
        yield
    finally:
        for slot, tensor in before:
            slot.put(tensor)


@dataclass
class ParameterUse:
    """A parameter of the model.

    Args:
        name: its first qualified name.
        parameter: the tensor; the same object for the whole run, whichever stage has its values.
        slots: all attributes that refer to it.
        layers: the indices of the layers whose modules refer to it.
        is_tied: whether several layers, or one and a module outside of layers, refer to it.
        everywhere: whether it is outside of layers, so that every stage has to hold it.
    """

    name: str
    parameter: nn.Parameter
    slots: list[Slot]
    layers: tuple[int, ...]
    is_tied: bool = False
    everywhere: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several stages may hold it, and its gradient is then a sum over these."""
        return self.everywhere or self.own_layer is None

    @property
    def own_layer(self) -> int | None:
        """The layer that alone refers to it in its modules, if there is one."""
        return self.layers[0] if len(self.layers) == 1 and not self.is_tied else None

    def holders(self, stage_of: list[int], num_stages: int) -> list[int]:
        """The stages that hold it, in order, given each layer's stage."""
        if self.everywhere or not self.layers:
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
    scope_of = _scope_of(root, layers)
    members = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    slots: dict[int, list[Slot]] = {}
    for slot in slots_of(root):
        if not slot.is_buffer:
            slots.setdefault(id(slot.get()), []).append(slot)
    uses = []
    for name, parameter in root.named_parameters():
        inside = tuple(i for i, member in enumerate(members) if id(parameter) in member)
        places = slots[id(parameter)]
        use = ParameterUse(
            name,
            parameter,
            places,
            inside,
            is_tied=len({scope_of[id(slot.module)] for slot in places}) > 1,
            everywhere=not inside,
        )
        uses.append(use)
    use_of = {id(use.parameter): use for use in uses}
    for copied, original in copies_in(root, uses, called):
        pairs = zip(copied.parameters(), original.parameters(), strict=True)
        for parameter, other in pairs:
            # User code that combines the two (an average, a momentum update) runs on the stage of
            # the copy.
            use, also = use_of[id(other)], use_of[id(parameter)].layers
            use.layers = tuple(sorted({*use.layers, *also}))
    return uses


def _scope_of(root: nn.Module, scopes: Sequence[nn.Module]) -> dict[int, int]:
    """For each module, the identity of the innermost of the given modules that contains it."""
    inner = set(map(id, scopes))
    found: dict[int, int] = {}

    def look(module: nn.Module, scope: int) -> None:
        if id(module) in found:
            return
        scope = id(module) if id(module) in inner else scope
        found[id(module)] = scope
        for child in module.children():
            look(child, scope)

    look(root, 0)
    return found


def copies_in(
    root: nn.Module, uses: Sequence[ParameterUse], called: Container[int] | None
) -> list[tuple[nn.Module, nn.Module]]:
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
    trained: dict[Any, list[nn.Module]] = {}
    num_idle: dict[Any, int] = {}
    parent_of: dict[int, nn.Module] = {}
    for module in root.modules():
        parent_of.update((id(child), module) for child in module.children())
        are_idle = {id(parameter) in idle for parameter in module.parameters()}
        signature = _signature(module)
        if are_idle == {False}:
            trained.setdefault(signature, []).append(module)
        elif are_idle == {True}:
            num_idle[signature] = num_idle.get(signature, 0) + 1

    def are_blocks(parent: nn.Module | None, signature: Any) -> bool:
        """Whether a list has several blocks of a kind; two may be a student and its teacher."""
        if not isinstance(parent, _LISTS):
            return False
        alike = [child for child in parent.children() if _signature(child) == signature]
        return len(alike) > 2

    def pairs_in(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        originals: list[nn.Module] = []
        signature = _signature(module)
        others, count = trained.get(signature, []), num_idle.get(signature, 0)
        if count and count <= _MOST_COPIES * len(others) and len(others) <= _MOST_COPIES * count:
            parent = parent_of.get(id(module))
            originals = [
                other
                for other in others
                if not (isinstance(parent, _LISTS) and parent_of.get(id(other)) is parent)
                and all(id(parameter) in idle for parameter in module.parameters())
            ]
            if not originals and others and are_blocks(parent, signature):
                # Neither are its parts copies of those blocks' parts.
                return
        yield from ((module, original) for original in originals)
        if not originals:
            for child in module.children():
                yield from pairs_in(child)

    return list(pairs_in(root))


def modules_of_user_code(
    root: nn.Module,
    layers: Sequence[nn.Module],
    uses: Sequence[ParameterUse],
    called: Container[int] | None,
) -> set[int]:
    """The identities of modules in layers that no step calls and that are no copies: only user code
    between the steps, which runs on every stage, writes to their buffers (the counter of an
    average).

    Args:
        root: the LightningModule.
        layers: its layers.
        uses: its parameters.
        called: see :func:`copies_in`.
    """
    if called is None:
        return set()
    found = {
        id(module)
        for index, layer in enumerate(layers)
        if index not in called
        for module in layer.modules()
    }
    for copied, _ in copies_in(root, uses, called):
        found -= {id(module) for module in copied.modules()}
    return found


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Allows an average for each of several decays, or a teacher of several students.
_MOST_COPIES = 4


def _signature(module: nn.Module) -> Any:
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
    operations on it take effect on the stages that hold it.

    Args:
        tensor: the parameter or buffer.
        name: its name in the whole model.
    """
    if not isinstance(tensor, RemoteTensor):
        swap(tensor, RemoteTensor.like(tensor, [name], is_the_models=True))
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


def state_to_send(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """The part of :func:`other_state` that this stage has if it holds the layer: without buffers
    into which user code has written another stage's values (an average of its weights).
    """
    state = other_state(layer)
    return {path: value for path, value in state.items() if not isinstance(value, RemoteTensor)}


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


class flat_weights_forgotten:
    """Context in which recurrent modules hold no weak references to their parameters.

    ``nn.LSTM`` and similar modules keep weak references for a fast path, and a tensor with weak
    references cannot be swapped.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._modules = [
            module for root in roots for module in root.modules() if isinstance(module, nn.RNNBase)
        ]

    def __enter__(self) -> None:
        for module in self._modules:
            drop_weak_references(module)

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            make_weak_references(module)
