"""The arguments of a call, and what the call makes of them.

Arguments may be objects (caches, configurations, output classes) that hold tensors, and a call may
change them. So they are walked by item and attribute; what a call changed in them is part of what
it gives back, in a form without tensors that other stages can apply to their own objects.
"""

from __future__ import annotations

import enum
import hashlib
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# What is taken as it is: it holds no tensors, or is no argument in the sense above.
_WHOLE = (
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Generator,
    str,
    int,
    float,
    bytes,
    frozenset,
    range,
    property,
)
_ITEM, _KEY, _ATTRIBUTE, _ARRAY = "item", "key", "attribute", "array"
# The most frequent classes: nothing is inside of them.
_SIMPLE = frozenset({int, bool, str, type(None), torch.dtype, torch.device})
_BY_VALUE = (int, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)

# Longer contents count in a key by their digest.
_LONG_BYTES = 64

Part = tuple[tuple[str, Any], Any]


def is_node(x: object) -> bool:
    """Whether a value is a container or an object that a call could change. A set is one if its
    order can be the same on all stages.
    """
    if type(x) in (list, dict):
        return True
    if isinstance(x, set):
        return all(isinstance(item, (*_BY_VALUE, float, tuple)) for item in x)
    if isinstance(x, np.ndarray):
        return type(x) is np.ndarray and not x.dtype.hasobject
    return isinstance(x, list | dict | deque) or (
        hasattr(x, "__dict__") and not isinstance(x, (*_WHOLE, Tensor, tuple))
    )


def parts_of(node: Any) -> list[Part]:
    """What a container or an object holds, with the place of each part."""
    found: list[Part] = []
    if isinstance(node, list | deque):
        found += (((_ITEM, at), x) for at, x in enumerate(node))
    elif isinstance(node, dict):
        found += (((_KEY, key), x) for key, x in node.items())
    elif isinstance(node, set):
        found += (((_ITEM, at), x) for at, x in enumerate(sorted(node, key=repr)))
    elif isinstance(node, np.ndarray):
        found.append(((_ARRAY, (node.dtype, node.shape)), node.tobytes()))
    if hasattr(node, "__dict__"):
        found += (((_ATTRIBUTE, name), x) for name, x in node.__dict__.items())
    return found


def _new_node(cls: Any, parts: Sequence[Part]) -> Any:
    if cls is np.ndarray:
        (((_, (dtype, shape)), _),) = parts
        return np.empty(shape, dtype)
    return cls() if cls in (list, dict, deque, set) else cls.__new__(cls)


def _fill(node: Any, parts: Sequence[Part]) -> None:
    """Makes a container or object hold these parts and no others. The methods are those of the
    built-in classes: a subclass may have its own, which do more.
    """
    items = [x for (kind, _), x in parts if kind == _ITEM]
    if isinstance(node, list):
        list.__setitem__(node, slice(None), items)
    elif isinstance(node, deque):
        deque.clear(node)
        deque.extend(node, items)
    elif isinstance(node, set):
        set.clear(node)
        set.update(node, items)
    elif isinstance(node, np.ndarray):
        (((_, (dtype, shape)), content),) = parts
        node[...] = np.frombuffer(content, dtype).reshape(shape)
    elif isinstance(node, dict):
        cls = OrderedDict if isinstance(node, OrderedDict) else dict
        cls.clear(node)
        for (kind, key), x in parts:
            if kind == _KEY:
                cls.__setitem__(node, key, x)
    if hasattr(node, "__dict__"):
        node.__dict__.clear()
        node.__dict__.update({name: x for (kind, name), x in parts if kind == _ATTRIBUTE})


def _rebuilt(original: Any, parts: list[Any]) -> Any:
    """A tuple of the same class; a named tuple takes its parts one by one."""
    cls = original if isinstance(original, type) else type(original)
    return cls(*parts) if hasattr(cls, "_fields") else cls(parts)


class Arguments:
    """The containers and objects (:attr:`nodes`) and the tensors in a call's arguments, each once,
    in the order in which they are found.

    Args:
        arguments: those :func:`given` to a call, or anything else.
        describe: what of a tensor the result's shapes may depend on.
        exact: whether they may depend on the value of any float; else only on whether it is 0 or 1.
    """

    def __init__(
        self, arguments: Any, describe: Callable[[Tensor], Any], exact: bool = False
    ) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Tensor] = []
        self.numbers: list[Any] = []
        """The Python numbers in containers, in the order in which they are found; not those in
        other objects, which may be of this rank only."""
        self._num_objects = self._num_tuples = 0
        self._tensor_numbers: dict[int, int] = {}
        self._node_numbers: dict[int, int] = {}
        self._describe, self._exact = describe, exact
        self.key = self._scan(arguments)
        """Hashable: calls with equal keys have results of equal shapes, as far as shapes do not
        depend on values."""
        self.is_flat = not self.nodes and self._num_tuples == 1 + len(arguments)
        """Whether arguments :func:`given` to a call have no containers among them."""

    def _scan(self, x: Any) -> Any:
        cls = type(x)
        if cls in _SIMPLE:
            if cls is int:
                self._note_number(x)
            return (cls, x)
        if cls is tuple or isinstance(x, tuple):
            self._num_tuples += 1
            # The most frequent parts without a call each.
            parts: list[Any] = [cls]
            for part in x:
                if isinstance(part, Tensor):
                    parts.append(self._tensor(part))
                elif type(part) is str or part is None:
                    parts.append((type(part), part))
                else:
                    parts.append(self._scan(part))
            return tuple(parts)
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, float):
            self._note_number(x)
            return (float, x if self._exact or x in (0.0, 1.0) else None)
        if isinstance(x, _BY_VALUE):
            if isinstance(x, int):
                self._note_number(x)
            if isinstance(x, bytes) and len(x) > _LONG_BYTES:
                x = hashlib.blake2b(x).digest()
            return (type(x), x)
        if isinstance(x, slice):
            self._num_tuples += 1
            return (slice, self._scan(x.start), self._scan(x.stop), self._scan(x.step))
        if is_node(x):
            number = self._node_numbers.get(id(x))
            if number is not None:
                return ("node", number)
            self._node_numbers[id(x)] = len(self.nodes)
            self.nodes.append(x)
            is_object = not isinstance(x, (list, dict, deque))
            self._num_objects += is_object
            key = (type(x), *((place, self._scan(part)) for place, part in parts_of(x)))
            self._num_objects -= is_object
            return key
        if isinstance(x, np.number):
            self._note_number(x)
            is_free = isinstance(x, np.floating) and not self._exact and x not in (0.0, 1.0)
            return (type(x), None if is_free else x)
        return repr(x) if isinstance(x, frozenset | range | set) else (type(x), id(x))

    def _tensor(self, x: Tensor) -> Any:
        number = self._tensor_numbers.setdefault(id(x), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(x)
        return (number, self._describe(x))

    def _note_number(self, number: Any) -> None:
        if not self._num_objects:
            self.numbers.append(number)

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor."""
        return self._tensor_numbers[id(tensor)]


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A call's positional and keyword arguments. No call can change the dictionary of the latter,
    and so it is no container among them.
    """
    return (args, *kwargs.items())


def copied(x: Any, of_tensor: Callable[[Tensor], Any], memo: dict[int, Any]) -> Any:
    """A copy of arguments, so that a call changes the copy.

    Args:
        x: the arguments.
        of_tensor: gives what stands in a tensor's place.
        memo: gets the copy of every container and object, by the ``id`` of the original.
    """
    if isinstance(x, Tensor):
        return of_tensor(x)
    if isinstance(x, tuple):
        return _rebuilt(x, [copied(part, of_tensor, memo) for part in x])
    if isinstance(x, slice):
        return slice(*(copied(part, of_tensor, memo) for part in (x.start, x.stop, x.step)))
    if not is_node(x):
        return x
    if id(x) not in memo:
        parts = parts_of(x)
        memo[id(x)] = node = _new_node(type(x), parts)
        _fill(node, [(place, copied(part, of_tensor, memo)) for place, part in parts])
    return memo[id(x)]


def copied_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of_tensor: Callable[[Tensor], Any],
    memo: dict[int, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A copy of a call's positional and keyword arguments: see :func:`copied`."""
    new_args, *items = copied(given(args, kwargs), of_tensor, memo)
    return new_args, dict(items)


class Argument(NamedTuple):
    """In an encoded result: the call's tensor of this number."""

    number: int


class New(NamedTuple):
    """In an encoded result: the tensor of this number that the call has made."""

    number: int


class Node(NamedTuple):
    """In an encoded result: the container or object of this number."""

    number: int


_NUMBERS = (Argument, New, Node)


class Items(NamedTuple):
    """In an encoded result: a tuple."""

    cls: type
    parts: tuple[Any, ...]


class Constant(NamedTuple):
    """In an encoded result: anything else, as it is."""

    value: Any


class State(NamedTuple):
    """What a container or an object holds, encoded."""

    cls: type
    parts: tuple[Part, ...]


class Outcome:
    """A call's result, and its arguments' containers and objects as the call left them, without
    tensors.

    Args:
        nodes: the arguments' containers and objects.
        tensors: the arguments' tensors.
        result: what the call returned.
    """

    def __init__(self, nodes: Sequence[Any], tensors: Sequence[Tensor], result: Any = None) -> None:
        self._nodes = list(nodes)
        self._node_numbers = {id(node): at for at, node in enumerate(nodes)}
        self._tensor_numbers = {id(tensor): at for at, tensor in enumerate(tensors)}
        self._new_numbers: dict[int, int] = {}
        self.new: list[Tensor] = []
        """The tensors that are no arguments."""
        self.result = self._encoded(result)
        self.states: list[State] = []
        """Of all nodes; those that the call has made are at the end."""
        while len(self.states) < len(self._nodes):
            node = self._nodes[len(self.states)]
            parts = tuple((place, self._encoded(part)) for place, part in parts_of(node))
            self.states.append(State(type(node), parts))

    def _encoded(self, x: Any) -> Any:
        cls = type(x)
        if cls in _SIMPLE:
            return Constant(x)
        if isinstance(x, tuple):
            return Items(cls, tuple(map(self._encoded, x)))
        if isinstance(x, Tensor):
            if id(x) in self._tensor_numbers:
                return Argument(self._tensor_numbers[id(x)])
            if id(x) not in self._new_numbers:
                self._new_numbers[id(x)] = len(self.new)
                self.new.append(x)
            return New(self._new_numbers[id(x)])
        if is_node(x):
            if id(x) not in self._node_numbers:
                self._node_numbers[id(x)] = len(self._nodes)
                self._nodes.append(x)
            return Node(self._node_numbers[id(x)])
        return Constant(x)

    def changes_from(self, before: Outcome) -> dict[int, State]:
        """The states of the nodes that are new or differ from those in ``before``, by number."""
        old = before.states
        return {
            at: state
            for at, state in enumerate(self.states)
            if at >= len(old) or not _equal(state, old[at])
        }


def _equal(one: State, other: State) -> bool:
    """Whether two states hold the same. Constants are compared by identity where they may be
    anything: ``==`` of a user's class may do anything, too.
    """
    return one.cls is other.cls and _same(one.parts, other.parts)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Constant) and isinstance(b, Constant):
        return a.value is b.value or (
            type(a.value) is type(b.value)
            and isinstance(a.value, (*_BY_VALUE, float))
            and a.value == b.value
        )
    if isinstance(a, tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or a == b)


def applied(
    result: Any, changes: dict[int, State], arguments: Arguments, new: Sequence[Tensor]
) -> Any:
    """Gives this stage's own arguments the changes that a call made, and returns its result.

    Args:
        result: encoded.
        changes: by the number of the node.
        arguments: those of the call, on this stage.
        new: the tensors that the call has made, or what stands for them.
    """
    if type(result) is New and not changes:
        return new[result.number]
    nodes = [*arguments.nodes]
    nodes += [_new_node(*changes[at]) for at in sorted(changes) if at >= len(nodes)]
    decode = partial(_decoded, arguments.tensors, new, nodes)
    for at, state in changes.items():
        _fill(nodes[at], [(place, decode(part)) for place, part in state.parts])
    return decode(result)


def _decoded(tensors: Sequence[Tensor], new: Sequence[Tensor], nodes: Sequence[Any], x: Any) -> Any:
    # No function inside of `applied`: one that calls itself lives until the garbage collector runs,
    # and all tensors with it.
    cls = type(x)
    if cls is New:
        return new[x.number]
    if cls is Items:
        return _rebuilt(x.cls, [_decoded(tensors, new, nodes, part) for part in x.parts])
    if cls is Argument:
        return tensors[x.number]
    return nodes[x.number] if cls is Node else x.value


def part_of(encoded: Any, *places: int) -> Any:
    """A part of an encoded tuple: that at the first place, in it that at the second, and so on."""
    for place in places:
        encoded = encoded.parts[place]
    return encoded


def is_constant(encoded: Any) -> bool:
    """Whether an encoded result holds anything but tensors, containers and ``None``: a number, for
    instance, which may depend on values.
    """
    if isinstance(encoded, Items):
        return any(map(is_constant, encoded.parts))
    return isinstance(encoded, Constant) and encoded.value is not None


def arguments_in(encoded: Any) -> set[int]:
    """The numbers of the call's tensors in an encoded result, not counting those in objects."""
    if isinstance(encoded, Items):
        return set().union(*map(arguments_in, encoded.parts))
    return {encoded.number} if isinstance(encoded, Argument) else set()


def same_numbers(one: Any, other: Any) -> bool:
    """Whether two encoded results or states have the same form and the same plain constants. Other
    constants are not compared: a run on fake tensors has copies of them.
    """
    cls = type(one)
    if cls is not type(other):
        return isinstance(one, str | int) and bool(one == other)
    if cls in _NUMBERS:
        return bool(one == other)
    if cls is Constant:
        plain = (*_BY_VALUE, float)
        if not isinstance(one.value, plain) and not isinstance(other.value, plain):
            return True
        return _same(one, other) or (one.value != one.value and other.value != other.value)
    if cls is Items:
        if one.cls is not other.cls:
            return False
        one, other = one.parts, other.parts
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_numbers, one, other))
    return bool(one == other)
