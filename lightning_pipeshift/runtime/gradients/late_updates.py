"""Optimizer steps of some of a stage's layers, made when what they wait for is there.

One waits for the sum of its gradient: the next step's forwards begin while gradients of later
layers are still on their way (Tsinghua's "method and system for accelerating distributed machine
learning"; Geryon, INFOCOM 2020). A layer is updated before its own next forward, or earlier, with
another layer, if its sum is complete then. In an asynchronous pipeline, one waits for the layer's
last weights, which another stage sends.

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
from collections.abc import Callable, Iterable, Sequence
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
from lightning_pipeshift.model.parameters.gradients import Gradients, take_gradients
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


MakeUpdate = Callable[[Any, Gradients, bool], None]
"""Makes an update, given its tag and the gradients of its parameters; the flag says whether these
remain afterwards."""


@dataclass(eq=False)
class _Late:
    """Parameters whose update waits.

    Args:
        parameters: those that are updated.
        is_due: whether the update can be made without waiting.
        take: waits for the gradients, and takes them from the parameters.
        layer: the number of the layer whose gradient is being summed; ``None``: the update waits
            for weights from another stage.
        tag: given by the caller, and passed to what makes the update.
    """

    parameters: Sequence[nn.Parameter]
    is_due: Callable[[], bool]
    take: Callable[[], Gradients]
    layer: int | None = None
    tag: Any = None


class LateUpdates:
    """The updates of one stage that are later than the stage's own: of layers whose gradients are
    still being summed, and of those whose last weights have not come from another stage.
    """

    def __init__(self) -> None:
        self._waiting: list[_Late] = []
        """The oldest first, and the layers of one update in call order."""
        self.make: MakeUpdate | None = None
        """Makes an update."""
        self._is_in_step = False
        self._is_busy = False
        """Whether updates are being made, or one has failed."""
        self._late_of: dict[int, _Late] = {}
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
        """Whether any parameters are still to be updated."""
        return bool(self._waiting)

    @property
    def layers(self) -> list[int]:
        """The layers that are updated when their sums are complete."""
        return [late.layer for late in self._waiting if late.layer is not None]

    # --- what waits ---

    def take(
        self, aggregation: Aggregation, groups: Iterable[GradientGroup], correction: float
    ) -> None:
        """Takes the layers that the coming optimizer step is to leave out.

        Args:
            aggregation: sums their gradients.
            groups: one for each layer, in call order.
            correction: a factor for the sums, not 0.
        """
        assert not self._waiting

        def late(group: GradientGroup) -> _Late:
            def take() -> Gradients:
                aggregation.finish_late(group)
                found = take_gradients(group.parameters)
                for _, gradient in found if correction != 1.0 else ():
                    gradient.mul_(correction)
                return found

            return _Late(group.parameters, lambda: group.is_complete, take, group.number)

        self._waiting = list(map(late, groups))

    def withhold(
        self, parameters: Sequence[nn.Parameter], is_due: Callable[[], bool], tag: Any
    ) -> None:
        """Lets an update of some parameters wait, and takes their gradients.

        Args:
            parameters: those with a gradient are to be updated.
            is_due: whether it can be made.
            tag: is given back with the update.
        """
        if gradients := take_gradients(parameters):
            self._waiting.append(_Late(parameters, is_due, lambda: gradients, tag=tag))

    # --- a step, in the order of the calls ---

    def begin(self, optimizer: Optimizer, tag: Any) -> None:
        """Called when the optimizer has stepped, and has left out some layers.

        Args:
            optimizer: the optimizer.
            tag: is given back with the updates.
        """
        self._is_in_step = False
        is_first, self._is_first = self._is_first, False
        self._late_of, num_without_state = {}, 0
        for late in self._waiting:
            late.tag = tag
            for parameter in late.parameters:
                entry = optimizer.state.get(parameter) or {}
                num_without_state += not entry
                for tensor in (parameter, *entry.values()):
                    if isinstance(tensor, Tensor):
                        self._late_of[_memory(tensor)] = late
        self._late_of.pop(_NONE, None)
        # An update that makes state is made at once: what is not there cannot be watched. (Without
        # any state, the optimizer keeps none.)
        if num_without_state and (is_first or any(optimizer.state.values())):
            self.finish()
            return
        self._guard.enter()
        if self.await_before is not None:
            for layer in self.layers:
                self.await_before(layer, self.before_layer)

    def begin_step(self) -> None:
        """Ends the watch of parameters: in a step, the uses of layers are known."""
        self._is_in_step = True
        self._guard.leave()

    def make_due(self) -> None:
        """Makes the updates that need not wait any more."""
        self._make([late for late in self._waiting if late.is_due()])

    def before_layer(self, number: int) -> None:
        """Updates a layer before it is used, and others whose sums are complete."""
        if number in self.layers:
            self._make([late for late in self._waiting if late.layer == number or late.is_due()])

    # --- whenever the values are needed ---

    def finish(self) -> None:
        """Makes all updates that wait for sums; none if one has failed."""
        if not self._is_busy:
            self._make([late for late in self._waiting if late.layer is not None])
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
            late = self._late_of.get(_memory(values))
            if late is not None and late in self._waiting and not self._is_busy:
                self._make([late])
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

    def _make(self, due: Sequence[_Late]) -> None:
        if not due:
            return
        assert self.make is not None
        # After an error it remains so, and they still wait: the model is in no step's state.
        self._is_busy = True
        # Sums that wait are all of one update; what waits for weights may be of several.
        summed = [late for late in due if late.layer is not None]
        for together in (summed, *([late] for late in due if late.layer is None)):
            if gradients := [each for late in together for each in late.take()]:
                self.make(together[0].tag, gradients, not self._is_in_step)
        self._waiting = [late for late in self._waiting if late not in due]
        self._is_busy = False
        self.num_made += len(due)


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
