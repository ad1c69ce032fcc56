"""What a layer keeps in its attributes between calls.

``self.aux_loss = ...`` in a layer's forward, a list that it appends to, a counter: the layer runs
at one stage, and every stage may read the attribute. So attributes that a call changes are treated
as if they were passed to the layer and returned by it: every stage has them, with values in the
place of tensors. The run on fake tensors shows which attributes these are; the real run may change
no others.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import (
    COMPILED_CALL,
    COMPILER_OF,
    FLAT_WEIGHTS,
    FORWARD_HOOKS,
    MODULE_TABLES,
    buffers_of,
    parameters_of,
)
from lightning_pipeshift.values.arguments import is_node, parts_of
from lightning_pipeshift.values.value import Value, version_in

# Attributes that are no state: they are the same on all stages, or have an own way to change.
NO_STATE = frozenset(
    {
        *MODULE_TABLES,
        *nn.Module().__dict__,
        *FLAT_WEIGHTS,
        "forward",
        COMPILED_CALL,
        COMPILER_OF,
    }
)
_PLAIN = (int, float, bool, str, bytes, type(None))


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return as_dict(buffers_of(module))


def as_dict(table: Any) -> dict[str, Any]:
    """A table of a module; of a ``ScriptModule``, whose tables are no dictionaries, a copy."""
    return table if isinstance(table, dict) else dict(table.items())


class _Missing(enum.Enum):
    ATTRIBUTE = 0


class Attribute(NamedTuple):
    """An attribute of a module in a layer.

    Args:
        path: the module's name in the layer.
        name: the attribute's.
        is_buffer: whether it is a buffer.
        is_parameter: whether it stands in a parameter's place.
    """

    path: str
    name: str
    is_buffer: bool
    is_parameter: bool = False

    def get(self, layer: nn.Module) -> Any:
        """Its value; ``_Missing`` if there is none."""
        return as_dict(self.table(layer)).get(self.name, _Missing.ATTRIBUTE)

    def set(self, layer: nn.Module, value: Any) -> None:
        """Sets it, or removes it: code may ask for it with ``hasattr``."""
        table = self.table(layer)
        if value is _Missing.ATTRIBUTE:
            table.pop(self.name, None)
        else:
            table[self.name] = value

    def table(self, layer: nn.Module) -> Any:
        """The table of the module that has it."""
        module = layer.get_submodule(self.path)
        if self.is_parameter:
            return parameters_of(module)
        return buffers_of(module) if self.is_buffer else module.__dict__


def replaced_parameters(layer: nn.Module) -> list[Attribute]:
    """Where a layer has other tensors in the places of parameters, for one call
    (``torch.func.functional_call``).
    """
    return [
        Attribute(path, name, False, is_parameter=True)
        for path, module in layer.named_modules()
        for name, x in parameters_of(module).items()
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
    ]


class Watch:
    """Tells which attributes of a layer's modules have changed since it last looked, and what is in
    them. Writes into a buffer do not count, except into those of ``shared``: other buffers stay
    with the layer's owner, as its parameters do.

    Args:
        layer: the layer.
        without: attributes that are not watched.
        shared: the buffers that other layers have, too.
    """

    def __init__(
        self, layer: nn.Module, without: Collection[Attribute], shared: Collection[Attribute]
    ) -> None:
        self._layer, self._without, self._shared = layer, without, shared
        self.values: set[Attribute] = set()
        """The attributes in which user code has put values: a hook of the layer, perhaps."""
        self._begin()

    def _begin(self) -> None:
        # All that is watched is kept here, so no `id` is used again meanwhile.
        seen: dict[int, Any] = {}
        self._marks: dict[Attribute, Any] = {}
        # The modules' tables, and their sizes.
        self._tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        # For each attribute: in which table, its name there, and what it is.
        tables: list[dict[str, Any]] = []
        names: list[str] = []
        values: list[Any] = []
        self._watched = tables, names, values
        # The same for parameters.
        self._places: tuple[list[dict[str, Any]], list[str], list[Any]] = [], [], []
        # What else is compared, by identity and by value.
        self._inside: list[tuple[Any, tuple[Any, ...]]] = []
        self._hook_tables: list[dict[int, Any]] = []
        self._contents: list[tuple[Callable[[], Any], Any]] = []
        for path, module in self._layer.named_modules():
            buffers, parameters = _buffers_of(module), as_dict(parameters_of(module))
            for table, is_buffer in ((module.__dict__, False), (buffers, True)):
                own = {Attribute(path, name, is_buffer): x for name, x in table.items()}
                watched = [(name, x) for name, x in own.items() if self._is_watched(name)]
                self._tables.append(table)
                self._sizes.append(len(table))
                for attribute, x in watched:
                    tables.append(table)
                    names.append(attribute.name)
                    values.append(x)
                    mark_of = id if is_buffer else partial(mark, seen=seen)
                    self._marks[attribute] = mark_of(x)
                    if isinstance(x, Value):
                        self.values.add(attribute)
            for name in FORWARD_HOOKS if path else ():
                tables.append(module.__dict__)
                names.append(name)
                values.append(module.__dict__.get(name))
                self._hook_tables.append(values[-1])
            for name, x in parameters.items():
                self._places[0].append(parameters)
                self._places[1].append(name)
                self._places[2].append(x)
            if any(Attribute(path, name, True) in self._shared for name in buffers):
                # Norms write to some of their buffers without counting that: one is for all.
                look = partial(_versions, buffers)
                self._contents.append((look, look()))
                for name in buffers:
                    attribute = Attribute(path, name, True)
                    if self._is_watched(attribute):
                        self._marks[attribute] = id(buffers[name]), *look()
        for x in seen.values():
            if isinstance(x, Tensor):
                self._contents.append((partial(version_in, x), version_in(x)))
            elif isinstance(x, np.ndarray):
                self._contents.append((x.tobytes, x.tobytes()))
            else:
                self._inside.append((x, _inside(x)))

    def _is_watched(self, attribute: Attribute) -> bool:
        is_state = attribute.is_buffer or attribute.name not in NO_STATE
        return is_state and attribute not in self._without

    def _is_same(self) -> bool:
        if list(map(len, self._tables)) != self._sizes:
            return False
        tables, names, watched = self._watched
        if not all(map(is_, map(dict.get, tables, names), watched)):
            return False
        for x, before in self._inside:
            now = _inside(x)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return not self._contents or all(look() == was for look, was in self._contents)

    def has_hooks(self) -> bool:
        """Whether modules inside of the layer have hooks on their forward."""
        return any(self._hook_tables)

    def are_parameters_replaced(self) -> bool:
        """Whether other tensors are in the places of parameters than when this was asked last."""
        tables, names, before = self._places
        if all(map(is_, map(dict.get, tables, names), before)):
            return False
        self._places = tables, names, list(map(dict.get, tables, names))
        return True

    def look(self) -> set[Attribute]:
        """Returns the attributes that have changed."""
        if self._is_same():
            return set()
        kept, marks = (self._watched, self._inside), self._marks
        _, _, in_places = self._places
        self._begin()
        if len(in_places) == len(self._places[2]):
            # Only who asks for them sees others.
            self._places = *self._places[:2], in_places
        del kept
        both = {*marks, *self._marks}
        return {name for name in both if marks.get(name) != self._marks.get(name)}


def _versions(buffers: dict[str, Tensor | None]) -> list[int]:
    return [version_in(x) for x in buffers.values() if x is not None]


def buffers_by_place(layer: nn.Module) -> dict[Attribute, Tensor]:
    """The buffers of a layer's modules, by the attributes that they are."""
    return {
        Attribute(path, name, True): buffer
        for path, module in layer.named_modules()
        for name, buffer in _buffers_of(module).items()
        if buffer is not None
    }


def shared_buffers(layers: Sequence[nn.Module]) -> list[dict[Attribute, Tensor]]:
    """The buffers of each layer that other layers have, too."""
    found = list(map(buffers_by_place, layers))
    uses = Counter(x for table in found for x in {id(buffer) for buffer in table.values()})
    return [{name: x for name, x in table.items() if uses[id(x)] > 1} for table in found]


def _inside(node: Any) -> tuple[Any, ...]:
    """What a container or an object holds, fast."""
    items = (*node, *node.values()) if isinstance(node, dict) else ()
    if isinstance(node, list | deque | set):
        items = tuple(node)
    table = getattr(node, "__dict__", None)
    return (*items, *table, *table.values()) if table else items


def mark(x: Any, seen: dict[int, Any]) -> Any:
    """Hashable: what tells whether a value was changed meanwhile.

    Args:
        x: the value.
        seen: gets the tensors and the containers and objects in it, by their ``id``.
    """
    if isinstance(x, Tensor):
        seen[id(x)] = x
        return id(x), version_in(x)
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, tuple):
        return type(x), *(mark(part, seen) for part in x)
    if not is_node(x) or id(x) in seen:
        return id(x)
    seen[id(x)] = x
    return id(x), *((place, mark(part, seen)) for place, part in parts_of(x))


def with_state(
    layer: nn.Module,
    forward: Callable[..., Any],
    attributes: Sequence[Attribute],
    watch: Watch,
    changed: set[Attribute],
) -> Callable[..., tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
    """A layer's forward that gets attributes as its first argument, and also returns them; and the
    other attributes that it has changed, with their values.

    Args:
        layer: the layer.
        forward: its forward.
        attributes: those that it gets.
        watch: tells of the others.
        changed: gets the others, even if the forward fails.
    """

    def run(state: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        own = [(each, each.get(layer)) for each in attributes if each.is_parameter]
        for attribute, value in zip(attributes, state, strict=True):
            attribute.set(layer, value)
        try:
            result = forward(*args, **kwargs)
            after = tuple(attribute.get(layer) for attribute in attributes)
        finally:
            for attribute, value in own:
                attribute.set(layer, value)
            changed.update(watch.look())
        others = tuple((attribute, attribute.get(layer)) for attribute in sorted(changed))
        return result, after, others

    return run


def run_twice(
    layer: nn.Module,
    forward: Callable[..., Any],
    attributes: Sequence[Attribute],
    again: Callable[[], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """A layer's forward for one call, which the backward runs again, in place of tensors that it
    would keep. The second run finds the attributes of the first, and leaves none behind.

    Args:
        layer: the layer.
        forward: its forward.
        attributes: those that it may change.
        again: makes the context of the second run.
    """
    given: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        found = [attribute.get(layer) for attribute in attributes]
        if not given:
            given.append(found)
            return forward(*args, **kwargs)
        for attribute, value in zip(attributes, given[0], strict=True):
            attribute.set(layer, value)
        try:
            with again():
                return forward(*args, **kwargs)
        finally:
            for attribute, value in zip(attributes, found, strict=True):
                attribute.set(layer, value)

    return run
