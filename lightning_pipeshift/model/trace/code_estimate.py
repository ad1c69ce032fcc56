"""Estimates, while a step is traced, what the code around its layers takes in memory.

Placeholders have no memory, but each has a shadow on the meta device, and views share the shadow's
storage as tensors share memory. So the bytes that live in the code between layers can be counted
from the shadows, and the tensors that it saves for its backward are known by autograd. The backward
itself does not run in a trace: it is estimated from the operations of the forward.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import OperationMode, storage_key, storage_key_of
from lightning_pipeshift.model.execution.live_bytes import LiveBytes
from lightning_pipeshift.model.execution.trees import leaves_of
from lightning_pipeshift.model.saved.hooks import saving
from lightning_pipeshift.model.trace.placeholder import Placeholder
from lightning_pipeshift.plan.inputs.saved_tensors import BEHIND, FRONT, SavedTensor


class CodeEstimate(OperationMode):
    """Watches the code around layers while it is entered, and :meth:`watched` too.

    Args:
        device: whose tensors count.
        held: tensors that are in use anyway: parameters, buffers and the batch.
    """

    def __init__(self, device: torch.device, held: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: dict[int, list[SavedTensor]] = {}
        """The tensors that the code around each layer saves, by layer."""
        self.working_bytes: dict[int, int] = {}
        """The most that it takes for a moment, beyond what it saves."""
        self._device = device
        self._known: dict[int, Any] = {}
        """The storages that count elsewhere, by identity. (They are kept, so that no other gets the
        identity of one of them.)"""
        self._packed: list[_Packed] = []
        self._live: _Shadows | None = None
        self._found: list[SavedTensor] = []
        self._most = 0
        everything = _Shadows(device, ())
        self._note_known(map(everything.storage_of, held))

    def watched(self) -> AbstractContextManager[Any]:
        """Context in which the tensors that autograd saves are seen."""
        return saving(self._pack, _unpacked)

    def begin(self) -> None:
        """Called when code around a layer starts to run."""
        self._live = _Shadows(self._device, frozenset(self._known))
        self._found, self._most = [], 0

    def end(self, layer: int, is_behind: bool = False) -> None:
        """Called when it has run.

        Args:
            layer: the layer that runs next.
            is_behind: whether the code is behind ``layer``, the last one.
        """
        if self._live is None:
            return
        first, maker = (BEHIND, "code behind") if is_behind else (FRONT, "code in front")
        found = [
            SavedTensor(first + number, each.num_bytes, each.shape, each.dtype, maker)
            for number, each in enumerate(self._found)
        ]
        most = max(self._live.peak_bytes - sum(each.num_bytes for each in found), self._most)
        self.saved.setdefault(layer, []).extend(found)
        self.working_bytes[layer] = max(most, self.working_bytes.get(layer, 0))
        self._live = None

    def close(self) -> None:
        """Lets go of the trace's graph."""
        for packed in self._packed:
            packed.tensor = None
        self._packed.clear()
        self._known.clear()

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        live = self._live
        if live is not None:
            given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            made = [x for x in leaves_of(results) if isinstance(x, Tensor)]
            live.note([*given, *made])
            sources = [x for x in given if x.requires_grad]
            memory = set(map(live.key_of, given))
            if sources and memory.isdisjoint(map(live.key_of, made)):
                # Its backward gets a gradient of each result, and makes one for each source.
                self._most = max(self._most, sum(x.nbytes for x in [*made, *sources]))
        return results

    def _pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor)
        self._packed.append(packed)
        live = self._live
        if live is not None:
            num_bytes = self._note_known([live.storage_of(tensor)])
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            self._found.append(SavedTensor(0, num_bytes, shape, dtype))
        return packed

    def _note_known(self, storages: Iterable[torch.UntypedStorage | None]) -> int:
        """Returns the bytes of those that were not known."""
        num_bytes = 0
        for storage in storages:
            if storage is not None and storage_key(storage) not in self._known:
                self._known[storage_key(storage)] = storage
                num_bytes += storage.nbytes()
        return num_bytes


class _Packed:
    """A tensor that the graph of a trace refers to, until the trace is complete: a graph that
    refers to its own result would never be freed.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


def _unpacked(packed: _Packed) -> Tensor:
    assert packed.tensor is not None
    return packed.tensor


class _Shadows(LiveBytes):
    """Counts placeholders like the tensors that they represent.

    Args:
        device: whose tensors count.
        held: the identities of storages that do not count.
    """

    def __init__(self, device: torch.device, held: Container[int]) -> None:
        super().__init__(device)
        self._held = held

    def storage_of(self, value: Any) -> torch.UntypedStorage | None:
        if isinstance(value, Placeholder):
            is_here = value.device.type == self._device.type
            storage = (
                value.shadow.untyped_storage()
                if is_here and value.layout is torch.strided
                else None
            )
        else:
            storage = super().storage_of(value)
        return None if storage is None or storage_key(storage) in self._held else storage

    def key_of(self, tensor: Tensor) -> int:
        """Identifies a tensor's memory."""
        value = tensor.shadow if isinstance(tensor, Placeholder) else tensor
        return storage_key_of(value) if value.layout is torch.strided else id(tensor)
