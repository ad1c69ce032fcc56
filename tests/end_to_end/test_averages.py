"""Averages and copies of a model that user code keeps: the same bits on any split as on one stage.

Every case is code as users write it: an average kept by hand in a hook or in the step, torch's and
Lightning's own averages, momentum encoders. It is run on one, two and three stages, and with layers
that move while it runs; parameters, averages and what checkpoints hold are compared bit by bit.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.checkpoint.checkpoint_io import PipeShiftCheckpointIO
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.values.value import Value
from tests.cases import some
from tests.features_models import QUIET, built, plain, quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, CheckpointedByHand, Classifier, points

DECAY = 0.8


def network(width: int = 16, norm: bool = True) -> nn.Sequential:
    """Four layers with parameters of different shapes, dropout, and running statistics."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width),
        nn.BatchNorm1d(width) if norm else nn.Identity(),
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.3)),
        nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.3)),
        nn.Linear(2 * width, NUM_CLASSES),
    )


class Plain(Classifier):
    """Keeps nothing; callbacks may."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.net = network(norm=norm)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.net(features)
        return scores

    def averages(self) -> Mapping[str, Tensor]:
        """The averages, by name."""
        return {}


def update(average: nn.Module, model: nn.Module) -> None:
    """The update as most people write it."""
    with torch.no_grad():
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            mine.mul_(DECAY).add_(its, alpha=1 - DECAY)
        for buffer, its_buffer in zip(average.buffers(), model.buffers(), strict=True):
            buffer.copy_(its_buffer)


class CopyInAList(Plain):
    """A copied module that is hidden from the module tree."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [copy.deepcopy(self.net)]

    def on_train_batch_end(self, *_: Any) -> None:
        update(self.hidden[0], self.net)

    def averages(self) -> Mapping[str, Tensor]:
        return self.hidden[0].state_dict()


class CopyAsModule(Plain):
    """A copied module that no step calls."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.average = copy.deepcopy(self.net)

    def on_before_zero_grad(self, *_: Any) -> None:
        update(self.average, self.net)


class EvaluatedCopy(CopyAsModule):
    """The copy is what validation looks at."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, classes = batch
        self.log("val_loss", F.cross_entropy(self.average(features), classes))


class FlatAverage(nn.Module):
    """An average that has its own names for its tensors, all of them buffers.

    Args:
        model: is averaged.
    """

    count: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name, _ in model.named_parameters()}
        self.register_buffer("count", torch.tensor(0))
        for name, parameter in model.named_parameters():
            self.register_buffer(self.names[name], parameter.detach().clone())

    def forward(self, model: nn.Module) -> None:
        """Takes in the model's present weights."""
        self.count += 1
        rest = 1 - torch.clamp((1 + self.count) / (10 + self.count), max=DECAY)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mine = self.get_buffer(self.names[name]).type_as(parameter)
                mine.sub_(rest.to(parameter.device) * (mine - parameter))


class FlatCopyAsModule(Plain):
    """A module of buffers that no step calls."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.average = FlatAverage(self.net)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average(self.net)


class DictInAHook(Plain):
    """A dict of clones, saved in the checkpoint by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.average[name].mul_(DECAY).add_(parameter.detach(), alpha=1 - DECAY)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.average = {name: t.clone() for name, t in checkpoint["average"].items()}

    def averages(self) -> Mapping[str, Tensor]:
        return self.average


class DictInTheStep(DictInAHook):
    """The same at the head of the step."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                self.average[name].lerp_(parameter, 1 - DECAY)
        return super().training_step(batch, batch_idx)


class ListOfMany(Plain):
    """All at once, and new lists each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = [p.detach().clone() for p in self.parameters()]
        self.second: list[Tensor] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        parameters = [p.detach() for p in self.parameters()]
        torch._foreach_mul_(self.first, DECAY)
        torch._foreach_add_(self.first, parameters, alpha=1 - DECAY)
        before = self.second or [torch.zeros_like(p) for p in parameters]
        self.second = [DECAY * a + (1 - DECAY) * p for a, p in zip(before, parameters, strict=True)]

    def averages(self) -> Mapping[str, Tensor]:
        return {str(number): t for number, t in enumerate([*self.first, *self.second])}


class AssignedData(ListOfMany):
    """``average.data = ...``, which torch refuses between a tensor that is here and another."""

    def on_before_zero_grad(self, *_: Any) -> None:
        for average, parameter in zip(self.first, self.parameters(), strict=True):
            average.data = average.data * DECAY + parameter.data * (1 - DECAY)


class Buffers(Plain):
    """Buffers of the LightningModule, which are in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.net.named_parameters():
            self.register_buffer(f"ema_{name.replace('.', '_')}", parameter.detach().clone())

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.get_buffer(f"ema_{name.replace('.', '_')}").lerp_(parameter.detach(), 1 - DECAY)


class AveragedModule(Plain):
    """Torch's own average, as an attribute."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.net)


class KeepsAnAverage(L.Callback):
    """An average in a callback, made when training begins, with its state in the checkpoint."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.num_updates = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = self.average or {n: t.clone() for n, t in module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.num_updates += 1
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.average[name].sub_((1 - DECAY) * (self.average[name] - value))
            else:
                self.average[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {name: t.clone() for name, t in state["average"].items()}
        self.num_updates = state["num_updates"]

    def averages(self) -> Mapping[str, Tensor]:
        return self.average


class KeepsAnAveragedModel(L.Callback):
    """Torch's own average in a callback."""

    def __init__(self) -> None:
        self.average: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.average = AveragedModel(module, avg_fn=get_ema_avg_fn(DECAY), use_buffers=True)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average.update_parameters(module)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.average.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)

    def averages(self) -> Mapping[str, Tensor]:
        state: dict[str, Tensor] = self.average.state_dict()
        return state


class MeanTeacher(Plain):
    """A teacher that is called in every step, and follows the student afterwards."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        with torch.no_grad():
            target = self.teacher(features).softmax(dim=1)
        scores = self(features)
        return F.cross_entropy(scores, classes) + F.mse_loss(scores.softmax(dim=1), target)

    def on_train_batch_end(self, *_: Any) -> None:
        for k, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            k.data = k.data * DECAY + q.data * (1 - DECAY)


class MomentumInTheStep(MeanTeacher):
    """The momentum update at the head of the step, as MoCo has it."""

    @torch.no_grad()
    def follow(self) -> None:
        for k, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            k.data = k.data * DECAY + q.data * (1 - DECAY)

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.follow()
        return super().training_step(batch, batch_idx)


class Byol(L.LightningModule):
    """Two networks of an encoder and a projector each, and a predictor on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(network(norm=False), nn.Linear(NUM_CLASSES, 6))
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad = False
        self.predictor = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, _ = batch
        prediction = self.predictor(self.online(features))
        with torch.no_grad():
            target = self.target(features + 0.1)
        return 2 - 2 * F.cosine_similarity(prediction, target, dim=1).mean()

    @torch.no_grad()
    def on_before_zero_grad(self, *_: Any) -> None:
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.add_(online - target, alpha=1 - DECAY)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def averages(self) -> Mapping[str, Tensor]:
        return {}


class Case(NamedTuple):
    """How a run is made."""

    module: Callable[[], Any]
    callback: Callable[[], L.Callback] | None = None
    #: Whether the averages are in the checkpoint.
    saves: bool = True


def weight_averaging() -> L.Callback:
    return WeightAveraging()


def ema_weight_averaging() -> L.Callback:
    return EMAWeightAveraging(decay=DECAY, update_every_n_steps=2, update_starting_at_step=1)


def stochastic_weight_averaging() -> L.Callback:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)


def without_norm() -> Plain:
    return Plain(norm=False)


class AveragedGradients(Plain):
    """Averages of gradients, and of their squares, at the moments at which they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {
            (moment, name): torch.zeros_like(parameter.detach())
            for moment in ("zero", "end", "step")
            for name, parameter in self.named_parameters()
        }

    def take(self, moment: str) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                self.kept[moment, name].mul_(DECAY).addcmul_(gradient, gradient, value=0.2)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.take("zero")

    def on_train_batch_end(self, *_: Any) -> None:
        self.take("end")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.take("step")

    def averages(self) -> Mapping[str, Tensor]:
        return {f"{moment} {name}": t for (moment, name), t in self.kept.items()}


class Recurrent(Plain):
    """Recurrent layers, which keep weak references to their parameters, with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.LSTM(8, 8))
        self.second = nn.Sequential(nn.LSTM(8, 8), nn.Linear(8, NUM_CLASSES))
        self.hidden = [copy.deepcopy(self.net), copy.deepcopy(self.second)]

    def forward(self, features: Tensor) -> Tensor:
        hidden, _ = self.net(features)
        hidden, _ = self.second[0](hidden)
        scores: Tensor = self.second[1](hidden)
        return scores

    def on_train_batch_end(self, *_: Any) -> None:
        update(self.hidden[0], self.net)
        update(self.hidden[1], self.second)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def averages(self) -> Mapping[str, Tensor]:
        first, second = self.hidden
        return {**first.state_dict(prefix="0."), **second.state_dict(prefix="1.")}


class LateOnes(Plain):
    """Made while training runs: of shapes and devices, and as clones of clones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            value = parameter.data
            if self.global_step == 3:
                self.kept[name] = {
                    "shape": torch.zeros(value.shape),
                    "device": torch.zeros(value.shape, device=value.device),
                    "clone": value.clone(),
                    "largest": value.abs().max(),
                }
            elif self.global_step > 3:
                entry = self.kept[name]
                entry["shape"].lerp_(value, 1 - DECAY)
                entry["device"].add_(value, alpha=0.5)
                entry["clone"] = torch.maximum(entry["clone"].clone(), value)
                entry["largest"] = torch.maximum(entry["largest"], value.abs().max())

    def averages(self) -> Mapping[str, Tensor]:
        return {f"{name} {key}": t for name, e in self.kept.items() for key, t in e.items()}


class CalledAgain(Plain):
    """Calls its layers three times, keeps an average of one layer's parameter in the step, and
    penalises those of others, one of which runs again in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Sequential(CheckpointedByHand(), nn.ReLU())
        self.register_buffer("average", torch.zeros(NUM_CLASSES, 32))
        self.average: Tensor

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, labels = batch
        first, third, last = (self.net.get_submodule(name) for name in ("0", "2.0.linear", "4"))
        assert isinstance(first.weight, Tensor)
        assert isinstance(third.weight, Tensor)
        assert isinstance(last.weight, Tensor)
        self.average.mul_(DECAY).add_(last.weight.data, alpha=1 - DECAY)
        scores = [self(features + 0.1 * number) for number in range(3)]
        loss = sum((F.cross_entropy(each, labels) for each in scores), torch.zeros(()))
        return loss + first.weight.square().mean() + third.weight.square().mean()

    def averages(self) -> Mapping[str, Tensor]:
        return {"average": self.average}


class TiesByHand(L.Callback):
    """Writes one layer's parameter into another's."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.net[4].bias.copy_(module.net[0].bias[:NUM_CLASSES])


class KeepsASum(L.Callback):
    """One value of all layers, and in the checkpoint."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.total = sum(parameter.detach().norm() for parameter in module.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def averages(self) -> Mapping[str, Tensor]:
        return {"total": self.total}


class TrainsAModelOfItsOwn(L.Callback):
    """Which looks like a copy."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.net = copy.deepcopy(module.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]).backward()
        self.optimizer.step()

    def averages(self) -> Mapping[str, Tensor]:
        return dict(self.net.state_dict())


class InAHookAndInTheStep(DictInAHook):
    """An average that hooks write to, and steps use."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        net: Any = self.net
        distance = (net[0].weight - self.average["0.weight"]).square().sum()
        return super().training_step(batch, batch_idx) + distance


CASES = {
    "copy in a list": Case(CopyInAList, saves=False),
    "copy as a module": Case(CopyAsModule),
    "evaluated copy": Case(EvaluatedCopy),
    "flat copy as a module": Case(FlatCopyAsModule),
    "dict in a hook": Case(DictInAHook),
    "dict in the step": Case(DictInTheStep),
    "lists": Case(ListOfMany, saves=False),
    "data": Case(AssignedData, saves=False),
    "buffers": Case(Buffers),
    "AveragedModel": Case(AveragedModule),
    "dict in a callback": Case(Plain, KeepsAnAverage),
    "AveragedModel in a callback": Case(Plain, KeepsAnAveragedModel),
    "WeightAveraging": Case(Plain, weight_averaging),
    "EMAWeightAveraging": Case(Plain, ema_weight_averaging),
    "SWA": Case(without_norm, stochastic_weight_averaging),
    "SWA with BatchNorm": Case(Plain, stochastic_weight_averaging),
    "mean teacher": Case(MeanTeacher),
    "momentum in the step": Case(MomentumInTheStep),
    "BYOL": Case(Byol),
    "gradients": Case(AveragedGradients, saves=False),
    "recurrent": Case(Recurrent, saves=False),
    "made late": Case(LateOnes, saves=False),
    "called again": Case(CalledAgain, saves=False),
    "ties by hand": Case(Plain, TiesByHand),
    "sum of norms": Case(Plain, KeepsASum),
    "trains a copy": Case(without_norm, TrainsAModelOfItsOwn, saves=False),
    "in a hook and in the step": Case(InAHookAndInTheStep),
}


class Moves(L.Callback):
    """Lets layers change their owners after some steps."""

    def __init__(self, cuts: Mapping[int, Sequence[int]]) -> None:
        self.cuts = cuts

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        cut = self.cuts.get(trainer.global_step)
        if cut is not None:
            counts = (tuple(cut),)
            trainer.strategy.adopt(trainer.strategy.plan.with_placement(Placement(counts)))


class Looks(L.Callback):
    """Counts what is on other stages, of the parameters and of what is kept of them."""

    def __init__(self, keeper: Any) -> None:
        self.keeper = keeper
        self.num_elsewhere: tuple[int, int] = (0, 0)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        averages = self.keeper.averages().values()
        parameters = sum("absent_name" in vars(parameter) for parameter in module.parameters())
        values = [average for average in averages if isinstance(average, Value)]
        self.num_elsewhere = (parameters, sum(value.account.tensor is None for value in values))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a checkpoint, by path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, part in tree.items():
            if name not in ("pipeshift", "loops"):
                yield from leaves(part, f"{path}/{name}")
    elif isinstance(tree, list | tuple):
        for number, part in enumerate(tree):
            yield from leaves(part, f"{path}/{number}")


def fit(
    name: str,
    partition: Any = "uniform",
    cuts: Mapping[int, Sequence[int]] | None = None,
    max_epochs: int = 3,
    resume: str | None = None,
    sharded: bool = False,
    again: bool = False,
    virtual_machines: int = 1,
    num_sanity_val_steps: int = 0,
) -> dict[str, Any]:
    """Trains as a rank of a job; returns everything that is to be the same on every split.

    Args:
        name: the case.
        partition: who owns what.
        cuts: the layers of each stage that are to be in force two steps after some steps.
        max_epochs: how long.
        resume: the checkpoint to go on from.
        sharded: whether checkpoints are folders.
        again: whether to train a second time afterwards, and to evaluate in between.
        virtual_machines: how many pipelines side by side.
        num_sanity_val_steps: on how many batches the model is evaluated before.
    """
    case = CASES[name]
    L.seed_everything(7, verbose=False)
    module = built(case.module)
    average = case.callback() if case.callback is not None else None
    saves = ModelCheckpoint(Path.cwd() / "saved", save_last=True, save_top_k=0)
    keeper: Any = average if hasattr(average, "averages") else module
    looks = Looks(keeper)
    callbacks: list[L.Callback] = [saves, Moves(cuts or {}), looks]
    callbacks += [average] if average is not None else []
    how: dict[str, Any] = {
        **QUIET,
        "enable_checkpointing": True,
        "num_sanity_val_steps": num_sanity_val_steps,
        "plugins": [PipeShiftCheckpointIO(sharded=sharded)],
    }
    strategy = PipeShiftStrategy(
        microbatches=2, partition=partition, virtual_machines=virtual_machines
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=max_epochs,
        callbacks=callbacks,
        **how,
    )
    trainer.fit(module, points(4), points(2, seed=3), ckpt_path=resume)
    if again:
        trainer.validate(module, points(2, seed=3))
        trainer.fit_loop.max_epochs = 2 * max_epochs
        trainer.fit(module, points(4), points(2, seed=3))
    found = {
        "parameters": plain(dict(module.state_dict())),
        "averages": plain(dict(keeper.averages())),
        "logged": plain(dict(trainer.callback_metrics)),
        "counts": strategy.plan.placement.counts[0],
        "num_elsewhere": looks.num_elsewhere,
    }
    if trainer.is_global_zero:
        path = Path.cwd() / "saved" / "last.ckpt"
        checkpoint = PipeShiftCheckpointIO().load_checkpoint(path, weights_only=False)
        found["checkpoint"] = plain(dict(leaves(checkpoint)))
    return found


def require_same(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    for kind in ("parameters", "averages", "logged", "checkpoint"):
        if kind not in found:
            continue
        assert found[kind].keys() == expected[kind].keys(), f"{where}: {kind}"
        different = [
            name
            for name, value in found[kind].items()
            if not torch.equal(value, expected[kind][name])
        ]
        assert not different, f"{where}: {kind} differ in {different[:6]}"


@functools.cache
def on_one_stage(name: str) -> dict[str, Any]:
    """The run that others are compared with."""
    (found,) = run_ranks(fit, 1, name)
    return cast("dict[str, Any]", found)


@functools.cache
def resumed_on_one_stage(name: str) -> dict[str, Any]:
    """The same, from a checkpoint of one file on."""
    (found,) = run_ranks(fit_and_resume, 1, name)
    return cast("dict[str, Any]", found)


def fit_and_resume(name: str) -> dict[str, Any]:
    fit(name, max_epochs=2)
    return fit(name, resume=str(Path.cwd() / "saved" / "last.ckpt"))


def compare(name: str, stages: int, **how: Any) -> list[dict[str, Any]]:
    """Requires the same of a run on several stages as of one on one stage; returns what is found on
    each rank.
    """
    ranks = run_ranks(fit, stages, name, **how)
    for rank, found in enumerate(ranks):
        require_same(found, on_one_stage(name), f"rank {rank} of {stages}")
    return ranks


# Numbers, and a model that nothing mixes with parameters, are on every stage.
ON_EVERY_STAGE = {"sum of norms", "trains a copy"}


@pytest.mark.feature("Callbacks", "averages, teachers and momentum encoders kept by hand")
@pytest.mark.parametrize("name", CASES)
def test_two_stages_give_the_bits_of_one(name: str) -> None:
    ranks = compare(name, 2)
    parameters, averages = (any(found["num_elsewhere"][kind] for found in ranks) for kind in (0, 1))
    assert parameters
    # What a step has written last is on every stage at the end of an epoch.
    if name not in ("called again", "dict in the step", "momentum in the step"):
        assert averages == (bool(ranks[0]["averages"]) and name not in ON_EVERY_STAGE)


@pytest.mark.parametrize("name", ["evaluated copy", "AveragedModel"])
def test_what_a_sanity_check_calls_hides_no_copies(name: str) -> None:
    compare(name, 2, num_sanity_val_steps=1)


@pytest.mark.parametrize("name", some(CASES, 8))
def test_three_stages_and_moving_layers_give_the_bits_of_one(name: str) -> None:
    n = sum(on_one_stage(name)["counts"])
    compare(name, 3, cuts={2: [n - 2, 1, 1], 5: [1, 1, n - 2], 7: [0, n, 0]})


SAVED = [name for name in CASES if CASES[name].saves]
# Of averages that stand in the same place of a checkpoint (a module, what a hook or a callback has
# added), some are tried in a file and some in a folder; those that change its form, in both.
IN_BOTH = {"copy as a module", "dict in a hook", "AveragedModel in a callback", "WeightAveraging"}
FORMATS = [
    (name, sharded)
    for number, name in enumerate(SAVED)
    for sharded in ((False, True) if name in IN_BOTH else (bool(number % 2),))
]


@pytest.mark.parametrize(("name", "sharded"), some(FORMATS, 12))
def test_a_run_goes_on_from_a_checkpoint_on_another_split(
    name: str, sharded: bool, tmp_path: Path
) -> None:
    run_ranks(fit, 3, name, max_epochs=2, sharded=sharded, cwd=tmp_path)
    saved = str(tmp_path / "saved" / "last.ckpt")
    for rank, found in enumerate(run_ranks(fit, 2, name, resume=saved, sharded=sharded)):
        require_same(found, resumed_on_one_stage(name), f"rank {rank} of 2, resumed")


@pytest.mark.parametrize(
    "name", ["copy in a list", "dict in a callback", "buffers", "AveragedModel", "mean teacher"]
)
def test_a_second_run_goes_on_with_the_averages(name: str) -> None:
    (expected,) = run_ranks(fit, 1, name, max_epochs=1, again=True)
    for rank, found in enumerate(run_ranks(fit, 2, name, max_epochs=1, again=True)):
        require_same(found, expected, f"rank {rank} of 2, in the second run")


@pytest.mark.parametrize("name", ["WeightAveraging", "dict in a callback", "mean teacher"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "folder"])
def test_virtual_machines(name: str, sharded: bool) -> None:
    how: dict[str, Any] = {"virtual_machines": 2, "sharded": sharded}
    # Running statistics are each virtual machine's own, and so are their averages.
    expected = run_ranks(fit, 2, name, **how)
    for rank, found in enumerate(run_ranks(fit, 4, name, **how)):
        require_same(found, {**expected[0], **expected[rank // 2]}, f"rank {rank} of 4")


class ReadsOnRankZero(L.Callback):
    """A number of every parameter, on one rank alone: no other rank can help it."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            self.norms = [float(parameter.norm()) for parameter in module.parameters()]


def refused(callback: Callable[[], L.Callback]) -> None:
    trainer = quiet_trainer(
        {"pipeshift": {"microbatches": 2, "partition": "uniform"}, "devices": 2},
        max_epochs=1,
        callbacks=[callback()],
    )
    trainer.fit(built(Plain), points(2))


def test_an_operation_on_one_rank_alone_is_an_error() -> None:
    outcomes = run_ranks(refused, 2, ReadsOnRankZero, expect_failure=True)
    assert any(
        o.error_type == "LayerError" and "Read it on every rank" in o.message for o in outcomes
    ), outcomes
