"""The findings of PipeShift about a model after tracing a step: its layers, the payloads of the
boundaries between them, and the code between them.

All numbers are those of the first microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.plan.inputs.flow import Value
from lightning_pipeshift.plan.partition.boundaries import possible_cuts
from lightning_pipeshift.runtime.step.pipeline import Pipeline

END_OF_STEP = "the end of the step"
"""The code that computes the loss, the logged values and the step's result."""


@dataclass(frozen=True)
class FoundLayer:
    """A layer.

    Args:
        name: in the LightningModule.
        kind: the name of its class.
        num_parameters: how many numbers its parameters hold.
        parameter_bytes: their bytes.
        forward_seconds: the time of its forward; ``None`` if no run has measured it.
        is_called: whether the step calls it.
    """

    name: str
    kind: str
    num_parameters: int
    parameter_bytes: int
    forward_seconds: float | None = None
    is_called: bool = True


@dataclass(frozen=True)
class FoundTensor:
    """A tensor that crosses a boundary.

    Args:
        layer: the layer that returned it, or after which it was computed.
        function: the function that computed it, in the code after that layer; ``None`` for an
            output of the layer itself.
        needed_by: the later layers that take it; ``"code behind NAME"`` for code between layers
            that computes with it; ``"conditions"`` for code that reads it on every stage; and
            :data:`END_OF_STEP`.
        shape: its shape.
        dtype: its type.
        num_bytes: its bytes.
        has_gradient: whether its gradient is sent back.
    """

    layer: str
    function: str | None
    needed_by: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    has_gradient: bool


@dataclass(frozen=True)
class FoundBoundary:
    """The point between two neighbouring layers, and the payload that crosses it.

    Args:
        before: the layer before it.
        after: the layer after it.
        payload: the tensors that cross it, if the model is cut here.
    """

    before: str
    after: str
    payload: tuple[FoundTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that cross it in a forward."""
        return sum(tensor.num_bytes for tensor in self.payload)


@dataclass(frozen=True)
class FoundCode:
    """Code between two layers that computes with the outputs of layers.

    Args:
        after: the layer before it; ``None`` for code before all layers.
        before: the layer after it; ``None`` for the end of the step.
        functions: how often it calls each function of torch on values that one stage has.
        is_open: whether it branches on values (``if x.mean() > 0``), so that the code after the
            branch runs on every stage that needs its results, and not once.
    """

    after: str | None
    before: str | None
    functions: Mapping[str, int]
    is_open: bool


@dataclass(frozen=True)
class Findings:
    """The findings about a model.

    Args:
        layers: in call order; those that the step does not call are last.
        boundaries: between neighbouring layers that the step calls, in the same order.
        code: between layers, in order; without entries for intervals that have no code.
        shared: parameters that several layers use, or code between layers: several stages may hold
            them.
        written: parameters, buffers and attributes outside of layers that the step writes to with
            values that one stage has.
        num_flows: how many different flows the microbatches had, usually because of their shapes.
        is_shaped_by_batch: whether shapes depend on the batch's values (``x[mask]``), so that each
            batch is traced separately.
        is_drawn: whether random numbers decide which layers are called, so that each microbatch is
            traced separately.
        possible_cuts: the boundaries that may be cut, each as the number of layers before it:
            layers that are called in turn, each on results of the other, remain together. ``None``:
            all.
    """

    layers: tuple[FoundLayer, ...]
    boundaries: tuple[FoundBoundary, ...] = ()
    code: tuple[FoundCode, ...] = ()
    shared: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    num_flows: int = 0
    is_shaped_by_batch: bool = False
    is_drawn: bool = False
    possible_cuts: frozenset[int] | None = None

    @property
    def together(self) -> list[tuple[str, str]]:
        """The first and the last layer of each range that has to be on one stage."""
        if self.possible_cuts is None:
            return []
        ends = [0, *sorted(self.possible_cuts), len(self.layers)]
        return [
            (self.layers[begin].name, self.layers[end - 1].name)
            for begin, end in pairwise(ends)
            if end - begin > 1
        ]


def layers_of(modules: Mapping[str, nn.Module]) -> tuple[FoundLayer, ...]:
    """The findings on layers before any step has called them."""
    return tuple(
        FoundLayer(
            name,
            type(module).__name__,
            sum(p.numel() for p in module.parameters()),
            sum(p.numel() * p.element_size() for p in module.parameters()),
        )
        for name, module in modules.items()
    )


def findings_of(pipeline: Pipeline) -> Findings:
    """The findings of a pipeline after its first training step."""
    seconds = {layer.name: layer.forward_seconds for layer in pipeline.plan.layers}
    traces = pipeline.traces
    if not traces:
        return Findings(layers_of(pipeline.layers))
    trace, names = traces[0], list(pipeline.layers)
    called = {call.layer for call in trace.flow.calls}
    layers = tuple(
        FoundLayer(
            layer.name,
            layer.kind,
            layer.num_parameters,
            layer.parameter_bytes,
            seconds[layer.name] or None,
            number in called,
        )
        for number, layer in enumerate(layers_of(pipeline.layers))
    )
    in_order = sorted(called)
    boundaries = tuple(
        FoundBoundary(
            names[before],
            names[after],
            tuple(_tensor(trace, value, after, names) for value in trace.flow.payload(after)),
        )
        for before, after in pairwise(in_order)
    )
    possible = possible_cuts(trace.flow, len(names))
    uses = pipeline.holdings.uses if pipeline.holdings is not None else []
    return Findings(
        layers,
        boundaries,
        _code(trace, names),
        tuple(use.name for use in uses if use.is_shared),
        tuple(sorted(".".join(filter(None, place)) for place in trace.state)),
        len(traces),
        any(trace.is_shaped_by_batch for trace in traces),
        any(trace.is_drawn for trace in traces),
        None if len(possible) == len(names) - 1 else possible,
    )


def _tensor(trace: Trace, value: Value, boundary: int, names: list[str]) -> FoundTensor:
    flow, spec = trace.flow, trace.spec(value)
    needed_by = [
        names[call.layer] for call in flow.calls if call.layer >= boundary and value in call.needs
    ]
    needed_by += [
        _place(trace, operation.interval, names)
        for operation in flow.operations
        if operation.layer >= boundary and value in operation.needs
    ]
    if value in flow.control:
        needed_by.append("conditions")
    if value in flow.tail:
        needed_by.append(END_OF_STEP)
    entry = trace.entries.get((value.call, value.op)) if value.op else None
    return FoundTensor(
        names[value.layer],
        entry.name if entry is not None else None,
        tuple(dict.fromkeys(needed_by)),
        spec.shape,
        spec.dtype,
        spec.num_bytes,
        value in flow.differentiable,
    )


def _place(trace: Trace, interval: int, names: list[str]) -> str:
    calls = trace.flow.calls
    if interval == len(calls):
        return END_OF_STEP
    return (
        f"code behind {names[calls[interval - 1].layer]}"
        if interval
        else "code in front of all layers"
    )


def _code(trace: Trace, names: list[str]) -> tuple[FoundCode, ...]:
    functions: dict[int, Counter[str]] = {}
    for (interval, _), entry in sorted(trace.entries.items()):
        functions.setdefault(interval, Counter())[entry.name] += 1
    called = [names[call.layer] for call in trace.flow.calls]
    return tuple(
        FoundCode(
            called[interval - 1] if interval else None,
            called[interval] if interval < len(called) else None,
            dict(functions.get(interval, {})),
            interval in trace.open_intervals,
        )
        for interval in sorted(functions.keys() | trace.open_intervals)
    )
