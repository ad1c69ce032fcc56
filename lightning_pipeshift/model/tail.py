"""What the last stage leaves behind in a step: logged values, metric states, lists that user code
appends to.

Only the last stage runs the code after the last layer. What that code logs is recorded there and
said again on every rank; what it changes on the LightningModule (``self.outputs.append(...)``, a
metric's state, a counter) is found by comparing before and after, and done again on every rank. So
hooks at the end of an epoch find the same on all of them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeshift.model.microbatch import weighted_mean
from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.trees import map_leaves

Path = tuple[str, str]
_DEPTH = 3
_WIDTH = 256


# --- logged values ---


class MetricRef(NamedTuple):
    """A torchmetrics object of the LightningModule, by its name: every rank logs its own."""

    name: str


@dataclass
class LoggedValue:
    """One ``self.log`` of one microbatch."""

    name: str
    value: Any
    options: dict[str, Any]


class LogRecorder:
    """Stands in for ``LightningModule.log`` while a step runs.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._metric_names = {
            id(module): name for name, module in root.named_modules() if isinstance(module, Metric)
        }
        self.records: list[LoggedValue] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Takes what ``LightningModule.log`` takes."""
        options.update(zip(_LOG_PARAMETERS, args, strict=False))
        if isinstance(value, Metric):
            options.setdefault("metric_attribute", self._metric_names.get(id(value)))
            value = MetricRef(self._metric_names.get(id(value), name))
        else:
            value = map_leaves(_detached, value)
        self.records.append(LoggedValue(name, value, options))

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Takes what ``LightningModule.log_dict`` takes."""
        options.update(zip(_LOG_PARAMETERS, args, strict=False))
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def take(self) -> list[LoggedValue]:
        """What was logged since the last time."""
        records, self.records = self.records, []
        return records


_LOG_PARAMETERS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def merge_logs(
    logged: list[list[LoggedValue]], sizes: list[int], weights: list[float]
) -> list[LoggedValue]:
    """What one device would have logged for the whole batch, from what each microbatch logged.

    A mean counts each microbatch with its ``batch_size`` argument, or else with its weight; sums,
    maxima and minima are taken as such. Values are logged with the batch size of the whole batch.
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
        given = [record.options.get("batch_size") for record, _, _ in column]
        explicit = all(size is not None for size in given)
        options["batch_size"] = sum(given) if explicit else sum(size for _, size, _ in column)
        counted = given if explicit else [weight for _, _, weight in column]
        value = _reduce(first, [record.value for record, _, _ in column], counted)
        merged.append(LoggedValue(name, value, options))
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
    return weighted_mean(
        [v.float() if isinstance(v, Tensor) else float(v) for v in values], weights
    )


def say_again(
    logs: list[LoggedValue], log: Callable[..., None], root: nn.Module, device: torch.device
) -> None:
    """Logs recorded values with the LightningModule's own ``log``."""
    for record in logs:
        if isinstance(record.value, MetricRef):
            value: Any = root.get_submodule(record.value.name)
        else:
            value = map_leaves(lambda v: v.to(device) if isinstance(v, Tensor) else v, record.value)
        log(record.name, value, **record.options)


# --- state on the LightningModule ---


class Grown(NamedTuple):
    """A list that got longer: its length before, and what was added."""

    length: int
    items: list[Any]


class Entries(NamedTuple):
    """A dict or short list of which some entries changed."""

    changes: dict[Any, Any]


class Replaced(NamedTuple):
    """A value that is another one now."""

    value: Any


class _Mark(NamedTuple):
    """How a value looked: enough to see that it changed."""

    kind: str
    value: Any
    detail: Any = None


@dataclass
class TailState:
    """The state that user code keeps on the modules outside of layers.

    Args:
        modules: those modules by qualified name.
        ignored: attribute names that belong to the framework.
    """

    modules: dict[str, nn.Module]
    ignored: frozenset[str]
    _marks: dict[Path, _Mark] = field(default_factory=dict)

    def remember(self) -> None:
        """Notes how everything looks now."""
        self._marks = {path: _mark(value, _DEPTH) for path, value in self._attributes()}

    def changes(self) -> dict[Path, Any]:
        """What is different from when it was last remembered; values are on the CPU and may be
        sent.
        """
        found: dict[Path, Any] = {}
        for path, value in self._attributes():
            change = _change(self._marks.get(path), value, _DEPTH)
            if change is not None:
                found[path] = map_leaves(_to_cpu, change)
        return found

    def apply(self, changes: dict[Path, Any], device: torch.device) -> None:
        """Makes the changes of the last stage here, from the state that was last remembered."""
        for (module_name, name), change in changes.items():
            module = self.modules[module_name]
            table = module._buffers if name in module._buffers else module.__dict__
            current = table.get(name)
            change = map_leaves(lambda v: v.to(device) if isinstance(v, Tensor) else v, change)
            if (
                name in module._buffers
                and isinstance(current, Tensor)
                and isinstance(change, Replaced)
                and current.shape == change.value.shape
            ):
                with torch.no_grad():
                    current.copy_(change.value)
            else:
                table[name] = _applied(current, change)

    def _attributes(self) -> Iterator[tuple[Path, Any]]:
        for module_name, module in self.modules.items():
            for name, value in module.__dict__.items():
                if name not in self.ignored:
                    yield (module_name, name), value
            for name, value in module._buffers.items():
                if value is not None:
                    yield (module_name, name), value


def _mark(value: Any, depth: int) -> _Mark:
    if isinstance(value, Tensor):
        # The tensor itself is kept, so that its identity stays its own.
        version = 0 if value.is_inference() else value._version
        return _Mark("tensor", value, (version, value.clone() if value.is_inference() else None))
    if value is None or isinstance(value, int | float | str | bytes | complex):
        return _Mark("plain", value)
    if isinstance(value, list | deque):
        nested = [_mark(v, depth - 1) for v in value] if depth and len(value) <= _WIDTH else None
        return _Mark("list", value, (len(value), nested))
    if isinstance(value, dict) and depth and len(value) <= _WIDTH:
        return _Mark("dict", value, {key: _mark(v, depth - 1) for key, v in value.items()})
    return _Mark("other", value)


def _change(mark: _Mark | None, value: Any, depth: int) -> Any:
    if isinstance(value, Placeholder):
        return None
    if mark is None:
        return Replaced(value) if _can_be_sent(value) else None
    if mark.kind == "plain":
        same = type(value) is type(mark.value) and (value == mark.value or value != value)
        return None if same or not _can_be_sent(value) else Replaced(value)
    if value is not mark.value:
        return Replaced(value) if _can_be_sent(value) else None
    if mark.kind == "tensor":
        version, before = mark.detail
        changed = (
            not torch.equal(before, value) if before is not None else value._version != version
        )
        return Replaced(value) if changed else None
    if mark.kind == "list":
        length, nested = mark.detail
        changes = {
            index: change
            for index, change in enumerate(
                _change(m, v, depth - 1) for m, v in zip(nested or (), value, strict=False)
            )
            if change is not None
        }
        if changes or len(value) < length:
            return Replaced(list(value))
        return Grown(length, list(value)[length:]) if len(value) > length else None
    if mark.kind == "dict":
        changes = {
            key: change
            for key, change in (
                (k, _change(mark.detail.get(k), v, depth - 1)) for k, v in value.items()
            )
            if change is not None
        }
        if set(mark.detail) - set(value):
            return Replaced(dict(value))
        return Entries(changes) if changes else None
    return None


def _can_be_sent(value: Any) -> bool:
    """Plain data: what one rank can send to another without running anybody's code."""
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(map(_can_be_sent, value))
    if isinstance(value, dict):
        return all(map(_can_be_sent, value.values()))
    return not isinstance(value, Placeholder) and (
        value is None
        or isinstance(value, int | float | str | bytes | complex | Tensor)
        or type(value).__module__ == "numpy"
    )


def _applied(current: Any, change: Any) -> Any:
    if isinstance(change, Replaced):
        return change.value
    if isinstance(change, Grown):
        if not isinstance(current, list | deque):
            return list(change.items)
        while len(current) > change.length:
            current.pop()
        current.extend(change.items)
        return current
    assert isinstance(change, Entries)
    for key, entry in change.changes.items():
        current[key] = _applied(current.get(key), entry)
    return current


def _to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


# --- metrics over microbatches ---


class BatchMetrics:
    """Makes a torchmetrics object that is called for each microbatch show what it would for the
    whole batch.

    On the last stage. Metrics whose state cannot be merged (``full_state_update=True``) are left
    alone: the value that they show for a step is the last microbatch's.
    """

    def __init__(self, root: nn.Module) -> None:
        self._metrics = [
            metric
            for metric in root.modules()
            if isinstance(metric, Metric) and metric.full_state_update is False and metric._defaults
        ]
        self._before: list[tuple[dict[str, Any], int]] = []

    def begin(self) -> None:
        """Sets the states aside."""
        self._before = [
            ({k: copy.copy(v) for k, v in metric.metric_state.items()}, metric._update_count)
            for metric in self._metrics
        ]
        for metric in self._metrics:
            metric.reset()

    def end(self) -> None:
        """Computes the batch's values, and adds the states that were set aside."""
        for metric, (state, count) in zip(self._metrics, self._before, strict=True):
            if metric._update_count == 0:
                for name, value in state.items():
                    setattr(metric, name, value)
                metric._update_count = count
                continue
            batch_value = metric.compute() if metric._forward_cache is not None else None
            metric._update_count = count + 1
            if count:
                with torch.no_grad():
                    metric.merge_state(state)
            metric._computed = None
            metric._forward_cache = batch_value
        self._before = []
