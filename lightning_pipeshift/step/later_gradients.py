"""The gradients of weights that backwards leave for later: see
:mod:`lightning_pipeshift.values.weight_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_pipeshift.compat.weight_products import Weights
from lightning_pipeshift.step.suspendable import SuspendableMicrobatch
from lightning_pipeshift.values.weight_gradients import divided


class LaterGradients:
    """The gradients of weights that the backwards of a step on this stage leave for later, in their
    order.
    """

    def __init__(self) -> None:
        self._left: dict[SuspendableMicrobatch, list[tuple[Weights, list[Tensor]]]] = {}

    @property
    def first(self) -> SuspendableMicrobatch | None:
        """The first microbatch that has left any."""
        return next(iter(self._left), None)

    def backward(
        self,
        microbatch: SuspendableMicrobatch,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Runs a backward, or the first part of it.

        Args:
            microbatch: whose.
            roots: where it begins.
            gradients: of the roots.
        """
        token = microbatch.graphs.token if _may_divide(microbatch) else None
        weights, others = ([], []) if token is None else divided(roots, token)
        # Gradients are added up in the order of the microbatches.
        left = {x for all_left in self._left.values() for each, _ in all_left for x in each.leaves}
        if not weights or not left.isdisjoint(others):
            self.compute_all()
        if not weights:
            torch.autograd.backward(roots, gradients)
            return
        noted: list[tuple[Weights, list[Tensor]]] = [(each, []) for each in weights]
        self._left[microbatch] = noted
        handles = [each.node.register_prehook(partial(_note, given)) for each, given in noted]
        try:
            torch.autograd.backward(roots, gradients, inputs=others)
        finally:
            for handle in handles:
                handle.remove()

    def compute(self, microbatch: SuspendableMicrobatch) -> None:
        """Computes what a microbatch has left; nothing if it has left nothing."""
        left = self._left.pop(microbatch, [])
        with microbatch.core.trained_as(microbatch.flags):
            for weights, given in left:
                # There is none if no gradient has come to the product.
                for of in given:
                    with torch.no_grad():
                        gradients = weights.gradients(of)
                    torch.autograd.backward(weights.edges, gradients)
                given.clear()

    def compute_all(self) -> None:
        """Computes what all have left."""
        for microbatch in list(self._left):
            self.compute(microbatch)


def _note(given: list[Tensor], of: Sequence[Tensor | None]) -> None:
    given += [x for x in of if x is not None]


def _may_divide(microbatch: SuspendableMicrobatch) -> bool:
    """Whether nothing else looks at the nodes of the backward, or at what they have saved."""
    is_looked_at = microbatch.saves or microbatch.timer or microbatch.finite
    return not is_looked_at and not any(each.weights is not None for each in microbatch.core.gates)
