"""Fake copies of layers: what a layer's call gives is found without the layer's weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


def kind_of(layer: nn.Module) -> Any:
    """Hashable: layers with equal kinds give results of equal shapes for equal arguments. Classes,
    settings, and the shapes of parameters and buffers count, and not their values.
    """
    memo: dict[int, int] = {}
    return tuple(
        (name, type(module), _settings(module, memo), tuple(_tensors(module, memo)))
        for name, module in layer.named_modules(remove_duplicate=False)
    )


def _tensors(module: nn.Module, memo: dict[int, int]) -> Any:
    own = (*module._parameters.items(), *module._buffers.items())
    for name, tensor in own:
        if tensor is None:
            yield name, None
        else:
            at = memo.setdefault(id(tensor), len(memo))
            yield name, at, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _settings(module: nn.Module, memo: dict[int, int]) -> Any:
    """A module's attributes: plain ones by their values, others by their identity."""
    return tuple(
        (name, _setting(x))
        for name, x in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules", "forward")
    )


def _setting(x: Any) -> Any:
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, tuple | list):
        return type(x), *map(_setting, x)
    if isinstance(x, dict | set | frozenset) and not x:
        return type(x)
    return id(x)


def fake_copy(layer: nn.Module, fake_mode: Any) -> nn.Module:
    """A copy of a layer with fake parameters and buffers."""
    memo: dict[int, Any] = {}
    with without_torch_function_of_subclasses(), fake_mode:
        for tensor in (*layer.parameters(), *layer.buffers()):
            memo[id(tensor)] = _fake(tensor)
        # The forward of a layer that is placed is in its attributes; a copy has its class's own.
        placed = layer.__dict__.pop("forward", None)
        try:
            return copy.deepcopy(layer, memo)
        finally:
            if placed is not None:
                layer.__dict__["forward"] = placed


def _fake(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
