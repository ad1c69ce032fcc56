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
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import has_step_hooks
from lightning_pipeshift.errors import BudgetError, ConfigurationError
from lightning_pipeshift.runtime.offload.copying import BufferPool, Copier, Ticket, nothing
from lightning_pipeshift.runtime.offload.host_copies import HostCopies, Traffic, is_dense
from lightning_pipeshift.runtime.offload.waiting_weights import Arrival, WaitingWeights
from lightning_pipeshift.text import ceil_bytes_text

_AHEAD: Final = 2
"""How many layers' state may be prefetched ahead of the layer that is being updated."""

Layers = Mapping[int, Sequence[nn.Parameter]]
"""The parameters of layers, by the layers' numbers."""


@dataclass(frozen=True)
class _Copying:
    """The state of a layer, and its weights, that are being copied.

    Args:
        layer: the layer.
        parts: its tensors, each with its new memory.
        ticket: the copy in progress, if it has any.
        weights: those of its weights, if they move.
        promised_bytes: memory reserved for state that it does not have yet.
    """

    layer: int
    parts: Sequence[tuple[Tensor, Tensor]]
    ticket: Ticket | None = None
    weights: Arrival | None = None
    promised_bytes: int = 0

    def finish(self) -> int:
        """Waits for the copies, and gives the tensors their new memory; returns the state's
        bytes.
        """
        if self.ticket is not None:
            self.ticket.wait()
        for tensor, memory in self.parts:
            tensor.data = memory
        if self.weights is not None:
            self.weights.finish()
        return sum(memory.nbytes for _, memory in self.parts)

    def is_done(self) -> bool:
        """Whether the copies are complete."""
        copies = (self.ticket, self.weights)
        return all(copy is None or copy.is_done() for copy in copies)


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
        self._steps: list[tuple[Optimizer, Callable[..., Any], Any]] = []
        self._leaving: deque[_Copying] = deque()
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
        stays = own.keys() - self._moved
        away = {id(p) for layer in self._moved for p in self._layers[layer]}
        self._bring_back(p for layer in stays for p in own[layer] if id(p) not in away)
        for optimizer in self._optimizers:
            self._evict_all(optimizer)

    def _bring_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Brings state back to the device for good."""
        for parameter in parameters:
            for optimizer in self._optimizers:
                for tensor in _state_of(optimizer, [parameter]):
                    if self.homes.has(tensor):
                        tensor.data = tensor.data.to(self._device, copy=True)
                        self.homes.forget(tensor)

    def close(self) -> None:
        """Called at the end of the run; what is in host memory remains there."""
        for optimizer, mine, earlier in self._steps:
            # A scheduler may have wrapped it since; without layers it does nothing of its own.
            if vars(optimizer).get("step") is mine:
                if earlier is None:
                    del optimizer.step
                else:
                    optimizer.step = earlier  # type: ignore[method-assign]
        self._steps = []
        self._layers = {}

    # --- the optimizer ---

    def take_steps_of(self, optimizer: Optimizer) -> None:
        """Makes an optimizer's steps those of :meth:`step`, before the first one: the plan may be
        made inside of it. Schedulers replace the method likewise, before or after.
        """
        plain = optimizer.step
        earlier = vars(optimizer).get("step")

        @wraps(getattr(plain, "__func__", plain))
        def step(it: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self.step(it, plain, *args, **kwargs)

        mine = MethodType(step, optimizer)
        optimizer.step = mine  # type: ignore[method-assign]
        self._steps.append((optimizer, mine, earlier))

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
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        layers = self._with_gradients(everything)
        moved = {id(p) for layer in layers for p in self._layers[layer]}
        try:
            waiting, coming = deque(layers), deque[_Copying]()
            self._prefetch(optimizer, waiting, coming)
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = [p for p in parameters if id(p) not in moved]
            plain(**kwargs)
            while coming:
                arrived = coming.popleft()
                arrived.finish()
                layer, promised_bytes = arrived.layer, arrived.promised_bytes
                # Otherwise it would keep the state's memory when that has left.
                del arrived
                own = set(map(id, self._layers[layer]))
                for group, parameters in zip(groups, everything, strict=True):
                    group["params"] = [p for p in parameters if id(p) in own]
                before = self._device_bytes(optimizer, layer)
                plain(**kwargs)
                self._promised_bytes -= promised_bytes
                # The first step makes the state.
                self.traffic.count(self._device_bytes(optimizer, layer) - before)
                self._evict(optimizer, layer)
                self._prefetch(optimizer, waiting, coming)
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
            self._finish_leaving()
            self._weights.leave_all()
            # What an error has left there is counted when it is evicted.
            self.traffic.device_bytes = self._promised_bytes = 0
        return result

    def _with_gradients(self, groups: Sequence[Sequence[Tensor]]) -> list[int]:
        """The layers with gradients of parameters in these groups, in their order."""
        present = {id(p) for group in groups for p in group if p.grad is not None}
        return [
            layer
            for layer, parameters in self._layers.items()
            if any(id(p) in present for p in parameters)
        ]

    # --- there and back ---

    def _prefetch(self, optimizer: Optimizer, waiting: deque[int], coming: deque[_Copying]) -> None:
        """Starts to fetch the next layers' state: of the next one in any case, of those behind it
        as far as there is room.
        """
        while waiting and len(coming) <= _AHEAD:
            tensors = self._state_of(optimizer, waiting[0])
            size = sum(tensor.nbytes for tensor in tensors)
            is_new = not size and waiting[0] in self._moved
            promised = self._expected.get(waiting[0], 0) if is_new else 0
            needed = (size or promised) + self._weights.bytes_of(waiting[0])
            if not self._has_room(needed, waiting[0], is_needed=not coming):
                return
            self._promised_bytes += promised
            weights = self._weights.begin_update(waiting[0], self.traffic)
            parts = []
            for tensor in tensors:
                if self.homes.has(tensor):
                    memory = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                    )
                    self.traffic.count(memory.nbytes)
                    parts.append((tensor, memory))
            ticket = self._copier.back(_copies(parts), nothing) if parts else None
            coming.append(_Copying(waiting.popleft(), parts, ticket, weights, promised))

    def _has_room(self, num_bytes: int, layer: int, is_needed: bool) -> bool:
        """Whether so many bytes of a layer's state may come to the device now. If they are needed
        now, waits until they may.
        """
        while self.traffic.device_bytes + self._promised_bytes + num_bytes > self._room():
            if not self._leaving:
                if not is_needed:
                    return False
                break
            if not is_needed and not self._leaving[0].is_done():
                return False
            self._finish_first()
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
        parts = []
        for tensor in self._state_of(optimizer, layer):
            if not self.homes.has(tensor):
                values = self.homes.memory_of(tensor)
                parts.append((tensor, values))
                self.traffic.moved_bytes += values.nbytes
        ticket = self._copier.out(_copies(parts), nothing) if parts else None
        weights = self._weights.end_update(layer)
        if parts or weights is not None:
            self._leaving.append(_Copying(layer, parts, ticket, weights))
        while len(self._leaving) > _AHEAD:
            self._finish_first()

    def _evict_all(self, optimizer: Optimizer) -> None:
        """Copies state to the host that has come in another way: that was loaded, or arrived with
        its layer.
        """
        for layer in self._layers:
            num_bytes = self._device_bytes(optimizer, layer)
            if num_bytes:
                self.traffic.count(num_bytes)
                self._evict(optimizer, layer)
        self._finish_leaving()

    def _finish_first(self) -> None:
        self.traffic.count(-self._leaving.popleft().finish())

    def _finish_leaving(self) -> None:
        """Returns when all state has been copied to the host."""
        if self._leaving:
            while self._leaving:
                self._finish_first()
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


def _copies(parts: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Copies tensors to their new memory, in one task: a thread wakes up once for a layer."""
    pairs = [(tensor.data, memory) for tensor, memory in parts]

    def work() -> None:
        for values, memory in pairs:
            memory.copy_(values, non_blocking=True)

    return work
