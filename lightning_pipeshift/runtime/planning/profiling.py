"""Measures the run on one rank, and gathers the measurements of all ranks on the first.

Training itself is measured: an estimate before its first step, then the layers' own times in its
first steps (NUDT: the first samples are used for training and for the profile at once).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeshift.devices.streams import Event, is_asynchronous
from lightning_pipeshift.model.measuring.measure import Figures
from lightning_pipeshift.model.measuring.timing import Timer
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.saved_tensors import bytes_of
from lightning_pipeshift.plan.inputs.profile import LayerProfile
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.search.boundaries import Crossing
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.offload.stage_memory import RankMemory
from lightning_pipeshift.runtime.planning.delivered import Estimate, recent
from lightning_pipeshift.runtime.planning.profile_fitting import RankFigures, Times
from lightning_pipeshift.runtime.planning.slow_rank import SlowRank
from lightning_pipeshift.runtime.planning.update_memory import UpdateMemory

T = TypeVar("T")

_WARM_UP_STEPS: Final = 3
"""Steps that are not measured, as memory is allocated, kernels are chosen, and optimizer state is
made."""

_MEASURED_MICROBATCHES: Final = 2
"""Approximate number of measured microbatches in a step, on a GPU."""

_MOST_STEPS: Final = 512
"""Of so many steps the times are kept."""

_USUAL_COPIES: Final = 2
"""State values for each element of a parameter, if the optimizer is not known yet: Adam's."""

_OUTSIDE: Final = "outside"
"""The timer's name for the time between the ends and starts of a stage's steps."""

_FORWARDS: Final = (Kind.RECEIVE_PAYLOAD, Kind.FORWARD, Kind.SEND_PAYLOAD)
_BACKWARDS: Final = (Kind.RECEIVE_GRADIENT, Kind.BACKWARD, Kind.SEND_GRADIENT)


class Profiler:
    """One rank's measurements.

    Args:
        device: the rank's.
        links: measures what this rank sends.
    """

    def __init__(self, device: torch.device, links: LinkMeter) -> None:
        self.links = links
        self.timer = Timer(device)
        self._is_asynchronous = is_asynchronous(device)
        self.observer = Observer()
        self.num_steps = 0
        self.held_bytes = 0
        """The device memory that the model took before its layers were distributed."""
        self.waited_seconds: Callable[[], float] = float
        """How long the compute has waited for swapped tensors, since the run began."""
        self._waited_before = 0.0
        self.memory: RankMemory | None = None
        """The rank's memory for saved tensors, if they have a budget."""
        self.estimates: dict[int, Figures] = {}
        """The times and memory of layers that were measured before training."""
        self.of_others: Mapping[int, int] = {}
        """The working bytes that other ranks have measured of layers that may come to this one."""
        self.slow_rank = SlowRank(device)
        # Of each step under this plan: its seconds, and the work of a microbatch of largest size.
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._work: deque[float] = deque(maxlen=_MOST_STEPS)
        self._num_timed, self._num_timed_in_window = 1, 0
        # Of the timed microbatches, relative to the largest one of the step.
        self._mean_size = 1.0
        self._begun: float | None = None
        # As the device sees it: the host may wait for the device between two steps.
        self._ended: Event | None = None
        self.is_over = False
        """Whether no more measurements are needed."""
        self.num_measured = 0
        """The number of steps that were measured in this window."""

    def timers(self, sizes: Sequence[int]) -> dict[int, Timer]:
        """The timer of each microbatch to measure in a step: a few, different ones in each step.

        Args:
            sizes: the samples of each microbatch, the larger first.
        """
        num_microbatches, stride = len(sizes), 1
        if self._is_asynchronous:
            # On a CPU a reading of the clock costs next to nothing, and a pause may be anywhere.
            stride = max(1, num_microbatches // _MEASURED_MICROBATCHES)
        measured = range(self.num_steps % stride, num_microbatches, stride)
        self._num_timed = len(measured)
        self._mean_size = fmean(sizes[number] for number in measured) / sizes[0]
        return dict.fromkeys(measured, self.timer)

    # --- step by step ---

    def begin_step(self) -> None:
        """Called when the stage's part of a step begins."""
        if self.is_over:
            return
        now = time.perf_counter()
        if self._ended is not None and self._begun is not None:
            self.timer.add(_OUTSIDE, -1, self._ended, self.timer.now())
            self._steps.append(now - self._begun)
            self.num_measured += 1
        self._begun = now

    def end_step(self) -> None:
        """Called when the stage's part of a step is over."""
        if self.is_over:
            return
        self._ended = self.timer.now()
        self._work.append(self.timer.read() / self._num_timed / self._mean_size)
        self._num_timed_in_window += self._num_timed
        self.num_steps += 1
        if self.num_steps == _WARM_UP_STEPS:
            self.begin_anew()

    def begin_anew(self, for_good: bool = False) -> None:
        """Discards all measurements, as circumstances have changed, but not the number of steps.

        Args:
            for_good: whether to measure nothing from now on.
        """
        self.is_over = for_good
        self.next_window()
        self._steps.clear()
        self._work.clear()
        self._begun = self._ended = None

    def next_window(self) -> None:
        """Discards all measurements, and continues to measure without a break."""
        self.timer.forget()
        self.links.begin()
        self._waited_before = self.waited_seconds()
        self.num_measured, self._num_timed_in_window = 0, 0

    def took(self, fewest: int) -> Estimate:
        """The seconds from the start of one step to the start of the next, over the steps by which
        this rank's work is measured.

        Args:
            fewest: over how many of the latest steps at least, of which one is measured.
        """
        return recent(list(self._steps)[-self._work_of(fewest).num_steps :], fewest)

    def _work_of(self, fewest: int) -> Estimate:
        """This rank's work in a step, over the steps since it or the time of a whole step changed:
        rare pauses that end show late in the work of a few layers.
        """
        work, steps = list(self._work) or [0.0], list(self._steps)
        found = recent(work, fewest)
        since = recent(steps[-found.num_steps :], fewest).num_steps if steps else 0
        return recent(work[-since:], fewest) if since else found

    # --- results ---

    def figures(
        self,
        layers: Iterable[int],
        gates: Sequence[NamedLayer],
        optimizers: Iterable[Optimizer],
        is_last: bool = False,
        fewest: int = 1,
    ) -> RankFigures:
        """Returns the measurements of this rank. How the layers' times compare is said by their
        medians; what they take together, by the mean over whole steps, with all pauses.

        Args:
            layers: those that its stage owns.
            gates: of all layers.
            optimizers: those with state for these layers.
            is_last: whether it is the last stage of its virtual machine.
            fewest: over how many steps at least.
        """
        layers = frozenset(layers)
        stretch, error = self._stretch(fewest)
        times = self._times(layers, stretch)
        estimates: dict[int, Times] = {
            layer: (found.forward_seconds, found.backward_seconds or 2 * found.forward_seconds)
            for layer, found in self.estimates.items()
        }
        tensors = {layer: found.tensors for layer, found in self.estimates.items()}
        for layer, found in self.observer.of_layers.items():
            # Only the first measurement times the operations.
            spares = {tensor.number: tensor.spares for tensor in tensors.get(layer, ())}
            tensors[layer] = tuple(
                replace(tensor, spares=spares.get(tensor.number, 0.0) if tensor.num_bytes else 0.0)
                for tensor in found
            )
        inputs = {layer: found.input_bytes for layer, found in self.estimates.items()}
        return RankFigures(
            estimates=estimates,
            times=times,
            earlier=self.slow_rank.earlier(layers, times, error),
            error=error,
            ran=None if self._is_asynchronous else self.timer.ran,
            extra=self._extra(stretch),
            outside_seconds=self.timer.median(_OUTSIDE),
            saved_bytes={
                layer: sum(tensor.num_bytes for tensor in found) for layer, found in tensors.items()
            },
            tensors=tensors,
            input_bytes=inputs | self._observed_inputs(),
            working_bytes=self.working_bytes,
            optimizer_bytes={
                layer: sum(
                    bytes_of(_state_of(optimizer, parameter))
                    for optimizer in optimizers
                    for parameter in gates[layer].layer.parameters()
                )
                for layer in times
            },
            is_last=is_last,
            held_bytes=self.held_bytes,
            waited_seconds=(self.waited_seconds() - self._waited_before)
            / max(1, self.num_measured),
            **(asdict(self.memory) if self.memory is not None else {}),
        )

    def _observed_inputs(self) -> dict[int, int]:
        """Bytes of the layers' inputs, and of the tensors saved by the code around them: both are
        kept even if a layer is recomputed.
        """
        return {
            layer: num_bytes
            + sum(t.num_bytes for t in self.observer.of_layers.get(layer, ()) if t.is_outside)
            for layer, num_bytes in self.observer.of_inputs.items()
        }

    @property
    def expected_bytes(self) -> dict[int, int]:
        """The bytes that layers save for a microbatch, without the code around them."""
        return {
            layer: sum(tensor.num_bytes for tensor in found.tensors)
            for layer, found in self.estimates.items()
        }

    @property
    def working_bytes(self) -> dict[int, int]:
        """The bytes that layers take for a moment while they run, or the code around them."""
        found = {}
        for layer in {*self.estimates, *self.observer.of_code, *self.of_others}:
            estimate = self.estimates.get(layer, Figures(0.0))
            seen = [by[layer] for by in (self.observer.of_code, self.of_others) if layer in by]
            found[layer] = max([estimate.working_bytes, *seen])
        return found

    def _stretch(self, fewest: int) -> tuple[float, float]:
        """How many times as long as by the medians the work takes, for the largest microbatch of a
        step; and its relative error.
        """
        typical = self.timer.typical_seconds / max(1, self._num_timed_in_window)
        work = self._work_of(fewest)
        if not typical or not work.mean:
            return 1.0, 0.0
        return work.mean / typical, work.error / work.mean

    def _times(self, layers: Iterable[int], stretch: float) -> dict[int, Times]:
        times = {}
        for layer in layers:
            forward, backward = (self.timer.median(what, layer) for what in ("forward", "backward"))
            if forward is not None:
                times[layer] = (stretch * forward, stretch * (backward or 0.0))
        return times

    def _extra(self, stretch: float) -> Times | None:
        found = [[self.timer.median(k.name) for k in kinds] for kinds in (_FORWARDS, _BACKWARDS)]
        if any(own is None for _, own, _ in found):
            return None
        forward, backward = (stretch * sum(filter(None, seconds)) for seconds in found)
        return forward, backward


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Iterable[Any]:
    state = optimizer.state.get(parameter)
    return state.values() if isinstance(state, dict) else ()


def layers_of(
    gates: Sequence[NamedLayer],
    crossings: Sequence[Crossing],
    optimizers: Iterable[Optimizer] | None,
    updates: UpdateMemory,
    waiting_bytes: Mapping[int, int] | None = None,
) -> tuple[LayerProfile, ...]:
    """The layers' properties that need no measurement.

    Args:
        gates: in call order.
        crossings: what crosses the boundary behind each of them.
        optimizers: the size of their future state is estimated from their kind; ``None``: not known
            yet.
        updates: what these take for a moment.
        waiting_bytes: by layer, of the weights that may wait in host memory.
    """
    copies = _USUAL_COPIES if optimizers is None else max(map(_copies, optimizers), default=0)
    found = []
    for index, (gate, crossing) in enumerate(zip(gates, crossings, strict=True)):
        sizes = [bytes_of([p]) for p in gate.layer.parameters() if p.requires_grad]
        trained = sum(sizes)
        found.append(
            LayerProfile(
                gate.name,
                parameter_bytes=bytes_of(gate.layer.parameters()),
                gradient_bytes=trained,
                optimizer_bytes=copies * trained,
                buffer_bytes=bytes_of(gate.layer.buffers()),
                update_bytes=updates.num_bytes(sizes),
                waiting_bytes=(waiting_bytes or {}).get(index, 0),
                payload_bytes=crossing.payload_bytes,
                payload_gradient_bytes=crossing.gradient_bytes,
                joins_next=index + 1 < len(gates) and not crossing.may_be_cut,
            )
        )
    return tuple(found)


def _copies(optimizer: Optimizer) -> int:
    """The likely number of state values for each element of a parameter; an optimizer makes them in
    its first step only.
    """
    defaults = optimizer.defaults
    if "betas" in defaults:
        return 3 if defaults.get("amsgrad") else 2
    return 1 if defaults.get("momentum") or defaults.get("alpha") else 0


def gather_figures(mine: T, replicas: Replicas) -> list[T] | None:
    """Returns the measurements of all ranks, by rank, on the rank that decides; ``None`` on the
    others. Every rank calls this.
    """
    world = replicas.world
    # On a lane of their own: the first rank may take them in later than they are sent.
    lane = world.measurements
    lane.settle()
    if world.stage:
        lane.send_object(mine, 0)
        return None
    return [mine, *(lane.receive_object(rank) for rank in range(1, world.num_stages))]
