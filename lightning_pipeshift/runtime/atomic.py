"""Files and folders that appear under their names only when they are complete.

Data is written under a temporary name in the same folder (a rename is atomic inside a file system,
not across two), flushed to disk, and the file is renamed. A folder also has a marker, which is
written last and names the subfolder that holds the data: to replace an existing folder, the new
data is written to another subfolder of it, and then the marker is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MARKER = "checkpoint.json"
_TEMPORARY = ".tmp"


def temporary_beside(path: Path) -> Path:
    """A new hidden name in the same folder, recognisable as a temporary one."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_TEMPORARY}")


def remove_leftovers(path: Path) -> None:
    """Removes what killed attempts to write ``path`` have left behind."""
    for left in path.parent.glob(f".{path.name}.*{_TEMPORARY}"):
        remove(left)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists. A folder's marker is removed first, so that
    a half-removed folder never looks like a checkpoint.
    """
    if path.is_dir() and not path.is_symlink():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def advice(path: Path) -> str:
    """The advice in an error message when ``path`` could not be written."""
    told = "What was there before is as it was."
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free / 1e6
        told += f" {free:,.0f} MB are free there."
    return f"{told} Make room, look at the rights, or save somewhere else."


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Context that gives a temporary name to write a file to, and renames it at the end; after an
    exception the temporary file is removed, and the earlier file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        yield temporary
        flush(temporary)
        if path.is_dir() and not path.is_symlink():
            remove(path)
        temporary.replace(path)
        flush(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_marker(folder: Path, data: str, content: dict[str, Any]) -> None:
    """Declares a folder complete: its subfolder ``data`` is on disk, and is the one to read from
    now on.
    """
    sizes = {file.name: file.stat().st_size for file in sorted((folder / data).iterdir())}
    with appearing(folder / MARKER) as temporary:
        temporary.write_text(json.dumps({**content, "data": data, "files": sizes}, indent=2))


def publish(temporary: Path, path: Path, data: str, content: dict[str, Any]) -> None:
    """Makes a folder appear under its name, or replaces its content.

    Args:
        temporary: a folder beside ``path``, with everything in its subfolder ``data``.
        path: the folder's name.
        data: the subfolder's name.
        content: further entries of the marker.
    """
    flush(temporary / data)
    # A link may lead to another checkpoint, which must not change.
    if path.is_symlink() or not path.is_dir():
        write_marker(temporary, data, content)
        path.unlink(missing_ok=True)
        temporary.rename(path)
        flush(path.parent)
        return
    (temporary / data).rename(path / data)
    write_marker(path, data, content)
    for other in path.iterdir():
        if other.name not in (data, MARKER):
            remove(other)
    remove(temporary)
