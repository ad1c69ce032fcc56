"""Private names of torch's modules: their hooks, tables and compilation. See ``compat`` for the
rest, and :mod:`lightning_pipeshift.compat.torch_private` for what holds for these names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final
from weakref import ref

import torch
import torch.nn.modules.module as torch_modules
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.loss import _Loss as Loss
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import BackwardHook

# The imported names, and why no public one serves:
# - NormBase: the base class of all batch and instance norms; the public classes are many.
# - Loss: the base class of the loss modules, likewise.
# - BackwardHook: puts hooks on a module's backward around the module; torch documents the hooks.
# - BackwardHookFunction: what hooks on a module's backward put around the module.
__all__ = ["BackwardHook", "BackwardHookFunction", "Loss", "NormBase"]


# --- compiled modules ---


def without_compiling() -> AbstractContextManager[Any]:
    """A context, in force from now on, in which what ``torch.compile`` has compiled runs as it was
    written. Cheap if nothing has been compiled so far.
    """
    if not has_compiled():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def with_compiling() -> AbstractContextManager[Any]:
    """A context inside of :func:`without_compiling`, in force from now on, in which torch compiles
    again.
    """
    if not has_compiled():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("default")
    return stance


def has_compiled() -> bool:
    """Whether torch may have compiled anything in this process."""
    # Optimizers import the compiler, too, and register that they are not to be compiled: None.
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and any(dynamo.eval_frame.cached_backends.values())


COMPILED_CALL: Final = "_compiled_call_impl"
"""The attribute of a module in which ``module.compile()`` puts its whole call."""
COMPILER_OF: Final = "dynamo_ctx"
"""The attribute of what ``torch.compile(module)`` returns that has the compiler, which changes when
it compiles."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, COMPILED_CALL, None) is not None


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module that is not compiled: its hooks and its ``forward``."""
    call: Callable[..., Any] = module._call_impl
    return call


MAKES_WEIGHTS: Final = (SpectralNorm, WeightNorm, BasePruningMethod)
"""Hooks on a module's forward that compute its weights from other parameters of it."""


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks before a module's forward."""
    return list(module._forward_pre_hooks.values())


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks before or behind a module's forward are registered."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks on a module's backward are registered."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled a module, or has returned it."""
    # The module that `torch.compile(module)` returns has the original in this attribute. Asking for
    # its class would import the compiler.
    return is_compiled(module) or "_orig_mod" in module._modules


def compiled_in(root: nn.Module) -> list[nn.Module]:
    """The modules that ``torch.compile`` has compiled, and all those inside of them."""
    return [
        inner for each in root.modules() if is_compiled_module(each) for inner in each.modules()
    ]


# --- modules ---


@contextmanager
def backward_hooks_by(make: Callable[..., Any]) -> Iterator[None]:
    """Context in which a module's call gets from ``make`` what it puts around the forward for the
    hooks on its backward, in place of a ``BackwardHook`` of the same arguments.
    """
    torch_modules.BackwardHook = make  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch_modules.BackwardHook = BackwardHook  # type: ignore[misc]


# The tables themselves, where entries are replaced by tensors of any class, or where `None` counts:
# `setattr` checks the class, and `named_buffers` and its like leave `None` out.
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers by name, with ``None`` for empty ones."""
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters by name, with ``None`` for empty ones."""
modules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's own submodules by name, with ``None`` for empty ones."""
MODULE_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})
"""The names of these tables in the module's ``__dict__``."""

forward_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter(
    "_forward_hooks"
)
"""A module's forward hooks by number. Torch's public functions only add and remove them."""


FORWARD_HOOKS: Final = frozenset({"_forward_hooks", "_forward_pre_hooks"})
"""The attributes of a module with its hooks, by number. Each call of the module gets them."""

_HOOK_TABLES: Final = tuple(
    f"_forward_{kind}"
    for kind in ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs")
)


def hook_tables(module: nn.Module) -> tuple[Any, ...]:
    """A module's hooks before its forward, by number, and those of them that take keyword
    arguments; then the same of its forward hooks.
    """
    return tuple(map(module.__dict__.__getitem__, _HOOK_TABLES))


def set_hook_tables(module: nn.Module, tables: tuple[Any, ...]) -> None:
    """Replaces what :func:`hook_tables` returns."""
    module.__dict__.update(zip(_HOOK_TABLES, tables, strict=True))


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """A module's own buffers that are in its state dict. To make a state dict would call the user's
    hooks.
    """
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def copy_metadata(state_dict: Any, to: Any) -> None:
    """Gives a state dict the versions of modules that another one has, if it has them.
    ``nn.Module.state_dict`` sets them as an attribute, and torch has no function for it.
    """
    if hasattr(state_dict, "_metadata"):
        to._metadata = state_dict._metadata


FLAT_WEIGHTS: Final = frozenset({"_flat_weights", "_flat_weight_refs"})
"""The attributes in which a recurrent module keeps its parameters and weak references to them."""


def drop_weak_references(module: nn.RNNBase) -> None:
    """Makes a recurrent module forget its weak references to its parameters: a tensor that has some
    cannot be swapped.
    """
    module._flat_weight_refs = []


def renew_weak_references(module: nn.RNNBase) -> None:
    """Gives a copy of a recurrent module weak references to its own parameters."""
    module._flat_weight_refs = [None if x is None else ref(x) for x in module._flat_weights]


def make_weak_references(module: nn.RNNBase) -> None:
    """Makes what :func:`drop_weak_references` has dropped. ``flatten_parameters`` does not."""
    module._init_flat_weights()
