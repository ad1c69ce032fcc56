"""One microbatch's forward pass on one stage, as the gates see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.cut import GradientBox, SharedParameters
from lightning_pipeshift.model.gap import Gap
from lightning_pipeshift.model.gate import Gate, StageDone
from lightning_pipeshift.model.parameters import Segment
from lightning_pipeshift.model.placeholder import (
    Placeholder,
    Watcher,
    dtype_named,
    spec_of,
    watching,
)
from lightning_pipeshift.model.recompute import LayerCall, Region
from lightning_pipeshift.model.saved import Observer, SavedTable
from lightning_pipeshift.model.streams import Place, Streams
from lightning_pipeshift.model.timing import Timer
from lightning_pipeshift.model.trace import Trace
from lightning_pipeshift.model.trees import flatten, leaves_of
from lightning_pipeshift.plan.flow import Call, Value


class _Where:
    """Where a pass is. Apart from the pass, as the graph refers to it: it would keep the pass, and
    that keeps the graph.
    """

    layer = ""


class Memory(Protocol):
    """Keeps the budget for what layers save."""

    def before_layer(self, layer: int) -> None:
        """A layer is about to save what it saves."""

    def after_layer(self, layer: int) -> None:
        """A layer has saved what it saves."""


@dataclass
class StagePass(Watcher):
    """Runs the stage's own layers, answers for the earlier ones, and ends the step at the later
    ones.

    Args:
        trace: the flow of this microbatch.
        layers: the stage's own layers.
        is_last: whether this is the virtual machine's last stage, which runs the code after the
            last layer too.
        received: the payload of the boundary in front of ``layers``. It is not held any longer than
            the model holds it: what is saved of it may go elsewhere.
        device: the stage's device.
        streams: the generators to switch.
        key: what the random streams of this microbatch depend on.
        shared: the shared parameters held here.
        recompute: the layers that let go of what they save, and run again before the backward.
        timer: measures the layers, where somebody wants to know.
        table: what the layers have saved.
        memory: keeps the budget for that, where there is one.
        observer: notes what the layers save, where somebody wants to know.
        resident: addresses of what the model has anyway, where what is saved is counted or noted.
        before_layer: called with the number of a layer that is about to run.
        outgoing: what the next stage is to get, out of reach of user code that writes in place.
        edges: where the gradients of that enter this stage's graph; ``None`` where none flows.
        boxes: where the gradients of ``received`` are found after the backward.
        result: what the step has returned, on the last stage.
    """

    trace: Trace
    layers: range
    is_last: bool
    received: dict[Value, Tensor]
    device: torch.device
    streams: Streams
    key: tuple[int | str, ...]
    shared: SharedParameters
    recompute: frozenset[int] = frozenset()
    timer: Timer | None = None
    table: SavedTable = field(default_factory=SavedTable)
    memory: Memory | None = None
    observer: Observer | None = None
    resident: Set[int] = frozenset()
    before_layer: Callable[[int], None] | None = None
    outgoing: dict[Value, Tensor] = field(default_factory=dict)
    edges: dict[Value, Any] = field(default_factory=dict)
    boxes: dict[Value, GradientBox] = field(default_factory=dict)
    result: Any = None

    def __post_init__(self) -> None:
        self._own = self.trace.positions(self.layers)
        self._position = 0
        self._gap = 0
        self._ended = False
        self._trains = torch.is_grad_enabled()
        payload = () if self.is_last else self.trace.payload(self.layers.stop)
        self._wanted = {value for value, _ in payload}
        self._handed_out: dict[Value, Tensor] = {}
        self._checkpointed: dict[Value, Tensor] = {}
        """What the model asks for once more, as it checkpoints by itself what asks for it."""
        self._regions: list[Region] = []
        self._where = _Where()
        self._saves = Gap(self.table, self.observer, self.resident)
        for value, tensor in self.received.items():
            self._receive(value, tensor)
        if not self._runs_user_code:
            self.received.clear()

    def _receive(self, value: Value, tensor: Tensor) -> None:
        handed_out = tensor
        passed_on = value in self._wanted
        if passed_on and self._runs_user_code:
            # What crosses a boundary is the value that left the layer: user code here may write to
            # its own copy.
            handed_out = tensor.clone()
        # Also where no gradient is expected back: if one comes, it is not lost silently.
        if value in self.trace.tracked and torch.is_grad_enabled():
            box = self.boxes[value] = GradientBox(handed_out)
            handed_out = box.open()
        self._handed_out[value] = handed_out
        if passed_on:
            self.outgoing[value], self.edges[value] = tensor, _edge(handed_out)

    @property
    def layer_under_way(self) -> str:
        """The layer that runs, forward or backward, or has run last."""
        return self._where.layer

    @property
    def _runs_user_code(self) -> bool:
        return self.is_last or len(self._own) > 0

    def run(self, step: Callable[[], Any]) -> None:
        """Runs the stage's part of ``step``; a stage without layers only passes its payload on."""
        if not self._runs_user_code:
            return
        try:
            self._enter_gap(0)
            if self.observer is not None:
                self.observer.begin()
            with watching(self), self._hooks():
                self.result = step()
            if not self.is_last:
                raise LayerError(
                    "The step ended before it called the layers of the later stages. Let the step"
                    " call the same layers for every batch."
                )
            self._require_values(self.result, "the step's result")
        except StageDone:
            pass
        finally:
            self._ended = True
            self.shared.restore()
            self._handed_out.clear()
            self.received.clear()
        # Only now is user code done with what the layers were given.
        self._regions = [region for region in self._regions if region.let_go()]

    def _hooks(self) -> AbstractContextManager[Any]:
        return self._saves.watched() if self._trains and self._looks_at_saved else nullcontext()

    @property
    def _looks_at_saved(self) -> bool:
        """Whether somebody keeps or notes what is saved."""
        return self.table.is_kept or self.observer is not None

    def recompute_layers(self) -> None:
        """Makes again what layers let go of, for the backward that comes next: those first that it
        needs first, and as many as there is room for. The others run again when they are needed.
        """
        for region in reversed(self._regions):
            if not self.table.has_room(region.num_bytes):
                break
            region.run_again()
        self._regions.clear()

    def draws(self, draw: Callable[[], object]) -> None:
        if self._gap in self.trace.drawing_gaps:
            draw()

    # --- the gates ---

    def visit(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ended:
            return self._again(gate, args, kwargs)
        calls = self.trace.flow.calls
        if self._position >= len(calls) or calls[self._position].layer != gate.index:
            raise LayerError(
                f"The layer {gate.name!r} is called out of turn: when the step was first followed,"
                " another layer was called here. Let the step call the same layers in the same"
                " order for every batch of a shape."
            )
        position = self._position
        self._position += 1
        if position >= self._own.stop:
            raise StageDone
        if position < self._own.start:
            output = self._skip(position, calls[position])
        else:
            output = self._run(gate, calls[position], args, kwargs)
        self._enter_gap(gate.index + 1)
        return output

    def _enter_gap(self, layer: int) -> None:
        """From here on, user code in front of ``layer`` runs."""
        self._gap = layer
        self.streams.go_to(Place.GAP, layer, self._position, host=self.trace.draws_on_host)
        self.shared.enter(Segment(layer, False))
        calls = self.trace.flow.calls
        if self._position < len(calls):
            self._saves.in_front_of(calls[self._position].layer)
        elif calls:
            self._saves.behind(calls[-1].layer)

    def _skip(self, position: int, call: Call) -> Any:
        template = self.trace.templates[position]
        leaves: list[Any] = []
        for number, spec in enumerate(call.leaves):
            value = Value(call.layer, call.call, number)
            if spec is None:
                leaves.append(template.constants[number])
            elif value in self._handed_out:
                leaves.append(self._handed_out.pop(value))
                received = self.received.pop(value, None)
                if received is not None and self._trains and not self._is_saved_plainly():
                    self._checkpointed[value] = received
            else:
                leaves.append(Placeholder.of(spec, self.device, (value,)))
        return template.rebuild(leaves)

    def _run(self, gate: Gate, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.before_layer is not None:
            self.before_layer(gate.index)
        self.streams.go_to(Place.LAYER, call.layer, call.call, host=self.trace.draws_on_host)
        self.shared.enter(Segment(call.layer, True))
        begin = self.timer.now() if self.timer is not None else None
        self._where.layer = gate.name
        output = self._call(gate, call, args, kwargs)
        leaves, rebuild = flatten(output)
        if self.memory is not None:
            self._note_backward(gate.name, leaves)
        if self.timer is not None:
            self.timer.add("forward", gate.index, begin, self.timer.now())
            self.timer.watch_backward(gate.index, leaves)
        for leaf in leaves:
            if isinstance(leaf, Placeholder):
                raise LayerError(
                    f"The layer {gate.name!r} was given a value that another stage holds"
                    f" ({leaf!r}): when the step was first followed it did not need it. Let the"
                    " step pass the same values on for every batch."
                )
        # At its last layer a stage has nothing left to do; a region that checkpoints has to be left
        # in good order.
        ends = not self.is_last and self._position == self._own.stop
        ends = ends and self._saves.is_undisturbed()
        for number, leaf in enumerate(leaves):
            value = Value(call.layer, call.call, number)
            if value in self._wanted:
                self._check(gate, call, number, leaf)
                data = leaf.detach()
                self.outgoing[value] = data if ends else data.clone()
                self.edges[value] = _edge(leaf)
        if ends:
            raise StageDone
        return rebuild(leaves)

    def _note_backward(self, name: str, leaves: Sequence[Any]) -> None:
        """Lets a backward that reaches the layer say so."""

        where = self._where

        def enter(_: Any) -> None:
            where.layer = name

        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(enter)

    def _call(self, gate: Gate, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A model that checkpoints by itself has its own way with what is saved.
        if self._is_saved_plainly():
            if self.memory is not None:
                self.memory.before_layer(gate.index)
            output = self._under_hooks(gate, call, args, kwargs)
            if self.memory is not None:
                self.memory.after_layer(gate.index)
            return output
        return gate.original(*args, **kwargs)

    def _under_hooks(
        self, gate: Gate, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        table, observer = self.table, self.observer
        if gate.index in self.recompute:
            draw = partial(self._draw_as, call)
            region = Region(gate, args, kwargs, draw, table, observer)
            output = region.run()
            # What is known of earlier microbatches: user code leaves the inputs alone.
            if self.memory is not None and gate.keeps_inputs:
                region.let_go()
            self._regions.append(region)
            return output
        if self._looks_at_saved:
            return LayerCall(gate, args, kwargs, table, observer).run()
        return gate.original(*args, **kwargs)

    def _is_saved_plainly(self) -> bool:
        """Whether autograd saves what the backward needs, as it is."""
        return torch.is_grad_enabled() and self._saves.is_undisturbed()

    def _draw_as(self, call: Call) -> None:
        self.streams.begin(*self.key)
        self.streams.go_to(Place.LAYER, call.layer, call.call)

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
        # Of the strides nothing is asked: kernels choose their order, and on its way a value takes
        # that of the record.
        raise LayerError(
            f"The layer {gate.name!r} returned {found}, but {expected} was worked out for this"
            " batch. The shape of what a layer returns may depend on the shapes of its inputs only."
        )

    def _again(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer runs again in the backward (activation checkpointing in the user's model), with
        the same numbers.
        """
        calls = self.trace.flow.calls
        positions = [place for place, call in enumerate(calls) if call.layer == gate.index]
        if len(positions) != 1:
            raise LayerError(
                f"The layer {gate.name!r} is called several times in a pass and checkpointed by the"
                " model. Checkpoint inside the layer instead."
            )
        (position,) = positions
        if position not in self._own:
            # The graph of a recomputation is thrown away; only its values count.
            for value, tensor in self._checkpointed.items():
                if value.layer == gate.index:
                    again = tensor.detach()
                    tracked = value in self.trace.tracked
                    self._handed_out[value] = GradientBox(again).open() if tracked else again
            return self._skip(position, calls[position])
        self._draw_as(calls[position])
        return gate.original(*args, **kwargs)

    @staticmethod
    def _require_values(tree: Any, what: str) -> None:
        for leaf in leaves_of(tree):
            if isinstance(leaf, Placeholder):
                raise LayerError(
                    f"{what} depends on a value that another stage holds ({leaf!r}): when the step"
                    " was first followed it did not. Let the step compute the same things for"
                    " every batch."
                )


def _edge(tensor: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None
