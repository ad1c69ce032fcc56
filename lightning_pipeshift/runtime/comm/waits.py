"""Waits for messages between two ranks, and ends these waits when the run has failed.

When a connection breaks, gloo does not notify the operations in progress on it: a message that has
been sent or received in part by then (in gloo's ``tcp::Pair``, ``tx_`` and ``rx_`` hold it) is
waited for until the process group's timeout, half an hour. gloo can end such a wait
(``Work::abort`` of its sends and receives), but torch has no Python binding of it. So it is called
through ``ctypes``, with the pointer that pybind11 gives other libraries (its "conduit"). If
anything about that is not as expected, nothing is called.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

# Pybind11's name for the binary interface of torch's wheels for Linux.
_INTERFACE: Final = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"
# Where a class' virtual functions begin in its table, in pointers (Itanium C++ ABI, 2.5.2).
_FIRST_FUNCTION: Final = 2

# The operation that each thread waits for.
_under_way: dict[int, Any] = {}


def complete(work: Any) -> None:
    """Waits for a send or a receive.

    Raises:
        RuntimeError: the connection broke, or :func:`interrupt_waits` was called.
    """
    thread = threading.get_ident()
    _under_way[thread] = work
    try:
        if not work.wait():
            raise RuntimeError("the wait was ended because the run has failed")
    finally:
        del _under_way[thread]


def interrupt_waits() -> None:
    """Ends all waits of :func:`complete` that are in progress, if they use gloo on Linux."""
    for work in list(_under_way.values()):
        _abort(work)


def _abort(work: Any) -> None:
    functions = _abort_functions()
    pointer = _pointer(work) if functions else None
    if pointer is not None:
        table = ctypes.c_void_p.from_address(pointer).value
        for of_class, abort in functions:
            if table == of_class:
                abort(pointer)


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    except OSError:
        return None


@functools.cache
def _abort_functions() -> list[tuple[int, Callable[[int], None]]]:
    """For gloo's sends and receives: the address that identifies the class (its table of virtual
    functions), and the function that ends a wait.
    """
    found = []
    for name in ("8SendWork", "8RecvWork"):
        try:
            table = ctypes.c_void_p.in_dll(_library(), f"_ZTVN4c10d16ProcessGroupGloo{name}E")
            abort = getattr(_library(), f"_ZN4c10d16ProcessGroupGloo{name}5abortEv")
        except (AttributeError, ValueError, TypeError):
            return []
        abort.argtypes, abort.restype = [ctypes.c_void_p], None
        first = ctypes.addressof(table) + _FIRST_FUNCTION * ctypes.sizeof(ctypes.c_void_p)
        found.append((first, abort))
    return found


@functools.cache
def _type_of_work() -> Any:
    """The C++ type ``c10d::Work``, as pybind11 wants it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    new.restype = ctypes.py_object
    information = ctypes.c_char.in_dll(_library(), "_ZTIN4c10d4WorkE")
    # The name is kept by reference: a constant lives as long as the capsule.
    return new(ctypes.addressof(information), _TYPE_NAME, None)


_TYPE_NAME: Final = b"St9type_info"


def _pointer(work: Any) -> int | None:
    """The address of the C++ object; ``None`` if pybind11 does not tell."""
    try:
        capsule = work._pybind11_conduit_v1_(_INTERFACE, _type_of_work(), b"raw_pointer_ephemeral")
    except (AttributeError, ValueError, RuntimeError):
        return None
    if capsule is None:
        return None
    api = ctypes.pythonapi
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetName.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_void_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    pointer = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    return int(pointer) if pointer else None
