"""Fake copies of layers: what a layer's call gives is found without the layer's weights. And hooks
inside of layers, which run on every stage.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import (
    MAKES_WEIGHTS,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks,
    has_forward_hooks,
    hook_tables,
    parameters_of,
    renew_weak_references,
    set_hook_tables,
)
from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.arguments import is_node
from lightning_pipeshift.values.layer_state import NO_STATE, Attribute, mark

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")

Flagged = tuple[list[nn.Module], list[nn.Parameter]]
"""The modules and the parameters of a layer: each module has the flag ``training``, and each
parameter ``requires_grad``."""


def flagged_in(layer: nn.Module) -> Flagged:
    """The modules and the parameters of a layer."""
    return list(layer.modules()), list(layer.parameters())


def flags_of(flagged: Flagged) -> tuple[bool, ...]:
    """Whether modules are in training, and parameters are trained. Called inside of
    :data:`without_torch_function_of_subclasses`.
    """
    return (*map(_TRAINING, flagged[0]), *map(_REQUIRES_GRAD, flagged[1]))


def set_flags(flagged: Flagged, flags: Sequence[bool]) -> None:
    """Gives modules and parameters such flags as :func:`flags_of` has found."""
    modules, parameters = flagged
    for module, flag in zip(modules, flags, strict=False):
        module.training = flag
    for parameter, flag in zip(parameters, flags[len(modules) :], strict=True):
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


@contextmanager
def flagged_as(flagged: Flagged, flags: Sequence[bool]) -> Iterator[None]:
    """Context in which modules and parameters have other flags."""
    now = flags_of(flagged)
    set_flags(flagged, flags)
    try:
        yield
    finally:
        set_flags(flagged, now)


def leaving_flags(
    forward: Callable[..., Any],
    flagged: Flagged,
    flags: tuple[bool, ...],
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, tuple[bool, ...]]:
    """Calls a layer's forward, and leaves its flags as they were. Also returns those that it would
    leave, for all stages to set; nothing if they are the same.

    Args:
        forward: the layer's, called with the arguments that follow.
        flagged: what has flags.
        flags: those before the call.
    """
    left = flags
    try:
        result = forward(*args, **kwargs)
    finally:
        left = flags_of(flagged)
        if left != flags:
            set_flags(flagged, flags)
    return result, () if left == flags else left


def kind_of(layer: nn.Module, forward: Any, without: Collection[Attribute]) -> Any:
    """Hashable: layers with equal kinds give results of equal shapes for equal arguments. Classes,
    settings, and the shapes of parameters and buffers count, and not their values; whether they are
    trained (``requires_grad``, ``training``) is in :func:`flags_of`, as it changes often.

    Args:
        layer: the layer.
        forward: the layer's own, if it is not that of its class.
        without: attributes that are no settings, since calls change them.
    """
    memo: dict[int, int] = {}
    return _setting(forward), *(
        (name, type(module), _settings(name, module, without), tuple(_tensors(module, memo)))
        for name, module in layer.named_modules(remove_duplicate=False)
    )


def runs_torch_only(layer: nn.Module, forward: Any) -> bool:
    """Whether a layer consists of torch's own modules, and calls no other functions.

    Args:
        layer: the layer.
        forward: see :func:`kind_of`.
    """
    parts = [] if forward is None else [forward]
    for path, module in layer.named_modules():
        # The forward of a layer that is placed is in its attributes.
        parts += (x for name, x in module.__dict__.items() if name != "forward" or path)
        parts += (type(module), *forward_hooks_of(module).values(), *forward_pre_hooks(module))
    return all(
        (getattr(part, "__module__", None) or "").partition(".")[0] == "torch"
        for part in parts
        if callable(part)
    )


def _tensors(module: nn.Module, memo: dict[int, int]) -> Any:
    own = (*parameters_of(module).items(), *buffers_of(module).items())
    for name, tensor in own:
        if tensor is None:
            yield name, None
        else:
            at = memo.setdefault(id(tensor), len(memo))
            yield name, at, tensor.shape, tensor.stride(), tensor.dtype


def _settings(path: str, module: nn.Module, without: Collection[Attribute]) -> Any:
    """A module's attributes."""
    return tuple(
        (name, _setting(x))
        for name, x in module.__dict__.items()
        if (name not in NO_STATE or (name == "forward" and path))
        and Attribute(path, name, False) not in without
    )


def _setting(x: Any) -> Any:
    """Plain ones by their values, containers by what is in them, and others by their identity."""
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, tuple | list):
        return type(x), *map(_setting, x)
    if isinstance(x, types.MethodType):
        return x.__func__
    if isinstance(x, dict | set | frozenset) and not x:
        return type(x)
    return mark(x, {})


def fake_copy(
    layer: nn.Module,
    forward: Any,
    fake_mode: Any,
    device: torch.device,
    without: Collection[Attribute],
) -> nn.Module | None:
    """A copy of a layer with fake parameters and buffers; ``None`` if it has something that cannot
    be copied (a ``ScriptModule``), or if the forward of one of its modules is a function that was
    put in its place, which may use the module itself.

    Args:
        layer: its own may have no memory here.
        forward: see :func:`kind_of`.
        fake_mode: makes the fake ones.
        device: where the layer would compute.
        without: attributes that are set before each call.
    """
    memo: dict[int, Any] = {}
    with without_torch_function_of_subclasses(), fake_mode:
        for tensor in (*layer.parameters(), *layer.buffers()):
            memo[id(tensor)] = _fake(tensor, device)
        for module in layer.modules():
            for name, x in module.__dict__.items():
                if isinstance(x, Tensor):
                    memo[id(x)] = _fake(x, device)
                elif isinstance(x, torch.Generator):
                    # It belongs to the layer's owner, and draws nothing on fake tensors.
                    memo[id(x)] = x
                elif "_hooks" in name and isinstance(x, dict):
                    # Hooks may belong to the whole model.
                    memo[id(x)] = type(x)(
                        (at, hook) for at, hook in x.items() if makes_weights(hook)
                    )
        for attribute in without:
            x = attribute.get(layer)
            if isinstance(x, Tensor) or is_node(x):
                memo[id(x)] = None
        # The forward of a layer that is placed is in its attributes.
        placed = layer.__dict__.pop("forward", None)
        try:
            fake = copy.deepcopy(layer, memo)
            if forward is not None:
                fake.__dict__["forward"] = copy.deepcopy(forward, memo)
        except Exception:
            return None
        finally:
            if placed is not None:
                layer.__dict__["forward"] = placed
    for module in fake.modules():
        if isinstance(module, nn.RNNBase):
            # They are those of the layer's own parameters, which could not be swapped.
            renew_weak_references(module)
    own = (module.__dict__.get("forward") for module in fake.modules())
    return None if any(isinstance(x, types.FunctionType) for x in own) else fake


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
        output: what it returned; nothing before it ran.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: tuple[Any, ...]


def is_heard(module: nn.Module) -> bool:
    """Whether hooks of a user look at what a module gets or returns."""
    return has_forward_hooks(module) and (
        bool(forward_hooks_of(module)) or not all(map(makes_weights, forward_pre_hooks(module)))
    )


def makes_weights(hook: Any) -> bool:
    """Whether a hook is a part of its module, and not a user's."""
    return isinstance(hook, MAKES_WEIGHTS)


def hearing(
    layer: nn.Module, forward: Callable[..., Any], names: Sequence[str]
) -> Callable[..., tuple[Any, tuple[Heard, ...]]]:
    """A layer's forward without the hooks of these modules inside of it. It also returns what the
    hooks have to be called with: :func:`call_hooks` does, on every stage.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Heard, ...]]:
        heard: list[Heard] = []
        kept = []
        for name in names:
            module = layer.get_submodule(name)
            kept.append((module, hook_tables(module)))

            def hear(_: Any, args: Any, kwargs: Any, *output: Any, name: str = name) -> None:
                heard.append(Heard(name, args, kwargs, output))

            own = [
                (-1 - at, x) for at, x in enumerate(forward_pre_hooks(module)) if makes_weights(x)
            ]
            once, with_kwargs = OrderedDict({0: hear}), OrderedDict({0: True})
            set_hook_tables(
                module, (OrderedDict([*own, (0, hear)]), with_kwargs, once, with_kwargs)
            )
        try:
            return forward(*args, **kwargs), tuple(heard)
        finally:
            for module, tables in kept:
                set_hook_tables(module, tables)

    return run


def call_hooks(layer: nn.Module, label: str, heard: Sequence[Heard]) -> None:
    """Calls the hooks of modules inside of a layer.

    Args:
        layer: the layer.
        label: its name.
        heard: what the modules got and returned.

    Raises:
        LayerError: a hook returns something else than the module did, or got.
    """
    for name, args, kwargs, output in heard:
        module = layer.get_submodule(name)
        before, before_with_kwargs, after, after_with_kwargs = hook_tables(module)
        hooks, with_kwargs = (after, after_with_kwargs) if output else (before, before_with_kwargs)
        for number, hook in list(hooks.items()):
            if makes_weights(hook):
                continue
            found = hook(module, args, *([kwargs] if number in with_kwargs else []), *output)
            if found is not None:
                raise LayerError(
                    f"A forward hook of `{label}.{name}` changes what the module"
                    f" {'returns' if output else 'gets'}. Hooks inside of a layer may only look:"
                    f" register it on the layer `{label}`, or make the change in the module's"
                    " `forward`."
                )
