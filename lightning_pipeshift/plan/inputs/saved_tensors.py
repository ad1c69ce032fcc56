"""The tensors that a layer's forward saves for its backward, and how each may be handled."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from lightning_pipeshift.errors import PlanError

FRONT: Final = 1_000_000
BEHIND: Final = 2_000_000
"""The first numbers of the tensors that code around a layer saves: before the layer (``FRONT``),
and after the last layer (``BEHIND``).
"""


class Choice(enum.Enum):
    """The handling of a saved tensor between its forward and its backward."""

    KEEP = "keep"
    """It remains on the device."""
    RECOMPUTE = "recompute"
    """It is dropped, and its layer is recomputed."""
    HOST = "host"
    """It moves to the memory of the host, and back."""
    DEVICE = "device"
    """It moves to other devices of the virtual machine, and back."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that a layer saves for a microbatch.

    Args:
        number: its index among those that the layer saves, in their order; from ``FRONT`` on, and
            from ``BEHIND`` on, among those that code before it saves, or after the last layer.
        num_bytes: of its memory; 0 if that is counted with a tensor before it (a view of the same
            memory, a tensor saved by the layer before), or is in use anyway (a parameter).
        shape: its shape.
        dtype: its type, as torch names it.
        maker: the module inside of the layer, and the operation, that computed it.
        spares: the part of the layer's forward that a recomputation leaves out if this tensor is
            not dropped: that of the operation that computed it.
    """

    number: int
    num_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    maker: str = "unknown"
    spares: float = 0.0

    @property
    def is_outside(self) -> bool:
        """Whether code around the layer saves it: recomputing the layer does not recompute it."""
        return self.number >= FRONT

    def __post_init__(self) -> None:
        if self.number < 0 or self.num_bytes < 0:
            raise PlanError(
                f"a saved tensor with number {self.number} and {self.num_bytes} bytes; both are at"
                " least 0"
            )
        if not 0 <= self.spares <= 1:
            raise PlanError(
                f"saved tensor {self.number} spares {self.spares} of its layer's forward; allowed"
                " are 0 to 1"
            )


def place_in_forward(number: int) -> int:
    """A sort key for the tensors of a layer, and of the code around it, in the order of saving."""
    return number - BEHIND if FRONT <= number < BEHIND else number


@dataclass(frozen=True, slots=True)
class Swap:
    """Saved tensors of a layer that are offloaded between their forward and their backward. If the
    layer is recomputed, these are not dropped, and the operations that computed them do not run
    again.

    Args:
        layer: the layer's index.
        tensors: their numbers among those that the layer saves.
        stages: the stages that take them, each a part of every tensor; empty: the host.
        shares: the relative sizes of the parts; empty: equal ones.
        stays: whether they are kept on the device instead, while the layer drops others.
    """

    layer: int
    tensors: tuple[int, ...]
    stages: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    stays: bool = False

    def __post_init__(self) -> None:
        if not self.tensors or len(set(self.tensors)) < len(self.tensors) or min(self.tensors) < 0:
            raise PlanError(
                f"a swap of the tensors {list(self.tensors)} of layer {self.layer}; it names one or"
                " more, each once, counted from 0"
            )
        if len(set(self.stages)) < len(self.stages) or any(stage < 0 for stage in self.stages):
            raise PlanError(
                f"a swap of layer {self.layer} to the stages {list(self.stages)}; each is named"
                " once"
            )
        if self.stays and self.stages:
            raise PlanError(
                f"tensors of layer {self.layer} that stay, and move to the stages"
                f" {list(self.stages)}; choose one of the two"
            )
        if self.shares and (
            len(self.shares) != len(self.stages)
            or any(not (math.isfinite(share) and share > 0) for share in self.shares)
        ):
            raise PlanError(
                f"a swap of layer {self.layer} to {len(self.stages)} stages with the shares"
                f" {list(self.shares)}; give one above 0 for each, or none"
            )

    @property
    def choice(self) -> Choice:
        """The handling of its tensors."""
        if self.stays:
            return Choice.KEEP
        return Choice.DEVICE if self.stages else Choice.HOST

    def parts(self, num_items: int) -> list[tuple[int, int]]:
        """The number of a tensor's elements for each stage, in order: (stage, elements).

        CN114880130B: a tensor is cut into blocks in proportion to the bandwidth of the links.
        """
        shares = self.shares or (1.0,) * len(self.stages)
        parts, taken, before = [], 0, 0.0
        for stage, share in zip(self.stages, shares, strict=True):
            before += share
            end = round(num_items * before / math.fsum(shares))
            parts.append((stage, end - taken))
            taken = end
        return [(stage, items) for stage, items in parts if items]
