"""What one forward pass does, as a value: which layers it calls, and which earlier outputs each
call needs.

The payload of every possible boundary follows from it. A flow holds no tensor and knows no
placement: the same flow serves every split, so moving a layer never needs a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class Value(NamedTuple):
    """One tensor that a layer returned: leaf number ``leaf`` of what its ``call``-th call in the
    pass returned.
    """

    layer: int
    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and type of a tensor; enough to allocate the buffer that receives it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Bytes that travel when this tensor crosses a boundary."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer, in call order.

    Args:
        layer: the layer's index.
        call: 0 for the layer's first call in the pass. A layer may be called again only directly
            after itself.
        leaves: one entry for each leaf of the returned structure, ``None`` for a leaf that is no
            tensor.
        needs: the values that the call's inputs were made from, outside of layers.
    """

    layer: int
    call: int
    leaves: tuple[TensorSpec | None, ...]
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
    """

    calls: tuple[Call, ...]
    tail: frozenset[Value]
    control: frozenset[Value]
    differentiable: frozenset[Value]

    def positions(self, layers: range) -> range:
        """The range of calls that belong to a contiguous range of layers (empty for an empty one).

        An empty range stands where its first call would: after every call of an earlier layer.
        """
        first = sum(1 for call in self.calls if call.layer < layers.start)
        stop = sum(1 for call in self.calls if call.layer < layers.stop)
        return range(first, max(first, stop))

    def payload(self, boundary: int) -> tuple[Value, ...]:
        """The values that cross the boundary in front of layer ``boundary``, in a fixed order.

        Made before it, needed by anything after it. Boundary 0 carries nothing; the boundary after
        the last layer carries what the tail needs.
        """
        needed = set(self.tail | self.control)
        for call in self.calls:
            if call.layer >= boundary:
                needed |= call.needs
        return tuple(sorted(value for value in needed if value.layer < boundary))

    def spec(self, value: Value) -> TensorSpec:
        """Shape, strides and type of a value of this pass."""
        for call in self.calls:
            if (call.layer, call.call) == (value.layer, value.call):
                spec = call.leaves[value.leaf]
                assert spec is not None, value
                return spec
        raise KeyError(value)

    def payload_bytes(self, boundary: int) -> int:
        """Bytes that cross the boundary in front of layer ``boundary``."""
        return sum(self.spec(value).num_bytes for value in self.payload(boundary))


def call_order(flows: Sequence[Flow], num_layers: int) -> list[int]:
    """The order of ``num_layers`` layers (numbered as found in the module tree) that the flows call
    them in.

    The first flow decides; layers that only a later flow calls come in where that flow calls them,
    directly after the layer called before them. A layer that no flow calls stays behind its
    predecessor in the module tree.
    """
    order: list[int] = []
    for flow in flows:
        previous: int | None = None
        for call in flow.calls:
            if call.layer not in order:
                order.insert(0 if previous is None else order.index(previous) + 1, call.layer)
            previous = call.layer
    for layer in range(num_layers):
        if layer not in order:
            order.insert(order.index(layer - 1) + 1 if layer - 1 in order else 0, layer)
    return order
