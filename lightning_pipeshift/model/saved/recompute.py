"""Drops the tensors that a layer saved for its backward, and recomputes them by a second run.

Recomputation in a stage's idle time (NUDT, "distributed parallel training method and system for
heterogeneous computing clusters") needs two properties that ``torch.utils.checkpoint`` lacks: the
second run happens *before* the backward needs it, while the stage waits for a gradient; and it has
the same bits, on whatever stage the layer is. For this, the second run uses the layer's own random
stream, and saved tensors are numbered in their order, so the n-th of the second run replaces the
n-th of the first.

Saved tensors are dropped when the stage's forward has ended, not earlier. By then user code has
made its changes to the layer's inputs (``residual += x``): if an input has changed since the layer
ran, the layer cannot be recomputed, and keeps its saved tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import NormBase, compiled_in
from lightning_pipeshift.compat.torch_private import version_of, without_torch_dispatch
from lightning_pipeshift.devices.streams import initialized_accelerator
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.gradients import like_a_result
from lightning_pipeshift.model.parameters.uses import Slot, slots_of, substituted
from lightning_pipeshift.model.saved.held_results import HeldResults, Key, LeftOut
from lightning_pipeshift.model.saved.hooks import saving
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.observer import Observer, Origins
from lightning_pipeshift.model.saved.saved_tensors import GIVEN, Saved, SavedTable, resident_in
from lightning_pipeshift.model.tensors.trees import (
    WithoutMemory,
    address_of,
    flatten,
    is_object,
    layout_of,
)
from lightning_pipeshift.model.user_state.preserve import ObjectState


class LayerCall:
    """One call of a layer, with PipeShift's hooks on its saved tensors.

    Args:
        gate: that of the layer.
        forward: runs the layer.
        table: the microbatch's saved tensors.
        observer: records the layer's saved tensors, if needed.
    """

    def __init__(
        self,
        gate: NamedLayer,
        forward: Callable[..., Any],
        table: SavedTable,
        observer: Observer | None = None,
    ) -> None:
        self.gate = gate
        self._forward = forward
        self._table = table
        self._observer = observer
        gate.bring_weights()
        self._resident = resident_in(gate.layer)
        self._count = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the layer."""
        with ExitStack() as stack:
            origins = None
            if self._observer is not None:
                origins = stack.enter_context(
                    self._observer.around(self.gate, args, kwargs, self._table)
                )
            pack = partial(self._pack, origins)
            # A saved tensor may be a view of a weight.
            unpack = Saved.get if self.gate.weights is None else partial(_unpacked, self.gate)
            stack.enter_context(saving(pack, unpack))
            return self._forward(*args, **kwargs)

    def _pack(self, origins: Origins | None, tensor: Tensor) -> Saved:
        number, self._count = self._count, self._count + 1
        if origins is not None and self._observer is not None:
            is_there = self._table.is_there_anyway(tensor, self._resident)
            maker, seconds = origins.maker_of(tensor), origins.seconds_of(tensor)
            self._observer.note(tensor, self.gate.index, number, maker, is_there, seconds)
        return self._save(tensor, number)

    def _save(self, tensor: Tensor, number: int) -> Saved:
        return self._table.save(tensor, self.gate.index, number, self._resident)


def _unpacked(gate: NamedLayer, saved: Saved) -> Tensor:
    """A saved tensor, and its layer's weights."""
    gate.bring_weights()
    return saved.get()


class RecomputedRegion(LayerCall):
    """One call of a layer that may be recomputed.

    Args:
        gate: that of the layer.
        forward: runs the layer; with the same random numbers each time.
        table: the microbatch's saved tensors.
        observer: records the layer's saved tensors, if needed.
        held: the numbers of saved tensors that are not dropped.
    """

    def __init__(
        self,
        gate: NamedLayer,
        forward: Callable[..., Any],
        table: SavedTable,
        observer: Observer | None = None,
        held: Set[int] = frozenset(),
    ) -> None:
        super().__init__(gate, forward, table, observer)
        self._held = held
        self._results = HeldResults(gate.makers_of_held.get(frozenset(held))) if held else None
        self._makers: dict[int, tuple[Key, int]] = {}
        """By number of a held tensor, its operation, and the address that it had."""
        # The precision that the code around the layer has set.
        self._autocasts = _autocasts()
        self._dtype = torch.get_default_dtype()
        self._slots = [slot for slot in slots_of(gate.layer) if slot.is_buffer]
        if gate.writes_to_buffers is None:
            # Their kernels write to buffers without raising the version counter.
            gate.writes_to_buffers = any(
                isinstance(module, NormBase) and module.track_running_stats
                for module in gate.layer.modules()
            )
        self._buffers: list[tuple[Slot, Tensor]] = []
        """The layer's buffers with what was in them before its call, if it writes to them."""
        if gate.writes_to_buffers:
            self._buffers = [(slot, x.detach().clone()) for slot, x in self._own_buffers()]
        self._saved: list[weakref.ref[Saved]] = []
        self._is_let_go = False
        self.num_bytes = 0
        """The number of bytes that it has dropped, as far as they were counted."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the layer for the first time."""
        self._keep_inputs(args, kwargs)
        versions = []
        if not self._buffers:
            versions = [(slot, x, version_of(x)) for slot, x in self._own_buffers()]
        with self._results or nullcontext():
            output = super().run(args, kwargs)
        self._note_makers()
        if any(slot.get() is not x or version_of(x) != version for slot, x, version in versions):
            # This is known from the next call on; this call keeps its saved tensors.
            self.gate.writes_to_buffers = True
            self._forget_inputs()
        return output

    def _own_buffers(self) -> list[tuple[Slot, Tensor]]:
        return [(slot, x) for slot in self._slots if (x := slot.get()) is not None]

    def _keep_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._rebuild = flatten((args, kwargs))
        # A tensor passed twice must be one tensor again: attention checks whether `query is key`.
        unique = {id(leaf): leaf for leaf in leaves}
        places = {identity: place for place, identity in enumerate(unique)}
        self._places = [places[id(leaf)] for leaf in leaves]
        self._inputs = [self._kept(leaf) for leaf in unique.values()]
        self._objects = [leaf for leaf in unique.values() if is_object(leaf)]
        self._before = ObjectState(*self._objects) if self._objects else None

    def _note_makers(self) -> None:
        """Remembers the operations of the held tensors for the layer's next call; or forgets them,
        if this call had others.
        """
        if self._results is None:
            return
        known, names = self.gate.makers_of_held, frozenset(self._held)
        found = {key for key, _ in self._makers.values()}
        if names not in known:
            known[names] = frozenset(found)
        elif found != known[names]:
            del known[names]

    def _kept(self, leaf: Any) -> tuple[Any, bool]:
        """A leaf of the arguments, which may be moved and is watched for writes if it is a tensor,
        and whether it needs a gradient.
        """
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter | WithoutMemory):
            return leaf, False
        saved = self._table.save(leaf, self.gate.index, GIVEN, frozenset())
        return saved, leaf.requires_grad

    def _save(self, tensor: Tensor, number: int) -> Saved:
        # The mode need not see what is done with a tensor in order to save it.
        with without_torch_dispatch() if self._is_seen(tensor) else nullcontext():
            saved = super()._save(tensor, number)
        # Its parameters and buffers are kept anyway, so a view of one takes no memory; and of other
        # tensors than dense ones not all is in one memory.
        if address_of(tensor) not in self._resident and tensor.layout is torch.strided:
            saved.maker = self
        if self._results is not None and number in self._held:
            key = self._results.maker_of(tensor)
            if key is not None:
                self._makers[number] = key, address_of(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _is_seen(self, tensor: Tensor) -> bool:
        """Whether a dispatch mode is active, and the tensor needs no dispatch of its own."""
        return self._results is not None and type(tensor) in (Tensor, nn.Parameter)

    def let_go(self) -> bool:
        """Drops the saved tensors, if the layer can be recomputed; called when user code makes no
        more changes to its inputs. Returns whether it dropped them.

        Raises:
            LayerError: earlier calls could be recomputed, but this one's inputs have been written
                to.
        """
        is_intact = bool(self._inputs) and all(
            kept.is_unwritten for kept, _ in self._inputs if isinstance(kept, Saved)
        )
        self.gate.keeps_inputs = is_intact
        if not is_intact:
            if self._is_let_go:
                raise LayerError(
                    f"An argument of the layer {self.gate.name!r} has been written to in place "
                    "after the layer ran, which was not so for earlier microbatches: it cannot "
                    "be recomputed. Set `recompute='none'` in the strategy, or write to a copy."
                )
            self._forget_inputs()
            return False
        if self._is_let_go:
            return True
        self._is_let_go = True
        self.num_bytes = 0
        counted: set[int] = set()
        held = {number: saved for number in self._held if (saved := self._saved_as(number))}
        blocks = {id(saved.block) for saved in held.values() if saved.block is not None}
        for number, reference in enumerate(self._saved):
            saved = reference()
            if saved is not None and saved.maker is self:
                # What shares the memory of a held tensor is held with it.
                if number in held or id(saved.block) in blocks:
                    continue
                if saved.block is not None and id(saved.block) not in counted:
                    counted.add(id(saved.block))
                    self.num_bytes += saved.block.num_bytes
                saved.let_go()
                saved.leave_block()
        return True

    def _saved_as(self, number: int) -> Saved | None:
        return self._saved[number]() if number < len(self._saved) else None

    @property
    def needed_bytes(self) -> int:
        """The bytes that running again takes: of what was dropped, and of what is swapped."""
        away = {
            id(block): block.num_bytes
            for number in self._makers
            if (saved := self._saved_as(number)) is not None
            and (block := saved.block) is not None
            and saved.tensor is None
        }
        return self.num_bytes + sum(away.values())

    def _left_out(self) -> LeftOut | None:
        """The mode that leaves out the operations whose results are held."""
        if self._results is None:
            return None
        held = {
            address: (key, saved.get)
            for number, (key, address) in self._makers.items()
            if (saved := self._saved_as(number)) is not None
        }
        return self._results.left_out(held, self.gate.left_out)

    def run_again(self) -> None:
        """Recomputes the dropped tensors; does nothing if they are present."""
        if not self._is_let_go:
            return
        self._is_let_go = False
        self._table.make_room(self.num_bytes, self.gate.index)
        fresh: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            with without_torch_dispatch() if self._is_seen(tensor) else nullcontext():
                fresh.append(tensor.detach())
            return len(fresh)

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for autocast in self._autocasts:
                stack.enter_context(autocast())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            # The layer does not change its own buffers.
            before = {id(slot.get()): value for slot, value in self._buffers}
            stack.enter_context(substituted([slot for slot, _ in self._buffers], before))
            if self._before is not None:
                # The layer may have added to its arguments: a cache of keys and values.
                stack.callback(ObjectState(*self._objects).put_back)
                self._before.put_back()
            inputs = [_again(kept, needs_gradient) for kept, needs_gradient in self._inputs]
            args, kwargs = self._rebuild([inputs[place] for place in self._places])
            left_out = self._left_out()
            # The saved tensors of this graph are moved to the first graph; its backward never runs.
            stack.enter_context(saving(pack, _never))
            if left_out is not None:
                stack.enter_context(left_out)
            self._forward(*args, **kwargs)
        if left_out is not None and not left_out.is_like_the_first:
            self._fail("the results of other operations", "not the same")
        if len(fresh) != len(self._saved):
            self._fail(f"{len(fresh)} tensors", f"{len(self._saved)}")
        for number, (reference, tensor) in enumerate(zip(self._saved, fresh, strict=True)):
            saved = reference()
            is_dropped = saved is not None and saved.tensor is None and saved.block is None
            if saved is not None and saved.maker is self and is_dropped:
                self._require_alike(saved, tensor)
                self._table.make_good(saved, tensor, self.gate.index, number)
        # Frees the memory reserved for recomputed tensors that are no longer needed.
        self._table.make_room(0, self.gate.index)
        self._forget_inputs()
        self._results = None

    def _forget_inputs(self) -> None:
        self._inputs, self._objects, self._before = [], [], None

    def _require_alike(self, saved: Saved, tensor: Tensor) -> None:
        assert saved.layout is not None
        _, shape, strides, dtype = saved.layout
        _, *found = layout_of(tensor)
        if [shape, dtype] != [found[0], found[2]]:
            self._fail(
                f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}",
                f"a {dtype} tensor of shape {shape}",
            )
        # Only the backward of compiled code depends on strides.
        if strides != found[1] and compiled_in(self.gate.layer):
            raise LayerError(
                f"The layer {self.gate.name!r} is compiled, and the code that ran when it was"
                " recomputed is not that of the first time: it saved a tensor of shape"
                f" {shape} with strides {found[1]}, and {strides} before. The compiler has made"
                " several versions of the layer, as it is called in different ways (a cache of keys"
                " and values that it fills, for instance; then set `use_cache=False`). Let it be"
                " called in one way, or set `recompute='none'` in the strategy."
            )

    def _fail(self, found: str, expected: str) -> None:
        raise LayerError(
            f"The layer {self.gate.name!r} saved {found} for its backward when it was recomputed, "
            f"and {expected} the first time: it depends on something other than its inputs, its "
            "parameters, its buffers and random numbers. Set `recompute='none'` in the strategy, "
            "or make the layer's result depend on these only."
        )


def _again(kept: Any, needs_gradient: bool) -> Any:
    """A leaf of a layer's arguments for its second run."""
    if not isinstance(kept, Saved):
        return kept
    alias = kept.get().detach()
    # Not a leaf of the graph, so that the layer may write to it as in the first run.
    return like_a_result(alias) if needs_gradient else alias


def _never(_: int) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward")


def _autocasts() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts in which autocast is as it is now."""
    accelerator = initialized_accelerator()
    return [
        partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
        )
        for kind in ["cpu", *([accelerator] if accelerator else [])]
    ]
