"""Evaluation: forward only, the stages working on successive batches at once.

Lightning's loop asks for one batch's result before it fetches the next. Where nobody needs the
results in between, a stage goes on with the next batch at once, and what the last stage logged and
returned is fetched at the end of the data.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import IterableDataset

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.model.logs import say_again
from lightning_pipeshift.model.trace import Trace
from lightning_pipeshift.model.trees import map_leaves
from lightning_pipeshift.runtime.pipeline import Pipeline
from lightning_pipeshift.runtime.report import Report
from lightning_pipeshift.runtime.step_run import UserStep


def is_hook_used(trainer: pl.Trainer, hook: str) -> bool:
    """Whether a hook is more than Lightning's own: its callbacks (progress bars) only count."""
    parts: list[Any] = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(_is_users_own(part, hook) for part in parts)


def _is_users_own(part: Any, hook: str) -> bool:
    """Whether a callback or a LightningModule has a hook that is not Lightning's.

    A hook's own ``__module__`` says nothing: `functools.wraps` copies it from what is wrapped.
    """
    if hook in vars(part):
        return True  # `LambdaCallback` sets its hooks on the instance
    for kind in type(part).__mro__:
        if hook in vars(kind):
            function = vars(kind)[hook]
            written_in = getattr(function, "__globals__", {}).get("__name__", "")
            return not (_is_lightnings(kind.__module__) and _is_lightnings(written_in))
    # An attribute that is made up when it is asked for.
    return callable(getattr(part, hook, None))


def _is_lightnings(module: str) -> bool:
    # Some of its hooks are wrapped by what `lightning_utilities` has.
    return module.partition(".")[0] in ("lightning", "lightning_utilities")


def somebody_looks_at_results(trainer: pl.Trainer, step: str) -> bool:
    """Whether a hook after each batch is given the step's result by somebody who may use it."""
    writes = any(
        isinstance(part, BasePredictionWriter) and part.interval.on_batch
        for part in trainer.callbacks  # type: ignore[attr-defined]
    )
    return writes or is_hook_used(trainer, f"on_{step.removesuffix('_step')}_batch_end")


def _may_end_early(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(
        loader, "__len__"
    )


class EvaluationSteps:
    """The evaluation steps of one run on one rank.

    Args:
        trainer: the Trainer.
        pipeline: this rank's pipeline.
    """

    def __init__(self, trainer: pl.Trainer, pipeline: Pipeline) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        # Where each result that was not there yet has to go: a list of the predict loop, and the
        # place in it.
        self._awaited: list[tuple[list[Any], int]] = []

    def run(self, name: str, batch: Any, rest: tuple[Any, ...], step: UserStep) -> Any:
        """Runs one evaluation step.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            batch: the batch.
            rest: what else the step takes: the batch index, and the index of the dataloader.
            step: runs the user's step on a module and the batch.

        Returns:
            the step's result, or ``None`` where it comes later and nobody needs it now.
        """
        trainer = self._trainer
        fitting = trainer.state.fn == "fit"
        loop = self._loop
        progress: Any = loop.batch_progress
        batch_idx, dataloader_idx = self._place(rest)
        trace = self._pipeline.evaluation_step(
            batch,
            batch_idx,
            step,
            f"{name}/{dataloader_idx}",
            batch_idx,
            # Until the first training step has shown the whole flow, the sanity check lets go of
            # nothing.
            final=not fitting,
            wants_result=name == "predict_step" or somebody_looks_at_results(trainer, name),
        )
        if name == "predict_step":
            self._await_prediction(loop, dataloader_idx)
        at_end = bool(progress.is_last_batch) or batch_idx + 1 >= loop.max_batches[dataloader_idx]
        if not (at_end or self._is_needed_now(name, trace, loop)):
            return None
        reports = self._pipeline.fetch_reports()
        return self._deliver(reports, name)

    def run_plainly(self, name: str, batch: Any, rest: tuple[Any, ...], step: UserStep) -> Any:
        """Runs one evaluation step on one device by itself: its result and its logs are there at
        once.

        Args:
            name: as for :meth:`run`, as are the others.
            batch: the batch, or Lightning's iterator over them.
            rest: what else the step takes.
            step: runs the user's step.

        Returns:
            what the user's step returned.
        """
        batch_idx, dataloader_idx = self._place(rest)
        is_final = self._trainer.state.fn != "fit"
        purpose = f"{name}/{dataloader_idx}"
        return self._pipeline.plain_evaluation_step(batch, step, purpose, batch_idx, is_final)

    @property
    def _loop(self) -> Any:
        trainer = self._trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    def _place(self, rest: tuple[Any, ...]) -> tuple[int, int]:
        """The index of the batch and of its dataloader."""
        batch_idx = rest[0] if rest else self._loop.batch_progress.current.ready - 1
        return batch_idx, rest[1] if len(rest) > 1 else 0

    def _is_needed_now(self, name: str, trace: Trace | None, loop: Any) -> bool:
        # The end of one of several dataloaders cannot be seen coming where its length is unknown.
        loaders = loop._combined_loader.flattened
        unknown_end = len(loaders) > 1 and any(map(_may_end_early, loaders))
        next_hook = f"on_{name.removesuffix('_step')}_batch_start"
        return (
            trace is None
            or trace.logs_each_step
            or unknown_end
            or somebody_looks_at_results(self._trainer, name)
            # Also where the step returns nothing: hooks may look at what it left on the module.
            or is_hook_used(self._trainer, next_hook)
        )

    def require_all_fetched(self, what: str) -> None:
        """Raises BatchError where the data ended before the dataloader's length said so, so that
        what the last batches logged has not been looked at.

        Args:
            what: the data's name in the message.
        """
        if self._pipeline.num_pending:
            raise BatchError(
                f"The {what} data ended early: a dataloader's `__len__` (of its sampler, or of its"
                " data set) says that there are more batches than it gives. Let it say the right"
                " number, or none."
            )

    def _await_prediction(self, loop: Any, dataloader_idx: int) -> None:
        predictions = loop._predictions
        if dataloader_idx < len(predictions):
            self._awaited.append((predictions[dataloader_idx], len(predictions[dataloader_idx])))

    def _deliver(self, reports: list[Report], name: str) -> Any:
        root: Any = self._pipeline.root
        device = self._pipeline.channels.device
        # The class's own: on the instance stands the recorder, while a step runs.
        log = partial(type(root).log, root)
        # What an epoch's values are over all virtual machines is asked at its end: until then, they
        # may be at different batches.
        synchronised = True if self._pipeline.replicas.count > 1 else None
        for report in reports:
            say_again(report.logs, log, root, device, synchronised)
        *earlier, last = reports
        awaited, self._awaited = self._awaited, []
        if name == "predict_step":
            for report, (predictions, place) in zip(earlier, awaited, strict=False):
                if place < len(predictions):
                    predictions[place] = report.result
        return map_leaves(
            lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, last.result
        )
