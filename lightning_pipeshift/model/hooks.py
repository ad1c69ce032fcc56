"""Our hooks on what autograd saves, and how they get along with ``torch.func``.

``torch.func.grad`` and its like refuse to run where anybody has such hooks. Ours are not the
user's, whose code has to run as it would without them. So while ``torch.func`` is at work they
stand aside, and what is saved meanwhile stays where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

Disable = Callable[[str], AbstractContextManager[None]]


class _Local(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_OURS = _Local()
"""In place in this thread, the innermost last."""


@contextmanager
def saving(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which autograd holds, in the place of a tensor that it saves, what ``pack`` makes
    of it, and asks ``unpack`` for the tensor.
    """
    with _ASIDE.installed(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _OURS.hooks.append((pack, unpack))
        try:
            yield
        finally:
            _OURS.hooks.pop()


class _StandingAside:
    """Asked by ``torch.func`` as long as any of our hooks is in place, instead of torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._original: Disable | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which it is asked."""
        graph: Any = torch.autograd.graph
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._original = graph.disable_saved_tensors_hooks
                graph.disable_saved_tensors_hooks = self.disable
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    graph.disable_saved_tensors_hooks = self._original

    @contextmanager
    def disable(self, error_message: str) -> Iterator[None]:
        """Context without our hooks, and in which nobody may have any."""
        original = self._original
        assert original is not None
        aside: list[Hooks] = []
        for hooks in reversed(_OURS.hooks):
            top = top_hooks()
            if top is None or top[0] is not hooks[0]:
                # Somebody else's: torch says that they do not go together.
                break
            torch._C._autograd._pop_saved_tensors_default_hooks()
            aside.append(hooks)
        try:
            with original(error_message):
                yield
        finally:
            for hooks in reversed(aside):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


_ASIDE = _StandingAside()


def top_hooks() -> Any:
    """The hooks that autograd asks in this thread, ours or not; ``None`` for none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
