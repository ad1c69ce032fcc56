"""PipeShift's hooks on tensors that autograd saves, and their use together with ``torch.func``.

``torch.func.grad`` and similar functions refuse to run while such hooks are active. User code must
run as it would without these hooks. So they are removed while ``torch.func`` runs, and tensors
saved meanwhile remain on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lightning_pipeshift.compat.torch_private import (
    pop_saved_hooks,
    push_saved_hooks,
    top_saved_hooks,
)

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

Disable = Callable[[str], AbstractContextManager[None]]


class _Local(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_OURS = _Local()
"""The active hooks in this thread, innermost last."""


@contextmanager
def saving(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which autograd saves ``pack(tensor)`` instead of a tensor, and restores the tensor
    by ``unpack``.
    """
    with _ASIDE.installed(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _OURS.hooks.append((pack, unpack))
        try:
            yield
        finally:
            _OURS.hooks.pop()


class _StandingAside:
    """Replaces the function by which ``torch.func`` disables hooks, while PipeShift's are
    active.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._original: Disable | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which torch's function is replaced."""
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
        """Context without PipeShift's hooks, in which no hooks may be set."""
        original = self._original
        assert original is not None
        aside: list[Hooks] = []
        for hooks in reversed(_OURS.hooks):
            top = top_saved_hooks()
            if top is None or top[0] is not hooks[0]:
                # The user's hooks: torch raises the error that they do not work together.
                break
            pop_saved_hooks()
            aside.append(hooks)
        try:
            with original(error_message):
                yield
        finally:
            for hooks in reversed(aside):
                push_saved_hooks(*hooks)


_ASIDE = _StandingAside()
