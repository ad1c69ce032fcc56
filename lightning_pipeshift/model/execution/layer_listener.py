"""The interface for those who take an interest in the layers that a stage runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pipeshift.model.gates.gate import Gate


class LayerListener:
    """Is told of the stage's own layers, in the passes for which it is registered. A pass without
    listeners calls none.
    """

    def enter(self, gate: Gate, arguments: Any) -> None:
        """A layer is about to run.

        Args:
            gate: the layer's.
            arguments: a structure of its positional and keyword arguments.
        """

    def leave(self, gate: Gate, arguments: Any, results: Sequence[Any]) -> None:
        """A layer has run.

        Args:
            gate: the layer's.
            arguments: as for :meth:`enter`.
            results: the leaves of what it returned, and its side outputs.
        """
