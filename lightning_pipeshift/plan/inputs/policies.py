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
    """The properties of a saved tensor. All figures are per microbatch.

    Args:
        layer: the name of the layer that saves it.
        index: the layer's place in the call order.
        number: the tensor's place among those that the layer saves.
        num_bytes: what its memory takes.
        shape: its shape.
        dtype: its type, as torch names it.
        maker: the module and the operation that made it.
        stage: where it is.
        in_flight: how many microbatches hold one at the same time, at most.
        interval_seconds: from the end of its forward to the begin of its backward, at the least.
        recompute_seconds: what it takes to run its layer again.
        host_seconds: what it takes to the host, and as long back; infinite where there is no way.
        device_seconds: the same for the stage with the fastest link.
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
    """Decides over saved tensors."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """What becomes of a tensor; ``None`` leaves it to the planner.

        Where one tensor of a layer is recomputed, its layer runs again, and all of its tensors are
        made again.
        """


class Planned:
    """Leaves everything to the planner: as little as the budget asks for, where it costs least."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        return None


class KeepAll:
    """Lets everything stay where it is."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        return Choice.KEEP


class RecomputeAll:
    """Lets every layer run again, as checkpointing each of them does."""

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        return Choice.RECOMPUTE


@dataclass(frozen=True)
class SwapAll:
    """Moves everything that has the time to get there and back.

    Args:
        to: ``"host"`` or ``"device"``.
        min_bytes: what is smaller stays.
    """

    to: str = "host"
    min_bytes: int = 1 << 20

    def choose(self, record: TensorRecord) -> Choice | None:
        """See :class:`Policy`."""
        seconds = record.host_seconds if self.to == "host" else record.device_seconds
        if record.num_bytes < self.min_bytes or 2 * seconds > record.interval_seconds:
            return Choice.KEEP
        return Choice(self.to)
