"""What leaves a layer in another way than by its return value: what a hook on one of its parts is
called with (``transformers`` collects router logits and attentions so), and what its parts keep as
attributes (the auxiliary loss of a mixture of experts).

On another stage neither exists. So what is found to leave a layer in this way is treated as if the
layer returned it: the hooks are called behind the layer, and the attributes set there, on every
stage; where the layer did not run, with what stands for its values.
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


class Report(NamedTuple):
    """One call of a part with hooks, or one attribute.

    Args:
        part: the part's number.
        attribute: the attribute's name; ``None`` for a call.
        args: what the part was called with; anything but tensors and numbers is left out.
        kwargs: likewise.
        value: what it returned, or the attribute's value.
    """

    part: int
    attribute: str | None
    args: Any
    kwargs: Any
    value: Any


class ChangesOutput(Exception):
    """A hook returns something in the place of what its module has: it belongs into the layer."""


class Reports:
    """What is known to leave one layer so.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._parts: list[nn.Module] = []
        self._hooked: set[int] = set()
        """The numbers of the parts whose hooks are called behind the layer."""
        self._inner: set[int] = set()
        """The numbers of those whose hooks change what they return."""
        self._attributes: list[tuple[int, str]] = []
        self._calls: list[Report] = []

    def extend(self, is_left: Callable[[Any], bool]) -> bool:
        """Looks for more that may leave the layer.

        Args:
            is_left: says of an attribute's value whether it is a tensor of the layer's inside.

        Returns:
            whether there is more than before.
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
        """Context in which the layer runs: hooks wait."""
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
            self._calls.append(Report(number, None, args, kwargs, output))

        return note

    def take(self) -> list[Report]:
        """What has left the layer in its last run."""
        calls, self._calls = self._calls, []
        kept = [
            Report(number, name, None, None, self._parts[number].__dict__.get(name))
            for number, name in self._attributes
        ]
        return calls + kept

    def give(self, reports: Collection[Report], while_following: bool = False) -> None:
        """Calls the hooks, and sets the attributes.

        Args:
            reports: what :meth:`take` returned, with what stands for the tensors on this stage.
            while_following: whether a hook may turn out to change what its module returns.

        Raises:
            ChangesOutput: it does.
            LayerError: it does, and did not while the step was followed.
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
                    f"A hook on a {type(part).__name__} inside of a layer has returned something,"
                    " and did not when the step was first followed. Let it return the same for"
                    " every batch: always nothing, or always something."
                )


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else None
