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
  of a module and that they use on both sides of a read (see
  :mod:`lightning_pipeshift.step.outside_state`), never run ahead.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import FORWARD_HOOKS
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.step.code_names import LIBRARIES, instructions_from
from lightning_pipeshift.step.outside_state import OutsideState, remedy
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.layer_contracts import is_heard, makes_weights
from lightning_pipeshift.values.layer_state import NO_STATE
from lightning_pipeshift.values.value import StepBuffer, StepParameter, running, user_line

# How many runs with reads are watched before a step may run ahead.
_WATCHED_RUNS = 2
# Parts behind this one count as one.
_MOST_PARTS = 30
_FIXED = (
    *(int, float, str, bytes, type(None), type, types.ModuleType),
    *(torch.dtype, torch.device, torch.Size, enum.Enum, PurePath),
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
        objects: others than the module whose attributes steps may use, by their descriptions.
    """

    def __init__(
        self,
        core: Core,
        say: Callable[[str], object] = print,
        num_watched: int = _WATCHED_RUNS,
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._core, self._say, self._num_to_watch = core, say, num_watched
        core.unwatched = self._paused
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
        self._outside = OutsideState(
            self._seen.values(), map(type, inside), objects, self._is_fixed
        )
        self._touched: dict[str, int] = {}
        """By the attribute's name: a bit for each part that uses it."""
        self._changed: set[str] = set()
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
            # What changes between two runs does not count.
            self._outside.changed()
            yield
        finally:
            self.is_watching = False
            if not stays:
                self.leave()
        self._num_watched += self._has_read
        if core.switched:
            self._hinder("freezes or thaws parameters", "Do it between steps")
        for number, layer in enumerate(core.placed_layers):
            if state := layer.state:
                name = f"{core.names[number]}.{state[0].path}.{state[0].name}".replace("..", ".")
                self._hinder(f"runs a layer that changes its attribute `{name}`", "Return it")
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

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Context of code that may be compiled: a compiler would follow the watch's methods without
        an end.
        """
        is_watching = self._watch is not None
        self.leave()
        try:
            yield
        finally:
            if is_watching:
                self._enter()

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
        self._outside.note_read()
        self.end_step()
        part.level += 1
        if self._is_new:
            for name in _set_later({type(self._core.module), *self._seen.values()}):
                for module in self._seen:
                    self._note(f"{self._labels[module]}.{name}", part, True)

    def end_step(self) -> None:
        """The running step, or a part of it, has ended.

        Raises:
            LayerError: it has changed what another one may use that is under way.
        """
        part = self.current
        if part is None:
            return
        what = self._outside.changed()
        if what:
            advice = remedy(what)
            if part.is_ahead() or any(True for _ in part.followers()):
                raise LayerError(
                    f"A step that reads values changes {what}, and uses it in front of the read"
                    " and behind it. No step has done so before, and the next microbatch's step has"
                    f" begun. {advice}, or change it in every step."
                )
            self._hinder(f"changes {what}", advice)
        elif self._outside.unseen:
            what = f"uses {self._outside.unseen}, where changes are not seen, on both sides"
            self._hinder(f"{what} of a read", "Keep it in an attribute of the module")

    # --- layers and attributes ---

    def use_layer(self, number: int) -> None:
        """The running step calls a layer."""
        core = self._core
        name = core.names[number]
        if any(is_heard(module) for _, module in core.placed_layers[number].modules):
            self._call_hooks(f"layer `{name}`")
        self.use(f"layer {name}", bool(core.buffers[number]))

    def _call_hooks(self, of: str) -> None:
        # Another microbatch's step may have added them, for a call of its own, and waits in it. And
        # nothing tells what they change.
        self.forbid(f"calls forward hooks of the {of}", "Remove them")

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
            return
        table = object.__getattribute__(module, "__dict__")
        if name in FORWARD_HOOKS:
            if not all(map(makes_weights, table[name].values())):
                self._call_hooks(f"module `{self._labels[id(module)]}`")
        elif name not in NO_STATE:
            value = table.get(name, table["_buffers"].get(name))
            self.use(label, sets, self._is_fixed(value))

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

    def _is_fixed(self, x: Any) -> bool:
        """Whether nothing in an object changes that is not seen, as far as steps are concerned."""
        if isinstance(x, _FIXED):
            return True
        if isinstance(x, Tensor):
            # Steps write to values in place; for those of layers see `forbid`.
            return type(x) in (StepParameter, StepBuffer)
        if isinstance(x, nn.Module):
            return id(x) in self._labels
        if type(x) is tuple:
            return len(x) <= _MOST_PARTS and all(map(self._is_fixed, x))
        if isinstance(x, types.FunctionType):
            return not (x.__closure__ or x.__defaults__ or vars(x)) or _library_of(x) == "torch"
        if isinstance(x, types.BuiltinFunctionType):
            return isinstance(x.__self__, types.ModuleType | type | None)
        return _library_of(type(x)) in LIBRARIES - {"torch"} and not isinstance(x, dict)

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
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            later = _code_from(frame.f_code, frame.f_lasti)
            found, names = found | later[0], names | later[1]
        frame = frame.f_back
    todo, seen = names, set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        for cls in {base for each in classes for base in each.__mro__}:
            method = vars(cls).get(name)
            if isinstance(method, types.FunctionType) and _library_of(cls) not in LIBRARIES:
                sets, gets = _code_from(method.__code__, -1)
                found |= sets
                todo |= gets - seen
    return found


@lru_cache
def _code_from(code: types.CodeType, offset: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names of attributes that code behind an instruction sets, and those that it gets."""
    later = instructions_from(code, offset)
    sets = {one.argval for one in later if one.opname in ("STORE_ATTR", "DELETE_ATTR")}
    gets = {str(one.argval) for one in later if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(sets), frozenset(gets)


def _library_of(cls: Any) -> str:
    return (cls.__module__ or "").partition(".")[0]
