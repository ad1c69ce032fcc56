"""Common tensors that share memory, found among all objects of Python: when one becomes a value of
one stage, all have to.

User code between two steps writes to copies of parameters, often through an alias:
``average.detach().copy_(parameter)``. Torch does not say which tensors share a memory, only how
many.
"""

from __future__ import annotations

import gc
import weakref

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    base_of,
    has_storage,
    num_other_uses,
    storage_key_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.values.value import run_by

_YOUNGEST_FIRST = 0, 1, 2


class Aliases:
    """Finds the other tensors with a tensor's memory."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Called in each step: what is known has changed."""
        self._by_memory: dict[int, dict[int, weakref.ref[Tensor]]] = {}

    def of(self, tensor: Tensor) -> list[Tensor]:
        """The other tensors with the same memory that are no views: as many as refer to it, or not
        all of them can be found.
        """
        expected = num_other_uses(tensor)
        found = self._known(tensor) if expected else []
        for generation in _YOUNGEST_FIRST:
            if len(found) == expected:
                break
            # New ones are among the youngest, which are few.
            self._look(generation)
            found = self._known(tensor)
        return found

    def _known(self, tensor: Tensor) -> list[Tensor]:
        known = self._by_memory.get(storage_key_of(tensor), {})
        living = [x for each in known.values() if (x := each()) is not None and x is not tensor]
        # One may have become a value since, or may have other memory.
        return [x for x in living if _is_common(x) and storage_key_of(x) == storage_key_of(tensor)]

    def _look(self, generation: int) -> None:
        with run_by(None), without_torch_function_of_subclasses():
            for x in gc.get_objects(generation):
                if _is_common(x):
                    self._by_memory.setdefault(storage_key_of(x), {})[id(x)] = weakref.ref(x)


def _is_common(x: object) -> bool:
    if type(x) not in (Tensor, nn.Parameter):
        return False
    return has_storage(x) and base_of(x) is None  # type: ignore[arg-type]
