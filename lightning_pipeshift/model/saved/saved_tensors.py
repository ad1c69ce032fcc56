"""Manages the tensors that autograd saves in a forward: counts them by storage, drops, offloads and
restores them.

Autograd holds a :class:`Saved` instead of each tensor. Tensors that share memory share a
:class:`SavedBlock`: a tensor and its views are counted once and moved together. Another module
decides where a block is (see ``runtime/offload/activation_store.py``); this one guarantees, for
every decision, that the backward gets the same bits, and that torch's own error is raised if a
tensor has been written to since it was saved.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    OperationMode,
    buffers_of,
    parameters_of,
    version_of,
)
from lightning_pipeshift.devices.streams import synchronize
from lightning_pipeshift.model.execution.trees import address_of, leaves_of
from lightning_pipeshift.model.saved.held_results import is_skippable, seconds_seen
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor

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

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` are free without waiting."""


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
            saved.take(saved.view_of(memory))


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

    __slots__ = ("__weakref__", "_layout", "_reference", "_version", "_witness", "maker", "tensor")

    def __init__(self, tensor: Tensor, reference: BlockReference | None = None) -> None:
        # An output saved directly would keep its own graph alive; the detached tensor shares the
        # memory and the version counter.
        self.tensor: Tensor | None = tensor.detach()
        self._witness: Tensor = self.tensor
        self._version: int = version_of(tensor)
        self._layout: tuple[Any, ...] = ()
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
        self._layout = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        self.tensor = None
        # Only the memory is dropped: writes by other users of the tensor still raise the shared
        # version counter.
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def shape_and_strides(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """The shape, strides and type of a tensor that was dropped."""
        _, size, strides, dtype = self._layout
        return tuple(size), tuple(strides), dtype

    def view_of(self, memory: Tensor) -> Tensor:
        """The tensor in other memory: a vector that begins where the old memory began."""
        offset, size, stride, dtype = self._layout
        view = torch.empty(0, dtype=dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), offset, size, stride)

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

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` are free."""
        return self._keeper is None or self._keeper.has_room(num_bytes)

    @property
    def is_kept(self) -> bool:
        """Whether there is a keeper, which decides where blocks are."""
        return self._keeper is not None

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


class Observer:
    """Records the tensors that the layers of one microbatch, and the code around them, save; each
    tensor's memory once.

    Parameters, buffers and the batch are in use anyway and are omitted, and so are a layer's inputs
    that the layer before it saved: they are counted there.

    Args:
        timed: the device, to time the operation that computes each of a layer's tensors, which
            waits for the device; ``None``: not.
    """

    def __init__(self, timed: torch.device | None = None) -> None:
        self._timed = timed
        self.of_layers: dict[int, list[SavedTensor]] = {}
        self.of_inputs: dict[int, int] = {}
        self.of_code: dict[int, int] = {}
        """The most bytes that the code around each layer takes for a moment, beyond what it saves:
        in all microbatches."""
        self.known: dict[int, Any] = {}
        """A weak reference to each tensor's memory by its address, until it is freed (the tensor
        was swapped): then others may get the address."""
        self.num_bytes = 0
        """Of all tensors that have been recorded."""

    @contextmanager
    def around(
        self, gate: NamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], table: SavedTable
    ) -> Iterator[Origins]:
        """Context of a layer's call, in which the maker of each tensor is recorded."""
        self.of_inputs[gate.index] = bytes_of(
            leaf
            for leaf in leaves_of((args, kwargs))
            if isinstance(leaf, Tensor) and not table.is_there_anyway(leaf)
        )
        self.of_layers[gate.index] = [
            tensor for tensor in self.of_layers.get(gate.index, ()) if tensor.is_outside
        ]
        with Origins(gate.layer, self._timed) as origins:
            for leaf in leaves_of((args, kwargs)):
                if isinstance(leaf, Tensor):
                    origins.note(leaf, "input")
            yield origins
        self.of_layers[gate.index] = origins.with_parts(self.of_layers[gate.index])

    def note(
        self,
        tensor: Tensor,
        layer: int,
        number: int,
        origin: str,
        is_resident: bool,
        seconds: float = 0.0,
    ) -> None:
        """Records a tensor saved by a layer, or by the code around it; ``seconds`` of computing it,
        if they are known.
        """
        address = address_of(tensor)
        num_bytes = 0
        if not is_resident and address not in self.known:
            memory: Any = tensor
            num_bytes = tensor.numel() * tensor.element_size()
            if tensor.layout is torch.strided:
                memory = tensor.untyped_storage()
                num_bytes = memory.nbytes()
            self.num_bytes += num_bytes
            forget = partial(self.known.pop, address)
            self.known[address] = weakref.ref(memory, lambda _: forget(None))
        self.of_layers.setdefault(layer, []).append(
            SavedTensor(
                number=number,
                num_bytes=num_bytes,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                maker="parameter" if is_resident else origin,
                spares=min(1.0, seconds) if num_bytes else 0.0,
            )
        )

    def note_code(self, layer: int, num_bytes: int) -> None:
        """Records what the code around a layer takes for a moment."""
        self.of_code[layer] = max(num_bytes, self.of_code.get(layer, 0))

    def begin(self) -> None:
        """Called when a microbatch begins: discards the records of an earlier one."""
        self.of_layers.clear()

    def end(self) -> None:
        """Called when the microbatch has ended."""
        self.known.clear()


class Origins(OperationMode):
    """Records the operation, and its module, that computed each tensor.

    Args:
        layer: has the modules.
        timed: see :class:`Observer`.
    """

    def __init__(self, layer: nn.Module, timed: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._timed = timed
        self._seconds: dict[int, float] = {}
        self.seconds = 0.0
        """Those of all operations."""
        self._num_operations = 0
        self._names = {id(module): name for name, module in layer.named_modules()}
        self._inside: list[str] = []
        self._hooks: list[Any] = []
        self._made: dict[int, str] = {}

    def __enter__(self) -> Origins:
        register = torch.nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._enter_module),
            register.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = self._run(func, args, kwargs)
        given = {address_of(x) for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)}
        name = func.overloadpacket.__name__
        maker = f"{self._inside[-1]}: {name}" if self._inside and self._inside[-1] else name
        for result in leaves_of(results):
            # A view of an argument, and an argument written to, were computed by another operation.
            if isinstance(result, Tensor) and address_of(result) not in given:
                self.note(result, maker)
        return results

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._timed is None:
            return func(*args, **kwargs)
        synchronize(self._timed)
        begun = time.perf_counter()
        results = func(*args, **kwargs)
        synchronize(self._timed)
        taken = time.perf_counter() - begun
        self.seconds += taken
        self._num_operations += 1
        if is_skippable(func, args, kwargs, results):
            # Only with all of its results the operation is spared.
            found = [leaf for leaf in leaves_of(results) if isinstance(leaf, Tensor)]
            total = sum(leaf.nbytes for leaf in found)
            for leaf in found:
                self._seconds[address_of(leaf)] = taken * leaf.nbytes / total if total else 0.0
        return results

    def with_parts(self, tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
        """The layer's tensors, whose seconds become parts of the layer: less what it takes to leave
        operations out, as if all of them were left out. Both runs look at every operation then.
        """
        lost = 2 * self._num_operations * seconds_seen() if self.seconds else 0.0
        gained = math.fsum(tensor.spares for tensor in tensors)
        part = max(0.0, 1 - lost / gained) / self.seconds if gained else 0.0
        return [replace(each, spares=min(1.0, part * each.spares)) for each in tensors]

    def seconds_of(self, tensor: Tensor) -> float:
        """The seconds that a recomputation spares if it has this tensor."""
        return self._seconds.get(address_of(tensor), 0.0)

    def note(self, tensor: Tensor, maker: str) -> None:
        """Records the maker of a tensor."""
        self._made[address_of(tensor)] = maker

    def maker_of(self, tensor: Tensor) -> str:
        """The maker of a tensor's memory, in words."""
        return self._made.get(address_of(tensor), "unknown")

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        # A compiler that traces the module cannot trace this; compiled operations are not seen.
        if torch.compiler.is_compiling():
            return
        self._inside.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside.pop()


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
