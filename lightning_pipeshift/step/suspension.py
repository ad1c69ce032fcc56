"""Saves and restores what a step has set in its thread, so that the step can be suspended.

A microbatch's step that waits is suspended (it is a greenlet: its Python stack is kept aside), and
another one runs in the same thread. In that thread are the state of random generators, of autograd
and of autocast: each step has to find its own again.

Threads would not do: autograd numbers its nodes by thread, and runs them in the reverse order of
these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lightning_pipeshift.compat.torch_private import (
    dispatch_mode_stack,
    function_mode_stack,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_hooks,
    top_saved_hooks,
)
from lightning_pipeshift.devices.properties import generators_of
from lightning_pipeshift.model.random.random_streams import (
    host_state,
    seed_host,
    set_host_state,
    stream_seed,
)


class ThreadState:
    """The state of this thread that a step may set, and that another one must not see. Making one
    takes all hooks and modes from their stacks: some state has to be restored next.

    Inference mode cannot be set aside, so no step is suspended in it.

    Args:
        device: the stage's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators = [generator.get_state() for generator in generators_of(device)]
        self._host = host_state()
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._dtype = torch.get_default_dtype()
        self._hooks: list[Any] = []
        while (hooks := top_saved_hooks()) is not None:
            self._hooks.append(hooks)
            pop_saved_hooks()
        self._functions = _popped(function_mode_stack, pop_function_mode)
        self._dispatches = _popped(dispatch_mode_stack, pop_dispatch_mode)

    def restore(self) -> None:
        """Sets the state that was there when this object was made; may be called again."""
        while top_saved_hooks() is not None:
            pop_saved_hooks()
        _popped(function_mode_stack, pop_function_mode)
        _popped(dispatch_mode_stack, pop_dispatch_mode)
        for mode in reversed(self._dispatches):
            push_dispatch_mode(mode)
        for mode in reversed(self._functions):
            push_function_mode(mode)
        for hooks in reversed(self._hooks):
            push_saved_hooks(*hooks)
        torch.set_default_dtype(self._dtype)
        torch.set_autocast_cache_enabled(self._caches)
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_grad_enabled(self._grad)
        set_host_state(self._host)
        for generator, state in zip(generators_of(self._device), self._generators, strict=True):
            generator.set_state(state)


def _popped(stack: Callable[[], list[Any]], pop: Callable[[], Any]) -> list[Any]:
    """Takes all modes from a stack; the innermost is first."""
    modes = list(reversed(stack()))
    for _ in modes:
        pop()
    return modes


class kept(ExitStack):
    """Context after which the thread is as it was before."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        state = ThreadState(device)
        state.restore()
        self.callback(state.restore)


def seed_generators(device: torch.device, *key: int | str) -> None:
    """Seeds the global generators (torch's on the CPU and the device, NumPy's and Python's) for the
    user's code between layers: with the same key, all stages draw the same numbers.
    """
    seed = stream_seed(*key)
    for generator in generators_of(device):
        generator.manual_seed(seed)
    seed_host(seed)
