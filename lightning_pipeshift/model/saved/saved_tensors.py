"""Manages the tensors that autograd saves in a forward: counts them by storage, drops, offloads and
restores them.

Autograd holds a :class:`Saved` instead of each tensor. Tensors that share memory share a
:class:`SavedBlock`: a tensor and its views are counted once and moved together. Another module
decides where a block is (see ``runtime/offload/activation_store.py``); this one guarantees, for
every decision, that the backward gets the same bits, and that torch's own error is raised if a
tensor has been written to since it was saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import buffers_of, parameters_of
from lightning_pipeshift.compat.torch_private import version_of
from lightning_pipeshift.model.tensors.trees import (
    Layout,
    address_of,
    layout_of,
    leaves_of,
    view_in,
)

T = TypeVar("T")
B = TypeVar("B", bound="SavedBlock")

GIVEN: Final = -1
"""The number of saved tensors that are arguments of a layer that may be recomputed."""


class Keeper(Protocol[B]):
    """Decides where blocks are, and has a record of each."""

    def add(self, tensor: Tensor, layer: int, number: int, microbatch: int) -> B:
        """Adds the memory of a tensor, which is on the device; arguments as those of
        :class:`SavedBlock`.
        """

    def also(self, block: B, layer: int, number: int) -> None:
        """Gives a block a second name, as another saved tensor shares its memory."""

    lock: AbstractContextManager[Any]
    """While it is held, no other thread offloads or fetches a block."""

    def fetch(self, block: B) -> None:
        """Fetches a block; returns when it is on the device. It remains there while it is in
        use.
        """

    def drop(self, block: B) -> None:
        """Drops a block that is no longer needed. May be called in any thread, at any time."""

    def make_room(self, num_bytes: int, layer: int) -> None:
        """Waits until a layer may save ``num_bytes`` recomputed bytes."""


class Maker(Protocol):
    """Can recompute saved tensors."""

    def run_again(self) -> None:
        """Recomputes them."""


class SavedBlock:
    """The memory of one or more tensors that autograd saved: its record, which a keeper extends by
    where the memory is.

    Args:
        tensor: the first of them.
        layer: the layer that saved it first.
        number: the index of its first tensor among those that the layer has saved.
        microbatch: its microbatch.
    """

    __slots__ = ("_saved", "device", "dtype", "layer", "microbatch", "num_bytes", "number")

    def __init__(self, tensor: Tensor, layer: int, number: int, microbatch: int) -> None:
        self.layer = layer
        self.number = number
        self.microbatch = microbatch
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.dtype = _dtype_of_all(tensor)
        """The type of the memory as a vector."""
        self.device = tensor.device
        self._saved: list[weakref.ref[Saved]] = []

    @property
    def tensors(self) -> Iterator[Saved]:
        """The tensors that share it and are still needed."""
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.block is self:
                yield saved

    @property
    def is_in_use(self) -> bool:
        """Whether any of them is still needed."""
        return next(self.tensors, None) is not None

    def join(self, saved: Saved) -> None:
        """Adds a tensor that shares the memory."""
        self._saved.append(weakref.ref(saved))

    def memory(self) -> Tensor | None:
        """The whole memory as a vector; ``None`` if it is not on the device."""
        for saved in self.tensors:
            if saved.tensor is not None:
                return whole(saved.tensor)
        return None

    def leave(self) -> None:
        """Drops the reference to the memory."""
        for saved in self.tensors:
            saved.let_go()

    def come_back(self, memory: Tensor) -> None:
        """Takes other memory with the same bits.

        Args:
            memory: a vector of the block's type.
        """
        for saved in self.tensors:
            assert saved.layout is not None
            saved.take(view_in(memory, saved.layout))


class BlockReference:
    """The tensors of a block share it: when the last of them is gone, the keeper drops the block.

    The block itself lives on in the keeper's table until that has let go of it.
    """

    __slots__ = ("__weakref__", "block", "keeper")

    def __init__(self, block: SavedBlock, keeper: Keeper[Any]) -> None:
        self.block = block
        self.keeper = keeper

    def __del__(self) -> None:
        self.keeper.drop(self.block)


class Saved:
    """One tensor that autograd saved: present, or to be recomputed or fetched."""

    __slots__ = ("__weakref__", "_reference", "_version", "_witness", "layout", "maker", "tensor")

    def __init__(self, tensor: Tensor, reference: BlockReference | None = None) -> None:
        # An output saved directly would keep its own graph alive; the detached tensor shares the
        # memory and the version counter.
        self.tensor: Tensor | None = tensor.detach()
        self._witness: Tensor = self.tensor
        self._version: int = version_of(tensor)
        self.layout: Layout | None = None
        """That of the tensor in its memory, if it was dropped."""
        self.maker: Maker | None = None
        """Recomputes the tensor, if it is to be recomputed."""
        self._reference: BlockReference | None = None
        self._join(reference)

    @property
    def block(self) -> SavedBlock | None:
        """Its memory; ``None`` if that is not counted."""
        return None if self._reference is None else self._reference.block

    def leave_block(self) -> None:
        """Its memory is no longer that of the block."""
        self._reference = None

    def _join(self, reference: BlockReference | None) -> None:
        if reference is not None:
            self._reference = reference
            reference.block.join(self)

    def let_go(self) -> None:
        """Drops this reference to the tensor's memory, and keeps the version counter."""
        tensor = self.tensor
        if tensor is None:
            return
        self.layout, self.tensor = layout_of(tensor), None
        # Only the memory is dropped: writes by other users of the tensor still raise the shared
        # version counter.
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def take(self, tensor: Tensor, reference: BlockReference | None = None) -> None:
        """Takes a tensor with the same bits as the dropped one.

        Args:
            tensor: the same values in other memory.
            reference: to that memory, if it belongs to another block.
        """
        self.tensor = tensor
        self._join(reference)

    def get(self) -> Tensor:
        """The tensor. Raises torch's error if it has been written to since it was saved."""
        if self.tensor is None and self._reference is None and self.maker is not None:
            self.maker.run_again()
        elif self._reference is not None:
            # Even if it is on the device: it may be about to be offloaded.
            self._reference.keeper.fetch(self._reference.block)
        tensor = self.tensor
        assert tensor is not None
        if not self.is_unwritten:
            # As autograd itself does.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version"
                f" {version_of(self._witness)}; expected version {self._version} instead."
            )
        return tensor

    @property
    def is_unwritten(self) -> bool:
        """Whether the tensor has not been written to since it was saved."""
        return version_of(self._witness) == self._version


class SavedTable:
    """The tensors that one microbatch's layers have saved on this stage.

    Args:
        microbatch: its number.
        keeper: decides where blocks are; ``None``: they remain on the device.
        left_out: addresses of memory that is in use anyway: the batch's.
        device: whose memory counts; ``None``: any.
    """

    def __init__(
        self,
        microbatch: int = 0,
        keeper: Keeper[Any] | None = None,
        left_out: Iterable[int] = (),
        device: torch.device | None = None,
    ) -> None:
        self._microbatch = microbatch
        self._device = device
        self._keeper = keeper
        self._left_out = frozenset(left_out)
        # By address, as long as the block is here: the address of freed memory is reused.
        self._references: dict[int, weakref.ref[BlockReference]] = {}

    def save(
        self,
        tensor: Tensor,
        layer: int,
        number: int,
        resident: Set[int],
        makes_room: bool = False,
    ) -> Saved:
        """Returns the object that autograd holds instead of a tensor.

        Args:
            tensor: the tensor to save.
            layer: the layer that saves it.
            number: its index among those that the layer has saved.
            resident: addresses of the layer's parameters and buffers.
            makes_room: whether no memory has been reserved for it yet.
        """
        use = partial(Saved, tensor)
        return self._counted(tensor, layer, number, resident, use, makes_room)

    def is_there_anyway(self, tensor: Tensor, resident: Set[int] = frozenset()) -> bool:
        """Whether a tensor's memory need not be counted: it is the batch's, or resident, or not the
        device's. Attention on a GPU saves the seed of its dropout in host memory.
        """
        if self._device is not None and tensor.device.type != self._device.type:
            return True
        address = address_of(tensor)
        return address in resident or address in self._left_out

    def make_room(self, num_bytes: int, layer: int) -> None:
        """Waits until there is memory for the tensors that a layer is about to recompute."""
        if self._keeper is not None:
            self._keeper.make_room(num_bytes, layer)

    def make_good(self, saved: Saved, tensor: Tensor, layer: int, number: int) -> None:
        """Gives a dropped saved tensor its recomputed values."""
        self._counted(tensor, layer, number, frozenset(), partial(saved.take, tensor))

    def _counted(
        self,
        tensor: Tensor,
        layer: int,
        number: int,
        resident: Set[int],
        use: Callable[[BlockReference | None], T],
        makes_room: bool = False,
    ) -> T:
        """Calls ``use`` with a reference to a tensor's block; counts a new block."""
        keeper = self._keeper
        # The flags of a conjugate or negative have no effect on the memory.
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if keeper is None or tensor.layout is not torch.strided or is_lazy:
            return use(None)
        address = address_of(tensor)
        if not address or self.is_there_anyway(tensor, resident):
            return use(None)
        known = self._references.get(address)
        reference = known() if known is not None else None
        if reference is not None:
            with keeper.lock:
                memory = reference.block.memory()
                # It may have come back to another address since.
                if memory is not None and address_of(memory) == address:
                    keeper.also(reference.block, layer, number)
                    return use(reference)
        if makes_room:
            keeper.make_room(tensor.untyped_storage().nbytes(), layer)
        reference = BlockReference(keeper.add(tensor, layer, number, self._microbatch), keeper)
        self._references[address] = weakref.ref(reference)
        return use(reference)


def bytes_of(tensors: Iterable[Any]) -> int:
    """The total bytes of the tensors among some values; placeholders take nothing."""
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor)
    )


def addresses_of(tree: Any) -> list[int]:
    """The addresses of all tensors among some values."""
    return [address_of(leaf) for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def resident_in(layer: nn.Module, but: tuple[type, ...] = ()) -> frozenset[int]:
    """The addresses of a layer's parameters and buffers; a view of one takes no memory.

    Args:
        layer: the layer, or a whole model.
        but: the classes of tensors without memory of their own.
    """
    # The names of parameters and buffers, which modules list with them, take most of the time.
    tables = (table for one in layer.modules() for table in (parameters_of(one), buffers_of(one)))
    return frozenset(
        address_of(x)
        for table in tables
        for x in table.values()
        if x is not None and not isinstance(x, but)
    )


def whole(tensor: Tensor) -> Tensor:
    """The whole memory of a tensor without a gradient, as a vector of its type, or of bytes."""
    storage, dtype = tensor.untyped_storage(), _dtype_of_all(tensor)
    if dtype is tensor.dtype:
        # A single operation, as other threads may run before each one.
        return tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
    vector = torch.empty(0, dtype=dtype, device=tensor.device)
    return vector.set_(storage, 0, (storage.nbytes(),), (1,))


def _dtype_of_all(tensor: Tensor) -> torch.dtype:
    """The tensor's type, if its whole memory consists of such elements; otherwise bytes."""
    fits = tensor.untyped_storage().nbytes() % tensor.element_size() == 0
    return tensor.dtype if fits else torch.uint8
