"""Synchronises metrics over virtual machines; Lightning and torchmetrics would use all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_pipeshift.runtime.comm.replicas import Replicas


class MetricSync:
    """Gathers the states of a torchmetrics object: one from each virtual machine.

    Args:
        replicas: the virtual machines.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas: Replicas | None = replicas
        self.is_open = True
        """Whether all ranks synchronise now."""

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of a metric, which belong to no run."""
        return {"_replicas": None, "is_open": True}

    def is_possible(self) -> bool:
        """Whether a run is active; for ``Metric.distributed_available_fn``."""
        return self.is_open and self._replicas is not None and self._replicas.count > 1

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """The state of each virtual machine; for ``Metric.dist_sync_fn``. Every rank calls this."""
        assert self._replicas is not None
        return self._replicas.gather_tensor(state)


def silence_advice_to_synchronise() -> Callable[[], None]:
    """Lightning recommends ``sync_dist=True`` for logged values whenever there is a process group;
    they are already synchronised.

    Returns:
        a function that enables the advice again.
    """
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
    added = [entry for entry in warnings.filters if entry not in before]

    def undo() -> None:
        for entry in added:
            # Other code may have reset all filters.
            with contextlib.suppress(ValueError):
                warnings.filters.remove(entry)  # type: ignore[attr-defined]

    return undo
