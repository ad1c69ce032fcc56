"""Whether a microbatch's step may begin while an earlier one waits for what it reads.

A read (``loss.item()``) ends a part of a step; what is behind the last one is its tail. Other
microbatches' parts may run before a part that waits. User code must not notice: it has to find what
it would find if each step ran as a whole before the next one. Two things see to that.

Trained numbers: only a wait for a value of a later stage is passed. So the last stage runs all
steps in their order, and messages compare what the others run with that: other numbers end with an
error.

Everything else, and so that there is no such error: what a part uses of the Python state outside of
layers is noted, attribute by attribute. An attribute that parts in front of a read and parts behind
it use, and one of them changes, makes a step that is ahead wait where it comes to it, until the
steps before it have ended. The first steps are only watched. State that is not in attributes of the
module and its parts (globals, variables of enclosing functions, attributes of classes), and
attributes of layers, cannot be watched like this: if the steps change it, none of them runs ahead.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.arguments import is_node, parts_of
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.layer_contracts import is_heard
from lightning_pipeshift.values.layer_state import NO_STATE
from lightning_pipeshift.values.value import Value, user_line, version_in

# How many runs with reads are watched before a step may run ahead.
_WATCHED_RUNS = 2
# Parts behind this one count as one.
_MOST_PARTS = 30
# What is beyond that in an object is not compared.
_MOST_CONTENTS = 10_000
_PLAIN = (int, float, str, bytes, type(None))
_FIXED = (
    nn.Module,
    nn.Parameter,
    *_PLAIN,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    PurePath,
)
_LIBRARIES = frozenset(
    {"lightning", "lightning_fabric", "lightning_pipeshift", "logging", "pytorch_lightning"}
    | {"torch"}
)
_MISSING = object()


class Part(Protocol):
    """A microbatch's step that runs."""

    level: int
    """How many values of later stages it has read so far."""
    used: set[str]
    """What it has used so far."""

    def followers(self) -> Iterable[Part]:
        """The later microbatches' steps that have begun."""

    def is_ahead(self) -> bool:
        """Whether an earlier microbatch's step is suspended."""

    def stall(self, name: str) -> None:
        """Waits until the steps of all earlier microbatches have ended."""


class Tails:
    """Watches the state that the steps of a module use outside of layers.

    Args:
        core: of this stage.
        say: shows the user a sentence.
        num_watched: how many runs with reads are only watched, before a step may run ahead.
    """

    def __init__(
        self, core: Core, say: Callable[[str], object] = print, num_watched: int = _WATCHED_RUNS
    ) -> None:
        self._core, self._say, self._num_to_watch = core, say, num_watched
        inside = {module for layer in core.layers for module in layer.modules()}
        self._modules = {
            id(module): (f"self.{name}" if name else "self", module)
            for name, module in core.module.named_modules()
            if module not in inside and _library_of(type(module)) != "torch"
        }
        self._outside = _state_outside(type(core.module))
        self._touched: dict[str, int] = {}
        """By the attribute's name: a bit for each part that uses it."""
        self._changed: set[str] = set()
        self._before: dict[str, tuple[Any, Any]] = {}
        self._outside_before: list[Any] = []
        self._num_watched, self._has_read = 0, True
        self._is_watching = self._is_said = False
        self.reason = ""
        """Why no step runs ahead in this training; empty if steps may."""
        self.current: Part | None = None
        """The step that runs now."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may run ahead of those before it."""
        return self._is_watching and not self._is_new and not self.reason

    @property
    def _is_new(self) -> bool:
        """Whether steps are only watched so far."""
        return self._num_watched < self._num_to_watch

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of a run of microbatches."""
        if not self._has_read or self.reason:
            # What reads nothing has no tails. A run that reads is watched from the next one on.
            self._has_read = False
            yield
            return
        core, self._has_read = self._core, False
        num_written = len(core.written)
        self._begin_part()
        with ExitStack() as stack:
            for cls in {type(module) for _, module in self._modules.values()}:
                stack.enter_context(_intercepted(cls))
            _WATCHERS.update(dict.fromkeys(self._modules, self))
            stack.callback(lambda: [_WATCHERS.pop(each, None) for each in self._modules])
            self._is_watching = True
            yield
        self._is_watching = False
        self._num_watched += self._has_read
        if len(core.written) > num_written or core.switched:
            self._never("writes to parameters, or freezes or thaws some", "Do it between steps")
        for number, state in enumerate(core.states):
            if state:
                name = f"{core.names[number]}.{state[0].path}.{state[0].name}".replace("..", ".")
                self._never(f"runs a layer that changes its attribute `{name}`", "Return it")
            if any(is_heard(module) for _, module in core.modules[number]):
                self._never(
                    f"calls forward hooks of the layer `{core.names[number]}`", "Remove them"
                )

    def _never(self, what: str, advice: str) -> None:
        if self._has_read and not self.reason:
            self.reason = what
            self._say(
                f"A step that reads values {what}. So each microbatch's step waits for"
                " what it reads before the next one begins, and stages idle meanwhile."
                f" {advice}, or read the values in `on_train_batch_end`."
            )

    # --- parts ---

    def next_part(self, part: Part) -> None:
        """The running step has read a value of a later stage."""
        self._has_read = True
        if torch.is_inference_mode_enabled():
            self._never("reads some in inference mode", "Use `torch.no_grad()`")
        self._end_part(part)
        part.level += 1
        self._begin_part()
        if self._is_new:
            for name in _set_later(type(self._core.module)):
                for label, _ in self._modules.values():
                    self._note(f"{label}.{name}", part, True)

    def _begin_part(self) -> None:
        if self._is_new:
            self._outside_before = [_Content(find()) for _, find in self._outside]

    def _end_part(self, part: Part) -> None:
        for name, (x, before) in self._before.items():
            if _Content(x) != before:
                self._changed.add(name)
        self._before.clear()
        if self._is_new:
            for (name, find), before in zip(self._outside, self._outside_before, strict=True):
                if _Content(find()) != before:
                    self._never(f"changes {name}", "Keep it in an attribute of the module")

    def end_step(self, part: Part) -> None:
        """The running step has ended."""
        self._end_part(part)
        self._begin_part()

    # --- attributes ---

    def use_attribute(self, module: nn.Module, name: str, sets: bool) -> None:
        """User code gets or sets an attribute of a module."""
        if self.current is None or name in NO_STATE or name.startswith("__"):
            return
        table = object.__getattribute__(module, "__dict__")
        value = table.get(name, _MISSING)
        if value is _MISSING:
            value = table.get("_buffers", {}).get(name, _MISSING)
        if value is _MISSING and not sets:
            return
        self.use(f"{self._modules[id(module)][0]}.{name}", value, sets)

    def use(self, name: str, value: Any, changes: bool) -> None:
        """The running step uses something; it waits if it has to.

        Args:
            name: of what it uses.
            value: what it is now; it may be changed later by what gets it now.
            changes: whether the step changes it now.
        """
        part = self.current
        if part is None:
            return
        part.used.add(name)
        if changes and name not in self._changed:
            self._require_new(name, part)
        bit = 1 << min(part.level, _MOST_PARTS)
        before = self._note(name, part, changes)
        if name not in self._changed and not _is_fixed(value):
            if not _can_be_compared(value) or (not self._is_new and before and not before & bit):
                # Or it is used by other parts than it was when it was compared.
                self._changed.add(name)
            elif self._is_new:
                self._before.setdefault(name, (value, _Content(value)))
        if name in self._changed and self._touched[name] >> (part.level + 1) and part.is_ahead():
            part.stall(name)

    def _note(self, name: str, part: Part, changes: bool) -> int:
        """Notes a use; returns the parts that were known to use it."""
        before = self._touched.get(name, 0)
        self._touched[name] = before | 1 << min(part.level, _MOST_PARTS)
        if changes:
            self._changed.add(name)
        return before

    def _require_new(self, name: str, part: Part) -> None:
        if any(name in one.used for one in part.followers()):
            raise LayerError(
                f"The step changes `{name}` ({user_line()}) behind a read, which no step has done"
                " before, and the next microbatch's step has used it already. Change it in"
                " `on_train_batch_end`, or assign it in every step, whether it changes or not."
            )

    def say_early_wait(self, where: str) -> None:
        """Says once that steps wait for each other in front of layers.

        Args:
            where: what they use, and in which line.
        """
        if not self._is_said:
            self._is_said = True
            self._say(
                f"Steps use {where} in front of a layer; the part of the step behind a"
                " read (`loss.item()`) uses it, too, and one of them changes it. So each"
                " microbatch's step waits there for the end of the one before, and stages idle"
                " meanwhile. Change it in `on_train_batch_end`, or use it behind the read only."
            )


_WATCHERS: dict[int, Tails] = {}
"""By the ``id`` of a module whose attributes are watched now."""


_INTERCEPTED: dict[type, tuple[int, dict[str, Any]]] = {}
"""Classes whose objects' attributes are watched: in how many contexts, and their own methods."""
_USES = {"__getattribute__": False, "__setattr__": True, "__delattr__": True}


@contextmanager
def _intercepted(cls: type) -> Iterator[None]:
    """Context in which uses of attributes of a class's objects are told to who watches these."""
    count, own = _INTERCEPTED.get(cls, (0, {}))
    if not count:
        own = {name: vars(cls)[name] for name in _USES if name in vars(cls)}
        for name, sets in _USES.items():
            setattr(cls, name, _telling(getattr(cls, name), sets))
    _INTERCEPTED[cls] = count + 1, own
    try:
        yield
    finally:
        count, own = _INTERCEPTED.pop(cls)
        if count > 1:
            _INTERCEPTED[cls] = count - 1, own
        else:
            for name in _USES:
                if name in own:
                    setattr(cls, name, own[name])
                else:
                    delattr(cls, name)


def _telling(method: Callable[..., Any], sets: bool) -> Callable[..., Any]:
    def use(self: Any, name: str, *value: Any) -> Any:
        watcher = _WATCHERS.get(id(self))
        if watcher is not None:
            watcher.use_attribute(self, name, sets)
        return method(self, name, *value)

    return use


def _set_later(root: type) -> set[str]:
    """The names of attributes that functions which run now may still set, and so may the methods of
    a class that they call.
    """
    found: set[str] = set()
    names: set[str] = set()
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            later = _code_from(frame.f_code, frame.f_lasti)
            found, names = found | later[0], names | later[1]
        frame = frame.f_back
    todo, seen = names, set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        for cls in root.__mro__:
            method = vars(cls).get(name)
            if isinstance(method, types.FunctionType) and _library_of(cls) not in _LIBRARIES:
                sets, gets = _code_from(method.__code__, -1)
                found |= sets
                todo |= gets - seen
    return found


@lru_cache
def _code_from(code: types.CodeType, offset: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names of attributes that code behind an instruction sets, and those that it gets."""
    instructions = list(dis.get_instructions(code))
    # From the begin of the statement: what it calls at its end is got first.
    ends = ("STORE_", "POP_", "RESUME")
    begins = [x.offset for x in instructions if x.offset < offset and x.opname.startswith(ends)]
    later = [x for x in instructions if x.offset > max(begins, default=-1)]
    if any("BACKWARD" in one.opname for one in later):
        later = instructions
    sets = {one.argval for one in later if one.opname in ("STORE_ATTR", "DELETE_ATTR")}
    gets = {str(one.argval) for one in later if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(sets), frozenset(gets)


def _library_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _is_fixed(x: Any) -> bool:
    """Whether nothing in an object changes, as far as steps are concerned."""
    if isinstance(x, tuple):
        return all(map(_is_fixed, x))
    return isinstance(x, _FIXED) or x is _MISSING or _library_of(type(x)) in _LIBRARIES


def _can_be_compared(x: Any) -> bool:
    """Whether :func:`_content` tells all of an object: one with hidden state (a generator of random
    numbers, a file) has its own way to be pickled, or none.
    """
    if isinstance(x, Value):
        return False
    if isinstance(x, Tensor | tuple | list | dict | set | deque | np.ndarray):
        return True
    names = "__reduce__", "__reduce_ex__", "__getstate__"
    is_plain = all(getattr(type(x), name, None) is getattr(object, name, None) for name in names)
    return is_node(x) and is_plain


class _Content:
    """What is in an object, as far as it tells whether the object was changed meanwhile."""

    def __init__(self, x: Any) -> None:
        self._found: list[Any] = []
        # Kept, so that no `id` is used again.
        self._seen: dict[int, Any] = {}
        todo = [x]
        while todo and len(self._seen) < _MOST_CONTENTS:
            one = todo.pop()
            if isinstance(one, _PLAIN):
                self._found += type(one), one
                continue
            self._found.append(id(one))
            if id(one) in self._seen or _is_fixed(one):
                continue
            self._seen[id(one)] = one
            if isinstance(one, Tensor):
                self._found.append(version_in(one))
            elif isinstance(one, tuple):
                todo += one
            elif is_node(one):
                parts = parts_of(one)
                self._found.append(len(parts))
                for place, part in parts:
                    todo += place[1], part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self._found == other._found

    __hash__ = None  # type: ignore[assignment]


def _state_outside(root: type) -> list[tuple[str, Callable[[], Any]]]:
    """The state outside of objects that the methods of a class use, or functions of the same
    package that they call: a description, and what gets it.
    """
    package = _library_of(root)
    found: dict[str, Callable[[], Any]] = {}
    todo: list[Any] = [
        cls for cls in root.__mro__ if _library_of(cls) not in (*_LIBRARIES, "builtins")
    ]
    seen: set[int] = set()

    def add(what: str, find: Callable[[], Any]) -> None:
        x = find()
        if isinstance(x, type | types.FunctionType):
            if getattr(x, "__module__", "").partition(".")[0] == package:
                todo.append(x)
        elif (
            not isinstance(x, types.ModuleType | nn.Module)
            and _library_of(type(x)) not in _LIBRARIES
        ):
            found[what] = find

    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, type):
            for name, x in list(vars(one).items()):
                function = getattr(x, "fget", None) or getattr(x, "__func__", x)
                if isinstance(function, types.FunctionType):
                    todo.append(function)
                elif not name.startswith("__"):
                    add(
                        f"the attribute `{name}` of the class `{one.__name__}`",
                        partial(vars(one).get, name),
                    )
            continue
        for name in _names_in(one.__code__):
            if name in one.__globals__:
                add(
                    f"the global `{name}` of `{one.__module__}`", partial(one.__globals__.get, name)
                )
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            add(
                f"the variable `{name}` of a function around `{one.__name__}`",
                partial(_in_cell, cell),
            )
    return list(found.items())


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
