"""What a layer keeps in its attributes between calls.

``self.aux_loss = ...`` in a layer's forward, a list that it appends to, a counter: the layer runs
at one stage, and every stage may read the attribute. So attributes that a call changes are treated
as if they were passed to the layer and returned by it: every stage has them, with values in the
place of tensors. The run on fake tensors shows which attributes these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import MODULE_TABLES, buffers_of, version_of
from lightning_pipeshift.values.arguments import is_node, parts_of

# Attributes that are no state: they are the same on all stages, or have an own way to change.
_NO_STATE = MODULE_TABLES | {"training", "forward"}
_PLAIN = (int, float, bool, str, bytes, type(None))


class Attribute(NamedTuple):
    """An attribute of a module in a layer.

    Args:
        path: the module's name in the layer.
        name: the attribute's.
        is_buffer: whether it is a buffer.
    """

    path: str
    name: str
    is_buffer: bool

    def get(self, layer: nn.Module) -> Any:
        """Its value; ``None`` if it is missing."""
        module = layer.get_submodule(self.path)
        table = buffers_of(module) if self.is_buffer else module.__dict__
        return table.get(self.name)

    def set(self, layer: nn.Module, value: Any) -> None:
        """Sets it."""
        module = layer.get_submodule(self.path)
        table: dict[str, Any] = buffers_of(module) if self.is_buffer else module.__dict__
        table[self.name] = value


def marks(layer: nn.Module) -> dict[Attribute, Any]:
    """What tells, for each attribute of a layer's modules, whether it was changed meanwhile. Writes
    into a buffer do not count: a layer's buffers stay with its owner, as its parameters do.
    """
    memo: dict[int, Any] = {}
    found = {}
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if name not in _NO_STATE and "_hooks" not in name:
                found[Attribute(path, name, False)] = _mark(value, memo)
        for name, buffer in buffers_of(module).items():
            found[Attribute(path, name, True)] = id(buffer)
    return found


def _mark(x: Any, memo: dict[int, Any]) -> Any:
    if isinstance(x, Tensor):
        return id(x), version_of(x)
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, tuple):
        return type(x), *(_mark(part, memo) for part in x)
    if not is_node(x) or id(x) in memo:
        return id(x)
    memo[id(x)] = True
    return id(x), *((place, _mark(part, memo)) for place, part in parts_of(x))


def with_state(
    layer: nn.Module, forward: Callable[..., Any], attributes: Sequence[Attribute]
) -> Callable[..., tuple[Any, list[Any]]]:
    """A layer's forward that gets attributes as its first argument, and also returns them."""

    def run(state: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        for attribute, value in zip(attributes, state, strict=True):
            attribute.set(layer, value)
        result = forward(*args, **kwargs)
        return result, [attribute.get(layer) for attribute in attributes]

    return run
