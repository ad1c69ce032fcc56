"""The side outputs of a layer: values that leave it other than by its return value. These are the
arguments of hooks on its parts (``transformers`` collects router logits and attentions in this
way), and attributes that its parts keep (the auxiliary loss of a mixture of experts).

On another stage neither exists. So side outputs are handled as if the layer returned them: the
hooks are called after the layer, and the attributes set there, on every stage; if the layer did not
run, with placeholders for its values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    forward_hooks_of,
    hooks_with_kwargs_of,
    set_forward_hooks,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.trees import map_leaves

_PLAIN = (Tensor, bool, int, float, str)


class SideOutput(NamedTuple):
    """One call of a part with hooks, or one attribute.

    Args:
        part: the part's number.
        attribute: the attribute's name; ``None`` for a call.
        args: the arguments of the call; only tensors and numbers are kept.
        kwargs: likewise.
        value: the result of the call, or the attribute's value.
    """

    part: int
    attribute: str | None
    args: Any
    kwargs: Any
    value: Any


class ChangesOutput(Exception):
    """A hook replaces the result of its module, so it has to run inside the layer."""


class SideOutputs:
    """The known side outputs of one layer.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._parts: list[nn.Module] = []
        self._hooked: set[int] = set()
        """The numbers of the parts whose hooks are called after the layer."""
        self._inner: set[int] = set()
        """The numbers of the parts whose hooks change their results."""
        self._attributes: list[tuple[int, str]] = []
        self._calls: list[SideOutput] = []

    def extend(self, is_left: Callable[[Any], bool]) -> bool:
        """Searches for more side outputs of the layer.

        Args:
            is_left: whether an attribute's value is a tensor from inside the layer.

        Returns:
            whether there are more than before.
        """
        before = len(self._hooked), len(self._attributes)
        for part in self._layer.modules():
            if part is not self._layer and forward_hooks_of(part):
                self._hooked.add(self._number(part))
            for name, value in part.__dict__.items():
                if is_left(value) and (self._number(part), name) not in self._attributes:
                    self._attributes.append((self._number(part), name))
        self._hooked -= self._inner
        return (len(self._hooked), len(self._attributes)) != before

    def _number(self, part: nn.Module) -> int:
        for number, known in enumerate(self._parts):
            if known is part:
                return number
        self._parts.append(part)
        return len(self._parts) - 1

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context in which the layer runs: calls of hooks are postponed."""
        self._calls = []
        waiting = []
        for number in self._hooked:
            part = self._parts[number]
            if hooks := forward_hooks_of(part):
                waiting.append((part, hooks, hooks_with_kwargs_of(part)))
                noting = OrderedDict({0: self._noting(number)})
                set_forward_hooks(part, noting, OrderedDict({0: True}))
        try:
            yield
        finally:
            for part, hooks, with_kwargs in waiting:
                set_forward_hooks(part, hooks, with_kwargs)

    def _noting(self, number: int) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            args, kwargs = map_leaves(_plain, (args, kwargs))
            self._calls.append(SideOutput(number, None, args, kwargs, output))

        return note

    def take(self) -> list[SideOutput]:
        """Returns the side outputs of the layer's last run."""
        calls, self._calls = self._calls, []
        kept = [
            SideOutput(number, name, None, None, self._parts[number].__dict__.get(name))
            for number, name in self._attributes
        ]
        return calls + kept

    def give(self, reports: Collection[SideOutput], while_following: bool = False) -> None:
        """Calls the hooks, and sets the attributes.

        Args:
            reports: the result of :meth:`take`, with placeholders for tensors that this stage
                lacks.
            while_following: whether a hook may turn out to change its module's result.

        Raises:
            ChangesOutput: a hook changes its module's result.
            LayerError: it does, and did not while the step was traced.
        """
        for report in reports:
            part = self._parts[report.part]
            if report.attribute is not None:
                part.__dict__[report.attribute] = report.value
                continue
            for key, hook in list(forward_hooks_of(part).items()):
                takes_kwargs = key in hooks_with_kwargs_of(part)
                given = (report.args, report.kwargs) if takes_kwargs else (report.args,)
                if hook(part, *given, report.value) is None:
                    continue
                if while_following:
                    self._inner.add(report.part)
                    self._hooked.discard(report.part)
                    raise ChangesOutput
                raise LayerError(
                    f"A hook on a {type(part).__name__} inside of a layer has returned something, "
                    "and did not when the step was first traced. It must return the same for "
                    "every batch: always nothing, or always something."
                )


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else None
