"""A user's mistake gets an error that says what was found, what is allowed and what to change.

And a failure, whatever it is, ends every rank by itself, with the reason of the first.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import (
    BatchError,
    ConfigurationError,
    LayerError,
    PartitionError,
    PipeShiftError,
    PipeShiftStrategy,
    PlanError,
    ScheduleError,
)
from lightning_pipeshift.testing import Outcome, run_ranks
from tests.features_models import (
    built,
    differences,
    fit,
    on_rank,
    parameters_of,
    plain,
    quiet_trainer,
)
from tests.models import (
    NUM_CLASSES,
    NUM_FEATURES,
    CheckpointedByHand,
    Classifier,
    LayersOfItsOwn,
    SequentialMLP,
    points,
)


def fails(
    function: Callable[..., Any],
    *args: Any,
    stages: int = 2,
    strategy: dict[str, Any] | None = None,
) -> list[Outcome]:
    """Runs what should fail, and requires that every rank ends, after the first by itself."""
    outcomes = run_ranks(
        on_rank,
        stages,
        function,
        {"microbatches": 4, **(strategy or {})},
        args,
        {},
        expect_failure=True,
    )
    for outcome in outcomes:
        assert outcome.failed, f"{outcome}\nended well, but {outcomes}"
        assert outcome.error_type != "Killed", str(outcome)
    return outcomes


def refused(outcomes: list[Outcome], error: type[Exception], *parts: str) -> None:
    """Requires the error, or its message by way of StageFailedError, on every rank."""
    assert any(outcome.error_type == error.__name__ for outcome in outcomes), outcomes[0]
    for outcome in outcomes:
        assert outcome.error_type in (error.__name__, "StageFailedError"), str(outcome)
        for part in parts:
            assert re.search(part, outcome.message), f"no {part!r} in: {outcome.message}"


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"microbatches": 0}, ConfigurationError, ["microbatches=0", "1 to 10000", "auto"]),
        ({"microbatches": -3}, ConfigurationError, ["microbatches=-3", "1 to 10000"]),
        ({"microbatches": 2.5}, ConfigurationError, ["microbatches=2.5", "whole number"]),
        ({"microbatches": True}, ConfigurationError, ["microbatches=True"]),
        ({"microbatches": "many"}, ConfigurationError, ["'many'", "auto"]),
        ({"schedule": "zigzag"}, ScheduleError, ["'zigzag'", "gpipe", "1f1b"]),
        ({"schedule": None}, ScheduleError, ["None", "gpipe", "1f1b"]),
        ({"partition": "evenly"}, ConfigurationError, ["'evenly'", "'auto'", "'uniform'"]),
        ({"partition": 4}, ConfigurationError, ["4", "'auto'", "'uniform'", "list"]),
        ({"virtual_machines": 0}, ConfigurationError, ["virtual_machines=0", "1"]),
        ({"plan": "nowhere.json"}, PlanError, ["nowhere.json"]),
        ({"plan": 5}, ConfigurationError, ["5"]),
        ({"communication": {"timeout": 3}}, ConfigurationError, ["3", "Communication(...)"]),
    ],
    ids=str,
)
def test_an_argument_that_is_not_allowed(
    arguments: dict[str, Any], error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        PipeShiftStrategy(**arguments)
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, PipeShiftError)


class AnotherAccelerator(CPUAccelerator):
    """Of a machine with devices that nobody has tried."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xpu", number) for number in range(int(devices))]


@pytest.mark.parametrize("devices", [1, 2])
def test_devices_of_an_unknown_kind(devices: int) -> None:
    with pytest.raises(ConfigurationError, match=r"these devices are xpu\. Use `Trainer\(accel"):
        L.Trainer(accelerator=AnotherAccelerator(), devices=devices, strategy="pipeshift")


def test_a_damaged_plan(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"layers": [1, 2')
    with pytest.raises(PlanError, match=r"plan\.json"):
        PipeShiftStrategy(plan=path)


def test_the_plan_before_a_run() -> None:
    with pytest.raises(PlanError, match=r"fit|batch"):
        _ = PipeShiftStrategy().plan


def fitting(how: Any, make_module: Callable[[], Any] = LayersOfItsOwn, **arguments: Any) -> None:
    fit(how, make_module, points(3), points(2), **{"max_epochs": 1, **arguments})


def fitted(how: Any, make_module: Callable[[], Any]) -> Any:
    """What is in the module in the end."""
    return fit(how, make_module, points(3), max_epochs=1)[0]


@pytest.mark.parametrize(
    ("partition", "parts"),
    [
        ([2, 3], [r"\[2, 3\]", "5", "4 layers \\(", "blocks|layers", "add"]),
        ([1, 2], [r"\[1, 2\]", "3", "4", "add"]),
        ([1, 2, 1], [r"\[1, 2, 1\]", "3 counts", "2 stages"]),
        ([4], [r"\[4\]", "1 counts?", "2 stages"]),
        ([5, -1], ["-1", "0 or more"]),
        ([2.0, 2.0], ["2.0", "whole number"]),
        ([], [r"\[\]"]),
        ([[2, 2], [1, 3]], ["2 virtual machines", "of 2, 2 stages", "this run has 2"]),
    ],
    ids=str,
)
def test_a_partition_that_does_not_fit(partition: Any, parts: list[str]) -> None:
    outcomes = fails(fitting, strategy={"partition": partition})
    refused(outcomes, PartitionError, *parts)


def test_a_plan_for_another_model(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    run_ranks(on_rank, 2, saving_the_plan, {"partition": [2, 2]}, (str(path),), {})
    outcomes = fails(fitting, SequentialMLP, strategy={"plan": str(path), "microbatches": "auto"})
    refused(outcomes, PlanError, "first", "model.0|plan")


def test_a_plan_for_another_number_of_stages(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    run_ranks(on_rank, 2, saving_the_plan, {"partition": [2, 2]}, (str(path),), {})
    outcomes = fails(fitting, strategy={"plan": str(path), "microbatches": "auto"}, stages=3)
    refused(outcomes, PlanError, "2", "3")


def saving_the_plan(how: Any, path: str) -> None:
    _, trainer, _ = fit(how, LayersOfItsOwn, points(1), max_epochs=1)
    if trainer.is_global_zero:
        with open(path, "w") as file:
            file.write(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------
# Models that cannot be a pipeline
# --------------------------------------------------------------------------------------------------


class ManualOptimization(LayersOfItsOwn):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OverridesBackward(LayersOfItsOwn):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class TakesTheIterator(LayersOfItsOwn):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class TwoOptimizers(LayersOfItsOwn):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.head)]


class SecondOrder(LayersOfItsOwn):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoParameters(LayersOfItsOwn):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)


class ListsNothing(LayersOfItsOwn):
    def configure_layers(self) -> Any:
        return []


class ListsTwice(LayersOfItsOwn):
    def configure_layers(self) -> Any:
        return [self.first, self.second, self.first]


class ListsAStranger(LayersOfItsOwn):
    def configure_layers(self) -> Any:
        return [self.first, nn.Linear(3, 3)]


class ListsNested(SequentialMLP):
    def configure_layers(self) -> Any:
        return [self.model, self.model[3]]


class ForgetsAUsedLayer(LayersOfItsOwn):
    """The list leaves a layer out that the step uses between two listed ones."""

    def configure_layers(self) -> Any:
        return [self.first, self.head]


class CallsTwice(LayersOfItsOwn):
    def forward(self, features: Tensor) -> Tensor:
        hidden = self.second(self.first(features).relu())
        hidden = self.third(hidden.tanh())
        return self.head(self.second(hidden.relu()))


class WithInside(nn.Module):
    """A layer whose inside is looked at by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_FEATURES, 16)
        self.outer = nn.Linear(16, 16)
        self.seen: list[Tensor] = []
        self.penalty: Any = None

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inner(features)
        self.seen.append(hidden)
        self.penalty = hidden.square().mean()
        return self.outer(hidden.relu())


class _LooksInside(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.inside = WithInside()
        self.behind = nn.Linear(16, 16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def configure_layers(self) -> Any:
        return [self.stem, self.inside, self.behind, self.head]

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.behind(self.inside(self.stem(features))))


class UsesAList(_LooksInside):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inside.seen.clear()
        return super().training_step(batch, batch_idx) + self.inside.seen[-1].square().mean()


class ChangesItsInput(_LooksInside):
    def __init__(self) -> None:
        super().__init__()
        self.inside = InPlaceLayer()  # type: ignore[assignment]

    def forward(self, features: Tensor) -> Tensor:
        stem = self.stem(features)
        hidden = self.inside(stem)
        return self.head(self.behind(hidden) + F.pad(stem, (0, 4)))


class InPlaceLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden.mul_(2.0))


class ReturnsADictWithoutLoss(LayersOfItsOwn):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"score": super().training_step(batch, batch_idx)}


class ReturnsManyLosses(LayersOfItsOwn):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class ReturnsANumber(LayersOfItsOwn):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return 0.5


class WeighsSometimes(LayersOfItsOwn):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": 3.0} if (batch[1] == 0).any() else {"loss": loss}


class ReplacesItsHead(LayersOfItsOwn):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head = nn.Linear(16, NUM_CLASSES)
            self.trainer.strategy.setup_optimizers(self.trainer)


class ReplacesAParameter(LayersOfItsOwn):
    """Its new parameter was not trained, without a word."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head.bias = nn.Parameter(torch.zeros(NUM_CLASSES))
            self.trainer.optimizers[0].add_param_group({"params": [self.head.bias]})


class TrainsAStranger(LayersOfItsOwn):
    """Layers in a list are not in the model. They were not trained, without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(NUM_CLASSES, NUM_CLASSES)]

    def forward(self, features: Tensor) -> Tensor:
        return self.others[0](super().forward(features))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *self.others[0].parameters()], lr=0.1)


class CheckpointsSharedWeights(LayersOfItsOwn):
    """Its gradients of the second layer were lost, without a word."""

    def __init__(self) -> None:
        super().__init__()
        second = CheckpointedByHand()
        second.linear.weight = self.third.weight
        self.second = second  # type: ignore[assignment]


class NormalizesAWeight(LayersOfItsOwn):
    """As SwaV does with its prototypes. Stages had weights of different microbatches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.second.weight.div_(self.second.weight.norm(dim=1, keepdim=True))
        return super().training_step(batch, batch_idx)


class UnfreezesInAStep(LayersOfItsOwn):
    """Gradients were lost in the first step with others."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append(batch_idx)
        self.second.requires_grad_(len(self.steps) > 3)
        return super().training_step(batch, batch_idx)


class _Turns(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.bias.requires_grad_(not self.bias.requires_grad)
        return super().forward(input)


class TurnsAFlag(LayersOfItsOwn):
    """In each microbatch; stages took the flag of the first for that of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.second = _Turns(16, 16)


MODELS: list[tuple[type, type[Exception], list[str]]] = [
    (OverridesBackward, ConfigurationError, ["backward", "OverridesBackward"]),
    (TakesTheIterator, ConfigurationError, ["dataloader_iter", "batch"]),
    (SecondOrder, ConfigurationError, ["LBFGS", "AdamW"]),
    (NoParameters, LayerError, ["NoParameters", "parameters"]),
    (ListsNothing, LayerError, ["configure_layers", "non-empty list"]),
    (ListsTwice, LayerError, ["configure_layers", "first", "twice"]),
    (ListsAStranger, LayerError, ["configure_layers", r"Linear\(", "not a module inside"]),
    (ListsNested, LayerError, ["configure_layers", "model", "inside"]),
    (ReturnsADictWithoutLoss, LayerError, ["'loss'", "score"]),
    (ReturnsManyLosses, LayerError, ["loss", "one element"]),
    (ReturnsANumber, LayerError, ["float", "tensor"]),
    (WeighsSometimes, BatchError, ["weight"]),
    (NormalizesAWeight, LayerError, ["modified by an inplace operation", r"`x = x \* 2`"]),
    (ReplacesItsHead, LayerError, ["'head.weight', 'head.bias'", "replaced", "on_fit_start"]),
    (ReplacesAParameter, LayerError, ["'head.bias'", "replaced", "on_fit_start"]),
    (TrainsAStranger, LayerError, ["2 parameters", "ModuleList"]),
]
WORKS = (
    ManualOptimization,
    UsesAList,
    ChangesItsInput,
    CheckpointsSharedWeights,
    UnfreezesInAStep,
    TurnsAFlag,
)


@pytest.mark.feature(
    "Refused, with advice",
    "`dataloader_iter`; on several devices an overridden `backward`, LBFGS",
)
@pytest.mark.parametrize(("model", "error", "parts"), MODELS, ids=[m.__name__ for m, *_ in MODELS])
def test_a_model_that_cannot_be_a_pipeline(
    model: type, error: type[Exception], parts: list[str]
) -> None:
    strategy = {"microbatches": 4, "partition": "uniform"}
    refused(fails(fitting, model, stages=2, strategy=strategy), error, *parts)


@pytest.mark.parametrize("model", WORKS)
def test_a_model_that_only_seems_impossible(model: type) -> None:
    strategy = {"microbatches": 4, "partition": "uniform"}
    (alone,) = run_ranks(on_rank, 1, fitted, strategy, (model,), {})
    for found in run_ranks(on_rank, 2, fitted, strategy, (model,), {}):
        assert not differences(found, alone, 0, 0)


@pytest.mark.parametrize("model", [ReplacesItsHead, ReplacesAParameter, TrainsAStranger])
def test_what_no_stage_would_train_is_refused_with_any_schedule(model: type) -> None:
    strategy = {"schedule": "async", "microbatches": 1}
    refused(fails(fitting, model, stages=2, strategy=strategy), LayerError, "no stage trains")
    refused(fails(fitting, model, stages=1), LayerError, "no stage trains")


def test_a_trained_weight_changes_in_a_step_only_if_no_other_is_in_flight() -> None:
    strategy = {"schedule": "async", "microbatches": 1}
    outcomes = fails(fitting, NormalizesAWeight, stages=2, strategy=strategy)
    refused(outcomes, LayerError, "'second.weight'", "asynchronous")
    one, two = (
        run_ranks(normalizing, stages, {"microbatches": 1, "partition": partition})
        for stages, partition in ((1, [4]), (2, [1, 3]))
    )
    for other in two:
        assert not differences(one[0], other, 0, 0)


def normalizing(strategy: dict[str, Any]) -> Any:
    how = {"devices": int(os.environ["WORLD_SIZE"]), "pipeshift": strategy}
    trainer, module = quiet_trainer(how, max_epochs=1), built(NormalizesAWeight)
    trainer.fit(module, points(4))
    return parameters_of(module)


@pytest.mark.parametrize(("model", "cut"), [(UsesAList, [4, 0]), (CallsTwice, [2, 2])])
def test_layers_hand_out_tensors_by_lists_and_values_travel_back(
    model: type, cut: list[int]
) -> None:
    """A layer that hands a tensor out by a list, and a cut across which values travel back."""
    strategy = {"microbatches": 4, "partition": cut}
    alone = {"microbatches": 4}
    (expected,) = run_ranks(on_rank, 1, fitted, alone, (model,), {})
    for found in run_ranks(on_rank, 2, fitted, strategy, (model,), {}):
        assert not differences(found, expected, 0, 0)


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


class DependsOnTheRank(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(NUM_FEATURES, generator=generator)
        if index >= 8 * int(os.environ.get("DIFFERS_FROM", 0)):
            features[0] += int(os.environ["RANK"])
        return features, index % NUM_CLASSES


def training_on_other_batches(how: Any, entry_point: str) -> None:
    loader = DataLoader(DependsOnTheRank(), batch_size=8)
    module = built(LayersOfItsOwn)
    trainer = quiet_trainer(how, max_epochs=1)
    if entry_point == "fit":
        trainer.fit(module, loader)
    elif entry_point == "sanity check":
        quiet_trainer({**how, "num_sanity_val_steps": 2}).fit(module, points(2), loader)
    else:
        getattr(trainer, entry_point)(module, loader)


@pytest.mark.parametrize("entry_point", ["fit", "sanity check", "validate", "test", "predict"])
def test_stages_that_see_different_batches(entry_point: str) -> None:
    outcomes = fails(training_on_other_batches, entry_point, stages=3)
    refused(outcomes, BatchError, "different batches", "batch 0", "sampler", "[Ss]tage")


class Streamed(torch.utils.data.IterableDataset):
    """Its length is not known beforehand."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def other_lengths(how: Any, where: str, longer: int) -> None:
    own = points(3 + (int(os.environ["RANK"]) == longer))
    stream = DataLoader(Streamed(list(own)), batch_size=None)
    if where == "stream":
        fit(how, LayersOfItsOwn, stream, max_epochs=1)
    elif where == "stream of validation":
        fit(how, LayersOfItsOwn, points(3), stream, max_epochs=1)
    elif where in ("validate", "test", "predict"):
        getattr(quiet_trainer(how), where)(built(LayersOfItsOwn), stream)
    elif where == "training":
        fit(how, LayersOfItsOwn, own, max_epochs=1)
    else:
        fit(how, LayersOfItsOwn, points(3), own, max_epochs=1)


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize(
    "where",
    ["training", "validation", "stream", "stream of validation", "validate", "test", "predict"],
)
def test_stages_that_see_more_batches_than_others(where: str, longer: int) -> None:
    outcomes = fails(other_lengths, where, longer)
    refused(outcomes, BatchError, "different", "data", "length", "[Ss]tage")


class _OneBatch(torch.utils.data.Dataset):
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.batch


class TakesAnything(LayersOfItsOwn):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(torch.randn(8, NUM_FEATURES)).square().mean()


def training_on_a_batch(how: Any, batch: Any) -> None:
    loader = DataLoader(_OneBatch(batch), batch_size=None)
    fit(how, TakesAnything, loader, max_epochs=1)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ((torch.zeros(8, 3), torch.zeros(6)), ["8", "6", "microbatches=1"]),
        ({"a": torch.zeros(8, 3), "b": torch.zeros(1, 3)}, ["8", "1", "microbatches=1"]),
        ("text alone", ["str", "no tensor", "microbatches=1"]),
        (torch.tensor(3.0), ["Tensor", "microbatches=1"]),
    ],
    ids=["lengths", "broadcast", "text", "scalar"],
)
def test_a_batch_that_cannot_be_cut(batch: Any, parts: list[str]) -> None:
    refused(fails(training_on_a_batch, batch), BatchError, *parts)


# --------------------------------------------------------------------------------------------------
# Two packages with one name
# --------------------------------------------------------------------------------------------------


def mixing(how: Any, what: str) -> None:
    import pytorch_lightning as other

    class OtherModule(other.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    class OtherData(other.LightningDataModule):
        def train_dataloader(self) -> Any:
            return points(2)

    if what == "module":
        quiet_trainer(how).fit(OtherModule(), points(2))
    elif what == "callback":
        fitting(how, callbacks=[other.callbacks.EarlyStopping("train_loss")])
    elif what == "logger":
        fitting(how, logger=other.loggers.CSVLogger("logs"))
    else:
        quiet_trainer(how, max_epochs=1).fit(built(LayersOfItsOwn), datamodule=OtherData())


@pytest.mark.parametrize("what", ["module", "callback", "logger", "data module"])
def test_pytorch_lightning_and_lightning_pytorch_do_not_mix(what: str) -> None:
    outcomes = fails(mixing, what)
    if what == "module":
        # Lightning itself refuses it, before it asks a strategy.
        assert all("must be a `LightningModule`" in outcome.message for outcome in outcomes)
        return
    for outcome in outcomes:
        assert outcome.error_type in ("ConfigurationError", "StageFailedError"), str(outcome)
        assert "pytorch_lightning" in outcome.message
        assert "lightning.pytorch" in outcome.message


# --------------------------------------------------------------------------------------------------
# Failures
# --------------------------------------------------------------------------------------------------


def own_rank() -> int:
    return int(os.environ["RANK"])


class _Failure(Exception):
    """An error of the user's own code."""


def strike(kind: str) -> None:
    if kind == "exception":
        raise _Failure("the coffee is cold")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "sudden end":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        strike(ctx.kind)
        return gradients[0], None


# Not an attribute of the layer: all stages have those.
CALLS = Counter[str]()


class FailingLayer(nn.Linear):
    """Fails on the samples of batch 1, in the forward or in the backward."""

    def __init__(self, where: str, kind: str) -> None:
        super().__init__(NUM_FEATURES, NUM_FEATURES)
        self.where = where
        self.kind = kind

    def forward(self, hidden: Tensor) -> Tensor:
        if type(hidden) is Tensor and self.where in ("forward", "backward"):
            CALLS["failing"] += 1
            if CALLS["failing"] == 6:
                if self.where == "forward":
                    strike(self.kind)
                elif self.where == "backward":
                    result: Tensor = FailingBackward.apply(super().forward(hidden), self.kind)
                    return result
        return super().forward(hidden)


class Fails(Classifier):
    """Fails on one stage of three, at the place and in the way that are asked for."""

    def __init__(self, stage: int, where: str, kind: str) -> None:
        super().__init__()
        self.stage, self.where, self.kind = stage, where, kind
        self.layers = nn.ModuleList(
            FailingLayer(where if index == stage else "nowhere", kind) for index in range(3)
        )
        self.count = 0

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        return features[:, :NUM_CLASSES]

    def _maybe(self, where: str) -> None:
        if where == self.where and own_rank() == self.stage:
            self.count += 1
            if self.count == 2 or where in ("on_fit_start", "setup", "configure_optimizers"):
                strike(self.kind)

    def setup(self, stage: str) -> None:
        self._maybe("setup")

    def on_fit_start(self) -> None:
        self._maybe("on_fit_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._maybe("on_train_batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._maybe("on_train_batch_end")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._maybe("on_before_optimizer_step")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._maybe("on_validation_batch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self._maybe("on_save_checkpoint")

    def configure_optimizers(self) -> Any:
        self._maybe("configure_optimizers")
        return super().configure_optimizers()


class FailingData(torch.utils.data.Dataset):
    def __init__(self, stage: int, kind: str) -> None:
        self.stage, self.kind = stage, kind

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 20 and own_rank() == self.stage:
            strike(self.kind)
        return torch.full((NUM_FEATURES,), float(index)), index % NUM_CLASSES


def failing(
    how: Any, stage: int, where: str, kind: str, workers: int = 0, saves: bool = False
) -> None:
    module = built(lambda: Fails(stage, where, kind))
    train: Any = points(4)
    if where == "data":
        train = DataLoader(
            FailingData(stage, kind),
            batch_size=8,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
    callbacks: list[L.Callback] = []
    if where == "on_save_checkpoint":
        callbacks.append(ModelCheckpoint("kept", every_n_train_steps=1, save_top_k=-1))
    if saves:
        callbacks.append(ModelCheckpoint("kept", save_on_exception=True, every_n_train_steps=1000))
    trainer = quiet_trainer(
        how,
        max_epochs=2,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        gradient_clip_val=1.0,
    )
    if where == "predict":
        for layer in module.layers:
            layer.where = "forward" if layer.where == "predict" else "nowhere"
        trainer.predict(module, points(10))
    elif where == "validate":
        for layer in module.layers:
            layer.where = "forward" if layer.where == "validate" else "nowhere"
        trainer.validate(module, points(10))
    else:
        trainer.fit(module, train, points(2, seed=5))


def require_first_failure(outcomes: list[Outcome], stage: int) -> None:
    for outcome in outcomes:
        assert outcome.failed
        if outcome.rank == stage:
            assert outcome.error_type == "_Failure", str(outcome)
            assert outcome.message == "the coffee is cold"
        else:
            assert outcome.error_type == "StageFailedError", str(outcome)
            assert "the coffee is cold" in outcome.message
            assert "_Failure" in outcome.message
            assert f"rank {stage}" in outcome.message


PLACES = [
    ("setup", 0),
    ("configure_optimizers", 1),
    ("on_fit_start", 2),
    ("forward", 0),
    ("forward", 1),
    ("forward", 2),
    ("backward", 0),
    ("backward", 2),
    ("on_train_batch_start", 0),
    ("on_before_optimizer_step", 1),
    ("on_train_batch_end", 2),
    ("on_validation_batch_end", 1),
    ("on_save_checkpoint", 0),
    ("on_save_checkpoint", 2),
    ("data", 1),
    ("predict", 0),
    ("predict", 2),
    ("validate", 1),
]


@pytest.mark.parametrize(("where", "stage"), PLACES)
def test_a_failure_ends_every_rank_with_its_reason(where: str, stage: int) -> None:
    strategy = {"partition": [1, 1, 1]}
    outcomes = fails(failing, stage, where, "exception", stages=3, strategy=strategy)
    require_first_failure(outcomes, stage)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_failure_in_a_loaders_worker(stage: int) -> None:
    strategy = {"partition": [1, 1, 1]}
    outcomes = fails(failing, stage, "data", "exception", 1, stages=3, strategy=strategy)
    for outcome in outcomes:
        assert "the coffee is cold" in outcome.message


@pytest.mark.parametrize(("where", "stage"), [("forward", 1), ("on_train_batch_end", 0)])
def test_a_failure_while_a_callback_wants_to_save_a_last_checkpoint(where: str, stage: int) -> None:
    """``save_on_exception=True`` asks for the whole state, when stages are gone already."""
    strategy = {"partition": [1, 1, 1]}
    outcomes = fails(failing, stage, where, "exception", 0, True, stages=3, strategy=strategy)
    require_first_failure(outcomes, stage)


@pytest.mark.parametrize(
    ("where", "kind", "stage"),
    [
        ("forward", "kill", 0),
        ("forward", "kill", 1),
        ("forward", "sudden end", 2),
        ("on_train_batch_end", "kill", 0),
        ("on_train_batch_end", "kill", 1),
        ("predict", "kill", 2),
        ("data", "kill", 2),
    ],
)
def test_a_rank_that_dies_ends_the_others(where: str, kind: str, stage: int) -> None:
    strategy = {"partition": [1, 1, 1]}
    outcomes = fails(failing, stage, where, kind, stages=3, strategy=strategy)
    for outcome in outcomes:
        if outcome.rank == stage:
            assert outcome.error_type == "Died"
        else:
            assert outcome.error_type == "StageFailedError", str(outcome)
            assert "ended without an error message" in outcome.message


@pytest.mark.parametrize(("kind", "stage"), [("interrupt", 0), ("interrupt", 1), ("exit", 1)])
def test_a_rank_that_is_interrupted_ends_the_others(kind: str, stage: int) -> None:
    strategy = {"partition": [1, 1, 1]}
    outcomes = fails(failing, stage, "on_train_batch_end", kind, stages=3, strategy=strategy)
    for outcome in outcomes:
        if outcome.rank == stage:
            assert outcome.error_type == "SystemExit", str(outcome)
        else:
            assert outcome.error_type == "StageFailedError", str(outcome)
            assert {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}[kind] in outcome.message


def test_the_model_is_usable_after_a_failure_before_training() -> None:
    """A mistake in the arguments is mended in the notebook, with the same model."""
    first, second = run_ranks(on_rank, 2, mending, {}, (), {})
    for name, value in first.items():
        assert torch.equal(value, second[name])


def mending(how: Any) -> Any:
    module = built(LayersOfItsOwn)
    trainer = quiet_trainer({**how, "pipeshift": {"partition": [9, 9]}}, max_epochs=1)
    with pytest.raises(PipeShiftError, match="adds up to 18 layers"):
        trainer.fit(module, points(2))
    for parameter in module.parameters():
        assert parameter.device.type == "cpu"
    with torch.no_grad():
        module(torch.zeros(1, NUM_FEATURES))
    return plain(dict(module.named_parameters()))
