"""Metrics over virtual machines: where Lightning and torchmetrics would ask all ranks."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from lightning_pipeshift.runtime.replicas import Replicas


class MetricSync:
    """How a torchmetrics object gathers its states: one from each virtual machine.

    Args:
        replicas: the virtual machines.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.is_open = True
        """Whether all ranks would take part now."""

    def is_possible(self) -> bool:
        """Whether there is anything to gather; for ``Metric.distributed_available_fn``."""
        return self.is_open and self._replicas.count > 1

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """The state of each virtual machine; for ``Metric.dist_sync_fn``. Every rank calls this."""
        return self._replicas.gather_tensor(state)


def silence_advice_to_synchronise() -> None:
    """Lightning recommends ``sync_dist=True`` for logged values, which are in sync already."""
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
