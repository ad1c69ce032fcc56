"""Finds out when the stages of a virtual machine see different batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.model.trees import leaves_of
from lightning_pipeshift.runtime.channels import Channels

# The first batches of an epoch show a shuffle that differs; a later one, a stream that drifts
# apart.
_FIRST_BATCHES = 2
_EVERY = 100


def is_checked(batch_idx: int) -> bool:
    """Whether the batch with this index in its epoch is compared."""
    return batch_idx < _FIRST_BATCHES or batch_idx % _EVERY == 0


def checksum(batch: Any) -> int:
    """A number that differs where two batches differ in a type, a shape, the order or a bit."""
    total = 0
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            data = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
            data = data.cpu().resolve_conj().resolve_neg().contiguous()
            total = zlib.crc32(f"{data.dtype}{tuple(data.shape)}".encode(), total)
            if data.numel():
                total = zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
        elif isinstance(leaf, str | int | float | bool):
            total = zlib.crc32(repr(leaf).encode(), total)
    return total


def require_same_batch(batch: Any, batch_idx: int, channels: Channels) -> None:
    """Compares a batch over the stages. Every stage calls this.

    Raises:
        BatchError: the stages see different batches.
    """
    sums = channels.gather_int(checksum(batch))
    if len(set(sums)) > 1:
        odd = [stage for stage, value in enumerate(sums) if value != sums[0]]
        raise BatchError(
            f"The stages of a virtual machine see different batches: at batch {batch_idx}, stage"
            f" {', '.join(map(str, odd))} got another one than stage 0. All stages must see the"
            " same data in the same order. Look for a sampler or data set that depends on the"
            " rank, on the time, on unseeded randomness, or on the order of files in a folder."
        )
