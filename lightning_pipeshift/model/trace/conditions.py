"""Conditions on plain values by which a step chooses between branches: the epoch, the number of the
step, a batch's index, a counter or a name that user code keeps on the LightningModule.

While a step is traced, these values are numbers and strings that know where they come from. What
is computed from them knows it as well (``self.global_step % 100``), and a comparison takes note of
its outcome. A trace is valid for all steps in which each of its conditions has the same outcome, so
the next step is traced again only if it takes another branch.

What is read from a tensor (``loss.item()``) is unknown, and so is what is computed from it.
Conditions on unknown values are not noted, and neither are those on attributes that change after
one: code that writes a message when the loss is low is no reason to trace the next step again.

Values that leave Python (``range(n)``, ``int(x)``, an index, a float on the left-hand side) are not
followed. A step that branches on them otherwise than its trace is an error, as with any value that
is not followed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from lightning_pipeshift.compat.lightning_names import trainer_of
from lightning_pipeshift.errors import LayerError

ADVICE: Final = (
    "It may branch on the batch, on the epoch and the numbers of steps and batches, and on numbers,"
    " texts and switches that are attributes of the LightningModule; not on the length of a list,"
    " the time, or what an earlier microbatch has kept elsewhere. Make what is `None` at first in"
    " `__init__` (zeros, say); or name the layers in `configure_layers()` so that this code is"
    " inside one."
)
"""For messages: the values on which code between layers may branch."""

# Properties of the Trainer.
_COUNTERS: Final = ("current_epoch", "global_step")
_STATES: Final = (
    "sanity_checking",
    "is_last_batch",
    "training",
    "validating",
    "testing",
    "predicting",
    "evaluating",
)


class Source(NamedTuple):
    """Where a value comes from.

    Args:
        owner: ``"argument"`` for one of the step, ``"trainer"`` or ``"module"``.
        name: the argument's position, or the attribute's name.
    """

    owner: str
    name: int | str


UNKNOWN: Final = Source("tensor", "")
"""A value that was read from a tensor."""


class Operation(NamedTuple):
    """A value that is computed from others.

    Args:
        function: computes it.
        operands: sources, operations and plain values.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]


Conditions = Mapping[Operation, bool]
"""Comparisons of a step, with their outcomes."""


@dataclass(frozen=True)
class PlainChanges:
    """How a step changes the plain values that user code keeps on the LightningModule.

    Args:
        updates: by an attribute's name, what its new value is computed from; or the new value.
        early: the attributes that are used on earlier stages than the ones that change them: the
            next microbatch is there before the change.
        stale: the same for lists, dicts, sets and queues.
    """

    updates: Mapping[str, Any] = field(default_factory=dict)
    early: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()


class PlainValues:
    """The values on which a step may branch, as they are now.

    Args:
        root: the LightningModule.
        arguments: those of the step after its batch.
        attributes: those of the LightningModule that are not as they are now.
    """

    def __init__(
        self, root: nn.Module, arguments: Sequence[Any], attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._root = root
        self._arguments = arguments
        self._trainer = trainer_of(root)
        own = {
            name: value
            for name, value in vars(root).items()
            if type(value) in _KINDS or (type(value) is bool and name != "training")
        }
        self.attributes = {**own, **(attributes or {})}

    def meet(self, conditions: Conditions) -> bool:
        """Whether all conditions have the same outcomes as when they were noted."""
        try:
            return all(bool(self._value(e)) is outcome for e, outcome in conditions.items())
        except Exception:
            # An attribute is gone, or has a value of another type.
            return False

    def after(self, changes: PlainChanges) -> PlainValues:
        """The values with which the next microbatch begins."""
        new = {}
        for name, expression in changes.updates.items():
            # What is unknown, user code may find out.
            with suppress(Exception):
                new[name] = self._value(expression)
        return PlainValues(self._root, self._arguments, {**self.attributes, **new})

    @contextmanager
    def followed(self, changes: PlainChanges, is_last: bool) -> Iterator[None]:
        """Around a stage's part of a microbatch, while others are in flight: attributes that later
        stages change have their new values when the next microbatch begins.

        Args:
            changes: those of the trace.
            is_last: whether this is the last stage, which runs the whole step.

        Raises:
            LayerError: the step has changed them otherwise than when it was followed.
        """
        yield
        if not changes.early:
            return
        expected, attributes = self.after(changes).attributes, vars(self._root)
        for name in changes.early:
            if not is_last:
                attributes[name] = expected[name]
            elif not _equal(attributes.get(name), expected[name]):
                raise LayerError(
                    f"The step uses `self.{name}` and changes it later on, to"
                    f" {attributes.get(name)!r}, where {expected[name]!r} was expected from the"
                    " first step. Earlier stages have used it in the next microbatch by then."
                    " Change it before the first layer is called, or in a hook"
                    " (`on_train_batch_end`); or pass `microbatches=1`, without an asynchronous"
                    " schedule."
                )

    def _value(self, expression: Any) -> Any:
        if isinstance(expression, Operation):
            return expression.function(*map(self._value, expression.operands))
        if not isinstance(expression, Source):
            return expression
        if expression.owner == "argument":
            return self._arguments[expression.name]  # type: ignore[index]
        if expression.owner == "trainer":
            return getattr(self._trainer, str(expression.name))
        return self.attributes[str(expression.name)]

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[Sequence[Any]]:
        """Around a step that is traced: provides its arguments after the batch. Whoever calls this
        restores the attributes of the LightningModule afterwards.

        Args:
            watch: takes notes.
        """
        trainer = self._trainer
        watch.begin(self._root, self.attributes)
        before = type(trainer)
        if any(_is_property(before, name) for name in (*_COUNTERS, *_STATES)):
            trainer.__class__ = _watched_class(before, watch)
        try:
            yield [
                _watched(value, Source("argument", number), watch)
                for number, value in enumerate(self._arguments)
            ]
            watch.end_interval()
        finally:
            if type(trainer) is not before:
                trainer.__class__ = before


class Watch:
    """Takes notes of how a step uses plain values, and changes those of the LightningModule.

    An interval is the code between two calls of layers.
    """

    def __init__(self) -> None:
        self.conditions: dict[Operation, bool] = {}
        self._uses: dict[str, int] = {}
        """By an attribute's name, the first interval that uses it."""
        self._changes: dict[str, int] = {}
        """The last interval that changes it."""
        self._attributes: dict[str, Any] = {}
        self._begin: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._interval = 0
        self._is_open = False

    def begin(self, root: nn.Module, values: Mapping[str, Any]) -> None:
        """Called when a step begins.

        Args:
            root: the LightningModule.
            values: its plain attributes.
        """
        self._attributes, self._interval = vars(root), 0
        if not any(isinstance(value, _Watched) for value in self._attributes.values()):
            for name, value in values.items():
                self._attributes[name] = _watched(value, Source("module", name), self)
        self._begin = {name: self._attributes.get(name) for name in values}
        self._before = dict(self._begin)

    def end_interval(self) -> None:
        """Called before each call of a layer, and when the step ends."""
        for name, before in self._before.items():
            value = self._attributes.get(name)
            if value is not before:
                self._before[name] = value
                self._changes[name] = self._interval
                if isinstance(value, bool) and not self._is_open:
                    # Whether the step has asked for it is not known.
                    self._uses.setdefault(name, -1)
        self._interval += 1

    def read(self, function: Callable[..., Any], value: Any) -> Any:
        """Returns the value that user code gets when it reads one from a tensor.

        Args:
            function: the one that reads it.
            value: the value that it returns.
        """
        if function is Tensor.item and not isinstance(value, bool):
            return _watched(value, UNKNOWN, self)
        # Python itself asks for `__int__` and `__index__`, and wants an int; comparisons with it
        # are not seen.
        self.branch()
        return value

    def branch(self) -> None:
        """Called where the step may take another branch with other values of tensors."""
        self._is_open = True

    def note(self, condition: Operation, outcome: bool) -> None:
        """Takes note of a condition."""
        sources = set(_sources(condition))
        names = [str(source.name) for source in sources if source.owner == "module"]
        if UNKNOWN in sources:
            self.branch()
        elif not self._is_open or all(
            self._attributes.get(name) is self._begin[name] for name in names
        ):
            self.conditions[condition] = outcome
            # The trace is chosen before the step begins.
            self._uses |= dict.fromkeys(names, -1)

    def use(self, value: Any) -> None:
        """Takes note of what a value, or a structure of values, is computed from."""
        if isinstance(value, tuple | list):
            for entry in value:
                self.use(entry)
        elif isinstance(value, dict):
            self.use(list(value.values()))
        elif isinstance(value, slice):
            self.use((value.start, value.stop, value.step))
        elif isinstance(value, _Watched):
            for source in _sources(value.expression):
                if source.owner == "module":
                    self._uses.setdefault(str(source.name), self._interval)

    @property
    def changes(self) -> PlainChanges:
        """The changes that the step has made."""
        updates = {}
        for name in self._changes:
            value = self._before[name]
            if isinstance(value, _Watched):
                updates[name] = value.expression
            elif type(value) in _KINDS or (type(value) is bool and name in self._uses):
                updates[name] = value
        early = {name for name in updates if self._uses.get(name, math.inf) < self._changes[name]}
        return PlainChanges(updates, frozenset(early))


def _sources(expression: Any) -> Iterator[Source]:
    if isinstance(expression, Operation):
        for operand in expression.operands:
            yield from _sources(operand)
    elif isinstance(expression, Source):
        yield expression


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _watched_class(trainer: type, watch: Watch) -> type:
    """A class of Trainers whose counters and states are watched."""

    def counter(name: str) -> property:
        own = getattr(trainer, name)
        return property(lambda it: _watched(own.fget(it), Source("trainer", name), watch))

    def state(name: str) -> property:
        own = getattr(trainer, name)

        def value(it: Any) -> bool:
            outcome = bool(own.fget(it))
            watch.note(Operation(bool, (Source("trainer", name),)), outcome)
            return outcome

        return property(value, own.fset)

    properties = {name: counter(name) for name in _COUNTERS if _is_property(trainer, name)}
    properties |= {name: state(name) for name in _STATES if _is_property(trainer, name)}
    return type(trainer.__name__, (trainer,), properties)


def _is_property(owner: type, name: str) -> bool:
    return isinstance(getattr(owner, name, None), property)


class _Watched:
    """A plain value that knows where it comes from."""

    plain: Any
    expression: Source | Operation
    watch: Watch

    def __reduce__(self) -> Any:
        return type(self.plain), (self.plain,)

    def __bool__(self) -> bool:
        outcome: bool = _noted(self, bool, self)
        return outcome


def _watched(value: Any, expression: Source | Operation, watch: Watch) -> Any:
    """The value itself, if it is of a type that is not followed."""
    kind = _KINDS.get(type(value))
    if kind is None:
        return value
    new = kind(value)
    new.plain, new.expression, new.watch = value, expression, watch
    return new


def _split(values: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]] | None:
    """The plain values and the expressions of operands; ``None`` if one is of another type."""
    plain = [value.plain if isinstance(value, _Watched) else value for value in values]
    if not all(type(value) in (int, float, bool, str, type(None)) for value in plain):
        return None
    return plain, tuple(v.expression if isinstance(v, _Watched) else v for v in values)


def _computed(watched: _Watched, function: Callable[..., Any], *values: Any) -> Any:
    parts = _split(values)
    if parts is None:
        return NotImplemented
    plain, expressions = parts
    watched.watch.use(values)
    return _watched(function(*plain), Operation(function, expressions), watched.watch)


def _noted(watched: _Watched, function: Callable[..., Any], *values: Any) -> Any:
    parts = _split(values)
    if parts is None:
        return NotImplemented
    plain, expressions = parts
    outcome = bool(function(*plain))
    watched.watch.use(values)
    watched.watch.note(Operation(function, expressions), outcome)
    return outcome


def _comparison(function: Callable[..., Any]) -> Any:
    return lambda self, *others: _noted(self, function, self, *others)


def _arithmetic(function: Callable[..., Any]) -> Any:
    return lambda self, *others: _computed(self, function, self, *others)


def _reflected(function: Callable[..., Any]) -> Any:
    return lambda self, other: _computed(self, function, other, self)


def _kind(base: type, comparisons: Mapping[str, Any], arithmetic: Mapping[str, Any]) -> type:
    methods: dict[str, Any] = {"__hash__": base.__hash__}
    methods |= {name: _comparison(function) for name, function in comparisons.items()}
    for name, function in arithmetic.items():
        methods[f"__{name}__"] = _arithmetic(function)
        if hasattr(base, f"__r{name}__"):
            methods[f"__r{name}__"] = _reflected(function)
    return type(f"Watched{base.__name__.title()}", (_Watched, base), methods)


_COMPARISONS = {
    f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_ARITHMETIC = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs")
}
_ROUNDINGS = {"round": round}
_OF_TEXT = {
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__contains__": operator.contains,
}
_KINDS: Final[dict[type, Any]] = {
    int: _kind(int, _COMPARISONS, _ARITHMETIC | _ROUNDINGS),
    float: _kind(float, _COMPARISONS, _ARITHMETIC | _ROUNDINGS),
    str: _kind(str, _OF_TEXT, {}),
}
