"""The gate of a layer: the only place where PipeShift touches a layer.

A gate replaces the layer's ``forward``, or its whole call (see :func:`replaces_call`). During a
pass, the pass handles the call; otherwise the layer behaves as without a gate.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pipeshift.compat.torch_private import (
    COMPILED_CALL,
    MAKES_WEIGHTS,
    forward_pre_hooks,
    has_backward_hooks,
    is_compiled,
    plain_call,
    without_torch_function,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.trees import leaves_of
from lightning_pipeshift.model.gates.side_outputs import SideOutputs


class StageDone(BaseException):
    """Ends a stage's part of a step: everything after this point belongs to later stages.

    Not an ``Exception``, so that error handlers in user code do not catch it.
    """


class Pass(Protocol):
    """One run of the user's step, as the gates see it."""

    def visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call of the gate's layer, and returns its result."""


class Weights(Protocol):
    """Weights that are on the device only while they are used."""

    def running(self, index: int) -> AbstractContextManager[Any]:
        """Context of a call of a layer."""

    def before_backward_of(self, index: int, results: Iterable[Any]) -> None:
        """Brings a layer's weights when a backward reaches its results."""

    def use(self, index: int) -> None:
        """Returns when a layer's weights are on the device."""


class CurrentPass:
    """The pass that is under way, if any: shared by the gates of one model."""

    def __init__(self) -> None:
        self.value: Pass | None = None


class Gate:
    """Handles the calls of one layer.

    Args:
        name: the layer's qualified name.
        layer: the module.
        index: the layer's position in the call order.
        current_pass: shared with the model's other gates.
    """

    def __init__(self, name: str, layer: nn.Module, index: int, current_pass: CurrentPass) -> None:
        self.name = name
        self.layer = layer
        self.index = index
        self.writes_to_buffers: bool | None = None
        """Whether the layer writes to its buffers when it runs; ``None`` until that is known."""
        self.keeps_inputs = False
        """Whether the layer's inputs were unchanged at the end of the last forward."""
        self.left_out: dict[Any, bool] = {}
        """Operations that a recomputation of the layer may leave out: whether that changes no
        bit."""
        self.makers_of_held: dict[frozenset[int], frozenset[Any]] = {}
        """By the numbers of saved tensors that are held while the layer drops others, the
        operations that computed them in its last call."""
        self._current_pass = current_pass
        self._installed: Callable[..., Any] | None = None
        self.reports: SideOutputs | None = None
        """The values that leave the layer other than by its return value, if any were found."""
        self._weights: Weights | None = None
        self._bringing: RemovableHandle | None = None
        self._slot = COMPILED_CALL if replaces_call(layer) else "forward"
        """The attribute that the gate replaces."""
        self.had_own = self._slot in layer.__dict__
        """Whether it is an attribute of the layer itself."""
        self.original: Callable[..., Any] = getattr(layer, self._slot) or plain_call(layer)
        """The layer's own ``forward``, or its whole call."""

    def install(self) -> None:
        """Installs the gate in the layer."""
        if hasattr(self.original, "__pipeshift__"):
            raise LayerError(
                f"The layer {self.name!r} already has a gate: an earlier run of the same model was"
                " not ended."
            )

        self._installed = _Forward(self)
        self.layer.__dict__[self._slot] = self._installed

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call of the layer, and returns its result."""
        current = self._current_pass.value
        if current is None:
            return self.run_plainly(*args, **kwargs)
        return current.visit(self, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer itself."""
        if self.reports is None:
            return self.run_plainly(*args, **kwargs)
        with self.reports.collecting():
            return self.run_plainly(*args, **kwargs)

    def run_plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer itself, without looking for side outputs."""
        if self.weights is None:
            return self.original(*args, **kwargs)
        with self.weights.running(self.index):
            output = self.original(*args, **kwargs)
        self.weights.before_backward_of(self.index, leaves_of(output))
        return output

    @property
    def weights(self) -> Weights | None:
        """Brings the layer's weights before they are used, if they are elsewhere in between."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights | None) -> None:
        self._weights = weights
        if self._bringing is not None:
            self._bringing.remove()
        self._bringing = None
        if weights is not None:
            # The layer's own hooks, which run before its forward, may read them or write to them.
            self._bringing = self.layer.register_forward_pre_hook(_Brings(self), prepend=True)

    def bring_weights(self) -> None:
        """Returns when the layer's weights are on the device."""
        if self.weights is not None:
            self.weights.use(self.index)

    def remove(self) -> None:
        """Restores the layer's own ``forward``."""
        if self._installed is None:
            return
        if self.had_own:
            self.layer.__dict__[self._slot] = self.original
        else:
            self.layer.__dict__.pop(self._slot, None)
        self._installed = None
        self.weights = None


def replaces_call(layer: nn.Module) -> bool:
    """Whether a layer's gate replaces the layer's whole call, with its hooks, and not only its
    ``forward``.

    What ``layer.compile()`` has compiled is the call; PipeShift is no part of it then. Hooks on the
    layer's backward need its inputs and results on the same stage. Those that compute its weights
    before it runs (old spectral norms, pruning) use parameters that only its stage has.
    """
    has_weights_made = any(isinstance(hook, MAKES_WEIGHTS) for hook in forward_pre_hooks(layer))
    return is_compiled(layer) or has_backward_hooks(layer) or has_weights_made


class _Brings:
    """Brings a layer's weights before its other hooks run. In a copy of the layer it does nothing.

    Args:
        gate: of the layer.
    """

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self._gate is not None:
            # Else the mode that follows code between layers would take part in setting `data`.
            with without_torch_function():
                self._gate.bring_weights()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Brings:
        return _Brings(None)


class _Forward:
    """Replaces a module's ``forward``. A copy of the module gets the original one."""

    def __init__(self, gate: Gate) -> None:
        self.__pipeshift__ = gate
        functools.update_wrapper(self, gate.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__pipeshift__.answer(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        gate = self.__pipeshift__
        if gate.had_own:
            return copy.deepcopy(gate.original, memo)
        copied = memo.get(id(gate.layer))
        return self if copied is None else MethodType(type(copied).forward, copied)

    @property
    def __code__(self) -> Any:
        return self.__pipeshift__.original.__code__


class Scope(Gate):
    """Handles the calls of a module that is no layer, but has its own random stream: a part of a
    layer, or a module that contains layers.
    """

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call of the module, and returns its result."""
        current: Any = self._current_pass.value
        # A compiler that traces what the module calls cannot trace a change of random streams: the
        # module draws from the one that is in force. (`torch.cond` compiles its functions.)
        if current is None or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        current.enter_scope()
        output = self.original(*args, **kwargs)
        current.leave_scope()
        return output


def install(gates: Iterable[Gate]) -> None:
    """Installs all gates."""
    for gate in gates:
        gate.install()


def remove(gates: Iterable[Gate]) -> None:
    """Removes all gates."""
    for gate in gates:
        gate.remove()
