"""Finds out what the user's steps do before the first one runs, by a run on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.module_private import without_compiling
from lightning_pipeshift.compat.random_private import host_mark
from lightning_pipeshift.devices.properties import generators_of
from lightning_pipeshift.model.measuring.measure import Figures, Stopwatch
from lightning_pipeshift.model.parameters.uses import ParameterUse, parameter_uses
from lightning_pipeshift.model.random.random_streams import drawing_from, stream_seed
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.model.tensors.microbatch import size_or_one
from lightning_pipeshift.model.tensors.trees import address_of, leaves_of
from lightning_pipeshift.model.user_state.preserve import preserved
from lightning_pipeshift.plan.search.boundaries import Crossing
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.step_group import StepGroup
from lightning_pipeshift.runtime.offload.weight_memory import may_wait
from lightning_pipeshift.runtime.ownership.sharing import shared_weights
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.step.fake_run import FakeRun, run_without_values
from lightning_pipeshift.step.flow import call_order, merged_order
from lightning_pipeshift.step.step_memory import StepMemory
from lightning_pipeshift.step.training_batch import Key, UserStep
from lightning_pipeshift.values.core import Core

# What a layer is expected to cost by its parameters' bytes, before it is measured.
_SECONDS_PER_BYTE = 1e-9
# How often a step that skips layers at random is run to find their order.
_MOST_DRAWS = 8


class Seen(NamedTuple):
    """The properties of the user's steps, found before the first one runs.

    Args:
        figures: the times and sizes of the layers; by their bytes where they were not timed.
        is_timed: whether the layers were timed.
        called: the layers that steps call; ``None``: any may be called.
        idle: the layers that no step calls.
        uses: of the parameters.
        crossings: what crosses the boundary behind each layer.
        core: has the contracts of the calls in the run on fake tensors; ``None`` without one.
    """

    figures: dict[int, Figures]
    is_timed: bool
    called: frozenset[int] | None
    idle: frozenset[int]
    uses: list[ParameterUse]
    crossings: Sequence[Crossing]
    core: Core | None


class FirstLook:
    """Finds out what steps do.

    Args:
        root: the LightningModule.
        layers: its layers; :meth:`look` puts them into the order of their calls.
        channels: this stage's connections.
        replicas: the virtual machines.
        planning: says whether layers are to be timed.
        memory: of this stage.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: list[NamedLayer],
        channels: Channels,
        replicas: Replicas,
        planning: Replanning,
        memory: StepMemory,
    ) -> None:
        self._root = root
        self._layers = layers
        self._channels = channels
        self._replicas = replicas
        self._planning = planning
        self._memory = memory

    def look(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        trains: bool,
        user_step: UserStep | None,
    ) -> Seen:
        """Finds out what steps do, and times their layers if that is needed. The layers are in call
        order from then on. Every rank calls this.

        Args:
            key: of the step's random stream.
            step: the user's step that comes first.
            batch: one microbatch.
            trains: whether the run trains.
            user_step: the user's step of training; ``None`` where the run does not train.
        """
        found = self._run_without_values(key, step, batch)
        calls = [found.calls]
        while found.draws and len(calls) < _MOST_DRAWS:
            if len({call.layer for each in calls for call in each}) == len(self._layers):
                break
            # Other microbatches show the places of layers that this one skips at random.
            again = self._run_without_values((*key, "order", len(calls)), step, batch, found.core)
            calls.append(again.calls)
        # Every rank has run its own batch; what the first rank has found counts.
        order = self._replicas.world.share_object(
            call_order(
                merged_order([[call.layer for call in each] for each in calls]), len(self._layers)
            ),
            source=0,
        )
        if order != sorted(order):
            self._layers[:] = [self._layers[index] for index in order]
            for index, each in enumerate(self._layers):
                each.index = index
            found = self._run_without_values(key, step, batch, found.core)
        layers = [each.layer for each in self._layers]
        trained = found
        if trains and key[1] != "train" and user_step is not None:
            # The sanity check comes first, and calls what validation does.
            own = *key, "training step"
            trained = self._run_without_values(own, user_step, batch, found.core)
        called = None if not trains or trained.end or trained.draws else trained.called
        crossings = found.crossings()
        if sum(each.may_be_cut for each in crossings[:-1]) < self._channels.num_stages - 1:
            # Values may go back, too, if they have to.
            crossings = [each._replace(may_be_cut=True) for each in crossings]
        called, crossings = self._replicas.world.share_object((called, crossings), source=0)
        idle = frozenset(range(len(layers))) - called if called is not None else frozenset()
        uses = parameter_uses(self._root, layers, called)
        figures = self._timed(found, leaves_of(batch), trains) if self._planning.measures else {}
        is_timed = bool(figures)
        if not is_timed:
            figures = {
                at: Figures(_SECONDS_PER_BYTE * bytes_of(layer.parameters()))
                for at, layer in enumerate(layers)
            }
        figures |= dict.fromkeys(idle, Figures(0.0))
        return Seen(figures, is_timed, called, idle, uses, crossings, found.core)

    def _run_without_values(
        self, key: tuple[Any, ...], step: UserStep, batch: Any, known: Core | None = None
    ) -> FakeRun:
        layers = [each.layer for each in self._layers]
        if not self.looks_ahead:
            return FakeRun(len(layers), end="nothing depends on it")
        run = partial(step, self._root)
        in_step = StepGroup(self._replicas.vm, self._replicas.count).in_force()
        device = self._channels.device
        generators = generators_of(device)
        with drawing_from(generators, True, stream_seed(*key)), in_step:
            states, mark = [each.get_state() for each in generators], host_mark()
            found = run_without_values(self._root, layers, device, run, batch, known)
            found.draws = host_mark() != mark or not all(
                torch.equal(each.get_state(), state)
                for each, state in zip(generators, states, strict=True)
            )
        return found

    def _timed(self, found: FakeRun, batch: list[Any], trains: bool) -> dict[int, Figures]:
        """The times of layers, on random data of the shapes that they are called with."""
        stopwatch = Stopwatch(self._channels.device, trains, batch)
        with torch.inference_mode(False), without_compiling():
            for call in found.calls:
                each = self._layers[call.layer]
                with preserved(each.layer.modules()), call.as_called():
                    stopwatch.observe_call(each, call.leaves, call.rebuild)
        return stopwatch.figures

    @property
    def looks_ahead(self) -> bool:
        """Whether what a step does is of use before the first one: to choose a cut."""
        return self._replicas.topology.num_ranks > 1 or self._planning.measures

    def measure(
        self, seen: Seen, batch: Any, optimizers: Sequence[Optimizer] | None, trains: bool
    ) -> Measured | None:
        """The measurements before the first step, on the first rank. Every rank calls this.

        Args:
            seen: the result of :meth:`look`.
            batch: one microbatch.
            optimizers: those of the run; ``None``: not known yet.
            trains: whether the run trains.
        """
        # No GPU has run this yet: there, only a user's own plan moves weights.
        may_move = self._channels.device.type == "cpu"
        waiting_bytes = {
            layer: bytes_of(p for p in parameters if p.is_meta or may_wait(p))
            for layer, parameters in self._memory.only_theirs(seen.uses).items()
            if may_move
        }
        layers = [each.layer for each in self._layers]
        return self._planning.measure(
            self._layers,
            seen.crossings,
            seen.figures,
            optimizers,
            float(size_or_one(batch)),
            self._held_bytes(),
            bytes_of(x for x in leaves_of(batch) if self._is_here(x)),
            trains,
            self._memory.memory if trains else None,
            shared_weights(self._root, layers, seen.uses),
            waiting_bytes,
        )

    def _held_bytes(self) -> int:
        """The bytes of the model in this device's memory."""
        held = {
            address_of(tensor): tensor
            for tensor in [*self._root.parameters(), *self._root.buffers()]
            if self._is_here(tensor)
        }
        return bytes_of(held.values())

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self._channels.device.type
