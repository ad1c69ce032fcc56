"""Detects that the stages of a virtual machine see different batches."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.model.tensors.transfer import to_host
from lightning_pipeshift.model.tensors.trees import leaves_of
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.replicas import Replicas

# The first batches of an epoch show whether shuffles differ; a later batch shows whether random
# streams drift apart.
_FIRST_BATCHES = 2
_EVERY = 100
_SAME_BATCHES = (
    "All stages must see the same batches in the same order. Look for a sampler or data set whose"
    " length depends on the rank, the time, or the files of a host."
)


def is_checked(batch_idx: int) -> bool:
    """Whether the batch with this index in its epoch is compared."""
    return batch_idx < _FIRST_BATCHES or batch_idx % _EVERY == 0


def checksum(batch: Any) -> int:
    """A number that differs where two batches differ in a type, a shape, the order or a bit."""
    total = 0
    for leaf in leaves_of(to_host(batch)):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            total = zlib.crc32(str(checksum(leaf.unbind())).encode(), total)
        elif isinstance(leaf, Tensor):
            data = leaf.to_dense() if leaf.layout != torch.strided else leaf
            data = data.resolve_conj().resolve_neg().contiguous()
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
    sums = channels.gather(checksum(batch))
    if len(set(sums)) > 1:
        odd = [stage for stage, value in enumerate(sums) if value != sums[0]]
        raise different_batches(batch_idx, odd)


def different_batches(batch_idx: int, odd: Sequence[int]) -> BatchError:
    """The error of stages that see another batch than stage 0."""
    return BatchError(
        f"The stages of a virtual machine see different batches: at batch {batch_idx}, stage"
        f" {', '.join(map(str, odd))} got a different one from stage 0. All stages must see the"
        " same data in the same order. Look for a sampler or data set that depends on the"
        " rank, on the time, on unseeded randomness, or on the order of files in a folder."
    )


def require_same_lengths(lengths: Sequence[float], what: str, channels: Channels) -> None:
    """Compares the numbers of batches over the stages, so that none waits for a batch that others
    do not have. Every stage calls this.

    Args:
        lengths: the number of batches of each dataloader, ``inf`` where it is not known.
        what: the dataloaders' name in a message.
        channels: the stage's connections.

    Raises:
        BatchError: the stages have different numbers of dataloaders, or of batches.
    """
    counts = [len(lengths), *(-1 if math.isinf(length) else int(length) for length in lengths)]
    # First the number of dataloaders: the others count only if it is the same.
    for number, found in enumerate(zip(*channels.gather(counts), strict=False)):
        if len(set(found)) > 1:
            things = "batches" if number else "dataloaders"
            each = ", ".join(f"stage {stage} has {value}" for stage, value in enumerate(found))
            raise BatchError(
                f"The stages of a virtual machine see different {what} data: {each} {things}."
                f" {_SAME_BATCHES}"
            )


def require_same_lengths_over_replicas(length: float, replicas: Replicas) -> None:
    """Compares the number of training batches over the virtual machines. Every rank calls this.

    Raises:
        BatchError: they differ.
    """
    lengths = replicas.gather(length)
    if len(set(lengths)) > 1:
        each = ", ".join(f"virtual machine {vm} has {n}" for vm, n in enumerate(lengths))
        raise BatchError(
            f"The virtual machines have different numbers of training batches: {each}. All of "
            "them must run every step: make the data's length the same on every rank."
        )


def require_data_for_all(lengths: Sequence[float], what: str, replicas: Replicas) -> None:
    """Checks that every virtual machine has a batch of each dataloader. Every rank calls this.

    Raises:
        BatchError: one has none, while others have some.
    """
    for number, counts in enumerate(zip(*replicas.gather(list(lengths)), strict=True)):
        if not all(counts) and any(counts):
            raise BatchError(
                f"The {what} data (dataloader {number}) are too few for all virtual machines: "
                f"virtual machine {counts.index(0)} gets none of them. Use at least "
                f"{replicas.count} samples, or fewer virtual machines."
            )


def require_same_end(mine: bool, theirs: bool, batch_idx: int) -> None:
    """Compares whether this stage and another one see the end of the epoch at the same batch.

    Raises:
        BatchError: they differ.
    """
    if mine != theirs:
        raise BatchError(
            "The stages of a virtual machine see different data: batch"
            f" {batch_idx} is the epoch's last on {'this' if mine else 'another'} stage, and not"
            f" on {'another' if mine else 'this'} one. {_SAME_BATCHES}"
        )


def require_same_places(places: Sequence[Sequence[int]]) -> None:
    """Checks that all stages are at the same batch of an evaluation.

    Args:
        places: of each stage: the number of the dataloader, that of the batch in it, and whether
            it is the last one.

    Raises:
        BatchError: they are not.
    """
    if any(place != places[0] for place in places):
        each = ", ".join(
            f"stage {stage} is at batch {batch} of dataloader {loader}{', the last' * last}"
            if batch >= 0
            else f"stage {stage} has no more batches"
            for stage, (loader, batch, last) in enumerate(places)
        )
        raise BatchError(
            f"The stages of a virtual machine see different data: {each}. {_SAME_BATCHES}"
        )
