"""Follows the tensors through one run of the user's step, and records the flow.

Every layer runs once on placeholders, which computes shapes and nothing else; the code between
layers runs on placeholders too. What each call was made from, what the loss, the logged values and
the results need, what user code reads on the host: all of it is written on the placeholders
themselves. Where code refuses placeholders, the same run is made on real values, as long as the
whole model is still here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.gate import Gate, Switch
from lightning_pipeshift.model.measure import Stopwatch
from lightning_pipeshift.model.parameters import Segment, slots_of, substituted
from lightning_pipeshift.model.placeholder import (
    META,
    Origin,
    Placeholder,
    Watcher,
    spec_of,
    watching,
)
from lightning_pipeshift.model.preserve import preserved
from lightning_pipeshift.model.sight import BatchValues, TouchedParameters
from lightning_pipeshift.model.trees import Rebuild, flatten, leaves_of
from lightning_pipeshift.plan.flow import Call, Flow, TensorSpec, Value

Step = Callable[[nn.Module], Any]
Payload = list[tuple[Value, TensorSpec]]


@dataclass(frozen=True)
class Template:
    """What a call returned: the leaves that are no tensors, and how to put a structure together
    again.
    """

    constants: tuple[Any, ...]
    rebuild: Rebuild


@dataclass
class Trace:
    """A recorded flow, and what only this process needs of it.

    Args:
        flow: the flow, by index of the layers.
        templates: one for each call.
        touched: by identity of a parameter, the segments in which it is used other than through its
            own layer.
        logs_each_step: whether anything is logged with ``on_step=True``.
        drawing_gaps: the layers in front of which user code draws more than once, and not only for
            tensors that are on every stage: there, random operations on placeholders have to use up
            what they would have drawn.
        is_shaped_by_batch: whether shapes are made of the batch's values (``x[mask]``,
            ``x[:, :lengths.max()]``), so that the flow holds for this batch only.
        tracked: the values that needed a gradient when they left their layer.
        draws_on_host: whether anything draws from NumPy or ``random``.
    """

    flow: Flow
    templates: list[Template]
    touched: dict[int, set[Segment]] = field(default_factory=dict)
    logs_each_step: bool = False
    drawing_gaps: frozenset[int] = frozenset()
    is_shaped_by_batch: bool = False
    tracked: frozenset[Value] = frozenset()
    draws_on_host: bool = False
    _payloads: dict[int, Payload] = field(default_factory=dict)
    _gradients: dict[int, Payload] = field(default_factory=dict)
    _positions: dict[tuple[int, int], range] = field(default_factory=dict)

    def payload(self, boundary: int) -> Payload:
        """The values that cross the boundary in front of a layer, and how to receive them."""
        if boundary not in self._payloads:
            values = self.flow.payload(boundary)
            self._payloads[boundary] = [(value, self.flow.spec(value)) for value in values]
        return self._payloads[boundary]

    def gradients(self, boundary: int) -> Payload:
        """Those of them whose gradients come back."""
        if boundary not in self._gradients:
            differentiable = self.flow.differentiable
            self._gradients[boundary] = [
                (value, spec) for value, spec in self.payload(boundary) if value in differentiable
            ]
        return self._gradients[boundary]

    def positions(self, layers: range) -> range:
        """The calls of a range of layers."""
        key = layers.start, layers.stop
        if key not in self._positions:
            self._positions[key] = self.flow.positions(layers)
        return self._positions[key]


def record(
    step: Step,
    root: nn.Module,
    gates: Sequence[Gate],
    switch: Switch,
    device: torch.device,
    real: bool = False,
    stopwatch: Stopwatch | None = None,
) -> Trace:
    """Runs ``step`` once and returns what it does.

    Args:
        step: runs the user's step on the LightningModule it is given, with a microbatch.
        root: the LightningModule. What the run leaves behind on it or on its modules is undone.
        gates: installed, one for each layer.
        switch: the gates' switch.
        device: the device on which the stage's layers live.
        real: follow real values; needs every layer's parameters here.
        stopwatch: times every layer on the way.

    Raises:
        LayerError: a layer is called twice in another way than directly in a row on independent
            inputs, or its inner tensors leave it in another way than by its return value.
    """
    recorder = _Recorder(root, gates, device, real, stopwatch)
    switch.current = recorder
    try:
        with (
            preserved(root.modules()),
            watching(recorder),
            TouchedParameters(recorder),
            BatchValues(recorder),
        ):
            root.__dict__.update(log=recorder.log, log_dict=recorder.log_dict)
            result = step(root)
    finally:
        switch.current = None
    return recorder.finish(result)


class _Relabel(torch.autograd.Function):
    """Gives a placeholder a new origin and keeps the autograd graph in one piece, so that it can be
    searched.
    """

    @staticmethod
    def forward(ctx: Any, old: Placeholder, origin: Origin, value: Value | None) -> Placeholder:
        ctx.value = value
        return Placeholder(old.shadow.detach(), old.device, origin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def _relabelled(old: Placeholder, origin: Origin, value: Value | None) -> Placeholder:
    new: Placeholder = _Relabel.apply(old, origin, value)  # type: ignore[no-untyped-call]
    return new


@dataclass(frozen=True)
class _Inside:
    """One call of a layer, while it runs."""

    gate: Gate
    call: int
    needs: set[Value]
    own: frozenset[int]


class _Recorder(Watcher):
    def __init__(
        self,
        root: nn.Module,
        gates: Sequence[Gate],
        device: torch.device,
        real: bool,
        stopwatch: Stopwatch | None,
    ) -> None:
        self.inside: _Inside | None = None
        self.calls: list[Call] = []
        self.templates: list[Template] = []
        self.tail: set[Value] = set()
        self.control: set[Value] = set()
        self.touched: dict[int, set[Segment]] = {}
        self.logs_each_step = False
        self._root = root
        self._gates = gates
        self._device = device
        self._real = real
        self._stopwatch = stopwatch
        self._draws_in_gap: dict[int, int] = {}
        self._is_shaped_by_batch = False
        self._tracked: set[Value] = set()
        self._without_gradient: list[str] = []
        self._parameter_ids = {id(parameter) for parameter in root.parameters()}

    # --- what the gates ask ---

    def visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside is not None:
            # A layer that calls another layer: the inner one is part of the outer one's work.
            raise LayerError(
                f"The layer {self.inside.gate.name!r} calls the layer {gate.name!r}. A layer that"
                " is placed by itself cannot be used inside another. Return both as one module"
                " from `configure_layers()`, or hold the shared part outside."
            )
        if not torch.is_grad_enabled():
            self._without_gradient.append(gate.name)
        call = self._count(gate)
        if self._stopwatch is not None:
            self._stopwatch.observe(gate, args, kwargs)
        inputs, rebuild_inputs = flatten((args, kwargs))
        slots = slots_of(gate.layer)
        needs: set[Value] = set()
        inside = _Inside(gate, call, needs, frozenset(id(slot.get()) for slot in slots))
        inner_inputs, origins = [], []
        for leaf in inputs:
            if isinstance(leaf, Placeholder):
                self.used(leaf.origin)
                needs |= leaf.origin.values
                origin = Origin((), inside)
                origins.append((leaf.origin, origin))
                leaf = _relabelled(leaf, origin, None)
            inner_inputs.append(leaf)
        if call and any(value.layer == gate.index for value in needs):
            raise LayerError(
                f"The layer {gate.name!r} is called again on what it returned itself, in one"
                " forward pass. A layer is called once: give each use a module of its own, or wrap"
                " the repeated part in one module and name that in `configure_layers()`."
            )
        inner_args, inner_kwargs = rebuild_inputs(inner_inputs)
        self.inside = inside
        try:
            with substituted(slots, self._stand_ins(slots, inside)):
                output = gate.original(*inner_args, **inner_kwargs)
        finally:
            self.inside = None
        for outer, inner in origins:
            if inner.written_by is not None:
                # The caller's tensor has changed as well; whoever uses it from here on depends on
                # this layer in a way that its return value does not carry.
                outer.written_by = inside
        return self._leave(gate, call, output, needs)

    def _count(self, gate: Gate) -> int:
        call = 0
        if any(earlier.layer == gate.index for earlier in self.calls):
            if self.calls[-1].layer != gate.index:
                others = {self._gates[c.layer].name for c in self.calls if c.layer != gate.index}
                raise LayerError(
                    f"The layer {gate.name!r} is called twice in one forward pass, with other"
                    f" layers ({', '.join(sorted(others)[:3])} ...) in between. A layer is called"
                    " once. Give each use a module of its own, or wrap everything from its first"
                    " call to its last in one module and name that in `configure_layers()`."
                )
            call = self.calls[-1].call + 1
        return call

    def _stand_ins(self, slots: Sequence[Any], inside: _Inside) -> Mapping[int, Tensor]:
        stand_ins: dict[int, Tensor] = {}
        for slot in slots:
            tensor = slot.get()
            if tensor is None or id(tensor) in stand_ins:
                continue
            if self._real:
                # A copy, so that running statistics stay as they are.
                inner = tensor.detach().to(self._device, copy=slot.is_buffer)
            else:
                inner = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META
                )
            stand_ins[id(tensor)] = Placeholder(
                inner, self._device, Origin((), inside), requires_grad=tensor.requires_grad
            )
        return stand_ins

    def _leave(self, gate: Gate, call: int, output: Any, needs: set[Value]) -> Any:
        leaves, rebuild = flatten(output)
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
            if not isinstance(leaf, Placeholder):
                # Made from the batch alone.
                inner = leaf if self._real else leaf.detach().to(META)
                leaf = Placeholder(inner, self._device, Origin(()))
            if leaf.requires_grad:
                self._tracked.add(value)
            specs.append(spec_of(leaf.shadow))
            constants.append(None)
            outer.append(_relabelled(leaf, Origin([value]), value))
        self.calls.append(Call(gate.index, call, tuple(specs), frozenset(needs)))
        self.templates.append(Template(tuple(constants), rebuild))
        return rebuild(outer)

    # --- what the placeholders tell ---

    def read(self, function: str, values: set[Value]) -> None:
        if self.inside is None:
            self.control |= values

    def written(self, values: set[Value]) -> None:
        self.tail |= values

    def draws(self, draw: Callable[[], object]) -> None:
        if self.inside is None:
            self._draws_in_gap[self._gap] = self._draws_in_gap.get(self._gap, 0) + 1

    @property
    def _gap(self) -> int:
        return self.calls[-1].layer + 1 if self.calls else 0

    def shaped_by_batch(self) -> None:
        self._is_shaped_by_batch = True

    def drew(self) -> None:
        """A random function was called on real tensors."""
        if self.inside is None and self._draws_in_gap.get(self._gap):
            self._draws_in_gap[self._gap] += 1

    def used(self, origin: Origin) -> None:
        if origin.inside is self.inside:
            if self.inside is None and isinstance(origin.written_by, _Inside):
                raise LayerError(
                    f"The layer {origin.written_by.gate.name!r} changes its input in place, and"
                    " that input is used after it. Other stages see the input as it was before."
                    " Clone it in the layer, or use what the layer returns."
                )
            return
        if isinstance(origin.inside, _Inside):
            raise LayerError(
                f"A tensor from the inside of the layer {origin.inside.gate.name!r} is used outside"
                " of it, and not by way of the layer's return value (a hook on a submodule, say,"
                " or a list that it appends to). On another stage that tensor does not exist. Let"
                " the layer return it, or name a larger module in `configure_layers()`."
            )
        # A tensor from outside that reached the layer by an attribute or a closure: needed like an
        # argument.
        assert self.inside is not None
        self.inside.needs.update(origin.values)

    # --- what the step does besides ---

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
                self.tail |= leaf.origin.values

    def touch(self, parameter: Tensor) -> None:
        if self.inside is not None:
            if id(parameter) in self.inside.own:
                return
            segment = Segment(self.inside.gate.index, True)
        else:
            segment = Segment(self._gap, False)
        self.touched.setdefault(id(parameter), set()).add(segment)

    def is_parameter(self, tensor: object) -> bool:
        return id(tensor) in self._parameter_ids

    def finish(self, result: Any) -> Trace:
        self._needed_by_tail(result)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        flow = Flow(
            calls=tuple(self.calls),
            tail=frozenset(self.tail),
            control=frozenset(self.control),
            differentiable=frozenset(_reached_from(loss, self._without_gradient)),
        )
        if not self.calls:
            raise LayerError(
                "The step calls none of the layers that PipeShift found"
                f" ({', '.join(gate.name for gate in self._gates[:5])} ...). Name the modules that"
                " it calls in `configure_layers()`."
            )
        return Trace(
            flow,
            self.templates,
            self.touched,
            self.logs_each_step,
            frozenset(gap for gap, count in self._draws_in_gap.items() if count > 1),
            # A microbatch without a loss says nothing of where gradients flow in others.
            self._is_shaped_by_batch or (torch.is_grad_enabled() and loss is None),
            frozenset(self._tracked),
        )


def _reached_from(loss: Any, without_gradient: list[str]) -> set[Value]:
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return set()
    values: set[Value] = set()
    seen = {loss.grad_fn}
    queue = deque(seen)
    while queue:
        node = queue.popleft()
        value = getattr(node, "value", None)
        if isinstance(value, Value):
            values.add(value)
        if without_gradient and node.name() == "CheckpointFunctionBackward":
            raise LayerError(
                f"The layer {without_gradient[0]!r} is called inside a reentrant checkpoint, which"
                " hides its gradients until the backward. Pass `use_reentrant=False` to"
                " `torch.utils.checkpoint.checkpoint`"
                " (`gradient_checkpointing_kwargs={'use_reentrant': False}` for Hugging Face)."
            )
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                queue.append(successor)
    return values
