"""A layer with its name and its number: what is placed, measured and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pipeshift.compat.module_private import (
    COMPILED_CALL,
    MAKES_WEIGHTS,
    forward_pre_hooks,
    has_backward_hooks,
    is_compiled,
    plain_call,
)
from lightning_pipeshift.compat.torch_private import without_torch_function
from lightning_pipeshift.model.tensors.trees import leaves_of


class Weights(Protocol):
    """Weights that are on the device only while they are used."""

    def running(self, index: int) -> AbstractContextManager[Any]:
        """Context of a call of a layer."""

    def before_backward_of(self, index: int, results: Iterable[Any]) -> None:
        """Brings a layer's weights when a backward reaches its results."""

    def use(self, index: int) -> None:
        """Returns when a layer's weights are on the device."""


class NamedLayer:
    """One layer, and what is known of its calls.

    Args:
        name: the layer's qualified name.
        layer: the module.
        index: the layer's position in the call order.
    """

    def __init__(self, name: str, layer: nn.Module, index: int) -> None:
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
        self._weights: Weights | None = None
        self._bringing: RemovableHandle | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer by itself, to measure it: without hooks on its call, unless these decide
        what runs.
        """
        slot = COMPILED_CALL if _runs_by_call(self.layer) else "forward"
        return self.run_by(getattr(self.layer, slot) or plain_call(self.layer), *args, **kwargs)

    def run_by(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with its weights; ``forward`` calls it."""
        if self.weights is None:
            return forward(*args, **kwargs)
        with self.weights.running(self.index):
            output = forward(*args, **kwargs)
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


def _runs_by_call(layer: nn.Module) -> bool:
    """Whether a layer has to be run by its whole call, with its hooks.

    What ``layer.compile()`` has compiled is the call. Hooks on the layer's backward need its inputs
    and results. Those that compute its weights before it runs (old spectral norms, pruning) use
    parameters.
    """
    has_weights_made = any(isinstance(hook, MAKES_WEIGHTS) for hook in forward_pre_hooks(layer))
    return is_compiled(layer) or has_backward_hooks(layer) or has_weights_made


class _Brings:
    """Brings a layer's weights before its other hooks run. In a copy of the layer it does nothing.

    Args:
        of: the layer.
    """

    def __init__(self, of: NamedLayer | None) -> None:
        self._of = of

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self._of is not None:
            # Else a mode of torch's functions would take part in setting `data`.
            with without_torch_function():
                self._of.bring_weights()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Brings:
        return _Brings(None)
