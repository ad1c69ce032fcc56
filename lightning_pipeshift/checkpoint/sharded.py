"""A checkpoint as a folder: every rank writes its own tensors, and reads those that it needs.

The folder holds the marker (see :mod:`lightning_pipeshift.checkpoint.atomic`) and a subfolder. The
subfolder holds the tensors, as ``torch.distributed.checkpoint`` writes them, an index of them, and
``checkpoint.pt``: Lightning's own dict, as in a file, but with meta tensors in place of those
tensors. Names are the user's own, and do not depend on which rank held which tensor.

The index is JSON: the index of ``torch.distributed.checkpoint``, which is also in the folder, is a
pickle, and loading one can run code.
"""

from __future__ import annotations

import copy
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.checkpoint import atomic
from lightning_pipeshift.checkpoint.zip_reader import TorchZipReader, load_file
from lightning_pipeshift.compat.module_private import copy_metadata
from lightning_pipeshift.errors import CheckpointError
from lightning_pipeshift.files import (
    delete,
    parse_json,
    read_bytes,
    remove_leftovers,
    shortened,
    temporary_next_to,
)
from lightning_pipeshift.runtime.comm.staging import Staging

REST: Final = "checkpoint.pt"
INDEX: Final = "index.json"
_ALIASES = "tied_names"
# Lightning's state dicts, those of the model and the optimizers; and all other entries.
_STATES = ("state_dict", "optimizer_states")
_REST = "rest"


def leaves(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the entries of the state dicts in a checkpoint, and all other tensors that callbacks
    and user code have added to it: a unique key, the dict or list that has the entry, and its name
    there.
    """
    for name in list(checkpoint.get("state_dict", ())):
        yield f"state_dict/{name}", checkpoint["state_dict"], name
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        for index, entry in state.get("state", {}).items():
            for name in list(entry) if isinstance(entry, dict) else ():
                yield f"optimizer_states/{number}/{index}/{name}", entry, name
    for name, part in checkpoint.items():
        if name not in _STATES:
            yield from _tensors_in(f"{_REST}/{name}", checkpoint, name, part)


def _tensors_in(key: str, owner: Any, name: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, Tensor):
        yield key, owner, name
    elif isinstance(value, dict | list):
        for inner, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(f"{key}/{inner}", value, inner, part)


def _unshared(value: Any) -> Any:
    """A copy of the dicts and lists, whose entries may be replaced."""
    if not isinstance(value, dict | list):
        return value
    copied = copy.copy(value)
    for name, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        copied[name] = _unshared(part)
    return copied


# --- writing ---


class Writing:
    """A checkpoint that is being written by every rank at the same time, each with its own tensors.

    Args:
        checkpoint: Lightning's dict. In the state dicts, a rank passes the entries that it saves;
            those that other ranks save are omitted, or are meta tensors. Rank 0 passes all names of
            the model's state.
        path: the folder's name.
        group: a gloo group of all ranks, which nothing else uses.
        staging: holds copies of the tensors to save, so that these may change meanwhile.

    Raises:
        CheckpointError: not all ranks see the folder, or it cannot be created.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        group: dist.ProcessGroup,
        staging: Staging | None = None,
    ) -> None:
        self._path = path
        self._group = group
        self._is_first = dist.get_rank(group) == 0
        self._data = uuid.uuid4().hex[:12]
        self._temporary = temporary_next_to(path)
        self._begin()
        self._tensors: dict[str, Tensor] = {}
        heads: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        first_key: dict[int, str] = {}
        for key, owner, name in leaves(checkpoint):
            value = owner[name]
            if not isinstance(value, Tensor):
                heads[key] = value
                continue
            if first_key.setdefault(id(value), key) != key:
                aliases[key] = first_key[id(value)]
            if value.is_meta:
                continue
            value = value.detach()
            if value.numel() <= 1:
                # Step counters and similar values, thousands of them.
                heads[key] = value.cpu().clone()
                continue
            heads[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if key not in aliases:
                self._tensors[key] = (
                    value.cpu().contiguous() if staging is None else staging.copy(key, value)
                )
        self._rest = self._merged(checkpoint, _gathered(heads, group), aliases)

    def _begin(self) -> None:
        error = None
        if self._is_first:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                atomic.require_replaceable(self._path)
                remove_leftovers(self._path.parent)
                (self._temporary / self._data).mkdir(parents=True)
            except (OSError, CheckpointError) as found:
                error = f"{self._path} cannot be created: {found}"
        self._temporary, self._data, error = _shared(
            (self._temporary, self._data, error), self._group
        )
        blind = [
            rank
            for rank, sees in enumerate(
                _gathered((self._temporary / self._data).is_dir(), self._group)
            )
            if not sees
        ]
        if error is None and blind:
            if self._is_first:
                delete(self._temporary)
            error = (
                f"{self._path.parent} is not the same folder everywhere: rank 0 made a folder in"
                f" it, which rank(s) {', '.join(map(str, blind))} do not see. A sharded checkpoint"
                " is written by all ranks: save to a file system that all hosts share, or use one"
                " file (`sharded=False`), which rank 0 writes."
            )
        if error is not None:
            raise CheckpointError(error)

    def _merged(
        self, checkpoint: dict[str, Any], heads: list[dict[str, Any]], aliases: dict[str, str]
    ) -> dict[str, Any]:
        """Lightning's dict without tensor values: on rank 0."""
        if not self._is_first:
            return {}
        known = {key: value for of_rank in reversed(heads) for key, value in of_rank.items()}
        rest = {
            name: part if name in _STATES else _unshared(part) for name, part in checkpoint.items()
        }
        for key, owner, name in leaves({k: v for k, v in rest.items() if k not in _STATES}):
            key = aliases.get(key, key)
            if key in known:
                owner[name] = known[key]
        state_dict = rest["state_dict"] = checkpoint["state_dict"].copy()
        copy_metadata(checkpoint["state_dict"], state_dict)
        for name in list(state_dict):
            key = f"state_dict/{name}"
            key = aliases.get(key, key)
            if key in known:
                state_dict[name] = known[key]
            else:
                # A layer has deleted a buffer, on the rank that runs it.
                del state_dict[name]
        states = [{**state, "state": {}} for state in checkpoint.get("optimizer_states", ())]
        for key, value in known.items():
            kind, _, name = key.partition("/")
            if kind == "state_dict":
                # A layer has created the missing entry later, on the rank that runs it.
                state_dict.setdefault(name, value)
                continue
            if kind == _REST:
                continue
            number, index, name = name.split("/", 2)
            states[int(number)]["state"].setdefault(int(index), {})[name] = value
        for state in states:
            state["state"] = dict(sorted(state["state"].items()))
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = states
        rest[_ALIASES] = aliases
        return rest

    def finish(self) -> None:
        """Writes the tensors, and renames the folder to its final name. Every rank calls this.

        Raises:
            CheckpointError: a rank could not write. An earlier checkpoint of this name is
                unchanged.
        """
        # It takes longer to import than most of this package, and few runs write a folder.
        import torch.distributed.checkpoint as dcp

        data = self._temporary / self._data
        error: BaseException | None = None
        try:
            # Another error than this one is of this rank alone. It is raised at once: the others
            # are in the middle of torch's own exchange, and take part in no other.
            written = dcp.save(
                self._tensors,
                storage_writer=dcp.FileSystemWriter(data, sync_files=True),
                process_group=self._group,
            )
        except dcp.CheckpointException as found:
            error = found
        finally:
            self._tensors = {}
        if error is None and self._is_first:
            try:
                self._publish(written)
            except Exception as found:
                error = found
        self._rest = {}
        failed = [
            f"rank {rank}: {reason}"
            for rank, reason in enumerate(_gathered(_reason(error), self._group))
            if reason is not None
        ]
        if failed:
            if self._is_first:
                with suppress(OSError):
                    delete(self._temporary)
            raise CheckpointError(
                f"{self._path} could not be written ({'; '.join(failed)})."
                f" {atomic.advice(self._path)}"
            ) from error

    def _publish(self, written: Any) -> None:
        data = self._temporary / self._data
        places = {
            index.fqn: (place.relative_path, place.offset, place.length)
            for index, place in written.storage_data.items()
        }
        (data / INDEX).write_text(json.dumps(places))
        atomic.flush(data / INDEX)
        with (data / REST).open("wb") as file:
            torch.save(self._rest, file)
            file.flush()
            os.fsync(file.fileno())
        atomic.publish(self._temporary, self._path, self._data)


def _reason(error: BaseException | None) -> str | None:
    # torch's CheckpointException has the errors of all ranks, each with its traceback.
    if failures := getattr(error, "failures", None):
        return "; ".join(str(found) for found, _ in failures.values())
    return None if error is None else str(error) or type(error).__name__


def _gathered(obj: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, obj, group=group)
    return found


def _shared(obj: Any, group: dist.ProcessGroup) -> Any:
    box = [obj]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]


# --- reading ---


class _Place(NamedTuple):
    """The location of a tensor."""

    file: str
    offset: int
    length: int


class ShardedFolder:
    """A complete sharded checkpoint.

    Args:
        path: the folder.

    Raises:
        CheckpointError: it is not complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        marker = atomic.read_marker(path)
        self._data = path / marker.data
        for name, file in marker.files.items():
            self._require_undamaged(name, file)
        self._sizes = {name: file.bytes for name, file in marker.files.items()}
        if not {REST, INDEX} <= self._sizes.keys():
            raise CheckpointError(
                f"{path / atomic.MARKER} is damaged: it does not name {REST} and {INDEX}. Use"
                " another one."
            )
        self._files: dict[str, TorchZipReader] = {}
        self._places = self._index()

    def _require_undamaged(self, name: str, marked: atomic.MarkedFile) -> None:
        file = self._data / name
        found = file.stat().st_size if file.is_file() else None
        if found != marked.bytes:
            what = "is missing" if found is None else f"has {found} bytes instead of {marked.bytes}"
            raise CheckpointError(f"{file} {what}: the checkpoint is damaged. Use another one.")
        if marked.crc32 is not None and atomic.checksum(file) != marked.crc32:
            raise CheckpointError(
                f"{file} is damaged: its bytes are not those that were written. Use another"
                " checkpoint."
            )

    def _index(self) -> dict[str, _Place]:
        path = self._data / INDEX
        try:
            found = parse_json(read_bytes(path, self._sizes[INDEX]))
            places = {key: _Place(*entry) for key, entry in found.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {shortened(repr(error))}. Use another checkpoint."
            ) from error
        for key, place in places.items():
            if not self._is_inside(place):
                raise CheckpointError(
                    f"{path} is damaged: {shortened(repr(key))} is not at"
                    f" {shortened(repr(tuple(place)))}. Use another checkpoint."
                )
        return places

    def _is_inside(self, place: _Place) -> bool:
        file, offset, length = place
        if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
            return False
        return 0 <= offset <= offset + length <= self._sizes.get(file, -1)

    def tensor(self, key: str, like: Tensor) -> Tensor:
        """Reads one tensor.

        Args:
            key: as :func:`leaves` names it.
            like: has its shape and type.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        place = self._places.get(key)
        if place is None:
            raise CheckpointError(f"{self.path} has no values of {key!r}: it is damaged.")
        file = self._files.get(place.file)
        if file is None:
            file = self._files[place.file] = TorchZipReader(self._data / place.file)
        entry = file.archive(place.offset, place.length).get("data/0")
        if entry is None:
            raise CheckpointError(f"{file.path} is damaged: {key!r} has no values in it.")
        return file.read(entry, like.dtype, tuple(like.shape))

    def checkpoint(
        self, weights_only: bool, wrap: Callable[[Tensor, Callable[[], Tensor]], Tensor]
    ) -> dict[str, Any]:
        """Lightning's dict.

        Args:
            weights_only: as in ``torch.load``.
            wrap: makes the placeholder of a tensor, given a meta tensor like it, and a function
                that reads it.
        """
        # Its tensors are on the meta device where :meth:`tensor` has them.
        rest = load_file(self._data / REST, weights_only)
        try:
            return self._filled(rest, wrap)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._data / REST} is not a checkpoint of a Trainer: {shortened(repr(error))}."
                " Use another one."
            ) from error

    def _filled(
        self, rest: dict[str, Any], wrap: Callable[[Tensor, Callable[[], Tensor]], Tensor]
    ) -> dict[str, Any]:
        aliases = rest.pop(_ALIASES, {})
        found: dict[str, Tensor] = {}
        for key, owner, name in leaves(rest):
            value = owner[name]
            if isinstance(value, Tensor) and value.is_meta:
                key = aliases.get(key, key)
                if key.startswith(f"{_REST}/"):
                    # The code that saved it may use it in ways that a placeholder does not support.
                    # A tensor that no stage had was a meta tensor everywhere, and remains one.
                    if key in self._places:
                        owner[name] = self.tensor(key, value)
                    continue
                if key not in found:
                    found[key] = wrap(value, partial(self.tensor, key, value))
                owner[name] = found[key]
        return rest
