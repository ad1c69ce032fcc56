"""Converts a checkpoint to one file, for use without PipeShift."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_pipeshift.checkpoint import atomic
from lightning_pipeshift.checkpoint.checkpoint_io import PipeShiftCheckpointIO
from lightning_pipeshift.errors import CheckpointError


def pretrained_prefix(root: nn.Module) -> str | None:
    """The prefix of a LightningModule's Hugging Face model, such as ``"model."``; ``None`` if it
    has none, or more than one.
    """
    found: list[str] = []
    for name, module in root.named_modules():
        # By name, as transformers need not be installed.
        is_one = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
        if is_one and not any(name.startswith(outer) for outer in found):
            found.append(f"{name}." if name else "")
    return found[0] if len(found) == 1 else None


def export(
    source: str | Path,
    target: str | Path,
    prefix: str | None = None,
    weights_only: bool | None = None,
) -> None:
    """Converts a checkpoint, a folder or a file, to one file.

    Args:
        source: the checkpoint.
        target: ``OUT.safetensors`` contains only the model's parameters and buffers, under Hugging
            Face's names if the model is one of theirs; any other file is a complete Lightning
            checkpoint.
        prefix: removed from the names in the safetensors file; names without it are omitted. By
            default that of the Hugging Face model in the LightningModule, if there is one.
        weights_only: ``False`` if the checkpoint holds more than tensors and plain values, and may
            run code when it is loaded.

    Raises:
        CheckpointError: the checkpoint is damaged, the target is a folder, or no name has the
            prefix.
    """
    source, target = Path(source), Path(target)
    if target.is_dir():
        raise CheckpointError(
            f"{target} is a folder, but the output is one file. Pass a name in it, such as"
            f" {target / 'model.safetensors'}."
        )
    checkpoint = PipeShiftCheckpointIO().load_checkpoint(source, weights_only=weights_only)
    with atomic.appearing(target.absolute()) as temporary:
        if target.suffix != ".safetensors":
            torch.save(checkpoint, temporary)
            return
        if prefix is None:
            prefix = checkpoint.get("pipeshift", {}).get("pretrained_prefix") or ""
        save_file(_tensors(checkpoint, prefix, source), temporary, metadata={"format": "pt"})


def _tensors(checkpoint: dict[str, Any], prefix: str, source: Path) -> dict[str, Tensor]:
    """The tensors without their prefix; each tied tensor once, as safetensors requires."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, Any]] = set()
    for name, value in checkpoint["state_dict"].items():
        if not isinstance(value, Tensor) or not name.startswith(prefix):
            continue
        place = (value.untyped_storage().data_ptr(), value.storage_offset())
        if value.numel() and place in seen:
            continue
        seen.add(place)
        found[name.removeprefix(prefix)] = value.contiguous()
    if not found:
        names = ", ".join(list(checkpoint["state_dict"])[:4])
        raise CheckpointError(
            f"No name in {source} begins with {prefix!r}. They are: {names}, ... Pass `--prefix`."
        )
    return found


def main(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift export``."""
    parser = argparse.ArgumentParser(
        prog="pipeshift export", description="Converts a checkpoint to one file."
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint: a folder or a file")
    parser.add_argument(
        "out",
        metavar="OUT",
        help="OUT.ckpt: a Lightning checkpoint, complete; OUT.safetensors: the model alone",
    )
    parser.add_argument(
        "--prefix", help="the prefix to remove from names in OUT.safetensors ('model.')"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also load objects other than tensors and plain values, which can run any code",
    )
    given = parser.parse_args(arguments)
    export(given.checkpoint, given.out, given.prefix, False if given.trust else None)
    print(f"written to {given.out}")
