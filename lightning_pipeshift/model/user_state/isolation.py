"""Keeps tensors unchanged while a step is traced: writes go to copies of them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    READ_NUMBER,
    OperationMode,
    pytree,
    schema_of,
    storage_key,
    storage_key_of,
)
from lightning_pipeshift.model.trace.placeholder import Placeholder
from lightning_pipeshift.model.trace.schema import written_arguments


class SeesValues(Protocol):
    """Receives notifications about shapes and writes."""

    def shaped_by_batch(self) -> None:
        """Called when a shape depends on the values of a real tensor."""

    def wrote(self, tensor: Tensor) -> None:
        """Called before a real tensor would be written to."""


class Isolation(OperationMode):
    """Context in which writes to real tensors go to copies of them, and reads return the copies.

    Args:
        told: notified if a shape depends on the values of a real tensor: such a flow is valid for
            this batch only. Conditions (``if mask.all():``) are not counted: they seldom change a
            shape, and a stage detects it if they do.
    """

    def __init__(self, told: SeesValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told = told
        # By identity of a storage: the storage itself, so that its identity is not reused, and the
        # copy.
        self._copies: dict[int, tuple[Any, Tensor]] = {}
        self._own: dict[int, Tensor] = {}
        """The copies by the identity of their own storages."""

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        follows = any(issubclass(kind, Placeholder) for kind in types)
        if not follows and _makes_shape(func, args):
            self._told.shaped_by_batch()
        if follows:
            # A placeholder computes shapes, and notifies the watcher about writes.
            return func(*args, **kwargs)
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            self._told.wrote(tensor)
            self._copy(tensor)
        if not self._copies:
            return func(*args, **kwargs)
        copied_args, copied_kwargs = pytree.tree_map_only(Tensor, self._copied, (args, kwargs))
        result = func(*copied_args, **copied_kwargs)
        if written and isinstance(result, Tensor):
            # An in-place operation returns its argument.
            for tensor in written:
                # What has no values has no memory either, by which to know it.
                own = self._copied(tensor)
                if result is own or (not own.is_meta and own.data_ptr() == result.data_ptr()):
                    return tensor
        return result

    def assign(self, tensor: Tensor, value: Tensor) -> None:
        """Assigns ``tensor.data = value`` on a copy of the tensor."""
        copy = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        copy.copy_(value)
        self._told.wrote(tensor)
        self._remember(tensor.untyped_storage(), copy)

    def _remember(self, storage: Any, copy: Tensor) -> None:
        self._copies[storage_key(storage)] = (storage, copy)
        self._own[storage_key_of(copy)] = copy

    def _copy(self, tensor: Tensor) -> None:
        if isinstance(tensor, Placeholder) or tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._copies and key not in self._own:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage.clone())
            self._remember(storage, flat)

    def _copied(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placeholder) or tensor.layout != torch.strided or tensor.is_meta:
            return tensor
        found = self._copies.get(storage_key_of(tensor))
        if found is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(
            found[1].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        return view


def _makes_shape(func: Any, args: tuple[Any, ...]) -> bool:
    name = schema_of(func).name
    if name == READ_NUMBER:
        dtype = args[0].dtype
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if name == "aten::index":
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags
