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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import dispatch_modes_disabled, parameters_of
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.measure import Stopwatch
from lightning_pipeshift.model.execution.trees import Rebuild, flatten, leaves_of
from lightning_pipeshift.model.gates.gate import CurrentPass, Gate
from lightning_pipeshift.model.gates.side_outputs import ChangesOutput, SideOutput, SideOutputs
from lightning_pipeshift.model.parameters.uses import slots_of, substituted
from lightning_pipeshift.model.saved.hooks import set_aside
from lightning_pipeshift.model.trace.code_estimate import CodeEstimate
from lightning_pipeshift.model.trace.conditions import PlainValues, Watch
from lightning_pipeshift.model.trace.graph_links import described, linked, on_meta
from lightning_pipeshift.model.trace.guesses import Guesses
from lightning_pipeshift.model.trace.kept_containers import KeptContainers
from lightning_pipeshift.model.trace.made_up import run_made_up, with_side_outputs
from lightning_pipeshift.model.trace.module_contents import (
    left_behind,
    parameters_by_storage,
    state_by_storage,
)
from lightning_pipeshift.model.trace.operations import (
    OperationKind,
    Operations,
    applied_functions_seen,
    is_known_everywhere,
    is_transformed,
    kind_of,
    tensors_of,
    with_tensors,
)
from lightning_pipeshift.model.trace.placeholder import (
    Origin,
    Placeholder,
    PlaceholderListener,
    spec_of,
    watching,
)
from lightning_pipeshift.model.trace.switches import SwitchRecorder
from lightning_pipeshift.model.trace.trace import (
    LAST_STAGE,
    Place,
    Template,
    Trace,
    TracedOperation,
)
from lightning_pipeshift.model.trace.value_names import ValueNames, storage_of
from lightning_pipeshift.model.user_state.isolation import Isolation
from lightning_pipeshift.model.user_state.preserve import Arguments, preserved
from lightning_pipeshift.model.user_state.random_streams import START, Position, begun, ended
from lightning_pipeshift.plan.inputs.flow import Call, Flow, Operation, TensorSpec, Value

Step = Callable[[nn.Module], Any]


class StreamSelector(Protocol):
    """Switches random streams."""

    def go_to(self, position: Position) -> None:
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
    values: PlainValues | None = None,
    is_ordered: bool = False,
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
        values: on which the step may branch; gives it its arguments after the LightningModule.
        is_ordered: whether the gates are in the order of the stages; otherwise the order of this
            step's calls is to become that of the stages.

    Raises:
        LayerError: the inner tensors of a layer leave it in a way that other stages cannot repeat.
    """

    def attempt(guesses: Guesses) -> Trace:
        guesses.begin()
        recorder = _Recorder(root, gates, device, stopwatch, guesses, streams, values, is_ordered)
        begin()
        current_pass.value = recorder
        try:
            with preserved(root.modules()):
                result = recorder.run(step)
                trace = recorder.finish(result)
                kept = recorder.kept_values()
                if kept:
                    trace = replace(trace, carried=trace.carried | follow_up(kept, guesses))
                return trace
        finally:
            current_pass.value = None
            # The exception refers to itself, and to the graph, which refers to parameters.
            recorder.__dict__.clear()

    def follow_up(kept: Mapping[Origin, int], guesses: Guesses) -> frozenset[tuple[int, int]]:
        """Runs the next microbatch's step, to see where it uses what the one before has kept."""
        recorder = _Recorder(
            root, gates, device, None, guesses.copy(), streams, values, is_ordered, kept
        )
        begin()
        current_pass.value = recorder
        # A second step may fail where the first one does not, as values are missing.
        with suppress(Exception):
            recorder.run(step)
        found = recorder.carried
        recorder.__dict__.clear()
        return found

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
    # Its traceback refers to this function, and to the batch.
    del first
    if trace.lacks_loss:
        # It shows no gradients. The other answer to a condition (`if not loss.isfinite()`) may.
        for place in guesses.unsure():
            try:
                other = attempt(guesses.with_other(place))
            except Exception:
                continue
            if not other.lacks_loss:
                guesses = guesses.with_other(place)
                break
    # Find the conditions whose other answer makes the step fail.
    unsure = guesses.unsure()
    for place in unsure:
        try:
            attempt(guesses.with_other(place))
        except Exception:
            guesses.settle(place)
    return attempt(guesses) if unsure else trace


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


@dataclass(frozen=True)
class _Inside:
    """One call of a layer, while it runs."""

    gate: Gate
    call: int
    needs: set[Value]
    own: frozenset[int]


class _Recorder(PlaceholderListener):
    def __init__(
        self,
        root: nn.Module,
        gates: Sequence[Gate],
        device: torch.device,
        stopwatch: Stopwatch | None,
        guesses: Guesses,
        streams: StreamSelector | None,
        values: PlainValues | None,
        is_ordered: bool,
        kept: Mapping[Origin, int] | None = None,
    ) -> None:
        self._plain = values or PlainValues(root, ())
        self._watch = Watch()
        self._containers = KeptContainers(root)
        self._kept = kept or {}
        self._kept_here: list[Placeholder] = []
        self._uses: list[tuple[int, int]] = []
        """The number of calls so far where something is used that the microbatch before has kept,
        and the layer that it comes from there."""
        self._state_uses: dict[int, int] = {}
        """By identity of a storage of kept state, the number of calls before its first use."""
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
        self._code: CodeEstimate | None = None
        if stopwatch is not None:
            stopwatch.begin()
            if stopwatch.trains:
                held = [*root.parameters(), *root.buffers(), *stopwatch.held]
                self._code = CodeEstimate(device, held)
        self._guesses = guesses
        self._mode = Operations(self)
        self._isolation = Isolation(self)
        self._number = 0
        self._entries: dict[tuple[int, int], TracedOperation] = {}
        self._operations: dict[tuple[int, int], Operation] = {}
        self._draws_in_interval: dict[int, list[int]] = {}
        self._is_shaped_by_batch = False
        self._is_drawn = False
        self._eager: set[Value] = set()
        self._values = ValueNames()
        self._drawn: dict[int, Any] = {}
        self._placeholder_draws = 0
        self._keeps = False
        self._is_reading = False
        self._is_certain = False
        self._is_open = False
        self._open_intervals: set[int] = set()
        self._written: list[Tensor] = []
        self._place = START
        self._ranks = {gate.index: gate.index for gate in gates} if is_ordered else {}
        """By layer, how many layers are placed before it."""
        self._streams = streams
        self._parameter_paths = parameters_by_storage(root)
        self._written_parameters: set[Place] = set()
        self._writes_state = False
        self._changed_parameter = ""
        self._replaces = ""
        self._parameter_ids = {id(parameter) for parameter in root.parameters()}
        self._state = state_by_storage(root, gates)
        self._switches = SwitchRecorder(root)

    def run(self, step: Step) -> Any:
        """Runs the step and records all of it."""
        with (
            self._switches.recorded(),
            self._watched_code(),
            watching(self),
            applied_functions_seen(),
            self._isolation,
            self._mode,
        ):
            self._root.__dict__.update(log=self.log, log_dict=self.log_dict)
            if self._streams is not None:
                self._streams.go_to(START)
            with self._containers.watched(), self._plain.watched(self._watch) as arguments:
                result = step(self._root, *arguments)
        # Before its changes are undone.
        for leaf in left_behind(self._root, self._gates):
            self._keeps = True
            self._kept_here.append(leaf)
            self._needed_by_tail(leaf)
        return result

    def kept_values(self) -> dict[Origin, int]:
        """The origins of values that user code has kept, each with the layer behind which it was
        computed. The values are without names from now on: they belong to an earlier step.
        """
        last = self.calls[-1].layer if self.calls else 0
        found = {}
        for leaf in self._kept_here:
            found[leaf.origin] = last if leaf.label is None else leaf.label.layer
            leaf.label = None
            leaf.origin.values = set()
        return found

    @property
    def carried(self) -> frozenset[tuple[int, int]]:
        """See :class:`Trace`."""
        uses = list(self._uses)
        for storage, position in self._state_uses.items():
            memory = self._values.memories.get(storage)
            if memory is not None and storage in self._values.given:
                uses += [(position, self._values.current(x).layer) for x in memory.members]
        first = self.calls[0].layer if self.calls else 0
        places = {(self.calls[n - 1].layer if n else first, layer) for n, layer in uses}
        return frozenset(
            (used, made)
            for used, made in places
            if self._ranks.get(made, 0) > self._ranks.get(used, 0)
        )

    @contextmanager
    def _watched_code(self) -> Iterator[None]:
        code = self._code
        if code is None:
            yield
            return
        try:
            # Outside of the isolation, which is left where layers are timed.
            with code, code.watched():
                code.begin()
                yield
            if self.calls and self._stopwatch is not None:
                code.end(self.calls[-1].layer, is_behind=True)
                self._stopwatch.take_code(code.saved, code.working_bytes)
        finally:
            code.close()

    # --- operations between layers ---

    def operation(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind, name = kind_of(function)
        if self.inside is None:
            self._watch.use((args, kwargs))
        if function is torch.tensor:
            # It reads its arguments' memory, and placeholders have no memory.
            args = with_tensors(args, lambda x: x.item() if isinstance(x, Placeholder) else x)
        given = list(tensors_of((args, kwargs)))
        self._note_state(given)
        if not is_known_everywhere(name):
            for tensor in given:
                if id(tensor) in self._parameter_ids:
                    if self.inside is None:
                        self.touched.setdefault(id(tensor), set())
                    elif id(tensor) not in self.inside.own:
                        self.touched.setdefault(id(tensor), set()).add(self.inside.gate.index)
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

    def _note_state(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and storage_of(tensor) in self._state:
                self._state_uses.setdefault(storage_of(tensor), len(self.calls))

    def _is_followed(self, tensor: Tensor) -> bool:
        if isinstance(tensor, Placeholder) or self._values.given_memory(tensor) is not None:
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
                    sources |= self._values.current_all(tensor.origin.values)
                else:
                    needs.add(self._values.current(tensor.label))
            elif (memory := self._values.given_memory(tensor)) is not None:
                value = memory.value_of(tensor)
                if value is None:
                    followed = False
                    needs |= set(map(self._values.current, memory.members))
                else:
                    renamed[number] = self._values.current(value)
                    needs.add(self._values.current(value))
                origin = Origin(set(memory.members))
                stand_ins[number] = linked(tensor, self._device, origin)
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
        if not needs and (self._is_open or not any(map(self._is_followed, given))):
            # Of the batch alone, even if it requires a gradient.
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
                leaf = linked(leaf, self._device, leaf.origin)
            elif id(leaf) in identities:
                returned.append(identities[id(leaf)])
                outer.append(given[identities[id(leaf)]])
                is_view = False
                continue
            if not isinstance(leaf, Placeholder):
                leaf = linked(leaf, self._device, Origin(()))
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
                memory = self._values.memories.get(id(origin))
                if memory is not None:
                    renames |= self._values.rename(memory, key, layer)
        self._values.record_writes(self._written, key, layer, given, writes, renames)
        self._written = []
        is_view &= not writes
        for value, leaf in made:
            leaf.label = value
            leaf.origin.values.add(value)
            results.append((value, spec_of(leaf.shadow)))
            memory = self._values.note(value, leaf, leaf.origin)
            if is_view:
                memory.views.append(key)
        for value in renames.values():
            reference = self._values.memory_of[value].members[self._values.first_name(value)]
            renewed = reference()
            if renewed is not None:
                results.append((value, described(renewed)))
                self._values.note_edge(value, renewed)
        for number, value in writes.items():
            results.append((value, described(given[number])))
            self._values.note_edge(value, given[number])
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
            stand_in = linked(leaf, self._device, Origin([value]))
            stand_in.label = value
            returned[number], outer[number] = value, stand_in
            results.append((value, spec_of(stand_in.shadow)))
            self._values.note(value, stand_in, stand_in.origin)
        constants = tuple(None if n in made else leaf for n, leaf in enumerate(leaves))
        specs = tuple(described(leaf) if n in made else None for n, leaf in enumerate(outer))
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
                self.control.add(self._values.current(tensor.label))
            elif isinstance(tensor, Placeholder):
                self._eager |= self._values.current_all(tensor.origin.values)
            elif storage_of(tensor) in self._drawn:
                self._is_drawn = True
            elif (memory := self._values.given_memory(tensor)) is not None:
                value = memory.value_of(tensor)
                if value is not None:
                    self.control.add(self._values.current(value))
                # Its values are on one stage only: the value read here is a guess.
                stand_in = linked(tensor.detach(), self._device, Origin(set(memory.members)))
                stand_in.label = value
                args, kwargs = with_tensors((args, kwargs), partial(_exchanged, tensor, stand_in))
        if not any(isinstance(x, Placeholder) for x in tensors_of((args, kwargs))):
            if not self._is_drawn:
                # With the values of another batch it may take another branch.
                self._open()
            return self._watch.read(function, function(*args, **kwargs))
        self._is_reading = True
        self._is_certain = False
        try:
            return self._watch.read(function, function(*args, **kwargs))
        finally:
            self._is_reading = False
            if not self._is_certain:
                self._open()

    def _open(self) -> None:
        """Called if the values computed from here to the next layer have no number."""
        self._is_open = True
        self._open_intervals.add(len(self.calls))

    def _assign(self, given: list[Tensor]) -> None:
        """Handles ``tensor.data = value`` on a tensor that is no placeholder."""
        tensor, value = given
        if isinstance(value, Placeholder) or self._values.given_memory(value) is not None:
            raise LayerError(
                "`tensor.data = ...` assigns a value that depends on a layer to a tensor that every"
                " stage has. Write it with `tensor.copy_(...)`, which other stages can repeat."
            )
        self._isolation.assign(tensor, value)

    # --- called by the gates ---

    def visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside is not None:
            # If a layer calls another layer, the inner one belongs to the outer one's work.
            raise LayerError(
                f"The layer {self.inside.gate.name!r} calls the layer {gate.name!r}. A layer "
                "cannot be used inside another one. Return both as one module from "
                "`configure_layers()`, or move the shared part out of the layer."
            )
        if self._code is not None:
            self._code.end(gate.index)
        with self._mode.paused(), set_aside():
            output, reports = self._visit(gate, args, kwargs)
        if self._code is not None:
            self._code.begin()
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
        self._note_state(inputs)
        slots = slots_of(gate.layer)
        if any(not slot.is_buffer and not isinstance(slot.get(), nn.Parameter) for slot in slots):
            self._replaces = gate.name
        needs: set[Value] = set()
        inside = _Inside(gate, call, needs, frozenset(id(slot.get()) for slot in slots))
        inner_inputs, origins = [], []
        for leaf in inputs:
            if isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder):
                memory = self._values.given_memory(leaf)
                if memory is not None:
                    raise LayerError(
                        f"The layer {gate.name!r} is called with a tensor into which user code "
                        "has written the output of another layer. Pass a copy of it "
                        "(`tensor.clone()`)."
                    )
            if isinstance(leaf, Placeholder):
                self.used(leaf.origin)
                if leaf.label is not None:
                    needs.add(self._values.current(leaf.label))
                else:
                    needs |= self._values.current_all(leaf.origin.values)
                    self._eager |= self._values.current_all(leaf.origin.values)
                origin = Origin(leaf.origin.values, inside)
                origins.append((leaf.origin, origin))
                leaf = linked(leaf, self._device, origin)
            inner_inputs.append(leaf)
        inner_args, inner_kwargs = rebuild_inputs(inner_inputs)
        self._switches.note_modes()
        self._watch.use(inputs)
        self._watch.end_interval()
        self._containers.end_interval()
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
        place, before = self._place, Arguments(args, kwargs)
        try:
            with Operations(self), substituted(slots, stand_ins):
                result = with_side_outputs(gate, gate.run(*args, **kwargs))
            for tensor in (slot.get() for slot in slots):
                if isinstance(tensor, nn.Parameter):
                    self._switches.set_flag(tensor, stand_ins[id(tensor)].requires_grad)
            return result
        except LayerError:
            raise
        except Exception as error:
            self._place = place
            before.put_back()
            return run_made_up(gate, slots, args, kwargs, self._device, error)

    def _count(self, gate: Gate) -> int:
        self._ranks.setdefault(gate.index, len(self._ranks))
        return sum(earlier.layer == gate.index for earlier in self.calls)

    def _stand_ins(self, slots: Sequence[Any], inside: _Inside) -> Mapping[int, Tensor]:
        stand_ins: dict[int, Tensor] = {}
        for slot in slots:
            tensor = slot.get()
            if tensor is None or id(tensor) in stand_ins:
                continue
            inner = on_meta(tensor)
            stand_ins[id(tensor)] = Placeholder(
                inner,
                self._device,
                Origin((), inside),
                requires_grad=self._switches.flag_of(tensor),
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
            new = linked(leaf, self._device, Origin([value]))
            new.label = value
            self._values.note(value, new, new.origin)
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
        self._go_to(begun(self._place))

    def leave_scope(self) -> None:
        self._go_to(ended(self._place))

    def _go_to(self, place: Position) -> None:
        self._place = place
        if self._streams is not None:
            self._streams.go_to(place)

    # --- called by the placeholders ---

    def read(self, function: str, values: set[Value]) -> None:
        if self.inside is None and not self._is_reading:
            current = self._values.current_all(values)
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
        path = self._parameter_paths.get(storage_of(tensor))
        if path is not None and self.inside is None:
            # All stages run the code before the layers. Only the last stage is certain to run the
            # rest.
            self._writes_state = True
            module, name = path
            parameter = parameters_of(self._root.get_submodule(module))[name]
            if parameter is not None and parameter.requires_grad:
                self._changed_parameter = f"{module}.{name}".lstrip(".")
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
        # This is no operation of the user's.
        with dispatch_modes_disabled():
            drew = not all(map(torch.equal, before, self._random_states()))
        if drew or self._placeholder_draws > count:
            self._draws_in_interval.setdefault(len(self.calls), []).append(self._number)
        if drew or any(storage_of(x) in self._drawn for x in tensors_of((args, kwargs))):
            for tensor in tensors_of(result):
                storage = storage_of(tensor)
                if storage:
                    self._drawn[storage] = tensor
        return result

    def _random_states(self) -> list[Tensor]:
        if self._streams is None:
            return [torch.default_generator.get_state()]
        return self._streams.torch_states()

    def used(self, origin: Origin) -> None:
        if origin in self._kept:
            self._uses.append((len(self.calls), self._kept[origin]))
            return
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
        values = self._values.current_all(origin.values)
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
                    self.tail.add(self._values.current(leaf.label))
                else:
                    values = self._values.current_all(leaf.origin.values)
                    self.tail |= values
                    self._eager |= values

    # --- the end ---

    def finish(self, result: Any) -> Trace:
        self._needed_by_tail(result)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        lacks_loss = torch.is_grad_enabled() and loss is None
        first = self.calls[0].layer if self.calls else 0
        self._views_on_both_sides()
        self._mark_draws()
        flow = Flow(
            calls=tuple(self.calls),
            tail=frozenset(self.tail),
            control=frozenset(self.control),
            differentiable=frozenset(self._values.reached_from(loss)),
            operations=tuple(self._operations.values()),
        )
        trace = Trace(
            flow,
            self.templates,
            self._entries,
            self.touched,
            self.logs_each_step,
            # A microbatch without a loss does not show where gradients flow in others.
            self._is_shaped_by_batch or lacks_loss,
            self._is_drawn,
            frozenset(self._values.tracked),
            frozenset(self._eager),
            frozenset(self._open_intervals),
            frozenset(self._values.rewritten),
            self._values.roots,
            self._keeps,
            self._state_written(),
            self._writes_state,
            changed_parameter=self._changed_parameter,
            replaces=self._replaces,
            lacks_loss=lacks_loss,
            carried=self.carried,
            switches=self._switches.result,
            conditions=dict(self._watch.conditions),
            changes=replace(self._watch.changes, stale=self._containers.stale),
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
        for memory in self._values.memories.values():
            base = memory.base
            if base is None or memory.last_written_on < 0 or not memory.views:
                continue
            views.update(memory.views)
            versions = self._values.names(base)
            for first in memory.members:
                for value in self._values.names(first) if first != base else ():
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

    def _state_written(self) -> dict[Place, int]:
        found = {}
        for storage in self._values.given:
            path = self._state.get(storage)
            if path is not None:
                memory = self._values.memories[storage]
                found[path] = max(self._values.current(value).layer for value in memory.members)
        return found | dict.fromkeys(self._written_parameters, LAST_STAGE)


def _time(value: Value) -> tuple[int, int]:
    """The time at which a value was computed: the interval, and the operation in it."""
    return (value.call, value.op) if value.op else (-1, 0)


def _exchanged(old: Tensor, new: Tensor, tensor: Tensor) -> Tensor:
    return new if tensor is old else tensor
