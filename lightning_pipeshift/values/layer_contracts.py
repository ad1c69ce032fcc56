"""Fake copies of layers: what a layer's call gives is found without the layer's weights. And hooks
inside of layers, which run on every stage.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    MODULE_TABLES,
    buffers_of,
    forward_hooks_of,
    hooks_with_kwargs_of,
    parameters_of,
    set_forward_hooks,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)

_NO_SETTINGS = MODULE_TABLES | {"forward", "training"}


def flags_of(modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> tuple[bool, ...]:
    """Whether modules are in training, and parameters are trained."""
    return (
        *(module.training for module in modules),
        *(parameter.requires_grad for parameter in parameters),
    )


def copy_flags(layer: nn.Module, to: nn.Module) -> None:
    """Gives a fake copy the flags of a layer of its kind."""
    for module, fake in zip(layer.modules(), to.modules(), strict=True):
        fake.training = module.training
    for parameter, copied in zip(layer.parameters(), to.parameters(), strict=True):
        copied.requires_grad_(parameter.requires_grad)


def kind_of(layer: nn.Module) -> Any:
    """Hashable: layers with equal kinds give results of equal shapes for equal arguments. Classes,
    settings, and the shapes of parameters and buffers count, and not their values; whether they are
    trained (``requires_grad``, ``training``) is in :func:`flags_of`, as it may change.
    """
    memo: dict[int, int] = {}
    return tuple(
        (name, type(module), _settings(module), tuple(_tensors(module, memo)))
        for name, module in layer.named_modules(remove_duplicate=False)
    )


def _tensors(module: nn.Module, memo: dict[int, int]) -> Any:
    own = (*parameters_of(module).items(), *buffers_of(module).items())
    for name, tensor in own:
        if tensor is None:
            yield name, None
        else:
            at = memo.setdefault(id(tensor), len(memo))
            yield name, at, tensor.shape, tensor.stride(), tensor.dtype


def _settings(module: nn.Module) -> Any:
    """A module's attributes: plain ones by their values, others by their identity."""
    return tuple(
        (name, _setting(x))
        for name, x in module.__dict__.items()
        if name not in _NO_SETTINGS and "_hooks" not in name
    )


def _setting(x: Any) -> Any:
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, tuple | list):
        return type(x), *map(_setting, x)
    if isinstance(x, dict | set | frozenset) and not x:
        return type(x)
    return id(x)


def fake_copy(layer: nn.Module, fake_mode: Any, device: torch.device) -> nn.Module:
    """A copy of a layer with fake parameters and buffers.

    Args:
        layer: its own may have no memory here.
        fake_mode: makes the fake ones.
        device: where the layer would compute.
    """
    memo: dict[int, Any] = {}
    with without_torch_function_of_subclasses(), fake_mode:
        for tensor in (*layer.parameters(), *layer.buffers()):
            memo[id(tensor)] = _fake(tensor, device)
        for module in layer.modules():
            # Hooks may belong to the whole model.
            hooks = [x for name, x in module.__dict__.items() if "_hooks" in name]
            memo.update((id(x), type(x)()) for x in hooks if isinstance(x, dict))
        # The forward of a layer that is placed is in its attributes; a copy has its class's own.
        placed = layer.__dict__.pop("forward", None)
        try:
            return copy.deepcopy(layer, memo)
        finally:
            if placed is not None:
                layer.__dict__["forward"] = placed


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    there = device if tensor.is_meta else tensor.device
    new = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=there
    )
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


class Heard(NamedTuple):
    """What a module inside of a layer got and returned.

    Args:
        name: of the module in the layer.
        args: its arguments.
        kwargs: its keyword arguments.
        output: what it returned.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def hearing(
    layer: nn.Module, forward: Callable[..., Any], names: Sequence[str]
) -> Callable[..., tuple[Any, list[Heard]]]:
    """A layer's forward without the hooks of these modules inside of it. It also returns what the
    hooks have to be called with: :func:`call_hooks` does, on every stage.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[Any, list[Heard]]:
        heard: list[Heard] = []
        kept = []
        for name in names:
            module = layer.get_submodule(name)
            kept.append((module, forward_hooks_of(module), hooks_with_kwargs_of(module)))

            def hear(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                heard.append(Heard(name, args, kwargs, output))

            set_forward_hooks(module, OrderedDict({0: hear}), OrderedDict({0: True}))
        try:
            return forward(*args, **kwargs), heard
        finally:
            for module, hooks, with_kwargs in kept:
                set_forward_hooks(module, hooks, with_kwargs)

    return run


def call_hooks(layer: nn.Module, label: str, heard: Sequence[Heard]) -> None:
    """Calls the hooks of modules inside of a layer.

    Args:
        layer: the layer.
        label: its name.
        heard: what the modules got and returned.

    Raises:
        LayerError: a hook returns something else than the module did.
    """
    for name, args, kwargs, output in heard:
        module = layer.get_submodule(name)
        for number, hook in list(forward_hooks_of(module).items()):
            takes_kwargs = number in hooks_with_kwargs_of(module)
            found = hook(module, args, *([kwargs] if takes_kwargs else []), output)
            if found is not None:
                raise LayerError(
                    f"A forward hook of `{label}.{name}` changes what the module returns. Hooks"
                    f" inside of a layer may only look: register it on the layer `{label}`, or make"
                    " the change in the module's `forward`."
                )
