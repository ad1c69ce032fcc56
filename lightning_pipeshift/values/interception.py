"""Redirects functions of torch that do not call ``__torch_function__`` to the microbatch whose step
runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_pipeshift.compat.module_private import BackwardHook, backward_hooks_by
from lightning_pipeshift.compat.torch_private import apply_function, checkpointing_by
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import PLACED, SeenData, running


@contextmanager
def data_intercepted() -> Iterator[None]:
    """Context in which ``x.data = y`` with a value reaches the microbatch."""
    # Of the base class, unless another core of this process is in such a context.
    before = Tensor.__dict__.get("data")
    Tensor.data = SeenData()  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del Tensor.data
        else:
            Tensor.data = before


@contextmanager
def functions_intercepted() -> Iterator[None]:
    """Context in which users' autograd functions, ``torch.cond``, ``torch.utils.checkpoint`` and
    hooks on the backward of modules do.
    """
    # As it is in the class: bound to the class, it would call no subclass's forward.
    apply, condition = torch.autograd.Function.__dict__["apply"], torch.cond
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    torch.cond = _chosen
    try:
        with checkpointing_by(_recomputing), backward_hooks_by(_hook_backward):
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.cond = condition


_cond = torch.cond


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``autograd.Function.apply``: with values, one operation."""
    microbatch = running()
    recomputing = _recomputing() if cls is CheckpointFunction else None
    if recomputing is not None:
        function, _preserves, *rest = args
        with recomputing:
            return function(*rest)
    if microbatch is None or not any(type(x) in PLACED for x in args):
        return _Applied(cls)(*args, **kwargs)
    return microbatch.operation(_Applied(cls), args, kwargs)


def _chosen(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """``torch.cond``, which compiles its functions: between layers its predicate is read."""
    if running() is None:
        return _cond(pred, true_fn, false_fn, operands)
    return (true_fn if pred else false_fn)(*operands)


def _hook_backward(module: nn.Module, *hooks: Any) -> Any:
    """What is put around the call of a module for the hooks on its backward."""
    found, microbatch = BackwardHook(module, *hooks), running()
    if not isinstance(microbatch, Microbatch):
        return found
    number = microbatch.core.number.get(module)
    if number is None:
        raise LayerError(
            f"`{type(module).__name__}` has a hook on its backward, and several layers in it: their"
            " gradients are at several stages. Register the hook on its layers, or on a tensor"
            " between them (`x.register_hook`)."
        )
    return _LayerBackwardHook(microbatch, number, found)


class _LayerBackwardHook:
    """Replaces torch's ``BackwardHook`` in a call of a layer. The hooks on the layer's backward run
    at its owner. Torch connects them to the layer's inputs and to its output: here the first is a
    part of the layer's call, and the second is an operation behind the hooks on its forward.
    """

    def __init__(self, microbatch: Microbatch, number: int, hooks: BackwardHook) -> None:
        self._microbatch, self._number, self._hooks = microbatch, number, hooks

    def setup_input_hook(self, args: Any) -> Any:
        """Returns the arguments: the layer's call connects the hooks to them."""
        self._microbatch.core.backward_hooks[self._number] = self._hooks
        self._microbatch.graphs.keep_whole()
        return args

    def setup_output_hook(self, result: Any) -> Any:
        """Connects the hooks to the layer's result, which hooks on its forward may have replaced;
        returns the new result.
        """
        outputs = result if isinstance(result, tuple) else (result,)
        if not any(type(x) in PLACED for x in outputs):
            return self._hooks.setup_output_hook(result)
        owner = self._microbatch.core.owners(self._number, self._microbatch.turn)
        return self._microbatch.operate(_OutputHook(self._hooks), (result,), {}, owner)


class _OutputHook:
    """An operation that connects the hooks on a layer's backward to its result; equal for all
    layers.
    """

    __name__ = "register_full_backward_hook"

    def __init__(self, hooks: BackwardHook) -> None:
        # An equal one is kept for long.
        self._hooks = weakref.ref(hooks)

    def __call__(self, result: Any) -> Any:
        hooks = self._hooks()
        assert hooks is not None, "the module whose call ends has them"
        return hooks.setup_output_hook(result)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OutputHook)

    def __hash__(self) -> int:
        return hash(_OutputHook)


def _recomputing() -> AbstractContextManager[None] | None:
    """What ``torch.utils.checkpoint`` does where the user's step calls it: the layers in it are
    recomputed, each at its stage. ``None`` inside of a layer.
    """
    microbatch = running()
    return microbatch.recomputing() if isinstance(microbatch, Microbatch) else None


def _keep_undefined(result: Any) -> None:
    """Makes a function's backward give no gradients if it gets none. Torch does not call it then:
    but the gradient of a value that another stage uses comes even if it is not defined. The
    function would get zeros instead, and parameters before it a gradient.
    """
    outputs = result if isinstance(result, tuple) else (result,)
    nodes = [x.grad_fn for x in outputs if isinstance(x, Tensor)]
    own = [x for x in nodes if isinstance(x, torch.autograd.function.BackwardCFunction)]
    if not own:
        return
    is_defined = [True]

    def before(gradients: Any) -> None:
        is_defined[0] = any(x is not None for x in gradients)

    def after(gradients: Any, _: Any) -> Any:
        return None if is_defined[0] else (None,) * len(gradients)

    node: Any = own[0]
    node.register_prehook(before)
    node.register_hook(after)


class _Applied:
    """A user's autograd function as an operation; equal for equal classes."""

    def __init__(self, cls: Any) -> None:
        self._cls, self.__name__ = cls, f"{cls.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = apply_function.__get__(None, self._cls)(*args, **kwargs)
        _keep_undefined(result)
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Applied) and other._cls is self._cls

    def __hash__(self) -> int:
        return hash(self._cls)
