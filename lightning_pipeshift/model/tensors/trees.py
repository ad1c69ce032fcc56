"""Nested structures of tensors, such as batches and the results of layers.

``torch.utils._pytree`` handles dicts, lists, tuples, named tuples and classes that a library has
registered (Hugging Face registers its outputs). This module also opens dataclasses and dict-like
classes that are not registered. And where a tensor is in memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import pytree

Rebuild = Callable[[list[Any]], Any]

_PLAIN = frozenset({type(None), bool, int, float, str})


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Rebuild]:
    """Returns the leaves of a structure, and a function that builds an equal structure from other
    leaves.

    Args:
        tree: the structure.
        is_leaf: returns whether to treat a node as a leaf, whatever it contains.
    """
    leaves: list[Any] = []
    node = _open(tree, leaves, is_leaf)
    # Whoever keeps the function does not keep the leaves.
    num_leaves = len(leaves)

    def rebuild(values: list[Any]) -> Any:
        assert len(values) == num_leaves
        return values[0] if node is None else _built(node, iter(values))

    return leaves, rebuild


class _Node(NamedTuple):
    """How to build a structure: a function of its parts, and how to build these; ``None`` stands
    for a leaf.
    """

    make: Callable[[list[Any]], Any]
    parts: list[_Node | None]


def _open(tree: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> _Node | None:
    """Appends a structure's leaves to a list; returns how to build the structure again."""
    kind: Any = type(tree)
    parts: Any = ()
    make: Any = None
    if not isinstance(tree, Tensor) and not (is_leaf is not None and is_leaf(tree)):
        # Faster than pytree, which is written in Python; every layer's inputs and outputs pass.
        if kind is tuple or kind is list:
            parts, make = tree, kind
        elif kind is dict:
            parts, make = tree.values(), partial(_dict_of, tuple(tree))
        elif kind not in _PLAIN:
            parts, make = _opened(tree)
    if make is None:
        leaves.append(tree)
        return None
    return _Node(make, [_open(part, leaves, is_leaf) for part in parts])


def _opened(tree: Any) -> tuple[Any, Any]:
    """The parts of a structure that is no tuple, list or dict, and how to build it of others."""
    # By its number: torch's function is a reference cycle, and keeps what the given one refers to.
    number = id(tree)
    parts, spec = pytree.tree_flatten(tree, lambda part: id(part) != number)
    if not (len(parts) == 1 and parts[0] is tree):
        return parts, partial(pytree.tree_unflatten, treespec=spec)
    fields = _fields(tree)
    return ([fields], partial(_with_fields, tree)) if fields is not None else (None, None)


def _built(node: _Node, leaves: Iterator[Any]) -> Any:
    return node.make(
        [next(leaves) if part is None else _built(part, leaves) for part in node.parts]
    )


def _dict_of(keys: tuple[Any, ...], values: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def is_object(leaf: Any) -> bool:
    """Whether a leaf may have other contents later: it is no number, text, ``None`` or tensor."""
    return not isinstance(leaf, Tensor) and type(leaf) not in _PLAIN


def structure_of(tree: Any) -> str:
    """A text that is equal for equal structures, regardless of their leaves."""
    outer, spec = pytree.tree_flatten(tree)
    inner = [(type(leaf), structure_of(fields)) for leaf in outer if (fields := _fields(leaf))]
    return f"{spec}{inner}"


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a structure."""
    return flatten(tree)[0]


class WithoutMemory:
    """A base of tensor classes. The memory of their objects is on another stage."""

    __slots__ = ()


def tensors_here(tree: Any) -> list[Tensor]:
    """The tensors in a tree that have memory on this stage. A layer may get others, if it does not
    use them.
    """
    return [
        x for x in leaves_of(tree) if isinstance(x, Tensor) and not isinstance(x, WithoutMemory)
    ]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """An equal structure with ``function`` applied to every leaf."""
    leaves, rebuild = flatten(tree)
    return rebuild([function(leaf) for leaf in leaves])


def _fields(leaf: Any) -> dict[str, Any] | None:
    if isinstance(leaf, UserDict):
        return dict(leaf.data)
    if isinstance(leaf, dict):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _with_fields(original: Any, values: list[dict[str, Any]]) -> Any:
    """A copy of an object with other fields. Copying it and then setting the fields also works for
    frozen classes, and for those with their own ``__init__``.
    """
    (fields,) = values
    fresh = copy.copy(original)
    if isinstance(fresh, UserDict):
        fresh.data = fields
    elif isinstance(fresh, dict):
        dict.update(fresh, fields)
        # Some classes have their items as attributes, too.
        own = getattr(fresh, "__dict__", {})
        own.update((name, value) for name, value in fields.items() if name in own)
    else:
        for name, value in fields.items():
            object.__setattr__(fresh, name, value)
    return fresh


def address_of(tensor: Tensor) -> int:
    """Identifies a tensor's memory; a view has the address of its base."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


Layout = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""A tensor's offset, size, strides and type, in its memory."""


def layout_of(tensor: Tensor) -> Layout:
    """Where a tensor is in its memory."""
    if tensor.layout is not torch.strided:
        return 0, tuple(tensor.shape), (), tensor.dtype
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


def view_in(memory: Tensor, layout: Layout) -> Tensor:
    """A tensor of this layout in the memory of another one, and no view of that for autograd."""
    offset, size, strides, dtype = layout
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), offset, size, strides)
