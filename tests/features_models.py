"""Runs user code in plain Lightning and as a pipeline, and compares what came of it.

A *scenario* is a module-level function of a Trainer's arguments: it builds a Trainer, runs it, and
returns what a user would look at. ``compare`` calls it here with plain arguments and on every rank
of a job with a PipeShiftStrategy, and requires the same of both. The models that only these tests
need stand here as well.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.models import NUM_CLASSES, NUM_FEATURES, Classifier

Scenario = Callable[..., Any]

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}


def quiet_trainer(how: Mapping[str, Any], **arguments: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing unless the arguments say so.

    The entry ``"pipeshift"`` holds the strategy's arguments: every Trainer gets one of its own.
    """
    how = dict(how)
    if "pipeshift" in how:
        how["strategy"] = PipeShiftStrategy(**how.pop("pipeshift"))
    return L.Trainer(accelerator="cpu", **{**QUIET, **arguments, **how})


def built(make_module: Callable[[], Any], seed: int = 20) -> Any:
    """A new module, the same weights every time; the global random state stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_module()


class Diary(L.Callback):
    """Records the logged values at every hook where callbacks may read them."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def _write(self, moment: str, trainer: L.Trainer) -> None:
        metrics = {
            "callback": plain(trainer.callback_metrics),
            "logged": plain(trainer.logged_metrics),
            "bar": plain(trainer.progress_bar_metrics),
            "global_step": trainer.global_step,
        }
        self.entries.append((moment, metrics))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._write("train batch end", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._write("train epoch end", trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._write("train end", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._write("validation end", trainer)

    def on_test_end(self, trainer: Any, *_: Any) -> None:
        self._write("test end", trainer)


def plain(tree: Any) -> Any:
    """The same without tensors' graphs and devices, and without types that cannot be sent."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return (
            type(tree)(map(plain, tree)) if type(tree) in (list, tuple) else list(map(plain, tree))
        )
    return tree


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Everything in the state dict, as copies."""
    return {name: plain(value) for name, value in module.state_dict().items()}


class AwaitsPlanning(L.Callback):
    """Lets no step begin while the first rank thinks of a plan, however short the steps are."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        planning = trainer.strategy.pipeline.planning
        while planning._decision is not None and not planning.has_decided:
            time.sleep(0.005)


def fit(
    how: Mapping[str, Any],
    make_module: Callable[[], Any],
    train: Any = None,
    val: Any = None,
    callbacks: Sequence[L.Callback] = (),
    **arguments: Any,
) -> tuple[dict[str, Any], L.Trainer, Any]:
    """Trains, and returns what every scenario compares, the Trainer, and the module."""
    module = built(make_module)
    diary = Diary()
    trainer = quiet_trainer(how, callbacks=[*callbacks, diary], **arguments)
    trainer.fit(module, train, val)
    record = {
        "diary": diary.entries,
        "parameters": parameters_of(module),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }
    return record, trainer, module


def read_csv(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a CSV file, numbers as numbers."""
    with Path(path).open() as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) if v else None for k, v in row.items()} for row in rows]


def on_one_device(scenario: Scenario, *args: Any, **kwargs: Any) -> Any:
    """The result of plain Lightning in this process; a seed that the scenario sets is reset
    afterwards.
    """
    seeds = {name: os.environ.pop(name, None) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    try:
        return scenario({"devices": 1}, *args, **kwargs)
    finally:
        for name, value in seeds.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def on_rank(
    scenario: Scenario, strategy: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The work of one rank of a job."""
    how = {"pipeshift": strategy, "devices": int(os.environ["WORLD_SIZE"])}
    return scenario(how, *args, **kwargs)


def compare(
    scenario: Scenario,
    *args: Any,
    stages: int = 2,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    strategy: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Requires a scenario to end on every rank of a pipeline as in plain Lightning on one device.

    Returns what plain Lightning gave.
    """
    strategy = {"microbatches": 4, "partition": "uniform", **(strategy or {})}
    expected = on_one_device(scenario, *args, **kwargs)
    folder = Path.cwd() / f"ranks{len(list(Path.cwd().glob('ranks*')))}"
    found = run_ranks(on_rank, stages, scenario, strategy, args, kwargs, cwd=folder)
    problems = []
    for rank, mine in enumerate(found):
        problems += [f"rank {rank}: {p}" for p in differences(mine, expected, rtol, atol)]
    assert not problems, "unlike plain Lightning:\n" + "\n".join(problems[:40])
    return expected


def differences(found: Any, expected: Any, rtol: float, atol: float, where: str = "") -> list[str]:
    """Where two nested results differ, one line each."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            kinds = [f"{tuple(t.shape)} {t.dtype}" for t in (found, expected)]
            return [f"{where}: {kinds[0]}, expected {kinds[1]}"]
        if torch.allclose(found.double(), expected.double(), rtol, atol, equal_nan=True):
            return []
        error = (found.double() - expected.double()).abs().max()
        return [f"{where}: {_short(found)}, expected {_short(expected)} (off by {error:.3g})"]
    mappings = isinstance(found, dict) and isinstance(expected, dict)
    if type(found) is not type(expected) and not mappings:
        return [f"{where}: {found!r} ({type(found).__name__}), expected {expected!r}"]
    if isinstance(expected, dict):
        problems = []
        if set(found) != set(expected):
            problems.append(f"{where}: keys {list(found)}, expected {list(expected)}")
        for key in expected:
            if key in found:
                problems += differences(found[key], expected[key], rtol, atol, f"{where}[{key!r}]")
        return problems
    if isinstance(expected, list | tuple):
        problems = []
        if len(found) != len(expected):
            problems.append(f"{where}: {len(found)} entries, expected {len(expected)}")
        for index, (mine, its) in enumerate(zip(found, expected, strict=False)):
            problems += differences(mine, its, rtol, atol, f"{where}[{index}]")
        return problems
    if isinstance(expected, float):
        same = math.isclose(found, expected, rel_tol=rtol, abs_tol=atol) or (
            math.isnan(found) and math.isnan(expected)
        )
        return [] if same else [f"{where}: {found!r}, expected {expected!r}"]
    return [] if found == expected else [f"{where}: {found!r}, expected {expected!r}"]


def _short(tensor: Tensor) -> str:
    return f"{tensor.flatten()[:4].tolist()}{' ...' if tensor.numel() > 4 else ''}"


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


class Overflowing(nn.Module):
    """A bias whose own gradient, and no other, overflows on batches that hold a large number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        overflows = (features > 900).any()
        factor = torch.where(overflows, torch.tensor(float("inf")), torch.tensor(1.0))
        return hidden + _ScaledGradient.apply(self.bias, factor)


class OverflowingOnOneStage(Classifier):
    """``where`` says behind which of the three other layers the overflowing one stands; ``fused``,
    whether the optimizer's kernel unscales the gradients by itself.
    """

    def __init__(self, where: int, fused: bool = False, width: int = 16) -> None:
        super().__init__()
        self.where = where
        self.fused = fused
        self.first = nn.Linear(NUM_FEATURES, width)
        self.overflowing = Overflowing(width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.clamp(-5, 5)).relu()
        if self.where == 1:
            hidden = self.overflowing(hidden, features)
        hidden = self.second(hidden).relu()
        if self.where == 2:
            hidden = self.overflowing(hidden, features)
        return self.head(hidden)

    def configure_optimizers(self) -> Any:
        if self.fused:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        return super().configure_optimizers()


def numbered_points(num_batches: int, batch_size: int = 8, **loader: Any) -> DataLoader:
    """As ``points``, with each point's number as a third entry."""
    generator = torch.Generator().manual_seed(11)
    size = num_batches * batch_size
    features = torch.randn(size, NUM_FEATURES, generator=generator)
    classes = features[:, :NUM_CLASSES].argmax(dim=1)
    dataset = torch.utils.data.TensorDataset(features, classes, torch.arange(size))
    return DataLoader(dataset, batch_size=batch_size, **loader)


class LeavesOut(Classifier):
    """A step over the samples whose number is not left out; without any of them it returns None."""

    def __init__(self, left_out: Sequence[int], width: int = 16) -> None:
        super().__init__()
        self.left_out = list(left_out)
        self.model = nn.Sequential(
            nn.Linear(NUM_FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes, numbers = batch
        scores = self(features)
        kept = ~torch.isin(numbers, torch.tensor(self.left_out))
        if not kept.any():
            return None
        # A microbatch without a loss counts, as it would in plain Lightning.
        return F.cross_entropy(scores[kept], classes[kept], reduction="sum") / len(classes)
