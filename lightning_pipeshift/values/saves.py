"""Where the tensors are that autograd saves for the backward of a microbatch, on one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from lightning_pipeshift.model.gates.gate import Gate
from lightning_pipeshift.model.saved.hooks import are_alone
from lightning_pipeshift.model.saved.recompute import RecomputedRegion
from lightning_pipeshift.model.saved.saved_tensors import SavedTable


class Saves:
    """What autograd saves of one microbatch's step on one stage.

    Args:
        gates: those of the layers, by their numbers.
        recompute: the layers that drop what they have saved, and run again before their backward,
            with the numbers of the tensors that they do not drop.
    """

    def __init__(self, gates: Sequence[Gate], recompute: Mapping[int, Set[int]]) -> None:
        self._gates, self.recompute = gates, recompute
        self._table = SavedTable()
        self._regions: list[RecomputedRegion] = []

    def layer(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a layer.

        Args:
            number: its number.
            forward: runs it.
            args: its arguments.
            kwargs: likewise.
        """
        gate = self._gates[number]
        # A model with hooks of its own handles saved tensors itself.
        if not torch.is_grad_enabled() or not are_alone() or number not in self.recompute:
            return gate.run_by(forward, *args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            return gate.run_by(forward, *args, **kwargs)

        held = self.recompute[number]
        region = RecomputedRegion(gate, args, kwargs, _nothing, self._table, None, held, run)
        output = region.run()
        # Known from earlier microbatches: user code does not modify the inputs.
        if gate.keeps_inputs:
            region.let_go()
        self._regions.append(region)
        return output

    def end_forward(self) -> None:
        """Called behind the step: user code does not use the layers' arguments any more."""
        self._regions = [region for region in self._regions if region.let_go()]

    @property
    def may_recompute(self) -> bool:
        """Whether layers may run again before the backward begins."""
        return bool(self._regions)

    def run_again(self) -> None:
        """Runs layers again for the coming backward, in the order in which it needs them, and as
        many as there is room for. The others run when the backward comes to them.
        """
        for region in reversed(self._regions):
            if not self._table.has_room(region.needed_bytes):
                break
            region.run_again()
        self._regions.clear()


def _nothing() -> None:
    """A second run draws from the stream of its call."""
