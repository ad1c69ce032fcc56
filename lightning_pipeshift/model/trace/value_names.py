"""The names of a traced step's values, and the memory that they share.

A value is named for the operation that computed it. One that is written to gets another name, as do
the values that share its memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import storage_key, storage_key_of
from lightning_pipeshift.model.trace.placeholder import Placeholder
from lightning_pipeshift.plan.inputs.flow import Value

# Numbers of the results of an operation: its return values, then the arguments that it writes to,
# then other tensors that share their memory.
_FIRST_ARGUMENT = 1_000
_FIRST_ALIAS = 2_000


class Memory:
    """The values that share some memory, and how often it was written to.

    Args:
        holder: identifies the memory: a placeholder's origin, or a storage.
    """

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.members: dict[Value, weakref.ref[Tensor]] = {}
        """By the name at creation."""
        self.base: Value | None = None
        self.last_written_on = -1
        self.views: list[tuple[int, int]] = []
        """The operations that only make a view of it."""

    def value_of(self, tensor: Tensor) -> Value | None:
        """Returns the value that a tensor represents: one at the same position of the same
        memory.
        """
        for value, reference in self.members.items():
            known = reference()
            if known is tensor or (
                known is not None
                and known.storage_offset() == tensor.storage_offset()
                and known.shape == tensor.shape
                and known.stride() == tensor.stride()
            ):
                return value
        return None


class ValueNames:
    """The values of one step, while it is traced."""

    def __init__(self) -> None:
        self.roots: dict[Value, Value] = {}
        """By the later name of a value, the one before it."""
        self.memories: dict[int, Memory] = {}
        """By identity of an origin or of a storage."""
        self.memory_of: dict[Value, Memory] = {}
        self.given: dict[int, Any] = {}
        """By identity, a storage that exists on every stage and is written to on one."""
        self.tracked: set[Value] = set()
        """The values that required a gradient when they were computed."""
        self.rewritten: set[Value] = set()
        """The names of values before they were written to."""
        self._now: dict[Value, Value] = {}
        """By the name of a value at creation, its current name."""
        self._edges: dict[Any, Value] = {}
        """By a node of the autograd graph and the number of its output, the value."""

    def current(self, value: Value) -> Value:
        """The current name of a value, given its name at creation."""
        return self._now.get(value, value)

    def current_all(self, values: Iterable[Value]) -> set[Value]:
        """The current names of several values."""
        return {self.current(value) for value in values}

    def first_name(self, value: Value) -> Value:
        """The name of a value at creation."""
        while value in self.roots:
            value = self.roots[value]
        return value

    def note(self, value: Value, tensor: Tensor, holder: Any) -> Memory:
        """Records a new value, and returns its memory.

        Args:
            value: its name.
            tensor: the placeholder, or the tensor itself.
            holder: identifies the memory.
        """
        memory = self.memories.setdefault(id(holder), Memory(holder))
        memory.members[value] = weakref.ref(tensor)
        if memory.base is None:
            memory.base = value
        self.memory_of[value] = memory
        self.note_edge(value, tensor)
        return memory

    def note_edge(self, value: Value, tensor: Tensor) -> None:
        """Records where a value is in the autograd graph."""
        if tensor.requires_grad:
            self.tracked.add(value)
            if tensor.grad_fn is not None:
                self._edges[tensor.grad_fn, tensor.output_nr] = value

    def rename(self, memory: Memory, key: tuple[int, int], layer: int) -> dict[Value, Value]:
        """Renames the values of a memory that an operation has written to; returns their new names
        by the old ones.
        """
        renames: dict[Value, Value] = {}
        for number, (first, reference) in enumerate(memory.members.items()):
            if reference() is None and first != memory.base:
                continue
            new = Value(layer, key[0], _FIRST_ALIAS + number, key[1])
            self._rename(first, new, memory, renames)
        if memory.base is not None and layer > memory.base.layer:
            memory.last_written_on = max(memory.last_written_on, layer)
        return renames

    def record_writes(
        self,
        written: list[Tensor],
        key: tuple[int, int],
        layer: int,
        given: list[Tensor],
        writes: dict[int, Value],
        renames: dict[Value, Value],
    ) -> None:
        """Records which tensors that exist on every stage were written to with values that not
        every stage has. From now on they are such values themselves.
        """
        for tensor_written in written:
            storage = tensor_written.untyped_storage()
            place = storage_key(storage)
            memory = self.memories.get(place)
            if memory is None:
                memory = self.memories[place] = Memory(storage)
                self.given[place] = storage
            for number, tensor in enumerate(given):
                if isinstance(tensor, Placeholder) or storage_of(tensor) != place:
                    continue
                if memory.value_of(tensor) is None:
                    value = Value(layer, key[0], _FIRST_ARGUMENT + number, key[1])
                    memory.members[value] = weakref.ref(tensor)
                    memory.base = memory.base or value
                    self.memory_of[value] = memory
                    writes[number] = value
            for first in list(memory.members):
                if first not in writes.values():
                    number = _FIRST_ALIAS + 500 + len(renames)
                    new = Value(layer, key[0], number, key[1])
                    self._rename(first, new, memory, renames)

    def _rename(
        self, first: Value, new: Value, memory: Memory, renames: dict[Value, Value]
    ) -> None:
        old = self.current(first)
        renames[old] = new
        self._now[first] = new
        self.roots[new] = old
        self.memory_of[new] = memory
        self.rewritten.add(old)

    def given_memory(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor that every stage has, if user code has written one stage's values
        to it.
        """
        if not self.given:
            return None
        storage = storage_of(tensor)
        return self.memories.get(storage) if storage in self.given else None

    def names(self, first: Value) -> list[Value]:
        """All names that a value has had, in order."""
        later = {old: new for new, old in self.roots.items()}
        names = [first]
        while names[-1] in later:
            names.append(later[names[-1]])
        return names

    def reached_from(self, loss: Any) -> set[Value]:
        """The values to which a gradient flows from the loss."""
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return set()
        values: set[Value] = set()
        start = self._edges.get((loss.grad_fn, loss.output_nr))
        if start is not None:
            values.add(start)
        seen = {loss.grad_fn}
        queue = deque(seen)
        while queue:
            node = queue.popleft()
            for successor, number in node.next_functions:
                if successor is None:
                    continue
                value = self._edges.get((successor, number))
                if value is not None:
                    values.add(value)
                if successor not in seen:
                    seen.add(successor)
                    queue.append(successor)
        return values


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage; 0 if it has none."""
    if isinstance(tensor, Placeholder) or tensor.layout != torch.strided:
        return 0
    try:
        return storage_key_of(tensor)
    except (RuntimeError, NotImplementedError):
        # A tensor of another class, without memory of its own.
        return 0
