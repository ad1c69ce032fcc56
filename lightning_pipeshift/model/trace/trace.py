"""The trace of a step: its flow, and the details that this process needs to run its part of the
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.trees import Rebuild
from lightning_pipeshift.model.trace.conditions import Conditions, PlainChanges
from lightning_pipeshift.model.trace.switches import Switches
from lightning_pipeshift.plan.inputs.flow import Flow, TensorSpec, Value, renumbered
from lightning_pipeshift.plan.inputs.placement import Placement

Payload = list[tuple[Value, TensorSpec]]
Place = tuple[str, str]
"""A tensor that user code keeps: the names of a module, and of its attribute."""

LAST_STAGE = -1
"""Instead of a layer: the last stage, which runs the whole step."""


@dataclass(frozen=True)
class Template:
    """A call's result without its tensors: the other leaves, and how to rebuild the structure."""

    constants: tuple[Any, ...]
    rebuild: Rebuild


@dataclass(frozen=True)
class TracedOperation:
    """One operation between layers, as a stage encounters it.

    Args:
        layer: the stage of this layer computes the operation.
        name: the function's name.
        returns: for each leaf of its result, the value, the number of the argument that it is, or
            ``None`` for a leaf that is no tensor.
        specs: of the values among them.
        template: rebuilds the result.
        given: for tensors that exist on every stage and were written to on one: the value, by the
            argument's number.
        renames: the values whose memory it writes to, with their names after it.
        writes: for arguments that exist on every stage and are written to: the name after it, by
            the argument's number.
        is_view: whether it only makes a view, which every stage that has its base repeats.
        draws: whether it draws random numbers, and others follow.
    """

    layer: int
    name: str
    returns: tuple[Value | int | None, ...]
    specs: tuple[TensorSpec | None, ...]
    template: Template
    given: Mapping[int, Value]
    renames: Mapping[Value, Value]
    writes: Mapping[int, Value]
    is_view: bool = False
    draws: bool = False


@dataclass(frozen=True)
class StagePart:
    """One stage's part of a pass.

    Args:
        calls: the positions of its layers' calls.
        intervals: the intervals with operations that it computes.
        last_call: the last of these positions; where there is none, that of the last call that
            comes before all of its layers.
        last_interval: the last of these intervals; -1 where there is none.
    """

    calls: frozenset[int]
    intervals: frozenset[int]
    last_call: int
    last_interval: int

    def is_over(self, interval: int) -> bool:
        """Whether the part ends after an interval."""
        return interval > self.last_call and interval >= self.last_interval


@dataclass
class Trace:
    """A recorded flow, with details that only this process needs.

    Args:
        flow: the flow, by index of the layers.
        templates: one for each call.
        entries: the operations between layers by interval and number; an interval is the number of
            calls before it.
        touched: by identity of a parameter that is used other than through its own layer, the
            layers that use it in this way; empty if only code between layers does.
        logs_each_step: whether anything is logged with ``on_step=True``.
        is_shaped_by_batch: whether shapes depend on the batch's values (``x[mask]``, ``x[:,
            :lengths.max()]``), so that the flow is valid for this batch only.
        is_drawn: whether calls depend on random numbers, so that the flow is valid for this
            microbatch only.
        tracked: the values that required a gradient when they were computed.
        open_intervals: the intervals in which user code may branch on values. Operations after such
            a branch run on every stage that needs their results.
        eager: the values that a stage which has them passes to user code at once, because they are
            inputs of operations that have no number.
        rewritten: the values whose memory is written to after they were computed.
        roots: for a value that is an older one after a write to its memory, that older one.
        keeps: whether user code keeps values on its modules.
        state: tensors that are on every stage (parameters, and those that user code keeps on its
            modules), and that user code writes to on one stage only: the layer of this stage, or
            ``LAST_STAGE``.
        writes_state: whether it writes to parameters, which a stage without layers does too.
        changed_parameter: a trained parameter to which code outside of its layer writes; empty if
            there is none.
        draws_on_host: whether anything draws from NumPy or ``random``.
        replaces: a layer that is called with other tensors in the place of its parameters.
        lacks_loss: whether gradients are recorded and the step has returned no loss.
        switches: the training modes and ``requires_grad`` that change within the step.
        carried: for state that user code keeps on modules and uses in the next microbatch on an
            earlier layer's stage: that layer, and the one whose stage computes it.
        conditions: the trace is valid for steps that meet them.
        changes: those of plain values that user code keeps.
    """

    flow: Flow
    templates: list[Template]
    entries: dict[tuple[int, int], TracedOperation] = field(default_factory=dict)
    touched: dict[int, set[int]] = field(default_factory=dict)
    logs_each_step: bool = False
    is_shaped_by_batch: bool = False
    is_drawn: bool = False
    tracked: frozenset[Value] = frozenset()
    eager: frozenset[Value] = frozenset()
    open_intervals: frozenset[int] = frozenset()
    rewritten: frozenset[Value] = frozenset()
    roots: dict[Value, Value] = field(default_factory=dict)
    keeps: bool = False
    state: dict[Place, int] = field(default_factory=dict)
    writes_state: bool = False
    changed_parameter: str = ""
    draws_on_host: bool = False
    replaces: str = ""
    lacks_loss: bool = False
    switches: Switches = field(default_factory=Switches)
    carried: frozenset[tuple[int, int]] = frozenset()
    conditions: Conditions = field(default_factory=dict)
    changes: PlainChanges = field(default_factory=PlainChanges)
    _payloads: dict[int, Payload] = field(default_factory=dict, init=False)
    _needed: dict[int, tuple[Set[Value], Set[Value]]] = field(default_factory=dict, init=False)
    _gradients: dict[int, Payload] = field(default_factory=dict, init=False)
    _parts: dict[tuple[int, int], StagePart] = field(default_factory=dict, init=False)
    _specs: dict[Value, TensorSpec] = field(default_factory=dict, init=False)
    checked: Placement | None = field(default=None, init=False)
    """The placement for which the order of the calls was checked last."""

    @classmethod
    def empty(cls) -> Trace:
        """The trace of a step that was not traced."""
        return cls(Flow((), frozenset(), frozenset(), frozenset()), [])

    def require_equal_weights(self) -> None:
        """Raises LayerError if the step changes trained parameters, so that microbatches which are
        in flight at the same time would have other values in their backward than in their forward.
        """
        if self.changed_parameter:
            raise LayerError(
                f"The step changes the parameter {self.changed_parameter!r} in place, outside of"
                " its layer, and it is trained. Other microbatches are in flight at this moment:"
                " their backward would use other values than their forward. Change it once for each"
                " batch, in `on_train_batch_start` for example; or pass `microbatches=1`, without"
                " an asynchronous schedule. If it is not to be trained, call"
                " `requires_grad_(False)` on it."
            )

    def payload(self, boundary: int) -> Payload:
        """The values that cross the boundary before a layer, and how to receive them."""
        if boundary not in self._payloads:
            values = self.flow.payload(boundary)
            self._payloads[boundary] = [(value, self.spec(value)) for value in values]
        return self._payloads[boundary]

    def needed(self, boundary: int) -> tuple[Set[Value], Set[Value]]:
        """The values that cross the boundary before a layer, and the first names of those of them
        that were written to.
        """
        if boundary not in self._needed:
            values = frozenset(value for value, _ in self.payload(boundary))
            written = {value for value in values if self.root(value) != value}
            self._needed[boundary] = values, frozenset(map(self.root, written))
        return self._needed[boundary]

    def gradients(self, boundary: int) -> Payload:
        """The values of the payload whose gradients come back."""
        if boundary not in self._gradients:
            differentiable = self.flow.differentiable
            self._gradients[boundary] = [
                (value, spec) for value, spec in self.payload(boundary) if value in differentiable
            ]
        return self._gradients[boundary]

    def spec(self, value: Value) -> TensorSpec:
        """Shape, strides and type of a value."""
        if not self._specs:
            for call in self.flow.calls:
                for leaf, spec in enumerate(call.leaves):
                    if spec is not None:
                        self._specs[Value(call.layer, call.call, leaf)] = spec
            for operation in self.flow.operations:
                self._specs.update(operation.results)
        return self._specs[value]

    def part(self, layers: range) -> StagePart:
        """The part of the stage that owns a range of layers."""
        key = layers.start, layers.stop
        if key not in self._parts:
            order = [call.layer for call in self.flow.calls]
            own = frozenset(place for place, layer in enumerate(order) if layer in layers)
            intervals = frozenset(
                interval for (interval, _), e in self.entries.items() if e.layer in layers
            )
            # A stage without layers goes as far as there are calls of earlier layers.
            later = (place for place, layer in enumerate(order) if layer >= layers.start)
            begin = next(later, len(order))
            self._parts[key] = StagePart(
                own, intervals, max(own, default=begin - 1), max(intervals, default=-1)
            )
        return self._parts[key]

    def root(self, value: Value) -> Value:
        """The value's name when it was computed, before its memory was written to."""
        while value in self.roots:
            value = self.roots[value]
        return value

    def renumbered(self, place_of: Sequence[int]) -> Trace:
        """The same trace with other indices of the layers.

        Args:
            place_of: the new index of each layer.
        """

        def value(old: Value) -> Value:
            return old._replace(layer=place_of[old.layer])

        def entry(old: TracedOperation) -> TracedOperation:
            return replace(
                old,
                layer=place_of[old.layer],
                returns=tuple(value(x) if isinstance(x, Value) else x for x in old.returns),
                given={number: value(x) for number, x in old.given.items()},
                renames={value(a): value(b) for a, b in old.renames.items()},
                writes={number: value(x) for number, x in old.writes.items()},
            )

        return replace(
            self,
            flow=renumbered(self.flow, place_of),
            entries={key: entry(old) for key, old in self.entries.items()},
            touched={key: {place_of[x] for x in layers} for key, layers in self.touched.items()},
            tracked=frozenset(map(value, self.tracked)),
            eager=frozenset(map(value, self.eager)),
            rewritten=frozenset(map(value, self.rewritten)),
            roots={value(a): value(b) for a, b in self.roots.items()},
            state={
                path: layer if layer == LAST_STAGE else place_of[layer]
                for path, layer in self.state.items()
            },
            carried=frozenset((place_of[used], place_of[made]) for used, made in self.carried),
        )
