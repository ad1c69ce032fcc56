"""State that steps use, and that is in no attribute of their module: globals of user code,
variables of enclosing functions, attributes of classes, of callbacks, of the data module and of the
Trainer, and what a process has one of, as the default type of tensors.

Nothing tells when it is used. So its names count: of what may run in front of a read, and of what
may run behind it. What has a name in both is compared whenever a part of a step ends. Code that
runs later, or has run, is what the frames of Python show: each with the functions and methods whose
names it has, and those that these have.
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeshift.step.code_names import (
    Names,
    by_name,
    functions_in,
    is_user_code,
    modules_of_stack,
    names_from,
    names_of,
    reached,
    stack,
    with_called,
)
from lightning_pipeshift.values.value import Value, version_in

# What is beyond that in an object is not compared.
_MOST_CONTENTS = 10_000
_CALLED = frozenset({"forward", "__call__", "__getattr__", "__getitem__", "__setitem__"}) | {
    f"__{name}__" for name in ("iter", "next", "len", "bool", "enter", "exit", "contains", "iadd")
}
_ABSENT = object()


def _if_any(find: Callable[[], Any]) -> Callable[[], Any]:
    def found() -> Any:
        try:
            return find()
        except (OSError, RuntimeError):
            return None

    return found


_SETTINGS: dict[str, Callable[[], Any]] = {
    "`os.environ`": lambda: dict(os.environ),
    "torch's default type": torch.get_default_dtype,
    "whether torch is deterministic": torch.are_deterministic_algorithms_enabled,
    "torch's precision of products": torch.get_float32_matmul_precision,
    "torch's number of threads": torch.get_num_threads,
    "torch's anomaly mode": torch.is_anomaly_enabled,
    "NumPy's treatment of errors": np.geterr,
    # Not the filters: modules that are imported in the middle of a step add some.
    "where warnings go": lambda: (
        warnings.showwarning,
        getattr(warnings, "_showwarnmsg_impl", None),
    ),
    "`sys.stdout`": lambda: sys.stdout,
    "`sys.stderr`": lambda: sys.stderr,
    "the working directory": _if_any(os.getcwd),
    "asyncio's event loop": _if_any(asyncio.get_running_loop),
}
# What a step sets of the Trainer that holds behind the batch only.
_OF_THE_END = frozenset(["should_stop"])
_PLAIN = (int, float, str, bytes, complex, type(None))


def remedy(what: str) -> str:
    """What to do in place of a change that :meth:`OutsideState.changed` has found."""
    if what in _SETTINGS:
        return "Read no value until it is set back"
    return "Keep it in an attribute of the module"


class OutsideState:
    """Tells what has changed of the state outside of a module that steps use on both sides of a
    read.

    Args:
        classes: of the modules whose code runs on every stage.
        in_layers: classes of which nothing counts: another rule holds inside of layers.
        objects: others with attributes, by their descriptions.
        is_fixed: whether an object needs no comparison.
    """

    def __init__(
        self,
        classes: Iterable[type],
        in_layers: Iterable[type],
        objects: Mapping[str, Any],
        is_fixed: Callable[[Any], bool],
    ) -> None:
        self._objects, self._is_fixed = objects, is_fixed
        self._classes = {
            cls: None
            for each in (*classes, *map(type, objects.values()))
            for cls in each.__mro__
            if is_user_code(cls.__module__)
        }
        self._in_layers = set(in_layers).difference(self._classes)
        self._seen: set[Any] = set()
        self._names: Names = frozenset()
        self._found: dict[str, _Content] = {}
        self._settings = _settings()
        self.unseen = ""
        """What steps use on both sides of a read, and cannot be compared."""

    def note_read(self) -> None:
        """Called in a read: finds what may be used on both sides of it."""
        frames = tuple(stack())
        if frames in self._seen:
            return
        self._seen.add(frames)
        spaces = self._spaces(set(modules_of_stack()))
        known = by_name(spaces.values())
        called = (x for cls in self._classes for name, x in vars(cls).items() if name in _CALLED)
        any_time = [names_of(function.__code__) for x in called for function in functions_in(x)]
        sides: list[set[str]] = []
        for is_later in (False, True):
            codes = [names_from(code, offset, is_later) for code, offset in frames]
            sides.append(with_called(set().union(*codes, *any_time), known))
        new = sides[0].intersection(sides[1]).difference(self._names, _OF_THE_END)
        self._names |= new
        if not new:
            return
        for what, find in _named(new, spaces, [code for code, _ in frames]):
            if what in self._found:
                continue
            content = self._found[what] = _Content(find, self._is_fixed)
            if content.is_unseen:
                self.unseen = self.unseen or what

    def changed(self) -> str:
        """What has changed since the last call; "" for nothing."""
        found, settings = "", _settings()
        if settings != self._settings:
            found = next(x for x, was in self._settings.items() if settings[x] != was)
            self._settings = settings
        for what, content in self._found.items():
            if content.has_changed():
                found = found or what
                self._found[what] = content = _Content(content.find, self._is_fixed)
                if content.is_unseen:
                    self.unseen = self.unseen or what
        return found

    def _is_used(self, x: Any) -> bool:
        """Whether something in a module is a class whose objects the steps may use."""
        is_class = isinstance(x, type) and is_user_code(x.__module__) and x not in self._in_layers
        # No other model than this one is trained. Of what it can be, all have these methods.
        return is_class and not any(hasattr(x, name) for name in ("training_step", "on_fit_start"))

    def _spaces(self, modules: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Where names of user code are looked up.

        Args:
            modules: those of Python whose code runs.
        """
        classes = dict(self._classes)
        spaces: dict[str, Mapping[str, Any]] = {}
        begins = {*modules, *(cls.__module__ for cls in (*classes, *self._in_layers))}
        for name in sorted(reached(begins)):
            space = vars(sys.modules[name])
            spaces[f"of `{name}`"] = space
            classes.update((x, None) for x in list(space.values()) if self._is_used(x))
        for cls in classes:
            spaces[f"of the class `{cls.__module__}.{cls.__qualname__}`"] = vars(cls)
        for what, x in self._objects.items():
            spaces[f"of {what}"] = getattr(x, "__dict__", {})
        return spaces


class _Content:
    """What an object held, or what is in it.

    Args:
        find: returns the object.
        is_fixed: as of :class:`OutsideState`.
    """

    def __init__(self, find: Callable[[], Any], is_fixed: Callable[[Any], bool]) -> None:
        self.find = find
        self.is_unseen = False
        """Whether there is more in it than is compared."""
        # Objects and what was in them. As these are kept, none can be another one's place later.
        self._held: list[tuple[Any, Any]] = []
        self._root = find()
        seen: set[int] = set()
        todo, count = [self._root], 0
        while todo:
            x = todo.pop()
            if isinstance(x, _PLAIN) or id(x) in seen or is_fixed(x):
                continue
            seen.add(id(x))
            inside = _inside(x)
            if inside is None:
                self.is_unseen = True
                continue
            self._held.append((x, inside))
            if isinstance(inside, tuple):
                count += len(inside)
                todo += inside
            if count > _MOST_CONTENTS:
                self.is_unseen = True
                break

    def has_changed(self) -> bool:
        """Whether the object is another one, or anything in it."""
        return not (
            _is_same(self.find(), self._root)
            and all(_is_same(_inside(x), inside) for x, inside in self._held)
        )


def _inside(x: Any) -> Any:
    """What is in an object: its parts, or a number or bytes that differ when it has changed;
    ``None`` if that cannot be seen.
    """
    if isinstance(x, Tensor):
        return x.account.memory.num_writes if isinstance(x, Value) else version_in(x)
    if isinstance(x, np.ndarray):
        return None if x.dtype.hasobject else x.tobytes()
    if isinstance(x, types.FunctionType):
        cells = (cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType())
        return (*cells, *(x.__defaults__ or ()), *vars(x).values())
    if isinstance(x, types.MethodType | types.BuiltinMethodType):
        return (x.__self__,)
    cls: Any = type(x)
    slots = [name for each in cls.__mro__ for name in _slots_of(each)]
    parts = tuple(getattr(x, name, _ABSENT) for name in slots)
    space = getattr(x, "__dict__", None)
    if isinstance(space, dict):
        parts += (*space, *space.values())
    if isinstance(x, dict):
        return (*parts, *dict.keys(x), *dict.values(x))
    if isinstance(x, list | tuple | deque | set | frozenset):
        return (*parts, *x)
    return parts if x is _ABSENT or (_is_of_python(cls) and (slots or space)) else None


@cache
def _is_of_python(cls: Any) -> bool:
    """Whether objects of a class have no state outside of their attributes."""
    is_heap_type, reduce = 1 << 9, object.__reduce__
    return cls.__reduce__ is reduce and all(
        each.__flags__ & is_heap_type for each in cls.__mro__ if each is not object
    )


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    if not is_user_code(cls.__module__):
        return ()
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_same(now: Any, before: Any) -> bool:
    if type(now) is tuple and type(before) is tuple:
        if len(now) != len(before):
            return False
        return all(map(is_, now, before)) or all(map(_is_same_part, now, before))
    return _is_same_part(now, before)


def _is_same_part(now: Any, before: Any) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, _PLAIN) and now == before
    )


def _settings() -> dict[str, Any]:
    return {what: find() for what, find in _SETTINGS.items()}


# --- names ---


def _named(
    names: set[str], spaces: Mapping[str, Mapping[str, Any]], codes: Iterable[types.CodeType]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The state of these names: descriptions, and what returns it."""
    running = set(codes)
    for where, space in spaces.items():
        for name, x in list(space.items()):
            for function in functions_in(x):
                code, cells = function.__code__, function.__closure__ or ()
                if name in names or code in running:
                    for variable, cell in zip(code.co_freevars, cells, strict=True):
                        if variable in names:
                            what = f"`{variable}` of a function around `{code.co_name}`"
                            yield what, partial(_in_cell, cell)
            is_code = isinstance(x, type | types.ModuleType) or hasattr(type(x), "__get__")
            if name in names and not is_code:
                yield f"`{name}` {where}", partial(space.get, name, _ABSENT)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
