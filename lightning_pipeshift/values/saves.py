"""Where the tensors are that autograd saves for the backward of a microbatch, on one stage.

Layers and the code between them save tensors for the backward. They may be moved to other memory
meanwhile, or dropped, if the layer runs again. What code between layers saves counts for the layer
that has run last on its stage, as code *behind* it; or for the next one, as code in *front* of it,
if none has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.model.measuring.code_bytes import CodeBytes
from lightning_pipeshift.model.parameters.gradients import call_before_backward
from lightning_pipeshift.model.saved.between_layers import BetweenLayers
from lightning_pipeshift.model.saved.hooks import are_alone
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.recompute import LayerCall, RecomputedRegion
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.model.tensors.trees import address_of, leaves_of, tensors_here
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore


class Where:
    """Notes which layer runs, or has run last, forward or backward. The graph refers to it, so it
    holds no tensors.
    """

    def __init__(self) -> None:
        self.layer_under_way = ""

    def leave(self, name: str, results: Iterable[Any]) -> None:
        """Notes when a backward reaches the results of a layer."""

        def enter() -> None:
            self.layer_under_way = name

        call_before_backward(results, enter)


@dataclass(eq=False)
class Saves:
    """What autograd saves of one microbatch's step on one stage.

    Args:
        gates: those of the layers, by their numbers.
        recompute: the layers that drop what they have saved, and run again before their backward,
            with the numbers of the tensors that they do not drop.
        device: of the stage.
        where: notes which layer runs.
        first: the first layer of this stage.
    """

    gates: Sequence[NamedLayer]
    recompute: Mapping[int, Set[int]]
    device: torch.device
    where: Where
    first: int = 0

    def __post_init__(self) -> None:
        self._table = SavedTable()
        self._store: ActivationStore | None = None
        self._observer: Observer | None = None
        self._regions: list[RecomputedRegion] = []
        self._between: BetweenLayers | None = None
        self._code: CodeBytes | None = None
        self._received: set[int] = set()

    def look(
        self,
        table: SavedTable,
        store: ActivationStore | None,
        observer: Observer | None,
        resident: Set[int],
    ) -> None:
        """Looks at each tensor from now on.

        Args:
            table: the microbatch's saved tensors.
            store: decides where they are, if there is a budget.
            observer: records them, if that is wanted.
            resident: addresses of the model's own tensors.
        """
        self._table, self._store, self._observer = table, store, observer
        self._between = BetweenLayers(table, observer, resident, self.first)
        if observer is not None:
            observer.begin()
            self._received.update(resident)
            self._code = CodeBytes(self.device, observer, table, self._received)
            self._code.begin(self.first)

    def layer(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a layer.

        Args:
            number: its number.
            forward: runs it.
            args: its arguments.
            kwargs: likewise.
        """
        gate = self.gates[number]
        self.where.layer_under_way = gate.name
        if self._code is not None:
            self._code.end(tensors_here((args, kwargs)))

        # A model with hooks of its own handles saved tensors itself.
        if torch.is_grad_enabled() and are_alone():
            output = self._saved(gate, forward, args, kwargs)
        else:
            output = forward(*args, **kwargs)
        results = leaves_of(output)
        if self._store is not None:
            self.where.leave(gate.name, results)
        if self._between is not None:
            self._between.behind(number)
        if self._code is not None:
            self._code.results(results)
            self._code.begin(number)
        return output

    def _saved(self, gate: NamedLayer, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call: LayerCall | None = None
        region: RecomputedRegion | None = None
        if self._store is not None:
            self._store.before_layer(gate.index)
        table, observer = self._table, self._observer
        if gate.index in self.recompute:
            held = self.recompute[gate.index]
            call = region = RecomputedRegion(gate, run, table, observer, held)
        elif self._between is not None:
            call = LayerCall(gate, run, table, observer)
        output = run(*args, **kwargs) if call is None else call.run(args, kwargs)
        if region is not None:
            # Known from earlier microbatches: user code does not modify the inputs.
            if gate.keeps_inputs:
                region.let_go()
            self._regions.append(region)
        if self._store is not None:
            self._store.after_layer(gate.index)
        return output

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs an operation between layers."""
        if self._between is None or not torch.is_grad_enabled() or not are_alone():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            stack.enter_context(self._between.watched())
            if self._code is not None:
                stack.enter_context(self._code)
            return function(*args, **kwargs)

    def received(self, tensor: Tensor) -> None:
        """Called with a value of another stage: memory for messages is counted by itself."""
        if self._code is not None:
            self._received.add(address_of(tensor))

    def end_forward(self, ends: Iterable[Any]) -> None:
        """Called behind the step: user code does not use the layers' arguments any more.

        Args:
            ends: of the stage's graph.
        """
        if self._code is not None:
            self._code.end(ends)
            self._code = None
        self._regions = [region for region in self._regions if region.let_go()]

    @property
    def may_recompute(self) -> bool:
        """Whether layers may run again before the backward begins."""
        return bool(self._regions)

    def run_again(self) -> None:
        """Runs layers again for the coming backward, in the order in which it needs them, and as
        many as there is room for. The others run when the backward comes to them.
        """
        for region in reversed(self._regions):
            if self._store is not None and not self._store.has_room(region.needed_bytes):
                break
            region.run_again()
        self._regions.clear()

    def end_backward(self) -> None:
        """Called when the backward has ended, or none comes."""
        self._regions.clear()
        if self._observer is not None:
            self._observer.end()
