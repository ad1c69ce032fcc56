"""With ``Trainer(detect_anomaly=True)``: finds the layer at which the values of a microbatch stop
being numbers.

Torch's own anomaly mode looks at the backward alone, on the stage where it notices something; the
values may have begun to be wrong on an earlier stage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import NotFiniteError
from lightning_pipeshift.model.execution.trees import flatten
from lightning_pipeshift.model.trace.placeholder import Placeholder

log = logging.getLogger(__name__)


class FiniteCheck:
    """Looks at what goes into the layers of one microbatch on one stage, and at what comes out.

    NaN is an error. Infinite values need not be one (masked scores are), so the first layer that
    makes any is named in a warning, and once more if the loss is not finite.

    Args:
        place: the microbatch and the stage, in words.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._first_infinite: str | None = None

    def before_layer(self, name: str, arguments: Any) -> None:
        """Raises NotFiniteError if a layer is given NaN."""
        leaves, _ = flatten(arguments, opens_objects=True)
        if _has(torch.isnan, leaves):
            raise NotFiniteError(
                f"NaN first appears in the arguments of the layer {name!r}, in {self._place}: in"
                " the batch, or in the code in front of this layer."
            )

    def after_layer(self, name: str, leaves: Iterable[Any], arguments: Any) -> None:
        """Raises NotFiniteError if a layer returns NaN, which it was not given."""
        leaves = list(leaves)
        if _has(torch.isnan, leaves):
            given, _ = flatten(arguments, opens_objects=True)
            cause = " It was given infinite values." if _has(torch.isinf, given) else ""
            raise NotFiniteError(
                f"NaN first appears in what the layer {name!r} returns, in {self._place}.{cause}"
                f"{self._infinite}"
            )
        if self._first_infinite is None and _has(torch.isinf, leaves):
            given, _ = flatten(arguments, opens_objects=True)
            if not _has(torch.isinf, given):
                self._first_infinite = name
                log.warning(
                    "PipeShift: infinite values first appear in what the layer %r returns, in %s.",
                    name,
                    self._place,
                )

    def loss(self, value: Any) -> None:
        """Raises NotFiniteError if the loss is not finite."""
        loss = value.get("loss") if isinstance(value, dict) else value
        if isinstance(loss, Tensor) and loss.numel() == 1 and not math.isfinite(loss.item()):
            raise NotFiniteError(
                f"The loss is {loss.item()}, in {self._place}. No layer has returned NaN: it comes"
                f" from the code behind the last layer.{self._infinite}"
            )

    def backward(self, error: RuntimeError) -> NotFiniteError | None:
        """The error to raise for what torch's anomaly mode has found in the backward."""
        if "returned nan values" not in str(error):
            return None
        return NotFiniteError(f"In the backward of {self._place}: {error}")

    @property
    def _infinite(self) -> str:
        if self._first_infinite is None:
            return ""
        return f" The layer {self._first_infinite!r} has returned infinite values before."


def finite_check(key: Sequence[int | str], stage: int) -> FiniteCheck | None:
    """A check, if torch's anomaly mode is on.

    Args:
        key: of the random streams: the seed, the purpose, the step, the microbatch.
        stage: whose layers are looked at.
    """
    if not torch.is_anomaly_enabled():
        return None
    _, _, step, microbatch, *_ = key
    return FiniteCheck(f"microbatch {microbatch} of step {step} on stage {stage}")


def _has(kind: Any, leaves: Iterable[Any]) -> bool:
    return any(
        bool(kind(leaf).any())
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and not isinstance(leaf, Placeholder)
        and not leaf.is_meta
        and leaf.layout is torch.strided
        and (leaf.is_floating_point() or leaf.is_complex())
    )
