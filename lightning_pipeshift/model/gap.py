"""What the code between the layers saves for its backward.

It is the user's, runs on the stage of the layer that it stands in front of, and saves tensors like
any other: an activation function between two layers its output, a loss the logarithms of all
probabilities. They count for that layer, and may move as its own do; only, a layer that runs again
does not make them.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_pipeshift.model.hooks import saving, top_hooks
from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.saved import Observer, Saved, SavedTable, address_of
from lightning_pipeshift.plan.saved_tensors import BEHIND, FRONT


class Gap:
    """Where the code between the layers is, in one microbatch's forward.

    The graph refers to it, so it refers to nothing that holds the graph.

    Args:
        table: what the microbatch has saved.
        observer: notes what is saved, where somebody wants to know.
        resident: addresses of what the model has anyway.
    """

    def __init__(self, table: SavedTable, observer: Observer | None, resident: Set[int]) -> None:
        self._table = table
        self._observer = observer
        self._resident = resident
        self._layer = 0
        self._number = FRONT

    def in_front_of(self, layer: int) -> None:
        """From here on, code in front of a layer runs."""
        self._layer, self._number = layer, FRONT

    def behind(self, layer: int) -> None:
        """From here on, code behind the last layer runs."""
        self._layer, self._number = layer, BEHIND

    def watched(self) -> AbstractContextManager[Any]:
        """Context in which what is saved outside of layers is under our hands."""
        return saving(self._pack, _unpacked)

    def is_undisturbed(self) -> bool:
        """Whether nobody else has to say in what is saved for the backward."""
        top = top_hooks()
        return top is None or top[0] == self._pack

    def _pack(self, tensor: Tensor) -> Saved | Placeholder:
        if isinstance(tensor, Placeholder):
            # A model that checkpoints by itself saves what a skipped layer is called with.
            return tensor
        number, self._number = self._number, self._number + 1
        if self._observer is not None:
            is_there = self._table.is_there_anyway(address_of(tensor), self._resident)
            maker = f"code {'in front' if number < BEHIND else 'behind'}"
            self._observer.note(tensor, self._layer, number, maker, is_there)
        return self._table.save(tensor, self._layer, number, self._resident, makes_room=True)


def _unpacked(held: Saved | Placeholder) -> Tensor:
    return held if isinstance(held, Placeholder) else held.get()
