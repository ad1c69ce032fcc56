"""The flow of one forward pass, as a value: the layers that it calls, the operations between them,
and the earlier values that each of them needs.

The payload of every possible boundary follows from it: every value that was computed before the
boundary and is needed after it. A flow holds no tensor and does not depend on the placement: the
same flow serves every split, so moving a layer never needs a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import prod
from typing import NamedTuple


class Value(NamedTuple):
    """One tensor of a pass, identified by the position of its computation.

    Either leaf number ``leaf`` of the result of the ``call``-th call of ``layer`` (``op`` is 0). Or
    the result of operation number ``op`` in the code before the pass's ``call``-th call of any
    layer; then ``layer`` is the last one that its inputs depend on, on whose stage it is computed.
    """

    layer: int
    call: int
    leaf: int
    op: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and type of a tensor; enough to allocate the buffer that receives it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are sent when this tensor crosses a boundary."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer, in call order.

    Args:
        layer: the layer's index.
        call: 0 for the layer's first call in the pass. A layer may be called again; with results of
            later layers only if these are on the same stage.
        leaves: one entry for each leaf of the returned structure, ``None`` for a leaf that is no
            tensor.
        needs: the values from which the call's inputs were computed, outside of layers.
    """

    layer: int
    call: int
    leaves: tuple[TensorSpec | None, ...]
    needs: frozenset[Value]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the code between layers, on values that are not on every stage.

    Args:
        layer: the last layer that its inputs depend on; the stage of that layer computes it.
        interval: how many calls of layers come before it in the pass.
        number: 1 for the first operation of the interval.
        results: the tensors that it creates or writes to, and how to receive them.
        needs: the values that it needs.
    """

    layer: int
    interval: int
    number: int
    results: tuple[tuple[Value, TensorSpec], ...]
    needs: frozenset[Value]


@dataclass(frozen=True, slots=True)
class Flow:
    """The record of one forward pass of a whole step.

    Args:
        calls: the layers' calls, in order.
        tail: the values that the code after the last layer needs: the loss, what it logs, what it
            returns.
        control: the values that user code reads on the host (``if h.mean() > 0``): every later
            stage runs that code too, so these are part of every later payload.
        differentiable: the values through which a gradient flows back from the loss.
        operations: those of the code between layers on such values, in order.
    """

    calls: tuple[Call, ...]
    tail: frozenset[Value]
    control: frozenset[Value]
    differentiable: frozenset[Value]
    operations: tuple[Operation, ...] = ()

    def payload(self, boundary: int) -> tuple[Value, ...]:
        """The values that cross the boundary before layer ``boundary``, in a fixed order.

        These are computed before it, and needed after it. Boundary 0 carries nothing; the boundary
        after the last layer carries the values that the tail needs.
        """
        needed = set(self.tail | self.control)
        for call in self.calls:
            if call.layer >= boundary:
                needed |= call.needs
        for operation in self.operations:
            if operation.layer >= boundary:
                needed |= operation.needs
        return tuple(sorted(value for value in needed if value.layer < boundary))

    def spec(self, value: Value) -> TensorSpec:
        """Shape, strides and type of a value of this pass."""
        for operation in self.operations if value.op else ():
            if (operation.interval, operation.number) == (value.call, value.op):
                return dict(operation.results)[value]
        for call in self.calls:
            if (call.layer, call.call) == (value.layer, value.call):
                spec = call.leaves[value.leaf] if not value.op else None
                assert spec is not None, value
                return spec
        raise KeyError(value)

    def payload_bytes(self, boundary: int) -> int:
        """Bytes that cross the boundary before layer ``boundary``."""
        return sum(self.spec(value).num_bytes for value in self.payload(boundary))


def renumbered(flow: Flow, place_of: Sequence[int]) -> Flow:
    """The same flow with other indices of the layers.

    Args:
        flow: the flow.
        place_of: the new index of each layer.
    """

    def value(old: Value) -> Value:
        return old._replace(layer=place_of[old.layer])

    def values(old: frozenset[Value]) -> frozenset[Value]:
        return frozenset(map(value, old))

    return Flow(
        tuple(
            replace(call, layer=place_of[call.layer], needs=values(call.needs))
            for call in flow.calls
        ),
        values(flow.tail),
        values(flow.control),
        values(flow.differentiable),
        tuple(
            replace(
                operation,
                layer=place_of[operation.layer],
                needs=values(operation.needs),
                results=tuple((value(made), spec) for made, spec in operation.results),
            )
            for operation in flow.operations
        ),
    )


def call_order(calls: Iterable[int], num_layers: int) -> list[int]:
    """The order in which ``num_layers`` layers (numbered as found in the module tree) are called
    first. A layer that is not called remains after its predecessor in the module tree.

    Args:
        calls: the layer of each call.
        num_layers: how many layers there are.
    """
    order = list(dict.fromkeys(calls))
    for layer in range(num_layers):
        if layer not in order:
            order.insert(order.index(layer - 1) + 1 if layer - 1 in order else 0, layer)
    return order


def merged(flows: Sequence[Flow]) -> Flow:
    """A flow that only calls layers: each layer that any of the flows calls, once, in an order that
    agrees with all of them; otherwise undetermined positions are in the order of the indices.

    Steps that skip layers at random call only some of them each time. If no order agrees with all
    flows, the order is that of the first flow.
    """
    after: dict[int, set[int]] = {}
    for flow in flows:
        calls = [call.layer for call in flow.calls]
        for layer in calls:
            after.setdefault(layer, set())
        for before, layer in pairwise(calls):
            if before != layer:
                after[before].add(layer)
    num_before = dict.fromkeys(after, 0)
    for later in after.values():
        for layer in later:
            num_before[layer] += 1
    ready = [layer for layer, count in num_before.items() if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heappop(ready))
        for layer in after[order[-1]]:
            num_before[layer] -= 1
            if not num_before[layer]:
                heappush(ready, layer)
    if len(order) < len(after):
        return flows[0]
    empty: frozenset[Value] = frozenset()
    return Flow(tuple(Call(layer, 0, (), empty) for layer in order), empty, empty, empty)
