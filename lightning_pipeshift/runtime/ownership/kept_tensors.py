"""Tensors that user code keeps outside the model (averages and copies of parameters, what steps
have computed), found by walking through the attributes of the LightningModule and of the callbacks.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.module_private import (
    MODULE_TABLES,
    buffers_of,
    modules_of,
    parameters_of,
)

# How many containers and plain objects deep the search goes.
_DEPTH = 6
# Of longer containers only those whose first item is a tensor or a container are looked through.
_WIDTH = 1024
_FRAMEWORKS = ("lightning.", "pytorch_lightning.", "torch.", "lightning_pipeshift.", "builtins")


class Node(NamedTuple):
    """A value that user code keeps: a tensor, or an object that contains tensors."""

    path: str
    value: Any


def walk(path: str, value: Any, seen: set[int], depth: int = _DEPTH) -> Iterator[Node]:
    """Yields a value and everything in it that may hold tensors, outer before inner; each object
    once, under its first path.

    Args:
        path: the value's name.
        value: the value to search.
        seen: identities of objects to leave out; those found are added.
        depth: how many containers and plain objects deep to look; modules don't count.
    """
    if id(value) in seen or not _may_hold_tensors(value):
        return
    seen.add(id(value))
    yield Node(path, value)
    if isinstance(value, nn.Module):
        parts = {
            **parameters_of(value),
            **buffers_of(value),
            **modules_of(value),
            **value.__dict__,
        }
        for name, part in parts.items():
            if name not in MODULE_TABLES:
                yield from walk(f"{path}.{name}", part, seen, depth)
    elif depth and not isinstance(value, Tensor):
        for name, part in _parts(value):
            yield from walk(f"{path}[{name!r}]", part, seen, depth - 1)


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, Tensor | nn.Module | dict | list | tuple | deque):
        return True
    # Objects of a framework (a Trainer, a logger) refer to nearly everything.
    return hasattr(value, "__dict__") and not (
        isinstance(value, type)
        or inspect.isroutine(value)
        or type(value).__module__.startswith(_FRAMEWORKS)
    )


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        # Keys of other types may differ by stage, but their order does not.
        has_names = all(isinstance(key, str | int) for key in value)
        return list(value.items()) if has_names else list(enumerate(value.values()))
    if isinstance(value, list | tuple | deque):
        is_looked_through = len(value) <= _WIDTH or _may_hold_tensors(value[0])
        return enumerate(value) if is_looked_through else ()
    return list(vars(value).items())


def kept_by_user(root: nn.Module, known: Collection[int]) -> Iterator[Node]:
    """Yields the values that the LightningModule and the callbacks keep.

    Args:
        root: the LightningModule.
        known: identities of the model's own tensors.
    """
    seen = set(known)
    yield from walk("module", root, seen)
    # Without a Trainer there are no callbacks.
    trainer = trainer_of(root)
    for number, callback in enumerate(getattr(trainer, "callbacks", ())):
        for name, value in vars(callback).items():
            yield from walk(f"callback {number}.{name}", value, seen)


def with_values(tree: Any, value_of: Mapping[int, Tensor]) -> Any:
    """The same structure of dicts, lists and tuples with some tensors replaced. Unchanged parts are
    the same objects; changed parts are copies, as the structure may be the user's own.

    Args:
        tree: the structure.
        value_of: the replacement of a tensor, by the tensor's identity.
    """
    if isinstance(tree, Tensor):
        return value_of.get(id(tree), tree)
    if not isinstance(tree, dict | list | tuple):
        return tree
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    changed = {key: with_values(tree[key], value_of) for key in keys}
    changed = {key: fresh for key, fresh in changed.items() if fresh is not tree[key]}
    if not changed:
        return tree
    if isinstance(tree, tuple):
        items = [changed.get(number, item) for number, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    copied = copy.copy(tree)
    for key, fresh in changed.items():
        copied[key] = fresh
    return copied
