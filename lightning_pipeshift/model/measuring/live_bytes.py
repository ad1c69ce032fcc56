"""Counts the bytes of tensors that live on a device: how much memory a piece of code takes at its
peak, on any device, also on one that keeps no statistics of its allocations.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import OperationMode, storage_key
from lightning_pipeshift.model.tensors.trees import leaves_of


class LiveBytes(OperationMode):
    """While it is entered, notes the memory of every tensor that an operation takes or returns; the
    memory counts until it is freed, also outside of the context.

    Memory is counted by storage: a tensor and its views once. What is freed within one operation
    (the workspace of a kernel) is not seen. Backwards are, in whatever thread they run.

    Args:
        device: whose tensors count.
        left_out: tensors whose memory does not count.
    """

    def __init__(self, device: torch.device, left_out: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.num_bytes: int = 0
        """Bytes that live now."""
        self.peak_bytes: int = 0
        """The largest number of bytes that lived at once, since the count began, or since this
        attribute was set to another value."""
        # Storages are freed in any thread. By identity, which another storage may have later.
        self._lock = threading.RLock()
        self._known: dict[int, weakref.ref[Any]] = {}
        self.leave_out(left_out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.note(leaves_of((args, kwargs, results)))
        return results

    def note(self, values: Iterable[Any]) -> None:
        """Counts the memory of the tensors among some values."""
        for value in values:
            storage = self.storage_of(value)
            if storage is not None:
                self._count(storage, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def storage_of(self, value: Any) -> torch.UntypedStorage | None:
        """The memory of a tensor, if it is on the device; ``None`` for anything else."""
        is_real = isinstance(value, Tensor)
        if not is_real or value.layout is not torch.strided:
            return None
        storage: torch.UntypedStorage = value.untyped_storage()
        # Fake tensors name a device, too, but their storage is on the meta device.
        return storage if storage.device.type == self._device.type else None

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """The memory of these tensors does not count."""
        for tensor in tensors:
            self._count(tensor.untyped_storage(), 0)

    def _count(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage_key(storage)

        def freed(_: Any) -> None:
            with self._lock:
                self.num_bytes -= num_bytes
                del self._known[key]

        with self._lock:
            if key not in self._known:
                self._known[key] = weakref.ref(storage, freed)
                self.num_bytes += num_bytes
