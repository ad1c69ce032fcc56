"""``PipeShiftCheckpointIO``: writes and reads checkpoints."""

from __future__ import annotations

import atexit
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lightning_pipeshift.checkpoint import atomic
from lightning_pipeshift.checkpoint.sharded import ShardedFolder, Writing
from lightning_pipeshift.checkpoint.zip_reader import TorchZipReader, load_file
from lightning_pipeshift.compat.lightning_private import is_local_path
from lightning_pipeshift.compat.torch_private import pytree
from lightning_pipeshift.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lightning_pipeshift.files import remove_leftovers
from lightning_pipeshift.runtime.comm.staging import Staging
from lightning_pipeshift.runtime.comm.threads import InOrder

Wrap = Callable[[Tensor, Callable[[], Tensor]], Tensor]

_POLL_SECONDS: Final = 0.2


class PipeShiftCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, and reads only the needed parts of them.

    A checkpoint is one file, Lightning's own, that rank 0 writes; or, with ``sharded``, a folder
    that all ranks write at the same time, each its own part. Both load on any other number of
    stages and of virtual machines. ``pipeshift export`` converts a folder to one file.

    A checkpoint appears under its name when it is complete: after a run that is killed, the earlier
    checkpoint still exists. All bytes that are read are compared with their checksums. A folder
    that is no checkpoint is neither replaced nor removed.

    Args:
        sharded: whether a checkpoint is a folder; its file system has to be shared by all hosts.
        asynchronous: whether training continues while the bytes are written to disk. The part that
            this rank saves is first copied to host memory, which is reused. One checkpoint is
            written at a time: a second one, and the removal of older ones, wait for it. A failure
            to write is raised at the next save, or at the end of the run.

    Raises:
        CheckpointError: a checkpoint cannot be written, or the file to read is no checkpoint.
    """

    def __init__(self, sharded: bool = False, asynchronous: bool = False) -> None:
        self.sharded = sharded
        self.asynchronous = asynchronous
        self._group: dist.ProcessGroup | None = None
        self._worker: InOrder | None = None
        self._under_way: list[Future[None]] = []
        self._staging = Staging()

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Sets the group over which the ranks coordinate a sharded checkpoint: all ranks, on gloo;
        nothing else may use it.
        """
        self._group = group

    # --- writing ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint: on rank 0, or, if it is sharded, on every rank at the same time.

        Args:
            checkpoint: Lightning's dict; if it is sharded, with this rank's part of the state
                dicts.
            path: the name of the file or the folder. A remote one (``s3://...``) is left to
                Lightning, and is one file.
            storage_options: not supported.
        """
        if storage_options is not None:
            raise ConfigurationError(
                "PipeShiftCheckpointIO does not support `storage_options`. Remove them."
            )
        if not is_local_path(str(path)):
            if self.sharded:
                raise ConfigurationError(
                    f"{path}: a sharded checkpoint needs a local or shared file system. Use a "
                    "path on one, or `sharded=False`."
                )
            super().save_checkpoint(checkpoint, path)
            return
        self.wait()
        path = Path(os.path.abspath(path))
        if self.sharded:
            if self._group is None:
                raise ConfigurationError(
                    "PipeShiftCheckpointIO(sharded=True) needs `strategy='pipeshift'`: other "
                    "strategies do not tell which rank holds which tensors. Use `sharded=False`."
                )
            staging = self._staging if self.asynchronous else None
            job = Writing(checkpoint, path, self._group, staging).finish
        else:
            if self.asynchronous:
                checkpoint = self._copied(checkpoint)

            def job() -> None:
                _write(checkpoint, path)

        self._do(job)

    def _copied(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        leaves, spec = pytree.tree_flatten(checkpoint)
        copies: dict[int, Tensor] = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # Tied tensors remain tied.
                if id(leaf) not in copies:
                    copies[id(leaf)] = self._staging.copy(str(number), leaf)
                leaves[number] = copies[id(leaf)]
        copied: dict[str, Any] = pytree.tree_unflatten(leaves, spec)
        return copied

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, when those that were saved before are complete."""
        if not is_local_path(str(path)):
            super().remove_checkpoint(path)
            return
        self._do(lambda: atomic.remove(Path(path)))

    def _do(self, job: Callable[[], None]) -> None:
        if not self.asynchronous:
            job()
            return
        if self._worker is None:
            self._worker = InOrder("checkpoint")
            _with_a_thread.add(self)
        self._under_way.append(self._worker.submit(job))

    def wait(self, is_incomplete: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all saved checkpoints are on disk.

        Args:
            is_incomplete: called now and then; returns whether they can never become complete.

        Returns:
            whether they are on disk.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            while not wait([future], _POLL_SECONDS).done:
                if is_incomplete():
                    self._worker = None
                    return False
        errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            # The thread makes no more calls after one that has failed.
            self._end_thread()
            raise errors[0]
        return True

    def _end_thread(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def teardown(self) -> None:
        """Waits until all saved checkpoints are on disk, and ends the thread that wrote them."""
        try:
            self.wait()
        finally:
            self._end_thread()
            self._staging.clear()

    # --- reading ---

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a whole checkpoint, a file or a folder.

        Args:
            path: its name.
            map_location: the CPU; a remote file is left to Lightning.
            weights_only: as in ``torch.load``; by default, only types that cannot run code are
                loaded.
        """
        if not is_local_path(str(path)):
            # Lightning would run a remote file's code where nothing else is said.
            with _running_nothing(path):
                return super().load_checkpoint(path, map_location, weights_only is not False)
        self.wait()
        return self.open(path, weights_only, lambda _, load: load())

    def open(
        self, path: Any, weights_only: bool | None, wrap: Wrap, turn: tuple[int, int] = (0, 1)
    ) -> dict[str, Any]:
        """Opens a local checkpoint, whose tensors are read on demand.

        Args:
            path: its name.
            weights_only: see :meth:`load_checkpoint`.
            wrap: makes the placeholder of a folder's tensor, given a meta tensor like it, and a
                function that reads it. The tensors of a file are mapped.
            turn: ``(1, 4)`` compares the second, sixth, ... entry of a file with its checksum, and
                leaves the rest to three other ranks.
        """
        path = Path(path)
        atomic.restore(path)
        if not path.exists():
            raise CheckpointNotFoundError(f"There is no checkpoint {path}.")
        if not (path.is_dir() or path.is_file()):
            raise CheckpointError(f"{path} is neither a file nor a folder. Use another checkpoint.")
        only = weights_only is not False
        with _running_nothing(path):
            if path.is_dir():
                return ShardedFolder(path).checkpoint(only, wrap)
            return _read(path, only, turn)


@contextmanager
def _running_nothing(path: Any) -> Iterator[None]:
    """Context of loading without running code: its error explains what to do."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and loading that could run any"
            " code. If you trust its source, pass `weights_only=False` to `fit`,"
            f" `validate`, `test` or `predict`. Torch says: {error}"
        ) from error


# These threads do not keep the process alive: after a failure some wait for ever.
_with_a_thread: Final[weakref.WeakSet[PipeShiftCheckpointIO]] = weakref.WeakSet()


@atexit.register
def _complete() -> None:
    for io in list(_with_a_thread):
        with suppress(Exception):
            io.wait()


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    try:
        with atomic.appearing(path) as temporary:
            remove_leftovers(path.parent)
            torch.save(checkpoint, temporary)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}). {atomic.advice(path)}"
        ) from error


def _read(path: Path, weights_only: bool, turn: tuple[int, int]) -> dict[str, Any]:
    stored = TorchZipReader(path)
    is_archive = stored.is_archive
    if is_archive:
        first, step = turn
        for entry in list(stored.archive().values())[first::step]:
            stored.verify(entry)
    found: dict[str, Any] = load_file(path, weights_only, mmap=is_archive)
    return found
