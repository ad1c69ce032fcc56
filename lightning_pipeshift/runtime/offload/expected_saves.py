"""The bytes of tensors that a stage's next layers and forwards are expected to save for backwards,
from its place in its row of a schedule and from the bytes that each layer has saved so far.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from itertools import accumulate

from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row


class ExpectedSaves:
    """The bytes that a stage's next layers and forwards save."""

    def __init__(self) -> None:
        # Those of each layer: measured, or else expected by the plan.
        self._layers = ChainMap[int, int]({}, {})
        self._forward_bytes = 0
        self.begin_step(())
        # The last layer that has started in the current action.
        self._layer = -1

    def follow(self, expected_bytes: Mapping[int, int]) -> None:
        """Takes the bytes that a plan expects each layer to save."""
        self._layers.maps[1] = dict(expected_bytes)

    def begin_step(self, row: Row) -> None:
        """Called with the actions of a step, and those behind it that are known."""
        self._row, self._place = row, 0
        self._backward_at = {
            action.microbatch: place
            for place, action in enumerate(row)
            if action.kind is Kind.BACKWARD
        }
        # Before each place.
        self._num_forwards = [0, *accumulate(action.kind is Kind.FORWARD for action in row)]

    def begin_action(self, place: int) -> None:
        """Called when an action starts, with its index in the row."""
        self._place, self._layer = place, -1

    def begin_layer(self, layer: int) -> int:
        """Called when a layer starts; returns the bytes that it is expected to save."""
        self._layer = layer
        return self._layers.get(layer, 0)

    def end_layer(self, layer: int, saved_bytes: int) -> None:
        """Called with the bytes that a layer has saved."""
        self._layers[layer] = max(self._layers.maps[0].get(layer, 0), saved_bytes)

    def end_forward(self, saved_bytes: int) -> None:
        """Called with the bytes that a forward has saved."""
        self._forward_bytes = max(self._forward_bytes, saved_bytes)

    @property
    def action(self) -> Action | None:
        """The current action."""
        return self._row[self._place] if self._place < len(self._row) else None

    @property
    def largest_layer_bytes(self) -> int:
        """The most that a layer saves."""
        return max(self._layers.values(), default=0)

    def bytes_before_backward(self, microbatch: int) -> int | None:
        """The bytes to leave free for forwards that run before a microbatch's backward; ``None`` if
        it is too early to prefetch what that needs.
        """
        end = self._backward_at.get(microbatch, -1)
        if end < self._place:
            return 0
        current = self._row[self._place]
        num_forwards = self._num_forwards[end] - self._num_forwards[self._place]
        if num_forwards > 1 or current == Action(Kind.FORWARD, microbatch):
            return None
        if num_forwards and current.kind is Kind.FORWARD:
            # The forward has started. Blocks of its earlier layers are already counted, and memory
            # for the current layer is reserved.
            return sum(size for layer, size in self._layers.items() if layer > self._layer)
        return num_forwards * self._forward_bytes
