"""Models and tables for the tests of what happens between layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.model.execution.measure import Stopwatch
from lightning_pipeshift.model.gates.gate import CurrentPass, Gate, install, remove
from lightning_pipeshift.model.gates.layers import find_layers
from lightning_pipeshift.model.trace.placeholder import Placeholder, PlaceholderListener, spec_of
from lightning_pipeshift.model.trace.recorder import StreamSelector, record
from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.plan.inputs.flow import Value

CPU = torch.device("cpu")


class Model(nn.Module):
    """A LightningModule as far as following is concerned: parts, and a step that uses them."""

    def __init__(self, step: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.user_step = step
        for name, part in parts.items():
            setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def log(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the real log was called while following")

    log_dict = log


def linears(names: str, width: int = 4) -> dict[str, nn.Module]:
    return {name: nn.Linear(width, width) for name in names.split()}


def follow(
    model: nn.Module,
    *batch: Any,
    stopwatch: Stopwatch | None = None,
    streams: StreamSelector | None = None,
) -> Trace:
    """The trace of ``model.user_step(model, *batch)``."""
    current_pass = CurrentPass()
    gates = [
        Gate(name, layer, index, current_pass)
        for index, (name, layer) in enumerate(find_layers(model).items())
    ]
    install(gates)
    try:
        return record(
            lambda m: getattr(m, "user_step")(m, *batch),  # noqa: B009
            model,
            gates,
            current_pass,
            CPU,
            stopwatch,
            streams=streams,
        )
    finally:
        remove(gates)


def table(trace: Trace, model: nn.Module) -> list[str]:
    """A flow as lines: what each call needs, then the tail, the control, and where gradients flow.

    A value is written ``layer``, ``layer.leaf`` for later leaves, ``layer#call`` for later calls.
    """
    names = list(find_layers(model))
    flow = trace.flow
    lines = [
        f"{_name(Value(call.layer, call.call, 0), names)}: {_listed(call.needs, names)}"
        for call in flow.calls
    ]
    lines.append(f"tail: {_listed(flow.tail, names)}")
    for operation in flow.operations:
        made = " ".join(_name(value, names) for value, _ in operation.results)
        lines.append(f"{made}: {_listed(operation.needs, names)}")
    if flow.control:
        lines.append(f"control: {_listed(flow.control, names)}")
    lines.append(f"grad: {_listed(flow.differentiable, names)}")
    return [line.rstrip() for line in lines]


def payloads(trace: Trace, model: nn.Module) -> list[str]:
    """The values that cross each boundary, from the one before the first layer to the one after the
    last.
    """
    names = list(find_layers(model))
    return [_listed(trace.flow.payload(b), names) for b in range(len(names) + 1)]


def _listed(values: Iterable[Value], names: list[str]) -> str:
    return " ".join(_name(value, names) for value in sorted(values))


def _name(value: Value, names: list[str]) -> str:
    name = names[value.layer]
    if value.op:
        return f"{name}/{value.call}.{value.op}" + (f".{value.leaf}" if value.leaf else "")
    if value.call:
        name += f"#{value.call}"
    return name + (f".{value.leaf}" if value.leaf else "")


def placeholder(
    *shape: int, dtype: torch.dtype = torch.float32, layer: int = 0, like: Tensor | None = None
) -> Any:
    """The output of a layer that is elsewhere: a :class:`Placeholder`."""
    tensor = torch.empty(shape, dtype=dtype) if like is None else like
    return Placeholder.of(spec_of(tensor), CPU, [Value(layer, 0, 0)])


class Notes(PlaceholderListener):
    """A recorder that only takes notes, and so lets values be estimated."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, set[Value]]] = []
        self.writes: list[set[Value]] = []
        self.num_draws = 0
        self.shapes = 0

    def read(self, function: str, values: set[Value]) -> None:
        self.reads.append((function, set(values)))

    def written(self, tensor: Tensor, values: set[Value]) -> None:
        self.writes.append(set(values))

    def draws(self, draw: Callable[[], object]) -> None:
        self.num_draws += 1

    def shaped_by_batch(self) -> None:
        self.shapes += 1
