"""The gradients of weights that backwards leave for later: see
:mod:`lightning_pipeshift.values.weight_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import version_of
from lightning_pipeshift.compat.weight_products import Weights
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.step.suspendable import SuspendableMicrobatch
from lightning_pipeshift.values.weight_gradients import divided

Given = tuple[Tensor, int]
"""The gradient of a product, and how often it had been written to."""


class LaterGradients:
    """The gradients of weights that the backwards of a step on this stage leave for later, in their
    order.
    """

    def __init__(self) -> None:
        self._left: dict[SuspendableMicrobatch, list[tuple[Weights, list[Given]]]] = {}

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
        noted: list[tuple[Weights, list[Given]]] = [(each, []) for each in weights]
        self._left[microbatch] = noted
        handles = [each.node.register_prehook(partial(_note, given)) for each, given in noted]
        try:
            torch.autograd.backward(roots, gradients, inputs=others)
        finally:
            for handle in handles:
                handle.remove()

    def compute(self, microbatch: SuspendableMicrobatch) -> None:
        """Computes what a microbatch has left; nothing if it has left nothing."""
        left = self._left.pop(microbatch, [])[::-1]
        device = microbatch.core.device_kind
        # A backward that runs in the middle of a step may be inside of autocast.
        with microbatch.core.trained_as(microbatch.flags), torch.autocast(device, enabled=False):
            while left:
                # So that each factor is freed at once.
                weights, given = left.pop()
                # There is none if no gradient has come to the product.
                for of, version in given:
                    now = map(version_of, (*weights.computing.uses, of))
                    if tuple(now) != (*weights.versions, version):
                        raise _written_to(microbatch)
                    with torch.no_grad():
                        gradients = weights.computing.gradients(of)
                    torch.autograd.backward(weights.edges, gradients)

    def compute_all(self) -> None:
        """Computes what all have left."""
        for microbatch in list(self._left):
            self.compute(microbatch)


def _note(given: list[Given], of: Sequence[Tensor | None]) -> None:
    given += [(x, version_of(x)) for x in of if x is not None]


def _written_to(microbatch: SuspendableMicrobatch) -> LayerError:
    return LayerError(
        f"The gradient of a weight of microbatch {microbatch.turn} was left for later, and a tensor"
        " that it is computed from has been written to in place since: by a layer that keeps a"
        " buffer for its input, for example. Use an operation that returns a new tensor"
        " (`x = x * 2` in place of `x.mul_(2)`), or use schedule='1f1b'."
    )


def _may_divide(microbatch: SuspendableMicrobatch) -> bool:
    has_moving_weights = any(each.weights is not None for each in microbatch.core.gates)
    return not is_watched(microbatch) and not has_moving_weights


def is_watched(microbatch: SuspendableMicrobatch) -> bool:
    """Whether something else looks at the nodes of the backward, or at what they have saved: then
    it runs as a whole.
    """
    return bool(microbatch.saves or microbatch.timer or microbatch.finite)
