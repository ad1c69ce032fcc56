"""Copies of modules whose methods are replaced while a run lasts."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any


class _Removal:
    """Removes an attribute of a module when it is deleted itself.

    Args:
        module: the module.
        name: of the attribute.
    """

    __slots__ = ("_module", "_name")

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __del__(self) -> None:
        module = self._module()
        if module is not None:
            module.__dict__.pop(self._name, None)


def method_of_copy(copied: Any, name: str, memo: dict[Any, Any]) -> Any:
    """Returns the method of a copy's class, for a method that a run has replaced in the original.
    When the copy is complete, the attribute is removed from the copy: with it, the copy would refer
    to itself and be deleted late, and a copy of the copy would call the method of the first one.

    Args:
        copied: the copy.
        name: of the method.
        memo: that of ``copy.deepcopy``, which is deleted when the copy is complete.
    """
    memo[_Removal, id(copied), name] = _Removal(copied, name)
    return MethodType(getattr(type(copied), name), copied)
