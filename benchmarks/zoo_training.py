"""The work of the sweep's ranks on one model: train it in a pipeline, and in plain Lightning."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks import zoo_models
from benchmarks.zoo_models import Batch, Built, Case
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from lightning_pipeshift.testing.bits import differences
from lightning_pipeshift.testing.training import QUIET, Recorder, loader_of

MICROBATCHES = 2
# Minibatches of an asynchronous update: at least as many as there are stages.
ACCUMULATED = 3
SEED = 11
LEARNING_RATE = 0.005
# Parameters after a few steps, against a plain loop: the largest difference, as a part of the
# largest value of the tensor.
TOLERANCE = 1e-3


class Fit(NamedTuple):
    """How to train.

    Args:
        num_steps: how many steps.
        partition: as the strategy takes it.
        schedule: likewise.
        drops: whether dropout and its like are on.
    """

    num_steps: int
    partition: Any = "auto"
    schedule: str = "1f1b"
    drops: bool = True

    @property
    def is_asynchronous(self) -> bool:
        """Whether a batch is a minibatch, and several make one step."""
        return self.schedule in ASYNCHRONOUS


class Trained(NamedTuple):
    """The result of a run, on one rank.

    Args:
        digest: of the final parameters and buffers.
        losses: of every step.
        layers: the names of the plan's layers.
        counts: how many of them each stage has owned at the end.
        differing: how far each tensor is from the same one in ``compared_with``, as a part of its
            largest value: those that are not the same to the bit.
        first_step_seconds: of the first step, in which the model is traced.
        seconds: the whole run.
    """

    digest: str
    losses: list[float]
    layers: list[str]
    counts: list[int]
    differing: dict[str, float]
    first_step_seconds: float
    seconds: float


class Overhead(NamedTuple):
    """Processor seconds of a step in a fit on one device, and of the plain step beside it."""

    fitted: list[float]
    plain: list[float]

    @property
    def ratio(self) -> float:
        """How many times as long a step takes."""
        return median(self.fitted) / median(self.plain)


class Wrapped(L.LightningModule):
    """The unmodified model, as a user would train it.

    Args:
        built: the model and its loss.
        logs: whether the loss is logged.
    """

    def __init__(self, built: Built, logs: bool = True) -> None:
        super().__init__()
        self.model = built.model
        self._loss_of = built.loss
        self._logs = logs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss_of(self.model, batch)
        if self._logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return optimizer_of(self.model)


def optimizer_of(model: nn.Module) -> Optimizer:
    """SGD with momentum: Adam scales the noise of gradients that are zero up to rounding."""
    return SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def settle(case: Case) -> Case:
    """See :func:`benchmarks.zoo_models.settle`."""
    return zoo_models.settle(case)


def fit(case: Case, how: Fit, save_as: str | None, compare_with: str | None) -> Trained:
    """Trains on this job's ranks, one stage on each.

    Args:
        case: a settled one.
        how: partition, schedule and the like.
        save_as: a file for the first rank's final state.
        compare_with: the file of another run's.
    """
    begun = time.perf_counter()
    built = zoo_models.build(case, how.drops)
    module = Wrapped(built)
    L.seed_everything(SEED, verbose=False)
    watcher = Recorder()
    accumulated = ACCUMULATED if how.is_asynchronous else 1
    strategy = PipeShiftStrategy(
        microbatches=1 if how.is_asynchronous else MICROBATCHES,
        partition=how.partition,
        schedule=how.schedule,
        profile_steps=1,
    )
    trainer = _trainer(strategy, watcher, how.num_steps, accumulated)
    trainer.fit(module, loader_of(built.batches(how.num_steps * accumulated)))
    state = dict(built.model.state_dict())
    differing = {}
    if trainer.is_global_zero and compare_with is not None:
        differing = differences(state, torch.load(compare_with, weights_only=True))
    if trainer.is_global_zero and save_as is not None:
        torch.save(state, save_as)
    placement = strategy.plan.placement
    return Trained(
        digest_of(state),
        # Values of a minibatch come later, on each split by another number of calls.
        [logged["loss"] for logged in watcher.logged[-1 if how.is_asynchronous else 0 :]],
        [layer.name for layer in strategy.plan.layers],
        list(placement.counts[0]),
        differing,
        watcher.first_step_seconds,
        time.perf_counter() - begun,
    )


def train_plainly(case: Case, num_steps: int, compare_with: str) -> dict[str, float]:
    """Trains in a plain loop, without dropout and with the same microbatches.

    Returns:
        how far each tensor is from that of the run with which it is compared, where that is more
        than rounding.

    Raises:
        StillDrawsError: the loop itself comes to something else with other random numbers, so the
            two cannot be compared.
    """
    state = _plainly_trained(case, num_steps, seed=SEED)
    far = _far(state, torch.load(compare_with, weights_only=True))
    if far and _far(state, _plainly_trained(case, num_steps, seed=SEED + 1)):
        raise StillDrawsError("the plain loop draws random numbers, dropout or not")
    return far


class StillDrawsError(RuntimeError):
    """A model that draws random numbers in some other way than by dropout and its like."""


def _plainly_trained(case: Case, num_steps: int, seed: int) -> dict[str, Tensor]:
    built = zoo_models.build(case, drops=False)
    optimizer = optimizer_of(built.model)
    L.seed_everything(seed, verbose=False)
    for batch in built.batches(num_steps):
        _plain_step(built, optimizer, _slices(batch, MICROBATCHES))
    return dict(built.model.state_dict())


def _far(state: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    distances = differences(state, other)
    return {name: distance for name, distance in distances.items() if distance > TOLERANCE}


def measure_overhead(
    case: Case, num_steps: int, limit_seconds: float, with_pipeshift: bool = True
) -> Overhead:
    """Times a fit's own steps on one device, and steps of a plain loop between them.

    A step is what lies between the two hooks around a batch: the fit's own part of Lightning's
    loop is in it, which a plain loop has not. Time is the processor's: what other processes take
    does not count.

    Args:
        case: a settled one.
        num_steps: how many of each.
        limit_seconds: fewer steps, where they would take longer.
        with_pipeshift: whether the fit is PipeShift's on one stage; else Lightning's by default.
    """
    plain = zoo_models.build(case)
    built = zoo_models.build(case)
    alternation = _Alternation(plain, limit_seconds)
    strategy: Any = "auto"
    if with_pipeshift:
        strategy = PipeShiftStrategy(microbatches=1, profile_steps=0)
    trainer = _trainer(strategy, alternation, num_steps + _Alternation.NUM_WARM_UP)
    batches = num_steps + _Alternation.NUM_WARM_UP
    trainer.fit(Wrapped(built, logs=False), loader_of(built.batches(batches)))
    return Overhead(alternation.fitted, alternation.plain)


class _Alternation(L.Callback):
    NUM_WARM_UP = 3

    def __init__(self, plain: Built, limit_seconds: float) -> None:
        self.fitted: list[float] = []
        self.plain: list[float] = []
        self._plain = plain
        self._optimizer = optimizer_of(plain.model)
        self._batch = plain.batches(1)[0]
        self._limit_seconds = limit_seconds
        self._num_begun = 0
        self._first = self._begun = time.process_time()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        begun = time.process_time()
        _plain_step(self._plain, self._optimizer, [self._batch])
        if self._num_begun >= self.NUM_WARM_UP:
            self.plain.append(time.process_time() - begun)
        elif self._num_begun == self.NUM_WARM_UP - 1:
            self._first = time.process_time()
        self._begun = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.process_time()
        if self._num_begun >= self.NUM_WARM_UP:
            self.fitted.append(now - self._begun)
            if len(self.fitted) >= 3 and now - self._first > self._limit_seconds:
                trainer.should_stop = True
        self._num_begun += 1


def _trainer(
    strategy: Any, callback: L.Callback, num_steps: int, accumulated: int = 1
) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=[callback],
        max_steps=num_steps,
        accumulate_grad_batches=accumulated,
        max_epochs=-1,
        **QUIET,
    )


def _slices(batch: Batch, count: int) -> list[Batch]:
    parts = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(count)]


def _plain_step(built: Built, optimizer: Optimizer, slices: list[Batch]) -> None:
    optimizer.zero_grad()
    for part in slices:
        (built.loss(built.model, part) / len(slices)).backward()
    optimizer.step()


def digest_of(state: Mapping[str, Tensor]) -> str:
    """A checksum of names, shapes and bits."""
    checksum = hashlib.sha256()
    for name, tensor in state.items():
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        checksum.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return checksum.hexdigest()
