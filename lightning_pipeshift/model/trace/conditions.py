"""Conditions on plain values by which a step chooses between branches: the epoch, the number of the
step, a batch's index, a counter or a name that user code keeps on the LightningModule.

While a step is traced, these values are numbers and strings that know where they come from. What
is computed from them knows it as well (``self.global_step % 100``), and a comparison takes note of
its outcome. A trace is valid for all steps in which each of its conditions has the same outcome, so
the next step is traced again only if it takes another branch.

Values that leave Python (``range(n)``, ``int(x)``, an index, a float on the left-hand side) are not
followed. A step that branches on them otherwise than its trace is an error, as with any value that
is not followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from torch import nn

from lightning_pipeshift.compat.lightning_names import trainer_of

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


class Operation(NamedTuple):
    """A value that is computed from others.

    Args:
        function: computes it.
        operands: sources, operations and plain values.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]


Conditions = Mapping[Operation, bool]
"""What a step has compared, with the outcomes."""


class PlainValues:
    """The values on which a step may branch, as they are now.

    Args:
        root: the LightningModule.
        arguments: those of the step after its batch.
    """

    def __init__(self, root: nn.Module, arguments: Sequence[Any]) -> None:
        self._root = root
        self._arguments = arguments
        self._trainer = trainer_of(root)

    def meet(self, conditions: Conditions) -> bool:
        """Whether all conditions have the same outcomes as when they were noted."""
        try:
            return all(bool(self._value(e)) is outcome for e, outcome in conditions.items())
        except Exception:
            # An attribute is gone, or has a value of another type.
            return False

    def _value(self, expression: Any) -> Any:
        if isinstance(expression, Operation):
            return expression.function(*map(self._value, expression.operands))
        if not isinstance(expression, Source):
            return expression
        if expression.owner == "argument":
            return self._arguments[expression.name]  # type: ignore[index]
        if expression.owner == "trainer":
            return getattr(self._trainer, str(expression.name))
        return vars(self._root)[str(expression.name)]

    @contextmanager
    def watched(self, found: dict[Operation, bool]) -> Iterator[Sequence[Any]]:
        """Around a step that is traced: provides its arguments after the batch.

        Args:
            found: receives its conditions.
        """
        attributes, trainer = vars(self._root), self._trainer
        for name, value in list(attributes.items()):
            attributes[name] = _watched(value, Source("module", name), found)
        before = type(trainer)
        if any(_is_property(before, name) for name in (*_COUNTERS, *_STATES)):
            trainer.__class__ = _watched_class(before, found)
        try:
            yield [
                _watched(value, Source("argument", number), found)
                for number, value in enumerate(self._arguments)
            ]
        finally:
            if type(trainer) is not before:
                trainer.__class__ = before
            for name, value in list(attributes.items()):
                if isinstance(value, _Watched):
                    attributes[name] = value.plain


def _watched_class(trainer: type, found: dict[Operation, bool]) -> type:
    """A class of Trainers whose counters and states are watched."""

    def counter(name: str) -> property:
        own = getattr(trainer, name)
        return property(lambda it: _watched(own.fget(it), Source("trainer", name), found))

    def state(name: str) -> property:
        own = getattr(trainer, name)

        def value(it: Any) -> bool:
            outcome = bool(own.fget(it))
            found[Operation(bool, (Source("trainer", name),))] = outcome
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
    found: dict[Operation, bool]

    def __reduce__(self) -> Any:
        return type(self.plain), (self.plain,)

    def __bool__(self) -> bool:
        outcome: bool = _noted(self, bool, self)
        return outcome


def _watched(value: Any, expression: Source | Operation, found: dict[Operation, bool]) -> Any:
    """The value itself, if it is of a type that is not followed."""
    kind = _KINDS.get(type(value))
    if kind is None:
        return value
    new = kind(value)
    new.plain, new.expression, new.found = value, expression, found
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
    return _watched(function(*plain), Operation(function, expressions), watched.found)


def _noted(watched: _Watched, function: Callable[..., Any], *values: Any) -> Any:
    parts = _split(values)
    if parts is None:
        return NotImplemented
    plain, expressions = parts
    outcome = bool(function(*plain))
    watched.found[Operation(function, expressions)] = outcome
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
