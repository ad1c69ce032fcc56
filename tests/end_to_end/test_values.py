"""Habits of users train the bits of plain Lightning, with the
same side effects on every rank.

Plain Lightning accumulates as many batches as there are microbatches, and gets the microbatches as
its batches.
"""

from __future__ import annotations

import os
import random
import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger, Logger, rank_zero_experiment
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.training import QUIET

WIDTH, WORDS, LENGTH, SAMPLES, MICROBATCHES, BATCHES = 16, 11, 6, 8, 4, 3
NOTED: list[float] = []


COUNTS = {"steps": 0}


class Block(nn.Module):
    """A block of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` -> the same."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Base(pl.LightningModule):
    """A small language model. Subclasses have other steps."""

    split = True
    """Whether a batch is split into microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.noted: list[Any] = []
        self.written = Path()

    def forward(self, words: Tensor) -> Tensor:
        """``(batch, length)`` -> ``(batch, length, words)``."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of what the head gives."""
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        return self.loss(self(words), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Logs(Base):
    """Logs values of several stages, per step and per epoch, and a learning rate schedule."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        self.log("norm", x.norm(), on_epoch=True, on_step=False)
        for block in self.blocks:
            x = block(x)
        loss = self.loss(self.head(x), targets)
        self.log_dict({"loss": loss, "double": 2 * loss}, on_step=False, on_epoch=True)
        self.log("number", 3.0, on_step=False, on_epoch=True)
        return {"loss": loss, "hidden": x.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert type(outputs["loss"]) is type(outputs["hidden"]) is Tensor

    def validation_step(self, batch: Any, _: int) -> None:
        words, targets = batch
        self.log("val", self.loss(self(words), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Writes(Base):
    """Writes to the logger's experiment, and lines to a file on the first rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        logger: Any = self.logger
        logger.experiment.add_scalar("loss", loss, self.global_step)
        if self.trainer.is_global_zero:
            with self.written.open("a") as file:
                file.write(f"{loss.item()}\n")
        return loss


class Counts(Base):
    """Counters of a module's globals and of a library's object, changed behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Running()

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        scale = 1.0 + 0.1 * COUNTS["steps"] + 0.01 * self.mean.mean
        x = self.embedding(words) * scale
        for block in self.blocks:
            x = block(x)
        loss = self.loss(self.head(x), targets)
        COUNTS["steps"] += 1
        self.mean.update(loss.item())
        self.noted.append((COUNTS["steps"], self.mean.mean, f"{loss:.4f}"))
        return loss


class Running:
    """A mean."""

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def update(self, x: float) -> None:
        """Adds a number."""
        self.count += 1
        self.mean += (x - self.mean) / self.count


class Mixes(Base):
    """Mixup: draws from NumPy, torch and ``random`` in the step."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        weight, order = np.random.beta(0.8, 0.8), torch.randperm(len(words))
        self.noted.append((weight, order.tolist(), random.random()))
        # One stage's draws are not plain Lightning's: only that all ranks draw the same counts.
        x = self.embedding(words)
        x = 0.5 * x + 0.5 * x[torch.arange(len(words)).flip(0)]
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(x), targets)


class Measures(Base):
    """torchmetrics objects are updated in the step, logged, and computed at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(WORDS), MeanMetric()

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        logits = self(words)
        loss = self.loss(logits, targets)
        self.accuracy.update(logits.flatten(0, 1), targets.flatten())
        self.mean.update(loss.detach())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.noted.append(float(self.mean.compute()))
        self.mean.reset()


class Queues(Base):
    """A queue of features that is empty at first, and outputs that are kept to the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=2)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        loss = self.loss(self.head(x), targets)
        if self.queue:
            loss = loss + 0.1 * sum((x - old).pow(2).mean() for old in self.queue)
        self.queue.append(x.detach())
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.noted.append(torch.stack(self.losses).mean().item())
        self.losses.clear()


class Branches(Base):
    """A value decides how often blocks are called, and a NaN guard looks at all parameters."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        for _number in range(1 + int(x.abs().mean() * 10) % 3):
            for block in self.blocks:
                x = block(x)
        loss = self.loss(self.head(x), targets)
        if torch.isnan(loss):
            return None
        return loss + sum(p.sum() for p in self.parameters()) * 0.0


class Generates(Base):
    """Generates in a validation step, and runs the model outside of steps."""

    def validation_step(self, batch: Any, _: int) -> None:
        words, _targets = batch
        words = words[:2]
        for _step in range(3):
            words = torch.cat([words, self(words)[:, -1:].argmax(-1)], 1)
        self.noted.append(words.tolist())

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.noted.append(round(self(torch.arange(4)[None]).sum().item(), 3))


class Adversarial(Base):
    """Manual optimization with two optimizers."""

    split = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Any, _: int) -> None:
        words, targets = batch
        optimizers: Any = self.optimizers()
        first, second = optimizers
        self.toggle_optimizer(first)
        x = self.embedding(words) * self.scale
        for block in self.blocks:
            x = block(x)
        loss = self.loss(self.head(x), targets)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        logits = self.head(x.detach())
        other = (logits**2).mean() - 0.1 * self.loss(logits, targets)
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.untoggle_optimizer(second)
        self.noted.append((loss.item(), other.item()))
        self.log("loss", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        front = [self.scale, *self.embedding.parameters(), *self.blocks.parameters()]
        return torch.optim.Adam(front, lr=0.01), torch.optim.SGD(self.head.parameters(), lr=0.1)


class AdversarialOnce(Adversarial):
    """In the order of PyTorch's tutorial for GANs: what is made once is used detached, in front of
    one backward, and with its gradient behind that.
    """

    def training_step(self, batch: Any, _: int) -> None:
        words, targets = batch
        optimizers: Any = self.optimizers()
        maker, judge = optimizers
        made = self.embedding(words) * self.scale
        for block in self.blocks:
            made = block(made)
        judge.zero_grad()
        judged = self.loss(self.head(made.detach()), targets)
        self.manual_backward(judged)
        judge.step()
        maker.zero_grad()
        fooled = -self.loss(self.head(made), targets)
        self.manual_backward(fooled)
        maker.step()
        self.noted.append((judged.item(), (judged + fooled).item()))


class AccumulatesByHand(Base):
    """Manual optimization that steps every second batch."""

    split = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Noting(nn.Linear):
    """Keeps what it has seen, and writes a line to a file when it runs."""

    file = Path()
    size: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, inputs)`` -> ``(batch, length, outputs)``."""
        if type(x) is Tensor:
            with Noting.file.open("a") as file:
                file.write("runs\n")
        self.size = x.pow(2).mean()
        return super().forward(x)


class Recomputes(Base):
    """``torch.utils.checkpoint`` around layers of several stages: both kinds of it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = Noting(WIDTH, 2 * WIDTH)

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        Noting.file = self.written

        def through(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

        x = checkpoint(through, self.embedding(words), use_reentrant=False)
        loss = self.loss(checkpoint(self.head, x, use_reentrant=True), targets)
        sizes: Any = [block.up.size for block in self.blocks]
        return loss + 0.1 * sum(sizes)


class Buffers(Base):
    """A buffer of the module is changed in place behind the layers, in several epochs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.loss(self.head(x - self.mean), targets)

    def on_train_epoch_end(self) -> None:
        self.noted.append(self.mean.tolist())


class Clamps(Base):
    """Some steps keep a parameter outside of layers in bounds, through `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        if self.global_step % 2:
            self.temperature.data.clamp_(0.49, 0.51)
        return self.loss(self(words) / self.temperature, targets)


class ReadsAlone(Base):
    """Computes and reads a value on the first rank only, behind the step."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        logits = self(words)
        self.logits = logits.detach()
        return self.loss(logits, targets)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.noted.append(self.logits.mean().item())
        # It has the number of the first rank's mean.
        self.spread = self.logits.std()


class ComputesAlone(Base):
    """One rank alone computes with a value."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        if self.trainer.is_global_zero:
            self.noted.append(2 * loss)
        return loss


class NumbersAlone(Base):
    """One rank alone has another number, behind the last layer."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        loss = self.loss(self(words), targets)
        return torch.add(loss, loss, alpha=1.0 if self.trainer.is_global_zero else 2.0)


class TensorsAlone(Base):
    """One rank alone has other targets."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        logits = self(words)
        if self.trainer.is_global_zero:
            targets = targets.flip(0)
        return self.loss(logits, targets)


class StepsAlone(AccumulatesByHand):
    """One rank alone steps its optimizer again, in the last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero and batch_idx == BATCHES - 1:
            optimizer: Any = self.optimizers()
            optimizer.step()
        return found


class Rates(Base):
    """Each rank has a learning rate of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + self.trainer.global_rank))


class DrawsByItself(Block):
    """A block with a generator of its own, and a part that is compiled by TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.up: Any = torch.jit.script(self.up)

    def forward(self, x: Tensor) -> Tensor:
        """Adds noise."""
        return super().forward(x) + 0.1 * torch.randn(x.shape, generator=self.generator)


class Generators(Base):
    """Layers that cannot be copied onto fake tensors as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[3] = DrawsByItself(), DrawsByItself()


class Entries(Logger):
    """A logger whose experiment keeps its entries."""

    name, version = "entries", 0

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.entries.append((name, float(value), step))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


MODELS = (
    Base,
    Logs,
    Writes,
    Counts,
    Mixes,
    Measures,
    Queues,
    Branches,
    Generates,
    Adversarial,
    AdversarialOnce,
    AccumulatesByHand,
    Recomputes,
    Buffers,
    Clamps,
    Generators,
)


class Outcome(NamedTuple):
    """What a run gave on a rank.

    Args:
        parameters: by name.
        metrics: the callback metrics.
        noted: what the module's hooks noted.
        entries: of the logger's experiment.
        lines: of the file.
    """

    parameters: dict[str, Tensor]
    metrics: dict[str, float]
    noted: list[Any]
    entries: list[Any]
    lines: list[str]


def batches(is_split: bool) -> list[Any]:
    """The microbatches, or the batches."""
    generator = torch.Generator().manual_seed(3)
    whole = [
        tuple(torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
        for _ in range(BATCHES)
    ]
    if not is_split:
        return whole
    parts = [zip(*(x.chunk(MICROBATCHES) for x in batch), strict=True) for batch in whole]
    return [part for each in parts for part in each]


def run_all(
    options: dict[str, Any] | None, folder: str, kinds: Sequence[type[Base]]
) -> list[Outcome]:
    """Trains models: plainly, or on the ranks of a job."""
    torch.set_num_threads(1)
    return [outcome_of(kind, options, Path(folder) / kind.__name__) for kind in kinds]


def outcome_of(kind: type[Base], options: dict[str, Any] | None, file: Path) -> Outcome:
    """Trains a model."""
    pl.seed_everything(7, verbose=False)
    COUNTS["steps"] = 0
    module, logger = kind(), Entries()
    module.written = file
    arguments: dict[str, Any] = {"accumulate_grad_batches": MICROBATCHES if kind.split else 1}
    if options is not None:
        options = {"microbatches": MICROBATCHES, **options}
        strategy = PipeShiftStrategy(**options)
        arguments = {"strategy": strategy, "devices": int(os.environ["WORLD_SIZE"])}
    data = batches(is_split=options is None and kind.split)
    trainer = pl.Trainer(
        **{**QUIET, "logger": logger if kind is Writes else DummyLogger()},
        accelerator="cpu",
        max_epochs=2,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        **arguments,
    )
    loader: Any = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, DataLoader(batches(is_split=False), batch_size=None))  # type: ignore[arg-type]
    return Outcome(
        {name: x.detach().clone() for name, x in module.named_parameters()},
        {name: float(x) for name, x in trainer.callback_metrics.items()},
        module.noted,
        logger.entries,
        file.read_text().splitlines() if file.exists() else [],
    )


@lru_cache
def trained(kinds: tuple[type[Base], ...], stages: int, folder: str) -> list[list[Outcome]]:
    """Models on all ranks, in one job: ranks take time to start. With 0 stages, in plain Lightning
    on one.
    """
    options = {"partition": "uniform"} if stages else None
    return run_ranks(run_all, max(stages, 1), options, folder, kinds)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_and_side_effects_of_plain_lightning(
    kind: type[Base], stages: int, folders: list[str]
) -> None:
    at = MODELS.index(kind)
    expected = trained(MODELS, 0, folders[0])[0][at]
    for rank, found in enumerate(each[at] for each in trained(MODELS, stages, folders[stages])):
        assert found.parameters.keys() == expected.parameters.keys()
        others = expected.parameters
        assert [n for n, x in found.parameters.items() if not torch.equal(x, others[n])] == []
        if kind is Measures:
            # The states of a batch's microbatches are added up before those of other batches.
            assert found.noted == pytest.approx(expected.noted, rel=1e-6)
        elif kind is not Mixes:
            # Its draws are other ones than in plain Lightning.
            assert found.noted == expected.noted
        assert found.metrics.keys() == expected.metrics.keys()
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
        if not rank:
            assert found.entries == expected.entries
            assert found.lines == expected.lines
    noted = [each[at].noted for each in trained(MODELS, stages, folders[stages])]
    assert all(each == noted[0] for each in noted)


def errors_of(
    kind: type[Base], folder: Path, error_type: str = "LayerError", **how: Any
) -> list[str]:
    """The messages of a run on two stages that fails."""
    options = {"partition": "uniform"}
    outcomes = run_ranks(run_all, 2, options, str(folder), [kind], expect_failure=True, **how)
    return [each.message for each in outcomes if each.error_type == error_type]


@pytest.mark.parametrize("kind", [ReadsAlone, ComputesAlone])
def test_what_one_rank_does_alone_ends_with_an_error(kind: type[Base], tmp_path: Path) -> None:
    options = {"partition": "uniform"}
    outcomes = run_ranks(run_all, 2, options, str(tmp_path), [kind], grace=1, expect_failure=True)
    said = "\n".join(outcome.message for outcome in outcomes if outcome.failed)
    assert "on every rank" in said or "What only reads values" in said


@pytest.mark.parametrize("kind", [NumbersAlone, TensorsAlone, StepsAlone, Rates])
def test_ranks_that_run_differently_are_told_both_lines(kind: type[Base], tmp_path: Path) -> None:
    found = errors_of(kind, tmp_path, grace=1)
    assert found
    for said in found:
        assert "run different programs" in said
        assert len(re.findall(r"test_values\.py:\d+\)", said)) == 2


class Assigns(Base):
    """Gives a parameter the bytes of a value between two steps."""

    def training_step(self, batch: Any, _: int) -> Any:
        words, targets = batch
        logits = self(words)
        self.mean_logit = logits.detach().mean((0, 1))
        return self.loss(logits, targets)

    def on_train_batch_end(self, *_: Any) -> None:
        self.head.bias.data = self.mean_logit


class Copies(Assigns):
    """Likewise, in place."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.bias.copy_(self.mean_logit)


class AssignsInTime(Assigns):
    """Before the optimizer's step."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.head.bias.data = self.mean_logit


def test_hooks_write_values_of_steps_to_parameters(tmp_path: Path) -> None:
    kinds = [Assigns, Copies, AssignsInTime]
    (expected,) = run_ranks(run_all, 1, {}, str(tmp_path), kinds)
    for rank in run_ranks(run_all, 2, {"partition": "uniform"}, str(tmp_path), kinds):
        for found, one in zip(rank, expected, strict=True):
            assert all(torch.equal(x, one.parameters[name]) for name, x in found.parameters.items())


class MeetsAlone(Base):
    """One rank alone calls a collective between two steps."""

    alone = 1, 2

    def on_train_batch_end(self, *_: Any) -> None:
        if (self.global_rank, self.global_step) == self.alone:
            torch.distributed.all_reduce(torch.ones(3))


class MeetsAloneEarly(MeetsAlone):
    """The others wait for all stages at once: they compare the second batch."""

    alone = 0, 1


@pytest.mark.parametrize("kind", [MeetsAlone, MeetsAloneEarly])
def test_a_collective_of_one_rank_alone_ends_with_its_line(
    kind: type[Base], tmp_path: Path
) -> None:
    said = "\n".join(errors_of(kind, tmp_path, "StageFailedError"))
    assert re.search(
        r"waits in `torch.distributed.all_reduce` \(.*test_values\.py:\d+ in on_", said
    )
    assert "Call it on every rank" in said


class Streamed(IterableDataset[Any]):
    """Batches whose number is not known beforehand."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __iter__(self) -> Any:
        return iter(self.parts)


def steps_by_hand(longer: int) -> None:
    """Manual optimization, with a stream that has one batch more on one rank."""
    parts = batches(is_split=False)[: 2 + (int(os.environ["RANK"]) == longer)]
    strategy = PipeShiftStrategy(partition="uniform")
    trainer = pl.Trainer(**QUIET, accelerator="cpu", devices=2, max_epochs=1, strategy=strategy)
    trainer.fit(AccumulatesByHand(), DataLoader(Streamed(parts), batch_size=None))


@pytest.mark.parametrize("longer", [0, 1])
def test_manual_steps_compare_the_end_of_the_epoch(longer: int) -> None:
    outcomes = run_ranks(steps_by_hand, 2, longer, expect_failure=True)
    found = [each.message for each in outcomes if each.error_type == "BatchError"]
    assert found
    assert all("batch 1 is the epoch's last on" in said for said in found)


class LooksAtThePlan(Base):
    """Notes what the plan says of times."""

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        seconds = {layer.forward_seconds for layer in strategy.plan.layers}
        self.noted.append((strategy.plan.prediction, seconds, strategy.plan.ranks))


def test_a_cut_that_needs_no_times_predicts_none(tmp_path: Path) -> None:
    """Warnings of slow ranks compared real steps with the seconds that stood for bytes."""
    for (found,) in run_ranks(
        run_all, 2, {"partition": "uniform"}, str(tmp_path), [LooksAtThePlan]
    ):
        assert found.noted == [(None, {0.0}, ((0, 1),))]
