"""Checks that a model trains to the same bits on one stage and on several."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.testing import training
from lightning_pipeshift.testing.findings import Findings
from lightning_pipeshift.testing.report import CheckedRun, CheckReport, Difference, Failure
from lightning_pipeshift.testing.splits import CUTS, Split, random_cut, some_splits
from lightning_pipeshift.testing.training import Factories, Fit, Model, Recipe, Trained
from lightning_pipeshift.testing.workers import JobFailedError, Workers

PRELOADED = ("lightning.pytorch", "lightning_pipeshift.testing.training")
ONE_STAGE = Split(1, "measured", "1f1b")

LIMIT_SECONDS = 300.0
"""For each run, unless the caller passes another limit."""


def check_model(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    data: pl.LightningDataModule | Iterable[Any] | Callable[[], Any] | None = None,
    *,
    stages: Sequence[int] = (2, 3),
    steps: int = 3,
    cuts: Sequence[str | Sequence[int]] = ("measured", "random"),
    schedules: Sequence[str] = ("1f1b",),
    microbatches: int = 2,
    trainer_arguments: Mapping[str, Any] | None = None,
    seed: int = 1,
    limit_seconds: float = LIMIT_SECONDS,
) -> CheckReport:
    """Trains a model for some steps on one stage and on several, in processes of its own on the
    CPU, and compares them to the bit: losses, logged values, parameters, buffers, and the
    optimizer's state.

    It starts processes, so a script must call it below ``if __name__ == "__main__":``.

    Args:
        module: a function at the top of a Python module (or a class) that makes the
            LightningModule; or a LightningModule, of which every run trains a copy.
        data: the batches: a LightningDataModule, a DataLoader or another iterable of batches; or a
            function at the top of a Python module that makes one; ``None`` for the
            LightningModule's ``train_dataloader``. Every run trains on the first ``steps`` batches,
            as they were drawn once.
        stages: numbers of stages to split the model into.
        steps: how many batches to train on; fewer, if there are fewer.
        cuts: where to cut. ``"measured"``, as ``partition="auto"`` does, and again after the first
            step; ``"random"``; ``"uniform"``; or the number of layers of each stage: ``[5, 4]``.
        schedules: names of schedules, such as ``"1f1b"`` and ``"gpipe"``. They alternate: each is
            paired with each number of stages, and with each cut, if there are enough splits.
        microbatches: into how many slices each batch is cut.
        trainer_arguments: of ``Trainer``, such as ``precision`` and ``gradient_clip_val``.
        seed: of all random numbers.
        limit_seconds: a run that takes longer counts as hung.

    Returns:
        the report; ``report.ok`` is whether all is equal, and ``print(report)`` shows details.
        A model that cannot be split, that fails or that hangs is reported too.

    Raises:
        ConfigurationError: an argument that is not allowed, or a function that cannot be sent to
            other processes.
    """
    own = dict(trainer_arguments or {})
    taken = sorted(own.keys() & training.TAKEN)
    if taken:
        raise ConfigurationError(
            f"`trainer_arguments` has {', '.join(taken)}, which the check sets itself. Remove it; "
            "allowed are arguments that change how a step is computed, such as `precision`."
        )
    recipe = Factories(_maker(module), _data_maker(data, steps), seed, own)
    splits = splits_of(stages, cuts, schedules)
    return check(recipe, splits, steps, microbatches, limit_seconds)


def splits_of(
    stages: Sequence[int], cuts: Sequence[str | Sequence[int]], schedules: Sequence[str]
) -> list[Split]:
    """The splits that :func:`check_model` tries.

    Raises:
        ConfigurationError: an impossible number of stages, cut or schedule.
    """
    named = [cut for cut in cuts if isinstance(cut, str)]
    given = [tuple(cut) for cut in cuts if not isinstance(cut, str)]
    for cut in named:
        if cut not in CUTS:
            raise ConfigurationError(
                f"cuts has {cut!r}; allowed are {', '.join(map(repr, CUTS))}, and the number of"
                " layers of each stage, such as [5, 4]"
            )
    if not schedules:
        raise ConfigurationError("schedules is empty; name at least one, such as '1f1b'")
    for schedule in schedules:
        schedule_named(schedule)
    few = [number for number in [*stages, *map(len, given)] if number < 2]
    if few:
        raise ConfigurationError(
            f"a split into {few[0]} stages; a check compares one stage with 2 or more"
        )
    splits = some_splits(stages, named, schedules)
    splits += [Split(len(cut), cut, schedules[i % len(schedules)]) for i, cut in enumerate(given)]
    if not splits:
        raise ConfigurationError(
            "there is nothing to compare with one stage; name a number of stages and a cut, such as"
            " stages=[2] and cuts=['measured']"
        )
    return splits


def check(
    recipe: Recipe,
    splits: Sequence[Split],
    num_steps: int,
    microbatches: int,
    limit_seconds: float,
    folder: Path | None = None,
) -> CheckReport:
    """Trains a recipe's model on one stage and on each split, and compares the results.

    Args:
        recipe: it is sent to other processes.
        splits: of several stages each.
        num_steps: how many batches to train on, at the most.
        microbatches: into how many slices each batch is cut.
        limit_seconds: of each run.
        folder: the one that the runs have as their working directory; by default one of their own.

    Raises:
        ConfigurationError: a number that is too small, or a recipe that cannot be sent.
    """
    for name, value in (("steps", num_steps), ("microbatches", microbatches)):
        if value < 1:
            raise ConfigurationError(f"{name}={value}: it must be 1 or more")
    try:
        pickle.dumps(recipe)
    except Exception as error:
        raise ConfigurationError(
            "The functions that create the model and the data have to be sent to other "
            f"processes, but cannot be pickled ({type(error).__name__}: {error}). Pass functions "
            "or classes that are defined at the top of a Python module: no lambdas, nothing that "
            "is defined inside a function."
        ) from error
    with Workers(PRELOADED, folder) as workers:
        return _Check(workers, recipe, microbatches, limit_seconds).run(splits, num_steps)


class _Check:
    def __init__(
        self, workers: Workers, recipe: Recipe, microbatches: int, limit_seconds: float
    ) -> None:
        self._workers = workers
        self._recipe = recipe
        self._microbatches = microbatches
        self._limit_seconds = limit_seconds
        self._batches = workers.scratch / "batches.pt"
        self._state = workers.scratch / "one_stage.pt"

    def run(self, splits: Sequence[Split], num_steps: int) -> CheckReport:
        """Runs the whole check."""
        report = CheckReport(
            "the model",
            num_steps,
            self._microbatches,
            CheckedRun(ONE_STAGE),
            (),
            Findings(()),
        )
        stages = {split.stages for split in splits}
        try:
            [model] = self._call(
                training.collect, self._recipe, num_steps, stages, self._batches, num_stages=1
            )
            report = replace(
                report,
                model=model.name,
                num_steps=model.num_batches,
                findings=Findings(model.layers),
            )
            [one] = self._train(ONE_STAGE, "uniform", save_as=self._state)
            if one.findings is not None:
                report = replace(report, findings=one.findings)
        except JobFailedError as error:
            return replace(report, one_stage=CheckedRun(ONE_STAGE, failure=_failure(error)))
        runs = []
        for split in splits:
            run, findings = self._compare(split, model, one)
            runs.append(run)
            if findings is not None and _says_more(findings, report.findings):
                report = replace(report, findings=findings)
        is_repeatable = None
        if any(run.verdict in ("differs", "refused") for run in runs):
            again, _ = self._compare(ONE_STAGE, model, one)
            is_repeatable = not again.differences and again.failure is None
        return replace(
            report,
            one_stage=CheckedRun(ONE_STAGE, one.counts, tuple(one.losses), seconds=one.seconds),
            runs=tuple(runs),
            is_repeatable=is_repeatable,
        )

    def _compare(
        self, split: Split, model: Model, one: Trained
    ) -> tuple[CheckedRun, Findings | None]:
        partition: str | list[int] = "auto" if split.cut == "measured" else "uniform"
        if split.cut == "random":
            seed = f"{model.name}/{split.stages}"
            num_layers = model.num_layers[split.stages]
            partition = random_cut(seed, num_layers, split.stages)
        elif not isinstance(split.cut, str):
            partition = list(split.cut)
        try:
            runs = self._train(split, partition, compare_with=self._state)
        except JobFailedError as error:
            return CheckedRun(split, failure=_failure(error)), None
        first = runs[0]
        run = CheckedRun(
            split,
            first.counts,
            tuple(first.losses),
            _differences(runs, one),
            seconds=max(each.seconds for each in runs),
        )
        return run, first.findings

    def _train(
        self,
        split: Split,
        partition: str | list[int],
        save_as: Path | None = None,
        compare_with: Path | None = None,
    ) -> list[Trained]:
        how = Fit(partition, split.schedule, self._microbatches)
        arguments = (self._recipe, how, self._batches, save_as, compare_with)
        return self._call(training.train, *arguments, num_stages=split.stages)

    def _call(self, function: Any, *args: Any, num_stages: int) -> list[Any]:
        return self._workers.run(
            function, *args, world_size=num_stages, limit_seconds=self._limit_seconds
        )


def _failure(error: JobFailedError) -> Failure:
    return Failure(error.kind, error.message, error.details, error.is_refusal)


def _says_more(findings: Findings, known: Findings) -> bool:
    """Whether findings are the first of a step, or the first with times."""

    def says(found: Findings) -> tuple[bool, bool]:
        is_timed = any(layer.forward_seconds is not None for layer in found.layers)
        return bool(found.code or found.boundaries), is_timed

    return says(findings) > says(known)


def _differences(runs: Sequence[Trained], one: Trained) -> tuple[Difference, ...]:
    """The values that differ between one stage and the ranks of a split."""
    found: dict[tuple[str, str, int | None], dict[int, float]] = {}
    for rank, run in enumerate(runs):
        seen: set[tuple[str, str]] = set()
        for step, (values, others) in enumerate(zip(_said(run), _said(one), strict=True)):
            for kind, name in sorted(values.keys() | others.keys()):
                value, other = values.get((kind, name)), others.get((kind, name))
                # Compared as texts: then NaN equals itself, and -0.0 differs from 0.0.
                if repr(value) != repr(other) and (kind, name) not in seen:
                    seen.add((kind, name))
                    found.setdefault((kind, name, step), {})[rank] = _distance(value, other)
        for (kind, name), distance in run.differing.items():
            found.setdefault((kind, name, None), {})[rank] = distance
    everywhere = set().union(*(run.held for run in runs))
    for kind, name in sorted(one.held - everywhere):
        found[kind, name, None] = dict.fromkeys(range(len(runs)), math.inf)
    differences = [
        Difference(
            kind,
            name,
            max(distances.values()) if math.isfinite(max(distances.values())) else None,
            step,
            tuple(distances),
        )
        for (kind, name, step), distances in found.items()
    ]
    kinds = ["loss", "logged value", "parameter", "buffer", "optimizer state"]
    return tuple(sorted(differences, key=lambda each: kinds.index(each.kind)))


def _said(run: Trained) -> list[dict[tuple[str, str], float | None]]:
    """By step, the loss and the values logged so far."""
    return [
        {("loss", "loss"): loss} | {("logged value", name): x for name, x in logged.items()}
        for loss, logged in zip(run.losses, run.logged, strict=True)
    ]


def _distance(value: float | None, other: float | None) -> float:
    if value is None or other is None or not math.isfinite(value) or not math.isfinite(other):
        return math.inf
    return abs(value - other) / max(abs(other), 1e-3)


def _maker(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
) -> Callable[[], pl.LightningModule]:
    if isinstance(module, pl.LightningModule):
        return partial(training.unchanged, module)
    if not callable(module):
        raise ConfigurationError(
            f"The model is a `{type(module).__name__}`. Pass a LightningModule, or a function that"
            " makes one."
        )
    return module


def _data_maker(data: Any, num_batches: int) -> Callable[[], Any]:
    if callable(data):
        maker: Callable[[], Any] = data
        return maker
    if data is None or isinstance(data, pl.LightningDataModule):
        return partial(training.unchanged, data)
    if not isinstance(data, Iterable):
        raise ConfigurationError(
            f"The data is a `{type(data).__name__}`. Pass a LightningDataModule, a DataLoader or"
            " another iterable of batches, or a function that makes one."
        )
    if isinstance(data, DataLoader):
        # The source of the data may be large, or may not be picklable.
        data = list(islice(data, num_batches))
    return partial(training.loader_of, data, num_batches)
