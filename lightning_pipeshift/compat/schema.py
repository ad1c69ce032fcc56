"""The arguments that an operation writes to, by its schema, and some that schemas leave out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from torch import Tensor

from lightning_pipeshift.compat.torch_private import pytree, schema_of

_KERNELS_WITH_HIDDEN_WRITES: Final = {
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
    "aten::batch_norm_update_stats",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::native_batch_norm",
}
_HIDDEN: Final = ("running_mean", "running_var")
"""The arguments that these operations write to although their schemas do not declare it, and
without raising the tensors' version counters; those with an argument ``training`` only if it is
true."""


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to, in the order of its arguments.

    Args:
        func: the operation, as ``__torch_dispatch__`` gets it.
        args: the arguments of the call.
        kwargs: likewise.
    """
    writes, condition = _writes_of(func)
    if condition is not None and not _argument(*condition, args, kwargs):
        return []
    values = [_argument(place, name, args, kwargs) for place, name in writes]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


@lru_cache(maxsize=4096)
def _writes_of(func: Any) -> tuple[tuple[tuple[int, str], ...], tuple[int, str] | None]:
    """The arguments that an operation writes to, and the one that has to be true for writes."""
    schema = schema_of(func)
    hidden = _HIDDEN if schema.name in _KERNELS_WITH_HIDDEN_WRITES else ()
    places = list(enumerate(argument.name for argument in schema.arguments))
    writes = tuple(
        (place, name)
        for place, name in places
        if name in hidden
        or ((alias := schema.arguments[place].alias_info) is not None and alias.is_write)
    )
    condition = next((at for at in places if hidden and at[1] == "training"), None)
    return writes, condition


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)
