"""Brings the values in a structure to every stage."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.tensors.transfer import Fetch, to_host
from lightning_pipeshift.model.tensors.trees import Rebuild, flatten
from lightning_pipeshift.runtime.comm.messages import ADVICE, Key
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.reads import key_of
from lightning_pipeshift.values.value import Value, version_in

Share = Callable[[Any, int], Any]
"""``(object, stage) -> the object that this stage has passed``, on all stages."""
Offered = Callable[[Key], Tensor | None]


class Kept:
    """What a value was at some time. A pickled one has no tensor.

    Args:
        key: of the message that would carry the value; its source is the stage that has it.
        tensor: a copy of it; ``None`` at the other stages.
    """

    __slots__ = ("key", "tensor")

    def __init__(self, key: Key, tensor: Tensor | None = None) -> None:
        self.key, self.tensor = key, tensor

    def __reduce__(self) -> Any:
        return Kept, (self.key,)


def kept(leaf: Any) -> Any:
    """A copy of what a value is now, without an operation of the program; other objects as they
    are.
    """
    found = _as_kept(leaf)
    if isinstance(leaf, Value) and found.tensor is not None:
        found.tensor = found.tensor.clone()
    return found


def _as_kept(leaf: Any) -> Any:
    if not isinstance(leaf, Value):
        return leaf
    leaf.account.refresh()
    tensor = leaf.account.tensor
    return Kept(key_of(leaf.account), None if tensor is None else tensor.detach())


def _flat(tree: Any) -> tuple[list[Any], Rebuild]:
    leaves, rebuild = flatten(tree, lambda node: isinstance(node, Kept))
    return list(map(_as_kept, leaves)), rebuild


class Structure:
    """A structure with values in it, taken apart.

    Args:
        tree: the structure.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves, self.rebuild = _flat(tree)

    def digest(self, with_numbers: bool = True) -> int:
        """Of the names of the values, of the texts, and of the numbers."""
        kinds = (Kept, str, int, float) if with_numbers else (Kept, str)
        text = [
            leaf.key if isinstance(leaf, Kept) else leaf
            for leaf in self.leaves
            if isinstance(leaf, kinds)
        ]
        return zlib.crc32(repr(text).encode())


class Prefetch:
    """Copies tensors of a device to the host that will be gathered. Nobody waits for that yet: the
    device gets other work meanwhile.

    Args:
        leaves: those of a :class:`Structure`.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        found = {_identity(leaf): _tensor_of(leaf) for leaf in leaves}
        self._fetch = Fetch(
            {key: x for key, x in found.items() if x is not None and x.device.type != "cpu"}
        )

    def tensor(self, leaf: Any) -> Tensor | None:
        """The tensor of a leaf, in host memory if it was copied; ``None`` if it has none here."""
        found: dict[Any, Tensor] = self._fetch.wait()
        return found.get(_identity(leaf), _tensor_of(leaf))


def _tensor_of(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Kept):
        return leaf.tensor
    return leaf if isinstance(leaf, Tensor) else None


def _identity(leaf: Any) -> Any:
    """Differs for leaves with different tensors, and for a tensor before and after a write."""
    if isinstance(leaf, Kept):
        return leaf.key
    return (id(leaf), version_in(leaf)) if isinstance(leaf, Tensor) else None


def of_stage(
    source: int, structure: Structure, stage: int, share: Share, offered: Offered
) -> Structure:
    """The structure that one stage has, at all stages. Every stage calls this.

    Args:
        source: the stage.
        structure: what this stage has.
        stage: this one.
        share: gives all stages an object of one of them.
        offered: finds a value of this stage that another may read, by its key.
    """
    leaves = structure.leaves
    mine = {leaf.key: leaf.tensor for leaf in leaves if isinstance(leaf, Kept)}
    found = Structure(share(to_host(structure.rebuild(leaves)), source))
    for leaf in found.leaves:
        if isinstance(leaf, Kept) and leaf.key.source == stage:
            leaf.tensor = mine[leaf.key] if leaf.key in mine else offered(leaf.key)
    return found


def require_same_program(core: Core, share: Share) -> None:
    """Compares what all stages have run. Every stage calls this.

    Raises:
        LayerError: another stage has run another program.
    """
    mine = core.digest, None, core.last
    found = [share(mine, stage) for stage in range(core.mailbox.num_stages)]
    for stage, theirs in enumerate(found):
        _require_same(core, mine, stage, theirs)


def _require_same(core: Core, mine: Any, owner: int, theirs: Any) -> None:
    if theirs[0] == mine[0]:
        return
    ends = {core.stage: mine[-1], owner: theirs[-1]}
    # The message is the same whichever of them finds it first.
    each = (
        f"stage {at} ended it at `{label}` ({line})" for at, (label, line) in sorted(ends.items())
    )
    raise LayerError(
        f"The ranks have run different programs in a step: {'; '.join(each)}. {ADVICE}"
    )


def gathered(leaves: list[Any], core: Core, share: Share, prefetch: Prefetch) -> list[Any]:
    """The leaves of a structure, with tensors in host memory in the place of values. Every stage
    calls this, with leaves that differ in the values' tensors only.

    Args:
        leaves: of a :class:`Structure`.
        core: this stage's.
        share: gives all stages an object of one of them.
        prefetch: has some of the tensors.

    Raises:
        LayerError: the stages have run different programs so far, or a value is not kept any more.
    """
    stage, last, leaves = core.stage, core.mailbox.num_stages - 1, list(leaves)
    found = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, Kept)}
    mine = core.digest, [each.key for each in found.values()], core.last
    # Also where the last stage has none of them: all stages compare their programs.
    for owner in (last, *sorted({each.key.source for each in found.values()} - {last})):
        places = [at for at, each in found.items() if each.key.source == owner]
        held = [prefetch.tensor(found[at]) for at in places] if owner == stage else []
        theirs, tensors = share((mine, to_host(held)), owner)
        _require_same(core, mine, owner, theirs)
        if theirs[1] != mine[1] or any(tensor is None for tensor in tensors):
            raise LayerError(
                "The ranks have logged, returned, or put into a metric, different values in a step,"
                " and one of them is not kept any more, or is too large to be kept. Do this on"
                " every rank: without `if trainer.is_global_zero`, or with a number"
                " (`self.log(name, loss.item())`)."
            )
        for at, tensor in zip(places, tensors, strict=True):
            leaves[at] = tensor
    common = [prefetch.tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    on_host: list[Any] = to_host(common)
    return on_host
