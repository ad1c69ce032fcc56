"""Keeps the state that user code stores on the LightningModule the same on every stage.

Only the last stage runs the code after the last layer. The changes that this code makes
(``self.outputs.append(...)``, a metric's state, a counter, the attributes of a meter) are found by
comparing the state before and after, and repeated on every rank. So hooks at the end of an epoch,
and what earlier stages compute in the next step, see the same state on all ranks.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import MODULE_TABLES, buffers_of, version_of
from lightning_pipeshift.model.execution.transfer import to_device
from lightning_pipeshift.model.execution.trees import map_leaves
from lightning_pipeshift.model.parameters.remote_tensor import RemoteTensor
from lightning_pipeshift.model.trace.placeholder import Placeholder
from lightning_pipeshift.model.user_state.attributes import (
    attributes_of,
    is_user_object,
    remove_attribute,
    set_attribute,
)
from lightning_pipeshift.model.user_state.generators import random_state, set_random_state

Path = tuple[str, str]
_DEPTH = 3
# In longer containers, plain values and tensors are compared by identity only: inspecting each one
# at every step would take too long.
_WIDTH = 256
# Longer ones that an object has (the samples of a data set) are not looked at.
_LONGEST = 1_000_000
_SIMPLE = frozenset([type(None), bool, int, float, complex, str, bytes, Tensor])
# A copy of a larger array at every step would be too expensive.
_LARGEST_ARRAY_BYTES = 1 << 20


class Grown(NamedTuple):
    """A list that only got longer: its length before, and the added items."""

    length: int
    items: list[Any]


class Entries(NamedTuple):
    """A dict, list or tuple of which some entries changed."""

    changes: dict[Any, Any]


class Attributes(NamedTuple):
    """An object of user code some attributes of which changed."""

    kind: str
    """The name of its class."""
    changes: dict[str, Any]
    gone: tuple[str, ...]


class Drawn(NamedTuple):
    """A generator of random numbers that has gone on."""

    state: Any


class Several(NamedTuple):
    """Changes of one value, in order."""

    changes: list[Any]


class Replaced(NamedTuple):
    """A value that was replaced by another one."""

    value: Any


class _Mark(NamedTuple):
    """The state of a value, with enough detail to detect changes."""

    kind: str
    value: Any
    detail: Any = None


@dataclass
class ModuleState:
    """The state that user code keeps on the modules outside of layers.

    Args:
        modules: those modules by qualified name.
        ignored: attribute names that belong to the framework.
    """

    modules: dict[str, nn.Module]
    ignored: frozenset[str]
    _marks: dict[Path, _Mark] = field(default_factory=dict)

    def remember(self) -> None:
        """Records the present state."""
        self._marks = {path: _mark(value, _DEPTH) for path, value in self._attributes()}

    def changes(self) -> dict[Path, Any]:
        """The differences from the last recorded state: values that can be sent. Their tensors stay
        on their device.
        """
        found: dict[Path, Any] = {}
        for path, value in self._attributes():
            change = _change(self._marks.get(path), value, _DEPTH)
            if change is not None:
                found[path] = map_leaves(_detached, change)
        return found

    def apply(self, changes: dict[Path, Any], device: torch.device) -> None:
        """Applies the changes of the last stage here, to the last recorded state."""
        for (module_name, name), change in changes.items():
            module = self.modules[module_name]
            buffers = buffers_of(module)
            table: Any = buffers if name in buffers else module.__dict__
            current = table.get(name)
            change = to_device(change, device)
            if (
                name in buffers
                and isinstance(current, Tensor)
                and isinstance(change, Replaced)
                and current.shape == change.value.shape
            ):
                with torch.no_grad():
                    current.copy_(change.value)
            else:
                table[name] = _applied(current, change)

    def resolve(self, value_of: Callable[[Any], Any]) -> None:
        """Replaces placeholders that user code has kept by their values.

        Args:
            value_of: returns the value that a placeholder represents.
        """
        for module in self.modules.values():
            for table in (module.__dict__, buffers_of(module)):
                for name, value in list(table.items()):
                    if name not in self.ignored and name not in MODULE_TABLES:
                        table[name] = _resolved(value, value_of, _DEPTH)

    def _attributes(self) -> Iterator[tuple[Path, Any]]:
        for module_name, module in self.modules.items():
            for name, value in module.__dict__.items():
                if name not in self.ignored:
                    yield (module_name, name), value
            for name, value in buffers_of(module).items():
                if value is not None:
                    yield (module_name, name), value


def _resolved(value: Any, value_of: Callable[[Any], Any], depth: int) -> Any:
    if isinstance(value, Placeholder):
        return value_of(value)
    if isinstance(value, list | deque | dict) and _is_simple(value):
        return value
    if depth and isinstance(value, list | deque):
        for place, entry in enumerate(value):
            value[place] = _resolved(entry, value_of, depth - 1)
    elif depth and isinstance(value, dict):
        for key, entry in value.items():
            value[key] = _resolved(entry, value_of, depth - 1)
    elif depth and type(value) is tuple:
        return tuple(_resolved(entry, value_of, depth - 1) for entry in value)
    elif depth and is_user_object(value):
        for name, entry in attributes_of(value).items():
            resolved = entry if _is_long(entry) else _resolved(entry, value_of, depth - 1)
            if resolved is not entry:
                set_attribute(value, name, resolved)
    return value


def _is_simple(container: Any) -> bool:
    """Whether a container is wide, and has no entries in which user code may have kept others."""
    entries = container.values() if isinstance(container, dict) else container
    return len(container) > _WIDTH and _SIMPLE.issuperset(map(type, entries))


def _mark(value: Any, depth: int) -> _Mark:
    if isinstance(value, Tensor):
        # The tensor itself is kept, so that its identity is not reused.
        version = 0 if value.is_inference() else version_of(value)
        return _Mark("tensor", value, (version, value.clone() if value.is_inference() else None))
    if value is None or isinstance(value, int | float | str | bytes | complex):
        return _Mark("plain", value)
    if (state := random_state(value)) is not None:
        return _Mark("random", value, state)
    if isinstance(value, list | deque | tuple) and depth:
        return _Mark("list", value, (list(value), _marks(enumerate(value), len(value), depth)))
    if isinstance(value, dict) and depth:
        return _Mark("dict", value, (dict(value), _marks(value.items(), len(value), depth)))
    if isinstance(value, set) and depth:
        return _Mark("set", value, set(value))
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return _Mark("array", value, value.tobytes())
    if depth and is_user_object(value):
        own = attributes_of(value).items()
        return _Mark("object", value, {k: _mark(v, depth - 1) for k, v in own if not _is_long(v)})
    return _Mark("other", value)


def _marks(entries: Iterable[tuple[Any, Any]], width: int, depth: int) -> dict[Any, _Mark]:
    """The marks of a container's entries, as far as these are not compared by identity."""
    inner = object if width <= _WIDTH else (list, deque, dict, set)
    return {key: _mark(entry, depth - 1) for key, entry in entries if isinstance(entry, inner)}


def _is_long(value: Any) -> bool:
    return isinstance(value, list | deque | tuple | dict | set) and len(value) > _LONGEST


def _change(mark: _Mark | None, value: Any, depth: int) -> Any:
    # Tensors of other stages have been changed there: this code runs on that stage as well.
    if isinstance(value, Placeholder | RemoteTensor):
        return None
    if mark is not None and mark.kind == "plain":
        is_same = type(value) is type(mark.value) and (value == mark.value or value != value)
    else:
        is_same = mark is not None and value is mark.value
    if mark is None or not is_same:
        return Replaced(value) if _can_be_sent(value) else None
    if mark.kind == "plain":
        return None
    if mark.kind == "tensor":
        version, before = mark.detail
        changed = (
            not torch.equal(before, value) if before is not None else version_of(value) != version
        )
        return Replaced(value) if changed else None
    if mark.kind == "list":
        entries, marks = mark.detail
        length = len(entries)
        has_all = len(value) >= length and (
            len(marks) == length or all(map(operator.is_, entries, value))
        )
        if not has_all:
            return _replaced(value)
        changes = _changes(marks, ((place, value[place]) for place in marks), depth)
        if changes and (
            len(value) > length or any(isinstance(change, Replaced) for change in changes.values())
        ):
            return _replaced(value)
        if changes:
            return Entries(changes)
        items = list(islice(value, length, None))
        return Grown(length, items) if items and _travels(items) else None
    if mark.kind == "dict":
        entries, marks = mark.detail
        if not entries.keys() <= value.keys():
            return _replaced(value)
        looked_at: Iterable[Any] = value
        if len(value) == len(entries) and all(map(operator.is_, entries.values(), value.values())):
            looked_at = marks
        changes = _changes(
            marks,
            (
                (key, value[key])
                for key in looked_at
                if key in marks or key not in entries or value[key] is not entries[key]
            ),
            depth,
        )
        return Entries(changes) if changes else None
    if mark.kind == "random":
        state = random_state(value)
        return None if state is None or state == mark.detail else Drawn(state)
    if mark.kind == "object":
        own = attributes_of(value)
        marks = mark.detail
        changes = _changes(marks, ((k, v) for k, v in own.items() if not _is_long(v)), depth)
        gone = tuple(name for name in marks if name not in own)
        return Attributes(type(value).__qualname__, changes, gone) if changes or gone else None
    if mark.kind == "set":
        return _replaced(value) if value != mark.detail else None
    if mark.kind == "array":
        return _replaced(value) if value.tobytes() != mark.detail else None
    return None


def _changes(
    marks: Mapping[Any, _Mark], entries: Iterable[tuple[Any, Any]], depth: int
) -> dict[Any, Any]:
    """The changes of the entries of a container or an object."""
    found = ((key, _change(marks.get(key), entry, depth - 1)) for key, entry in entries)
    return {key: change for key, change in found if change is not None}


def _replaced(container: Any) -> Replaced | None:
    # A shallow copy keeps the type: a deque keeps its maximum length, a Counter remains a Counter.
    return Replaced(copy.copy(container)) if _travels(container) else None


def _travels(container: Any) -> bool:
    """Whether a container's items can be sent. Unlike what an attribute refers to, they may be any
    objects of user code: a copy of a record that was added to a list is as good as the record.
    """
    return _can_be_sent(container) or _is_pickled(container)


def _is_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _can_be_sent(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is plain data, or an object of user code that has plain data only."""
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(_can_be_sent(entry, depth) for entry in value)
    if isinstance(value, dict):
        return all(_can_be_sent(entry, depth) for entry in value.values())
    if depth and is_user_object(value):
        own = attributes_of(value).values()
        is_plain = all(_can_be_sent(v, depth - 1) and not isinstance(v, Tensor) for v in own)
        return is_plain and _is_pickled(value)
    return not isinstance(value, Placeholder | RemoteTensor) and (
        value is None
        or isinstance(value, int | float | str | bytes | complex | Tensor | Enum)
        or type(value).__module__ == "numpy"
    )


def combine(earlier: dict[Any, Any], later: Mapping[Any, Any]) -> None:
    """Adds later changes to earlier ones.

    Args:
        earlier: the changes of a state, by path.
        later: those of the state after them.
    """
    for path, change in later.items():
        earlier[path] = _combined(earlier[path], change) if path in earlier else change


def _combined(earlier: Any, later: Any) -> Any:
    if isinstance(later, Replaced | Drawn):
        return later
    if isinstance(earlier, Several):
        earlier.changes[-1] = _combined(earlier.changes[-1], later)
        return earlier
    if isinstance(earlier, Grown) and isinstance(later, Grown):
        if later.length == earlier.length + len(earlier.items):
            earlier.items.extend(later.items)
            return earlier
    elif isinstance(earlier, Attributes) and isinstance(later, Attributes):
        for name in later.gone:
            earlier.changes.pop(name, None)
        combine(earlier.changes, later.changes)
        return earlier._replace(gone=(*earlier.gone, *later.gone))
    elif isinstance(earlier, Entries) and isinstance(later, Entries):
        combine(earlier.changes, later.changes)
        return earlier
    return Several([earlier, later])


def _applied(current: Any, change: Any) -> Any:
    if isinstance(change, Replaced):
        return change.value
    if isinstance(change, Several):
        for each in change.changes:
            current = _applied(current, each)
        return current
    if isinstance(change, Grown):
        if not isinstance(current, list | deque):
            return list(change.items)
        while len(current) > change.length:
            current.pop()
        current.extend(change.items)
        return current
    if isinstance(change, Drawn):
        if random_state(current) is not None:
            set_random_state(current, change.state)
        return current
    if isinstance(change, Attributes):
        # One that is there on some ranks only (a connection to a server) stays as it is.
        if is_user_object(current) and type(current).__qualname__ == change.kind:
            for name in change.gone:
                remove_attribute(current, name)
            for name, entry in change.changes.items():
                set_attribute(current, name, _applied(getattr(current, name, None), entry))
        return current
    assert isinstance(change, Entries)
    if isinstance(current, tuple):
        # Something inside of an entry changed.
        for key, entry in change.changes.items():
            _applied(current[key], entry)
        return current
    for key, entry in change.changes.items():
        before = current.get(key) if isinstance(current, dict) else current[key]
        current[key] = _applied(before, entry)
    return current


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
