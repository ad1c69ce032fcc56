"""Lets go of what a layer saved for its backward, and makes it again by running the layer twice.

Recomputation in a stage's idle time (NUDT, "distributed parallel training method and system for
heterogeneous computing clusters") needs two things that ``torch.utils.checkpoint`` does not give:
to run again *before* the backward asks, while the stage waits for a gradient; and to run again with
the same bits, wherever the layer lives. Both are the layer's own: its random stream is known, and
its saved tensors are counted as they come, so the n-th of the second run takes the place of the
n-th of the first.

What a layer saved is let go of when the stage's forward is over, and not before. By then user code
has done to the layer's inputs what it does (``residual += x``): an input that is no longer what the
layer saw cannot be run on again, and the layer keeps what it saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.cut import GradientBox
from lightning_pipeshift.model.gate import Gate
from lightning_pipeshift.model.parameters import Slot, slots_of, substituted
from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.trees import flatten

Ambient = Callable[[], AbstractContextManager[object]]


class Saved:
    """One tensor that autograd saved: here, or to be made again."""

    __slots__ = ("__weakref__", "region", "tensor", "version")

    def __init__(self, tensor: Tensor, region: Region | None) -> None:
        # An output saved as itself would keep its own graph alive; the copy shares the memory and
        # the count of writes to it.
        self.tensor: Tensor | None = tensor.detach()
        self.version: int = tensor._version
        self.region = region

    def get(self) -> Tensor:
        """The tensor, run for again if need be."""
        if self.tensor is None:
            assert self.region is not None
            self.region.run_again()
        tensor = self.tensor
        assert tensor is not None
        if tensor._version != self.version:
            # What autograd says where no hook stands between.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version"
                f" {tensor._version}; expected version {self.version} instead."
            )
        return tensor


class Region:
    """One call of a layer that may run again.

    Args:
        gate: the layer's.
        args: what it is called with.
        kwargs: likewise.
        draw: lets what is drawn from then on come from the beginning of the call's own stream.
    """

    def __init__(
        self,
        gate: Gate,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draw: Callable[[], object],
    ) -> None:
        self._gate = gate
        self._draw = draw
        self._ambient = _ambient()
        leaves, self._rebuild = flatten((args, kwargs))
        # One tensor given twice is one tensor again: attention asks whether `query is key`.
        unique = {id(leaf): leaf for leaf in leaves}
        places = {identity: place for place, identity in enumerate(unique)}
        self._places = [places[id(leaf)] for leaf in leaves]
        self._inputs = [_Input.of(leaf) for leaf in unique.values()]
        self._slots = slots_of(gate.layer)
        # Its parameters are there anyway; a view of one saves nothing.
        self._resident = {
            address_of(tensor)
            for slot in self._slots
            if isinstance(tensor := slot.get(), Tensor) and not slot.is_buffer
        }
        if gate.writes_to_buffers is None:
            gate.writes_to_buffers = _keeps_statistics(gate.layer)
        self._buffers = _BuffersBefore(self._slots) if gate.writes_to_buffers else None
        self._saved: list[weakref.ref[Saved]] = []
        self._is_let_go = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the layer as it is called."""
        versions = None
        if self._buffers is None:
            versions = [(slot, slot.get(), _version(slot.get())) for slot in self._buffer_slots()]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, Saved.get):
            output = self._gate.original(*args, **kwargs)
        if versions is not None and any(
            slot.get() is not before or _version(before) != version
            for slot, before, version in versions
        ):
            # Known from the next call on; this one keeps what it saved.
            self._gate.writes_to_buffers = True
            self._inputs = []
        return output

    def _buffer_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.is_buffer]

    def _pack(self, tensor: Tensor) -> Saved:
        is_resident = address_of(tensor) in self._resident
        saved = Saved(tensor, None if is_resident else self)
        self._saved.append(weakref.ref(saved))
        return saved

    def let_go(self) -> bool:
        """Lets go of what was saved, if the layer can run again; called when nothing more is done
        to its inputs. Returns whether it did.
        """
        if not self._inputs or not all(entry.is_intact for entry in self._inputs):
            self._inputs = []
            return False
        self._is_let_go = True
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.region is not None:
                saved.tensor = None
        return True

    def run_again(self) -> None:
        """Makes what was let go of; nothing to do where it is there."""
        if not self._is_let_go:
            return
        self._is_let_go = False
        fresh: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            fresh.append(tensor.detach())
            return len(fresh)

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for context in self._ambient:
                stack.enter_context(context())
            if self._buffers is not None:
                stack.enter_context(self._buffers.in_place())
            inputs = [entry.again() for entry in self._inputs]
            args, kwargs = self._rebuild([inputs[place] for place in self._places])
            self._draw()
            # What this graph would need for a backward is taken out; nobody runs it.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _never))
            self._gate.original(*args, **kwargs)
        if len(fresh) != len(self._saved):
            self._fail(f"{len(fresh)} tensors", f"{len(self._saved)}")
        for reference, tensor in zip(self._saved, fresh, strict=True):
            saved = reference()
            if saved is not None and saved.region is not None:
                saved.tensor, saved.version = tensor, tensor._version
        self._inputs = []

    def _fail(self, found: str, expected: str) -> None:
        raise LayerError(
            f"The layer {self._gate.name!r} saved {found} for its backward when it was run again,"
            f" and {expected} the first time: it depends on something besides its inputs, its"
            " parameters, its buffers and random numbers. Set `recompute='none'` in the strategy,"
            " or let the layer do the same each time."
        )


class _Input:
    """A leaf of what a layer was called with, as it was."""

    __slots__ = ("_needs_gradient", "_value", "_version")

    def __init__(self, value: Any, version: int | None, needs_gradient: bool) -> None:
        self._value = value
        self._version = version
        self._needs_gradient = needs_gradient

    @classmethod
    def of(cls, leaf: Any) -> _Input:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Placeholder | nn.Parameter):
            return cls(leaf, None, False)
        return cls(leaf.detach(), leaf._version, leaf.requires_grad)

    @property
    def is_intact(self) -> bool:
        return self._version is None or self._value._version == self._version

    def again(self) -> Any:
        if self._version is None:
            return self._value
        alias = self._value.detach()
        # No leaf, so that the layer may write to it wherever it could the first time.
        return GradientBox(alias).open() if self._needs_gradient else alias


class _BuffersBefore:
    """What a layer's buffers held when it was called, for a layer that writes to them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = [slot for slot in slots if slot.is_buffer]
        self._values = [
            (slot, tensor.detach().clone())
            for slot in self._slots
            if isinstance(tensor := slot.get(), Tensor)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the layer has those buffers, and leaves its own alone."""
        with substituted(self._slots, {id(slot.get()): value for slot, value in self._values}):
            yield


def _keeps_statistics(layer: nn.Module) -> bool:
    # Their kernels write without the count of writes going up.
    return any(
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        for module in layer.modules()
    )


def address_of(tensor: Tensor) -> int:
    """What tells a tensor's memory from others'; a view has that of what it is a view of."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _never(_: int) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward")


def _ambient() -> list[Ambient]:
    """What else the code around the layer has switched: the precision."""
    contexts: list[Ambient] = []
    kinds = ["cpu"] + (["cuda"] if torch.cuda.is_initialized() else [])
    for kind in kinds:
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        contexts.append(partial(torch.autocast, kind, dtype=dtype, enabled=is_on))
    contexts.append(partial(_default_dtype, torch.get_default_dtype()))
    return contexts


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
