"""Evaluation: forward only, with the stages working on successive batches at once.

Lightning's loop takes one batch's result before it fetches the next. If no code needs the results
in between, a stage continues with the next batch at once, and the last stage's logs and results are
fetched at the end of the data.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import IterableDataset

from lightning_pipeshift.compat.lightning_private import (
    combined_loader_of,
    evaluation_loop,
    predictions_of,
)
from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.lightning.steps import StepContext, are_results_used, is_hook_used
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.model.tensors.trees import map_leaves
from lightning_pipeshift.model.user_state.logs import say_again
from lightning_pipeshift.runtime.comm.channels import PostedSum
from lightning_pipeshift.step.checksum import (
    require_data_for_all,
    require_same_lengths,
    require_same_places,
)
from lightning_pipeshift.step.evaluations import STEPS_AHEAD
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.training_batch import UserStep

# Where no batch comes any more: the numbers of a dataloader and a batch, and that it is the end.
_NO_BATCH = -1, -1, True


def _may_end_early(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(
        loader, "__len__"
    )


class EvaluationSteps:
    """The evaluation steps of one run on one rank."""

    def __init__(self, trainer: pl.Trainer, pipeline: Pipeline, context: StepContext) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        self._context = context
        # The target of each result that has not been fetched yet: a list of the predict loop, and
        # the index in it.
        self._awaited: list[tuple[list[Any], int]] = []
        # Of the last batches, which ones they are at each stage.
        self._places: list[PostedSum] = []

    @property
    def _what(self) -> str:
        """The data's name in messages."""
        if self._trainer.predicting:
            return "prediction"
        return "test" if self._trainer.testing else "validation"

    def begin(self) -> None:
        """Compares the lengths of the data over the ranks, and makes the virtual machines' running
        statistics equal, which are used now.
        """
        lengths, pipeline = self._loop.max_batches, self._pipeline
        require_same_lengths(lengths, self._what, pipeline.channels)
        require_data_for_all(lengths, self._what, pipeline.replicas)
        pipeline.match_replicas(parameters_too=False)

    def run(self, name: str, batch: Any, *rest: Any) -> Any:
        """Runs one evaluation step.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            batch: the batch, or Lightning's iterator over them.
            rest: the step's other arguments: the indices of the batch and of the dataloader.

        Returns:
            the step's result, or ``None`` if it is fetched later and not needed now.
        """
        precision = self._trainer.precision_plugin
        precision_context = {
            "validation_step": precision.val_step_context,
            "test_step": precision.test_step_context,
            "predict_step": precision.predict_step_context,
        }[name]

        def run_step(root: nn.Module, part: Any, *rest: Any) -> Any:
            with precision_context():
                return getattr(root, name)(part, *rest)

        step = UserStep(run_step, rest)
        if self._pipeline.is_by_itself:
            # A single device: its result and logs are available at once.
            batch_idx, dataloader_idx = self._place(rest)
            purpose = f"{name}/{dataloader_idx}"
            return self._pipeline.evaluations.plain_step(batch, step, purpose, batch_idx)
        with self._context():
            return self._run_pipelined(name, batch, rest, step)

    def _run_pipelined(self, name: str, batch: Any, rest: tuple[Any, ...], step: UserStep) -> Any:
        trainer = self._trainer
        loop = self._loop
        progress: Any = loop.batch_progress
        batch_idx, dataloader_idx = self._place(rest)
        at_end = bool(progress.is_last_batch) or batch_idx + 1 >= loop.max_batches[dataloader_idx]
        self._compare(dataloader_idx, batch_idx, at_end)
        logs_now = self._pipeline.evaluations.step(
            batch,
            batch_idx,
            step,
            f"{name}/{dataloader_idx}",
            batch_idx,
            wants_result=name == "predict_step" or are_results_used(trainer, name),
        )
        if name == "predict_step":
            self._await_prediction(loop, dataloader_idx)
        if at_end:
            # Not before the batch has been run: the others may still be at the one before.
            self._end_comparing()
        elif not self._is_needed_now(name, logs_now, loop):
            return None
        reports = self._pipeline.evaluations.fetch_reports()
        result = self._deliver(reports, name)
        if at_end:
            self._pipeline.settle_values()
        return result

    def _compare(self, dataloader_idx: int, batch_idx: int, at_end: bool) -> None:
        """Begins to compare over the stages which batch comes next, and waits for comparisons of
        some batches ago: stages work on successive batches at once.
        """
        pipeline, channels = self._pipeline, self._pipeline.channels
        pipeline.meets()
        places = torch.zeros(channels.num_stages, 3, dtype=torch.int64)
        places[channels.stage] = torch.tensor((dataloader_idx, batch_idx, at_end))
        self._places.append(channels.post_sum(places))
        self._end_comparing(STEPS_AHEAD)

    def _end_comparing(self, all_but: int = 0) -> None:
        """Waits for the comparisons that have begun, but for so many of the latest ones."""
        while len(self._places) > all_but:
            require_same_places(self._places.pop(0).wait().tolist())

    @property
    def _loop(self) -> Any:
        trainer = self._trainer
        return trainer.predict_loop if trainer.predicting else evaluation_loop(trainer)

    def _place(self, rest: tuple[Any, ...]) -> tuple[int, int]:
        batch_idx = rest[0] if rest else self._loop.batch_progress.current.ready - 1
        return batch_idx, rest[1] if len(rest) > 1 else 0

    def _is_needed_now(self, name: str, logs_now: bool, loop: Any) -> bool:
        # The end of one of several dataloaders cannot be predicted if its length is unknown.
        loaders = combined_loader_of(loop).flattened
        unknown_end = len(loaders) > 1 and any(map(_may_end_early, loaders))
        next_hook = f"on_{name.removesuffix('_step')}_batch_start"
        return (
            logs_now
            or unknown_end
            or are_results_used(self._trainer, name)
            # Even if the step returns nothing: hooks may read attributes that it set on the module.
            or is_hook_used(self._trainer, next_hook)
        )

    def end(self) -> None:
        """Raises BatchError if there were fewer batches than the dataloader's length, so that the
        logs of the last batches have not been fetched.
        """
        if self._pipeline.evaluations.num_pending:
            raise BatchError(
                f"The {self._what} data ended early: a dataloader's `__len__` (of its sampler, or"
                " of its data set) returns more batches than it yields. Return the right number, or"
                " remove it."
            )
        self._compare(*_NO_BATCH)
        self._end_comparing()

    def _await_prediction(self, loop: Any, dataloader_idx: int) -> None:
        predictions = predictions_of(loop)
        if dataloader_idx < len(predictions):
            self._awaited.append((predictions[dataloader_idx], len(predictions[dataloader_idx])))

    def _deliver(self, reports: list[Report], name: str) -> Any:
        root: Any = self._pipeline.root
        device = self._pipeline.channels.device
        # The class's own method: while a step runs, the recorder replaces it on the instance.
        log = partial(type(root).log, root)
        # An epoch's values are reduced over all virtual machines at its end: until then, they may
        # be at different batches.
        synchronised = True if self._pipeline.replicas.count > 1 else None
        for report in reports:
            say_again(report.logs, log, root, device, synchronised)
        *earlier, last = reports
        awaited, self._awaited = self._awaited, []
        if name == "predict_step":
            for report, (predictions, place) in zip(earlier, awaited, strict=False):
                if place < len(predictions):
                    predictions[place] = report.result
        # Tensors do not make the host wait; other objects may contain tensors of their own.
        result = to_device(last.result, device)
        return map_leaves(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, result)
