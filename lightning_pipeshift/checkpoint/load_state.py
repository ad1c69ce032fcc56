"""Loads a model's state, and explains why a checkpoint does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_pipeshift.errors import CheckpointError, PipeShiftError, some_of


def load_state(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Loads the state of a model, as ``load_state_dict`` does.

    Raises:
        CheckpointError: the state is another model's.
    """
    try:
        with warnings.catch_warnings():
            # Torch warns for each parameter of another stage that it is not changed.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter.*no-op")
            module.load_state_dict(state_dict, strict=strict)
    except PipeShiftError:
        raise
    except RuntimeError as error:
        expected = {
            name: value.shape if isinstance(value, Tensor) else None
            for name, value in module.state_dict().items()
        }
        missing = [name for name in expected if name not in state_dict]
        unexpected = [name for name in state_dict if name not in expected]
        differing = [
            name
            for name, shape in expected.items()
            if shape is not None and name in state_dict and state_dict[name].shape != shape
        ]
        if not missing and not unexpected and not differing:
            raise CheckpointError(f"The checkpoint could not be loaded: {error}") from error
        raise CheckpointError(
            "The checkpoint is of another model."
            + _told(" Not in the checkpoint", missing)
            + _told(" Not in the model", unexpected)
            + _told(" Of another shape", differing)
            + " Build the model as it was, or load the matching tensors by hand "
            "(`strict_loading=False` on the LightningModule ignores missing tensors). "
            f"Torch says: {error}"
        ) from error


def _told(what: str, names: list[str]) -> str:
    """A part of a message: names grouped by their layers."""
    if not names:
        return ""
    owners = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return f"{what}: {some_of(owners)}."
