"""Finds the layer at which NaN first appears in a microbatch, with
``Trainer(detect_anomaly=True)``.

Torch's own anomaly mode checks the backward only, on the stage where it finds NaN; the wrong values
may come from an earlier stage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import NotFiniteError
from lightning_pipeshift.model.tensors.trees import WithoutMemory

log = logging.getLogger(__name__)


class FiniteCheck:
    """Checks the arguments and the results of the layers of one microbatch on one stage.

    NaN is an error. Infinite values need not be one (masked scores are infinite), so the first
    layer that makes any is named in a warning, and again if the loss is not finite.

    Args:
        place: the microbatch and the stage, in words.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._first_infinite: str | None = None

    def given(self, name: str, arguments: Iterable[Any]) -> None:
        """Raises NotFiniteError if an argument of the layer of this name is NaN."""
        if _has(torch.isnan, arguments):
            raise NotFiniteError(
                f"NaN first appears in the arguments of the layer {name!r}, in {self._place}:"
                " in the batch, or in the code before this layer."
            )

    def returned(self, name: str, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        """Raises NotFiniteError if the layer of this name returns NaN without NaN in its
        arguments.
        """
        if _has(torch.isnan, results):
            cause = " It was given infinite values." if _has(torch.isinf, arguments) else ""
            raise NotFiniteError(
                f"NaN first appears in the result of the layer {name!r}, in {self._place}."
                f"{cause}{self._infinite}"
            )
        is_first = self._first_infinite is None and _has(torch.isinf, results)
        if is_first and not _has(torch.isinf, arguments):
            self._first_infinite = name
            log.warning(
                "PipeShift: infinite values first appear in the result of the layer %r, in %s.",
                name,
                self._place,
            )

    def loss(self, value: Any) -> None:
        """Raises NotFiniteError if the loss is not finite."""
        loss = value.get("loss") if isinstance(value, dict) else value
        if isinstance(loss, Tensor) and loss.numel() == 1 and not math.isfinite(loss.item()):
            raise NotFiniteError(
                f"The loss is {loss.item()}, in {self._place}. No layer has returned NaN: it "
                f"comes from the code after the last layer.{self._infinite}"
            )

    def backward(self, error: RuntimeError) -> NotFiniteError | None:
        """Returns the error to raise for one of torch's anomaly mode in the backward."""
        if "returned nan values" not in str(error):
            return None
        return NotFiniteError(f"In the backward of {self._place}: {error}")

    @property
    def _infinite(self) -> str:
        if self._first_infinite is None:
            return ""
        return f" The layer {self._first_infinite!r} has returned infinite values before."


def finite_check(microbatch: int, step: int, stage: int) -> FiniteCheck | None:
    """Returns a check, if torch's anomaly mode is on."""
    if not torch.is_anomaly_enabled():
        return None
    return FiniteCheck(f"microbatch {microbatch} of step {step} on stage {stage}")


def _has(kind: Any, leaves: Iterable[Any]) -> bool:
    return any(
        bool(kind(leaf).any())
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and not isinstance(leaf, WithoutMemory)
        and not leaf.is_meta
        and leaf.layout is torch.strided
        and (leaf.is_floating_point() or leaf.is_complex())
    )
