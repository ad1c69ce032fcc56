"""Lists, dicts, sets, queues, generators of random numbers and other objects (a meter, say) of the
LightningModule that a step reads early and changes late.

With several microbatches in flight, an earlier stage has begun the next microbatch before a later
stage changes the container. For numbers, stages compute the change as well (``conditions.py``);
what goes into a container (a loss, a prediction) only the later stage has. Of an object its
attributes are compared, and what is in those that are containers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from lightning_pipeshift.compat.lightning_names import CONTAINERS
from lightning_pipeshift.model.user_state.attributes import attributes_of, is_user_object
from lightning_pipeshift.model.user_state.generators import random_state

_KINDS: Final = (list, dict, set, deque)
_NOT_OF_USERS: Final = CONTAINERS | set(vars(nn.Module()))
_PLAIN: Final = (int, float, complex, str, bytes, bool, type(None))
# Larger ones are not compared: a list of all files, say.
_MOST_ENTRIES: Final = 10_000


class KeptContainers:
    """Takes notes of when a step reads and changes the containers and objects that are attributes
    of the LightningModule. An interval is the code between two calls of layers.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        own = vars(root)
        self._root = root
        self._contents = {
            name: _contents(value)
            for name, value in own.items()
            if name not in _NOT_OF_USERS and _has_contents(value)
        }
        self._reads: dict[str, int] = {}
        """By an attribute's name, the first interval that reads it."""
        self._changes: dict[str, int] = {}
        """The last interval that changes it."""
        self._interval = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a step that is traced."""
        if not self._contents:
            yield
            return
        # Not in a class of its own: user code may keep a list of all subclasses.
        own: Any = type(self._root)
        before, inherited = vars(own).get("__getattribute__"), own.__getattribute__

        def read(module: Any, name: str) -> Any:
            if name in self._contents and module is self._root:
                self._reads.setdefault(name, self._interval)
            return inherited(module, name)

        own.__getattribute__ = read
        try:
            yield
            self.end_interval()
        finally:
            if before is None:
                del own.__getattribute__
            else:
                own.__getattribute__ = before

    def end_interval(self) -> None:
        """Called before each call of a layer, and when the step ends."""
        own = vars(self._root)
        for name, before in self._contents.items():
            now = _contents(own.get(name))
            if not _same(now, before):
                self._contents[name] = now
                self._changes[name] = self._interval
        self._interval += 1

    @property
    def stale(self) -> frozenset[str]:
        """The names of containers that are read before they change."""
        return frozenset(
            name for name, last in self._changes.items() if self._reads.get(name, last) < last
        )


def _has_contents(value: Any) -> bool:
    is_container = isinstance(value, _KINDS)
    return is_container or is_user_object(value) or random_state(value) is not None


def _contents(value: Any) -> list[Any]:
    """The container and its entries, the object and what its attributes are and have in them, or
    the generator of random numbers and its state.
    """
    if is_user_object(value) and not isinstance(value, (*_KINDS, random.Random)):
        own = list(attributes_of(value).items())
        return [value, *(entry for name, kept in own for entry in (name, *_contents_of(kept)))]
    return _contents_of(value)


def _contents_of(value: Any) -> list[Any]:
    if (state := random_state(value)) is not None:
        return [value, repr(state)]
    if not isinstance(value, _KINDS) or len(value) > _MOST_ENTRIES:
        return [value]
    entries = [x for pair in value.items() for x in pair] if isinstance(value, dict) else value
    return [value, *entries]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_equal, one, other))


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # A number may be computed again.
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)
