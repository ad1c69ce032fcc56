"""Sends layers to their new owners while steps run.

CN115454655A announces a move, prepares it, and sends the weights of moving layers in threads and on
connections of their own, while both stages compute. In a synchronous schedule:

1. The move is prepared during a whole step: the targets of all tensors, and memory for them.
2. As soon as a stage has taken its optimizer step, it sends the weights: the stages before it are
   still at their last backwards.
3. The new owner owns the layer from the next step on. A call of the layer waits only for that
   layer's weights, and they arrive in the order in which they are needed. The old owner compares
   the values it has sent with the present ones, as user code may have run in between.
4. Optimizer states, which the patent does not mention, and gradients from before the step are not
   needed before its end: they are sent after the weights. The old owner frees nothing before the
   new owner has acknowledged that it has everything.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.devices.streams import record_event, side_stream
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.parameters.uses import (
    flat_weights_forgotten,
    hold,
    take_other_state,
)
from lightning_pipeshift.runtime.comm.lane import Lane, layout_of
from lightning_pipeshift.runtime.comm.staging import host_buffer
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import What

# The lane of the new owners' acknowledgements: two stages may each get layers of the other.
_ANSWERS = 4


class _Message(enum.Enum):
    """A message of the old owner to the new one, before the values."""

    EARLY = "a parameter follows, and may still change"
    SETTLED = "the new owners own their layers"
    CANCELLED = "the move is cancelled"


@dataclass
class _Transfer:
    """A parameter, or a layer's other state, that is being sent to its new owner.

    Args:
        layers: those that need it at the new owner, in call order.
        parameter: the parameter; ``None`` for a layer's other state.
        values: for a parameter, the copy that the old owner has sent, or the memory that the new
            owner receives it into; otherwise the layer's state, by name.
        state: the optimizers' state, by the index of an optimizer and a name; it is needed by the
            new owner at the end of the step.
        gradient: from before the step, if it is still needed; at the same time.
        is_early: whether the parameter may have changed since ``values`` was sent.
        has_arrived: done when ``values`` has arrived.
    """

    layers: list[int]
    parameter: nn.Parameter | None
    values: Any = None
    state: dict[tuple[int, Any], Any] = field(default_factory=dict)
    gradient: Tensor | None = None
    is_early: bool = False
    has_arrived: Future[None] = field(default_factory=Future)


class _Transfers(NamedTuple):
    """The tensors that leave a stage, by target, and those that arrive, by source; in the order in
    which they are needed.
    """

    outgoing: dict[int, list[_Transfer]]
    incoming: dict[int, list[_Transfer]]


@dataclass(frozen=True)
class TensorMove:
    """A parameter, or a layer's other state, that changes its stage.

    Args:
        layers: those of the new stage that need it, in call order.
        parameter: the parameter; ``None`` for a layer's other state.
        source: the stage that sends it.
        target: the stage that needs it.
    """

    layers: list[int]
    parameter: nn.Parameter | None
    source: int
    target: int


def moves_of(holdings: Holdings, stage_of: Sequence[int]) -> list[TensorMove]:
    """The tensors that this stage sends or receives, in the order in which layers need it.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
    """
    uses, here = holdings.uses, holdings.stage
    found = []
    places = zip(holdings.all_holders(), holdings.all_holders(stage_of), strict=True)
    for number, (old, new) in enumerate(places):
        parameter = uses[number].parameter if number < len(uses) else None
        for to in new:
            if to in old or here not in (old[0], to):
                continue
            layers = [number - len(uses)]
            if parameter is not None:
                layers = [layer for layer in uses[number].layers if stage_of[layer] == to]
            found.append((min(layers), number, TensorMove(layers, parameter, old[0], to)))
    return [move for _, _, move in sorted(found, key=itemgetter(0, 1))]


class Migration:
    """One stage's part in a change of owners.

    Every stage of the virtual machine makes one, at the beginning of the same step, and calls its
    methods in their order: :meth:`start`, :meth:`begin` as the next step begins, and
    :meth:`finish` as it ends. In between it listens to the stage's actions and layers.

    Args:
        holdings: the stage's tensors.
        stage_of: the new stage of each layer.
        optimizers: the same ones on every stage.
        threads: their threads wait for other stages.
        deferred: see :meth:`Holdings.settle`.
    """

    def __init__(
        self,
        holdings: Holdings,
        stage_of: Sequence[int],
        optimizers: Sequence[Optimizer],
        threads: Threads,
        deferred: DeferredInit,
    ) -> None:
        self._holdings = holdings
        self._stage_of = list(stage_of)
        self._optimizers = optimizers
        self._threads = threads
        self._deferred = deferred
        self._device = holdings.channels.device
        self.leaving = frozenset(
            layer
            for layer, (_, stage) in enumerate(holdings.layers)
            if stage == holdings.stage != stage_of[layer]
        )
        """The layers that this stage gives away."""
        self.changing = self.leaving | {
            layer
            for layer, (_, stage) in enumerate(holdings.layers)
            if stage != holdings.stage == stage_of[layer]
        }
        """The layers that this stage gives away or gets."""
        # After the work whose results threads may read.
        self._is_ready = record_event(self._device)
        # Set when the step before is over, or the move is cancelled.
        self._is_settled = threading.Event()
        self._has_begun = self._is_cancelled = self._is_freed = False
        self._work: list[Future[None]] | None = None
        self._awaited: dict[int, list[_Transfer]] = {}
        self.exposed_seconds = 0.0
        """How long training has waited for the move on this stage so far."""
        self.recorder: Recorder | None = None
        """Takes notes of these waits."""
        self._prepared = threads.submit(self._prepare)

    # --- during the step before ---

    def _prepare(self) -> _Transfers:
        transfers = _Transfers({}, {})
        for move in moves_of(self._holdings, self._stage_of):
            transfer = _Transfer(move.layers, move.parameter)
            if self._holdings.stage == move.source:
                transfers.outgoing.setdefault(move.target, []).append(transfer)
                continue
            transfers.incoming.setdefault(move.source, []).append(transfer)
            if move.parameter is not None:
                transfer.values = self._buffer_like(move.parameter)
        return transfers

    def _buffer_like(self, like: Tensor) -> Tensor:
        if self._device.type == "cpu" and like.is_contiguous():
            return host_buffer(tuple(like.shape), like.dtype)
        return torch.empty_strided(
            like.shape, layout_of(like), dtype=like.dtype, device=self._device
        )

    # --- in threads ---

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Context of copies beside the compute, after the work at the last :meth:`_mark`."""
        # The main thread may run user code that sees parameters as values.
        with side_stream(self._device, "moves"), without_torch_function_of_subclasses():
            self._is_ready.wait()
            yield

    def _send(self, lanes: tuple[Lane, Lane], to: int, transfers: Sequence[_Transfer]) -> None:
        lane, answers = lanes
        parameters = [transfer for transfer in transfers if transfer.parameter is not None]
        with torch.no_grad(), self._on_side_stream():
            for transfer in parameters:
                if self._is_settled.is_set():
                    break
                transfer.values = self._copied(transfer)
                transfer.is_early = True
                lane.send_object(_Message.EARLY, to)
                lane.send_tensor(transfer.values, to)
        self._is_settled.wait()
        if self._is_cancelled and self._has_begun:
            return
        lane.send_object(_Message.CANCELLED if self._is_cancelled else _Message.SETTLED, to)
        if self._is_cancelled:
            lane.settle()
            return
        with torch.no_grad(), self._on_side_stream():
            for transfer in transfers:
                if (parameter := transfer.parameter) is None:
                    lane.send_values(transfer.values, to)
                    continue
                if transfer.is_early:
                    is_same = _same_bits(transfer.values, parameter.detach())
                    transfer.values = None
                    lane.send_object(is_same, to)
                    if is_same:
                        continue
                lane.send_tensor(parameter, to)
            for transfer in parameters:
                lane.send_values(transfer.state, to)
            for transfer in parameters:
                lane.send_values({} if transfer.gradient is None else {"": transfer.gradient}, to)
        lane.settle()
        answers.receive_object(to)

    def _copied(self, transfer: _Transfer) -> Tensor:
        assert transfer.parameter is not None
        copied: Tensor = self._buffer_like(transfer.parameter)
        return copied.copy_(transfer.parameter.detach())

    def _receive(
        self, lanes: tuple[Lane, Lane], source: int, transfers: Sequence[_Transfer]
    ) -> None:
        try:
            with torch.no_grad(), self._on_side_stream():
                self._take_in(lanes, source, transfers)
        except BaseException as error:
            for transfer in transfers:
                if not transfer.has_arrived.done():
                    transfer.has_arrived.set_exception(error)
            raise

    def _take_in(
        self, lanes: tuple[Lane, Lane], source: int, transfers: Sequence[_Transfer]
    ) -> None:
        lane, answers = lanes
        parameters = [transfer for transfer in transfers if transfer.parameter is not None]

        def take_in(buffer: Tensor) -> None:
            if buffer.device.type == "cpu" and buffer.is_contiguous():
                lane.receive_into(buffer, source)
            else:
                buffer.copy_(lane.receive_tensor(buffer, source))

        coming = iter(parameters)
        while (message := lane.receive_object(source)) is _Message.EARLY:
            transfer = next(coming)
            transfer.is_early = True
            take_in(transfer.values)
        if message is _Message.CANCELLED:
            return
        for transfer in transfers:
            if transfer.parameter is None:
                transfer.values = {
                    name: value.to(self._device) if isinstance(value, Tensor) else value
                    for name, value in lane.receive_values(source)
                }
            elif not (transfer.is_early and lane.receive_object(source)):
                take_in(transfer.values)
            # Copies from memory that is not pinned are complete when they return.
            transfer.has_arrived.set_result(None)
        for transfer in parameters:
            transfer.state = dict(lane.receive_values(source))
        for transfer in parameters:
            transfer.gradient = dict(lane.receive_values(source)).get("")
        answers.send_object(None, source)
        answers.settle()

    # --- where the stage computes ---

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        """Context that counts its duration as time that training waits."""
        recorder, begin = self.recorder, time.perf_counter()
        yield
        end = time.perf_counter()
        self.exposed_seconds += end - begin
        if recorder is not None:
            recorder.add(What.MOVES, "layers that move", begin, end)

    def start(self) -> None:
        """Starts to send the weights. Called when they are those of the next step, unless user code
        changes them.
        """
        if self._work is not None:
            return
        with self._exposed():
            self._start()

    def _start(self) -> None:
        transfers = self._prepared.result()
        self._mark()
        self._work = [
            self._threads.submit(partial(self._send, self._lanes(), to, leaving))
            for to, leaving in transfers.outgoing.items()
        ]
        self._work += [
            self._threads.submit(partial(self._receive, self._lanes(), source, coming))
            for source, coming in transfers.incoming.items()
        ]

    def _lanes(self) -> tuple[Lane, Lane]:
        """For what moves, and for answers. Their stages are those of before the move."""
        channels = self._holdings.channels
        return channels.bulk(), channels.bulk(_ANSWERS)

    def _mark(self) -> None:
        """Records the end of the work queued so far, whose results threads may then read."""
        self._is_ready = record_event(self._device)

    def begin(self, keeps_gradients: bool) -> None:
        """Begins the step in which the layers change their owners.

        Args:
            keeps_gradients: whether gradients from before the step are still needed.
        """
        self.start()
        begin = time.perf_counter()
        # The step may use the copies from its first line.
        has_copies = self._holdings.pass_copies_on(self._stage_of)
        if has_copies:
            # Else nothing has been sent: the stage has only waited until the others begin the step,
            # as it would for its first payload.
            self.exposed_seconds += time.perf_counter() - begin
        with self._exposed():
            self._begin(keeps_gradients)

    def _begin(self, keeps_gradients: bool) -> None:
        holdings = self._holdings
        holdings.place(self._stage_of)
        for transfer in self._leaving():
            self._pack(transfer, keeps_gradients)
        with torch.no_grad(), flat_weights_forgotten(holdings.root):
            for transfer in self._arriving():
                if transfer.parameter is not None:
                    # Only its values are missing.
                    hold(transfer.parameter, transfer.values)
                    transfer.parameter.grad = None
                elif self._holdings.is_common is not None:
                    module, _ = self._holdings.layers[transfer.layers[0]]
                    self._make_place_for_buffers(module, self._holdings.is_common)
                for layer in transfer.layers:
                    self._awaited.setdefault(layer, []).append(transfer)
        self._has_begun = True
        self._settle()

    def _make_place_for_buffers(
        self, module: nn.Module, is_common: Callable[[Tensor], bool]
    ) -> None:
        """Gives a layer's buffers memory before the step: in it they have another class."""
        for buffer in module.buffers():
            if buffer.is_meta and not is_common(buffer):
                hold(buffer, self._buffer_like(buffer))

    def _arriving(self) -> list[_Transfer]:
        return [p for coming in self._prepared.result().incoming.values() for p in coming]

    def _leaving(self) -> list[_Transfer]:
        return [p for leaving in self._prepared.result().outgoing.values() for p in leaving]

    def _pack(self, transfer: _Transfer, keeps_gradients: bool) -> None:
        parameter = transfer.parameter
        if parameter is None:
            return
        transfer.state = {
            (index, name): value
            for index, optimizer in enumerate(self._optimizers)
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        if parameter.grad is not None and keeps_gradients:
            transfer.gradient = parameter.grad
        if self._holdings.stage not in self._holdings.holders_of(parameter):
            # From now on the gradient is on its way.
            parameter.grad = None

    def _settle(self) -> None:
        """The old owners have ended the step before."""
        for transfer in self._leaving():
            if transfer.parameter is None:
                module, _ = self._holdings.layers[transfer.layers[0]]
                transfer.values = self._holdings.state_of(module)
        self._mark()
        self._is_settled.set()

    def abandon(self) -> None:
        """Cancels the move: no layer changes its owner, and values already sent are discarded. Once
        the step has begun, the run is at its end, and nothing more is sent.
        """
        self._is_cancelled = True
        self._is_settled.set()

    def cancel(self) -> None:
        """Cancels the move on all stages, and returns when no transfer is in progress."""
        self.abandon()
        for work in self._work or ():
            work.result()

    @property
    def awaited(self) -> list[int]:
        """The layers that are on their way to this stage."""
        return list(self._awaited)

    def await_layer(self, layer: int) -> None:
        """Returns when a layer has arrived and can run.

        Args:
            layer: its number.

        Raises:
            StageFailedError: the old owner ended before it had sent the layer.
        """
        if layer not in self._awaited:
            return
        with self._exposed():
            for transfer in self._awaited.pop(layer):
                transfer.has_arrived.result()
                if transfer.parameter is None:
                    module, _ = self._holdings.layers[layer]
                    with torch.no_grad(), flat_weights_forgotten(module):
                        take_other_state(module, transfer.values)

    def finish(self) -> None:
        """Waits until everything has arrived, here and at the new owners; then frees the tensors
        that have moved away.

        Raises:
            StageFailedError: another stage ended before that.
        """
        for layer in list(self._awaited):
            # A layer that this step has not called.
            self.await_layer(layer)
        with self._exposed():
            for work in self._work or ():
                work.result()
            if not self._is_freed:
                self._free()

    def _free(self) -> None:
        """Unpacks what has arrived, and frees what has moved away."""
        self._is_freed = True
        for transfer in self._arriving():
            if transfer.parameter is not None:
                self._unpack(transfer, transfer.parameter)
        self._holdings.settle(self._optimizers, final=True, deferred=self._deferred)

    def _unpack(self, transfer: _Transfer, parameter: nn.Parameter) -> None:
        if transfer.gradient is not None:
            self._holdings.put_gradient_aside(parameter, transfer.gradient.to(self._device))
        for (index, name), value in transfer.state.items():
            self._optimizers[index].state[parameter][name] = value


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors are bitwise equal; a NaN is equal to itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if flat[0].numel() % 8 == 0:
        # Eight bytes at a time.
        flat = [tensor.view(torch.int64) for tensor in flat]
    return torch.equal(*flat)
