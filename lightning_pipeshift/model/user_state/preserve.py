"""Undoes a step's changes to Python objects."""

from __future__ import annotations

import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.lightning_names import OWNERS, trainer_of

# Python modules whose objects are not searched: those of frameworks, and of Python's base classes.
_FRAMEWORKS = frozenset(
    [
        *("torch", "torchmetrics", "torchvision", "transformers", "timm", "numpy"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_pipeshift"),
        *("builtins", "abc", "typing"),
    ]
)
# How many references deep to search from a module's attributes, a class or a user's Python module.
_DEPTH = 4
_LONGEST = 100_000
_MOST_OBJECTS = 200_000


@contextmanager
def preserved(modules: Iterable[nn.Module]) -> Iterator[list[Any]]:
    """Context after which Python objects have their earlier state: the modules' attributes, those
    of the Trainer (``should_stop``), containers and objects that the modules refer to, the classes
    of user code among them, and the variables of the Python modules that define these classes. The
    objects themselves remain the same.

    The values of tensors are not restored, nor is state outside of the process. Gets the iterators
    among the objects: what they have yielded cannot be put back.
    """
    state = ObjectState(frameworks_too=False)
    modules = list(modules)
    for module in modules:
        state.remember_module(module)
    for trainer in filter(None, map(trainer_of, modules[:1])):
        state.remember_attributes(trainer)
    for kind in dict.fromkeys(base for module in modules for base in type(module).__mro__):
        state.remember_class(kind)
    try:
        yield state.iterators
    finally:
        state.put_back()


class ObjectState:
    """The state of objects, to be restored: for example of a cache of keys and values, before a
    second call of a layer that extends it. The values of tensors are not restored.

    Args:
        values: the objects.
        frameworks_too: whether to search objects of frameworks like the user's own.
    """

    def __init__(self, *values: Any, frameworks_too: bool = True) -> None:
        self._frameworks_too = frameworks_too
        self._seen: dict[int, Any] = {}
        self._restore: list[Callable[[], object]] = []
        self._num_left = _MOST_OBJECTS
        self.iterators: list[Any] = []
        for value in values:
            self._remember(value, _DEPTH)

    def put_back(self) -> None:
        """Restores the state; may be called once only."""
        for restore in reversed(self._restore):
            restore()
        # The closures and this object refer to each other, and to all found objects: for example
        # weak references to parameters, which must not outlive the step.
        self._restore.clear()
        self._seen.clear()

    def remember_module(self, module: nn.Module) -> None:
        """Records a module's attributes, and what they refer to, without its submodules."""
        self._seen.update((id(part), part) for part in module.modules())
        self._remember_dict(module.__dict__, _DEPTH)

    def remember_attributes(self, owner: Any) -> None:
        """Records an object's attributes, and nothing that they refer to."""
        self._remember_dict(vars(owner), 0)

    def _remember(self, value: Any, depth: int) -> None:
        """Records what a value refers to."""
        if (
            depth < 0
            or self._num_left <= 0
            or isinstance(
                value, type | str | bytes | int | float | complex | FunctionType | MethodType
            )
        ):
            return
        if value is None or isinstance(value, Tensor | ModuleType) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        self._num_left -= 1
        if isinstance(value, dict):
            self._remember_dict(value, depth)
        elif isinstance(value, list | deque):
            items = list(value)
            self._restore.append(lambda: _refill(value, items))
            for item in items[:_LONGEST]:
                self._remember(item, depth - 1)
        elif isinstance(value, set):
            self._restore.append(partial(_refill_set, value, set(value)))
        elif isinstance(value, tuple):
            for item in value:
                self._remember(item, depth - 1)
        elif (restore := _restore_generator(value)) is not None:
            self._restore.append(restore)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes < _LONGEST and value.dtype != object:
                copied = value.copy()
                self._restore.append(lambda: np.copyto(value, copied))
        elif hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            self.iterators.append(value)
        elif (
            self._frameworks_too
            or isinstance(value, nn.Module)
            or not _is_framework(type(value).__module__)
        ):
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self._remember_dict(attributes, depth)
            self._remember_slots(value, depth)

    def _remember_slots(self, value: Any, depth: int) -> None:
        before = _in_slots(value)

        def restore() -> None:
            for name, entry in _in_slots(value).items():
                if name not in before:
                    object.__delattr__(value, name)
                elif entry is not before[name]:
                    object.__setattr__(value, name, before[name])
            for name in before.keys() - _in_slots(value).keys():
                object.__setattr__(value, name, before[name])

        if before:
            self._restore.append(restore)
        for entry in before.values():
            self._remember(entry, depth - 1)

    def _remember_dict(self, table: dict[Any, Any], depth: int) -> None:
        before = dict(table)

        def restore() -> None:
            if table.keys() != before.keys() or any(table[k] is not v for k, v in before.items()):
                table.clear()
                table.update(before)

        self._restore.append(restore)
        if len(before) <= _LONGEST:
            for key, entry in before.items():
                # The Trainer that runs the step is not part of it.
                if key not in OWNERS:
                    self._remember(entry, depth - 1)

    def remember_class(self, kind: type) -> None:
        """Records a class's own attributes, and the variables of its Python module."""
        if _is_framework(kind.__module__):
            return
        before = {k: v for k, v in vars(kind).items() if not k.startswith("__")}

        def restore() -> None:
            now = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
            for name in now.keys() - before.keys():
                delattr(kind, name)
            for name, value in before.items():
                if now.get(name, self) is not value:
                    setattr(kind, name, value)

        self._restore.append(restore)
        for value in before.values():
            self._remember(value, _DEPTH - 1)
        source = sys.modules.get(kind.__module__)
        if source is not None and id(source.__dict__) not in self._seen:
            self._seen[id(source.__dict__)] = source.__dict__
            self._remember_dict(source.__dict__, 2)


def _refill_set(container: set[Any], members: set[Any]) -> None:
    container.intersection_update(members)
    container.update(members)


def _refill(container: Any, items: list[Any]) -> None:
    if len(container) != len(items) or any(
        a is not b for a, b in zip(container, items, strict=True)
    ):
        container.clear()
        container.extend(items)


def _restore_generator(value: Any) -> Callable[[], object] | None:
    """Returns a function that sets a random generator back to its present state; ``None`` if
    ``value`` is no generator.
    """
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    return None


def _is_framework(name: str) -> bool:
    """Whether a Python module of this name is one of :data:`_FRAMEWORKS`, or in one."""
    return name.partition(".")[0] in _FRAMEWORKS


def _in_slots(value: Any) -> dict[str, Any]:
    """An object's attributes that are in slots."""
    return {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if _is_framework(base.__module__):
            continue
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name
