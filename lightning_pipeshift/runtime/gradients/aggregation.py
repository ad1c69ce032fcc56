"""Sums the gradients of every layer over its owners in the virtual machines.

A layer's sum starts when the last microbatch's backward has passed the layer, and overlaps with the
backwards of the earlier layers, and with the next step's forwards of the layers before it. How many
virtual machines have a gradient of a parameter at all is summed with the gradients, in the same
buffer. Only where the sums are made on a GPU do the hosts count it among themselves: they would
otherwise have to wait, layer by layer, until the GPU has summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeshift.devices.streams import Event, is_asynchronous, record_event
from lightning_pipeshift.model.parameters.uses import give_gradient
from lightning_pipeshift.runtime.comm.channels import PostedSum
from lightning_pipeshift.runtime.comm.lane import finish
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.threads import InOrder
from lightning_pipeshift.runtime.comm.turns import MOST_URGENT, Urgencies, lane_of
from lightning_pipeshift.runtime.comm.waits import Watched
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What


class Sum(Protocol):
    """A sum in progress."""

    def wait(self) -> None:
        """Returns when the sum is complete."""

    def query(self) -> bool:
        """Whether the sum is complete, or has failed."""


# Given a number, the members' ranks, a vector and the urgency of the messages: begins to sum the
# vector in place.
StartSum = Callable[[int, Sequence[int], Tensor, Urgencies], Sum]

# Given a vector in host memory: begins to sum it over all ranks, which all call this.
Agree = Callable[[Tensor], PostedSum]

MOST_TYPES = 8
"""Sums of the group ``n`` have the numbers from ``MOST_TYPES * n`` on."""

# With NCCL each lane is one more communicator for every set of owners, with buffers on the GPU, and
# its kernels occupy multiprocessors. Two keep urgent sums apart from the rest.
MOST_LANES_OF_COLLECTIVES = 2


@dataclass
class GradientGroup:
    """Parameters whose gradients are summed together: those of one layer.

    Args:
        number: identifies the group; the same on every rank.
        parameters: in the same order on every owner.
        places: their indices among all parameters of the model.
        members: the ranks of the owners, one for each virtual machine.
        is_hooked: whether the gradients are complete as soon as the last backward has computed
            them.
        urgency: that of the sum.
    """

    number: int
    parameters: list[nn.Parameter]
    places: list[int]
    members: list[int]
    is_hooked: bool = True
    urgencies: Urgencies = MOST_URGENT
    _missing: int = 0
    _sums: list[tuple[list[nn.Parameter], Tensor, Sum]] = field(default_factory=list)
    _buffers: dict[torch.dtype, Tensor] = field(default_factory=dict)
    _counts: Tensor | None = None
    """How many members have a gradient of each parameter: a part of the first buffer."""
    _present: set[int] = field(default_factory=set)
    """The indices of the parameters that had a gradient when the sum started."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that may have a gradient now."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def start(
        self, start_sum: StartSum, device: torch.device, staging: InOrder, counts: bool
    ) -> None:
        """Starts to sum the gradients that exist.

        Args:
            start_sum: starts a sum.
            device: where the sum is made.
            staging: waits for gradients of a GPU that are summed in host memory.
            counts: whether the members also count who has a gradient of each parameter.
        """
        self._present = {
            place
            for place, parameter in zip(self.places, self.parameters, strict=True)
            if parameter.grad is not None
        }
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.trained:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for index, (dtype, parameters) in enumerate(by_type.items()):
            length = sum(parameter.numel() for parameter in parameters)
            num_counts = len(self.places) if counts and index == 0 else 0
            there = parameters[0].device
            buffer = self._buffers.get(dtype)
            if buffer is None or len(buffer) != length + num_counts:
                # Gradients of a GPU may be summed in host memory.
                is_pinned = device != there and is_asynchronous(there)
                buffer = torch.empty(
                    length + num_counts, dtype=dtype, device=device, pin_memory=is_pinned
                )
                self._buffers[dtype] = buffer
            own = buffer[:length]
            joined = own if device == there else torch.empty_like(own, device=there)
            for parameter, part in zip(parameters, _parts(joined, parameters), strict=True):
                gradient = parameter.grad
                if gradient is None:
                    part.zero_()
                else:
                    # The same tensor, unless it is sparse.
                    part.view(parameter.shape).copy_(gradient.to_dense())
            if num_counts:
                flags = [float(place in self._present) for place in self.places]
                buffer[length:] = torch.tensor(flags, dtype=dtype)
                self._counts = buffer[length:]
            number = self.number * MOST_TYPES + index
            begin = partial(start_sum, number, self.members, buffer, self.urgencies)
            if joined is own:
                self._sums.append((parameters, own, begin()))
                continue
            own.copy_(joined, non_blocking=True)
            begun = staging.submit(partial(_behind, record_event(there), begin))
            self._sums.append((parameters, own, _Staged(begun)))

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the sums, and makes them the parameters' gradients."""
        for parameters, buffer, under_way in self._sums:
            under_way.wait()
            # The parameters themselves may be in host memory.
            known = (p.grad.device for p in parameters if p.grad is not None)
            device = next(known, parameters[0].device)
            summed = buffer.to(device, non_blocking=True)
            for parameter, part in zip(parameters, _parts(summed, parameters), strict=True):
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    give_gradient(parameter, torch.empty_like(parameter, device=device))
                assert parameter.grad is not None
                parameter.grad.copy_(part.view(parameter.shape))
        self._sums = []
        if self._counts is not None:
            counts, self._counts = self._counts, None
            found = counts.real if counts.is_complex() else counts
            self.let_go(dict(zip(self.places, found.tolist(), strict=True)))

    def let_go(self, num_owners: Sequence[float] | Mapping[int, float]) -> None:
        """Removes the gradients of parameters for which no virtual machine had one.

        Args:
            num_owners: how many had one, for each parameter of the model, or of this group.
        """
        for place, parameter in zip(self.places, self.parameters, strict=True):
            if parameter.requires_grad and not num_owners[place]:
                parameter.grad = None

    @property
    def is_started(self) -> bool:
        """Whether a sum is in progress."""
        return bool(self._sums)

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`finish` does not have to wait."""
        return all(under_way.query() for _, _, under_way in self._sums)


class Aggregation:
    """The sums of one rank's layers.

    Args:
        groups: one for each layer that this rank owns, in call order.
        start_sum: begins a sum.
        agree: sums a vector over all ranks, in host memory, to count who has a gradient;
            ``None`` if that is counted with each sum.
        num_parameters: how many the model has.
        device: where the sums are made.
        in_order: whether sums have to begin in the same order on all ranks; that order is then the
            one in which backwards pass the layers, the last layer first.
    """

    def __init__(
        self,
        groups: list[GradientGroup],
        start_sum: StartSum,
        agree: Agree | None,
        num_parameters: int,
        device: torch.device,
        in_order: bool,
    ) -> None:
        self._groups = groups
        self._start_sum = start_sum
        self._agree = agree
        self._num_parameters = num_parameters
        self._device = device
        self._staging = InOrder("sum")
        self.in_order = in_order
        self._is_armed = False
        self._ready: set[int] = set()
        self._num_owners: PostedSum | None = None
        self.exposed_seconds = 0.0
        """How long the last step has waited for its sums, in seconds."""
        self.recorder: Recorder | None = None
        """Takes notes of these waits."""
        # By identity of the parameter. A frozen one gets no hook until it is trained.
        self._handles: dict[int, Any] = {}

    def close(self) -> None:
        """Removes the hooks of the parameters."""
        self._staging.close()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def arm(self, late: Collection[int] = ()) -> None:
        """Called before the step's last backward on this stage.

        Args:
            late: identities of parameters whose gradients are not complete after it.
        """
        self._is_armed = True
        self._ready.clear()
        for index, group in enumerate(self._groups):
            trained = group.trained
            group._missing = len(trained)
            is_late = any(id(parameter) in late for parameter in trained)
            for parameter in trained if group.is_hooked and not is_late else ():
                if id(parameter) not in self._handles:
                    hook = parameter.register_post_accumulate_grad_hook(_Noticed(self, index))
                    self._handles[id(parameter)] = hook

    def notice(self, index: int) -> None:
        """Called when one of a group's parameters has its gradient."""
        if not self._is_armed:
            return
        group = self._groups[index]
        group._missing -= 1
        if group._missing == 0:
            self._ready.add(index)
            self._start_ready()

    @torch.no_grad()
    def _start_ready(self) -> None:
        for index in sorted(self._ready, reverse=True):
            later = self._groups[index + 1 :] if self.in_order else []
            if all(group.is_started or not group.trained for group in later):
                self._ready.discard(index)
                self._start(self._groups[index])

    def finish(
        self,
        leaves_late: bool = False,
        summed: Callable[[Sequence[int], Sequence[nn.Parameter]], None] | None = None,
    ) -> list[GradientGroup]:
        """Starts the sums that have not started (of layers that no gradient reached), and waits for
        the sums. (On a GPU the sums are queued then, and later work runs after them.)

        Args:
            leaves_late: whether it does not wait for the sums of layers, other than those of shared
                parameters.
            summed: called with a group's ``places`` and ``parameters`` as soon as these have their
                gradients, while other sums are in progress.

        Returns:
            the groups that it has not waited for: the caller passes each to :meth:`finish_late`.
            Until then their parameters have no gradients.
        """
        self._is_armed = False
        with torch.no_grad():
            for group in self._groups if leaves_late and not self.in_order else self._groups[::-1]:
                if not group.is_started:
                    self._start(group)
        self.exposed_seconds = 0.0
        late = []
        present = torch.zeros(self._num_parameters)
        with self._exposed():
            for group in reversed(self._groups):
                present[list(group._present)] = 1.0
                if leaves_late and group.is_hooked and not group.is_complete:
                    late.append(group)
                    for parameter in group.parameters:
                        parameter.grad = None
                else:
                    group.finish()
                    if summed is not None:
                        summed(group.places, group.parameters)
        if self._agree is not None:
            self._num_owners = self._agree(present)
            for group in self._groups:
                if group not in late:
                    self._let_go(group)
        return late[::-1]

    def finish_late(self, group: GradientGroup) -> None:
        """Waits for a sum that :meth:`finish` has not waited for."""
        with self._exposed():
            group.finish()
            self._let_go(group)

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        """Context of a wait for sums."""
        recorder, begin = self.recorder, time.perf_counter()
        moment = recorder.now() if recorder is not None else None
        yield
        self.exposed_seconds += time.perf_counter() - begin
        if recorder is not None and moment is not None:
            recorder.add(What.SUMS, "sums of gradients", moment, recorder.now())

    def _let_go(self, group: GradientGroup) -> None:
        if self._num_owners is not None:
            group.let_go(self._num_owners.wait().tolist())

    def _start(self, group: GradientGroup) -> None:
        group.start(self._start_sum, self._device, self._staging, counts=self._agree is None)


def _behind(event: Event, begin: Callable[[], Sum]) -> Sum:
    event.synchronize()
    return begin()


@dataclass
class _Staged:
    """A sum that a thread starts."""

    begun: Future[Sum]

    def wait(self) -> None:
        self.begun.result().wait()

    def query(self) -> bool:
        if not self.begun.done():
            return False
        return self.begun.exception() is not None or self.begun.result().query()


@dataclass
class _Noticed:
    """A hook of a parameter. Not a closure, so that the objects it refers to can be inspected."""

    aggregation: Aggregation
    index: int

    def __call__(self, parameter: Tensor) -> None:
        self.aggregation.notice(self.index)


class AllReduce:
    """Sums by torch's own collective.

    Args:
        groups: have one group for each set of owners.
        watched: the context to communicate in.
    """

    def __init__(self, groups: ProcessGroups, watched: Watched) -> None:
        self._groups = groups
        self._watched = watched

    def start(
        self, number: int, members: Sequence[int], buffer: Tensor, urgencies: Urgencies
    ) -> Sum:
        """Begins to sum a vector in place."""
        with self._watched(None):
            group = self._groups.group(members, lane_of(urgencies))
            work = dist.all_reduce(buffer, group=group, async_op=True)
        return _Collective(work, self._watched, self._groups.backend == "gloo")


@dataclass
class _Collective:
    work: Any
    watched: Watched
    is_gloo: bool

    def wait(self) -> None:
        if self.is_gloo:
            finish(self.work, self.watched)
            return
        # NCCL's wait orders streams and returns at once; with a time limit it would block.
        with self.watched(None):
            self.work.wait()

    def query(self) -> bool:
        with self.watched(None):
            return bool(self.work.is_completed())


def _parts(buffer: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in parameters]
    return list(buffer[: sum(sizes)].split(sizes))
