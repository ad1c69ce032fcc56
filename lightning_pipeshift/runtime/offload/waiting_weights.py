"""Weights in host memory: those of a layer are on the device only around its forward, its backward
and its update.

A parameter remains the same object, and always has its true values: while its layer waits, its
``data`` is the host's memory. So whoever reads or writes it between two steps, or saves it, needs
to know nothing of this, in whatever thread. Its memory on the device remains the same storage,
which is resized to nothing and back (as in FSDP), so what autograd has saved of it remains valid: a
saved parameter, or a view of one, has its values again before the backward reads them.

Weights change in the update only, so a layer that leaves after its forward or backward is not
copied: its memory is freed. That is checked. A write that raises the version counter is copied to
the host; one that does not (through ``data``) is found by comparison in the first steps, and now
and then later, and is an error. In between, a CPU compares a part of each weight.

CN114880130B moves "every tensor related to a layer" while it is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

from torch import nn

from lightning_pipeshift.compat.torch_private import num_other_uses
from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.gradients import call_before_backward
from lightning_pipeshift.runtime.offload.copying import Copier, nothing
from lightning_pipeshift.runtime.offload.host_copies import Copies, HostCopies, Traffic, is_at
from lightning_pipeshift.runtime.offload.weight_memory import Weight, may_wait

_CHECKED_STEPS: Final = 2
"""How many steps of a run compare the weights that leave the device with those on the host."""
_STEPS_BETWEEN_CHECKS: Final = 100
_AHEAD: Final = 2
"""How many layers may be prefetched, if there is room for them."""


@dataclass(eq=False)
class _Layer:
    """A layer whose weights come and go.

    Args:
        name: of the layer.
        weights: its parameters.
        copies: the last ones to the device or to the host.
        is_here: whether they are on the device, or on their way there.
        traffic: counts them as long as they are.
        num_runs: how many calls of the layer are in progress.
    """

    name: str
    weights: list[Weight]
    copies: Copies | None = None
    is_here: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    num_runs: int = 0

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of its weights."""
        return sum(weight.host.nbytes for weight in self.weights)

    def finish(self) -> None:
        """Waits for its copies."""
        if self.copies is not None:
            self.copies.finish()


class WaitingWeights:
    """The weights of one stage's layers that are in host memory while their layer waits.

    Args:
        host: the host's memory for them.
        copier: makes the copies.
    """

    def __init__(self, host: BufferPool, copier: Copier) -> None:
        self.traffic = Traffic()
        self.window_bytes = 0.0
        """The device's memory for the layer that runs, and for those that are prefetched."""
        self._homes = HostCopies(host, "the weights")
        self._copier = copier
        self._layers: dict[int, _Layer] = {}
        self._current = self._before = -1
        self._next: dict[tuple[int, int], int] = {}
        """By two layers used one after the other, the one that was used then, last time."""
        self._is_in_step = False
        self._num_steps = self._num_checks = 0

    @property
    def layers(self) -> Collection[int]:
        """The layers whose weights come and go."""
        return self._layers.keys()

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that they take."""
        return self._homes.num_bytes

    @property
    def free_bytes(self) -> float:
        """The part of their memory on the device that is not in use."""
        return self.window_bytes - self.traffic.device_bytes

    # --- the plan ---

    def follow(
        self,
        own: Mapping[int, Sequence[nn.Parameter]],
        moved: Collection[int],
        window_bytes: float,
        names: Sequence[str] = (),
    ) -> None:
        """Applies a plan from now on, between two steps.

        Args:
            own: for each of the stage's layers, the parameters that only it uses.
            moved: the layers whose weights wait in host memory.
            window_bytes: the device's memory for layers that run, or are prefetched.
            names: of the layers.

        Raises:
            BudgetError: the host has too little memory.
        """
        self.leave_all()
        self.window_bytes = window_bytes
        held = {id(p) for layer in own.values() for p in layer}
        before = {id(weight.parameter): weight for weight in self._weights}
        self._layers, self._next = {}, {}
        for index in sorted(set(moved) & own.keys()):
            weights = []
            for parameter in own[index]:
                known = before.get(id(parameter))
                if known is None or not is_at(parameter, known.host):
                    if not may_wait(parameter) or num_other_uses(parameter) > 0:
                        continue
                    # Not by the parameter itself: who refers to it weakly keeps it from moving to
                    # another stage.
                    device = parameter.data
                    known = Weight(parameter, device, self._homes.memory_of(device))
                    self._copy_out([known])
                    known.leave()
                else:
                    del before[id(parameter)]
                weights.append(known)
            if weights:
                name = names[index] if index < len(names) else str(index)
                self._layers[index] = _Layer(name, weights)
        for key, weight in before.items():
            # It stays on the device from now on, or has left this stage.
            if key in held and is_at(weight.parameter, weight.host):
                weight.begin_to_come(False)
                weight.copy_to_device()
                weight.come()
            self._homes.forget(weight.device)
        self._homes.settle()

    def _copy_out(self, weights: Sequence[Weight]) -> None:
        """Copies weights to the host, which may read them then."""
        Copies(self._copier.out, [(weight.copy_to_host, nothing) for weight in weights]).finish()
        self._copier.finish()
        self.traffic.moved_bytes += sum(weight.host.nbytes for weight in weights)

    # --- a step ---

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step's forwards and backwards. After it, all weights are in host memory:
        user code may write to them there.
        """
        self.leave_all()
        self._is_in_step = True
        try:
            yield
            self.leave_all()
            self._num_steps += 1
            self._keep_for_aliases()
        except BaseException:
            # Who catches it may write to weights that are still on the device.
            for weight in self._weights:
                weight.is_of_step = False
            raise
        finally:
            self._is_in_step = False

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Context of a call of a layer.

        Args:
            index: the layer's.
        """
        layer = self._layers.get(index)
        if layer is None:
            yield
            return
        self.use(index)
        layer.num_runs += 1
        try:
            yield
        finally:
            layer.num_runs -= 1
            if not self._is_in_step and not any(one.num_runs for one in self._layers.values()):
                # User code has called it by itself, and may write to it afterwards.
                self.leave_all()

    def before_backward_of(self, index: int, results: Iterable[Any]) -> None:
        """Brings a layer's weights when a backward reaches its results.

        Args:
            index: the layer's.
            results: the tensors that it has computed, maybe among other objects.
        """
        if index in self._layers:
            call_before_backward(results, partial(self.use, index))

    def use(self, index: int) -> None:
        """Returns when a layer's weights are on the device, and begins to prefetch those that were
        used after them last time.

        Args:
            index: the layer's.
        """
        if index not in self._layers or (index == self._current and self._layers[index].is_here):
            return
        if self._current >= 0:
            self._next[self._before, self._current] = index
        self._before, self._current = self._current, index
        wanted = self._wanted()
        for other, layer in self._layers.items():
            if other not in wanted and not layer.num_runs:
                self._leave(layer)
        for other in wanted:
            self._begin_to_come(self._layers[other], self.traffic)
        self._layers[index].finish()

    def _wanted(self) -> list[int]:
        """The layers that are to be on the device: the current one, and those that are expected
        next, as far as there is room.
        """
        wanted, before, last = [self._current], self._before, self._current
        room = self.window_bytes - self._layers[last].num_bytes
        for _ in range(2 * _AHEAD):
            following = self._next.get((before, last))
            if following is None or following not in self._layers:
                break
            before, last = last, following
            if following not in wanted:
                room -= self._layers[following].num_bytes
                if room < 0 or len(wanted) > _AHEAD:
                    break
                wanted.append(following)
        return wanted

    # --- there and back ---

    def _begin_to_come(self, layer: _Layer, traffic: Traffic) -> None:
        if layer.is_here:
            return
        layer.is_here = True
        for weight in layer.weights:
            weight.begin_to_come(self._is_in_step)
        layer.traffic = traffic
        traffic.count(layer.num_bytes)
        parts = [(weight.copy_to_device, weight.come) for weight in layer.weights]
        layer.copies = Copies(self._copier.back, parts)

    def leave_all(self) -> None:
        """Frees the device's memory of all weights."""
        for layer in self._layers.values():
            self._leave(layer)
        self._before = self._current = -1
        if not self._is_in_step:
            self._keep_for_aliases()

    def _leave(self, layer: _Layer) -> None:
        """Frees a layer's memory on the device. Only what has been written to is copied first."""
        layer.finish()
        if not layer.is_here:
            return
        changed = [weight for weight in layer.weights if not weight.is_unchanged]
        if self._is_in_step:
            self._check(layer, changed)
        if changed:
            self._copy_out(changed)
        for weight in layer.weights:
            weight.leave()
        self._has_left(layer)

    @staticmethod
    def _has_left(layer: _Layer) -> None:
        layer.is_here = False
        layer.traffic.count(-layer.num_bytes)

    @property
    def _weights(self) -> Iterator[Weight]:
        return (weight for layer in self._layers.values() for weight in layer.weights)

    def _keep_for_aliases(self) -> None:
        """Called when no backward is to come."""
        for weight in self._weights:
            weight.keep_for_aliases()

    def _check(self, layer: _Layer, changed: Collection[Weight]) -> None:
        self._num_checks += 1
        is_whole = self._num_steps < _CHECKED_STEPS or self._num_steps % _STEPS_BETWEEN_CHECKS == 0
        for weight in layer.weights:
            # On a GPU the compute would wait for each comparison.
            is_checked = is_whole or weight.device.device.type == "cpu"
            if not is_checked or weight in changed:
                continue
            if not weight.is_equal(None if is_whole else self._num_checks):
                raise LayerError(
                    f"A weight of shape {tuple(weight.parameter.shape)} of the layer"
                    f" {layer.name!r} was written to in its forward or backward, through its"
                    " `data` or in another way that autograd does not see. Under this plan of"
                    " `MemoryCompression` the weight is in host memory between two uses, and the"
                    " change would be lost. Write to the parameter itself (`with torch.no_grad():"
                    " self.weight.copy_(...)`), or use a budget with which weights stay on the"
                    " device."
                )

    # --- an update ---

    def bytes_of(self, index: int) -> int:
        """The bytes of a layer's weights, if they wait."""
        layer = self._layers.get(index)
        return layer.num_bytes if layer is not None else 0

    def begin_update(self, index: int, traffic: Traffic) -> list[Copies]:
        """Starts to bring a layer's weights for its update; returns the copies, if they wait.

        Args:
            index: the layer's.
            traffic: counts them until they have left again.
        """
        layer = self._layers.get(index)
        if layer is None:
            return []
        self._leave(layer)
        self._begin_to_come(layer, traffic)
        assert layer.copies is not None
        return [layer.copies]

    def end_update(self, index: int) -> list[Copies]:
        """Starts to copy a layer's weights to the host after its update; returns the copies."""
        layer = self._layers.get(index)
        if layer is None or not layer.is_here:
            return []
        layer.finish()
        self.traffic.moved_bytes += layer.num_bytes
        parts = [(weight.copy_to_host, weight.leave) for weight in layer.weights]
        layer.copies = Copies(self._copier.out, parts, partial(self._has_left, layer))
        return [layer.copies]
