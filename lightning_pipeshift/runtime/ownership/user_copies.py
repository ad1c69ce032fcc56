"""Tensors that user code keeps outside the model: averages and copies of parameters, for example.

They are found by walking through the attributes of the LightningModule and of the callbacks. Every
stage keeps the same tensors under the same paths, as it runs the same code; which of them have
values differs. So a path identifies the same copy on all stages.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.compat.module_private import (
    MODULE_TABLES,
    buffers_of,
    modules_of,
    parameters_of,
)
from lightning_pipeshift.errors import some_of
from lightning_pipeshift.model.parameters.remote_tensor import RemoteTensor
from lightning_pipeshift.runtime.comm.channels import Channels

# How many containers and plain objects deep the search goes.
_DEPTH = 6
# Of longer containers only those whose first item is a tensor or a container are looked through.
_WIDTH = 1024
# A shorter list may have the shapes of a module's parameters by chance.
_FEWEST_IN_LIST = 4
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


# --- copies ---


class CopyFinder:
    """Finds the parameters and buffers of which an object is a copy, by names and shapes.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._own = {id(module) for module in root.modules()}
        self._tensors = {
            name: tensor
            for named in (root.named_parameters, root.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self._modules = {
            f"{name}." if name else "": module for name, module in root.named_modules()
        }
        self._by_signature: dict[Any, list[str]] = {}
        self._by_shapes: dict[Any, list[str]] = {}
        for prefix, module in self._modules.items():
            signature = _signature(module)
            if not signature:
                continue
            self._by_signature.setdefault(signature, []).append(prefix)
            for trainable in (False, True):
                shapes = tuple(
                    p.shape for p in module.parameters() if p.requires_grad or not trainable
                )
                if len(shapes) >= _FEWEST_IN_LIST:
                    self._by_shapes.setdefault(shapes, []).append(prefix)

    def of(self, value: Any) -> list[tuple[Tensor, str]]:
        """The tensors in a copy, each with the name of its original; empty if it is no copy, or if
        several modules may be its original.
        """
        if isinstance(value, nn.Module):
            return self._of_module(value) if id(value) not in self._own else []
        if isinstance(value, dict):
            return self._of_dict(value)
        if isinstance(value, list | tuple):
            return self._of_list(value)
        return []

    def _of_module(self, module: nn.Module) -> list[tuple[Tensor, str]]:
        prefix = self._only(self._by_signature.get(_signature(module), []))
        if prefix is None:
            return []
        named = [*module.named_parameters(), *module.named_buffers()]
        return [(t, prefix + name) for name, t in named if self._is_like(t, prefix + name)]

    def _of_dict(self, value: Mapping[Any, Any]) -> list[tuple[Tensor, str]]:
        named = {name: t for name, t in value.items() if isinstance(t, Tensor)}
        if not named or not all(isinstance(name, str) for name in named):
            return []
        first = next(iter(named))
        prefixes = [
            name.removesuffix(first)
            for name in self._tensors
            if name == first or name.endswith(f".{first}")
        ]
        fitting = [
            prefix
            for prefix in prefixes
            if all(self._is_like(t, prefix + name) for name, t in named.items())
        ]
        prefix = self._only(fitting)
        return [] if prefix is None else [(t, prefix + name) for name, t in named.items()]

    def _of_list(self, value: Sequence[Any]) -> list[tuple[Tensor, str]]:
        if not value or not all(isinstance(item, Tensor) for item in value):
            return []
        prefix = self._only(self._by_shapes.get(tuple(item.shape for item in value), []))
        if prefix is None:
            return []
        named = list(self._modules[prefix].named_parameters())
        if len(named) != len(value):
            named = [(name, p) for name, p in named if p.requires_grad]
        return [(item, prefix + name) for item, (name, _) in zip(value, named, strict=True)]

    def _only(self, prefixes: list[str]) -> str | None:
        """The outermost of modules of which each is the only content of the next; ``None`` if they
        are not nested in this way.
        """
        prefixes = list(dict.fromkeys(prefixes))
        if not prefixes:
            return None
        outer = prefixes[0]
        inside = {id(p) for p in self._modules[outer].parameters()} if outer in self._modules else 0
        for prefix in prefixes[1:]:
            module = self._modules.get(prefix)
            if module is None or not inside or {id(p) for p in module.parameters()} != inside:
                return None
        return outer

    def _is_like(self, tensor: Tensor, name: str) -> bool:
        original = self._tensors.get(name)
        return original is not None and original.shape == tensor.shape


def _signature(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, parameter.shape) for name, parameter in module.named_parameters())


# --- between the stages ---


class Lacking(NamedTuple):
    """A tensor whose values some stage lacks."""

    computed_from: frozenset[str]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Exchanged:
    """The outcome of an exchange.

    Args:
        asked: tensors that some stage lacks, by path.
        received: the values that this stage received.
        nowhere: the paths of tensors that no stage has.
    """

    asked: dict[str, Lacking]
    received: dict[str, Tensor]
    nowhere: list[str]


def exchange(
    channels: Channels,
    found: Mapping[str, Tensor],
    wanted_by: Callable[[frozenset[str]], Collection[int]],
) -> Exchanged:
    """Sends stages the values that they lack, from the lowest stage that has them under the same
    path. Every stage calls this.

    Args:
        channels: this stage's connections.
        found: the tensors of this stage, with and without values, by path.
        wanted_by: returns the stages that need a copy, given the parameters it lives with.
    """
    lacking = {
        path: Lacking(
            tensor.computed_from if isinstance(tensor, RemoteTensor) else frozenset(),
            tuple(tensor.shape),
            tensor.dtype,
        )
        for path, tensor in found.items()
        if tensor.is_meta
    }
    of_all = _all_gathered(channels, lacking)
    asked = {path: what for of_stage in reversed(of_all) for path, what in of_stage.items()}
    if not asked:
        return Exchanged({}, {}, [])
    here = {
        path: found[path].device.type == channels.device.type
        for path, what in asked.items()
        if path in found
        and not found[path].is_meta
        and (tuple(found[path].shape), found[path].dtype) == (what.shape, what.dtype)
    }
    have = _all_gathered(channels, here)
    received, nowhere = {}, []
    for path, what in asked.items():
        sources = [stage for stage, paths in enumerate(have) if path in paths]
        if not sources:
            nowhere.append(path)
            continue
        source = sources[0]
        for to in sorted(wanted_by(what.computed_from)):
            if path not in of_all[to]:
                continue
            if channels.stage == source:
                channels.send_tensor(found[path], to)
            elif channels.stage == to:
                values = channels.receive_tensor(found[path], source)
                received[path] = values.to(channels.device) if have[source][path] else values
    return Exchanged(asked, received, nowhere)


def _all_gathered(channels: Channels, mine: Any) -> list[Any]:
    gathered: list[Any] = channels.share_object(channels.gather_objects(mine), source=0)
    return gathered


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


def nowhere(paths: Sequence[str]) -> str:
    """The error message for values in a checkpoint that no stage has."""
    return (
        f"No stage has the values of {some_of(paths)}: each is computed from parameters on "
        "different stages. Keep one value for each parameter, and combine them after the run."
    )
