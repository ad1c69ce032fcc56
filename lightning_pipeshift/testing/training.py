"""The work of each rank in a check: builds the model, trains it for some steps on the same batches
in every run, and compares the result with that of another run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift.compat.lightning_private import combined_loader_of
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning.strategy import PipeShiftStrategy
from lightning_pipeshift.model.parameters.layers import find_layers
from lightning_pipeshift.plan.inputs.communication import Communication
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.testing.bits import differences
from lightning_pipeshift.testing.findings import Findings, FoundLayer, StepRecord, layers_of

Name = tuple[str, str]
"""Of a tensor: ``"parameter"``, ``"buffer"`` or ``"optimizer state"``, and its name among these."""

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that leaves nothing behind."""

_FIXED: dict[str, Any] = {
    **QUIET,
    "accelerator": "cpu",
    "num_nodes": 1,
    # One epoch of the data.
    "max_epochs": 1,
    "max_steps": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
_ONE_PIPELINE: dict[str, Any] = {
    "virtual_machines": 1,
    "batch_shares": None,
    "plan": None,
    "communication": Communication(process_group_backend="gloo"),
    # A measured cut is chosen again after the first step.
    "profile_steps": 1,
}
TAKEN = _FIXED.keys() | {"devices", "callbacks", "default_root_dir", "strategy"}
"""The arguments of a Trainer that a check sets."""


class Parts(NamedTuple):
    """The parts of a run.

    Args:
        module: the LightningModule.
        data: a LightningDataModule, batches, or ``None`` for the LightningModule's own data.
        trainer: on this job's ranks.
    """

    module: pl.LightningModule
    data: Any
    trainer: pl.Trainer


class Recipe(Protocol):
    """Creates the parts of a run, equally each time. It is pickled."""

    def build(self, trainer: dict[str, Any], strategy: dict[str, Any]) -> Parts:
        """Seeds everything and creates the parts.

        Args:
            trainer: arguments of the Trainer; they come before the recipe's own.
            strategy: arguments of the strategy, likewise.
        """
        ...


@dataclass(frozen=True)
class Factories:
    """A recipe of functions.

    Args:
        make_module: makes the LightningModule.
        make_data: makes the data, as in :class:`Parts`.
        seed: of all random numbers.
        trainer: arguments of the Trainer.
    """

    make_module: Callable[[], pl.LightningModule]
    make_data: Callable[[], Any]
    seed: int
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def build(self, trainer: dict[str, Any], strategy: dict[str, Any]) -> Parts:
        """See :class:`Recipe`."""
        pl.seed_everything(self.seed, verbose=False)
        module = self.make_module()
        if not isinstance(module, pl.LightningModule):
            raise ConfigurationError(
                f"The function that makes the model returned a `{type(module).__name__}`. It must "
                "return a LightningModule (of `lightning.pytorch`) with `training_step` and "
                "`configure_optimizers`."
            )
        data = self.make_data()
        return Parts(
            module,
            data,
            pl.Trainer(**self.trainer, **trainer, strategy=PipeShiftStrategy(**strategy)),
        )


@dataclass(frozen=True)
class Fit:
    """The settings of a training.

    Args:
        partition: as the strategy takes it.
        schedule: likewise.
        microbatches: the number of slices of a batch.
    """

    partition: str | list[int]
    schedule: str
    microbatches: int


@dataclass(frozen=True)
class Trained:
    """The result of a run on one rank.

    Args:
        losses: of every step; ``None`` for a step without.
        logged: by step, the values logged by its end; the last entry is that of the whole run.
        counts: how many layers each stage owned at the end.
        differing: the differences of the tensors that this rank holds from those of the other run,
            see :func:`~lightning_pipeshift.testing.bits.differences`.
        held: the part of the state that this rank holds.
        findings: on the first rank.
        seconds: the whole run.
    """

    losses: list[float | None]
    logged: list[dict[str, float]]
    counts: tuple[int, ...]
    differing: dict[Name, float]
    held: set[Name]
    findings: Findings | None
    seconds: float


class Recorder(Callback):
    """Records a run, without using hooks that would make the strategy do more."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.logged: list[dict[str, float]] = []
        self.first_step_seconds = 0.0
        self.findings: Findings | None = None
        self._record = StepRecord()
        self._begun = 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Allows schedulers that need a validation metric: there is no validation."""
        for config in trainer.lr_scheduler_configs:
            config.strict = False
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if isinstance(pipeline, Pipeline):
            pipeline.calls = self._record

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stores the logged values of the last step."""
        if not self.losses:
            self._begun = time.perf_counter()
        else:
            self._end_step(trainer)
        self.losses.append(None)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        """Stores the loss."""
        self.losses[-1] = float(loss) * trainer.accumulate_grad_batches

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stores the values logged by the last step and at the end of the run."""
        if self.losses:
            self._end_step(trainer)
            strategy = trainer.strategy
            if isinstance(strategy, PipeShiftStrategy) and trainer.is_global_zero:
                seconds = {layer.name: layer.forward_seconds for layer in strategy.plan.layers}
                layers = layers_of(strategy.pipeline.planned.layers_by_name, seconds)
                self.findings = self._record.findings(layers)

    def _end_step(self, trainer: pl.Trainer) -> None:
        self.first_step_seconds = self.first_step_seconds or time.perf_counter() - self._begun
        self.logged.append({name: float(x) for name, x in trainer.callback_metrics.items()})


# --- the jobs ---


class _Collector(Callback):
    """Takes the first batches of a run, and ends it before it trains.

    Args:
        num_batches: how many.
    """

    def __init__(self, num_batches: int) -> None:
        self.batches: list[Any] = []
        self._num_batches = num_batches

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Takes them."""
        loader: Any = combined_loader_of(trainer.fit_loop)
        self.batches = [batch for batch, *_ in islice(iter(loader), self._num_batches)]
        trainer.should_stop = True


class Model(NamedTuple):
    """The properties of a model before training.

    Args:
        name: of its class.
        num_batches: how many batches there are.
        layers: its layers, for one stage.
        num_layers: how many there are, by the number of stages: with few layers, these are split
            further.
    """

    name: str
    num_batches: int
    layers: tuple[FoundLayer, ...]
    num_layers: dict[int, int]


def collect(recipe: Recipe, num_steps: int, stages: Iterable[int], path: Path) -> Model:
    """Writes the first batches of a model's data to a file, and finds its layers.

    Args:
        recipe: makes the parts.
        num_steps: how many batches.
        stages: numbers of stages that it will be split into.
        path: the file.

    Raises:
        ConfigurationError: there is no batch.
        LayerError: there is no layer.
    """
    collector = _Collector(num_steps)
    module, data, trainer = recipe.build(
        _arguments(collector, path.parent), {**_ONE_PIPELINE, "partition": "uniform"}
    )
    if data is None or isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader_of(data, num_steps))
    if not collector.batches:
        raise ConfigurationError(
            "The training data has no batch. A check needs at least one; use a data set with "
            "some samples, and check `drop_last` of the DataLoader."
        )
    torch.save(collector.batches, path)
    return Model(
        type(module).__name__,
        len(collector.batches),
        layers_of(find_layers(module)),
        {num_stages: len(find_layers(module, num_stages)) for num_stages in stages},
    )


def train(
    recipe: Recipe, how: Fit, batches: Path, save_as: Path | None, compare_with: Path | None
) -> Trained:
    """Trains on this job's ranks, one stage on each.

    Args:
        recipe: makes the parts.
        how: the split.
        batches: the file of :func:`collect`.
        save_as: a file for the first rank's state at the end.
        compare_with: the file of another run's.
    """
    begun = time.perf_counter()
    watcher = Recorder()
    module, data, trainer = recipe.build(
        _arguments(watcher, batches.parent),
        {
            **_ONE_PIPELINE,
            "partition": how.partition,
            "schedule": how.schedule,
            "microbatches": how.microbatches,
        },
    )
    loader = loader_of(torch.load(batches, weights_only=False))
    if isinstance(data, pl.LightningDataModule):
        # Its `setup`, and its hooks around a batch's transfer, belong to the training.
        data.train_dataloader = partial(unchanged, loader)  # type: ignore[method-assign]
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader)
    assert isinstance(trainer.strategy, PipeShiftStrategy)
    state = _state_of(module, trainer)
    if save_as is not None and trainer.is_global_zero:
        torch.save(state, save_as)
    differing: dict[Name, float] = {}
    if compare_with is not None:
        other = torch.load(compare_with, weights_only=True, mmap=True)
        differing = differences(state, {name: x for name, x in other.items() if name in state})
    return Trained(
        watcher.losses,
        watcher.logged,
        trainer.strategy.plan.placement.counts[0],
        differing,
        set(state),
        watcher.findings,
        time.perf_counter() - begun,
    )


def _arguments(callback: Callback, folder: Path) -> dict[str, Any]:
    devices = int(os.environ["WORLD_SIZE"])
    return {**_FIXED, "devices": devices, "callbacks": [callback], "default_root_dir": folder}


def unchanged(value: Any) -> Any:
    """The value."""
    return value


def loader_of(batches: Any, num_batches: int | None = None) -> Any:
    """A loader that yields batches unchanged; loaders that Lightning supports are returned
    unchanged.

    Args:
        batches: an iterable, or several loaders in a dict or a ``CombinedLoader``.
        num_batches: no more than these.
    """
    if isinstance(batches, DataLoader | CombinedLoader | Mapping):
        return batches
    dataset: Any = list(islice(batches, num_batches))
    return DataLoader(dataset, batch_size=None, collate_fn=unchanged)


def _state_of(module: nn.Module, trainer: pl.Trainer) -> dict[Name, Tensor]:
    """This rank's state at the end of a run: parameters, buffers, the optimizer's state."""
    state: dict[Name, Tensor] = {}
    for name, parameter in module.named_parameters():
        state["parameter", name] = parameter.detach()
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    state["optimizer state", f"{name}: {key}"] = torch.as_tensor(value).detach()
    for name, buffer in module.named_buffers():
        state["buffer", name] = buffer.detach()
    return {name: tensor for name, tensor in state.items() if not tensor.is_meta}
