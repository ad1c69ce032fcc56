"""Features of Lightning work as on one device: the same numbers, on every rank.

Every test runs the same user code in plain Lightning, here, and as a pipeline in processes of its
own, and compares logged values and parameters: see ``tests/features_models.py``.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
    timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from lightning_pipeshift import grad_norm
from lightning_pipeshift.lightning.over_stages import by_itself, over_stages
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import (
    LeavesOut,
    OverflowingOnOneStage,
    compare,
    fit,
    numbered_points,
    on_rank,
    plain,
    quiet_trainer,
    read_csv,
)
from tests.models import (
    NUM_CLASSES,
    ZOO,
    LayersOfItsOwn,
    LooseParameters,
    ParameterGroups,
    SequentialMLP,
    points,
    uneven_points,
)

SCHEDULES = ["gpipe", "1f1b"]


# --------------------------------------------------------------------------------------------------
# Accumulation, clipping
# --------------------------------------------------------------------------------------------------


def accumulating(how: Any, every: int, num_batches: int, clip: float | None) -> Any:
    record, _, _ = fit(
        how,
        SequentialMLP,
        uneven_points(num_batches),
        points(1),
        max_epochs=2,
        accumulate_grad_batches=every,
        gradient_clip_val=clip,
    )
    return record


@pytest.mark.feature("Training", "`accumulate_grad_batches`")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("every", "num_batches", "clip"),
    [(2, 4, None), (2, 5, None), (3, 5, 0.1), (8, 5, None)],
    ids=["even", "partial last", "partial last, clipped", "more than an epoch"],
)
def test_gradients_accumulate(schedule: str, every: int, num_batches: int, clip: float) -> None:
    compare(accumulating, every, num_batches, clip, strategy={"schedule": schedule})


def clipping(how: Any, name: str, value: float, algorithm: str) -> Any:
    specimen = ZOO[name]
    return fit(
        how,
        specimen.make_module,
        specimen.loader(6),
        max_epochs=1,
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
    )[0]


@pytest.mark.feature("Training", "gradient clipping by norm")
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["sequential", "functional_tying", "loose_parameters", "gpt2"])
def test_gradients_are_clipped_by_the_norm_over_all_stages(name: str, stages: int) -> None:
    compare(clipping, name, 0.02, "norm", stages=stages)


@pytest.mark.feature("Training", "gradient clipping by value")
@pytest.mark.parametrize("name", ["loose_parameters", "functional_tying"])
def test_gradients_are_clipped_by_value(name: str) -> None:
    compare(clipping, name, 0.003, "value", stages=3)


class ClipsByItself(SequentialMLP):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, 0.05, "norm")


def clipping_by_hook(how: Any) -> Any:
    return fit(how, ClipsByItself, points(6), max_epochs=1)[0]


@pytest.mark.feature("Training", "`configure_gradient_clipping`")
def test_the_configure_gradient_clipping_hook_clips() -> None:
    compare(clipping_by_hook)


class LogsGradientNorms(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.log_dict(grad_norm(module, norm_type=2))


def logging_gradient_norms(how: Any, name: str) -> Any:
    specimen = ZOO[name]
    callbacks = [LogsGradientNorms()]
    return fit(how, specimen.make_module, specimen.loader(3), callbacks=callbacks, max_epochs=1)[0]


@pytest.mark.feature("Training", "gradient norms in logs (`lightning_pipeshift.grad_norm`)")
@pytest.mark.parametrize("name", ["sequential", "functional_tying", "loose_parameters"])
def test_gradient_norms_logged_by_the_user_are_those_of_one_device(name: str) -> None:
    compare(logging_gradient_norms, name, stages=3)


class AddsGradientsUp(SequentialMLP):
    """Reads the gradients by itself, in the hook and in the way that it is told."""

    def __init__(self, hook: str, way: str) -> None:
        super().__init__()
        self.hook = hook
        self.way = way

    def read(self, hook: str) -> None:
        if self.hook != hook:
            return
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if self.way == "sum":
            self.log("sum", sum(float(gradient.sum()) for gradient in gradients))
        elif self.way == "check":
            assert not any(gradient.isnan().any() for gradient in gradients)
        elif self.way == "clip":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        else:
            from lightning.pytorch.utilities import grad_norm

            self.log_dict(grad_norm(self, norm_type=2))

    def on_after_backward(self) -> None:
        self.read("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read("on_before_optimizer_step")

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.read("configure_gradient_clipping")


def adding_gradients_up(how: Any, hook: str, way: str) -> Any:
    return fit(how, lambda: AddsGradientsUp(hook, way), points(3), max_epochs=1)[0]


@pytest.mark.parametrize(
    ("hook", "way"),
    [
        ("on_after_backward", "sum"),
        ("on_before_optimizer_step", "Lightning's grad_norm"),
        ("on_before_optimizer_step", "check"),
        ("configure_gradient_clipping", "clip"),
    ],
)
def test_gradients_that_the_user_reads_are_those_of_one_device(hook: str, way: str) -> None:
    compare(adding_gradients_up, hook, way)


# --------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------


def with_precision(
    how: Any,
    precision: str,
    clip: float | None,
    name: str = "layers_of_its_own",
    max_steps: int = -1,
) -> Any:
    specimen = ZOO[name]
    return fit(
        how,
        specimen.make_module,
        specimen.loader(5),
        specimen.loader(2),
        max_epochs=2,
        max_steps=max_steps,
        precision=precision,
        gradient_clip_val=clip,
    )[0]


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_precision_with_one_microbatch_gives_the_same_numbers(precision: str) -> None:
    """One microbatch: not even the order of a sum differs, so the tolerance can be tight."""
    # Plain Lightning rounds a norm of bfloat16 gradients to bfloat16.
    clip = None if precision == "bf16-true" else 0.1
    compare(with_precision, precision, clip, strategy={"microbatches": 1})


@pytest.mark.feature("Precision", "`32-true`, `64-true`, `bf16-mixed`, `bf16-true`")
@pytest.mark.parametrize(
    ("precision", "rtol", "atol", "max_steps"),
    # Sums in bfloat16 drift apart: few steps, and a tolerance of a few of its units.
    [
        ("32-true", 1e-4, 1e-6, -1),
        ("64-true", 1e-9, 1e-12, -1),
        ("bf16-mixed", 2e-2, 2e-3, -1),
        ("bf16-true", 2e-2, 4e-3, 2),
    ],
)
def test_precision_with_microbatches(
    precision: str, rtol: float, atol: float, max_steps: int
) -> None:
    compare(with_precision, precision, None, max_steps=max_steps, rtol=rtol, atol=atol, stages=3)


def test_precision_bf16_mixed_with_tied_parameters() -> None:
    compare(with_precision, "bf16-mixed", 0.5, "gpt2", strategy={"microbatches": 1}, stages=3)


class _ScaleDiary(L.Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def overflowing_points(num_batches: int, which: int) -> DataLoader:
    """As ``points``; one sample of batch ``which`` holds a huge number."""
    loader = points(num_batches)
    loader.dataset.tensors[0][8 * which + 5, 0] = 1000.0  # type: ignore[attr-defined]
    return loader


def with_scaler(
    how: Any, where: int, accumulate: int, clip: float | None, fused: bool = False
) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    scales = _ScaleDiary()
    record, trainer, _ = fit(
        how,
        lambda: OverflowingOnOneStage(where, fused),
        overflowing_points(8 * accumulate, which=3 * accumulate),
        max_epochs=1,
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
        callbacks=[scales],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )
    return record, scales.scales, isinstance(trainer.precision_plugin, MixedPrecision)


@pytest.mark.feature("Precision", "fp16 with a `GradScaler`")
@pytest.mark.parametrize("where", [1, 2], ids=["first stage", "last stage"])
@pytest.mark.parametrize(
    ("accumulate", "clip"), [(1, None), (1, 0.1), (2, None)], ids=["", "clipped", "accumulated"]
)
def test_an_overflow_on_one_stage_skips_the_step_on_all(
    where: int, accumulate: int, clip: float | None
) -> None:
    strategy = {"partition": [2, 2]}
    _, scales, _ = compare(
        with_scaler, where, accumulate, clip, strategy=strategy | {"microbatches": 1}
    )
    steps = list(itertools.pairwise(scales))
    assert any(later < earlier for earlier, later in steps), "the test should see the scale fall"
    assert any(later > earlier for earlier, later in steps), "the test should see the scale grow"
    compare(with_scaler, where, accumulate, clip, strategy=strategy, rtol=2e-2, atol=2e-3)


@pytest.mark.feature("Precision", "fp16 with a fused optimizer")
@pytest.mark.parametrize("where", [1, 2], ids=["first stage", "last stage"])
@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "accumulated"])
def test_a_fused_optimizer_skips_the_step_on_all(where: int, accumulate: int) -> None:
    strategy = {"partition": [2, 2], "microbatches": 1}
    _, scales, _ = compare(with_scaler, where, accumulate, None, True, strategy=strategy)
    assert any(later < earlier for earlier, later in itertools.pairwise(scales))


# --------------------------------------------------------------------------------------------------
# Optimizers and schedulers
# --------------------------------------------------------------------------------------------------


class Scheduled(ParameterGroups):
    """AdamW with three groups, and a scheduler of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        config: dict[str, Any]
        if self.kind == "step":
            config = {
                "scheduler": schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
                "interval": "step",
                "frequency": 2,
            }
        elif self.kind == "one cycle":
            cycle = schedulers.OneCycleLR(optimizer, [0.1, 0.1, 0.01], total_steps=20)
            config = {"scheduler": cycle, "interval": "step"}
        elif self.kind == "epoch":
            config = {"scheduler": schedulers.StepLR(optimizer, 1, gamma=0.3)}
        elif self.kind == "plateau":
            config = {
                "scheduler": schedulers.ReduceLROnPlateau(
                    optimizer, patience=0, threshold=10.0, factor=0.5
                ),
                "monitor": "val_loss",
            }
        else:
            config = {
                "scheduler": schedulers.ReduceLROnPlateau(
                    optimizer, patience=0, threshold=10.0, factor=0.5
                ),
                "monitor": "train_loss",
                "interval": "step",
            }
        return {"optimizer": optimizer, "lr_scheduler": config}


class _RateDiary(L.Callback):
    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def scheduled(how: Any, kind: str, accumulate: int) -> Any:
    rates = _RateDiary()
    record, trainer, _ = fit(
        how,
        lambda: Scheduled(kind),
        points(5),
        points(2),
        callbacks=[rates, LearningRateMonitor()],
        logger=CSVLogger("logs"),
        max_epochs=3,
        accumulate_grad_batches=accumulate,
    )
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in trainer.optimizers[0].param_groups
    ]
    return record, rates.rates, groups


@pytest.mark.feature("Optimizers", "learning rate schedulers and parameter groups")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["step", "one cycle", "epoch", "plateau", "plateau on train loss"])
def test_schedulers_and_parameter_groups(kind: str, accumulate: int) -> None:
    _, rates, _ = compare(scheduled, kind, accumulate)
    assert rates[0] != rates[-1], "the test should see the learning rate change"


# --------------------------------------------------------------------------------------------------
# Callbacks that decide, loggers
# --------------------------------------------------------------------------------------------------


class Worsening(SequentialMLP):
    """Its validation loss, on other data, falls and rises again."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0)


def stopping_early(how: Any, monitor: str) -> Any:
    stopping = EarlyStopping(monitor, patience=2, min_delta=0.001)
    best = ModelCheckpoint("best", monitor=monitor, save_top_k=2, filename="{epoch}-{step}")
    record, _, _ = fit(
        how,
        Worsening,
        points(3),
        points(4, seed=5),
        callbacks=[stopping, best],
        enable_checkpointing=True,
        max_epochs=30,
    )
    kept = {Path(path).name: float(score) for path, score in sorted(best.best_k_models.items())}
    return (
        record,
        stopping.stopped_epoch,
        float(stopping.best_score),
        Path(best.best_model_path).name,
        float(best.best_model_score or 0.0),
        kept,
        sorted(path.name for path in Path("best").iterdir()),
    )


@pytest.mark.feature("Callbacks", "`EarlyStopping`, `ModelCheckpoint`")
@pytest.mark.parametrize("monitor", ["val_loss", "train_loss"])
def test_early_stopping_and_model_checkpoint_decide_as_on_one_device(monitor: str) -> None:
    _, stopped_epoch, *_ = compare(stopping_early, monitor)
    assert 1 < stopped_epoch < 29, "the test should stop early"


class LogsAllKinds(SequentialMLP):
    """Everything that ``self.log`` can be told."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        scores = self(features)
        losses = F.cross_entropy(scores, classes, reduction="none")
        loss = losses.mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("sum", losses.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", losses.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("min", losses.min(), reduce_fx="min", on_step=False, on_epoch=True)
        self.log("first classes", (classes < 2).float().mean(), batch_size=len(classes))
        self.log("hidden", loss * 2, logger=False)
        self.log("python number", 3.5)
        self.log("python int", batch_idx)
        few = classes == 0
        if few.any():
            self.log("of one class", losses[few].mean(), batch_size=int(few.sum()), on_epoch=True)
        self.log_dict({"a": loss + 1, "b": losses.mean() * 0 + 2}, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores.detach(), "extra": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        losses = F.cross_entropy(self(features), classes, reduction="none")
        self.log("val_loss", losses.mean(), prog_bar=True)
        self.log("val_step", losses.mean(), on_step=True, on_epoch=True)
        self.log_dict({"val_max": losses.max(), "val_max_again": losses.max()}, reduce_fx="max")
        self.log("val_sum", losses.sum(), reduce_fx=torch.sum)
        return losses.mean()


def logging(how: Any, log_every: int, uneven: bool) -> Any:
    record, trainer, _ = fit(
        how,
        LogsAllKinds,
        uneven_points(5) if uneven else points(5),
        uneven_points(3, seed=3),
        callbacks=[LearningRateMonitor(logging_interval="step")],
        logger=CSVLogger("logs", flush_logs_every_n_steps=1),
        log_every_n_steps=log_every,
        max_epochs=2,
        val_check_interval=2,
    )
    assert trainer.logger is not None
    rows = read_csv(Path(str(trainer.logger.log_dir)) / "metrics.csv")
    return record, rows


@pytest.mark.feature("Loggers", "`self.log` with `CSVLogger`")
@pytest.mark.feature("Callbacks", "`LearningRateMonitor`")
@pytest.mark.parametrize("log_every", [1, 3])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_logged_values_and_the_csv_file_are_those_of_one_device(
    log_every: int, uneven: bool
) -> None:
    _, rows = compare(logging, log_every, uneven)
    assert len(rows) > 4


def test_logged_values_with_three_stages() -> None:
    compare(logging, 1, True, stages=3, strategy={"schedule": "gpipe"})


class LogsInHooks(SequentialMLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_mean", batch[0].mean(), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("twice_the_loss", outputs["loss"] * 2)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))
        self.log("from_metrics", self.trainer.callback_metrics["train_loss"])

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("val_batch_mean", batch[0].mean())

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss_again", self.trainer.callback_metrics["val_loss"])


def logging_in_hooks(how: Any) -> Any:
    return fit(how, LogsInHooks, points(3), points(2), max_epochs=2)[0]


@pytest.mark.feature("Loggers", "`self.log` in hooks")
def test_values_logged_in_hooks() -> None:
    compare(logging_in_hooks)


def averaging(how: Any, callback: Any) -> Any:
    callbacks = [callback()]
    return fit(how, SequentialMLP, points(4), points(2), callbacks, max_epochs=3)[0]


def swa() -> L.Callback:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)


def ema() -> L.Callback:
    return EMAWeightAveraging(decay=0.9)


# Bit by bit, and with other splits and models: tests/end_to_end/test_averages.py.
@pytest.mark.feature(
    "Callbacks", "`StochasticWeightAveraging`, `EMAWeightAveraging`, `WeightAveraging`"
)
@pytest.mark.parametrize("callback", [swa, ema, WeightAveraging])
def test_weight_averaging(callback: Any) -> None:
    compare(averaging, callback)


# --------------------------------------------------------------------------------------------------
# How long and how much
# --------------------------------------------------------------------------------------------------


class CountsSteps(L.Callback):
    """A clock that goes by steps, faster on one rank: two seconds for each instead of one."""

    def __init__(self, fast_rank: int) -> None:
        self.seconds = 0.0
        self._pace = 1.0 + (int(os.environ["RANK"]) == fast_rank)

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds += self._pace


def limited_by_time(how: Any, fast_rank: int) -> Any:
    clock = CountsSteps(fast_rank)
    timer.time = SimpleNamespace(monotonic=lambda: clock.seconds)  # type: ignore[assignment]
    limits: dict[str, Any] = {"max_time": {"seconds": 12}, "max_epochs": -1}
    record, trainer, _ = fit(how, SequentialMLP, points(10), callbacks=[clock], **limits)
    return trainer.global_step, record["parameters"]


# The first rank's time is everybody's.
@pytest.mark.feature("Training", "`max_time`")
@pytest.mark.parametrize(("fast_rank", "expected"), [(0, 6), (1, 12)])
def test_max_time_stops_all_ranks_after_the_same_step(fast_rank: int, expected: int) -> None:
    results = run_ranks(on_rank, 2, limited_by_time, {"microbatches": 2}, (fast_rank,), {})
    steps, parameters = zip(*results, strict=True)
    assert steps == (expected, expected)
    for name, value in parameters[0].items():
        assert torch.equal(value, parameters[1][name])


LIMITS: dict[str, dict[str, Any]] = {
    "batches": {"limit_train_batches": 3, "limit_val_batches": 1, "max_epochs": 2},
    "fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "max_epochs": 2},
    "no validation": {"limit_val_batches": 0, "max_epochs": 2},
    "overfit": {"overfit_batches": 2, "max_epochs": 2},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run=2": {"fast_dev_run": 2},
    "max_steps": {"max_steps": 7},
    "min_steps": {"min_steps": 8, "max_epochs": 3},
    "val_check_interval": {"val_check_interval": 2, "max_epochs": 2},
    "fraction of an epoch": {"val_check_interval": 0.4, "max_epochs": 2},
    "across epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "sanity check": {"num_sanity_val_steps": 2, "max_epochs": 1},
    "reload": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "barebones": {
        "barebones": True,
        "max_epochs": 2,
        "enable_checkpointing": None,
        "logger": None,
        "enable_progress_bar": None,
        "enable_model_summary": None,
        "num_sanity_val_steps": None,
        "log_every_n_steps": None,
    },
    "anomaly": {"detect_anomaly": True, "max_epochs": 1},
    "inference mode off": {"inference_mode": False, "max_epochs": 1},
    "profiler": {"profiler": "simple", "max_epochs": 1},
}


def limited(how: Any, name: str) -> Any:
    return fit(how, SequentialMLP, points(5), points(4, seed=5), **LIMITS[name])[0]


@pytest.mark.feature("Training", "`max_steps`, `min_steps`, `overfit_batches`, `limit_*_batches`")
@pytest.mark.feature("Training", "`fast_dev_run`, `barebones`, `inference_mode`")
@pytest.mark.feature("Training", "`reload_dataloaders_every_n_epochs`, `num_sanity_val_steps`")
@pytest.mark.feature("Training", "`val_check_interval`, `check_val_every_n_epoch`")
@pytest.mark.parametrize("name", list(LIMITS))
def test_limits(name: str) -> None:
    compare(limited, name)


# --------------------------------------------------------------------------------------------------
# torchmetrics
# --------------------------------------------------------------------------------------------------


class ManyMetrics(SequentialMLP):
    """Metrics called, only updated, in collections, computed by hand; per step and per epoch."""

    def __init__(self, on_step: bool, on_epoch: bool) -> None:
        super().__init__()
        self.when: Any = {"on_step": on_step, "on_epoch": on_epoch}
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.updated = MulticlassAccuracy(NUM_CLASSES, average="macro")
        self.mean_loss = MeanMetric()
        self.collection = MetricCollection(
            {
                "f1": MulticlassF1Score(NUM_CLASSES, average="macro"),
                "top2": MulticlassAccuracy(NUM_CLASSES, top_k=2),
            },
            prefix="train_",
        )
        self.val_collection: Any = self.collection.clone(prefix="val_")
        self.val_updated = MulticlassAccuracy(NUM_CLASSES)
        self.confusion = MulticlassConfusionMatrix(NUM_CLASSES)
        self.by_hand: Any = nn.ModuleList([MulticlassAccuracy(NUM_CLASSES) for _ in range(2)])
        self.matrices: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        scores = self(features)
        loss = F.cross_entropy(scores, classes)
        self.accuracy(scores, classes)
        self.updated.update(scores, classes)
        self.mean_loss.update(loss.detach(), weight=len(classes))
        self.collection(scores, classes)
        self.log("accuracy", self.accuracy, **self.when)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        self.log_dict(self.collection, **self.when)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        features, classes = batch
        scores = self(features)
        self.val_collection.update(scores, classes)
        self.val_updated(scores, classes)
        self.confusion.update(scores, classes)
        self.by_hand[dataloader_idx].update(scores, classes)
        self.log("val_accuracy", self.val_updated, **self.when)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_collection.compute())
        self.val_collection.reset()
        self.matrices.append(self.confusion.compute().clone())
        self.confusion.reset()
        for index, metric in enumerate(self.by_hand):
            if metric.update_called:
                self.log(f"by_hand_{index}", metric.compute())
                metric.reset()


def metrics(how: Any, on_step: bool, on_epoch: bool, two_loaders: bool) -> Any:
    loaders = [uneven_points(3, seed=3), points(2, seed=4)]
    record, _, module = fit(
        how,
        lambda: ManyMetrics(on_step, on_epoch),
        uneven_points(4),
        loaders if two_loaders else loaders[0],
        max_epochs=2,
        num_sanity_val_steps=1,
    )
    return record, module.matrices


@pytest.mark.feature("Loggers", "torchmetrics")
@pytest.mark.parametrize("on_epoch", [False, True], ids=["step", "both"])
def test_torchmetrics(on_epoch: bool) -> None:
    compare(metrics, True, on_epoch, False)


def test_torchmetrics_by_epoch_with_two_validation_loaders() -> None:
    compare(metrics, False, True, True, stages=3)


def of_the_zoo(how: Any, name: str) -> Any:
    specimen = ZOO[name]
    return fit(how, specimen.make_module, specimen.loader(4), specimen.loader(3), max_epochs=2)[0]


@pytest.mark.parametrize("name", ["accuracy", "accumulators"])
def test_metrics_and_accumulators_of_the_zoo(name: str) -> None:
    compare(of_the_zoo, name)


class TrainsOnAMetric(SequentialMLP):
    """Metrics that see the whole step through ``compute`` in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(loss.detach(), weight=len(batch[0]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())
        self.seen.reset()


def metric_by_hand(how: Any) -> Any:
    return fit(how, TrainsOnAMetric, uneven_points(4), max_epochs=2)[0]


def test_a_metric_that_is_updated_in_training_and_computed_at_the_end_of_the_epoch() -> None:
    compare(metric_by_hand)


# --------------------------------------------------------------------------------------------------
# State of the user's own
# --------------------------------------------------------------------------------------------------


class Accumulates(SequentialMLP):
    """Lists, dicts, counters and buffers, changed by steps and read by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.by_class: dict[int, float] = {}
        self.num_val_samples = 0
        self.register_buffer("running", torch.zeros(NUM_CLASSES))
        self.seen_in_epoch: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        features, classes = batch
        scores = self(features)
        losses = F.cross_entropy(scores, classes, reduction="none")
        self.outputs.append({"scores": scores, "loss": losses.mean(), "index": batch_idx})
        for number, loss in zip(classes.tolist(), losses.tolist(), strict=True):
            self.by_class[number] = self.by_class.get(number, 0.0) + loss
        self.num_val_samples += len(classes)
        self.running += scores.sum(dim=0)
        return losses

    def on_validation_epoch_end(self) -> None:
        scores = torch.cat([output["scores"] for output in self.outputs])
        loss = torch.stack([output["loss"] for output in self.outputs]).mean()
        self.log("val_loss", loss)
        self.log("val_std", scores.std())
        self.log("num_val_samples", float(self.num_val_samples))
        for number, value in sorted(self.by_class.items()):
            self.log(f"class_{number}", value)
        self.seen_in_epoch.append(plain([o["index"] for o in self.outputs]))
        self.outputs.clear()
        self.by_class = {}


def accumulating_in_validation(how: Any) -> Any:
    record, _, module = fit(
        how, Accumulates, points(3), uneven_points(3, seed=5), max_epochs=2, num_sanity_val_steps=2
    )
    return record, module.seen_in_epoch, module.num_val_samples, plain(module.running)


@pytest.mark.parametrize("stages", [2, 3])
def test_lists_filled_in_validation_steps_are_there_at_the_end_of_the_epoch(stages: int) -> None:
    compare(accumulating_in_validation, stages=stages)


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


class TwoLoaders(SequentialMLP):
    def __init__(self, add_index: bool) -> None:
        super().__init__()
        self.add_index = add_index

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if self.add_index:
            self.log("val_loss", loss, prog_bar=True)
        else:
            self.log(f"val_loss_{dataloader_idx}", loss, add_dataloader_idx=False)


def two_loaders(how: Any, add_index: bool, iterable: bool) -> Any:
    loaders: Any = [points(2, seed=5), uneven_points(3, seed=6)]
    if iterable:
        loaders = [DataLoader(Stream(11, seed=5), batch_size=4), points(2, seed=6)]
    return fit(how, lambda: TwoLoaders(add_index), points(3), loaders, max_epochs=2)[0]


@pytest.mark.feature("Data", "several validation loaders")
@pytest.mark.parametrize("iterable", [False, True], ids=["sized", "iterable"])
@pytest.mark.parametrize("add_index", [True, False])
def test_several_validation_loaders(add_index: bool, iterable: bool) -> None:
    compare(two_loaders, add_index, iterable)


class Stream(IterableDataset):
    """Points whose number is not known beforehand."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.points = points(4, seed=seed).dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.points[index] for index in range(self.size))


def iterable_data(how: Any, **arguments: Any) -> Any:
    train, val = DataLoader(Stream(27), batch_size=8), DataLoader(Stream(13, seed=5), batch_size=4)
    return fit(how, SequentialMLP, train, val, **{"max_epochs": 2, **arguments})[0]


@pytest.mark.feature("Data", "iterable data sets")
@pytest.mark.parametrize(
    "arguments",
    [{}, {"val_check_interval": 2}, {"limit_train_batches": 2, "limit_val_batches": 2}],
    ids=["whole", "val_check_interval", "limited"],
)
def test_iterable_data(arguments: dict[str, Any]) -> None:
    compare(iterable_data, **arguments)


def dict_of_loaders(how: Any) -> Any:
    from lightning.pytorch.utilities import CombinedLoader

    train = CombinedLoader({"a": points(3), "b": points(2, seed=2)}, "max_size_cycle")
    return fit(how, TwoSources, train, max_epochs=2)[0]


class TwoSources(SequentialMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch["a"][0]), batch["a"][1])
        self.log("train_loss", loss)
        self.log("mean_of_b", batch["b"][0].mean())
        return loss


@pytest.mark.feature("Data", "`CombinedLoader`")
def test_combined_loaders() -> None:
    compare(dict_of_loaders)


class Numbers(SequentialMLP):
    """Notes which samples it was given, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[list[int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.numbers.append(batch[2].tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:2], batch_idx)


class NoisyDataset(torch.utils.data.Dataset):
    """Draws in the worker: features depend on the worker's seed."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(12) + np.random.rand() + random.random()
        return noise.float(), index % NUM_CLASSES, index


def shuffled(how: Any, seeded: bool, workers: int, noisy: bool) -> Any:
    if seeded:
        L.seed_everything(7, workers=True)
    else:  # as if each rank had been told nothing
        torch.seed()
        np.random.seed()
        random.seed()
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    if workers:
        options["multiprocessing_context"] = "fork"
    if noisy:
        train: Any = DataLoader(NoisyDataset(24), 8, shuffle=True, **options)
    else:
        train = numbered_points(3, shuffle=True, **options)
    record, _, module = fit(how, Numbers, train, max_epochs=3)
    return record, module.numbers


@pytest.mark.feature("Data", "shuffled loaders")
@pytest.mark.parametrize("noisy", [False, True], ids=["", "noisy"])
@pytest.mark.parametrize("workers", [0, 2])
def test_seeded_shuffle_gives_the_batches_of_one_device(workers: int, noisy: bool) -> None:
    _, numbers = compare(shuffled, True, workers, noisy)
    assert numbers[0] != sorted(numbers[0])
    assert numbers[:3] != numbers[3:6]


@pytest.mark.parametrize("noisy", [False, True], ids=["", "noisy"])
@pytest.mark.parametrize("workers", [0, 2])
def test_unseeded_shuffle_gives_every_stage_the_same_batches(workers: int, noisy: bool) -> None:
    first = run_ranks(on_rank, 3, shuffled, {"microbatches": 4}, (False, workers, noisy), {})
    for record, numbers in first[1:]:
        assert numbers == first[0][1]
        for name, value in record["parameters"].items():
            assert torch.equal(value, first[0][0]["parameters"][name])
    again = run_ranks(on_rank, 2, shuffled, {"microbatches": 4}, (False, workers, noisy), {})
    assert again[0][1] != first[0][1], "an unseeded run should shuffle in another order each time"


# --------------------------------------------------------------------------------------------------
# Hooks
# --------------------------------------------------------------------------------------------------

HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_test_end",
    "on_predict_start",
    "on_predict_epoch_start",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_end",
    "on_predict_end",
    "on_save_checkpoint",
    "on_fit_end",
    "teardown",
    "configure_model",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
]


def _seen(argument: Any) -> Any:
    """The comparable parts of a hook's argument."""
    if isinstance(argument, L.Trainer | L.LightningModule | torch.optim.Optimizer):
        return type(argument).__name__
    if isinstance(argument, Tensor | int | float | str | None):
        return plain(argument)
    if isinstance(argument, dict):
        if "state_dict" in argument:
            return sorted(argument)
        return {key: _seen(value) for key, value in argument.items()}
    if isinstance(argument, list | tuple):
        return [_seen(item) for item in argument]
    return type(argument).__name__


def _recording_hook(name: str, original: Any) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(
            (name, [_seen(a) for a in args], {k: _seen(v) for k, v in kwargs.items()})
        )
        return original(self, *args, **kwargs)

    return hook


class RecordingCallback(L.Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []


class RecordingModule(SequentialMLP):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "double": 2 * loss.detach(), "features": batch[0]}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return {"scores": self.scores_of(batch), "index": batch_idx}

    def scores_of(self, batch: Any) -> Tensor:
        return batch[0][:, :2] * 2

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.log("test_max", scores.max(), reduce_fx="max")
        return scores


for _name in HOOKS:
    for _class in (RecordingCallback, RecordingModule):
        _original = getattr(_class, _name, None)
        if _original is not None:
            setattr(_class, _name, _recording_hook(_name, _original))


def recorded_hooks(how: Any, accumulate: int) -> Any:
    callback = RecordingCallback()
    record, trainer, module = fit(
        how,
        RecordingModule,
        points(3),
        points(2, seed=5),
        callbacks=[callback],
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        gradient_clip_val=0.5,
    )
    trainer.validate(module, points(2, seed=5), verbose=False)
    trainer.test(module, points(2, seed=6), verbose=False)
    trainer.predict(module, points(2, seed=7))
    return record, callback.calls, module.calls


@pytest.mark.feature("Training", "hooks of modules, data modules and callbacks")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_are_called_on_every_rank_with_the_same_arguments(accumulate: int) -> None:
    _, of_callback, of_module = compare(recorded_hooks, accumulate, stages=3)
    names = {name for name, *_ in [*of_callback, *of_module]}
    assert names == set(HOOKS) - {"configure_model"} | ({"configure_model"} & names)


class ReadsGradients(L.Callback):
    """Looks at, and changes, gradients and parameters where Lightning lets users do so."""

    def __init__(self) -> None:
        self.shrunk = 0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                self.shrunk += 1

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.99)


def changing_gradients(how: Any) -> Any:
    callback = ReadsGradients()
    record = fit(how, SequentialMLP, points(4), callbacks=[callback], max_epochs=2)[0]
    assert callback.shrunk
    return record


@pytest.mark.feature("Training", "hooks that change gradients or parameters")
def test_gradients_and_parameters_may_be_changed_in_hooks() -> None:
    compare(changing_gradients)


# --------------------------------------------------------------------------------------------------
# Freezing
# --------------------------------------------------------------------------------------------------


class FreezesItself(LooseParameters):
    """Switches layers' and loose parameters' gradients off and on by itself."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.second.requires_grad_(batch_idx % 2 == 0)
        self.shift.requires_grad_(batch_idx % 3 != 0)


def freezing_by_hook(how: Any) -> Any:
    return fit(how, FreezesItself, points(6), max_epochs=1, gradient_clip_val=0.3)[0]


@pytest.mark.feature("Training", "parameters that are frozen and unfrozen between steps")
def test_parameters_are_frozen_and_unfrozen_between_steps() -> None:
    compare(freezing_by_hook, stages=3)


class DetachesForAWhile(LayersOfItsOwn):
    """Where the gradient flows depends on the step, not on the batch."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.second(self.first(features).relu()).tanh()
        if self.is_early():
            hidden = hidden.detach()
        return self.head(self.third(hidden).relu())

    def is_early(self) -> bool:
        return self.current_epoch == 0


class DetachesByAList(DetachesForAWhile):
    """By the length of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)

    def is_early(self) -> bool:
        return len(self.batches) < 4


def detaching(how: Any) -> Any:
    return fit(how, DetachesForAWhile, points(3), max_epochs=2)[0]


def detaching_by_a_list(how: Any) -> Any:
    return fit(how, DetachesByAList, points(3), max_epochs=2)[0]


def test_gradients_begin_to_flow_in_a_later_epoch() -> None:
    compare(detaching, stages=2)


def test_gradients_that_begin_to_flow_in_a_later_step_are_not_lost_silently() -> None:
    compare(detaching_by_a_list, stages=2)


class WarmsUpItsSecondLoss(LayersOfItsOwn):
    """From some step on, the loss needs something of the first stage that it did not before."""

    def is_late(self) -> bool:
        return self.global_step >= 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        early = self.first(features)
        hidden = self.third(self.second(early.relu()).tanh()).relu()
        loss = F.cross_entropy(self.head(hidden), classes)
        if self.is_late():
            loss = loss + 0.1 * early.square().mean()
        self.log("train_loss", loss)
        return loss


class WarmsUpByAList(WarmsUpItsSecondLoss):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)

    def is_late(self) -> bool:
        return len(self.batches) > 2


def warming_up(how: Any) -> Any:
    return fit(how, WarmsUpItsSecondLoss, points(4), max_epochs=1)[0]


def warming_by_a_list(how: Any) -> Any:
    return fit(how, WarmsUpByAList, points(4), max_epochs=1)[0]


def test_a_loss_gets_another_part_in_a_later_step() -> None:
    compare(warming_up, stages=2)


def test_a_loss_that_gets_another_part_in_a_later_step_is_not_wrong_silently() -> None:
    compare(warming_by_a_list, stages=2)


# --------------------------------------------------------------------------------------------------
# Steps without a loss
# --------------------------------------------------------------------------------------------------


def leaving_out(
    how: Any, left_out: Sequence[int], accumulate: int, precision: str = "32-true"
) -> Any:
    callback = RecordingCallback()
    record, _, _ = fit(
        how,
        lambda: LeavesOut(left_out),
        numbered_points(4),
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
    )
    batch_ends = [args[2] for name, args, _ in callback.calls if name == "on_train_batch_end"]
    # The loss there is the mean over the microbatches that have one.
    batch_ends = [sorted(outputs) for outputs in batch_ends]
    return record, [name for name, *_ in callback.calls], batch_ends


THE_VERY_FIRST = [0, 1]
ALL_OF_BATCH_0 = list(range(8))
ALL_OF_BATCH_1 = list(range(8, 16))


@pytest.mark.parametrize(
    ("left_out", "stages", "schedule"),
    [
        (THE_VERY_FIRST, 2, "1f1b"),
        (THE_VERY_FIRST, 3, "gpipe"),
        ([2, 3, 12, 13], 2, "gpipe"),
        ([14, 15], 3, "1f1b"),
        (ALL_OF_BATCH_0, 2, "1f1b"),
        ([*ALL_OF_BATCH_0, 10, 11], 3, "1f1b"),
        (ALL_OF_BATCH_1, 1, "1f1b"),
        (ALL_OF_BATCH_1, 2, "gpipe"),
        (list(range(24, 32)), 2, "1f1b"),
    ],
)
def test_a_microbatch_without_a_loss_counts_nothing(
    left_out: list[int], stages: int, schedule: str
) -> None:
    compare(leaving_out, left_out, 1, stages=stages, strategy={"schedule": schedule})


def test_a_batch_without_a_loss_while_gradients_accumulate() -> None:
    compare(leaving_out, ALL_OF_BATCH_1, 2)


# --------------------------------------------------------------------------------------------------
# `self.device`
# --------------------------------------------------------------------------------------------------


class AsksForItsDevice(LayersOfItsOwn):
    """Gets a LightningModule inside when Lightning has told all others their device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def configure_model(self) -> None:
        self.second = WithADevice()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add((str(self.device), str(self.second.device)))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        # As if it was another than that on which the model is afterwards.
        self._device = torch.device("meta")


class WithADevice(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self._device = torch.device("meta")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features) + torch.zeros(1, device=str(self.device))


def asking_for_the_device(how: Any) -> Any:
    module = AsksForItsDevice()
    quiet_trainer(how, max_epochs=1).fit(module, points(2))
    return module.seen, str(module.device), str(module.second.device)


def test_modules_know_the_device_of_their_stage() -> None:
    expected = ({("cpu", "cpu")}, "cpu", "cpu")
    assert asking_for_the_device({}) == expected
    for stages in (1, 2):
        found = run_ranks(on_rank, stages, asking_for_the_device, {"microbatches": 2}, (), {})
        assert found == [expected] * stages


def test_an_overflow_on_several_stages_is_one_for_the_kernel() -> None:
    """A fused kernel compares with 1."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = over_stages(
        MixedPrecision("16-mixed", "cpu", scaler),
        lambda *_: torch.zeros(()),
        nullcontext,
        lambda flag: flag + 1,  # another stage has found one too
    )
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1, 1]
    assert scaler.get_scale() == 2
    by_itself(plugin)
