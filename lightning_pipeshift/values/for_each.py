"""Functions of torch on lists of tensors (``torch._foreach_add_``), which averages of weights and
users' optimizers call: each stage runs them on those of the tensors that are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_pipeshift.compat.torch_private import FOR_EACH_FUNCTIONS
from lightning_pipeshift.values.value import PLACED

if TYPE_CHECKING:
    from lightning_pipeshift.values.microbatch import Microbatch


def _for_each(function: Any, microbatch: Microbatch, *args: Any, **kwargs: Any) -> Any:
    """Runs a function on lists as one operation for each stage."""
    length = next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, list | tuple))

    def is_list(x: Any) -> bool:
        return isinstance(x, list | tuple) and len(x) == length

    rows = [x for x in (*args, *kwargs.values()) if is_list(x)]
    at_stage: dict[int | None, list[int]] = {}
    for at in range(length):
        placed = [x for row in rows if type(x := row[at]) in PLACED]
        microbatch.place_parameters([row[at] for row in rows if isinstance(row[at], Tensor)])
        owner = microbatch.account_of(placed[0]).owner if placed else None
        at_stage.setdefault(owner, []).append(at)
    found: list[Any] = [None] * length
    for stage, places in at_stage.items():

        def of_stage(x: Any, places: list[int] = places) -> Any:
            return [x[at] for at in places] if is_list(x) else x

        own_args = tuple(map(of_stage, args))
        own_kwargs = {name: of_stage(x) for name, x in kwargs.items()}
        if stage is None:
            result = function(*own_args, **own_kwargs)
        else:
            result = microbatch.operate(function, own_args, own_kwargs)
        for at, x in zip(places, result or [None] * len(places), strict=True):
            found[at] = x
    return found if any(x is not None for x in found) else None


BY_STAGE: dict[Any, Callable[..., Any]] = {
    function: partial(_for_each, function) for function in FOR_EACH_FUNCTIONS
}
"""As :data:`SPECIAL`."""
