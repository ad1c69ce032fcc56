"""Gradient norms for a log, over all stages."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm as grad_norm_of_one_device
from torch import Tensor

from lightning_pipeshift.lightning.strategy import PipeShiftStrategy


def grad_norm(
    module: pl.LightningModule, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, Tensor]:
    """The norm of every parameter's gradient and the total norm, over all stages.

    The same as ``lightning.pytorch.utilities.grad_norm``, which uses the gradients of this rank
    only, and with the same names. Call it on every rank, in ``on_after_backward`` or
    ``on_before_optimizer_step``. With another strategy it calls Lightning's own.

    Args:
        module: the LightningModule that is trained.
        norm_type: the order of the norm, ``"inf"`` for the largest absolute value.
        group_separator: is put between ``grad_{norm_type}_norm`` and the parameter's name.

    Returns:
        The norms by name (scalars, float32, on the CPU), and ``grad_{norm_type}_norm_total``, the
        norm of them all. A parameter without a gradient is omitted.

    Raises:
        ValueError: ``norm_type`` is not above 0.
    """
    strategy = module.trainer.strategy
    norm_type = float(norm_type)
    if not isinstance(strategy, PipeShiftStrategy) or norm_type <= 0:
        norms: Any = grad_norm_of_one_device(module, norm_type, group_separator)
        return dict(norms)
    by_name = strategy.gradient_norms(norm_type)
    prefix = f"grad_{norm_type}_norm"
    named = {f"{prefix}{group_separator}{name}": norm for name, norm in by_name.items()}
    if named:
        total = torch.linalg.vector_norm(torch.stack(list(named.values())), norm_type)
        named[f"{prefix}_total"] = total
    return named
