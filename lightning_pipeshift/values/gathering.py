"""Brings the values in a structure to every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.transfer import to_host
from lightning_pipeshift.model.execution.trees import flatten
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.value import Value

Share = Callable[[Any, int], Any]
"""``(object, stage) -> the object that this stage has passed``, on all stages."""


class Kept:
    """What a value was at some time.

    Args:
        owner: the stage that has it.
        tensor: a copy of it; ``None`` at the other stages.
        name: of the value.
    """

    __slots__ = ("name", "owner", "tensor")

    def __init__(self, account: Account, tensor: Tensor | None) -> None:
        self.owner, self.name = account.owner, account.name
        self.tensor = None if tensor is None else tensor.detach()


def kept(leaf: Any) -> Any:
    """A copy of what a value is now, without an operation of the program; other objects as they
    are.
    """
    if not isinstance(leaf, Value):
        return leaf
    tensor = leaf.account.tensor
    return Kept(leaf.account, None if tensor is None else tensor.detach().clone())


def gathered(tree: Any, stage: int, share: Share) -> Any:
    """A structure with tensors in host memory in the place of values. Every stage calls this, with
    structures that differ in the values' tensors only.

    Args:
        tree: the structure.
        stage: this one.
        share: gives all stages an object of one of them.
    """
    leaves, rebuild = flatten(tree, lambda node: isinstance(node, Kept))
    found = [_as_kept(leaf) for leaf in leaves]
    for owner in sorted({each.owner for each in found if isinstance(each, Kept)}):
        places = [
            at for at, each in enumerate(found) if isinstance(each, Kept) and each.owner == owner
        ]
        names = [found[at].name for at in places]
        mine = [found[at].tensor for at in places] if owner == stage else []
        its_names, tensors = share((names, to_host(mine)), owner)
        if names != its_names:
            raise LayerError(
                "The ranks have logged, returned, or put into a metric, different values in a step."
                " Do this on every rank: without `if trainer.is_global_zero`, or with a number"
                " (`self.log(name, loss.item())`)."
            )
        for at, tensor in zip(places, tensors, strict=True):
            leaves[at] = tensor
    return to_host(rebuild(leaves))


def _as_kept(leaf: Any) -> Any:
    if isinstance(leaf, Value):
        return Kept(leaf.account, leaf.account.tensor)
    return leaf
