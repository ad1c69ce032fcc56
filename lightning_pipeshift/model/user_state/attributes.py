"""The attributes of objects of user code, in a ``__dict__`` or in slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_FRAMEWORKS = frozenset(
    [
        "torch",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "lightning_pipeshift",
        "torchmetrics",
        "transformers",
        "timm",
        "torchvision",
        "numpy",
    ]
)


def is_framework(name: str) -> bool:
    """Whether a Python module is of a framework, or of Python's own base classes."""
    return name.partition(".")[0] in _FRAMEWORKS or name in ("builtins", "abc", "typing")


def slots_of(value: Any) -> dict[str, Any]:
    """Those of them that are in slots."""
    return {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}


def set_attribute(value: Any, name: str, entry: Any) -> None:
    """Sets an attribute as it is, whatever the class does where user code sets it."""
    if name in _slots(type(value)):
        object.__setattr__(value, name, entry)
    else:
        vars(value)[name] = entry


def remove_attribute(value: Any, name: str) -> None:
    """Removes an attribute, if the object has it."""
    if name in slots_of(value):
        object.__delattr__(value, name)
    elif isinstance(getattr(value, "__dict__", None), dict):
        vars(value).pop(name, None)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if is_framework(base.__module__):
            continue
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name
