"""Optimizer state in host memory: the state of a layer is on the device only while its layer is
updated.

CN114880130B moves "every tensor related to a layer" while it is not used; optimizer state is not
used between two steps of the optimizer. Such a step becomes one of the user's own optimizer for
each layer: a layer's state is prefetched while layers before it are updated, and evicted while
layers after it are.

A state tensor remains the same object, and always has its true values: only its memory changes,
between the device's and the host's. So whoever reads ``optimizer.state`` between two steps, or
saves it, needs to know nothing of this. Weights that wait in host memory (``waiting_weights.py``)
come and go with the state of their layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import has_step_hooks
from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.errors import BudgetError, ConfigurationError
from lightning_pipeshift.runtime.offload.copying import Copier
from lightning_pipeshift.runtime.offload.host_copies import Copies, HostCopies, Traffic, is_dense
from lightning_pipeshift.runtime.offload.waiting_weights import WaitingWeights
from lightning_pipeshift.text import ceil_bytes_text

_AHEAD: Final = 2
"""How many layers' state may be prefetched ahead of the layer that is being updated."""

Layers = Mapping[int, Sequence[nn.Parameter]]
"""The parameters of layers, by the layers' numbers."""


class OptimizerStates:
    """The optimizer state of one stage's layers that is in host memory between two steps.

    Args:
        host: the host's memory for it.
        copier: makes the copies.
        device: the stage's.
        room: returns the bytes of the device's memory that these layers may take now.
        weights: those of the weights that wait in host memory.
    """

    def __init__(
        self,
        host: BufferPool,
        copier: Copier,
        device: torch.device,
        room: Callable[[], float],
        weights: WaitingWeights | None = None,
    ) -> None:
        self.traffic = Traffic()
        self.homes = HostCopies(host, "the optimizer's state")
        """The host's memory for the state."""
        self._weights = weights or WaitingWeights(host, copier)
        self._copier = copier
        self._device = device
        self._room = room
        self._layers: dict[int, list[nn.Parameter]] = {}
        """Those that are updated one after the other: their state moves, or their weights do."""
        self._moved: Collection[int] = ()
        self._expected: Mapping[int, int] = {}
        self._names: Sequence[str] = ()
        self._optimizers: list[Optimizer] = []
        self._undo_steps: list[Callable[[], None]] = []
        self._leaving: deque[list[Copies]] = deque()
        # The layers to come, each with its copies and the bytes of state that its update makes.
        self._coming: deque[tuple[int, list[Copies], int]] = deque()
        # Bytes of the coming layers' state that their update is going to make.
        self._promised_bytes = 0

    # --- the plan ---

    def follow(
        self,
        optimizers: Iterable[Optimizer],
        own: Layers,
        moved: Collection[int],
        expected_bytes: Mapping[int, int],
        names: Sequence[str] = (),
    ) -> None:
        """Applies a plan from now on, after :meth:`WaitingWeights.follow`.

        Args:
            optimizers: those of the run.
            own: the stage's layers.
            moved: those whose state is in host memory between two steps.
            expected_bytes: of each layer's state, as it has none before the first step.
            names: of the layers.

        Raises:
            BudgetError: the host has too little memory.
        """
        self._optimizers = list(optimizers)
        self._expected, self._names = expected_bytes, names
        seen: set[int] = set()
        self._layers = {}
        self._moved = frozenset(moved)
        for layer in sorted({*moved, *self._weights.layers}):
            # A parameter that several layers use is updated with the first of them.
            new = [p for p in own[layer] if id(p) not in seen]
            seen.update(map(id, new))
            self._layers[layer] = new
        away = {id(p) for layer in self._moved for p in self._layers[layer]}
        stays = [p for layer in own.values() for p in layer if id(p) not in away]
        for optimizer in self._optimizers:
            for tensor in _state_of(optimizer, stays):
                if self.homes.has(tensor):
                    tensor.data = tensor.data.to(self._device, copy=True)
                    self.homes.forget(tensor)
            self._evict_all(optimizer)

    def close(self) -> None:
        """Called at the end of the run; what is in host memory remains there."""
        for undo in self._undo_steps:
            undo()
        self._undo_steps.clear()
        self._layers = {}

    # --- the optimizer ---

    def take_steps_of(self, optimizer: Optimizer) -> None:
        """Makes an optimizer's steps those of :meth:`step`, before the first one: the plan may be
        made inside of it. Schedulers replace the method likewise, before or after.
        """
        plain, own = optimizer.step, vars(optimizer)
        earlier = {name: value for name, value in own.items() if name == "step"}

        @wraps(getattr(plain, "__func__", plain))
        def step(it: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self.step(it, plain, *args, **kwargs)

        own["step"] = mine = MethodType(step, optimizer)

        def undo() -> None:
            # A scheduler may have wrapped it since; without layers it does nothing of its own.
            if own.get("step") is mine:
                del own["step"]
                own.update(earlier)

        self._undo_steps.append(undo)

    def step(
        self, optimizer: Optimizer, plain: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        """Makes a step of an optimizer, one layer after the other.

        Args:
            optimizer: the optimizer.
            plain: its own step.
            closure: is called first, if there is one.
            kwargs: further arguments of its step.

        Returns:
            the closure's result.

        Raises:
            ConfigurationError: hooks are to be called before or after each step.
            BudgetError: a layer's state does not fit.
        """
        if not self._layers and has_step_hooks(optimizer):
            return plain(closure, **kwargs)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._layers:
            plain(**kwargs)
            return result
        if has_step_hooks(optimizer):
            raise ConfigurationError(
                "A hook was registered for the optimizer's steps after the training had begun, but"
                " under this plan of `MemoryCompression` the optimizer steps once for each layer."
                " Register the hook before `fit`: then the optimizer's state stays on the device."
            )
        self._evict_all(optimizer)
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        present = {id(p) for _, parameters in groups for p in parameters if p.grad is not None}
        waiting = deque(
            layer for layer, own in self._layers.items() if any(id(p) in present for p in own)
        )
        moved = {id(p) for layer in waiting for p in self._layers[layer]}
        try:
            self._prefetch(optimizer, waiting)
            for group, parameters in groups:
                group["params"] = [p for p in parameters if id(p) not in moved]
            plain(**kwargs)
            while self._coming:
                layer, copies, promised_bytes = self._coming.popleft()
                for each in copies:
                    each.finish()
                now = set(map(id, self._layers[layer]))
                for group, parameters in groups:
                    group["params"] = [p for p in parameters if id(p) in now]
                before = self._device_bytes(optimizer, layer)
                plain(**kwargs)
                self._promised_bytes -= promised_bytes
                # The first step makes the state.
                self.traffic.count(self._device_bytes(optimizer, layer) - before)
                self._evict(optimizer, layer)
                self._prefetch(optimizer, waiting)
        finally:
            for group, parameters in groups:
                group["params"] = parameters
            self._coming.clear()
            self._finish_leaving()
            self._weights.leave_all()
            # What an error has left there is counted when it is evicted.
            self.traffic.device_bytes = self._promised_bytes = 0
        return result

    # --- there and back ---

    def _prefetch(self, optimizer: Optimizer, waiting: deque[int]) -> None:
        """Starts to fetch the next layers' state: of the next one in any case, of those behind it
        as far as there is room.
        """
        while waiting and len(self._coming) <= _AHEAD:
            layer = waiting[0]
            tensors = self._state_of(optimizer, layer)
            size = sum(tensor.nbytes for tensor in tensors)
            is_new = not size and layer in self._moved
            promised = self._expected.get(layer, 0) if is_new else 0
            needed = (size or promised) + self._weights.bytes_of(layer)
            if not self._has_room(needed, layer, is_needed=not self._coming):
                return
            self._promised_bytes += promised
            copies = self._weights.begin_update(layer, self.traffic)
            parts = []
            for tensor in tensors:
                if self.homes.has(tensor):
                    memory = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                    )
                    self.traffic.count(memory.nbytes)
                    parts.append(_moved(tensor, memory))
            if parts:
                copies.append(Copies(self._copier.back, parts))
            self._coming.append((waiting.popleft(), copies, promised))

    def _has_room(self, num_bytes: int, layer: int, is_needed: bool) -> bool:
        """Whether so many bytes of a layer's state may come to the device now. If they are needed
        now, waits until they may.
        """
        while self.traffic.device_bytes + self._promised_bytes + num_bytes > self._room():
            if not self._leaving:
                if not is_needed:
                    return False
                break
            if not is_needed and not all(copies.is_done() for copies in self._leaving[0]):
                return False
            self._leave_but(len(self._leaving) - 1)
        if is_needed and num_bytes > self._room():
            name = self._names[layer] if layer < len(self._names) else str(layer)
            has, needs = map(ceil_bytes_text, (max(0.0, self._room()), num_bytes))
            raise BudgetError(
                f"The optimizer's state of layer {name!r}, and its weights if they move, have"
                f" {needs}, and the memory budget leaves {has} for them. A budget that is that much"
                " larger would do; so would more stages, or smaller layers (`configure_layers`)."
            )
        return True

    def _evict(self, optimizer: Optimizer, layer: int) -> None:
        """Starts to copy a layer's state to the host."""
        tensors = [one for one in self._state_of(optimizer, layer) if not self.homes.has(one)]
        copies = self._weights.end_update(layer)
        if tensors:
            size = sum(tensor.nbytes for tensor in tensors)
            parts = [_moved(tensor, self.homes.memory_of(tensor)) for tensor in tensors]
            copies.append(Copies(self._copier.out, parts, partial(self.traffic.count, -size)))
            self.traffic.moved_bytes += size
        if copies:
            self._leaving.append(copies)
        self._leave_but(_AHEAD)

    def _evict_all(self, optimizer: Optimizer) -> None:
        """Copies state to the host that has come in another way: that was loaded, or arrived with
        its layer.
        """
        self.homes.settle()
        for layer in self._layers:
            self.traffic.count(self._device_bytes(optimizer, layer))
            self._evict(optimizer, layer)
        self._finish_leaving()

    def _leave_but(self, num_layers: int) -> None:
        """Waits until the state of no more layers than that is being copied to the host."""
        while len(self._leaving) > num_layers:
            for copies in self._leaving.popleft():
                copies.finish()

    def _finish_leaving(self) -> None:
        """Returns when all state has been copied to the host."""
        if self._leaving:
            self._leave_but(0)
            # The host itself reads it from now on.
            self._copier.finish()

    def _device_bytes(self, optimizer: Optimizer, layer: int) -> int:
        state = self._state_of(optimizer, layer)
        return sum(tensor.nbytes for tensor in state if not self.homes.has(tensor))

    def _state_of(self, optimizer: Optimizer, layer: int) -> list[Tensor]:
        """The tensors of a layer's state, if it moves."""
        return list(_state_of(optimizer, self._layers[layer])) if layer in self._moved else []


def _state_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors of some parameters' state that may move: no counters, and no views."""
    for parameter in parameters:
        entry = optimizer.state.get(parameter)
        for value in entry.values() if isinstance(entry, dict) else ():
            if type(value) is Tensor and value.numel() > 1 and is_dense(value):
                yield value


def _moved(tensor: Tensor, memory: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """A tensor's part of :class:`Copies` to other memory."""
    copy = partial(memory.copy_, tensor.data, non_blocking=True)
    return copy, partial(setattr, tensor, "data", memory)
