"""Ends code before it has an effect that cannot be undone.

A profile function of Python's sees each call, also those of functions written in C, before they
run, and an error that it raises ends the code there.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Functions written in C, by the Python modules that they belong to.
_FUNCTIONS = {
    "builtins": {"print", "input"},
    "io": {"open"},
    "_io": {"open", "open_code"},
    "_thread": {"start_new_thread", "start_joinable_thread"},
    "_posixsubprocess": {"fork_exec"},
    os.name: {
        *("write", "pwrite", "writev", "sendfile", "truncate", "ftruncate", "open", "mkdir"),
        *("remove", "unlink", "rmdir", "rename", "replace", "link", "symlink", "chmod", "chown"),
        *("utime", "system", "posix_spawn", "posix_spawnp", "fork", "kill", "putenv", "unsetenv"),
    },
}
_METHODS = frozenset(
    {"write", "writelines", "truncate", "send", "sendall", "sendto", "sendmsg", "put", "put_nowait"}
)
# Nearly always those of a library.
_IN_MEMORY = (io.StringIO, io.BytesIO)
# Functions written in Python.
_CODES = {
    function.__code__
    for function in (
        logging.Logger.handle,
        queue.Queue.put,
        queue.Queue.get,
        threading.Thread.start,
        subprocess.Popen.__init__,
    )
}
# What they do is seen elsewhere, or later.
_WRITERS = tuple(
    f"{name}."
    for name in (
        *("lightning.pytorch.loggers", "lightning.fabric.loggers", "pytorch_lightning.loggers"),
        *("lightning_fabric.loggers", "torch.utils.tensorboard", "tensorboard", "tensorboardX"),
        *("wandb", "mlflow", "neptune", "comet_ml"),
    )
)
# Python reads files by itself: modules that are imported, and lines of code for messages.
_READERS = ("importlib.", "linecache", "tokenize", "inspect", "zipimport")


class EffectError(BaseException):
    """Code would have an effect that cannot be undone.

    Not an ``Exception``, so that error handlers in user code do not catch it.
    """


@contextmanager
def no_effects() -> Iterator[None]:
    """Context in which code ends before it writes to files, sends, logs, or begins threads.

    Raises:
        EffectError: code would have done so, or a profiler runs in this thread.
    """
    if sys.getprofile() is not None:
        raise EffectError("a profiler runs, which sees all calls")
    sys.setprofile(_require_none)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def effects_allowed() -> Iterator[None]:
    """Context inside of :func:`no_effects`, of code that is not the user's."""
    guard = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(guard)


def _require_none(frame: Any, event: str, arg: Any) -> None:
    if event == "c_call":
        name, owner = arg.__name__, getattr(arg, "__self__", None)
        if name in _FUNCTIONS.get(arg.__module__ or "", ()):
            reader = frame.f_globals.get("__name__", "")
            if not f"{reader}.".replace("_frozen_", "").startswith(_READERS):
                raise EffectError(f"it calls `{name}`")
        elif name in _METHODS and not isinstance(owner, _IN_MEMORY):
            is_socket = type(owner).__module__ in ("_socket", "socket", "ssl", "_ssl")
            if is_socket or isinstance(owner, io.IOBase | queue.SimpleQueue):
                raise EffectError(f"it calls `{type(owner).__name__}.{name}`")
    elif event == "call":
        module = frame.f_globals.get("__name__", "")
        if frame.f_code in _CODES or f"{module}.".startswith(_WRITERS):
            raise EffectError(f"it calls `{module}.{frame.f_code.co_name}`")
