"""Finds unsupported settings before training, and explains what to do instead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_pipeshift.compat.lightning_private import datamodule_of
from lightning_pipeshift.devices.properties import TRAINABLE
from lightning_pipeshift.errors import ConfigurationError, some_of
from lightning_pipeshift.plan.inputs.shares import check_shares
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.planning.make_plan import Settings


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raises ConfigurationError for unknown kinds of devices: their generators would not be seeded,
    and their times not be measured.
    """
    unknown = {device.type for device in devices} - TRAINABLE
    if unknown:
        raise ConfigurationError(
            f"PipeShift runs on CPUs and on GPUs of CUDA or ROCm, but these devices are"
            f" {some_of(sorted(unknown))}. Use `Trainer(accelerator='cpu')` or"
            " `Trainer(accelerator='gpu')`."
        )


def check_run(module: pl.LightningModule, settings: Settings, topology: Topology) -> None:
    """Raises ConfigurationError for a module or settings of which no pipeline can be made."""
    if not module.automatic_optimization:
        _check_manual(settings, topology.num_virtual_machines)
    elif not settings.leaves_steps_whole(topology.stages_per_vm):
        _check_automatic(module)
    check_shares(settings.batch_shares, topology.num_virtual_machines)


def _check_automatic(module: pl.LightningModule) -> None:
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name, None)
        if step is not None and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ConfigurationError(
                f"`{name}` takes a `dataloader_iter`. Every stage has to see each batch: take"
                " `batch` instead. (One device takes the iterator, with `microbatches=1`.)"
            )
    check_backward(module)


def check_backward(module: pl.LightningModule) -> None:
    """Raises ConfigurationError if the user's own ``backward`` would not be called."""
    if is_overridden("backward", module):
        raise ConfigurationError(
            f"`{type(module).__name__}` overrides `backward`. Each stage runs its own part of the"
            " backward, for every microbatch, so the override would not be called. Remove it; use"
            " `on_before_backward`, or tensor hooks in `training_step`. (One device calls it, with"
            " `microbatches=1`, if no layer is recomputed and without `MemoryCompression`.)"
        )


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    module: pl.LightningModule,
    settings: Settings,
    topology: Topology,
) -> None:
    """Raises ConfigurationError for optimizers that cannot step one stage's parameters by
    themselves.
    """
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ConfigurationError(
            f"There are {len(optimizers)} optimizers, with automatic optimization. Put all"
            " parameters into one optimizer, as several parameter groups with their own rates:"
            " torch.optim.AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr': 1e-4}]). If the"
            " losses need alternating steps (a GAN), set `automatic_optimization = False`, and call"
            " `manual_backward` and the optimizers in `training_step`."
        )
    is_plain = settings.leaves_steps_whole(topology.stages_per_vm)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and not is_plain:
            raise ConfigurationError(
                "LBFGS runs the step several times and uses all parameters at once, which no "
                "stage holds. Use an optimizer that updates each parameter by itself (SGD, Adam, "
                "AdamW, ...). (One device takes it, with `microbatches=1`.)"
            )


def _check_manual(settings: Settings, num_vms: int) -> None:
    found = [
        what
        for what, is_found in (
            (f"schedule={settings.schedule!r}", settings.is_asynchronous),
            ("MemoryCompression", settings.memory is not None),
            ("several virtual machines (replicas of the pipeline)", num_vms > 1),
        )
        if is_found
    ]
    if found:
        raise ConfigurationError(
            "The model sets `automatic_optimization = False`, so its steps call `backward` and the"
            f" optimizers themselves. That does not work with {some_of(found)}. Return the loss and"
            " leave both to the Trainer, or leave this out."
        )


def check_processes(num_devices: int) -> None:
    """Raises ConfigurationError if torchrun started more or fewer processes on this host than the
    Trainer has devices.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if TorchElasticEnvironment.detect() and started and int(started) != num_devices:
        raise ConfigurationError(
            f"torchrun started {started} process(es) on this host, and the Trainer has"
            f" devices={num_devices}. Set `Trainer(devices={started})`, or"
            f" `torchrun --nproc-per-node={num_devices}`."
        )


def check_packages(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises ConfigurationError if classes of ``pytorch_lightning`` are used together with
    ``lightning.pytorch``: two packages whose classes are not related.
    """
    parts: list[Any] = [module, *trainer.callbacks, *trainer.loggers]  # type: ignore[attr-defined]
    datamodule = datamodule_of(trainer)
    if datamodule is not None:
        parts.append(datamodule)
    for part in parts:
        for base in type(part).__mro__:
            if base.__module__.split(".")[0] == "pytorch_lightning":
                raise ConfigurationError(
                    f"`{type(part).__name__}` comes from the package `pytorch_lightning`"
                    f" (`{base.__module__}.{base.__qualname__}`), and the Trainer from"
                    " `lightning.pytorch`. The two do not work together: import everything from"
                    " `lightning` (`import lightning as L`, `from lightning.pytorch.callbacks"
                    " import ...`)."
                )
