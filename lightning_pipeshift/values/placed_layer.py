"""A layer that one stage runs, and the forward that replaces its own during a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import (
    COMPILED_CALL,
    hook_tables,
    plain_call,
    set_hook_tables,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.user_state.copies import method_of_copy
from lightning_pipeshift.values.layer_contracts import flagged_in, is_heard
from lightning_pipeshift.values.layer_state import Attribute, Watch, as_dict, buffers_by_place
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.program import OUTSIDE
from lightning_pipeshift.values.value import PLACED, running

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core


class PlacedLayer:
    """What every stage knows of a layer.

    Args:
        module: the layer.
        number: its number.
        name: its name in the whole module.
    """

    def __init__(self, module: nn.Module, number: int, name: str) -> None:
        self.module, self.number, self.name = module, number, name
        self.own_forward: Any = module.__dict__.get("forward")
        """The forward that user code has given to the layer itself; ``None``: its class's."""
        self.forward: Callable[..., Any] = module.forward
        """What the owner runs."""
        self._replaced: tuple[str, Any] = "forward", self.own_forward
        self.parameters = list(module.named_parameters())
        self.buffers = list(module.buffers())
        places = buffers_by_place(module)
        self._places = list(places)
        # The tables of their modules, to find them fast, and what was found there last.
        self._tables = [as_dict(place.table(module)) for place in places]
        self._in_places: list[Any] = list(places.values())
        self.tensors = [*(x for _, x in self.parameters), *self.buffers]
        """Its parameters and buffers."""
        self.modules = list(module.named_modules())
        self.family = tuple((name, type(each)) for name, each in self.modules)
        """The same for layers with the same modules."""
        self._foreign: dict[int, list[tuple[str, Tensor]]] = {}
        self.flagged = flagged_in(module)
        self.state: list[Attribute] = []
        """The attributes that its calls change, as far as they are known."""
        self.replaced: tuple[Attribute, ...] = ()
        """Where other tensors are in the places of its parameters now."""
        self.shared: dict[Attribute, Tensor] = {}
        """The buffers that other layers have, too."""
        self.kind = 0
        """The number of its kind, when it was called last."""
        self.watch: Watch | None = None
        """Tells when its settings change."""

    def replaced_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers in whose places user code has put other tensors since this was asked last,
        and these. Those that the layer's own calls replace are not among them.
        """
        tables = zip(self._tables, self._places, strict=True)
        there = [table.get(place.name) for table, place in tables]
        if all(map(is_, self._in_places, there)):
            return []
        found: list[tuple[Tensor, Tensor]] = []
        for at, now in enumerate(there):
            if now is self._in_places[at] or self._places[at] in self.state:
                continue
            # A value becomes a tensor when steps have settled what user code keeps.
            if isinstance(now, Tensor) and type(now) not in PLACED:
                found.append((self._in_places[at], now))
                self._in_places[at] = now
        for held in (self.buffers, self.tensors):
            for before, now in found:
                held[:] = [now if x is before else x for x in held]
        return found

    def foreign(self, stage: int, owners: Mapping[Tensor, int]) -> list[tuple[str, Tensor]]:
        """Its parameters, by name, that another stage owns than that which runs it.

        Args:
            stage: the latter.
            owners: of all parameters.
        """
        found = self._foreign.get(stage)
        if found is None:
            found = [each for each in self.parameters if owners[each[1]] != stage]
            self._foreign[stage] = found
        return found

    def forget_owners(self) -> None:
        """Called when parameters have other owners."""
        self._foreign.clear()

    def watch_of(self, module: nn.Module) -> Watch:
        """What watches the attributes of the layer, or of a copy of it."""
        return Watch(module, self.state, self.shared)

    def find_flagged(self) -> bool:
        """Finds the modules and parameters again; returns whether they are others now."""
        before, self.flagged = self.flagged, flagged_in(self.module)
        return [list(map(id, each)) for each in before] != [
            list(map(id, each)) for each in self.flagged
        ]

    def hooked(self) -> tuple[str, ...]:
        """The names of the modules inside of it with hooks that look at what they get or return."""
        return tuple([name for name, module in self.modules if name and is_heard(module)])

    def own_hooks(self) -> tuple[int, ...]:
        """Identifies the hooks that an owner runs with the layer."""
        if self._replaced[0] == "forward":
            return ()
        return tuple(id(hook) for table in hook_tables(self.module) for hook in table.values())

    def plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        """What an owner runs of the layer, not compiled; or the same of a copy of the layer."""
        if self._replaced[0] == "forward":
            return module.forward
        set_hook_tables(module, hook_tables(self.module))
        return plain_call(module)

    def place(self, core: Core) -> None:
        """Puts a forward into the layer that its owner runs, if there is none: user code may set
        its own between two steps. It replaces the whole call of a compiled layer.
        """
        attributes = self.module.__dict__
        slot = COMPILED_CALL if attributes.get(COMPILED_CALL) else "forward"
        own = attributes.get(slot)
        if not isinstance(own, _PlacedForward):
            self.restore()
            self.own_forward = attributes.get("forward")
            self._replaced = slot, own
            self.forward = own or self.plain_forward(self.module)
            self.watch = None
            attributes[slot] = _PlacedForward(core, self)

    def restore(self) -> None:
        """Gives the layer its own forward back."""
        attributes, (slot, own) = self.module.__dict__, self._replaced
        if isinstance(attributes.get(slot), _PlacedForward):
            del attributes[slot]
            if own is not None:
                attributes[slot] = own


class _PlacedForward:
    """The ``forward`` of a layer that its owner runs."""

    # Without a `__dict__`, in the arguments of a call, it is no object with tensors in it.
    __slots__ = ("_core", "_layer")

    def __init__(self, core: Core, layer: PlacedLayer) -> None:
        self._core, self._layer = core, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        core, layer = self._core, self._layer
        microbatch, number = running(), layer.number
        if microbatch is not None:
            assert isinstance(microbatch, Microbatch)
            if microbatch.turn == OUTSIDE and self._averages((*args, *kwargs.values())):
                return layer.forward(*args, **kwargs)
            if core.sees_parameters:
                return microbatch.layer(number, args, kwargs)
            with core.seeing_parameters():
                return microbatch.layer(number, args, kwargs)
        is_elsewhere = core.owners(number, 0) != core.stage
        # On fake tensors an operation could not use the layer's weights, which one stage has.
        if core.finder.is_running or (core.operation is not None and is_elsewhere):
            raise LayerError(
                f"`{core.operation}` calls the layer `{layer.name}`, which stage"
                f" {core.owners(number, 0)} owns, and runs at stage {core.stage}. Make the module"
                " that contains both one layer."
            )
        return layer.forward(*args, **kwargs)

    def _averages(self, given: Iterable[Any]) -> bool:
        """Whether a call between steps is a part of the code there: of a module that has no
        parameters and is given others. Each stage works on what it has of them.
        """
        is_given = any(isinstance(x, nn.Module) for x in given)
        return is_given and not self._layer.parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For a copy of the layer: its own forward."""
        own = self._layer.own_forward
        if own is not None:
            return copy.deepcopy(own, memo)
        copied = memo.get(id(self._layer.module))
        return self if copied is None else method_of_copy(copied, "forward", memo)
