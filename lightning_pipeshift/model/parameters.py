"""Who uses which parameter, and how a stage lets go of those that it does not need.

A parameter that exactly one layer uses moves with that layer. All others are *shared*: loose
parameters (in no layer), tied ones (in several), and those that user code touches directly
(``F.linear(h, self.embed.weight)``). A shared parameter is used in *segments*: the inside of one
layer, or the user code in front of one. Its gradient is collected for each segment apart and summed
in the order of the segments, so the sum has the same bits on every split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.model.placeholder import META


class Slot(NamedTuple):
    """A place in the module tree that refers to a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    def put(self, tensor: Tensor | None) -> None:
        """Lets the place refer to ``tensor``, whatever its type."""
        (self.module._buffers if self.is_buffer else self.module._parameters)[self.name] = tensor  # type: ignore[assignment]

    def get(self) -> Tensor | None:
        """What the place refers to."""
        return (self.module._buffers if self.is_buffer else self.module._parameters)[self.name]


class Segment(NamedTuple):
    """A part of the forward pass: layer ``layer`` itself, or the user code in front of it."""

    layer: int
    in_layer: bool


def slots_of(module: nn.Module) -> list[Slot]:
    """Every place in a module tree that refers to a parameter or buffer."""
    return [
        Slot(owner, name, is_buffer)
        for owner in module.modules()
        for is_buffer, table in ((False, owner._parameters), (True, owner._buffers))
        for name, tensor in table.items()
        if tensor is not None
    ]


@contextmanager
def substituted(slots: Iterable[Slot], tensor_of: Mapping[int, Tensor]) -> Iterator[None]:
    """Context in which the places refer to other tensors, chosen by the identity of what they refer
    to.
    """
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
        parameter: the tensor; the same object for the whole run, wherever its data is.
        slots: all places that refer to it.
        layers: the indices of the layers whose modules refer to it.
        segments: where a shared parameter is used, in order; empty for one that moves with its only
            layer.
        everywhere: whether user code touches it, so that every stage has to hold it.
    """

    name: str
    parameter: nn.Parameter
    slots: list[Slot]
    layers: tuple[int, ...]
    segments: list[Segment] = field(default_factory=list)
    everywhere: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether more than one stage may use it."""
        return self.everywhere or len(self.layers) != 1

    def holders(self, stage_of: list[int], num_stages: int) -> list[int]:
        """The stages that hold it, in order, given each layer's stage."""
        if self.everywhere or not self.layers:
            return list(range(num_stages))
        return sorted({stage_of[layer] for layer in self.layers})


def parameter_uses(
    root: nn.Module, layers: list[nn.Module], touched: Mapping[int, set[Segment]]
) -> list[ParameterUse]:
    """Every parameter of ``root`` in the order of ``root.named_parameters()``, with its users.

    Args:
        root: the LightningModule.
        layers: its layers, in call order.
        touched: by the identity of a parameter, the segments that use it other than through its own
            layer.
    """
    members = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    slots: dict[int, list[Slot]] = {}
    for slot in slots_of(root):
        if not slot.is_buffer:
            slots.setdefault(id(slot.get()), []).append(slot)
    uses = []
    for name, parameter in root.named_parameters():
        inside = tuple(i for i, member in enumerate(members) if id(parameter) in member)
        extra = touched.get(id(parameter), set())
        use = ParameterUse(
            name, parameter, slots[id(parameter)], inside, everywhere=bool(extra) or not inside
        )
        if use.is_shared:
            use.segments = sorted(extra | {Segment(layer, True) for layer in inside})
        uses.append(use)
    return uses


def hold(tensor: Tensor, data: Tensor) -> None:
    """Gives a parameter or buffer, of which only the name was here, its values; the object stays
    the same.
    """
    _swap(tensor, data)


def release(tensor: Tensor) -> None:
    """Lets go of the values of a parameter or buffer; the object, its shape and its type stay."""
    if tensor.device != META:
        _swap(
            tensor,
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META),
        )
    tensor.grad = None


def _swap(tensor: Tensor, data: Tensor) -> None:
    if data.device.type == tensor.device.type:
        tensor.data = data
        return
    # `tensor.data = ...` refuses another backend. Swapping keeps the object, so optimizers,
    # schedulers and the user's own references stay valid.
    fresh: Tensor = data
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(data, requires_grad=tensor.requires_grad)
    attributes: dict[str, Any] = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, fresh)
    tensor.__dict__.update(attributes)
    # Hooks belong to what was swapped away: naming them anew puts them into effect.
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks:
            setattr(tensor, name, None)
            setattr(tensor, name, hooks)


def other_state(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """What a layer keeps besides parameters: its modules' buffers (``None`` where there is none),
    and under the name ``""`` what a module adds to a state dict.
    """
    found: dict[tuple[str, str], Any] = {}
    for owner, module in layer.named_modules():
        found |= {(owner, name): buffer for name, buffer in module._buffers.items()}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[owner, ""] = module.get_extra_state()
    return found


def take_other_state(layer: nn.Module, state: dict[tuple[str, str], Any]) -> None:
    """Gives a layer what :func:`other_state` found on another rank."""
    modules = dict(layer.named_modules())
    for (owner, name), value in state.items():
        if name:
            give_buffer(modules[owner], name, value)
        else:
            modules[owner].set_extra_state(value)


def give_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Gives a module a buffer's new values. One that is still of the same shape and type stays the
    same object, where it was.
    """
    before = module._buffers.get(name)
    if before is None or value is None:
        module._buffers[name] = value
    elif before.shape != value.shape or before.dtype is not value.dtype:
        module._buffers[name] = value.to(before.device) if before.device != META else value
    elif before.device == META:
        hold(before, value)
    else:
        with torch.no_grad():
            before.copy_(value)


class flat_weights_forgotten:
    """Context in which recurrent modules hold no weak references to their parameters.

    ``nn.LSTM`` and its kind keep weak references for a fast path, and a tensor with weak references
    cannot be swapped.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module for module in root.modules() if isinstance(module, nn.RNNBase)]

    def __enter__(self) -> None:
        for module in self._modules:
            module._flat_weight_refs = []

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            module._init_flat_weights()
