"""Loads the values of a pretrained model's files into a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_pipeshift.errors import CheckpointError, some_of
from lightning_pipeshift.files import is_plain_name, parse_json, read_bytes
from lightning_pipeshift.model.parameters.recorded_code import current_record, unrecorded

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Stored(NamedTuple):
    """A tensor in a file."""

    like: Tensor
    load: Callable[[], Tensor]


def load_pretrained(module: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Loads values from files into a module, by the module's own names.

    In ``configure_model`` nothing is read yet: later each rank reads only its own tensors, one at a
    time, from the mapped files. Anywhere else the values are read at once.

    Args:
        module: a whole model, or a part of one: ``self.model``.
        path: a safetensors file; a folder with one, or with several and their index, as Hugging
            Face saves them; or a file of ``torch.save`` with a state dict, or a Lightning
            checkpoint.
        strict: whether the files must have every parameter and persistent buffer, and nothing else.

    Raises:
        CheckpointError: a file is damaged, or is of another model.
    """
    path = Path(path)
    with unrecorded():
        is_safetensors = path.is_dir() or path.suffix == ".safetensors"
        stored = dict(_safetensors(path) if is_safetensors else _of_torch(path))
    targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
    # A tied parameter is often saved under only one of its names.
    given = {id(value) for name, value in targets.items() if name in stored}
    missing = [n for n, value in targets.items() if n not in stored and id(value) not in given]
    unexpected = [name for name in stored if name not in targets]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} is of another model. Not in the file: {some_of(missing)}. Not in the model:"
            f" {some_of(unexpected)}. Pass the part of the model that was saved (`self.model`), or"
            " `strict=False` to load the tensors that fit."
        )
    for name, value in targets.items():
        if name not in stored:
            continue
        like, load = stored[name]
        if like.shape != value.shape:
            raise CheckpointError(
                f"{name!r} has the shape {tuple(like.shape)} in {path}, and {tuple(value.shape)} in"
                " the model. Build the model as it was when the file was saved."
            )
        record = current_record()
        with torch.no_grad():
            value.copy_(load() if record is None else record.promise(like, load))


def _safetensors(path: Path) -> Iterator[tuple[str, _Stored]]:
    files = [path]
    if path.is_dir():
        if (path / _INDEX).is_file():
            files = [path / name for name in _shards(path / _INDEX)]
        else:
            files = [path / _SINGLE]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"There is no file {file}. Pass a safetensors file, or a folder with {_SINGLE} or"
                f" {_INDEX}."
            )
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dict
                    part = opened.get_slice(name)
                    # The type is that of an empty slice.
                    dtype = part[:0].dtype if part.get_shape() else opened.get_tensor(name).dtype
                    like = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                    yield name, _Stored(like, _reader(file, name))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{file} is truncated or damaged ({error}). Use another one."
            ) from error


def _shards(index: Path) -> list[str]:
    try:
        names = list(dict.fromkeys(parse_json(read_bytes(index))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error!r}). Use another one.") from error
    for name in names:
        if not is_plain_name(name):
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not in the same folder. Use another "
                "one."
            )
    return names


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def load() -> Tensor:
        # Opened for each tensor: pages that were read stay in memory until the file is closed.
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    return load


def _of_torch(path: Path) -> Iterator[tuple[str, _Stored]]:
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} could not be loaded: {error}") from error
    for name, value in found.get("state_dict", found).items():
        if isinstance(value, Tensor):
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            yield name, _Stored(like, value.clone)
