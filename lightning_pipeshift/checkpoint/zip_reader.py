"""Reads tensors from a file of ``torch.save``, one at a time, checked against their checksums.

``torch.save`` writes a zip archive whose entries are not compressed: a tensor's bytes are
contiguous, and the archive has a CRC-32 of each entry, which torch itself does not check. A rank
reads only what it needs, directly into its final memory.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.errors import CheckpointError
from lightning_pipeshift.files import shortened
from lightning_pipeshift.runtime.comm.staging import host_buffer

# Small enough to be still in the cache when its checksum is computed.
_CHUNK_BYTES = 1 << 20


class Entry(NamedTuple):
    """Bytes of a file, and the CRC-32 that they should have."""

    begin: int
    size: int
    checksum: int


class TorchZipReader:
    """A file with tensors in it.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._size = path.stat().st_size
        if not self._size:
            raise CheckpointError(f"{path} is empty. Use another checkpoint.")

    @property
    def is_archive(self) -> bool:
        """Whether the file was written by a torch that writes archives (1.6 or later)."""
        return os.pread(self._file.fileno(), 2, 0) == b"PK"

    def archive(self, begin: int = 0, size: int | None = None) -> dict[str, Entry]:
        """The entries of a zip archive in the file, by their names without the archive's prefix.

        Raises:
            CheckpointError: there is no complete archive.
        """
        size = self._size - begin if size is None else size
        try:
            with zipfile.ZipFile(_Window(self._file, begin, size)) as archive:
                return {
                    info.filename.partition("/")[2]: self._entry(begin, info)
                    for info in archive.infolist()
                }
        except CheckpointError:
            raise
        except Exception as error:  # zipfile raises many types for a file that is no archive
            raise _damaged(self.path, error) from error

    def _entry(self, begin: int, info: zipfile.ZipInfo) -> Entry:
        start = begin + info.header_offset
        # A local header has 30 bytes; the last four are the lengths of the name and an extra field.
        name, more = struct.unpack("<HH", os.pread(self._file.fileno(), 4, start + 26))
        return Entry(start + 30 + name + more, info.file_size, info.CRC)

    def read(self, entry: Entry, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor that is contiguous in the file.

        Raises:
            CheckpointError: the bytes do not match their checksum, or have the wrong size.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes != entry.size:
            raise CheckpointError(
                f"{self.path} is damaged: a tensor of {num_bytes} bytes has {entry.size} there."
                " Use another checkpoint."
            )
        tensor = host_buffer(shape, dtype)
        target = tensor.reshape(-1).view(torch.uint8).numpy().data
        found = 0
        for offset in range(0, entry.size, _CHUNK_BYTES):
            found = self._read(entry.begin + offset, target[offset : offset + _CHUNK_BYTES], found)
        self._require(entry, found)
        return tensor

    def verify(self, entry: Entry) -> None:
        """Reads bytes only to check their checksum.

        Raises:
            CheckpointError: they do not match it.
        """
        found, buffer = 0, memoryview(bytearray(min(_CHUNK_BYTES, entry.size)))
        for offset in range(0, entry.size, _CHUNK_BYTES):
            found = self._read(entry.begin + offset, buffer[: entry.size - offset], found)
        self._require(entry, found)

    def _read(self, begin: int, buffer: memoryview, checksum: int) -> int:
        """Fills a buffer, and returns the checksum updated with its bytes."""
        done = 0
        while done < len(buffer):
            try:
                read = os.preadv(self._file.fileno(), [buffer[done:]], begin + done)
            except (OSError, OverflowError) as error:
                raise _damaged(self.path, error) from error
            if not read:
                raise CheckpointError(f"{self.path} is truncated. Use another checkpoint.")
            done += read
        return zlib.crc32(buffer, checksum)

    def _require(self, entry: Entry, checksum: int) -> None:
        if checksum != entry.checksum:
            raise CheckpointError(
                f"{self.path} is damaged: {entry.size} bytes at {entry.begin} are not those that"
                " were written. Use another checkpoint."
            )


def load_file(path: Path, weights_only: bool, mmap: bool = False) -> Any:
    """``torch.load`` to the CPU.

    Args:
        path: the file.
        weights_only: whether to refuse objects that could run code.
        mmap: whether tensors are mapped.

    Raises:
        pickle.UnpicklingError: it contains objects that could run code.
        CheckpointError: it is damaged.
    """
    try:
        with warnings.catch_warnings():
            # Old formats cannot be mapped; torch says so, and reads them.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated or damaged ({shortened(str(error))}). Use another checkpoint."
    )


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.FileIO, begin: int, size: int) -> None:
        super().__init__()
        self._file, self._begin, self._size, self._at = file, begin, size, 0

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
        read = os.preadv(self._file.fileno(), [memoryview(buffer)[:size]], self._begin + self._at)
        self._at += read
        return read
