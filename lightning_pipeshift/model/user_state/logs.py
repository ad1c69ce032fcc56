"""Logged values of a step: recorded while it runs, and logged again on every rank behind it. The
logs of all microbatches are merged into what a single device would have logged for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeshift.model.tensors.microbatch import weighted_mean
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.model.tensors.trees import map_leaves


class MetricRef(NamedTuple):
    """A torchmetrics object of the LightningModule, by its name: every rank logs its own."""

    name: str


@dataclass
class LoggedValue:
    """One ``self.log`` call of one microbatch, or several of them merged.

    Args:
        name: as the user gave it.
        value: likewise.
        options: likewise; after merging, ``batch_size`` is that of all parts together.
        own_size: whether the user gave a ``batch_size``, which is then the weight in a mean.
    """

    name: str
    value: Any
    options: dict[str, Any]
    own_size: bool = False


class LogRecorder:
    """Replaces ``LightningModule.log`` while steps run. Records what each of them logs by itself:
    they may run in parts, in turns.

    Args:
        root: the LightningModule.
        kept: a copy of what a value of a step is now; other objects as they are.
        running: the step that runs now.
    """

    def __init__(
        self, root: nn.Module, kept: Callable[[Any], Any], running: Callable[[], Any]
    ) -> None:
        self._metric_names = {
            id(module): name for name, module in root.named_modules() if isinstance(module, Metric)
        }
        self._kept = kept
        self._running = running
        self._by_step: dict[Any, list[LoggedValue]] = {}

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Records a value; the arguments are those of ``LightningModule.log``."""
        options.update(zip(_LOG_PARAMETERS, args, strict=False))
        if isinstance(value, Metric):
            options.setdefault("metric_attribute", self._metric_names.get(id(value)))
            value = MetricRef(self._metric_names.get(id(value), name))
        else:
            value = map_leaves(lambda leaf: _detached(self._kept(leaf)), value)
        own_size = options.get("batch_size") is not None
        record = LoggedValue(name, value, options, own_size)
        self._by_step.setdefault(self._running(), []).append(record)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Records values; the arguments are those of ``LightningModule.log_dict``."""
        options.update(zip(_LOG_PARAMETERS, args, strict=False))
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def take(self) -> list[LoggedValue]:
        """Returns what the step that runs now has logged, and forgets it."""
        return self._by_step.pop(self._running(), [])


_LOG_PARAMETERS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def merge_logs(
    logged: list[list[LoggedValue]], sizes: list[int], weights: list[float]
) -> list[LoggedValue]:
    """Merges the logs of microbatches into what one device would have logged for the whole batch.

    In a mean, each microbatch has its ``batch_size`` argument as its weight, or else its own
    weight; sums, maxima and minima are computed as such. Merged values have the batch size of the
    whole batch.
    """
    columns: dict[tuple[str, int], list[tuple[LoggedValue, int, float]]] = {}
    for records, size, weight in zip(logged, sizes, weights, strict=True):
        counts: dict[str, int] = {}
        for record in records:
            number = counts[record.name] = counts.get(record.name, -1) + 1
            columns.setdefault((record.name, number), []).append((record, size, weight))
    merged = []
    for (name, _), column in columns.items():
        first = column[0][0]
        options = dict(first.options)
        own_size = all(record.own_size for record, _, _ in column)
        counted: list[Any] = [weight for _, _, weight in column]
        options["batch_size"] = sum(size for _, size, _ in column)
        if own_size:
            counted = [record.options["batch_size"] for record, _, _ in column]
            options["batch_size"] = sum(counted)
        value = _reduce(first, [record.value for record, _, _ in column], counted)
        merged.append(LoggedValue(name, value, options, own_size))
    return merged


def _reduce(first: LoggedValue, values: list[Any], weights: Sequence[Any]) -> Any:
    if isinstance(first.value, MetricRef) or len(values) == 1:
        return first.value
    reduce_fx = first.options.get("reduce_fx", "mean")
    kind = (
        reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    )
    if kind == "sum":
        return sum(values[1:], start=values[0])
    if kind in ("max", "min"):
        tensors = [torch.as_tensor(value) for value in values]
        return getattr(torch.stack(tensors), f"a{kind}")(dim=0)
    return weighted_mean([_floating(v) for v in values], weights)


def _floating(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return float(value)
    # As in Lightning: at least float32, and at least the precision that was logged.
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def say_again(
    logs: list[LoggedValue],
    log: Callable[..., None],
    root: nn.Module,
    device: torch.device,
    sync_dist: bool | None = None,
) -> None:
    """Logs recorded values with the LightningModule's own ``log``.

    Args:
        logs: the recorded values.
        log: the LightningModule's own.
        root: the LightningModule.
        device: the device for tensors.
        sync_dist: replaces the user's own ``sync_dist``, if not ``None``.
    """
    for record in logs:
        if isinstance(record.value, MetricRef):
            value: Any = root.get_submodule(record.value.name)
        else:
            value = to_device(record.value, device)
        options = record.options
        if sync_dist is not None and not isinstance(value, Metric):
            options = {**options, "sync_dist": sync_dist}
        log(record.name, value, **options)
