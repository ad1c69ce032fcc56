"""Whether a microbatch's step may begin while an earlier one waits for what it reads.

A read (``loss.item()``) ends a part of a step; what is behind the last one is its tail. While a
part waits for its read, the next microbatch's step may begin: it runs ahead. User code must not
notice: it has to find what it would find if each step ran as a whole before the next one.

- Only waits for values of a later stage let others run ahead. So the last stage runs all steps in
  their order. Messages compare what the other stages run with that.
- What a part uses of the attributes of modules outside of layers is noted. A step that is ahead may
  use what cannot change by itself (numbers, texts, modules). Where it comes to anything else, or to
  an attribute that an earlier step may still set, or has to see as it is, it waits until all
  earlier steps have ended. An attribute that a step sets or uses too late, since none has done so
  before, is an error.
- Steps that set attributes of layers, write to parameters, or change state that is in no attribute
  of a module (globals, variables of enclosing functions, attributes of classes), never run ahead.
  Of the latter, the first steps are watched.
"""

from __future__ import annotations

import dis
import enum
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.values.arguments import is_node, parts_of
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.layer_contracts import is_heard
from lightning_pipeshift.values.layer_state import NO_STATE
from lightning_pipeshift.values.value import running, user_line, version_in

# How many runs with reads are watched before a step may run ahead.
_WATCHED_RUNS = 2
# Parts behind this one count as one.
_MOST_PARTS = 30
# What is beyond that in an object is not compared.
_MOST_CONTENTS = 100_000
_PLAIN = (int, float, str, bytes, type(None))
_FIXED = (
    nn.Module,
    nn.Parameter,
    *_PLAIN,
    type,
    types.ModuleType,
    torch.dtype,
    torch.device,
    enum.Enum,
    PurePath,
)
_LIBRARIES = frozenset(
    {"lightning", "lightning_fabric", "lightning_pipeshift", "logging", "pytorch_lightning"}
    | {"torch"}
)


class Part(Protocol):
    """A microbatch's step that runs."""

    level: int
    """How many values of later stages it has read so far."""
    used: set[str]
    """The names of the attributes and layers that it has used so far."""
    changed: set[str]
    """The names of those that it has set so far."""

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
        self._labels = {
            id(module): f"self.{name}" if name else "self"
            for name, module in core.module.named_modules()
        }
        self._seen = {
            id(module): type(module)
            for module in core.module.modules()
            if module not in inside and _library_of(type(module)) != "torch"
        }
        """The modules whose attributes are seen when they are used, not only when they are set."""
        self._outside = _state_outside(type(core.module))
        self._touched: dict[str, int] = {}
        """By the attribute's name: a bit for each part that uses it."""
        self._changed: set[str] = set()
        self._outside_before: list[Any] = []
        self._num_watched, self._has_read = 0, True
        self._hindrance = "", ""
        self.is_watching = self._is_said = False
        """Whether a run is watched now."""
        self._watch: ExitStack | None = None
        self.reason = ""
        """Why no step runs ahead in this training; empty if steps may."""
        self.current: Part | None = None
        """The step that runs now, if it is watched."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may run ahead of those before it."""
        return self.is_watching and not self._is_new and not self.reason

    @property
    def _is_new(self) -> bool:
        """Whether steps are only watched so far."""
        return self._num_watched < self._num_to_watch

    @contextmanager
    def watching(self, some_wait: bool = False, stays: bool = False) -> Iterator[None]:
        """Context of a run of microbatches.

        Args:
            some_wait: whether steps of runs before are suspended.
            stays: whether attributes are watched until :meth:`leave`. To begin and to end that
                takes milliseconds, as Python then forgets what it knows of many classes.
        """
        if not (self._has_read or some_wait) or self.reason:
            # What reads nothing has no tails. A run that reads is watched from the next one on.
            self._has_read = False
            yield
            return
        core, self._has_read = self._core, False
        try:
            self._enter()
            self.is_watching = True
            self._begin_part()
            yield
        finally:
            self.is_watching = False
            if not stays:
                self.leave()
        self._num_watched += self._has_read
        if core.switched:
            self._hinder("freezes or thaws parameters", "Do it between steps")
        for number, state in enumerate(core.states):
            if state:
                name = f"{core.names[number]}.{state[0].path}.{state[0].name}".replace("..", ".")
                self._hinder(f"runs a layer that changes its attribute `{name}`", "Return it")
            if any(is_heard(module) for _, module in core.modules[number]):
                what = f"calls forward hooks of the layer `{core.names[number]}`"
                self._hinder(what, "Remove them")
        if self._has_read and self._hindrance[0]:
            self.reason, advice = self._hindrance
            self._say(
                f"A step that reads values {self.reason}. So each microbatch's step waits for"
                " what it reads before the next one begins, and stages idle meanwhile."
                f" {advice}, or read the values in `on_train_batch_end`."
            )

    def _enter(self) -> None:
        if self._watch is not None:
            return
        self._watch = ExitStack()
        classes: set[type] = {nn.Module, *self._seen.values()}
        for cls in classes:
            self._watch.enter_context(_intercepted(cls))
        _WATCHERS.update(dict.fromkeys(self._labels, self))
        self._watch.callback(lambda: [_WATCHERS.pop(each, None) for each in self._labels])

    def leave(self) -> None:
        """Ends the watch of attributes."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _hinder(self, what: str, advice: str) -> None:
        """Notes why steps of this training never run ahead."""
        if not self._hindrance[0]:
            self._hindrance = what, advice

    def forbid(self, what: str, advice: str) -> None:
        """The running step does what no step may do where others run ahead.

        Raises:
            LayerError: one is ahead.
        """
        part = self.current
        if part is None:
            return
        if part.is_ahead():
            part.stall(what)
        if any(True for _ in part.followers()):
            raise LayerError(
                f"The step {what} ({user_line()}) behind a read. No step has done so before, and"
                f" the next microbatch's step has begun. {advice}, or do it in every step."
            )
        self._hinder(what, advice)

    # --- parts ---

    def next_part(self, part: Part) -> None:
        """The running step has read a value of a later stage."""
        self._has_read = True
        if torch.is_inference_mode_enabled():
            self._hinder("reads some in inference mode", "Use `torch.no_grad()`")
        self._end_part()
        part.level += 1
        self._begin_part()
        if self._is_new:
            for name in _set_later({type(self._core.module), *self._seen.values()}):
                for module in self._seen:
                    self._note(f"{self._labels[module]}.{name}", part, True)

    def _begin_part(self) -> None:
        if self.is_watching and self._is_new:
            self._outside_before = [_Content(find()) for _, find in self._outside]

    def _end_part(self) -> None:
        if self.is_watching and self._is_new:
            for (name, find), before in zip(self._outside, self._outside_before, strict=True):
                if _Content(find()) != before:
                    self._hinder(f"changes {name}", "Keep it in an attribute of the module")

    def end_step(self) -> None:
        """The running step has ended."""
        self._end_part()
        self._begin_part()

    # --- attributes ---

    def use_attribute(self, module: nn.Module, name: str, sets: bool) -> None:
        """Code gets or sets an attribute of a module."""
        # Inside of a layer another rule holds: its owner alone runs it.
        program: object = running()
        if self.current is None or program is not self.current or name.startswith("__"):
            return
        label = f"{self._labels[id(module)]}.{name}"
        if id(module) not in self._seen or name == "training":
            if sets:
                self.forbid(f"sets the attribute `{label}`", "Set it between steps")
        elif name not in NO_STATE:
            table = object.__getattribute__(module, "__dict__")
            value = table.get(name, table["_buffers"].get(name))
            self.use(label, sets, _is_fixed(value))

    def use(self, name: str, changes: bool, is_fixed: bool = True) -> None:
        """The running step uses something; it waits if it has to.

        Args:
            name: of what it uses.
            changes: whether the step sets it now.
            is_fixed: whether it can only be changed by being set.

        Raises:
            LayerError: a later step has used it already, which no step has done before.
        """
        part = self.current
        if part is None:
            return
        self._note(name, part, changes)
        if part.is_ahead():
            is_used_later = self._touched[name] >> (min(part.level, _MOST_PARTS - 1) + 1)
            if not (changes or is_fixed) or (name in self._changed and is_used_later):
                part.stall(name)
        part.used.add(name)
        if changes:
            part.changed.add(name)
        for other in part.followers():
            if name in other.changed or (changes and name in other.used):
                raise LayerError(
                    f"The step uses `{name}` ({user_line()}) behind a read. No step has done so"
                    " before, and the next microbatch's step has used or set it already. Set it in"
                    " `on_train_batch_end`, or use it in every step."
                )

    def _note(self, name: str, part: Part, changes: bool) -> None:
        self._touched[name] = self._touched.get(name, 0) | 1 << min(part.level, _MOST_PARTS)
        if changes:
            self._changed.add(name)

    def say_early_wait(self, where: str) -> None:
        """Says once that steps wait for each other in front of layers.

        Args:
            where: what they use, and in which line.
        """
        if not self._is_said:
            self._is_said = True
            self._say(
                f"A step that reads values uses {where} in front of a layer, where the step before"
                " it may still change it. So each microbatch's step waits there for the end of the"
                " one before, and stages idle meanwhile. Use it behind the layers only, or keep"
                " plain numbers, texts or tuples of them in it."
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
    # Of torch's own modules only what sets attributes: others are too many.
    uses = {name: sets for name, sets in _USES.items() if sets or cls is not nn.Module}
    if not count:
        own = {name: vars(cls)[name] for name in uses if name in vars(cls)}
        for name, sets in uses.items():
            setattr(cls, name, _telling(getattr(cls, name), sets))
    _INTERCEPTED[cls] = count + 1, own
    try:
        yield
    finally:
        count, own = _INTERCEPTED.pop(cls)
        if count > 1:
            _INTERCEPTED[cls] = count - 1, own
        else:
            for name in uses:
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


def _set_later(classes: Iterable[type]) -> set[str]:
    """The names of attributes that functions which run now may still set, and so may the methods of
    classes that they call.
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
        for cls in {base for each in classes for base in each.__mro__}:
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
    if type(x) is tuple:
        return len(x) <= _MOST_PARTS and all(map(_is_fixed, x))
    is_of_lightning = _library_of(type(x)) in _LIBRARIES - {"torch"} and not isinstance(x, dict)
    return isinstance(x, _FIXED) or is_of_lightning


class _Content:
    """A snapshot of an object's contents. It equals a later one if nothing in them has changed."""

    def __init__(self, x: Any) -> None:
        self._found: list[Any] = []
        # Kept, so that no `id` is used again.
        self._seen: dict[int, Any] = {}
        todo = [x]
        while todo and len(self._found) < _MOST_CONTENTS:
            one = todo.pop()
            if isinstance(one, _PLAIN):
                self._found += type(one), one
                continue
            self._found.append(id(one))
            if id(one) in self._seen or isinstance(one, _FIXED):
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
                    # Not what intercepts uses of attributes.
                    if function.__module__.partition(".")[0] not in _LIBRARIES:
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
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
