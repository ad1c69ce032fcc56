"""Optimizer steps of single layers, each made when the layer's own gradient is summed.

The next step's forwards begin while gradients of later layers are still on their way (Tsinghua's
"method and system for accelerating distributed machine learning"; Geryon, INFOCOM 2020): a layer is
updated before its own next forward, or earlier, with another layer, if its sum is complete then.

Whatever reads or writes a parameter, or the optimizer's state of one, in between finds it updated:
until then a
:class:`torch.overrides.TorchFunctionMode` sees every call of torch's functions, and of a tensor's
methods and attributes, in this thread, and makes the update first. So hooks and callbacks need no
list of those that may look at weights. Not seen is what does not go through torch: other threads,
and NumPy arrays that share a parameter's memory. Before the process forks, all updates are made.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_pipeshift.compat.torch_private import (
    current_function_mode,
    storage_key_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation, GradientGroup

_NONE = -1
# What tells nothing of a tensor's values.
_HARMLESS: frozenset[Any] = frozenset(
    {Tensor.dim, Tensor.element_size, Tensor.is_floating_point, Tensor.numel, Tensor.size}
    | {
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape")
    }
)


@dataclass(frozen=True)
class LateUpdate:
    """An update of some parameters that follows the stage's own.

    Args:
        tag: what the caller has said of the update's last batch.
        gradients: of the parameters.
    """

    tag: Any
    gradients: list[tuple[nn.Parameter, Tensor]]


MakeUpdate = Callable[[LateUpdate, bool], None]
"""Makes an update; the flag says whether the gradients remain afterwards."""


class LateUpdates:
    """The updates of one stage's layers whose gradients are still being summed."""

    def __init__(self) -> None:
        self._aggregation: Aggregation | None = None
        self._correction = 1.0
        self._groups: dict[int, GradientGroup] = {}
        """By layer, in call order."""
        self._tag: Any = None
        self._make: MakeUpdate | None = None
        self._is_in_step = False
        self._is_busy = False
        """Whether updates are being made, or one has failed."""
        self._layer_of: dict[int, int] = {}
        """By the memory of a parameter that is still to be updated, and of its optimizer state."""
        self._guard = _Guard(self)
        self._thread = threading.get_ident()
        self._is_first = True
        """Whether the optimizer has not stepped yet in this run."""
        self.await_before: Callable[[int, Callable[[int], object]], object] | None = None
        """Makes a layer's next use wait: see :meth:`Core.await_before`."""
        _made.add(self)
        self.num_made = 0
        """How many layers have been updated late, in the run."""

    @property
    def is_pending(self) -> bool:
        """Whether any layer is still to be updated."""
        return bool(self._groups)

    # --- a step, in the order of the calls ---

    def take(
        self, aggregation: Aggregation, groups: Iterable[GradientGroup], correction: float
    ) -> None:
        """Takes the layers that the coming optimizer step is to leave out.

        Args:
            aggregation: sums their gradients.
            groups: one for each layer.
            correction: a factor for the sums, not 0.
        """
        assert not self._groups
        self._aggregation, self._correction, self._make = aggregation, correction, None
        self._groups = {group.number: group for group in groups}

    def begin(self, optimizer: Optimizer, tag: Any, make: MakeUpdate) -> None:
        """Called when the optimizer has stepped.

        Args:
            optimizer: the optimizer.
            tag: is given back with the updates.
            make: makes one.
        """
        self._is_in_step = False
        is_first, self._is_first = self._is_first, False
        if not self._groups:
            return
        self._tag, self._make = tag, make
        self._layer_of, num_without_state = {}, 0
        for layer, group in self._groups.items():
            for parameter in group.parameters:
                entry = optimizer.state.get(parameter) or {}
                num_without_state += not entry
                for tensor in (parameter, *entry.values()):
                    if isinstance(tensor, Tensor):
                        self._layer_of[_memory(tensor)] = layer
        self._layer_of.pop(_NONE, None)
        # An update that makes state is made at once: what is not there cannot be watched. (Without
        # any state, the optimizer keeps none.)
        if num_without_state and (is_first or any(optimizer.state.values())):
            self.finish()
        elif self._groups:
            self._guard.enter()
            if self.await_before is not None:
                for layer in self._groups:
                    self.await_before(layer, self.before_layer)

    def begin_step(self) -> None:
        """Ends the watch of parameters: in a step, the uses of layers are known."""
        self._is_in_step = True
        self._guard.leave()

    def finish_complete(self) -> None:
        """Makes the updates whose sums are complete."""
        self._finish([layer for layer, group in self._groups.items() if group.is_complete])

    def before_layer(self, number: int) -> None:
        """Updates a layer before it is used, and others whose sums are complete."""
        if number in self._groups:
            others = [
                layer
                for layer, group in self._groups.items()
                if layer != number and group.is_complete
            ]
            self._finish([number, *others])

    # --- whenever the values are needed ---

    def finish(self) -> None:
        """Makes all updates that are still to be made; none if one has failed."""
        if not self._is_busy:
            self._finish(list(self._groups))
        self._guard.leave()

    def before_fork(self) -> None:
        """Makes all updates before the process forks: the threads that sum gradients are not in the
        child, which would see some layers without their updates.
        """
        if self._thread == threading.get_ident():
            self.finish()

    def before_use(self, values: Any) -> None:
        """Makes the updates of parameters whose memory is that of any tensor in nested tuples,
        lists and dicts.
        """
        if isinstance(values, Tensor):
            layer = self._layer_of.get(_memory(values), _NONE)
            if layer in self._groups and not self._is_busy:
                self._finish([layer])
        elif isinstance(values, (tuple, list)):
            for value in values:
                self.before_use(value)
        elif isinstance(values, dict):
            for value in values.values():
                self.before_use(value)

    def abandon(self) -> None:
        """Called after a failure. Updates that are still to be made remain so: the model is in no
        step's state.
        """
        self._is_busy = True
        self._guard.leave()

    def _finish(self, layers: Collection[int]) -> None:
        if not layers:
            return
        assert self._aggregation is not None
        assert self._make is not None
        # After an error it remains so, and so do the groups: the model is in no step's state.
        self._is_busy = True
        gradients = []
        for layer in layers:
            group = self._groups[layer]
            self._aggregation.finish_late(group)
            for parameter in group.parameters:
                gradient = parameter.grad
                if gradient is not None:
                    if self._correction != 1.0:
                        gradient.mul_(self._correction)
                    gradients.append((parameter, gradient))
                    parameter.grad = None
        if gradients:
            self._make(LateUpdate(self._tag, gradients), not self._is_in_step)
        for layer in layers:
            del self._groups[layer]
        self._is_busy = False
        self.num_made += len(layers)


class _Guard(TorchFunctionMode):
    """Makes updates before their parameters are used.

    Args:
        updates: the updates.
    """

    def __init__(self, updates: LateUpdates) -> None:
        super().__init__()
        self._updates = updates
        self._is_entered = False
        self._watches = False

    def enter(self) -> None:
        """Begins to watch."""
        self._watches = True
        if not self._is_entered:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True

    def leave(self) -> None:
        """Ends the watch. If user code has entered a mode of its own since it began, this one stays
        below that until the next call, and does nothing.
        """
        self._watches = False
        if self._is_entered and current_function_mode() is self:
            self._is_entered = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in place of a function of torch."""
        if self._watches and self._updates.is_pending and function not in _HARMLESS:
            # In hooks parameters are values.
            with without_torch_function_of_subclasses():
                self._updates.before_use((args, kwargs))
        return function(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    try:
        return storage_key_of(tensor)
    except (RuntimeError, NotImplementedError):
        # It has none: a sparse tensor, or one that a library computes on demand.
        return _NONE


_made: weakref.WeakSet[LateUpdates] = weakref.WeakSet()


def _before_fork() -> None:
    for updates in list(_made):
        updates.before_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
