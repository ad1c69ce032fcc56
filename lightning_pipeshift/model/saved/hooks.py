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
from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    is_without_memory,
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
    by ``unpack``. Tensors without memory, as compilers use them, are saved as they are.
    """

    def packed(tensor: Tensor) -> Any:
        return tensor if is_without_memory(tensor) else pack(tensor)

    def unpacked(held: Any) -> Any:
        return held if is_without_memory(held) else unpack(held)

    with _ASIDE.installed(), torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        _OURS.hooks.append((packed, unpacked))
        try:
            yield
        finally:
            _OURS.hooks.pop()


def are_alone() -> bool:
    """Whether no hooks are in force but PipeShift's."""
    top, ours = top_saved_hooks(), _OURS.hooks
    return top is None or (bool(ours) and top[0] is ours[-1][0])


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
        """Context without PipeShift's hooks, in which no hooks may be set. The user's remain, and
        those that the user's are inside of: with them, torch raises the error that they do not work
        together.
        """
        assert self._original is not None
        aside: list[Hooks] = []
        for hooks in reversed(_OURS.hooks):
            top = top_saved_hooks()
            if top is None or top[0] is not hooks[0]:
                break
            pop_saved_hooks()
            aside.append(hooks)
        try:
            with self._original(error_message):
                yield
        finally:
            for hooks in reversed(aside):
                push_saved_hooks(*hooks)


_ASIDE = _StandingAside()
