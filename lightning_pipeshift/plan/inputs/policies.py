"""Policies: small classes that decide how a saved tensor is handled, by its record.

A policy is called once for every tensor of every layer, whenever a plan is made; the plan then
contains its choices for all ranks. To write your own policy, define a class with a ``choose``::

    class DropMasks:
        def choose(self, record: TensorRecord) -> Choice | None:
            return Choice.HOST if record.dtype == "bool" else None
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_pipeshift.plan.inputs.saved_tensors import Choice


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The properties of a saved tensor. All numbers are per microbatch.

    Args:
        layer: the name of the layer that saves it.
        index: the layer's position in the call order.
        number: the tensor's index among those that the layer saves.
        num_bytes: the bytes of its memory.
        shape: its shape.
        dtype: its type, as torch names it.
        maker: the module and the operation that computed it.
        stage: the stage that saves it.
        in_flight: how many microbatches hold one at the same time, at most.
        interval_seconds: from the end of its forward to the start of its backward, at least.
        recompute_seconds: the seconds of recomputing its layer.
        host_seconds: the seconds of its transfer to the host, and of that back; infinite if there
            is no connection.
        device_seconds: likewise to the stage with the fastest link.
    """

    layer: str
    index: int
    number: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    maker: str
    stage: int
    in_flight: int
    interval_seconds: float
    recompute_seconds: float
    host_seconds: float
    device_seconds: float


@runtime_checkable
class Policy(Protocol):
    """Decides about saved tensors."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """Returns the handling of a tensor; ``None`` leaves it to the planner.

        If one tensor of a layer is recomputed, so are those for which there is no other choice.
        """


class Planned:
    """Leaves everything to the planner: it moves or recomputes as little as the budget requires, at
    the lowest cost.
    """

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        return None


class KeepAll:
    """Keeps all saved tensors on the device."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        return Choice.KEEP


class RecomputeAll:
    """Recomputes every layer, as activation checkpointing of each does."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        return Choice.RECOMPUTE


@dataclass(frozen=True)
class SwapAll:
    """Offloads every tensor for which there is enough time.

    Args:
        to: ``"host"`` or ``"device"``.
        min_bytes: smaller tensors are kept.
    """

    to: str = "host"
    min_bytes: int = 1 << 20

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        seconds = record.host_seconds if self.to == "host" else record.device_seconds
        if record.num_bytes < self.min_bytes or 2 * seconds > record.interval_seconds:
            return Choice.KEEP
        return Choice(self.to)
