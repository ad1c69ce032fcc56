"""One microbatch's forward pass on one stage, as the gates see it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.code_bytes import CodeBytes
from lightning_pipeshift.model.execution.layer_listener import LayerListener
from lightning_pipeshift.model.execution.trees import (
    address_of,
    are_values,
    flatten,
    leaves_of,
    map_leaves,
)
from lightning_pipeshift.model.gates.gate import Gate, StageDone
from lightning_pipeshift.model.gates.side_outputs import SideOutput
from lightning_pipeshift.model.parameters.gradient_box import GradientBox, SharedParameters
from lightning_pipeshift.model.saved.between_layers import BetweenLayers
from lightning_pipeshift.model.saved.hooks import are_alone
from lightning_pipeshift.model.saved.recompute import LayerCall, RecomputedRegion
from lightning_pipeshift.model.saved.saved_tensors import Observer, SavedTable
from lightning_pipeshift.model.trace.conditions import ADVICE
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
    Placeholder,
    PlaceholderListener,
    dtype_named,
    spec_of,
    watching,
)
from lightning_pipeshift.model.trace.trace import Trace, TracedOperation
from lightning_pipeshift.model.user_state.random_streams import (
    START,
    Position,
    RandomStreams,
    begun,
    ended,
)
from lightning_pipeshift.plan.inputs.flow import Call, TensorSpec, Value

# The attribute of tensors that depend on a layer in the current pass.
_MARK = "_pipeshift_pass"


# The attributes that user code sees of a placeholder for a tensor that requires a gradient. The
# placeholder itself is not part of a graph: that would save placeholders instead of values.
_OF_TRACKED: dict[str, Callable[[], Any]] = {
    "requires_grad.__get__": lambda: True,
    "is_leaf.__get__": lambda: False,
    "grad_fn.__get__": lambda: torch.ones((), requires_grad=True).clone().grad_fn,
    # On the stage that has the value, the hook is registered.
    "register_hook": lambda: RemovableHandle(OrderedDict()),
    "retain_grad": lambda: None,
}


class _Where(LayerListener):
    """The position of a pass. An object of its own, because the graph refers to it: a reference to
    the pass, which keeps the graph alive, would be a cycle.
    """

    layer = ""

    def leave(self, gate: Gate, arguments: Any, results: Sequence[Any]) -> None:
        """See :class:`LayerListener`. Records it when a backward reaches the layer."""

        def enter(_: Any) -> None:
            self.layer = gate.name

        for result in results:
            if isinstance(result, Tensor) and result.grad_fn is not None:
                result.grad_fn.register_prehook(enter)


class Memory(Protocol):
    """Enforces the budget for saved tensors."""

    def before_layer(self, layer: int) -> None:
        """Called before a layer saves its tensors."""

    def after_layer(self, layer: int) -> None:
        """Called after a layer has saved its tensors."""


@dataclass
class StagePass(PlaceholderListener):
    """Runs the stage's own layers and the operations on their results, returns placeholders for the
    layers of earlier stages, and ends the step at the first layer of a later stage.

    Args:
        trace: the trace of this microbatch; ``None`` if one stage runs everything, without tracing.
        layers: the stage's own layers.
        is_last: whether this is the virtual machine's last stage, which runs the code after the
            last layer too.
        received: the payload of the boundary before ``layers``. It is released as soon as the model
            releases it: saved tensors of it may be offloaded.
        device: the stage's device.
        streams: the generators to switch.
        key: determines the random streams of this microbatch.
        shared: the shared parameters held here.
        recompute: the layers that drop their saved tensors and are recomputed before the backward,
            with the numbers of the tensors that they do not drop.
        table: the saved tensors of the layers.
        memory: enforces their budget, if there is one.
        observer: records the saved tensors of the layers, if needed.
        resident: addresses of the model's own tensors, if saved tensors are counted or recorded.
        listeners: are told of the layers that run; the last one is the closest to them.
        outgoing: the values for the next stage, protected from in-place writes of user code.
        edges: where the gradients of these values enter this stage's graph; ``None`` for values
            without a gradient.
        boxes: hold the gradients of ``received`` after the backward.
        result: the value that the step returned, on the last stage.
        resolve_state: replaces placeholders that user code has kept by values.
        order: the layers in the order of their calls.
    """

    trace: Trace | None
    layers: range
    is_last: bool
    received: dict[Value, Tensor]
    device: torch.device
    streams: RandomStreams
    key: tuple[int | str, ...]
    shared: SharedParameters
    recompute: Mapping[int, Set[int]] = field(default_factory=dict)
    table: SavedTable = field(default_factory=SavedTable)
    memory: Memory | None = None
    observer: Observer | None = None
    resident: Set[int] = frozenset()
    listeners: Sequence[LayerListener] = ()
    outgoing: dict[Value, Tensor] = field(default_factory=dict)
    edges: dict[Value, Any] = field(default_factory=dict)
    boxes: dict[Value, GradientBox] = field(default_factory=dict)
    result: Any = None
    resolve_state: Callable[[Callable[[Any], Any]], None] | None = None
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        has_all_layers = self.is_last and not self.layers.start
        if self.trace is not None and self.trace.replaces and not has_all_layers:
            raise LayerError(
                f"The layer {self.trace.replaces!r} is called with other tensors in the place of"
                " its parameters (`torch.func.functional_call`, for example): these are computed"
                " outside of the layer, and other stages do not have them. Compute them inside of"
                " it: let the module that makes this call be a layer (return it from"
                " `configure_layers()`), or train on one device."
            )
        self._part = self.trace.part(self.layers) if self.trace is not None else None
        self._position = 0
        self._number = 0
        self._place = START
        """The position that determines the random stream."""
        self._places: dict[int, Position] = {}
        """By the seed of a stream, its position."""
        self._begun_at: dict[int, Position] = {}
        """By number of a call, the position at which it began."""
        self._ended = False
        self._trains = torch.is_grad_enabled()
        self._values: dict[Value, Tensor] = {}
        """Values present on this stage, by their current names."""
        self._names: dict[Value, Value] = {}
        """By the name in a placeholder, the value's current name."""
        self._wanted: Set[Value] = frozenset()
        self._sources: Set[Value] = frozenset()
        """The first names of needed values that have a later name."""
        self._kept: dict[Value, Tensor] = {}
        self._checkpointed: dict[Value, Tensor] = {}
        """Values that the model's own activation checkpointing needs when it recomputes."""
        self._regions: list[RecomputedRegion] = []
        self._reports: list[SideOutput] = []
        """The side outputs of the layer that was called last: values that left it other than by its
        return value.
        """
        self._where = _Where()
        if self.memory is not None:
            self.listeners = [*self.listeners, self._where]
        self._saves = BetweenLayers(self.table, self.observer, self.resident)
        self._code: CodeBytes | None = None
        if self.observer is not None and self._trains:
            counted = self.resident | {address_of(x) for x in self.received.values()}
            self._code = CodeBytes(self.device, self.observer, self.table, counted)
        self._mode = Operations(self)
        self._mark = object()
        self._draws_on_host = self.trace.draws_on_host if self.trace is not None else None
        self._looks_at_layers = not (
            self.trace is None
            and self.memory is None
            and not self.listeners
            and not self.recompute
            and not self._looks_at_saved
        )
        if self.trace is not None:
            if not self.is_last:
                self._wanted, self._sources = self.trace.needed(self.layers.stop)
            for value, tensor in self.received.items():
                self._receive(self.trace, value, tensor)
        if not self._runs_user_code:
            self.received.clear()

    def _receive(self, trace: Trace, value: Value, tensor: Tensor) -> None:
        handed_out = tensor
        passed_on = value in self._wanted
        if passed_on and self._runs_user_code and value in trace.rewritten:
            # The value that crosses a boundary is the one that was computed: user code here writes
            # to its own copy.
            handed_out = tensor.clone()
        # Also if no gradient is expected: if one arrives, it must not be lost silently.
        if value in trace.tracked and torch.is_grad_enabled():
            box = self.boxes[value] = GradientBox(handed_out)
            handed_out = box.open()
        # User code may get it without a copy.
        self._values[value] = self._marked(handed_out)
        if passed_on:
            self.outgoing[value], self.edges[value] = tensor.detach(), _edge(handed_out)

    @property
    def layer_under_way(self) -> str:
        """The name of the layer that is running, forward or backward, or that ran last."""
        return self._where.layer

    @property
    def _runs_user_code(self) -> bool:
        if self.trace is None or self._part is None or self.is_last or self.trace.writes_state:
            return True
        return bool(self._part.calls or self._part.intervals)

    def run(self, step: Callable[[], Any]) -> None:
        """Runs the stage's part of ``step``; a stage without layers only forwards its payload."""
        if not self._runs_user_code:
            return
        try:
            self._places[self.streams.go_to(START, host=self._draws_on_host)] = START
            self.shared.enter_segment(START)
            self._enter_interval()
            if self.observer is not None:
                self.observer.begin()
            code = self._code if self._code is not None else nullcontext()
            with watching(self), applied_functions_seen(), self._hooks(), self._mode, code:
                self.result = step()
                if self._code is not None:
                    self._code.end(leaves_of(self.result))
            calls_more = self.trace is not None and self._position < len(self.trace.flow.calls)
            if not self.is_last and calls_more:
                if self._position or self.result is not None:
                    raise LayerError(
                        "The step ended before it called the layers of the later stages. The step "
                        "must call the same layers for every batch, or return None before the "
                        "first of them."
                    )
                self._pass_nothing_on()
            if self.is_last and self.trace is not None:
                self.result = map_leaves(self.value_of, self.result)
                if self.trace.keeps and self.resolve_state is not None:
                    self.resolve_state(self.kept_value)
        except StageDone:
            pass
        finally:
            self._ended = True
            self.shared.leave_layer()
            self._values.clear()
            self._kept.clear()
            self.received.clear()
        # From now on user code does not use the layers' arguments any more.
        self._regions = [region for region in self._regions if region.let_go()]

    def _pass_nothing_on(self) -> None:
        """After a step that has returned None before all layers, as it does on every stage: the
        next stage waits for a payload, and reads none of it.
        """
        assert self.trace is not None
        for value, spec in self.trace.payload(self.layers.stop):
            if value not in self.outgoing:
                empty = torch.zeros(spec.shape, dtype=dtype_named(spec.dtype), device=self.device)
                self.outgoing[value], self.edges[value] = empty, None

    def _hooks(self) -> AbstractContextManager[Any]:
        return self._saves.watched() if self._trains and self._looks_at_saved else nullcontext()

    @property
    def _looks_at_saved(self) -> bool:
        """Whether saved tensors are offloaded or recorded."""
        return self.table.is_kept or self.observer is not None

    def recompute_layers(self) -> None:
        """Recomputes dropped saved tensors for the coming backward: in the order in which it needs
        them, and as many as fit in the budget. The rest is recomputed on demand.
        """
        for region in reversed(self._regions):
            if not self.table.has_room(region.needed_bytes):
                break
            region.run_again()
        self._regions.clear()

    # --- values ---

    def value_of(self, leaf: Any) -> Any:
        """The value that a placeholder represents; any other object unchanged.

        Raises:
            LayerError: another stage has it, and has not sent it.
        """
        if not isinstance(leaf, Placeholder):
            return leaf
        if leaf.label is not None and leaf.owner is not self._mark:
            raise LayerError(
                f"A value of an earlier microbatch is needed ({leaf!r}), which another stage has. "
                "Keep such values in the LightningModule's buffers or attributes with their "
                "values at the end of a step, and do not use them in the next microbatch."
            )
        if self._ended:
            return self._value_again(leaf)
        if leaf.label is not None:
            found = self._values.get(self._present(leaf.label))
            if found is not None:
                return found
        raise LayerError(
            f"A value that another stage holds is needed here ({leaf!r}), and was not when the "
            "step was first traced. The code between the layers must compute the same things for "
            "every batch; or name the layers in `configure_layers()` so that this code is inside "
            "one."
        )

    def _present(self, value: Value) -> Value:
        while value in self._names:
            value = self._names[value]
        return value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for internal code that runs in the middle of user code."""
        if self._ended:
            yield
            return
        with self._mode.paused():
            yield

    def kept_value(self, leaf: Any) -> Any:
        """Like :meth:`value_of`, but returns a placeholder if the value is on another stage."""
        is_ours = isinstance(leaf, Placeholder) and leaf.owner is self._mark
        if is_ours and leaf.label is not None:
            return self._values.get(self._present(leaf.label), leaf)
        return leaf

    def written(self, tensor: Tensor, values: set[Value]) -> None:
        raise LayerError(
            f"A tensor of shape {tuple(tensor.shape)} is written to with values that another "
            "stage holds, and was not when the step was first traced. The code between the "
            "layers must compute the same things for every batch; or name the layers in "
            "`configure_layers()` so that this code is inside one."
        )

    def draws(self, draw: Callable[[], object]) -> None:
        if self.trace is not None and self._position in self.trace.open_intervals:
            draw()

    # --- operations between layers ---

    def operation(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind, name = kind_of(function)
        if self.trace is None and kind is OperationKind.OPERATION and function is not torch.tensor:
            # Used for the code of one stage, or before a step is traced: every operation of the
            # model arrives here.
            if is_transformed() or not self.shared.are_used(args, kwargs):
                return function(*args, **kwargs)
        elif kind is OperationKind.QUESTION or is_transformed():
            if args and isinstance(args[0], Placeholder) and args[0].is_tracked:
                if name == "requires_grad_":
                    # It is so on its own stage; the placeholder is part of no graph.
                    return args[0]
                if name in _OF_TRACKED:
                    return _OF_TRACKED[name]()
            return function(*args, **kwargs)
        if kind is OperationKind.READ or function is torch.tensor:
            args, kwargs = with_tensors((args, kwargs), self.value_of)
            if kind is OperationKind.READ:
                return function(*args, **kwargs)
        is_followed = self.trace is not None and any(
            map(self._is_followed, tensors_of((args, kwargs)))
        )
        trace, entry = self.trace, None
        if is_followed and trace is not None:
            self._number += 1
            entry = trace.entries.get((self._position, self._number))
        if trace is None or entry is None:
            result = function(*self._with_aliases(args), **self._with_aliases(kwargs))
            if is_followed and any(map(self._depends_on_a_layer, tensors_of((args, kwargs)))):
                # A tensor that every stage has and writes to remains one that every stage has.
                # What is computed without a gradient of parameters alone (`parameter.data`), every
                # stage has as well.
                given = {id(x) for x in tensors_of((args, kwargs)) if not self._is_followed(x)}
                self._marked([x for x in tensors_of(result) if id(x) not in given])
            return result
        if entry.name != name:
            raise LayerError(
                f"The code between the layers calls `{name}` where it called `{entry.name}` when "
                f"it was first traced: it took another branch. {ADVICE}"
            )
        if entry.layer in self.layers or (entry.is_view and self._is_here(args, kwargs)):
            return self._compute(entry, function, args, kwargs)
        return self._stand_in(trace, entry, function, args, kwargs)

    def _depends_on_a_layer(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Placeholder) or getattr(tensor, _MARK, None) is self._mark

    def _is_followed(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on a layer, or is a parameter that requires a gradient."""
        if self._depends_on_a_layer(tensor):
            return True
        is_parameter = tensor.requires_grad and self.shared.knows(tensor)
        return is_parameter and torch.is_grad_enabled()

    def _marked(self, result: Any) -> Any:
        for tensor in tensors_of(result):
            if not isinstance(tensor, Placeholder):
                setattr(tensor, _MARK, self._mark)
        return result

    def _with_aliases(self, tree: Any) -> Any:
        if not torch.is_grad_enabled():
            return tree
        return with_tensors(tree, lambda x: self.shared.alias(x) if self.shared.knows(x) else x)

    def _is_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not any(
            isinstance(self.kept_value(x), Placeholder) for x in tensors_of((args, kwargs))
        )

    def _compute(
        self,
        entry: TracedOperation,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given: list[Tensor] = []

        def real(tensor: Tensor) -> Tensor:
            value = entry.given.get(len(given))
            if value is not None:
                tensor = self._values.get(value, tensor)
            elif isinstance(tensor, Placeholder):
                tensor = self.value_of(tensor)
            elif self.shared.knows(tensor):
                tensor = self.shared.alias(tensor)
            given.append(tensor)
            return tensor

        args, kwargs = with_tensors((args, kwargs), real)
        result = function(*args, **kwargs)
        returned, _ = flatten(result)
        for found, leaf in zip(entry.returns, returned, strict=True):
            if isinstance(found, Value):
                self._computed(found, leaf)
        for old, new in entry.renames.items():
            tensor = self._values.pop(old, None)
            if tensor is not None:
                self._values[new] = tensor
            self._names[old] = new
            self._rewritten(new)
        for number, value in entry.writes.items():
            self._values[value] = given[number]
            self._computed(value, given[number])
            self._marked(given[number])
        return self._marked(result)

    def _computed(self, value: Value, tensor: Tensor) -> None:
        """Records a value that may have to be sent."""
        if value in self._wanted:
            self._send_on(value, tensor)
        if value in self._sources:
            self._kept[value] = tensor

    def _rewritten(self, value: Value) -> None:
        if value in self._wanted and self.trace is not None:
            root = self.trace.root(value)
            tensor = self._kept.get(root, self._values.get(value))
            if tensor is not None:
                self._send_on(value, tensor)

    def _send_on(self, value: Value, tensor: Tensor) -> None:
        assert self.trace is not None
        if self._ended:
            return
        data = tensor.detach()
        self.outgoing[value] = data.clone() if value in self.trace.rewritten else data
        self.edges[value] = _edge(tensor)

    def _stand_in(
        self,
        trace: Trace,
        entry: TracedOperation,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The placeholder for the result of an operation that another stage computes."""
        given = list(tensors_of((args, kwargs)))
        if entry.draws:
            # Later random draws are the same on every stage.
            torch.no_grad()(function)(*self._numbers(args), **self._numbers(kwargs))
        leaves: list[Any] = []
        described = zip(entry.returns, entry.specs, entry.template.constants, strict=True)
        for found, spec, constant in described:
            if found is None or (spec is None and not isinstance(found, int)):
                leaves.append(constant)
            elif isinstance(found, int):
                leaves.append(given[found])
            else:
                leaf = self._values.get(found) if found in trace.eager else None
                if leaf is None:
                    assert spec is not None
                    leaf = self._placeholder(trace, found, spec)
                leaves.append(leaf)
        for old, new in entry.renames.items():
            self._names[old] = new
        for number in entry.writes:
            self._marked(given[number])
        return entry.template.rebuild(leaves)

    def _numbers(self, tree: Any) -> Any:
        return with_tensors(
            tree,
            lambda x: (
                # A new tensor made from the placeholder would be a placeholder itself.
                torch.ones(x.shape, dtype=x.dtype, device=self.device)
                if isinstance(x, Placeholder)
                else x.detach().clone()
            ),
        )

    # --- the gates ---

    def visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ended:
            return self._again(gate, args, kwargs)
        if self._code is not None:
            self._code.end(leaves_of((args, kwargs)))
        with self._mode.paused():
            output = self._visit(gate, args, kwargs)
        if gate.reports is not None:
            reports, self._reports = self._reports, []
            gate.reports.give(reports)
        return output

    def _visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self._position
        self._position += 1
        if self.trace is None:
            self.order.append(gate.index)
            if self._looks_at_layers:
                output = self._run(gate, position, args, kwargs)
                self._enter_interval()
            else:
                self._enter(gate, position)
                output = gate.run_plainly(*args, **kwargs)
                self._leave()
            return output
        calls = self.trace.flow.calls
        if position >= len(calls) or calls[position].layer != gate.index:
            raise LayerError(
                f"The layer {gate.name!r} is called out of order: when the step was first traced, "
                f"another layer was called here: it took another branch. {ADVICE}"
            )
        assert self._part is not None
        if not self.is_last and self._part.is_over(position):
            raise StageDone
        if position not in self._part.calls:
            self._begun_at[position] = self._place
            self._go_to(ended(begun(self._place)))
            output, self._reports = self._skip(self.trace, position)
        else:
            if not (are_values(args) and are_values(kwargs.values())):
                args, kwargs = map_leaves(self.value_of, (args, kwargs))
            output = self._run(gate, position, args, kwargs)
        self._enter_interval()
        return output

    def _enter_interval(self) -> None:
        """Called when user code before the next layer starts to run."""
        self._number = 0
        calls = self.trace.flow.calls if self.trace is not None else ()
        layer = 0
        if self._position < len(calls):
            layer = calls[self._position].layer
        elif calls:
            layer = calls[-1].layer
        if calls and self._position >= len(calls):
            self._saves.behind(layer)
        else:
            self._saves.in_front_of(layer)
        if self._code is not None:
            self._code.begin(layer)

    # --- random streams ---

    def enter_scope(self) -> None:
        self._change_place(begun)

    def leave_scope(self) -> None:
        self._change_place(ended)

    def _change_place(self, change: Callable[[Position], Position]) -> None:
        if self._ended:
            # A part of the pass is recomputed. The code that does so has restored the generators to
            # their state at its start, and that state identifies the position.
            place = self._places.get(torch.default_generator.initial_seed())
            if place is None:
                return
            self._place = place
            self.streams.resume(*self.key)
        self._go_to(change(self._place))

    def _go_to(self, place: Position) -> None:
        self._place = place
        if not self._ended:
            self.shared.enter_segment(place)
        self._places[self.streams.go_to(place, host=self._draws_on_host)] = place

    def _skip(self, trace: Trace, position: int) -> Any:
        call, template = trace.flow.calls[position], trace.templates[position]
        leaves: list[Any] = []
        for number, spec in enumerate(call.leaves):
            value = Value(call.layer, call.call, number)
            if spec is None:
                leaves.append(template.constants[number])
                continue
            leaf = self._values.get(value)
            if leaf is None or value not in trace.eager:
                leaf = self._placeholder(trace, value, spec)
            leaves.append(leaf)
        return template.rebuild(leaves)

    def _placeholder(self, trace: Trace, value: Value, spec: TensorSpec) -> Tensor:
        leaf = Placeholder.standing_for(value, spec, self.device, self._mark)
        leaf.is_tracked = value in trace.tracked and torch.is_grad_enabled()
        return leaf

    def _run(self, gate: Gate, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._enter(gate, position)
        for listener in self.listeners:
            listener.enter(gate, (args, kwargs))
        output = self._call(gate, position, args, kwargs)
        if gate.reports is not None:
            self._reports = gate.reports.take()
        if self._reports or not are_values((output,)):
            leaves, _ = flatten((output, self._reports), opens_objects=True)
        else:
            leaves = [output]
        for listener in reversed(self.listeners):
            listener.leave(gate, (args, kwargs), leaves)
        for leaf in leaves:
            if isinstance(leaf, Placeholder):
                raise LayerError(
                    f"The layer {gate.name!r} was called with a value that another stage holds "
                    f"({leaf!r}), and was not when the step was first traced. The step must pass "
                    "the same values for every batch."
                )
        self._leave()
        if self._code is not None:
            self._code.results(leaves)
        if self.trace is None:
            return output
        self._marked(leaves)
        call = self.trace.flow.calls[position]
        for number, leaf in enumerate(leaves):
            value = Value(call.layer, call.call, number)
            if value in self._wanted or value in self._sources:
                self._check(gate, call, number, leaf)
                self._computed(value, leaf)
        # At its last layer a stage may be done; a checkpointed region has to be left properly.
        assert self._part is not None
        is_over = self._part.is_over(self._position) and self._position not in self._part.intervals
        if is_over and not self.is_last and are_alone():
            raise StageDone
        return output

    def _enter(self, gate: Gate, position: int) -> None:
        self._begun_at[position] = self._place
        self.enter_scope()
        self.shared.enter_layer(gate.index, is_again=self._ended)
        self._where.layer = gate.name

    def _leave(self) -> None:
        self.shared.leave_layer()
        self.leave_scope()

    def _call(
        self, gate: Gate, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A model with its own activation checkpointing handles saved tensors itself.
        if torch.is_grad_enabled() and are_alone():
            if self.memory is not None:
                self.memory.before_layer(gate.index)
            output = self._under_hooks(gate, position, args, kwargs)
            if self.memory is not None:
                self.memory.after_layer(gate.index)
            return output
        if self._trains:
            self._checkpointed.update(self._values)
        return gate.run(*args, **kwargs)

    def _under_hooks(
        self, gate: Gate, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        table, observer = self.table, self.observer
        if gate.index in self.recompute:
            draw = partial(self._draw_again, gate, position)
            held = self.recompute[gate.index]
            region = RecomputedRegion(gate, args, kwargs, draw, table, observer, held)
            output = region.run()
            # Known from earlier microbatches: user code does not modify the inputs.
            if gate.keeps_inputs:
                region.let_go()
            self._regions.append(region)
            return output
        if self._looks_at_saved:
            return LayerCall(gate, args, kwargs, table, observer).run()
        return gate.run(*args, **kwargs)

    def _draw_again(self, gate: Gate, position: int) -> None:
        self.streams.begin(*self.key)
        self._place = self._begun_at[position]
        self.streams.go_to(self._place)
        self.enter_scope()

    def _check(self, gate: Gate, call: Call, number: int, leaf: Any) -> None:
        expected = call.leaves[number] if number < len(call.leaves) else None
        if (
            expected is not None
            and isinstance(leaf, Tensor)
            and leaf.shape == expected.shape
            and leaf.dtype is dtype_named(expected.dtype)
        ):
            return
        found = spec_of(leaf) if isinstance(leaf, Tensor) else None
        # Strides are not compared: kernels choose their order, and a value is sent with the strides
        # of the trace.
        raise LayerError(
            f"The layer {gate.name!r} returned {found}, but {expected} was computed for this "
            "batch. The shape of a layer's result may depend on the shapes of its inputs only."
        )

    def _again(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer again in the backward (activation checkpointing in the user's model), with
        the same random numbers.
        """
        order = self.order
        if self.trace is not None:
            order = [call.layer for call in self.trace.flow.calls]
        positions = [place for place, layer in enumerate(order) if layer == gate.index]
        if len(positions) != 1:
            raise LayerError(
                f"The layer {gate.name!r} is called several times in a pass and checkpointed by the"
                " model. Checkpoint inside the layer instead."
            )
        (position,) = positions
        with self._mode.paused() if self._mode.is_innermost() else nullcontext():
            if self.trace is not None and position not in self.trace.part(self.layers).calls:
                self.streams.resume(*self.key)
                output, _ = self._skip(self.trace, position)
            else:
                self._draw_again(gate, position)
                args, kwargs = map_leaves(self._value_again, (args, kwargs))
                output = self._marked(gate.run(*args, **kwargs))
            # The code behind the layer draws what it has drawn before.
            self._go_to(ended(begun(self._begun_at[position])))
        # The code after this call is recomputed next.
        self._position, self._number = position + 1, 0
        self._names = {}
        self._mode.begin_in_backward()
        return output

    def backward(self, roots: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Runs this stage's part of the backward."""
        self._values = {}
        torch.autograd.backward(roots, gradients)
        self.end_backward()

    def end_backward(self) -> None:
        """Cleans up after a backward in which parts of the pass were recomputed."""
        self._mode.end_backward()
        # They refer to this object in turn.
        self._regions.clear()

    def _value_again(self, leaf: Any) -> Any:
        """Returns a value for a recomputation, whose graph is discarded: only the values matter."""
        if not isinstance(leaf, Placeholder) or leaf.label is None:
            return leaf
        name = self._present(leaf.label)
        if name in self._values:
            return self._values[name]
        found = self._checkpointed.get(name)
        if found is None:
            return leaf
        again = found.detach()
        if found.requires_grad:
            again = GradientBox(again).open()
        self._values[name] = again
        return again


def _edge(tensor: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None
