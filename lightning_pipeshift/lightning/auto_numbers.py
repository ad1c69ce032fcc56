"""Measures a model before its first batch, to choose the numbers of virtual machines and of
microbatches that a user leaves to the planner.

Both change the bits of a run, and the number of virtual machines decides which samples a rank
loads. So they are chosen in ``setup``, when the model is there and a checkpoint has been read, and
before Lightning asks for any data: one batch is drawn from a copy of the user's loader, and the
user's step runs on it as fake tensors, on the virtual machines that there are until then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipeshift.compat.lightning_private import training_data
from lightning_pipeshift.errors import ConfigurationError, explained
from lightning_pipeshift.lightning.connection import Connection
from lightning_pipeshift.lightning.run import Run
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.random.random_streams import global_state, set_global_state
from lightning_pipeshift.model.tensors.microbatch import size_or_one
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.auto_numbers import RunNumbers, choose_numbers
from lightning_pipeshift.runtime.planning.make_plan import Settings


def chosen(
    trainer: pl.Trainer,
    connection: Connection,
    settings: Settings,
    deferred: DeferredInit,
    saved: RunNumbers | None,
) -> tuple[Topology, int]:
    """The virtual machines and the number of microbatches of a training, chosen on the first rank.
    Every rank calls this.

    Args:
        trainer: the Trainer, in its ``fit``.
        connection: to the other ranks.
        settings: of the run.
        deferred: has the values of tensors that are on the meta device.
        saved: the numbers of the checkpoint with which the run continues.

    Raises:
        ConfigurationError: no batch can be drawn without a trace, or the saved numbers are not
            possible.
        PlanError: no numbers have a plan that fits in memory.
        BudgetError: likewise, with ``MemoryCompression``.
    """
    before = global_state()
    batch = first_batch(training_data(trainer))
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    step = trainer.lightning_module.training_step
    rest = [0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
    whole = None if isinstance(settings.microbatches, str) else settings.microbatches
    only_measured = replace(
        settings,
        virtual_machines=None,
        # An asynchronous pipeline splits no batch.
        microbatches=1 if settings.is_asynchronous else whole,
        schedule="1f1b",
        partition="auto",
        batch_shares=None,
        only_measures=True,
        watch=None,
    )
    run = Run.start(trainer, connection, only_measured, deferred)
    try:
        measured = run.training.measure(batch, *rest)
    finally:
        run.release()
    set_global_state(before)
    replicas = connection.replicas
    choice = None
    if measured is not None:
        memory = settings.memory
        choice = choose_numbers(
            measured.profile,
            measured.cluster,
            settings,
            replicas.topology,
            float(size_or_one(batch)),
            memory.policy if memory is not None else None,
            saved,
        )
    choice = replicas.world.share_object(choice, source=0)
    rank_zero_info(f"PipeShift: {explained(choice.message)}")
    return choice.topology, choice.microbatches


def first_batch(data: Any) -> Any:
    """The first batch of training data, drawn from copies: the user's objects stay as they are,
    except for the global random state.

    Args:
        data: a loader, or a collection of loaders.

    Raises:
        ConfigurationError: a part of it cannot be copied.
    """
    loaders = copy.copy(data) if isinstance(data, CombinedLoader) else CombinedLoader(data)
    loaders.flattened = [[_first_of(loader)] for loader in loaders.flattened]
    loaders.limits = None
    return next(iter(loaders))[0]


def _first_of(loader: Any) -> Any:
    try:
        if not isinstance(loader, DataLoader):
            return next(iter(copy.deepcopy(loader)))
        dataset, samples = loader.dataset, loader.batch_sampler
        if samples is None:
            samples = loader.sampler
        # A data set with indices may be large, and stays the same when it is read.
        has_indices = not isinstance(dataset, IterableDataset)
        memo: dict[int, Any] = {id(dataset): dataset} if has_indices else {}
        for owner in (loader, loader.sampler, loader.batch_sampler):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                memo[id(generator)] = _same(generator)
        if has_indices:
            return _fetched(loader, next(iter(copy.deepcopy(samples, memo))))
        mine = copy.copy(loader)
        # Bypasses DataLoader.__setattr__, which forbids some of these. No worker is started.
        vars(mine).update(
            dataset=copy.deepcopy(dataset, memo),
            generator=memo.get(id(loader.generator)),
            num_workers=0,
            prefetch_factor=None,
            persistent_workers=False,
            timeout=0,
            _iterator=None,
        )
        return next(iter(mine))
    except Exception as error:
        raise ConfigurationError(
            "To choose what is 'auto' among `virtual_machines` and `microbatches`, one batch is"
            f" drawn from a copy of the training data before the run, but a {_name(loader)} could"
            f" not be copied and read: {type(error).__name__}: {error}. Give both numbers instead"
            " of 'auto': `pipeshift plan` finds good ones."
        ) from error


def _fetched(loader: DataLoader[Any], chosen: Any) -> Any:
    """The samples of some indices, collated; or of one, for a loader that makes no batches."""
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[chosen])
    if callable(getattr(dataset, "__getitems__", None)):
        return loader.collate_fn(dataset.__getitems__(chosen))
    indices: Sequence[Any] = chosen
    return loader.collate_fn([dataset[index] for index in indices])


def _same(generator: torch.Generator) -> torch.Generator:
    """Another generator that draws the same numbers."""
    return torch.Generator(generator.device).set_state(generator.get_state())


def _name(loader: Any) -> str:
    name = type(loader).__name__
    dataset = getattr(loader, "dataset", None)
    return f"{name} of a {type(dataset).__name__}" if dataset is not None else name
