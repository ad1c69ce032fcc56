"""Reads files that other people may have written, and names files that are not complete yet.

A file that a run is given, or finds in its folder, may be damaged, endless, or malicious: this
module reads only regular files of a limited size, and a name in one never refers to another folder.
Everything raises an error in bounded time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from lightning_pipeshift.host import process_space

PACKAGE: Final = Path(__file__).resolve().parent
"""The folder of this package's own source."""

MOST_BYTES: Final = 64 << 20
"""The largest size of a document: more than any plan or profile needs."""

_MOST_NAME: Final = 255
_MOST_SHOWN: Final = 200

_TEMPORARY: Final = ".tmp"
# Used if the system does not tell which processes share their process numbers.
_UNKNOWN: Final = "00000000"
_NAME: Final = re.compile(r"\..+\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.tmp")
# For writers on other hosts, which cannot be checked from here; and if another process has got the
# number of one that has ended.
_LEFT_AFTER_SECONDS: Final = 3600.0


# --- reading ---


def read_bytes(path: str | Path, most: int = MOST_BYTES, *, only_own: bool = False) -> bytes:
    """Reads a regular file.

    Args:
        path: its name; a link is followed unless ``only_own``.
        most: how many bytes it may have.
        only_own: whether it has to belong to this process's user, and must not be a link.

    Raises:
        OSError: it does not exist, cannot be read, or is not such a file.
    """
    # Opening a pipe would wait for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if only_own:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{str(path)!r} is not a regular file")
        if only_own and hasattr(os, "geteuid") and found.st_uid != os.geteuid():
            raise OSError(
                f"{str(path)!r} belongs to the user {found.st_uid}, not to {os.geteuid()}"
            )
        parts: list[bytes] = []
        left = most + 1
        while left and (part := os.read(descriptor, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    if not left:
        raise OSError(f"{str(path)!r} has more than {most:,} bytes")
    return b"".join(parts)


def read_text(path: str | Path, most: int = MOST_BYTES, *, only_own: bool = False) -> str:
    """:func:`read_bytes` as text.

    Raises:
        OSError: as for :func:`read_bytes`.
        ValueError: it is not UTF-8.
    """
    return read_bytes(path, most, only_own=only_own).decode()


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested lists or objects") from None


def is_plain_name(name: object) -> bool:
    """Whether a text is the name of a file in the same folder, on every system."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _MOST_NAME
        and name not in (".", "..")
        and not set(name) & set("/\\:\0")
    )


def shortened(text: str) -> str:
    """The beginning of a text from a file, for a message."""
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."


def printable(text: str) -> str:
    """A text for a terminal, with control characters shown as ``\\x1b``."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


# --- files that are not complete yet ---


@contextmanager
def appearing(path: Path, rename: Callable[[Path, Path], object] = Path.replace) -> Iterator[Path]:
    """Context that gives a temporary name to write a file to, and renames it at the end, so that no
    reader ever sees a partial file; after an exception the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_next_to(path)
    try:
        yield temporary
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Writes a file that readers see as a whole or not at all."""
    with appearing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def temporary_next_to(path: Path) -> Path:
    """A new hidden name in the same folder, which contains the process that writes the file."""
    # The system limits a name's length.
    name = f".{path.name[:40]}.{_space()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{_TEMPORARY}"
    return path.with_name(name)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files that killed processes of this user have left in a folder."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        match = _NAME.fullmatch(path.name)
        # Another process may do it first.
        with suppress(OSError):
            if match is not None and _is_left(path, match[1], int(match[2])):
                delete(path)


def delete(path: Path) -> None:
    """Removes a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _space() -> str:
    """Names the set of processes in which a process number identifies a living process."""
    space = process_space()
    return _UNKNOWN if space is None else hashlib.sha256(space.encode()).hexdigest()[:8]


def _is_left(path: Path, space: str, process: int) -> bool:
    if hasattr(os, "geteuid") and path.lstat().st_uid != os.geteuid():
        return False
    if space == _space() != _UNKNOWN:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    last: float = max(each.lstat().st_mtime for each in (path, *inside))
    return time.time() - last > _LEFT_AFTER_SECONDS
