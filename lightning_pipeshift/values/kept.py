"""Moves averages, and other values that user code computes from the parameters of a layer, to the
new owner of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import storage_key_of
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.tensors.transfer import to_device
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.reads import offer

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core


class Where(NamedTuple):
    """Where a tensor is in a memory.

    Args:
        offset: of its first element.
        shape: its sizes.
        stride: its strides.
        dtype: the type of its elements.
    """

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Where:
        """Where a tensor is in its own memory."""
        return cls(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def within(self, memory: Tensor) -> Tensor:
        """The tensor that is there in the memory of another one."""
        found = torch.empty(0, dtype=self.dtype, device=memory.device)
        return found.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


def memory_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's memory."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def by_memory(tensors: Mapping[Any, Tensor]) -> list[dict[Any, Where]]:
    """For each memory that tensors have, where these are in it, by their names."""
    found: dict[int, dict[Any, Where]] = {}
    for name, tensor in tensors.items():
        found.setdefault(storage_key_of(tensor), {})[name] = Where.of(tensor)
    return list(found.values())


class _Sent(NamedTuple):
    """A value on its way.

    Args:
        memory: the number of the memory among those that move; ``None``: that of a parameter.
        tensor: the number of the parameter or buffer whose memory it has.
        where: it is in the memory.
    """

    memory: int | None
    tensor: int | None
    where: Where


class KeptOfLayer:
    """The values that are computed from one layer only. The same on every stage, but for those that
    other ranks' Python has not deleted yet.

    Args:
        core: this stage's.
        number: of the layer.
        source: the stage that the layer leaves.
    """

    def __init__(self, core: Core, number: int, source: int) -> None:
        self._core = core
        self._name = core.names[number]
        self._own = core.placed_layers[number].tensors
        self._accounts: dict[Any, list[Account]] = {}
        own = set(self._own)
        self._has_views = False
        for account in core.kept:
            is_view = account.memory.of in own
            self._has_views |= is_view
            if (
                account.owner == source
                and account.graph is None
                and (is_view or account.layer == number)
            ):
                self._accounts.setdefault(account.name, []).append(account)

    def require_no_views(self) -> None:
        """Raises LayerError if user code keeps the memory of a parameter."""
        if self._has_views:
            raise LayerError(
                f"The layer `{self._name}` moves to another stage, and your code keeps the memory"
                " of one of its parameters or buffers (`x.data`, `x.detach()`) behind a step. With"
                " an asynchronous schedule that does not move: keep a copy (`x.clone()`), or use"
                " schedule='1f1b'."
            )

    def packed(self) -> dict[Any, Any]:
        """A dict for the new owner: the bytes of each memory by a number, and a :class:`_Sent` for
        each value by its name.
        """
        found: dict[Any, Any] = {}
        of_layer = {storage_key_of(x): at for at, x in enumerate(self._own) if not x.is_meta}
        # Those without one are garbage that only this rank's Python still has to collect.
        tensors = {
            name: account.tensor
            for name, (account, *_) in self._accounts.items()
            if account.tensor is not None
        }
        for number, places in enumerate(by_memory(tensors)):
            tensor = tensors[next(iter(places))]
            own = of_layer.get(storage_key_of(tensor))
            if own is None:
                found[number] = memory_of(tensor)
            memory = number if own is None else None
            found |= {name: _Sent(memory, own, where) for name, where in places.items()}
        return found

    def arrive(self, to: int, sent: Mapping[Any, Any]) -> None:
        """Makes a stage the owner.

        Args:
            to: the stage.
            sent: there, what :meth:`packed` gave.
        """
        memories = {
            key: to_device(x, self._core.device) for key, x in sent.items() if type(key) is int
        }
        for name, accounts in self._accounts.items():
            for account in accounts:
                tensor = None
                if name in sent:
                    tensor = self._placed(account, sent[name], memories)
                account.begin(to, tensor)
                if tensor is not None:
                    offer(self._core.mailbox, account)

    def _placed(self, account: Account, sent: _Sent, memories: Mapping[int, Tensor]) -> Tensor:
        if sent.memory is None:
            assert sent.tensor is not None
            memory = self._own[sent.tensor].detach()
        else:
            memory = memories[sent.memory]
        return sent.where.within(memory).requires_grad_(account.requires_grad)
