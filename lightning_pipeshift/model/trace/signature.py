"""Signatures of everything that a flow may depend on: equal ones are traced once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    num_hooks,
    parameters_of,
    pytree,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.model.execution.trees import flatten


def batch_signature(batch: Any) -> Hashable:
    """Structure, shapes and types of a batch, and the plain entries that code branches on."""
    if isinstance(batch, Tensor) or type(batch) in (tuple, list):
        # A fast path for usual batches, as this is called for every microbatch.
        entries = (batch,) if isinstance(batch, Tensor) else batch
        if all(isinstance(entry, Tensor) for entry in entries):
            return type(batch), tuple((entry.shape, entry.dtype) for entry in entries)
    leaves, _ = flatten(batch)
    described = tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, bool) or leaf is None else None)
        for leaf in leaves
    )
    return described, str(pytree.tree_structure(batch))


def all_parameters(root: nn.Module) -> Iterator[nn.Parameter | None]:
    """The entries of all modules, in an order that is the same on every stage."""
    for module in root.modules():
        yield from parameters_of(module).values()


def flags_of(root: nn.Module) -> tuple[bool, ...]:
    """Which of :func:`all_parameters` require a gradient."""
    with without_torch_function_of_subclasses():
        return tuple(p is not None and p.requires_grad for p in all_parameters(root))


class ModuleSignature(NamedTuple):
    """The properties of the LightningModule that a flow may depend on.

    A callback that freezes or unfreezes layers changes it, as gradients then flow differently. So
    does user code that registers a hook while training runs, or that keeps a value for the next
    step (``if self.average is None``), or that changes a switch of its own (``self.warms_up``).

    Args:
        flags: which of :func:`all_parameters` require a gradient.
        is_training: its training mode.
        has_grad: whether gradients are recorded.
        hooks: how many hooks its modules have on what they return and on their backward.
        attributes: its attributes that are ``None``, a bool or an ``Enum``, with their names.
    """

    flags: tuple[bool, ...]
    is_training: bool
    has_grad: bool
    hooks: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...]

    def with_attributes(self, values: Mapping[str, Any]) -> ModuleSignature:
        """The signature of a module with other values of some attributes."""
        new = tuple((name, values.get(name, value)) for name, value in self.attributes)
        return self._replace(attributes=new)


def module_signature(root: nn.Module) -> ModuleSignature:
    """The present signature of the LightningModule."""
    with without_torch_function_of_subclasses():
        hooks = tuple(filter(None, map(num_hooks, root.modules())))
    attributes = tuple(
        (name, value)
        for name, value in vars(root).items()
        if value is None or isinstance(value, bool | Enum)
    )
    return ModuleSignature(
        flags_of(root), root.training, torch.is_grad_enabled(), hooks, attributes
    )
