"""Traces the tensors through one run of the user's step, and records the flow.

Every layer runs once on placeholders, which computes shapes and nothing else; the code between
layers runs on placeholders too. Every operation of that code that depends on a layer has a number,
and its results are values like the results of layers: any value computed before a boundary and
needed after it crosses that boundary. The values that the loss, the logs and the results need, and
those that user code reads in Python, are recorded as well.

The run leaves no trace: Python's objects are restored (see :mod:`.preserve`), and writes to tensors
go to copies (see :mod:`.isolation`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    MODULE_TABLES,
    buffers_of,
    parameters_of,
    storage_key,
    storage_key_of,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.measure import Stopwatch
from lightning_pipeshift.model.execution.trees import Rebuild, flatten, leaves_of
from lightning_pipeshift.model.gates.gate import CurrentPass, Gate
from lightning_pipeshift.model.gates.side_outputs import ChangesOutput, SideOutput, SideOutputs
from lightning_pipeshift.model.parameters.uses import slots_of, substituted
from lightning_pipeshift.model.trace.guesses import Guesses
from lightning_pipeshift.model.trace.operations import (
    OperationKind,
    Operations,
    applied_functions_seen,
    is_transformed,
    kind_of,
    tensors_of,
    with_tensors,
)
from lightning_pipeshift.model.trace.placeholder import (
    META,
    Origin,
    Placeholder,
    PlaceholderListener,
    spec_of,
    watching,
)
from lightning_pipeshift.model.trace.trace import (
    LAST_STAGE,
    Place,
    Template,
    Trace,
    TracedOperation,
)
from lightning_pipeshift.model.user_state.isolation import Isolation
from lightning_pipeshift.model.user_state.preserve import Arguments, preserved
from lightning_pipeshift.plan.inputs.flow import Call, Flow, Operation, TensorSpec, Value

Step = Callable[[nn.Module], Any]

# Numbers of the results of an operation: its return values, then the arguments that it writes to,
# then other tensors that share their memory.
_FIRST_ARGUMENT = 1_000
_FIRST_ALIAS = 2_000


class StreamSelector(Protocol):
    """Switches random streams."""

    def go_to(self, event: int) -> None:
        """Makes later draws come from the stream of a position in the pass."""

    def torch_states(self) -> list[Tensor]:
        """The states of torch's generators: that of the CPU, and of the stage's device."""


def record(
    step: Step,
    root: nn.Module,
    gates: Sequence[Gate],
    current_pass: CurrentPass,
    device: torch.device,
    stopwatch: Stopwatch | None = None,
    begin: Callable[[], object] = lambda: None,
    streams: StreamSelector | None = None,
) -> Trace:
    """Runs ``step`` and returns its trace.

    Values that user code reads from a placeholder have to be guessed: conditions are false, numbers
    are one. If the step then raises an exception (an ``assert``, a check of arguments), it is run
    again with the opposite answer.

    Args:
        step: runs the user's step on the LightningModule it is given, with a microbatch.
        root: the LightningModule. Changes made by the run are undone.
        gates: installed, one for each layer.
        current_pass: that of the gates.
        device: the device on which the stage's layers live.
        stopwatch: times every layer during the run.
        begin: called before every run; sets the random generators.
        streams: switched as in a real run.

    Raises:
        LayerError: the inner tensors of a layer leave it in a way that other stages cannot repeat.
    """

    def attempt(guesses: Guesses) -> Trace:
        recorder = _Recorder(root, gates, device, stopwatch, guesses, streams)
        begin()
        current_pass.value = recorder
        try:
            with preserved(root.modules()):
                result = recorder.run(step)
                return recorder.finish(result)
        finally:
            current_pass.value = None
            # The exception refers to itself, and to the graph, which refers to parameters.
            recorder.__dict__.clear()

    guesses = Guesses()
    first: Exception | None = None
    while True:
        try:
            trace = attempt(guesses)
            break
        except _LeavesALayer as error:
            if not error.is_new:
                raise LayerError(str(error)) from None
            guesses = Guesses()
        except ChangesOutput:
            guesses = Guesses()
        except LayerError:
            raise
        except Exception as error:
            first = first or error
            if not guesses.revise():
                raise first from None
    # Find the conditions whose other answer makes the step fail.
    unsure = guesses.unsure()
    for place in unsure:
        try:
            attempt(guesses.with_other(place))
        except Exception:
            guesses.settle(place)
    return attempt(guesses) if unsure else trace


def _with_reports(gate: Gate, output: Any) -> tuple[Any, list[SideOutput]]:
    return output, gate.reports.take() if gate.reports is not None else []


class _LeavesALayer(LayerError):
    """A tensor from the inside of a layer is used outside of it.

    Args:
        message: for the user.
        is_new: whether this run found a new side output by which it has left, which may be traced.
    """

    def __init__(self, message: str, is_new: bool) -> None:
        super().__init__(message)
        self.is_new = is_new


_MOST_TRIES = 64


class _Link(torch.autograd.Function):
    """Replaces a tensor's placeholder and keeps the autograd graph in one piece, so that it can be
    searched.
    """

    @staticmethod
    def forward(ctx: Any, old: Tensor, device: torch.device, origin: Origin) -> Placeholder:
        shadow = old.shadow.detach() if isinstance(old, Placeholder) else _on_meta(old)
        return Placeholder(shadow, device, origin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def _linked(old: Tensor, device: torch.device, origin: Origin) -> Placeholder:
    new: Placeholder = _Link.apply(old, device, origin)  # type: ignore[no-untyped-call]
    return new


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


@dataclass(frozen=True)
class _Inside:
    """One call of a layer, while it runs."""

    gate: Gate
    call: int
    needs: set[Value]
    own: frozenset[int]


class _Memory:
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


class _Recorder(PlaceholderListener):
    def __init__(
        self,
        root: nn.Module,
        gates: Sequence[Gate],
        device: torch.device,
        stopwatch: Stopwatch | None,
        guesses: Guesses,
        streams: StreamSelector | None,
    ) -> None:
        self.inside: _Inside | None = None
        self.calls: list[Call] = []
        self.templates: list[Template] = []
        self.tail: set[Value] = set()
        self.control: set[Value] = set()
        self.touched: dict[int, set[int]] = {}
        self.logs_each_step = False
        self._root = root
        self._gates = gates
        self._device = device
        self._stopwatch = stopwatch
        self._guesses = guesses
        self._mode = Operations(self)
        self._isolation = Isolation(self)
        self._number = 0
        self._entries: dict[tuple[int, int], TracedOperation] = {}
        self._operations: dict[tuple[int, int], Operation] = {}
        self._draws_in_interval: dict[int, list[int]] = {}
        self._is_shaped_by_batch = False
        self._is_drawn = False
        self._tracked: set[Value] = set()
        self._eager: set[Value] = set()
        self._rewritten: set[Value] = set()
        self._roots: dict[Value, Value] = {}
        self._now: dict[Value, Value] = {}
        """By the name of a value at creation, its current name."""
        self._edges: dict[Any, Value] = {}
        """By a node of the autograd graph and the number of its output, the value."""
        self._memories: dict[int, _Memory] = {}
        """By identity of an origin or of a storage."""
        self._memory_of: dict[Value, _Memory] = {}
        self._given: dict[int, Any] = {}
        """By identity, a storage that exists on every stage and is written to on one."""
        self._drawn: dict[int, Any] = {}
        self._placeholder_draws = 0
        self._keeps = False
        self._is_reading = False
        self._is_certain = False
        self._is_open = False
        self._open_gaps: set[int] = set()
        self._written: list[Tensor] = []
        self._events: list[int] = []
        self._event = 0
        self._ranks: dict[int, int] = {}
        """By layer, how many other layers were called for the first time before it."""
        self._streams = streams
        self._parameter_paths = _parameters_of(root)
        self._written_parameters: set[Place] = set()
        self._writes_state = False
        self._parameter_ids = {id(parameter) for parameter in root.parameters()}
        self._state = _state_of(root, gates)

    def run(self, step: Step) -> Any:
        """Runs the step and records all of it."""
        with watching(self), applied_functions_seen(), self._isolation, self._mode:
            self._root.__dict__.update(log=self.log, log_dict=self.log_dict)
            if self._streams is not None:
                self._streams.go_to(0)
            result = step(self._root)
        # Before its changes are undone.
        for leaf in self._left_behind():
            self._keeps = True
            self._needed_by_tail(leaf)
        return result

    # --- operations between layers ---

    def operation(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind, name = kind_of(function)
        if function is torch.tensor:
            # It reads its arguments' memory, and placeholders have no memory.
            args = with_tensors(args, lambda x: x.item() if isinstance(x, Placeholder) else x)
        given = list(tensors_of((args, kwargs)))
        if not _is_harmless(function, name):
            for tensor in given:
                if id(tensor) in self._parameter_ids:
                    self._touch(tensor)
        if self.inside is not None or kind is OperationKind.QUESTION or is_transformed():
            return self._drawing(function, args, kwargs)
        if kind is OperationKind.READ:
            return self._read(function, args, kwargs, given)
        if name == "data.__set__" and not isinstance(given[0], Placeholder):
            self._assign(given)
            return None
        # A value that depends on the batch alone is computed on every stage, and may be computed
        # once and kept: it has no number.
        self._number += any(map(self._is_followed, given))
        return self._operate(function, name, args, kwargs, given)

    def _is_followed(self, tensor: Tensor) -> bool:
        if isinstance(tensor, Placeholder) or self._given_memory(tensor) is not None:
            return True
        is_parameter = id(tensor) in self._parameter_ids
        return is_parameter and tensor.requires_grad and torch.is_grad_enabled()

    def _operate(
        self,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> Any:
        key = (len(self.calls), self._number)
        needs: set[Value] = set()
        renamed: dict[int, Value] = {}
        followed = True
        # Values computed in an interval that cannot be traced: every stage that needs them computes
        # them.
        unlabelled: set[int] = set()
        sources: set[Value] = set()
        stand_ins: dict[int, Tensor] = {}
        for number, tensor in enumerate(given):
            if isinstance(tensor, Placeholder):
                if tensor.label is None:
                    unlabelled.add(id(tensor.origin))
                    self.used(tensor.origin)
                    sources |= self._current_all(tensor.origin.values)
                else:
                    needs.add(self._current(tensor.label))
            elif (memory := self._given_memory(tensor)) is not None:
                value = self._member(memory, tensor)
                if value is None:
                    followed = False
                    needs |= set(map(self._current, memory.members))
                else:
                    renamed[number] = self._current(value)
                    needs.add(self._current(value))
                origin = Origin(set(memory.members))
                stand_ins[number] = _linked(tensor, self._device, origin)
        if stand_ins:
            numbers = iter(range(len(given)))
            args, kwargs = with_tensors(
                (args, kwargs), lambda tensor: stand_ins.get(next(numbers), tensor)
            )
        before = {
            id(tensor.origin): (tensor.origin, tensor.origin.num_writes)
            for tensor in [*given, *stand_ins.values()]
            if isinstance(tensor, Placeholder)
        }
        self._written = []
        result = self._drawing(function, args, kwargs)
        leaves, rebuild = flatten(result)
        identities = {id(tensor): number for number, tensor in enumerate(given)}
        identities |= {id(tensor): number for number, tensor in stand_ins.items()}
        if unlabelled:
            needs |= sources
            self._eager |= sources
            is_changed = any(
                origin.num_writes != count
                for origin, count in before.values()
                if id(origin) in unlabelled
            )
            fresh = [x for x in leaves if isinstance(x, Placeholder) and id(x) not in identities]
            are_views = any(id(leaf.origin) in unlabelled for leaf in fresh)
            followed &= bool(fresh) and not are_views and not is_changed
        if not needs and self._is_open:
            return result
        if not needs:
            return self._of_parameters(key, name, given, leaves, rebuild, result)
        if not followed or self._is_open:
            self._eager |= needs
            if self._written:
                # A tensor that every stage has is written to on all later stages, the last
                # included.
                self.tail |= needs
            return result
        layer = self._layer_of(needs)
        returned: list[Any] = []
        outer: list[Any] = []
        results: list[tuple[Value, TensorSpec]] = []
        made: list[tuple[Value, Placeholder]] = []
        is_view = bool(leaves)
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                returned.append(None)
                outer.append(leaf)
                continue
            if (
                id(leaf) in identities
                and isinstance(leaf, Placeholder)
                and (name == "contiguous" or "memory_format" in kwargs)
            ):
                # Kernels choose memory layouts that the meta device does not predict: for a real
                # value this may be a copy.
                leaf = _linked(leaf, self._device, leaf.origin)
            elif id(leaf) in identities:
                returned.append(identities[id(leaf)])
                outer.append(given[identities[id(leaf)]])
                is_view = False
                continue
            if not isinstance(leaf, Placeholder):
                leaf = _linked(leaf, self._device, Origin(()))
            value = Value(layer, key[0], number, key[1])
            is_view &= id(leaf.origin) in before
            made.append((value, leaf))
            returned.append(value)
            outer.append(leaf)
        renames: dict[Value, Value] = {}
        writes: dict[int, Value] = {}
        for origin, count in before.values():
            if origin.num_writes != count:
                is_view = False
                memory = self._memories.get(id(origin))
                if memory is not None:
                    renames |= self._renamed(memory, key, layer)
        self._write_given(key, layer, given, writes, renames)
        is_view &= not writes
        for value, leaf in made:
            leaf.label = value
            leaf.origin.values.add(value)
            results.append((value, spec_of(leaf.shadow)))
            memory = self._note(value, leaf, leaf.origin)
            if is_view:
                memory.views.append(key)
        for value in renames.values():
            reference = self._memory_of[value].members[self._first_name(value)]
            renewed = reference()
            if renewed is not None:
                results.append((value, _spec(renewed)))
                self._note_edge(value, renewed)
        for number, value in writes.items():
            results.append((value, _spec(given[number])))
            self._note_edge(value, given[number])
        constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        self._entries[key] = TracedOperation(
            layer,
            name,
            tuple(returned),
            tuple(spec_of(x.shadow) if isinstance(x, Placeholder) else None for x in outer),
            Template(constants, rebuild),
            renamed,
            renames,
            writes,
            is_view,
        )
        self._operations[key] = Operation(layer, key[0], key[1], tuple(results), frozenset(needs))
        return rebuild(outer) if leaves else result

    def _of_parameters(
        self,
        key: tuple[int, int],
        name: str,
        given: list[Tensor],
        leaves: list[Any],
        rebuild: Rebuild,
        result: Any,
    ) -> Any:
        """Handles values computed from parameters alone: one stage computes them, so that the
        gradient reaches the operation as one sum.
        """
        made = {
            number: leaf
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad and not any(leaf is x for x in given)
        }
        if not made:
            return result
        layer = self._layer_of(())
        returned: list[Any] = [None] * len(leaves)
        outer = list(leaves)
        results = []
        for number, leaf in made.items():
            value = Value(layer, key[0], number, key[1])
            stand_in = _linked(leaf, self._device, Origin([value]))
            stand_in.label = value
            returned[number], outer[number] = value, stand_in
            results.append((value, spec_of(stand_in.shadow)))
            self._note(value, stand_in, stand_in.origin)
        constants = tuple(None if n in made else leaf for n, leaf in enumerate(leaves))
        specs = tuple(_spec(leaf) if n in made else None for n, leaf in enumerate(outer))
        self._entries[key] = TracedOperation(
            layer, name, tuple(returned), specs, Template(constants, rebuild), {}, {}, {}
        )
        self._operations[key] = Operation(layer, key[0], key[1], tuple(results), frozenset())
        return rebuild(outer)

    def _read(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> Any:
        for tensor in given:
            if isinstance(tensor, Placeholder) and tensor.label is not None:
                self.control.add(self._current(tensor.label))
            elif isinstance(tensor, Placeholder):
                self._eager |= self._current_all(tensor.origin.values)
            elif self._storage_of(tensor) in self._drawn:
                self._is_drawn = True
            elif (memory := self._given_memory(tensor)) is not None:
                value = self._member(memory, tensor)
                if value is not None:
                    self.control.add(self._current(value))
                # Its values are on one stage only: the value read here is a guess.
                stand_in = _linked(tensor.detach(), self._device, Origin(set(memory.members)))
                stand_in.label = value
                args, kwargs = with_tensors((args, kwargs), partial(_exchanged, tensor, stand_in))
        if not any(isinstance(x, Placeholder) for x in tensors_of((args, kwargs))):
            if not self._is_drawn:
                # With the values of another batch it may take another branch.
                self._open()
            return function(*args, **kwargs)
        self._is_reading = True
        self._is_certain = False
        try:
            return function(*args, **kwargs)
        finally:
            self._is_reading = False
            if not self._is_certain:
                self._open()

    def _open(self) -> None:
        """Called if the values computed from here to the next layer have no number."""
        self._is_open = True
        self._open_gaps.add(len(self.calls))

    def _assign(self, given: list[Tensor]) -> None:
        """Handles ``tensor.data = value`` on a tensor that is no placeholder."""
        tensor, value = given
        if isinstance(value, Placeholder) or self._given_memory(value) is not None:
            raise LayerError(
                "`tensor.data = ...` assigns a value that depends on a layer to a tensor that every"
                " stage has. Write it with `tensor.copy_(...)`, which other stages can repeat."
            )
        self._isolation.assign(tensor, value)

    # --- names of values, and the memory that they share ---

    def _current(self, value: Value) -> Value:
        return self._now.get(value, value)

    def _current_all(self, values: Iterable[Value]) -> set[Value]:
        return {self._current(value) for value in values}

    def _first_name(self, value: Value) -> Value:
        while value in self._roots:
            value = self._roots[value]
        return value

    def _note(self, value: Value, tensor: Tensor, holder: Any) -> _Memory:
        memory = self._memories.setdefault(id(holder), _Memory(holder))
        memory.members[value] = weakref.ref(tensor)
        if memory.base is None:
            memory.base = value
        self._memory_of[value] = memory
        self._note_edge(value, tensor)
        return memory

    def _note_edge(self, value: Value, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._tracked.add(value)
            if tensor.grad_fn is not None:
                self._edges[tensor.grad_fn, tensor.output_nr] = value

    def _renamed(self, memory: _Memory, key: tuple[int, int], layer: int) -> dict[Value, Value]:
        renames = {}
        for number, (first, reference) in enumerate(memory.members.items()):
            if reference() is None and first != memory.base:
                continue
            old = self._current(first)
            new = Value(layer, key[0], _FIRST_ALIAS + number, key[1])
            renames[old] = new
            self._now[first] = new
            self._roots[new] = old
            self._memory_of[new] = memory
            self._rewritten.add(old)
        if memory.base is not None and layer > memory.base.layer:
            memory.last_written_on = max(memory.last_written_on, layer)
        return renames

    def _write_given(
        self,
        key: tuple[int, int],
        layer: int,
        given: list[Tensor],
        writes: dict[int, Value],
        renames: dict[Value, Value],
    ) -> None:
        """Records which tensors that exist on every stage were written to with values that not
        every stage has. From now on they are such values themselves.
        """
        for written in self._written:
            storage = written.untyped_storage()
            place = storage_key(storage)
            memory = self._memories.get(place)
            if memory is None:
                memory = self._memories[place] = _Memory(storage)
                self._given[place] = storage
            for number, tensor in enumerate(given):
                if isinstance(tensor, Placeholder) or self._storage_of(tensor) != place:
                    continue
                if self._member(memory, tensor) is None:
                    value = Value(layer, key[0], _FIRST_ARGUMENT + number, key[1])
                    memory.members[value] = weakref.ref(tensor)
                    memory.base = memory.base or value
                    self._memory_of[value] = memory
                    writes[number] = value
            for first in list(memory.members):
                if first not in writes.values():
                    old = self._current(first)
                    number = _FIRST_ALIAS + 500 + len(renames)
                    new = Value(layer, key[0], number, key[1])
                    renames[old] = new
                    self._now[first] = new
                    self._roots[new] = old
                    self._memory_of[new] = memory
                    self._rewritten.add(old)
        self._written = []

    @staticmethod
    def _storage_of(tensor: Tensor) -> int:
        if isinstance(tensor, Placeholder) or tensor.layout != torch.strided:
            return 0
        try:
            return storage_key_of(tensor)
        except (RuntimeError, NotImplementedError):
            # A tensor of another class, without memory of its own.
            return 0

    def _given_memory(self, tensor: Tensor) -> _Memory | None:
        if not self._given:
            return None
        storage = self._storage_of(tensor)
        return self._memories.get(storage) if storage in self._given else None

    @staticmethod
    def _member(memory: _Memory, tensor: Tensor) -> Value | None:
        """Returns the value that a tensor represents: one at the same position of the same
        memory.
        """
        for value, reference in memory.members.items():
            known = reference()
            if known is tensor or (
                known is not None
                and known.storage_offset() == tensor.storage_offset()
                and known.shape == tensor.shape
                and known.stride() == tensor.stride()
            ):
                return value
        return None

    # --- called by the gates ---

    def visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside is not None:
            # If a layer calls another layer, the inner one belongs to the outer one's work.
            raise LayerError(
                f"The layer {self.inside.gate.name!r} calls the layer {gate.name!r}. A layer "
                "cannot be used inside another one. Return both as one module from "
                "`configure_layers()`, or move the shared part out of the layer."
            )
        with self._mode.paused():
            output, reports = self._visit(gate, args, kwargs)
        if gate.reports is not None:
            gate.reports.give(reports, while_following=True)
        return output

    def _visit(
        self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[SideOutput]]:
        call = self._count(gate)
        if self._stopwatch is not None:
            # Calls that are timed are not traced.
            self._isolation.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            try:
                self._stopwatch.observe(gate, args, kwargs)
            finally:
                self._isolation.__enter__()  # type: ignore[no-untyped-call]
        inputs, rebuild_inputs = flatten((args, kwargs))
        slots = slots_of(gate.layer)
        needs: set[Value] = set()
        inside = _Inside(gate, call, needs, frozenset(id(slot.get()) for slot in slots))
        inner_inputs, origins = [], []
        for leaf in inputs:
            if isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder):
                memory = self._given_memory(leaf)
                if memory is not None:
                    raise LayerError(
                        f"The layer {gate.name!r} is called with a tensor into which user code "
                        "has written the output of another layer. Pass a copy of it "
                        "(`tensor.clone()`)."
                    )
            if isinstance(leaf, Placeholder):
                self.used(leaf.origin)
                if leaf.label is not None:
                    needs.add(self._current(leaf.label))
                else:
                    needs |= self._current_all(leaf.origin.values)
                    self._eager |= self._current_all(leaf.origin.values)
                origin = Origin(leaf.origin.values, inside)
                origins.append((leaf.origin, origin))
                leaf = _linked(leaf, self._device, origin)
            inner_inputs.append(leaf)
        inner_args, inner_kwargs = rebuild_inputs(inner_inputs)
        begun_at = self._event
        self.enter_scope()
        self.inside = inside
        try:
            output = self._run_layer(gate, slots, inside, inner_args, inner_kwargs)
        finally:
            self.inside = None
        for outer, inner in origins:
            if inner.written_by is not None:
                # The caller's tensor has changed as well; later code that uses it depends on this
                # layer in a way that its return value does not show.
                outer.written_by = inside
        self.leave_scope()
        self._events.append(self._event - begun_at)
        left: tuple[Any, list[SideOutput]] = self._leave(gate, call, output, needs)
        return left

    def _run_layer(
        self,
        gate: Gate,
        slots: Sequence[Any],
        inside: _Inside,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[SideOutput]]:
        """Returns a layer's result, and its side outputs."""
        stand_ins = self._stand_ins(slots, inside)
        event, before = self._event, Arguments(args, kwargs)
        try:
            with Operations(self), substituted(slots, stand_ins):
                return _with_reports(gate, gate.run(*args, **kwargs))
        except LayerError:
            raise
        except Exception as error:
            self._event = event
            before.put_back()
            return self._made_up(gate, slots, args, kwargs, error)

    def _made_up(
        self,
        gate: Gate,
        slots: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> tuple[Any, list[SideOutput]]:
        """As :meth:`_run_layer`, with synthetic inputs, for a layer that needs real values."""
        leaves, rebuild = flatten((args, kwargs))
        sources = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]

        def made_up(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, Placeholder) and not tensor.is_meta:
                return tensor.detach().clone()
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=self._device)

        numbers = [made_up(x) if isinstance(x, Tensor) else x for x in leaves]
        real: dict[int, Tensor] = {}
        for slot in slots:
            tensor = slot.get()
            if tensor is not None and id(tensor) not in real:
                real[id(tensor)] = made_up(tensor).requires_grad_(tensor.requires_grad)
                if tensor.requires_grad:
                    sources.append(real[id(tensor)])
        real_args, real_kwargs = rebuild(numbers)
        try:
            with substituted(slots, real):
                output = _with_reports(gate, gate.run(*real_args, **real_kwargs))
        except Exception:
            raise error from None
        outputs, rebuild_output = flatten(output, opens_objects=True)
        needs_gradient = bool(sources) and torch.is_grad_enabled()
        found: list[Any] = []
        for leaf in outputs:
            if isinstance(leaf, Tensor):
                is_tracked = needs_gradient and leaf.requires_grad
                leaf = _joined(leaf.detach(), self._device, sources if is_tracked else [])
            found.append(leaf)
        made: tuple[Any, list[SideOutput]] = rebuild_output(found)
        return made

    def _count(self, gate: Gate) -> int:
        """Counts the calls of the layer so far."""
        self._ranks.setdefault(gate.index, len(self._ranks))
        return sum(earlier.layer == gate.index for earlier in self.calls)

    def _stand_ins(self, slots: Sequence[Any], inside: _Inside) -> Mapping[int, Tensor]:
        stand_ins: dict[int, Tensor] = {}
        for slot in slots:
            tensor = slot.get()
            if tensor is None or id(tensor) in stand_ins:
                continue
            inner = _on_meta(tensor)
            stand_ins[id(tensor)] = Placeholder(
                inner, self._device, Origin((), inside), requires_grad=tensor.requires_grad
            )
        return stand_ins

    def _leave(self, gate: Gate, call: int, output: Any, needs: set[Value]) -> Any:
        leaves, rebuild = flatten(output, opens_objects=True)
        specs: list[TensorSpec | None] = []
        constants: list[Any] = []
        outer: list[Any] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                specs.append(None)
                constants.append(leaf)
                outer.append(leaf)
                continue
            value = Value(gate.index, call, number)
            new = _linked(leaf, self._device, Origin([value]))
            new.label = value
            self._note(value, new, new.origin)
            specs.append(spec_of(new.shadow))
            constants.append(None)
            outer.append(new)
        # User code may have read a value of a later layer before it calls this one again.
        rank = self._ranks[gate.index]
        looked_at = {value for value in self.control if self._ranks[value.layer] > rank}
        self.calls.append(Call(gate.index, call, tuple(specs), frozenset(needs | looked_at)))
        self.templates.append(Template(tuple(constants), rebuild))
        self._number = 0
        self._is_open = False
        return rebuild(outer)

    def enter_scope(self) -> None:
        self._event += 1
        if self._streams is not None:
            self._streams.go_to(self._event)

    leave_scope = enter_scope

    # --- called by the placeholders ---

    def read(self, function: str, values: set[Value]) -> None:
        if self.inside is None and not self._is_reading:
            current = self._current_all(values)
            self.control |= current
            self._eager |= current

    def condition(self) -> bool:
        answer, self._is_certain = self._guesses.condition()
        return answer

    def written(self, tensor: Tensor, values: set[Value]) -> None:
        if self.inside is None:
            self._written.append(tensor)

    def draws(self, draw: Callable[[], object]) -> None:
        self._placeholder_draws += 1
        if self.inside is None:
            # Later draws of the code equal those after real values.
            draw()

    def _layer_of(self, needs: Iterable[Value]) -> int:
        """The layer on whose stage code between layers computes something: the one before it; or,
        if a layer has been called again meanwhile, the last one that it depends on.
        """
        layers = [-1, *(value.layer for value in [*needs, *self.control])]
        if self.calls:
            layers.append(self.calls[-1].layer)
        return max(layers, key=lambda layer: self._ranks.get(layer, -1))

    def wrote(self, tensor: Tensor) -> None:
        path = self._parameter_paths.get(self._storage_of(tensor))
        if path is not None and self.inside is None:
            # All stages run the code before the layers. Only the last stage is certain to run the
            # rest.
            self._writes_state = True
            if self.calls:
                self._written_parameters.add(path)

    def shaped_by_batch(self) -> None:
        self._is_shaped_by_batch = True

    def _drawing(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a function, and records whether it drew random numbers."""
        if self.inside is not None:
            return function(*args, **kwargs)
        before = self._random_states()
        count = self._placeholder_draws
        result = function(*args, **kwargs)
        drew = not all(map(torch.equal, before, self._random_states()))
        if drew or self._placeholder_draws > count:
            self._draws_in_interval.setdefault(len(self.calls), []).append(self._number)
        if drew or any(self._storage_of(x) in self._drawn for x in tensors_of((args, kwargs))):
            for tensor in tensors_of(result):
                storage = self._storage_of(tensor)
                if storage:
                    self._drawn[storage] = tensor
        return result

    def _random_states(self) -> list[Tensor]:
        if self._streams is None:
            return [torch.default_generator.get_state()]
        return self._streams.torch_states()

    def used(self, origin: Origin) -> None:
        if origin.inside is self.inside:
            if self.inside is None and isinstance(origin.written_by, _Inside):
                raise LayerError(
                    f"The layer {origin.written_by.gate.name!r} changes its input in place, and "
                    "that input is used after it. Other stages see the unchanged input. Clone it "
                    "in the layer, or use the layer's result."
                )
            return
        if isinstance(origin.inside, _Inside):
            raise _LeavesALayer(
                f"A tensor from the inside of the layer {origin.inside.gate.name!r} is used "
                "outside of it without being part of the layer's return value, the argument of a "
                "hook on one of its parts, or an attribute of one (it may be in a list, for "
                "example). On another stage that tensor does not exist. Return it from the "
                "layer, or name a larger module in `configure_layers()`.",
                self._finds_what_leaves(),
            )
        # A tensor from outside that reached the layer through an attribute or a closure: needed
        # like an argument.
        assert self.inside is not None
        values = self._current_all(origin.values)
        self.inside.needs.update(values)
        self._eager |= values

    def _finds_what_leaves(self) -> bool:
        """Whether there are more side outputs of layers than were known."""

        def is_inner(value: Any) -> bool:
            return isinstance(value, Placeholder) and isinstance(value.origin.inside, _Inside)

        found = False
        for gate in {call.layer: self._gates[call.layer] for call in self.calls}.values():
            reports = gate.reports or SideOutputs(gate.layer)
            if reports.extend(is_inner):
                gate.reports, found = reports, True
        return found

    # --- other effects of the step ---

    def log(self, name: str, value: Any, *_: Any, on_step: bool | None = None, **__: Any) -> None:
        self.logs_each_step |= bool(on_step)
        self._needed_by_tail(value)

    def log_dict(self, dictionary: Mapping[str, Any], *_: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def _needed_by_tail(self, tree: Any) -> None:
        for leaf in leaves_of(tree):
            if isinstance(leaf, Placeholder):
                self.used(leaf.origin)
                if leaf.label is not None:
                    self.tail.add(self._current(leaf.label))
                else:
                    values = self._current_all(leaf.origin.values)
                    self.tail |= values
                    self._eager |= values

    def _left_behind(self) -> list[Any]:
        """The values of the step that user code keeps on its modules."""
        inside = {id(part) for gate in self._gates for part in gate.layer.modules()}
        found: list[Any] = []
        for module in self._root.modules():
            if id(module) not in inside:
                for name, value in module.__dict__.items():
                    if name not in MODULE_TABLES:
                        found.extend(_placeholders_in(value, 3))
                found.extend(_placeholders_in(buffers_of(module), 1))
        return found

    def _touch(self, parameter: Tensor) -> None:
        if self.inside is None:
            self.touched.setdefault(id(parameter), set())
        elif id(parameter) not in self.inside.own:
            self.touched.setdefault(id(parameter), set()).add(self.inside.gate.index)

    # --- the end ---

    def finish(self, result: Any) -> Trace:
        self._needed_by_tail(result)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        first = self.calls[0].layer if self.calls else 0
        self._views_on_both_sides()
        self._mark_draws()
        flow = Flow(
            calls=tuple(self.calls),
            tail=frozenset(self.tail),
            control=frozenset(self.control),
            differentiable=frozenset(self._reached_from(loss)),
            operations=tuple(self._operations.values()),
        )
        trace = Trace(
            flow,
            self.templates,
            self._entries,
            self.touched,
            self.logs_each_step,
            # A microbatch without a loss does not show where gradients flow in others.
            self._is_shaped_by_batch or (torch.is_grad_enabled() and loss is None),
            self._is_drawn,
            frozenset(self._tracked),
            frozenset(self._eager),
            frozenset(self._open_gaps),
            frozenset(self._rewritten),
            self._roots,
            self._keeps,
            self._state_written(),
            self._writes_state,
            events=self._events,
        )
        # Values computed from parameters before all layers belong to the stage of the first.
        places = [*range(len(self._gates)), first]
        return trace.renumbered(places)

    def _views_on_both_sides(self) -> None:
        """If memory is written to on a later stage than the one it comes from, that stage receives
        the base of the views and makes the views itself: tensors that share memory have to share it
        there.
        """
        viewed: dict[Value, Value] = {}
        views: set[tuple[int, int]] = set()
        for memory in self._memories.values():
            base = memory.base
            if base is None or memory.last_written_on < 0 or not memory.views:
                continue
            views.update(memory.views)
            versions = self._names(base)
            for first in memory.members:
                for value in self._names(first) if first != base else ():
                    viewed[value] = [v for v in versions if _time(v) <= _time(value)][-1]
        self._entries = {
            key: replace(entry, is_view=key in views) for key, entry in self._entries.items()
        }

        def needed(values: Iterable[Value]) -> set[Value]:
            return {viewed.get(value, value) for value in values}

        self._operations = {
            key: replace(operation, needs=frozenset(needed(operation.needs)))
            for key, operation in self._operations.items()
            if key not in views
        }
        self.calls = [replace(call, needs=frozenset(needed(call.needs))) for call in self.calls]
        self.tail, self.control = needed(self.tail), needed(self.control)
        self._eager = needed(self._eager)

    def _mark_draws(self) -> None:
        """Draws have to be made on every stage only if other draws follow."""
        for interval, numbers in self._draws_in_interval.items():
            for number in numbers[:-1]:
                entry = self._entries.get((interval, number))
                if entry is not None:
                    self._entries[interval, number] = replace(entry, draws=True)

    def _names(self, first: Value) -> list[Value]:
        """All names that a value has had, in order."""
        later = {old: new for new, old in self._roots.items()}
        names = [first]
        while names[-1] in later:
            names.append(later[names[-1]])
        return names

    def _state_written(self) -> dict[Place, int]:
        found = {}
        for storage in self._given:
            path = self._state.get(storage)
            if path is not None:
                memory = self._memories[storage]
                found[path] = max(self._current(value).layer for value in memory.members)
        return found | dict.fromkeys(self._written_parameters, LAST_STAGE)

    def _reached_from(self, loss: Any) -> set[Value]:
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


class _Join(torch.autograd.Function):
    """A placeholder that depends on several tensors."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, device: torch.device, *sources: Tensor) -> Placeholder:
        return Placeholder(_on_meta(like), device, Origin(()))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace has no backward")


def _joined(like: Tensor, device: torch.device, sources: Sequence[Tensor]) -> Placeholder:
    joined: Placeholder = _Join.apply(like, device, *sources)  # type: ignore[no-untyped-call]
    return joined


def _time(value: Value) -> tuple[int, int]:
    """The time at which a value was computed: the interval, and the operation in it."""
    return (value.call, value.op) if value.op else (-1, 0)


def _exchanged(old: Tensor, new: Tensor, tensor: Tensor) -> Tensor:
    return new if tensor is old else tensor


def _spec(tensor: Tensor) -> TensorSpec:
    return spec_of(tensor.shadow if isinstance(tensor, Placeholder) else tensor)


def _placeholders_in(value: Any, depth: int) -> list[Placeholder]:
    if isinstance(value, Placeholder):
        return [value]
    if depth and isinstance(value, list | tuple | deque | set):
        return [found for entry in value for found in _placeholders_in(entry, depth - 1)]
    if depth and isinstance(value, dict):
        return [found for entry in value.values() for found in _placeholders_in(entry, depth - 1)]
    return []


def _parameters_of(root: nn.Module) -> dict[int, Place]:
    """By identity of a storage, the parameter that uses it."""
    return {
        storage_key_of(parameter): (module_name, name)
        for module_name, module in root.named_modules()
        for name, parameter in parameters_of(module).items()
        if parameter is not None and not parameter.is_meta
    }


def _state_of(root: nn.Module, gates: Sequence[Gate]) -> dict[int, Place]:
    """By identity of a storage, the buffer or attribute outside of layers that uses it."""
    inside = {id(part) for gate in gates for part in gate.layer.modules()}
    found: dict[int, Place] = {}
    for module_name, module in root.named_modules():
        if id(module) not in inside:
            for table in (module.__dict__, buffers_of(module)):
                for name, value in table.items():
                    if isinstance(value, Tensor) and value.layout == torch.strided:
                        found[storage_key_of(value)] = (module_name, name)
    return found


# A parameter's name, shape and type are known on every stage.
_HARMLESS = frozenset(
    [
        "shape.__get__",
        "dtype.__get__",
        "ndim.__get__",
        "requires_grad.__get__",
        "layout.__get__",
        "is_leaf.__get__",
        "is_sparse.__get__",
        "names.__get__",
        "itemsize.__get__",
        "size",
        "dim",
        "numel",
        "__len__",
        "element_size",
        "is_floating_point",
        "is_complex",
        "__repr__",
    ]
)


def _is_harmless(function: Any, name: str) -> bool:
    return name in _HARMLESS
