"""Handles the tensors that the code between layers saves for its backward.

This is user code, and saves tensors as layers do: an activation function between two layers saves
its output, a loss the logarithms of all probabilities. They count for the layer that has run last,
and may be offloaded like its own saved tensors; but recomputing the layer does not recompute them.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_pipeshift.model.saved.hooks import saving
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.saved_tensors import Saved, SavedTable
from lightning_pipeshift.plan.inputs.saved_tensors import BEHIND, FRONT


class BetweenLayers:
    """The position of the code between layers, in one microbatch's forward.

    The graph refers to this object, so it must not refer to anything that holds the graph.

    Args:
        table: the microbatch's saved tensors.
        observer: records saved tensors, if needed.
        resident: addresses of the model's own tensors.
        first: the first layer of the stage, for which code before all layers counts.
    """

    def __init__(
        self, table: SavedTable, observer: Observer | None, resident: Set[int], first: int
    ) -> None:
        self._table = table
        self._observer = observer
        self._resident = resident
        self._layer, self._number = first, FRONT

    def behind(self, layer: int) -> None:
        """Called when code after a layer starts to run."""
        self._layer, self._number = layer, BEHIND

    def watched(self) -> AbstractContextManager[Any]:
        """Context in which PipeShift's hooks handle the tensors saved outside of layers."""
        return saving(self._pack, Saved.get)

    def _pack(self, tensor: Tensor) -> Saved:
        number, self._number = self._number, self._number + 1
        if self._observer is not None:
            is_there = self._table.is_there_anyway(tensor, self._resident)
            maker = f"code {'in front' if number < BEHIND else 'behind'}"
            self._observer.note(tensor, self._layer, number, maker, is_there)
        return self._table.save(tensor, self._layer, number, self._resident, makes_room=True)
