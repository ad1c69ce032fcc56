"""User code around a model works as on one device, or is refused with advice: callbacks that
freeze, save and search, wrapped hooks, copies of a Trainer.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipeshift.errors import CheckpointNotFoundError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import (
    built,
    compare,
    differences,
    fit,
    on_one_device,
    on_rank,
    parameters_of,
    plain,
    quiet_trainer,
)
from tests.models import (
    NUM_CLASSES,
    NUM_FEATURES,
    Classifier,
    LayersOfItsOwn,
    SequentialMLP,
    points,
)


def on_ranks(
    stages: int, scenario: Callable[..., Any], *args: Any, strategy: Any = None, **options: Any
) -> list[Any]:
    """The result of a scenario on every rank of a pipeline."""
    strategy = {"microbatches": 4, "partition": "uniform", **(strategy or {})}
    return run_ranks(on_rank, stages, scenario, strategy, args, {}, **options)


def said(caught: Sequence[warnings.WarningMessage], pattern: str) -> list[str]:
    """The warnings that match, in their order."""
    return [text for one in caught if re.search(pattern, text := str(one.message))]


# --------------------------------------------------------------------------------------------------
# Steps without a loss
# --------------------------------------------------------------------------------------------------


class TakesPart(SequentialMLP):
    """Returns a loss for some batches, chosen by the batch's own number."""

    def __init__(self, chosen: Sequence[int]) -> None:
        super().__init__()
        self.chosen = list(chosen)
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "seen": batch_idx} if batch_idx in self.chosen else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kinds = {name: type(value).__name__ for name, value in outputs.items()}
        self.outputs.append(kinds | {"loss": "Tensor"} if kinds else {})


def taking_part(how: Any, chosen: Sequence[int], accumulate: int) -> Any:
    Closure.warning_cache.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record, trainer, module = fit(
            how,
            functools.partial(TakesPart, chosen),
            points(5),
            max_epochs=2,
            accumulate_grad_batches=accumulate,
        )
    notes = said(caught, "`training_step` returned `None`") if trainer.is_global_zero else None
    empty = [not outputs for outputs in module.outputs]
    return record, empty, notes


class SkipsBatches(SequentialMLP):
    """Returns None before its layers, for some batches by their number, for others by a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in (2, 3) or bool((batch[0] > 2.9).any()):
            return None
        return super().training_step(batch, batch_idx)


class SkipsLosses(SequentialMLP):
    """Returns None if the loss is not what it should be."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss) or not loss < 1.7:
            return None
        return loss


def skipping(how: Any, make: Callable[[], Any]) -> Any:
    return fit(how, make, points(6), max_epochs=2)[0]


@pytest.mark.parametrize("make", [SkipsBatches, SkipsLosses])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stages", [2, 3])
def test_steps_return_none_before_their_layers_or_by_a_value(
    make: Callable[[], Any], microbatches: int, stages: int
) -> None:
    strategy = {"microbatches": microbatches}
    (expected,) = on_ranks(1, skipping, make, strategy=strategy)
    for found in on_ranks(stages, skipping, make, strategy=strategy):
        assert not differences(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.feature("Training", "a `training_step` that returns None")
@pytest.mark.parametrize(("stages", "accumulate"), [(1, 1), (2, 1), (3, 1), (2, 3)])
def test_hooks_get_nothing_for_a_step_without_a_loss(stages: int, accumulate: int) -> None:
    expected = on_one_device(taking_part, [0, 2, 3], accumulate)
    assert expected[1] == [False, True, False, False, True] * 2
    assert len(expected[2]) == 1
    for rank, (record, empty, notes) in enumerate(
        on_ranks(stages, taking_part, [0, 2, 3], accumulate)
    ):
        assert empty == expected[1]
        assert record["global_step"] == expected[0]["global_step"]
        for name, value in expected[0]["parameters"].items():
            torch.testing.assert_close(record["parameters"][name], value)
        if rank == 0:
            assert notes == expected[2]


def learning_nothing(how: Any, chosen: Sequence[int]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, trainer, _ = fit(how, lambda: TakesPart(chosen), points(3), max_epochs=1)
    return said(caught, "nothing was learned") if trainer.is_global_zero else []


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_without_any_loss_says_so(stages: int) -> None:
    first, *others = on_ranks(stages, learning_nothing, [])
    assert len(first) == 1
    assert "in all 3 steps" in first[0]
    assert not any(others)


def test_a_run_with_one_loss_says_nothing() -> None:
    assert on_ranks(2, learning_nothing, [2]) == [[], []]


# --------------------------------------------------------------------------------------------------
# Exceptions
# --------------------------------------------------------------------------------------------------


def all_arrive(folder: Path) -> None:
    """Returns when all ranks have called this. Without a message between them: a rank that is
    behind may learn of another one's exception before it raises its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.environ.get('RANK', '0')}.arrived").touch()
    while len(list(folder.glob("*.arrived"))) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.01)


class Stops(SequentialMLP):
    """Raises in the middle of its third step."""

    folder: str

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 2:
            all_arrive(Path(self.folder))
            raise KeyError("the user's own")


def stopping(how: Any, kind: str, folder: str) -> None:
    callback: Any
    Stops.folder = folder
    if kind == "OnExceptionCheckpoint":
        callback = OnExceptionCheckpoint(folder, "stopped")
    else:
        callback = ModelCheckpoint(
            folder, save_on_exception=True, save_last=True, every_n_train_steps=50
        )
    fit(how, Stops, points(8), callbacks=[callback], max_epochs=1, enable_checkpointing=True)


KINDS = ("OnExceptionCheckpoint", "ModelCheckpoint")


def saved_plainly(kind: str, folder: Path) -> dict[str, Any]:
    """The files that plain Lightning writes after the exception, by their names."""
    with pytest.raises(KeyError):
        on_one_device(stopping, kind, str(folder))
    return contents(folder)


def contents(folder: Path) -> dict[str, Any]:
    return {
        path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.ckpt"))
    }


@pytest.mark.feature("Callbacks", "`OnExceptionCheckpoint`, one device for each replica")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, {}), (2, {"virtual_machines": 2})], ids=["alone", "two pipelines"]
)
def test_a_stage_with_all_layers_saves_after_an_exception(
    kind: str, ranks: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    expected = saved_plainly(kind, tmp_path / "plain")
    assert expected
    folder = tmp_path / "ours"
    strategy = {"microbatches": 1, **strategy}
    outcomes = on_ranks(ranks, stopping, kind, str(folder), strategy=strategy, expect_failure=True)
    assert [outcome.error_type for outcome in outcomes] == ["KeyError"] * ranks
    found = contents(folder)
    assert set(found) == set(expected)
    for name, checkpoint in expected.items():
        assert found[name]["global_step"] == checkpoint["global_step"]
        state = found[name]["optimizer_states"][0]["state"]
        assert set(state) == set(checkpoint["optimizer_states"][0]["state"])
        if ranks == 1:
            for key, value in checkpoint["state_dict"].items():
                torch.testing.assert_close(found[name]["state_dict"][key], value)


@pytest.mark.feature(
    "Refused, with advice",
    "`OnExceptionCheckpoint` on several stages (one device for each replica saves)",
)
@pytest.mark.parametrize("kind", KINDS)
def test_several_stages_say_that_they_cannot_save_after_an_exception(
    kind: str, tmp_path: Path
) -> None:
    outcomes = on_ranks(2, stopping, kind, str(tmp_path), expect_failure=True)
    assert [outcome.error_type for outcome in outcomes] == ["KeyError"] * 2
    assert "the user's own" in outcomes[0].message
    assert "KeyError was raised is not saved" in outcomes[0].output
    assert "saved checkpoint to" not in outcomes[0].output
    assert contents(tmp_path) == {}


def stopping_after_a_link(how: Any, folder: str) -> None:
    callback = ModelCheckpoint(
        folder, save_on_exception=True, save_last="link", every_n_train_steps=2, save_top_k=-1
    )
    fit(how, StopsLater, points(4), callbacks=[callback], max_epochs=1, enable_checkpointing=True)


class StopsLater(SequentialMLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise KeyError("the user's own")


def test_the_last_checkpoint_is_there_after_an_exception(tmp_path: Path) -> None:
    on_ranks(2, stopping_after_a_link, str(tmp_path), expect_failure=True)
    last = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert last["global_step"] == 2


# --------------------------------------------------------------------------------------------------
# Finetuning
# --------------------------------------------------------------------------------------------------


class WithBackbone(Classifier):
    """Norms begin with equal parameters, frozen or not."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.LayerNorm(width), nn.ReLU()),
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.2)),
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def configure_layers(self) -> list[nn.Module]:
        return [*self.backbone, self.norm, self.head]

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(features)))

    def configure_optimizers(self) -> Any:
        learning = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(learning, lr=0.01)


class ByAndBy(BaseFinetuning):
    """A block of the backbone more in every epoch, from its end."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            blocks = list(module.backbone)[-epoch:][:1]
            self.unfreeze_and_add_param_group(blocks, optimizer, lr=0.02 / epoch)


class RateGrows(LayersOfItsOwn):
    """Its ``backbone`` is a part of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList([self.first, self.second])

    def configure_layers(self) -> list[nn.Module]:
        return [self.first, self.second, self.third, self.head]

    def configure_optimizers(self) -> Any:
        rest = [*self.third.parameters(), *self.head.parameters()]
        optimizer = torch.optim.SGD(rest, lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def finetuning(how: Any, kind: str, max_epochs: int = 4, ckpt_path: Any = None) -> Any:
    callback: BaseFinetuning = ByAndBy()
    make: Any = WithBackbone
    if kind == "BackboneFinetuning":
        callback, make = BackboneFinetuning(1, lambda epoch: 1.5, 0.1), RateGrows
    L.seed_everything(3, verbose=False)
    module = built(make)
    trainer = quiet_trainer(how, callbacks=[callback], max_epochs=max_epochs, gradient_clip_val=0.5)
    trainer.fit(module, points(4), ckpt_path=ckpt_path)
    (optimizer,) = trainer.optimizers
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]
    return parameters_of(module), groups, rates


@pytest.mark.feature("Callbacks", "`BackboneFinetuning`, `BaseFinetuning`")
def test_a_backbone_is_unfrozen_as_on_one_device() -> None:
    """Without dropout, so that plain Lightning has the same numbers."""
    compare(finetuning, "BackboneFinetuning", stages=1)
    _, groups, _ = compare(finetuning, "BackboneFinetuning", stages=3)
    assert len(groups) == 2


@pytest.mark.parametrize("kind", ["ByAndBy", "BackboneFinetuning"])
def test_finetuning_trains_the_same_bits_on_any_split(kind: str) -> None:
    ((parameters, groups, rates),) = on_ranks(1, finetuning, kind)
    assert len(groups) > 1
    plain_groups = on_one_device(finetuning, kind)[1]
    assert groups == plain_groups
    norm = int(kind == "ByAndBy")  # its model has a layer more
    for cut in ([1, 3 + norm], [3, 1 + norm], [2 + norm, 0, 2]):
        for found in on_ranks(len(cut), finetuning, kind, strategy={"partition": cut}):
            assert found[1:] == (groups, rates)
            for name, value in parameters.items():
                assert torch.equal(found[0][name], value), f"{name}, {cut}"


def test_equal_parameters_are_left_out_as_on_one_device() -> None:
    """Two norms begin with the same numbers, and Lightning compares numbers."""
    groups = on_one_device(finetuning, "ByAndBy", 2)[1]
    added = groups[1]
    assert "backbone.2.0.weight" in added
    # The frozen norm has kept its first values, and the one that learned has not.
    assert "backbone.2.1.weight" in added
    epoch_0 = on_one_device(unfreezing_at_once)
    assert "backbone.2.1.weight" not in epoch_0[1]
    for found in on_ranks(2, unfreezing_at_once, strategy={"partition": [2, 3]}):
        assert found == epoch_0
    for found in on_ranks(2, unfreezing_late, strategy={"partition": [2, 3]}):
        assert found == on_one_device(unfreezing_late)


class AtOnce(BaseFinetuning):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.backbone, module.norm])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            # The norm first, and then a part of the backbone that has its very numbers.
            self.unfreeze_and_add_param_group(module.norm, optimizer, lr=0.01)
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.01)


def unfreezing_at_once(how: Any, epoch: int = 0) -> Any:
    module = built(WithBackbone)
    trainer = quiet_trainer(how, callbacks=[AtOnce(epoch)], max_epochs=2)
    trainer.fit(module, points(2))
    names = {id(p): name for name, p in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in trainer.optimizers[0].param_groups]


def unfreezing_late(how: Any) -> Any:
    """Stages hold only their own layers by then."""
    return unfreezing_at_once(how, 1)


def finetuning_and_saving(how: Any, path: str) -> None:
    L.seed_everything(3, verbose=False)
    module = built(WithBackbone)
    trainer = quiet_trainer(how, callbacks=[ByAndBy()], max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(module, points(4))
    trainer.save_checkpoint(path)


def test_finetuning_goes_on_from_a_checkpoint_on_another_split(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    on_ranks(2, finetuning_and_saving, path, strategy={"partition": [4, 1]})
    # Lightning's callback does not unfreeze again what it had unfrozen: one stage is compared with.
    ((expected, groups, rates),) = on_ranks(1, finetuning, "ByAndBy", 4, path)
    assert groups == on_one_device(finetuning, "ByAndBy", 4, path)[1]
    for found in on_ranks(3, finetuning, "ByAndBy", 4, path, strategy={"partition": [1, 2, 2]}):
        assert found[1:] == (groups, rates)
        for name, value in expected.items():
            assert torch.equal(found[0][name], value), name


def finetuning_twice(how: Any) -> Any:
    before = BaseFinetuning.filter_on_optimizer
    finetuning(how, "BackboneFinetuning", 2)
    return BaseFinetuning.filter_on_optimizer is before


def test_lightnings_own_comparison_is_back_after_the_run() -> None:
    assert on_ranks(2, finetuning_twice) == [True, True]


# --------------------------------------------------------------------------------------------------
# Optimizers
# --------------------------------------------------------------------------------------------------


class TakesTurns(LayersOfItsOwn):
    """As a GAN does."""

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.first.parameters())
        return (
            {"optimizer": adam, "lr_scheduler": torch.optim.lr_scheduler.StepLR(adam, 1)},
            {"optimizer": torch.optim.SGD(self.head.parameters(), lr=0.1)},
        )


def taking_turns(how: Any) -> None:
    fit(how, TakesTurns, points(2), max_epochs=1)


@pytest.mark.feature("Refused, with advice", "several optimizers, with automatic optimization")
@pytest.mark.parametrize("stages", [1, 2])
def test_several_optimizers_are_refused_with_what_is_allowed(stages: int) -> None:
    for outcome in on_ranks(stages, taking_turns, expect_failure=True):
        # Lightning says it: manual optimization may have several.
        assert "automatic_optimization = False" in outcome.message


class OptimizesBySgd(SequentialMLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ClipsBehindTheClosure(OptimizesBySgd):
    def optimizer_step(self, *given: Any, **_: Any) -> None:
        optimizer, closure = given[-2:]
        closure()
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


class ClipsInsideTheClosure(OptimizesBySgd):
    def optimizer_step(self, *given: Any, **_: Any) -> None:
        optimizer, closure = given[-2:]

        def then_clipped() -> Any:
            loss = closure()
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            return loss

        optimizer.step(closure=then_clipped)


class ShrinksInAStepHook(OptimizesBySgd):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.shrink)
        return optimizer

    def shrink(self, *_: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 0.01 * norm)


class ClipsByTheTrainer(OptimizesBySgd):
    """As the errors advise."""

    def optimizer_step(self, *given: Any, **_: Any) -> None:
        optimizer, closure = given[-2:]
        closure()
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class SharpnessAware(torch.optim.Optimizer):
    """Takes the gradients a second time, at weights moved along the first ones."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        learning = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [p.grad.clone() for p in learning]
        norm = torch.stack([move.norm() for move in moves]).norm()
        with torch.no_grad():
            for parameter, move in zip(learning, moves, strict=True):
                parameter.add_(move / norm, alpha=0.05)
        closure()
        with torch.no_grad():
            for parameter, move in zip(learning, moves, strict=True):
                parameter.sub_(move / norm, alpha=0.05)
        self.base.step()
        return loss


class ClipsItself(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()
        return loss


class OneStepSize(torch.optim.SGD):
    """Reads numbers of all parameters, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> Any:
        loss, (group,) = closure(), self.param_groups
        sizes = [p.grad.abs().sum().item() for p in group["params"] if p.grad is not None]
        group["lr"] += 1e-3 * sum(sizes)
        super().step()
        return loss


class TrustRatios(torch.optim.SGD):
    """Reads numbers of each parameter, as LAMB and LARS do."""

    def step(self, closure: Any = None) -> Any:
        loss, (group,) = closure(), self.param_groups
        for parameter in group["params"]:
            if parameter.grad is not None:
                size = parameter.grad.norm()
                ratio = 1.0 if size == 0 else (parameter.detach().norm() / size).item()
                parameter.grad.mul_(ratio)
        super().step()
        return loss


class OptimizedBy(SequentialMLP):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def optimizing(how: Any, make: Callable[..., Any]) -> Any:
    return fit(how, make, points(4), max_epochs=1)[0]


@pytest.mark.parametrize("make", [ClipsBehindTheClosure, ClipsInsideTheClosure, ShrinksInAStepHook])
def test_code_around_the_optimizers_step_does_not_miss_gradients_of_other_stages(
    make: Callable[..., Any],
) -> None:
    for outcome in on_ranks(2, optimizing, make, expect_failure=True):
        assert "Norms of gradients over all stages" in outcome.message


@pytest.mark.parametrize(
    "make",
    [
        SharpnessAware,
        functools.partial(ClipsItself, lr=0.1),
        functools.partial(OneStepSize, lr=0.1),
    ],
)
def test_an_optimizer_that_looks_at_all_gradients_at_once_is_refused(
    make: Callable[..., Any],
) -> None:
    made = functools.partial(OptimizedBy, make)
    for outcome in on_ranks(2, optimizing, made, expect_failure=True):
        assert "each stage has the gradients of its own layers only" in outcome.message


@pytest.mark.parametrize(
    "make",
    [
        ClipsByTheTrainer,
        functools.partial(OptimizedBy, functools.partial(TrustRatios, lr=0.01)),
    ],
)
def test_what_is_done_in_a_step_of_the_optimizer(make: Callable[..., Any]) -> None:
    compare(optimizing, make)


# --------------------------------------------------------------------------------------------------
# What the code behind the layers does to the Trainer, and what hooks log
# --------------------------------------------------------------------------------------------------


class StopsInAStep(SequentialMLP):
    def __init__(self, at: int, below: float) -> None:
        super().__init__()
        self.at, self.below = at, below

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == self.at or loss.item() < self.below:
            self.trainer.should_stop = True
        return loss


def stopping_in_a_step(how: Any, at: int, below: float) -> Any:
    record, trainer, _ = fit(
        how, functools.partial(StopsInAStep, at, below), points(4), max_epochs=4
    )
    return record, trainer.global_step


@pytest.mark.parametrize(("at", "below"), [(5, 0.0), (99, 1.2)])
def test_a_step_may_stop_the_trainer(at: int, below: float) -> None:
    (expected,) = on_ranks(1, stopping_in_a_step, at, below)
    for found in on_ranks(2, stopping_in_a_step, at, below):
        assert not differences(found, expected, rtol=0.0, atol=0.0)
    assert 4 < expected[1] < 16


class MakesTensorsForParameters(SequentialMLP):
    """Asks each parameter for its device and type, as one does for a tensor to compute with."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            ones = torch.ones(2, device=parameter.device)
            self.seen += batch[0].to(parameter.device).mean() + ones.sum()
            self.seen += batch[0].type_as(parameter).mean() + batch[0].to(parameter).mean()
        self.log("seen", float(self.seen))


def test_tensors_made_for_another_stages_parameters_have_values() -> None:
    """They were tensors of the meta device: what was computed from them was lost."""
    compare(optimizing, MakesTensorsForParameters)


class ComparesWithPrototypes(SequentialMLP):
    """The loss uses a parameter of no layer, also without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.eye(5))

    def forward(self, features: Tensor) -> Tensor:
        scores = super().forward(features)
        fixed = F.normalize(self.prototypes.data, dim=1) + self.prototypes.detach().exp()
        return scores @ fixed + scores @ self.prototypes


def test_a_parameter_of_no_layer_may_be_used_without_its_gradient() -> None:
    """It was said that the step takes another branch."""
    compare(optimizing, ComparesWithPrototypes)


class LogsANorm(SequentialMLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        *_, weight, _ = self.parameters()
        assert weight.grad is not None
        self.log("norm", weight.grad.norm())


def test_a_hook_logs_the_gradient_of_another_stage() -> None:
    compare(optimizing, LogsANorm)


# --------------------------------------------------------------------------------------------------
# State that a step keeps for the next one
# --------------------------------------------------------------------------------------------------


class KeepsAnAttribute(SequentialMLP):
    """What the last layer computes is used in front of the first, for the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features if self.shift is None else features + self.shift)
        self.shift = logits.detach().mean()
        return logits


class KeepsABuffer(SequentialMLP):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features - self.shift)
        self.shift.mul_(0.5).add_(logits.detach().mean())
        return logits


class KeepsItsLoss(SequentialMLP):
    """Uses it where it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        now = loss.detach()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return loss / self.average


KEEPING = [KeepsAnAttribute, KeepsABuffer, KeepsItsLoss]


@pytest.mark.parametrize("make", KEEPING)
def test_what_a_step_keeps_is_there_in_the_next_one(make: Callable[..., Any]) -> None:
    strategy = {"microbatches": 1}
    (expected,) = on_ranks(1, skipping, make, strategy=strategy)
    for found in on_ranks(3, skipping, make, strategy=strategy):
        assert not differences(found, expected, rtol=0.0, atol=0.0)


def validating(how: Any, make: Callable[..., Any]) -> Any:
    trainer = quiet_trainer(how, max_epochs=1)
    return plain(trainer.validate(built(make), points(3), verbose=False))


@pytest.mark.parametrize("make", [KeepsAnAttribute, KeepsABuffer])
@pytest.mark.parametrize("scenario", [skipping, validating])
def test_an_earlier_stage_waits_for_what_travels_back_to_it(
    make: Callable[..., Any], scenario: Callable[..., Any]
) -> None:
    """It gave wrong values once: the stage had begun with the next microbatch by then."""
    (alone,) = on_ranks(1, scenario, make)
    for found in on_ranks(2, scenario, make):
        assert not differences(found, alone, rtol=0.0, atol=0.0)
    # One stage has both.
    (expected,) = on_ranks(1, skipping, make)
    for found in on_ranks(2, skipping, make, strategy={"partition": [5, 0]}):
        assert not differences(found, expected, rtol=0.0, atol=0.0)


# --------------------------------------------------------------------------------------------------
# Searches
# --------------------------------------------------------------------------------------------------


class Searched(SequentialMLP):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.batch_size = 2
        self.rate = 0.1
        self.most = most

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.train_dataloader.batch_size > self.most:  # type: ignore[union-attr]
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(points(16).dataset, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return points(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def searching(how: Any, kind: str, most: int = 1000) -> Any:
    callback: Any = BatchSizeFinder(max_trials=4, steps_per_trial=2)
    if kind == "rate":
        callback = LearningRateFinder(num_training_steps=30, attr_name="rate")
    module = built(lambda: Searched(most))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(how, callbacks=[callback], enable_checkpointing=True, max_steps=3)
        trainer.fit(module)
    left = sorted(path.name for path in Path.cwd().glob(".*.ckpt"))
    return (
        module.batch_size,
        module.rate,
        parameters_of(module),
        said(caught, "meta"),
        left,
    )


@pytest.mark.feature("Tuners", "`BatchSizeFinder`")
def test_a_batch_size_is_found_on_several_stages() -> None:
    size, *_ = compare(searching, "size", strategy={"microbatches": 1})
    assert size == 16


def test_a_batch_size_is_found_by_running_out_of_memory() -> None:
    size, *_ = compare(searching, "size", 8, stages=1, strategy={"microbatches": 1})
    assert size == 8


@pytest.mark.feature(
    "Refused, with advice",
    "`BatchSizeFinder` that goes on after several stages have run out of memory",
)
def test_a_search_that_runs_out_of_memory_on_several_stages_ends_with_advice() -> None:
    for outcome in on_ranks(2, searching, "size", 8, expect_failure=True):
        assert outcome.error_type in ("BatchError", "StageFailedError")
        assert "BatchSizeFinder" in outcome.message
        assert "last size that succeeded" in outcome.message


@pytest.mark.feature("Tuners", "`LearningRateFinder`")
def test_a_learning_rate_is_found_without_a_word_about_other_stages() -> None:
    _, rate, _, notes, _ = compare(searching, "rate", strategy={"microbatches": 1})
    assert rate != 0.1
    assert notes == []


def tuning(how: Any) -> Any:
    module = built(lambda: Searched(1000))
    trainer = quiet_trainer(how, enable_checkpointing=True, max_steps=3)
    tuner = Tuner(trainer)
    found = tuner.lr_find(module, num_training=30, attr_name="rate")
    assert found is not None
    size = tuner.scale_batch_size(module, max_trials=3, steps_per_trial=2)
    trainer.fit(module)
    return size, module.rate, found.suggestion(), trainer.global_step, parameters_of(module)


@pytest.mark.feature("Tuners", "`Tuner`: `lr_find`, `scale_batch_size`, and then `fit`")
def test_a_tuner_finds_what_it_finds_on_one_device() -> None:
    size, rate, suggestion, num_steps, _ = compare(tuning, strategy={"microbatches": 1})
    assert (size, num_steps) == (8, 3)
    assert rate == suggestion != 0.1


# --------------------------------------------------------------------------------------------------
# Without a run, and after it
# --------------------------------------------------------------------------------------------------


def test_a_checkpoint_can_be_saved_without_a_run(tmp_path: Path) -> None:
    trainer = quiet_trainer({"devices": 1, "pipeshift": {}})
    module = built(SequentialMLP)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    found = torch.load(tmp_path / "new.ckpt", weights_only=True)
    assert torch.equal(found["state_dict"]["model.0.weight"], module.model[0].weight)


def going_on_from_it(how: Any, path: str) -> Any:
    trainer = quiet_trainer(how, max_epochs=1)
    module = built(SequentialMLP, seed=5)
    trainer.fit(module, points(2), ckpt_path=path)
    return parameters_of(module)


def test_a_run_goes_on_from_a_checkpoint_that_no_run_has_saved(tmp_path: Path) -> None:
    trainer = quiet_trainer({"devices": 1, "pipeshift": {}})
    trainer.strategy.connect(built(SequentialMLP))
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    plainly = quiet_trainer({"devices": 1})
    plainly.strategy.connect(built(SequentialMLP))
    plainly.save_checkpoint(tmp_path / "plain.ckpt")
    (expected,) = on_ranks(1, going_on_from_it, str(tmp_path / "plain.ckpt"))
    for found in on_ranks(2, going_on_from_it, str(tmp_path / "new.ckpt")):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


class WithMetric(SequentialMLP):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.accuracy(scores, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(scores, batch[1])


def copying(how: Any, precision: Any = None) -> Any:
    """Trains, and then again with each kind of copy of the Trainer, made before and after."""
    makers: list[Callable[[Any], Any]] = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
    trainer = quiet_trainer(how, max_epochs=1, precision=precision)
    trainers = [make(trainer) for make in makers]
    module = built(WithMetric)
    trainer.fit(module, points(2))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    for make in makers:
        later = make(trainer)
        later.fit_loop.epoch_loop.max_steps = 4
        later.fit_loop.max_epochs = 2
        trainers.append(later)
        copied = make(module)
        assert torch.equal(copied.model[0].weight, module.model[0].weight)
    found = []
    for other in trainers:
        copied = built(WithMetric)
        other.fit(copied, points(2))
        found.append((parameters_of(copied), other.global_step, dict(other.callback_metrics)))
    return rates, plain(found)


@pytest.mark.feature("Training", "copied and pickled Trainers")
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_copies_of_a_trainer_train(precision: Any) -> None:
    first, second = on_ranks(2, copying, precision)
    assert len(first[1]) == 4
    assert [steps for _, steps, _ in first[1]] == [2, 2, 4, 4]
    for (mine, *_), (its, *_) in zip(first[1], second[1], strict=True):
        for name, value in mine.items():
            assert torch.equal(its[name], value)
    # A copy made before the run trains what the run itself would.
    for name, value in first[1][0][0].items():
        assert torch.equal(first[1][1][0][name], value)


def planned_by_copies(how: Any) -> Any:
    trainer = quiet_trainer(how, max_steps=1)
    found = []
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        other.fit(built(SequentialMLP), points(1))
        plan: Any = other.strategy.plan  # type: ignore[union-attr]
        found.append((plan.microbatches, plan.schedule, plan.placement.counts))
    return found


def test_a_copied_strategy_keeps_what_was_asked_for() -> None:
    asked = {"microbatches": 3, "schedule": "gpipe", "partition": [1, 4]}
    for plans in on_ranks(2, planned_by_copies, strategy=asked):
        assert plans == [(3, "gpipe", ((1, 4),))] * 2


def from_nowhere(how: Any, path: str) -> Any:
    trainer = quiet_trainer(how, max_epochs=1)
    with pytest.raises(FileNotFoundError) as caught:
        trainer.validate(built(SequentialMLP), points(1), ckpt_path=path)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_is_not_there(ranks: int, tmp_path: Path) -> None:
    for name, message in on_ranks(ranks, from_nowhere, str(tmp_path / "nowhere.ckpt")):
        assert name == CheckpointNotFoundError.__name__
        assert "nowhere.ckpt" in message


# --------------------------------------------------------------------------------------------------
# Hooks
# --------------------------------------------------------------------------------------------------


def counted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators are written: it looks like what it wraps."""

    @functools.wraps(hook)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append([plain(arg) for arg in args if isinstance(arg, dict | Tensor)])
        return hook(self, *args, **kwargs)

    return wrapper


class WrapsLightnings(L.Callback):
    """Its hooks are Lightning's own, in a wrapper."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    on_validation_batch_end = counted(L.Callback.on_validation_batch_end)
    on_test_batch_end = counted(L.Callback.on_test_batch_end)


class Returns(SequentialMLP):
    seen: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"scores": self(batch[0])}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).sum()


class WrapsItsOwn(Returns):
    on_test_batch_end = counted(L.LightningModule.on_test_batch_end)


def wrapping(how: Any) -> Any:
    callback = WrapsLightnings()
    module = built(WrapsItsOwn)
    trainer = quiet_trainer(how, callbacks=[callback])
    trainer.validate(module, points(3), verbose=False)
    trainer.test(module, points(2), verbose=False)
    return callback.seen, module.seen


def test_a_wrapped_hook_gets_the_outputs() -> None:
    of_callback, of_module = compare(wrapping)
    assert len(of_callback) == 5
    assert len(of_module) == 2
    assert all(entry for entry in [*of_callback, *of_module])


def patching(how: Any) -> Any:
    """Puts a hook on an object, as profilers and experiment trackers do."""
    seen: list[Any] = []
    callback = L.Callback()
    callback.on_validation_batch_end = (  # type: ignore[method-assign]
        lambda trainer, module, outputs, *_: seen.append(plain(outputs))
    )
    trainer = quiet_trainer(how, callbacks=[callback])
    trainer.validate(built(Returns), points(3), verbose=False)
    return seen


def test_a_hook_put_on_an_object_gets_the_outputs() -> None:
    assert len(compare(patching)) == 3


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_in_the_environment() -> Iterator[None]:
    """Some of these tests run plain Lightning in pytest's own process."""
    before = dict(os.environ)
    yield
    assert os.environ.get("PL_GLOBAL_SEED") == before.get("PL_GLOBAL_SEED")
