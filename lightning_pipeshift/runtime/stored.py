"""Reads tensors from what ``torch.save`` wrote, one at a time, checked against their checksums.

``torch.save`` writes a zip archive whose entries are not compressed: a tensor's bytes lie in one
piece, and the archive has a CRC-32 of each entry, which torch itself does not look at. Here the
file is mapped, so that a rank reads from disk only what it takes; what was taken is let go of
again, so that it is not in memory twice.
"""

from __future__ import annotations

import io
import mmap
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.errors import CheckpointError

# Small enough to be in the cache still when its checksum is taken.
_CHUNK_BYTES = 1 << 20
# What is in memory twice.
_KEPT_BYTES = 16 << 20


class Entry(NamedTuple):
    """Bytes of a file, and the CRC-32 that they should have (``None``: not known)."""

    begin: int
    size: int
    checksum: int | None


class MappedFile:
    """A file as memory that is read when it is touched.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise CheckpointError(f"{path} is empty. Use another checkpoint.")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            # Torch has no tensors that cannot be written to; nobody writes to this one.
            warnings.simplefilter("ignore")
            self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def archive(self, begin: int = 0, size: int | None = None) -> dict[str, Entry]:
        """The entries of a zip archive that lies in the file, by their names without the archive's
        own.

        Raises:
            CheckpointError: there is no whole archive.
        """
        size = len(self.map) - begin if size is None else size
        try:
            with zipfile.ZipFile(_Window(self.map, begin, size)) as archive:
                return {
                    info.filename.partition("/")[2]: self._entry(begin, info)
                    for info in archive.infolist()
                }
        except (zipfile.BadZipFile, struct.error, ValueError, OSError) as error:
            raise CheckpointError(
                f"{self.path} is truncated or damaged ({error}). Use another checkpoint."
            ) from error

    def _entry(self, begin: int, info: zipfile.ZipInfo) -> Entry:
        start = begin + info.header_offset
        # A local header: 30 bytes, of which the last four are the lengths of a name and of more.
        name, more = struct.unpack("<HH", self.map[start + 26 : start + 30])
        return Entry(start + 30 + name + more, info.file_size, info.CRC)

    def read(self, entry: Entry, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A copy of a tensor whose numbers lie in the file row by row.

        Raises:
            CheckpointError: they are not those that were written.
        """
        tensor = torch.empty(shape, dtype=dtype)
        target = tensor.reshape(-1).view(torch.uint8)
        if len(target) != entry.size or entry.begin + entry.size > len(self.map):
            raise CheckpointError(
                f"{self.path} is truncated or damaged: a tensor of {len(target)} bytes has"
                f" {entry.size} there. Use another checkpoint."
            )
        self._go_through(entry, target)
        return tensor

    def verify(self, entry: Entry) -> None:
        """Reads bytes for their checksum alone.

        Raises:
            CheckpointError: they are not those that were written.
        """
        self._go_through(entry, None)

    def _go_through(self, entry: Entry, target: Tensor | None) -> None:
        found = 0
        for offset in range(0, entry.size, _CHUNK_BYTES):
            begin, size = entry.begin + offset, min(_CHUNK_BYTES, entry.size - offset)
            chunk = self._bytes[begin : begin + size]
            if target is not None:
                chunk = target[offset : offset + size].copy_(chunk)
            if entry.checksum is not None:
                found = zlib.crc32(chunk.numpy().data, found)
            if (offset + size) % _KEPT_BYTES == 0 or offset + size == entry.size:
                self._let_go(max(entry.begin, begin + size - _KEPT_BYTES), begin + size)
        if entry.checksum is not None and found != entry.checksum:
            raise CheckpointError(
                f"{self.path} is damaged: {entry.size} bytes at {entry.begin} are not those that"
                " were written. Use another checkpoint."
            )

    def _let_go(self, begin: int, end: int) -> None:
        """Takes whole pages out of this process's memory; touched again, they are read again."""
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class _Window(io.RawIOBase):
    """A part of a mapped file as a file."""

    def __init__(self, mapped: mmap.mmap, begin: int, size: int) -> None:
        super().__init__()
        self._map, self._begin, self._size, self._at = mapped, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = max(0, min(len(buffer), self._size - self._at))
        buffer[:size] = self._map[self._begin + self._at : self._begin + self._at + size]
        self._at += size
        return size
