"""Brings the values in a structure to every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.transfer import to_host
from lightning_pipeshift.model.execution.trees import flatten
from lightning_pipeshift.runtime.comm.messages import ADVICE
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.core import Core
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


def gathered(tree: Any, core: Core, share: Share) -> Any:
    """A structure with tensors in host memory in the place of values. Every stage calls this, with
    structures that differ in the values' tensors only.

    Args:
        tree: the structure.
        core: this stage's.
        share: gives all stages an object of one of them.

    Raises:
        LayerError: the stages have run different programs so far, or the structures differ.
    """
    stage, last = core.stage, core.mailbox.num_stages - 1
    leaves, rebuild = flatten(tree, lambda node: isinstance(node, Kept))
    found = {at: _as_kept(leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Kept | Value)}
    mine = core.digest, [each.name for each in found.values()], core.last
    # Also where the last stage has none of them: all stages compare their programs.
    for owner in (last, *sorted({each.owner for each in found.values()} - {last})):
        places = [at for at, each in found.items() if each.owner == owner]
        held = [found[at].tensor for at in places] if owner == stage else []
        theirs, tensors = share((mine, to_host(held)), owner)
        if theirs[0] != mine[0]:
            each = (
                f"stage {at} ended it at `{label}` ({line})"
                for at, (*_, (label, line)) in ((stage, mine), (owner, theirs))
            )
            raise LayerError(
                f"The ranks have run different programs in a step: {'; '.join(each)}. {ADVICE}"
            )
        if theirs[1] != mine[1]:
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
