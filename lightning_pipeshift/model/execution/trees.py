"""Nested structures of tensors, such as batches and the results of layers.

``torch.utils._pytree`` handles dicts, lists, tuples, named tuples and classes that a library has
registered (Hugging Face registers its outputs). This module also opens dataclasses and dict-like
classes that are not registered.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import pytree

Rebuild = Callable[[list[Any]], Any]


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, opens_objects: bool = False
) -> tuple[list[Any], Rebuild]:
    """Returns the leaves of a structure, and a function that builds an equal structure from other
    leaves.

    Args:
        tree: the structure.
        is_leaf: returns whether to treat a node as a leaf, whatever it contains.
        opens_objects: whether objects of any class with tensors as attributes are opened too.
    """
    if isinstance(tree, Tensor):
        return [tree], _only
    outer, spec = pytree.tree_flatten(tree, is_leaf)
    parts: list[tuple[int, Rebuild | None]] = []
    leaves: list[Any] = []
    for leaf in outer:
        fields = _fields(leaf)
        if fields is None and opens_objects:
            fields = _attributes(leaf)
        if fields is None:
            parts.append((1, None))
            leaves.append(leaf)
        else:
            inner, rebuild_inner = flatten(fields, is_leaf, opens_objects)
            parts.append((len(inner), _rebuilder(leaf, rebuild_inner)))
            leaves.extend(inner)

    num_leaves = len(leaves)

    def rebuild(values: list[Any]) -> Any:
        assert len(values) == num_leaves
        outer_values, position = [], 0
        for count, rebuild_part in parts:
            part = values[position : position + count]
            outer_values.append(part[0] if rebuild_part is None else rebuild_part(part))
            position += count
        return pytree.tree_unflatten(outer_values, spec)

    return leaves, rebuild


def _only(values: list[Any]) -> Any:
    (value,) = values
    return value


def structure_of(tree: Any) -> str:
    """A text that is equal for equal structures, regardless of their leaves."""
    outer, spec = pytree.tree_flatten(tree)
    inner = [(type(leaf), structure_of(fields)) for leaf in outer if (fields := _fields(leaf))]
    return f"{spec}{inner}"


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a structure."""
    return flatten(tree)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """An equal structure with ``function`` applied to every leaf."""
    leaves, rebuild = flatten(tree)
    return rebuild([function(leaf) for leaf in leaves])


def _fields(leaf: Any) -> dict[str, Any] | None:
    if isinstance(leaf, UserDict):
        return dict(leaf.data)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _attributes(leaf: Any) -> dict[str, Any] | None:
    """An object's attributes, if tensors are among them."""
    attributes = getattr(leaf, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(leaf, Tensor | nn.Module | type):
        return None
    return dict(attributes) if any(isinstance(x, Tensor) for x in attributes.values()) else None


def _rebuilder(original: Any, rebuild_fields: Rebuild) -> Rebuild:
    def rebuild(values: list[Any]) -> Any:
        fields = rebuild_fields(values)
        # Copying and then setting fields also works for frozen classes, and for those with their
        # own __init__.
        fresh = copy.copy(original)
        if isinstance(fresh, UserDict):
            fresh.data = fields
        else:
            for name, value in fields.items():
                object.__setattr__(fresh, name, value)
        return fresh

    return rebuild
