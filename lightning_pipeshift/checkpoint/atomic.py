"""Files and folders that appear under their names only when they are complete.

Data is written under a temporary name in the same folder (a rename is atomic inside a file system,
not across two), flushed to disk, and renamed. A folder also has a marker, which is written last and
names the subfolder that holds the data: to replace an existing folder, the new data is written to
another subfolder of it, and then the marker is replaced. If a file replaces a folder, or a folder a
file, one rename is not enough: the old one is first renamed to a name that :func:`restore` finds,
if the process is killed before the new one has been renamed.

A folder that is no checkpoint is never replaced or removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from lightning_pipeshift import files
from lightning_pipeshift.documents import Document
from lightning_pipeshift.errors import CheckpointError, PlanError
from lightning_pipeshift.files import (
    delete,
    is_plain_name,
    parse_json,
    read_bytes,
    shortened,
    temporary_next_to,
)

MARKER: Final = "checkpoint.json"
FORMAT: Final = "pipeshift sharded checkpoint"
VERSION: Final = 2

_ASIDE: Final = ".replaced"
_DATA: Final = re.compile(r"[0-9a-f]{12}")
# In these, each tensor has a checksum, which is compared when the tensor is read.
_TENSORS: Final = ".distcp"


# --- names ---


def restore(path: Path) -> None:
    """Restores a checkpoint's name, if a process was killed while it replaced it."""
    aside = _aside(path)
    if not os.path.lexists(path) and os.path.lexists(aside):
        # Another rank may have done it first.
        with suppress(OSError):
            aside.rename(path)


def remove(path: Path) -> None:
    """Removes a checkpoint, if it exists: a file, a link or a folder. A folder loses its name
    first, so that a half-removed one never looks like a checkpoint.

    Raises:
        CheckpointError: it is a folder that is no checkpoint.
    """
    if _is_folder(path):
        require_replaceable(path)
        aside = temporary_next_to(path)
        path.rename(aside)
        delete(aside)
    else:
        path.unlink(missing_ok=True)


def require_replaceable(path: Path) -> None:
    """Refuses folders of others: all except checkpoints and empty folders.

    Raises:
        CheckpointError: it is such a folder.
    """
    if not _is_folder(path) or not any(path.iterdir()):
        return
    try:
        read_marker(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is a folder that is not a checkpoint of PipeShift, and is neither replaced"
            f" nor removed. Use another name, or move it away. ({error})"
        ) from None


def advice(path: Path) -> str:
    """The advice in an error message when ``path`` could not be written."""
    told = "The earlier content is unchanged."
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free / 1e6
        told += f" {free:,.0f} MB are free on this disk."
    return f"{told} Free some space, check the permissions, or save to another folder."


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Context that gives a temporary name to write a file to, and renames it at the end, when it is
    on disk; after an exception the earlier content is unchanged.

    Raises:
        CheckpointError: there is a folder of that name that is no checkpoint.
    """
    require_replaceable(path)
    with files.appearing(path, _take_name) as temporary:
        yield temporary
        flush(temporary)


def _take_name(temporary: Path, path: Path) -> None:
    """Renames a file or a folder, replacing the one of the new name."""
    restore(path)
    if not os.path.lexists(path) or not (_is_folder(temporary) or _is_folder(path)):
        temporary.replace(path)
        flush(path.parent)
        return
    require_replaceable(path)
    aside = _aside(path)
    delete(aside)
    path.rename(aside)
    temporary.rename(path)
    flush(path.parent)
    delete(aside)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_ASIDE}")


def _is_folder(path: Path) -> bool:
    # A link may lead to another checkpoint, which must not change.
    return path.is_dir() and not path.is_symlink()


# --- folders ---


def write_marker(folder: Path, data: str) -> None:
    """Marks a folder as complete: its subfolder ``data`` is on disk, and is the one to read from
    now on.
    """
    files = {}
    for file in sorted((folder / data).iterdir()):
        files[file.name] = {"bytes": file.stat().st_size}
        if file.suffix != _TENSORS:
            files[file.name]["crc32"] = checksum(file)
    content = {"format": FORMAT, "version": VERSION, "data": data, "files": files}
    with appearing(folder / MARKER) as temporary:
        temporary.write_text(json.dumps(content, indent=2))


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    return found


@dataclass(frozen=True)
class MarkedFile:
    """A file of a checkpoint. ``crc32`` is missing if the file has checksums of its own."""

    bytes: Annotated[int, Field(ge=0)]
    crc32: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True)
class Marker:
    """The content of a marker: the name of the subfolder ``data``, and the files in it."""

    data: str
    files: dict[str, MarkedFile]

    def __post_init__(self) -> None:
        for name in (self.data, *self.files):
            if not is_plain_name(name):
                raise CheckpointError(f"{shortened(repr(name))} is not a plain name")


_MARKER: Final = Document(Marker, "the marker", version=VERSION)


def read_marker(folder: Path) -> Marker:
    """The content of a folder's marker.

    Raises:
        CheckpointError: the folder is not complete, or the marker is damaged.
    """
    marker = folder / MARKER
    try:
        content = parse_json(read_bytes(marker))
        if not isinstance(content, dict) or content.pop("format", "") != FORMAT:
            raise CheckpointError(f"{marker} is not the marker of a checkpoint of PipeShift.")
        if (version := content.get("version", VERSION)) != VERSION:
            raise CheckpointError(
                f"{folder} is a checkpoint of version {shortened(repr(version))}, and this"
                f" PipeShift reads version {VERSION}. Use the PipeShift that wrote it."
            )
        return _MARKER.read(content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is a folder without {MARKER}, which is written last: it is not a "
            "checkpoint of PipeShift, or saving it was interrupted. Use another one."
        ) from None
    except (OSError, ValueError, PlanError) as error:
        raise CheckpointError(f"{marker} is damaged: {error}. Use another one.") from error


def publish(temporary: Path, path: Path, data: str) -> None:
    """Renames a folder to its final name, or replaces the content of the existing one.

    Args:
        temporary: a folder next to ``path``, with all files in its subfolder ``data``.
        path: the folder's name.
        data: the subfolder's name.

    Raises:
        CheckpointError: there is a folder of that name that is no checkpoint.
    """
    flush(temporary / data)
    require_replaceable(path)
    if not _is_folder(path) or not any(path.iterdir()):
        write_marker(temporary, data)
        _take_name(temporary, path)
        return
    (temporary / data).rename(path / data)
    write_marker(path, data)
    for other in path.iterdir():
        if other.name != data and _DATA.fullmatch(other.name):
            delete(other)
    delete(temporary)
