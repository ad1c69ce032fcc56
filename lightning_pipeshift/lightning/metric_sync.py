"""Synchronises metrics over virtual machines; Lightning and torchmetrics would use all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeshift.model.tensors.trees import leaves_of
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.values.value import Value


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

    def attach(self, module: nn.Module, device: torch.device) -> None:
        """Moves a model's metrics to a device, and synchronises them, also after the run, while the
        ranks are connected.

        Their states are the same on every stage of a virtual machine: gathering them over all
        ranks, as torchmetrics would, would count each several times.
        """
        for metric in _metrics_of(module):
            metric.to(device)
            metric.distributed_available_fn = self.is_possible
            metric.dist_sync_fn = self.gather

    def is_possible(self) -> bool:
        """Whether a run is active; for ``Metric.distributed_available_fn``."""
        return self.is_open and self._replicas is not None and self._replicas.count > 1

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """The state of each virtual machine; for ``Metric.dist_sync_fn``. Every rank calls this."""
        assert self._replicas is not None
        return self._replicas.gather_tensor(state)


def _metrics_of(module: nn.Module) -> Iterator[Metric]:
    return (part for part in module.modules() if isinstance(part, Metric))


def metrics_to_cpu(module: nn.Module) -> None:
    """Moves a model's metrics to the CPU; not those that a step which failed has left with values
    of other stages.
    """
    for metric in _metrics_of(module):
        if not any(isinstance(x, Value) for x in leaves_of(metric.metric_state)):
            metric.cpu()


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
