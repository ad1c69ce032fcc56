"""What autograd saves in a forward, under our hands: counted by storage, let go of, moved, brought
back.

Autograd holds a :class:`Saved` in the place of each tensor. Tensors that share memory share a
:class:`Block`: a tensor and its views are one thing to count and one thing to move. What becomes of
a block is for others to decide (see ``runtime/store.py``); here is what must be true whatever they
decide: the backward finds the same bits, and torch's own error if somebody has written to a tensor
since it was saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeshift.model.gate import Gate
from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.trees import leaves_of
from lightning_pipeshift.plan.saved_tensors import SavedTensor

T = TypeVar("T")

GIVEN: Final = -1
"""In the place of a saved tensor's number: what a layer that runs again was called with."""


class Keeper(Protocol):
    """Who decides where blocks are."""

    def add(self, block: Block) -> None:
        """Another block is here."""

    def also(self, block: Block, layer: int, number: int) -> None:
        """Another tensor shares a block's memory: it goes by this name, too."""

    lock: AbstractContextManager[Any]
    """While it is held, no block leaves or comes back in another thread."""

    def fetch(self, block: Block) -> None:
        """A block is wanted now: returns when it is here, and it stays as long as it is in use."""

    def drop(self, place: Any) -> None:
        """Nobody needs a block any more; what its place was. Called in whatever thread finds that
        out, in the middle of anything.
        """

    def make_room(self, num_bytes: int, layer: int) -> None:
        """Returns when a layer may save so many bytes again."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether it may without more ado."""


class Maker(Protocol):
    """What can make saved tensors again."""

    def run_again(self) -> None:
        """Makes them."""


class Block:
    """The memory of one or more tensors that autograd saved.

    Args:
        tensor: the first of them.
        layer: which layer saved it first.
        number: the place of its first tensor among those that the layer has saved.
        microbatch: whose.
        keeper: decides where it is; ``None``: it stays.
    """

    __slots__ = (
        "__weakref__",
        "_saved",
        "device",
        "dtype",
        "keeper",
        "layer",
        "microbatch",
        "num_bytes",
        "number",
        "place",
    )

    def __init__(
        self, tensor: Tensor, layer: int, number: int, microbatch: int, keeper: Keeper | None
    ) -> None:
        self.layer = layer
        self.number = number
        self.microbatch = microbatch
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.dtype = _dtype_of_all(tensor)
        """Of the memory as a vector."""
        self.device = tensor.device
        self.keeper = keeper
        self.place: Any = None
        """Where it is: the keeper's own note."""
        self._saved: list[weakref.ref[Saved]] = []

    def __del__(self) -> None:
        if self.keeper is not None:
            self.keeper.drop(self.place)

    @property
    def tensors(self) -> Iterator[Saved]:
        """Those that share it and are still needed."""
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.block is self:
                yield saved

    def join(self, saved: Saved) -> None:
        """Another tensor that shares the memory."""
        self._saved.append(weakref.ref(saved))

    def memory(self) -> Tensor | None:
        """All of it, as a vector; ``None`` where it is not here."""
        for saved in self.tensors:
            if saved.tensor is not None:
                return whole(saved.tensor)
        return None

    def leave(self) -> None:
        """Lets go of the memory."""
        for saved in self.tensors:
            saved.let_go()

    def come_back(self, memory: Tensor) -> None:
        """Takes the same bits in other memory.

        Args:
            memory: a vector of the block's type.
        """
        for saved in self.tensors:
            saved.take(saved.view_of(memory))


class Saved:
    """One tensor that autograd saved: here, or to be made or fetched again."""

    __slots__ = ("__weakref__", "_layout", "_version", "_witness", "block", "maker", "tensor")

    def __init__(self, tensor: Tensor, block: Block | None = None) -> None:
        # An output saved as itself would keep its own graph alive; the copy shares the memory and
        # the count of writes to it.
        self.tensor: Tensor | None = tensor.detach()
        self._witness: Tensor = self.tensor
        self._version: int = tensor._version
        self._layout: tuple[Any, ...] = ()
        self.maker: Maker | None = None
        """Makes it again, if it is to be made again."""
        self.block = block
        if block is not None:
            block.join(self)

    def let_go(self) -> None:
        """Frees the tensor's memory as far as this goes; the count of writes stays in sight."""
        tensor = self.tensor
        if tensor is None:
            return
        self._layout = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        self.tensor = None
        # Its memory alone goes: who else has the tensor counts writes where this one did.
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def view_of(self, memory: Tensor) -> Tensor:
        """The tensor in other memory: a vector that begins where the old memory began."""
        offset, size, stride, dtype = self._layout
        view = torch.empty(0, dtype=dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), offset, size, stride)

    def take(self, tensor: Tensor, block: Block | None = None) -> None:
        """Takes a tensor of the same bits in the place of what was let go of.

        Args:
            tensor: the same in other memory.
            block: that memory, if it is another one.
        """
        self.tensor = tensor
        if block is not None:
            self.block = block
            block.join(self)

    def get(self) -> Tensor:
        """The tensor. Raises torch's error if it has been written to since it was saved."""
        if self.tensor is None and self.maker is not None:
            self.maker.run_again()
        elif self.block is not None and self.block.keeper is not None:
            # Also where it is here: it may be about to leave.
            self.block.keeper.fetch(self.block)
        tensor = self.tensor
        assert tensor is not None
        self.require_unwritten(tensor)
        return tensor

    @property
    def is_unwritten(self) -> bool:
        """Whether nobody has written to the tensor since it was saved."""
        return self._witness._version == self._version

    def require_unwritten(self, tensor: Tensor) -> None:
        """Says what autograd says where no hook stands between."""
        if not self.is_unwritten:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version"
                f" {self._witness._version}; expected version {self._version} instead."
            )


class SavedTable:
    """What one microbatch's layers have saved on this stage.

    Args:
        microbatch: its number.
        keeper: decides where blocks are; ``None``: here.
        left_out: addresses of memory that is held anyway: the batch's.
    """

    def __init__(
        self, microbatch: int = 0, keeper: Keeper | None = None, left_out: Iterable[int] = ()
    ) -> None:
        self._microbatch = microbatch
        self._keeper = keeper
        self._left_out = frozenset(left_out)
        # By address, as long as it is here: freed memory comes again under the same address.
        self._blocks: dict[int, weakref.ref[Block]] = {}

    def save(
        self,
        tensor: Tensor,
        layer: int,
        number: int,
        resident: Set[int],
        makes_room: bool = False,
    ) -> Saved:
        """What autograd is to hold in a tensor's place.

        Args:
            tensor: to be saved.
            layer: which layer saves it.
            number: its place among those that the layer has saved.
            resident: addresses of what the layer has anyway: its parameters and buffers.
            makes_room: whether nobody has made room for it yet.
        """
        use = partial(Saved, tensor)
        return self._counted(tensor, layer, number, resident, use, makes_room)

    def is_there_anyway(self, address: int, resident: Set[int] = frozenset()) -> bool:
        """Whether memory need not be counted: it is the batch's, or resident."""
        return address in resident or address in self._left_out

    def make_room(self, num_bytes: int, layer: int) -> None:
        """Returns when there is room for what a layer is about to save again."""
        if self._keeper is not None:
            self._keeper.make_room(num_bytes, layer)

    def has_room(self, num_bytes: int) -> bool:
        """Whether there is room for so many bytes."""
        return self._keeper is None or self._keeper.has_room(num_bytes)

    @property
    def is_kept(self) -> bool:
        """Whether somebody decides where blocks are."""
        return self._keeper is not None

    def make_good(self, saved: Saved, tensor: Tensor, layer: int, number: int) -> None:
        """Gives a saved tensor that was let go of what has been made in its place."""
        self._counted(tensor, layer, number, frozenset(), partial(saved.take, tensor))

    def _counted(
        self,
        tensor: Tensor,
        layer: int,
        number: int,
        resident: Set[int],
        use: Callable[[Block | None], T],
        makes_room: bool = False,
    ) -> T:
        """Does something with the block of a tensor; a new block is counted then."""
        keeper = self._keeper
        if keeper is None or tensor.layout is not torch.strided or _is_lazy(tensor):
            return use(None)
        address = address_of(tensor)
        if not address or self.is_there_anyway(address, resident):
            return use(None)
        known = self._blocks.get(address)
        block = known() if known is not None else None
        if block is not None:
            with keeper.lock:
                if block.memory() is not None:
                    keeper.also(block, layer, number)
                    return use(block)
        if makes_room:
            keeper.make_room(tensor.untyped_storage().nbytes(), layer)
        block = Block(tensor, layer, number, self._microbatch, keeper)
        self._blocks[address] = weakref.ref(block)
        used = use(block)
        keeper.add(block)
        return used


class Observer:
    """Notes what the layers of one microbatch save, and the code around them, each tensor's memory
    once.

    Parameters, buffers and the batch are there anyway and are left out, and so are a layer's inputs
    that the layer before it saved: they are counted there.
    """

    def __init__(self) -> None:
        self.of_layers: dict[int, list[SavedTensor]] = {}
        self.of_inputs: dict[int, int] = {}
        self._known: set[int] = set()
        # Storages that were freed could come again under the same address.
        self._held: list[Tensor] = []

    @property
    def bytes_of_layers(self) -> dict[int, int]:
        """What each layer saves."""
        return {layer: sum(t.num_bytes for t in found) for layer, found in self.of_layers.items()}

    @contextmanager
    def around(
        self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any], table: SavedTable
    ) -> Iterator[Origins]:
        """Context of a layer's call, in which it is noted who makes what."""
        self.of_inputs[gate.index] = bytes_of(
            leaf
            for leaf in leaves_of((args, kwargs))
            if isinstance(leaf, Tensor) and not table.is_there_anyway(address_of(leaf))
        )
        self.of_layers[gate.index] = [
            tensor for tensor in self.of_layers.get(gate.index, ()) if tensor.is_outside
        ]
        with Origins(gate.layer) as origins:
            for leaf in leaves_of((args, kwargs)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder):
                    origins.note(leaf, "input")
            yield origins

    def note(self, tensor: Tensor, layer: int, number: int, origin: str, is_resident: bool) -> None:
        """A layer saves a tensor, or the code around it."""
        address = address_of(tensor)
        num_bytes = 0
        if not is_resident and address not in self._known:
            self._known.add(address)
            self._held.append(tensor.detach())
            num_bytes = tensor.numel() * tensor.element_size()
            if tensor.layout is torch.strided:
                num_bytes = tensor.untyped_storage().nbytes()
        self.of_layers.setdefault(layer, []).append(
            SavedTensor(
                number=number,
                num_bytes=num_bytes,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                maker="parameter" if is_resident else origin,
            )
        )

    def begin(self) -> None:
        """A microbatch begins: what was noted of another one is forgotten."""
        self.of_layers.clear()

    def end(self) -> None:
        """The microbatch is over."""
        self._held.clear()
        self._known.clear()


class Origins(TorchDispatchMode):
    """Notes of every tensor that operation of which module made it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {address_of(x) for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)}
        name = func.overloadpacket.__name__
        maker = f"{self._inside[-1]}: {name}" if self._inside and self._inside[-1] else name
        for result in leaves_of(results):
            # A view of what was given, or what was written to, has been made by another.
            if isinstance(result, Tensor) and address_of(result) not in given:
                self.note(result, maker)
        return results

    def note(self, tensor: Tensor, maker: str) -> None:
        """What made a tensor."""
        self._made[address_of(tensor)] = maker

    def maker_of(self, tensor: Tensor) -> str:
        """What made a tensor's memory, in words."""
        return self._made.get(address_of(tensor), "unknown")

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._inside.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        self._inside.pop()


def bytes_of(tensors: Iterable[Any]) -> int:
    """What the tensors among some values take, each by itself; placeholders take nothing."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, Tensor) and not isinstance(tensor, Placeholder)
    )


def address_of(tensor: Tensor) -> int:
    """What tells a tensor's memory from others'; a view has that of what it is a view of."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def addresses_of(tree: Any) -> list[int]:
    """The addresses of all tensors among some values."""
    return [address_of(leaf) for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def resident_in(layer: nn.Module) -> frozenset[int]:
    """The addresses of what a layer has anyway; a view of it takes no memory."""
    return frozenset(address_of(tensor) for tensor in [*layer.parameters(), *layer.buffers()])


def whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor without a gradient is in, as a vector of its type, or of
    bytes.
    """
    storage, dtype = tensor.untyped_storage(), _dtype_of_all(tensor)
    if dtype is tensor.dtype:
        # One operation: each lets other threads go first.
        return tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
    vector = torch.empty(0, dtype=dtype, device=tensor.device)
    return vector.set_(storage, 0, (storage.nbytes(),), (1,))


def _dtype_of_all(tensor: Tensor) -> torch.dtype:
    """The type of the tensor, if all of its memory is so many numbers of it; or bytes."""
    fits = tensor.untyped_storage().nbytes() % tensor.element_size() == 0
    return tensor.dtype if fits else torch.uint8


def _is_lazy(tensor: Tensor) -> bool:
    # What such a bit says is not in the memory.
    return tensor.is_conj() or tensor.is_neg()
