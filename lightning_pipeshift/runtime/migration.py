"""Layers on their way to new owners, beside the step in which those run them first.

CN115454655A lets the weights of moving layers travel in threads and on connections of their own,
while both stages compute. In a synchronous schedule the new owner's first forward needs the weights
as the last optimizer step has left them; so they travel first, in the order in which they are
needed, and a gate waits for its own layer alone. What optimizers keep, of which the patent is
silent, and gradients that are being accumulated are not needed before the step's end: they travel
behind its compute. The old owner lets go of nothing before the new one says that it has everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.model.deferred import Deferred
from lightning_pipeshift.model.parameters import (
    flat_weights_forgotten,
    hold,
    other_state,
    take_other_state,
)
from lightning_pipeshift.runtime.holdings import Holdings
from lightning_pipeshift.runtime.staging import room_for
from lightning_pipeshift.runtime.threads import Threads

_GRADIENT = (-1, "gradient")


class _Way(NamedTuple):
    """From one stage to another."""

    source: int
    to: int


@dataclass
class _Parcel:
    """A parameter, or what a layer keeps besides, on its way.

    Args:
        layers: those that need it at the new owner, in call order.
        parameter: the parameter; ``None`` for what a layer keeps besides.
        values: at the old owner, what the new one needs first; at the new one, where it is put.
        state: what the new one needs at the end of the step: the gradient, and what optimizers
            keep, each under the optimizer's index and a name.
        has_arrived: done when ``values`` is there.
    """

    layers: list[int]
    parameter: nn.Parameter | None
    values: Any = None
    state: dict[tuple[int, Any], Any] = field(default_factory=dict)
    has_arrived: Future[None] = field(default_factory=Future)


class Migration:
    """One stage's part in a change of owners, from the beginning of a step to its end.

    Every stage of the virtual machine makes one, between the same steps.

    Args:
        holdings: what the stage holds.
        stage_of: the new stage of each layer.
        optimizers: the same ones on every stage.
        keeps_gradients: whether gradients from before the step are still needed.
        threads: where to wait for others.
    """

    def __init__(
        self,
        holdings: Holdings,
        stage_of: Sequence[int],
        optimizers: Sequence[Optimizer],
        keeps_gradients: bool,
        threads: Threads,
    ) -> None:
        self._holdings = holdings
        self._optimizers = optimizers
        self._keeps_gradients = keeps_gradients
        self._device = holdings.channels.device
        # What is sent may still be under way on the device.
        self._is_ready = None
        self._stream: Any = None
        if self._device.type == "cuda":
            self._is_ready = torch.cuda.Event()
            self._is_ready.record()
            self._stream = torch.cuda.Stream(self._device)
        outgoing, incoming = self._parcels(stage_of)
        self._arriving = [parcel for parcels in incoming.values() for parcel in parcels]
        with torch.no_grad(), flat_weights_forgotten(holdings.root):
            for parcel in self._arriving:
                self._make_room(parcel)
        self._work = [
            threads.submit(partial(self._send, to, parcels)) for to, parcels in outgoing.items()
        ]
        self._work += [
            threads.submit(partial(self._receive, source, parcels))
            for source, parcels in incoming.items()
        ]
        self._awaited: dict[int, list[_Parcel]] = {}
        for parcel in self._arriving:
            for layer in parcel.layers:
                self._awaited.setdefault(layer, []).append(parcel)

    def _parcels(
        self, stage_of: Sequence[int]
    ) -> tuple[dict[int, list[_Parcel]], dict[int, list[_Parcel]]]:
        """What leaves this stage, by where it goes, and what comes, by where it comes from; in the
        order in which it is needed.
        """
        holdings, here = self._holdings, self._holdings.stage
        before = holdings.all_holders()
        holdings.place(stage_of)
        found: list[tuple[int, int, _Way]] = []
        for number, (old, new) in enumerate(zip(before, holdings.all_holders(), strict=True)):
            for to in new:
                if to not in old:
                    first = min(self._layers_of(number, to, stage_of))
                    found.append((first, number, _Way(old[0], to)))
        outgoing: dict[int, list[_Parcel]] = {}
        incoming: dict[int, list[_Parcel]] = {}
        for _, number, way in sorted(found):
            layers = self._layers_of(number, way.to, stage_of)
            if here == way.source:
                outgoing.setdefault(way.to, []).append(self._packed(number, layers))
            elif here == way.to:
                parcel = _Parcel(layers, self._parameter(number))
                incoming.setdefault(way.source, []).append(parcel)
        for parcels in outgoing.values():
            for parcel in parcels:
                parameter = parcel.parameter
                if parameter is not None and here not in holdings.holders_of(parameter):
                    # It is under way from here on.
                    parameter.grad = None
        return outgoing, incoming

    def _layers_of(self, number: int, stage: int, stage_of: Sequence[int]) -> list[int]:
        """The layers of a stage that need a thing."""
        uses = self._holdings.uses
        if number >= len(uses):
            return [number - len(uses)]
        return [layer for layer in uses[number].layers if stage_of[layer] == stage]

    def _parameter(self, number: int) -> nn.Parameter | None:
        uses = self._holdings.uses
        return uses[number].parameter if number < len(uses) else None

    def _packed(self, number: int, layers: list[int]) -> _Parcel:
        parameter = self._parameter(number)
        if parameter is None:
            layer, _ = self._holdings.layers[number - len(self._holdings.uses)]
            return _Parcel(layers, None, other_state(layer))
        state: dict[tuple[int, Any], Any] = {
            (index, name): value
            for index, optimizer in enumerate(self._optimizers)
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        if parameter.grad is not None and self._keeps_gradients:
            state[_GRADIENT] = parameter.grad
        return _Parcel(layers, parameter, parameter.detach(), state)

    def _make_room(self, parcel: _Parcel) -> None:
        """Gives an arriving parameter its memory, so that nothing but its values is missing."""
        if parcel.parameter is not None:
            like = parcel.parameter
            room = room_for(tuple(like.shape), like.dtype) if self._device.type == "cpu" else None
            if room is None:
                room = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            hold(like, room)
            like.grad = None
            parcel.values = like.detach()

    # --- in threads ---

    def _beside(self) -> AbstractContextManager[Any]:
        """Context of copies to and from the device."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _send(self, to: int, parcels: Iterable[_Parcel]) -> None:
        lane = self._holdings.channels.bulk()
        parcels = list(parcels)
        with torch.no_grad(), self._beside():
            if self._is_ready is not None:
                self._stream.wait_event(self._is_ready)
            for parcel in parcels:
                if parcel.parameter is not None:
                    lane.send_tensor(parcel.values, to)
                else:
                    lane.send_values(parcel.values, to)
            for parcel in parcels:
                if parcel.parameter is not None:
                    lane.send_values(parcel.state, to)
        lane.receive_object(to)

    def _receive(self, source: int, parcels: Iterable[_Parcel]) -> None:
        lane = self._holdings.channels.bulk()
        parcels = list(parcels)
        try:
            with torch.no_grad(), self._beside():
                for parcel in parcels:
                    if parcel.parameter is None:
                        parcel.values = {
                            name: value.to(self._device) if isinstance(value, Tensor) else value
                            for name, value in lane.receive_values(source)
                        }
                    elif self._device.type == "cpu":
                        lane.receive_into(parcel.values, source)
                    else:
                        parcel.values.copy_(lane.receive_tensor(parcel.values, source))
                    if self._stream is not None:
                        self._stream.synchronize()
                    parcel.has_arrived.set_result(None)
                for parcel in parcels:
                    if parcel.parameter is not None:
                        parcel.state = dict(lane.receive_values(source))
        except BaseException as error:
            for parcel in parcels:
                if not parcel.has_arrived.done():
                    parcel.has_arrived.set_exception(error)
            raise
        lane.send_object(None, source)
        lane.settle()

    # --- where the stage computes ---

    def await_layer(self, layer: int) -> None:
        """Returns when a layer has what it needs to run.

        Raises:
            StageFailedError: the old owner ended before it had sent it.
        """
        for parcel in self._awaited.pop(layer, ()):
            parcel.has_arrived.result()
            if parcel.parameter is None:
                module, _ = self._holdings.layers[layer]
                with torch.no_grad(), flat_weights_forgotten(module):
                    take_other_state(module, parcel.values)

    def finish(self, deferred: Deferred) -> None:
        """Returns when everything has arrived, here and at the new owners; lets go of what has
        left.

        Args:
            deferred: see :meth:`Holdings.settle`.

        Raises:
            StageFailedError: another stage ended before that.
        """
        for layer in list(self._awaited):
            # One that this step has not called.
            self.await_layer(layer)
        for work in self._work:
            work.result()
        for parcel in self._arriving:
            for (index, name), value in parcel.state.items():
                assert parcel.parameter is not None
                if (index, name) != _GRADIENT:
                    self._optimizers[index].state[parcel.parameter][name] = value
                else:
                    gradient: Tensor = value.to(self._device)
                    self._holdings.put_gradient_aside(parcel.parameter, gradient)
        self._holdings.settle(self._optimizers, final=True, deferred=deferred)
