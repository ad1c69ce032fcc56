"""Traces the user's steps, once for each kind of step and shape of batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.model.execution.measure import Stopwatch
from lightning_pipeshift.model.gates.gate import CurrentPass, Gate
from lightning_pipeshift.model.trace.conditions import PlainValues
from lightning_pipeshift.model.trace.recorder import record
from lightning_pipeshift.model.trace.signature import ModuleSignature, batch_signature
from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.model.user_state.random_streams import START, Position, RandomStreams
from lightning_pipeshift.plan.inputs.flow import call_order, merged
from lightning_pipeshift.runtime.step.checksum import checksum
from lightning_pipeshift.runtime.step.training_batch import UserStep

_MOST_TRACES = 256
# How many microbatches are traced to find the position of layers that steps skip at random.
_MOST_DRAWS = 16

Key = tuple[int | str, ...]


class TraceCache:
    """The traces of one model's steps.

    Args:
        root: the LightningModule.
        gates: one for each layer, installed.
        current_pass: that of the gates.
        streams: the random generators; tracing draws the same numbers as running.
        device: the stage's device.
        before: called before a step is traced.
        in_step: makes the context of user code.
    """

    def __init__(
        self,
        root: nn.Module,
        gates: list[Gate],
        current_pass: CurrentPass,
        streams: RandomStreams,
        device: torch.device,
        before: Callable[[], None],
        in_step: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._in_step = in_step
        self.gates = gates
        self._before = before
        self._root = root
        self._current_pass = current_pass
        self._streams = streams
        self._device = device
        self._is_ordered = False
        self._traces: OrderedDict[Hashable, list[Trace]] = OrderedDict()
        """By signature, the traces of its steps, which differ in the branches that they take."""

    def trace(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        state: ModuleSignature,
        values: PlainValues,
    ) -> tuple[Trace, bool]:
        """Returns the trace of a step on a batch like this one, and whether it is new.

        Args:
            key: determines the microbatch's random streams; its second entry names the step.
            step: runs the user's step on a module and the batch.
            batch: one microbatch.
            state: the LightningModule's signature, the same for a whole step.
            values: on which the step may branch.
        """
        signature: tuple[Hashable, ...] = (key[1], batch_signature(batch), state)
        known = self._known(signature, values)
        if known is not None and known.is_shaped_by_batch:
            signature = (*signature, checksum(batch))
            known = self._known(signature, values)
        if known is not None and not known.is_drawn:
            return known, False
        fresh = self.follow(key, step, batch, values=values)
        self._keep(signature, fresh, values)
        return fresh, True

    def _known(self, signature: Hashable, values: PlainValues) -> Trace | None:
        traces = self._traces.get(signature, ())
        return next((trace for trace in traces if values.meet(trace.conditions)), None)

    def _keep(self, signature: Hashable, fresh: Trace, values: PlainValues) -> None:
        """Keeps a trace, in the place of one for the same steps."""
        others = [t for t in self._traces.get(signature, ()) if not values.meet(t.conditions)]
        self._traces[signature] = [fresh, *others][:_MOST_TRACES]
        if len(self._traces) > _MOST_TRACES:
            self._traces.popitem(last=False)

    def traces(self) -> list[Trace]:
        """The traces that are known."""
        return [trace for traces in self._traces.values() for trace in traces]

    def first(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        state: ModuleSignature,
        stopwatch: Stopwatch | None,
    ) -> Trace:
        """Returns the trace of the first step of a run. Sorts the gates by the order in which it
        calls their layers.
        """
        signature: tuple[Hashable, ...] = (key[1], batch_signature(batch), state)
        trace = self.follow(key, step, batch, stopwatch)
        flows = [trace.flow]
        while trace.is_drawn and len(flows) < _MOST_DRAWS:
            # Other microbatches show the position of layers that this one skips at random.
            called = {call.layer for flow in flows for call in flow.calls}
            if len(called) == len(self.gates):
                break
            flows.append(self.follow((*key, "order", len(flows)), step, batch).flow)
        order = call_order([call.layer for call in merged(flows).calls], len(self.gates))
        place_of = sorted(range(len(order)), key=order.__getitem__)
        self.gates = [self.gates[index] for index in order]
        for index, gate in enumerate(self.gates):
            gate.index = index
        if place_of != sorted(place_of):
            # Other stages compute what they have between the layers.
            self._traces.clear()
        self._is_ordered = True
        if stopwatch is not None:
            stopwatch.renumber(place_of)
        trace = trace.renumbered(place_of)
        values = PlainValues(self._root, step.arguments)
        self._keep(signature, trace, values)
        if trace.is_shaped_by_batch:
            self._keep((*signature, checksum(batch)), trace, values)
        return trace

    def follow(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        stopwatch: Stopwatch | None = None,
        values: PlainValues | None = None,
    ) -> Trace:
        """Traces a step on a batch, without the cache."""
        self._before()

        def run(root: nn.Module, *arguments: Any) -> Any:
            return step.run(root, batch, *arguments)

        watched = _Watched(self._streams)

        def begin() -> None:
            self._streams.begin(*key)

        with self._streams.switched(*key), self._in_step():
            trace = record(
                run,
                self._root,
                self.gates,
                self._current_pass,
                self._device,
                stopwatch,
                begin,
                watched,
                values or PlainValues(self._root, step.arguments),
                self._is_ordered,
            )
            # The layers that are called may depend on random numbers drawn between them.
            trace.is_drawn |= watched.has_drawn
            trace.draws_on_host = watched.has_drawn or self._streams.has_drawn_on_host()
        return trace


class _Watched:
    """Random streams, and whether code between layers has drawn from those of the host.

    Args:
        streams: the streams.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self.has_drawn = False

    def go_to(self, position: Position) -> None:
        """See :meth:`RandomStreams.go_to`."""
        self.has_drawn |= position != START and self._streams.has_drawn_on_host()
        self._streams.go_to(position)

    def torch_states(self) -> list[Tensor]:
        """See :meth:`RandomStreams.torch_states`."""
        return self._streams.torch_states()
