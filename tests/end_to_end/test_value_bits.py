"""PipeShift trains the bits of plain Lightning with each of Lightning's features that
changes gradients, parameters or the loop, and with what users do to gradients and logs.

Plain Lightning accumulates as many batches as there are microbatches, and gets the microbatches as
its batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.training import QUIET
from tests.cases import some
from tests.end_to_end.test_values import MICROBATCHES, WIDTH, Base, batches


class Tied(Base):
    """The head has the embedding's weight, and a loose parameter scales what goes between."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


class LeavesOut(Base):
    """Some microbatches have no loss: by their data, or by a value."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return None if words[0, 0] % 3 == 0 or loss < 2.45 else loss


class LogsAlone(Base):
    """The first rank logs values of two stages that no other logs, and a number of its own."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        norm = self.embedding(words).norm()
        loss = self.loss(self(words), targets)
        if self.trainer.is_global_zero:
            self.log("norm", norm, on_step=False, on_epoch=True)
            self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("all", loss, on_step=False, on_epoch=True)
        self.log("rank", float(self.global_rank), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        words, targets = batch
        loss = self.loss(self(words), targets)
        if self.trainer.is_global_zero:
            self.log("read", loss.item())


class LogsElsewhere(Base):
    """All ranks but the first log a value."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        if not self.trainer.is_global_zero:
            self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class WritesView(Base):
    """Writes into views of tensors that every rank has: an attribute, and a buffer."""

    totals: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.count = torch.zeros(3), 0
        self.register_buffer("totals", torch.zeros(2, 3))

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        self.sums[self.count % 3] += loss.detach()
        self.totals[0, self.count % 3] = loss.detach()
        row = self.totals[1]
        row.add_(loss.detach())
        self.count += 1
        return loss + 0.01 * self.sums.mean() + 0.01 * row.sum()

    def on_train_epoch_end(self) -> None:
        self.noted += [self.sums.tolist(), self.totals.tolist()]


class Gathers(Base):
    """Collectives of values and of common tensors: of one replica."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        logits = self(words)
        loss = self.loss(logits, targets)
        mean, common = loss.detach().clone(), words.float().mean()
        rows = [torch.zeros(())]
        if dist.is_initialized():
            assert dist.get_world_size() == 1
            dist.all_reduce(mean)
            dist.all_reduce(common)
            dist.all_gather(rows, mean)
            dist.barrier()
        else:
            rows[0].copy_(mean)
        seen: Any = self.all_gather(logits, sync_grads=True)
        self.noted.append((common.item(), tuple(seen.shape)))
        return loss + 0.1 * rows[0] * loss + 0.01 * seen.pow(2).mean()


def halved(_: Any, to: Any, __: Any) -> Any:
    """A hook on a backward."""
    return (to[0] * 0.5,)


def moved(_: Any, to: Any, of: Any) -> Any:
    """A hook on a backward that uses the gradients of both ends."""
    return (to[0] * 0.5 + of[0].mean(),)


def enlarged(_: Any, of: Any) -> Any:
    """A hook before a backward."""
    return (of[0] * 1.5,)


class MultipliesSparse(Base):
    """Multiplies by a sparse buffer between layers, as convolutions on graphs do."""

    links: Tensor

    def __init__(self) -> None:
        super().__init__()
        ring = torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0)
        self.register_buffer("links", ring.to_sparse())

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
            x = torch.sparse.mm(self.links, x.reshape(-1, WIDTH).t()).t().reshape(x.shape)
        return self.loss(self.head(x), targets)


class NormsTransposed(Base):
    """Norms over the channels, as models of time series do."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.blocks
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in blocks)

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        x, blocks, norms = self.embedding(words), self.blocks, self.norms
        for block, norm in zip(blocks, norms, strict=True):
            x = norm(block(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class RunsAgain(nn.Module):
    """A layer that runs a block again in its backward, in torch's older way."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """As the block."""
        found: Tensor = checkpoint(self.block, x, use_reentrant=True)
        return found


class ChecksPoints(Base):
    """Its blocks run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.blocks
        self.blocks = nn.ModuleList(map(RunsAgain, blocks))


class ReadsMetrics(Base):
    """The loss depends on metrics of the epoch so far: one of which is called, and one updated."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.most = MeanMetric(), MaxMetric()

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        self.mean(loss.detach())
        self.most.update(loss.detach())
        mean, most = self.mean.compute(), self.most.compute()
        self.noted.append((float(mean), float(most)))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss * (1 + 0.1 * mean + 0.1 * most)


class HooksInside(Base):
    """Hooks on the backward of modules inside of layers."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.blocks
        for block in blocks:
            block.up.register_full_backward_hook(halved)
            block.norm.register_full_backward_pre_hook(enlarged)


class HooksOnLayers(Base):
    """Hooks on the backward of layers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(moved)
            block.register_full_backward_pre_hook(enlarged)


class HooksOnBothWays(HooksOnLayers):
    """Hooks on the forward of layers, too: torch calls those on the backward with what the last one
    returned, and the gradient of what they have kept does not pass them.
    """

    kept: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, given, made: self.kept.append(made))
            block.register_forward_hook(lambda _, given, made: made + 0.1 * self.kept[0])
        self.head.register_full_backward_hook(moved)
        self.head.register_forward_hook(lambda _, given, made: self.kept.append(made))

    def training_step(self, batch: Any, index: int) -> Any:
        self.kept = []
        loss = super().training_step(batch, index)
        return loss + sum(x.square().mean() for x in self.kept)


class HooksOnTensors(Base):
    """Hooks on tensors between layers; one of them has consumers on several stages."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = first = self.embedding(words)
        handle = first.register_hook(lambda gradient: gradient * 100)
        first.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        handle.remove()
        for block in self.blocks:
            x = block(x) + 0.1 * first
            x.register_hook(lambda gradient: 2 * gradient)
        return self.loss(self.head(x) + first.mean(), targets)


class HooksOnParameters(Base):
    """Hooks on parameters."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)


class HooksOnAll(Base):
    """A hook on the backward of a module with layers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda *_: None)


class Retains(Base):
    """Looks at the gradient of what is no leaf, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        words, targets = batch
        x = self.blocks[0](self.embedding(words))
        if not x.is_leaf:
            x.retain_grad()
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.head(self.blocks[3](x)), targets))
        self.noted.append(x.grad.abs().sum().item())
        optimizer.step()


class GoesBackItself(Base):
    """Calls a backward of its own in front of the loss."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        extra = self.loss(self.head(self.blocks[3](self.embedding(words))), targets)
        (0.1 * extra).backward()
        return self.loss(self(words), targets)


class Leaves(Base):
    """Asks whether tensors are leaves, and have a history."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        free, total = x.detach(), torch.zeros_like(x)
        self.note(x, free, total, self.head.weight)
        self.note(free.clone().requires_grad_(), free + 1)
        total.add_(x)
        self.note(total)
        with torch.no_grad():
            self.note(self.head(x), x)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(x), targets)

    def note(self, *tensors: Tensor) -> None:
        """Notes what it is about."""
        self.noted += [(x.is_leaf, x.grad_fn is None, x.requires_grad) for x in tensors]


class LooksAtGradients(Base):
    """Reads, logs and changes gradients of all stages in hooks between the steps."""

    split = False

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight

    def on_after_backward(self) -> None:
        named = dict(self.named_parameters())
        named["embedding.weight"].grad.mul_(0.5)  # type: ignore[union-attr]
        named["head.bias"].grad = named["head.bias"].grad + 0.01  # type: ignore[assignment, operator]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = {name: float(x) for name, x in grad_norm(self, 2).items()}
        self.noted.append(sorted(norms.items()))
        self.log_dict({name: p.grad.abs().max() for name, p in self.named_parameters()})  # type: ignore[union-attr]

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.noted.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1, foreach=False)))
        nn.utils.clip_grad_value_(self.parameters(), 0.01, foreach=False)


class Lora(nn.Module):
    """A linear layer that is frozen, and a trained product of two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., inputs)`` -> ``(..., outputs)``."""
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(Base):
    """LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        blocks: Any = self.blocks
        for block in blocks:
            block.up = Lora(block.up)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Backbone(Base):
    """Has a backbone, which is thawed later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Scheduled(Base):
    """Has a learning rate schedule."""

    lr = 0.05

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Normalised(Scheduled):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        x = self.embedding(words)
        for at, block in enumerate(self.blocks):
            x = block(x)
            x = self.norm(x.flatten(0, 1)).view_as(x) if at == 1 else x
        return self.head(x)


class SparseByHand(Base):
    """Calls the backward itself, of a loss with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embedding = nn.Embedding.from_pretrained(
            self.embedding.weight.detach(), freeze=False, sparse=True
        )

    def training_step(self, batch: Any, _: int) -> None:
        words, targets = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self(words), targets))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def no_callbacks(_: int) -> list[Any]:
    """None."""
    return []


class Case(NamedTuple):
    """A run.

    Args:
        kind: of the model.
        every: how many batches make an update.
        options: of the Trainer.
        callbacks: makes the callbacks, given the number of microbatches.
        split: whether batches are split into microbatches.
    """

    kind: type[Base]
    every: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012
    callbacks: Callable[[int], list[Any]] = no_callbacks
    split: bool = True


CASES = {
    "accumulates": Case(Base, 2),
    "accumulates, tied and clipped": Case(Tied, 2, {"gradient_clip_val": 0.1}),
    "accumulates, and some have no loss": Case(LeavesOut, 2),
    "some have no loss": Case(LeavesOut),
    "bf16-mixed": Case(Tied, 2, {"precision": "bf16-mixed"}),
    "bf16-true": Case(Tied, 2, {"precision": "bf16-true"}),
    "64-true": Case(Tied, 2, {"precision": "64-true"}),
    # On a CPU, Lightning takes bf16-mixed in its place.
    "16-mixed": Case(Tied, 2, {"precision": "16-mixed"}),
    "logs on the first rank": Case(LogsAlone, 1, {"limit_val_batches": 3}),
    "logs on other ranks": Case(LogsElsewhere),
    "writes into views": Case(WritesView),
    "collectives": Case(Gathers),
    "norms of transposed tensors": Case(NormsTransposed, split=False),
    "runs again": Case(ChecksPoints),
    "metrics in the loss": Case(ReadsMetrics),
    "hooks inside of layers": Case(HooksInside),
    "goes back itself": Case(GoesBackItself),
    "hooks on layers": Case(HooksOnLayers),
    "hooks on layers, both ways": Case(HooksOnBothWays),
    "hooks on tensors": Case(HooksOnTensors),
    "hooks on parameters": Case(HooksOnParameters),
    "gradients of values": Case(Retains, split=False),
    "leaves": Case(Leaves),
    "looks at gradients": Case(LooksAtGradients, 2, {"gradient_clip_val": 1.0}, split=False),
    "LoRA": Case(Adapted, 2),
    "accumulates by a schedule": Case(
        Base, 1, {"max_epochs": 3}, lambda n: [GradientAccumulationScheduler({0: n, 1: 2 * n})]
    ),
    "SWA": Case(
        Scheduled,
        2,
        {"max_epochs": 4},
        lambda _: [StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)],
    ),
    "SWA of running statistics": Case(
        Normalised,
        1,
        {"max_epochs": 3},
        lambda _: [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)],
        split=False,
    ),
    "prunes": Case(
        Base,
        1,
        {},
        lambda _: [
            ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
        ],
    ),
    "multiplies by a sparse buffer": Case(MultipliesSparse),
    "sparse, by hand": Case(SparseByHand, split=False),
    "EMA": Case(Tied, 2, {}, lambda _: [EMAWeightAveraging(decay=0.8)]),
    "averages": Case(Tied, 1, {}, lambda _: [WeightAveraging()]),
    "thaws": Case(
        Backbone, 2, {"max_epochs": 4}, lambda _: [BackboneFinetuning(2, backbone_initial_lr=0.01)]
    ),
    "finds a learning rate": Case(
        Scheduled,
        1,
        {"max_epochs": 8},
        lambda _: [LearningRateFinder(num_training_steps=20, early_stop_threshold=None)],
        False,
    ),
    "a timer": Case(Base, 2, {}, lambda _: [Timer({"hours": 10})]),
}


class Found(NamedTuple):
    """What a run gave on a rank.

    Args:
        parameters: by name; buffers, too.
        metrics: the callback metrics.
        noted: what the module has noted, and the learning rate.
    """

    parameters: dict[str, Tensor]
    metrics: dict[str, float]
    noted: list[Any]


def run_cases(strategy: dict[str, Any] | None, names: list[str]) -> list[Found]:
    """Trains models: plainly, or on the ranks of a job."""
    torch.set_num_threads(1)
    return [run_case(CASES[name], strategy) for name in names]


def run_case(case: Case, strategy: dict[str, Any] | None) -> Found:
    """Trains a model."""
    pl.seed_everything(7, verbose=False)
    module = case.kind()
    number = MICROBATCHES if case.split else 1
    factor, arguments = number, dict[str, Any]()
    if strategy is not None:
        factor = 1
        ours = PipeShiftStrategy(microbatches=number, **strategy)
        arguments = {"strategy": ours, "devices": int(os.environ["WORLD_SIZE"])}
    if case.every > 1 or factor > 1:
        arguments["accumulate_grad_batches"] = case.every * factor
    callbacks = case.callbacks(factor)
    if any(isinstance(each, GradientAccumulationScheduler) for each in callbacks):
        arguments.pop("accumulate_grad_batches", None)
    trainer = pl.Trainer(
        **{**QUIET, "max_epochs": 2, "limit_val_batches": 0, **case.options},
        accelerator="cpu",
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **arguments,
    )
    data: Any = batches(is_split=strategy is None and case.split)
    whole: Any = batches(is_split=False)
    trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(whole, batch_size=None))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Found(
        # `torch.equal` takes no sparse ones.
        {name: x.detach().to_dense().clone() for name, x in tensors.items()},
        {name: float(x) for name, x in trainer.callback_metrics.items()},
        [*module.noted, trainer.optimizers[0].param_groups[0]["lr"]],
    )


NAMES: dict[tuple[int, str], list[str]] = {
    (0, "1f1b"): list(CASES),
    (1, "1f1b"): some(CASES, 10),
    (2, "1f1b"): some(list(CASES)[1:], 14),
    (3, "1f1b"): list(CASES),
    (3, "zb-h1"): [*some(list(CASES)[2:], 14), "goes back itself", "runs again"],
    (2, "interleaved_1f1b"): some(list(CASES)[3:], 6),
    (3, "interleaved_1f1b"): [*some(list(CASES)[4:], 6), "goes back itself"],
}
"""The cases that run on a number of stages by a schedule; with 0 stages, in plain Lightning."""


@lru_cache
def found_on(stages: int, schedule: str) -> list[dict[str, Found]]:
    """By rank, the cases in one job."""
    strategy = {"partition": "uniform", "schedule": schedule} if stages else None
    names = NAMES[stages, schedule]
    ranks = run_ranks(run_cases, max(stages, 1), strategy, names)
    return [dict(zip(names, each, strict=True)) for each in ranks]


@pytest.mark.parametrize(
    ("name", "stages", "schedule"),
    [(name, *where) for where, names in NAMES.items() for name in names if where[0]],
)
def test_the_bits_of_plain_lightning(name: str, stages: int, schedule: str) -> None:
    (expected,) = [each[name] for each in found_on(0, "1f1b")]
    for each in found_on(stages, schedule):
        found, others = each[name], expected.parameters
        assert found.parameters.keys() == others.keys()
        assert [n for n, x in found.parameters.items() if not torch.equal(x, others[n])] == []
        assert found.noted == expected.noted
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)


def test_the_first_rank_of_each_virtual_machine_logs() -> None:
    options = {"partition": "uniform", "virtual_machines": 2}
    found = [each.metrics for each in run_ranks(run_case, 4, Case(LogsAlone), options)]
    # The mean of what the first rank of each virtual machine logs: 0 and 2.
    assert found[0]["rank"] == 1.0
    assert found[0].keys() == {"norm", "loss", "all", "rank"}
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved_1f1b"])
def test_backwards_in_parts_have_the_same_sums_over_virtual_machines(schedule: str) -> None:
    options = {"partition": "uniform", "virtual_machines": 2}
    whole, parts = (
        run_ranks(run_case, 4, Case(Base, 2), {**options, "schedule": name})
        for name in ("1f1b", schedule)
    )
    expected, found = (
        {name: x for each in ranks for name, x in each.parameters.items() if not x.is_meta}
        for ranks in (whole, parts)
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    for one, other in zip(whole, parts, strict=True):
        assert one.metrics == other.metrics


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (HooksOnAll, {}, "has a hook on its backward, and several layers in it"),
    ],
)
def test_what_cannot_be_is_an_error_on_every_rank(
    kind: type[Base], options: dict[str, Any], message: str
) -> None:
    arguments = Case(kind), {"partition": "uniform", **options}
    outcomes = run_ranks(run_case, 2, *arguments, grace=20, expect_failure=True)
    assert all(message in outcome.message for outcome in outcomes)
