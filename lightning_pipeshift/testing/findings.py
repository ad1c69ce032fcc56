"""The findings of PipeShift about a model: its layers, the payloads of the boundaries between them,
and the code between them.

All numbers are those of the first microbatch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.arguments import Arguments
from lightning_pipeshift.values.calls import Call, Calls
from lightning_pipeshift.values.program import OUTSIDE
from lightning_pipeshift.values.value import PLACED, Value

END_OF_STEP = "the end of the step"
"""The code that computes the loss, the logged values and the step's result."""


@dataclass(frozen=True)
class FoundLayer:
    """A layer.

    Args:
        name: in the LightningModule.
        kind: the name of its class.
        num_parameters: how many numbers its parameters hold.
        parameter_bytes: their bytes.
        forward_seconds: the time of its forward; ``None`` if no run has measured it.
        is_called: whether the step calls it.
    """

    name: str
    kind: str
    num_parameters: int
    parameter_bytes: int
    forward_seconds: float | None = None
    is_called: bool = True


@dataclass(frozen=True)
class FoundTensor:
    """A tensor that crosses a boundary.

    Args:
        layer: the layer that returned it, or after which it was computed; for a parameter, the
            layer that has it, or after which the step uses it first.
        function: the function that computed it, in the code after that layer, or the name of the
            parameter that it is; ``None`` for an output of the layer itself.
        needed_by: the later layers that take it; ``"code behind NAME"`` for code between layers
            that computes with it; and :data:`END_OF_STEP`.
        shape: its shape.
        dtype: its type.
        num_bytes: its bytes.
        has_gradient: whether its gradient is sent back.
    """

    layer: str
    function: str | None
    needed_by: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    has_gradient: bool


@dataclass(frozen=True)
class FoundBoundary:
    """The point between two neighbouring layers, and the payload that crosses it.

    Args:
        before: the layer before it.
        after: the layer after it.
        payload: the tensors that cross it, if the model is cut here.
    """

    before: str
    after: str
    payload: tuple[FoundTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that cross it in a forward."""
        return sum(tensor.num_bytes for tensor in self.payload)


@dataclass(frozen=True)
class FoundCode:
    """Code between two layers that computes with the outputs of layers.

    Args:
        after: the layer before it; ``None`` for code before all layers.
        before: the layer after it; ``None`` for the end of the step.
        functions: how often it calls each function of torch on values that one stage has; at the
            end of the step, with the division of its loss by the number of microbatches.
        reads: how often it reads such values into Python (``if x.mean() > 0``, ``x.item()``), by
            the function that does: each stage waits for them there.
    """

    after: str | None
    before: str | None
    functions: Mapping[str, int]
    reads: Mapping[str, int]


@dataclass(frozen=True)
class Findings:
    """The findings about a model.

    Args:
        layers: in call order; those that the step does not call are last.
        boundaries: between neighbouring layers that the step calls, in the same order.
        code: between layers, in order; without entries for intervals that have no code.
        shared: parameters of several layers: several stages may hold them.
        flows_back: pairs of layers: what the first one returned, or what was computed from it, goes
            to the second one, which comes earlier in the order. With a cut between them it travels
            back.
    """

    layers: tuple[FoundLayer, ...]
    boundaries: tuple[FoundBoundary, ...] = ()
    code: tuple[FoundCode, ...] = ()
    shared: tuple[str, ...] = ()
    flows_back: tuple[tuple[str, str], ...] = ()


def layers_of(
    modules: Mapping[str, nn.Module], seconds: Mapping[str, float] | None = None
) -> tuple[FoundLayer, ...]:
    """The findings on layers before any step has called them.

    Args:
        modules: the layers by name.
        seconds: the measured times of their forwards, by name; 0 for those that were not measured.
    """
    seconds = seconds or {}
    return tuple(
        FoundLayer(
            name,
            type(module).__name__,
            sum(p.numel() for p in module.parameters()),
            sum(p.numel() * p.element_size() for p in module.parameters()),
            seconds.get(name) or None,
        )
        for name, module in modules.items()
    )


class _Tensor(NamedTuple):
    """A value or a parameter that a step uses between its layers, or as an argument of one.

    Args:
        layer: the number of the layer after which it is there.
        found: what is said of it, as far as it is known.
        uses: the calls that use it: the number of the layer at whose stage each of them runs, and
            for an operation how many layers were called before; ``None`` for a layer.
    """

    layer: int
    found: FoundTensor
    uses: list[tuple[int, int | None]]


class StepRecord:
    """The calls of the first microbatch's step: see
    :class:`~lightning_pipeshift.values.calls.CallWatch`.
    """

    def __init__(self) -> None:
        self._program: weakref.ref[Calls] | None = None
        self._names: list[str] = []
        self._shared: tuple[str, ...] = ()
        self._parameters: dict[Tensor, str] = {}
        self._homes: dict[Tensor, int] = {}
        self._called: list[int] = []
        self._functions: dict[int, Counter[str]] = {}
        self._reads: dict[int, Counter[str]] = {}
        self._tensors: list[_Tensor] = []
        self._by_account: weakref.WeakKeyDictionary[Account, _Tensor] = weakref.WeakKeyDictionary()

    def called(self, program: Calls, call: Call, result: Any) -> None:
        """Notes a call."""
        if not self._is_of(program):
            return
        contract = call.contract
        used = {
            at: program.account_of(x)
            for at, x in enumerate(call.arguments.tensors)
            if type(x) in PLACED and (contract is None or at in contract.used)
        }
        place, function, layer = None, None, call.layer
        if layer is None:
            place, function = len(self._called), call.label
            self._functions.setdefault(place, Counter())[function] += 1
            # As the core chooses the stage of an operation.
            found = {
                at: self._layer_of(call.arguments.tensors[at], one) for at, one in used.items()
            }
            places = [found[at] for at in (contract.places if contract else ()) if at in found]
            known = [x for x in places[:1] or found.values() if x is not None]
            layer = max(known, default=0)
        else:
            self._called.append(layer)
        for at, account in used.items():
            tensor = call.arguments.tensors[at]
            home = self._layer_of(tensor, account)
            name = None if type(tensor) is Value else self._parameters.get(tensor)
            self._note(tensor, account, layer if home is None else home, name)
            self._by_account[account].uses.append((layer, place))
        for tensor in Arguments((result,), id).tensors:
            if type(tensor) is Value:
                self._note(tensor, tensor.account, layer, function)

    def read(self, program: Calls, label: str) -> None:
        """Notes a read."""
        if self._is_of(program):
            self._reads.setdefault(len(self._called), Counter())[label] += 1

    def findings(self, layers: tuple[FoundLayer, ...]) -> Findings:
        """What the record says of a model.

        Args:
            layers: its layers.
        """
        if self._program is None:
            return Findings(layers)
        names, called = self._names, set(self._called)
        in_order = sorted(called)
        back = {
            (names[tensor.layer], names[layer]): None
            for tensor in self._tensors
            for layer, place in tensor.uses
            if place is None and layer < tensor.layer
        }
        return Findings(
            tuple(replace(each, is_called=names.index(each.name) in called) for each in layers),
            tuple(
                FoundBoundary(names[before], names[after], self._payload(after))
                for before, after in pairwise(in_order)
            ),
            tuple(
                FoundCode(
                    names[self._called[place - 1]] if place else None,
                    names[self._called[place]] if place < len(self._called) else None,
                    dict(self._functions.get(place, {})),
                    dict(self._reads.get(place, {})),
                )
                for place in sorted(self._functions.keys() | self._reads)
            ),
            self._shared,
            tuple(back),
        )

    def _is_of(self, program: Calls) -> bool:
        if program.turn == OUTSIDE:
            return False
        if self._program is None:
            core = program.core
            self._program, self._names = weakref.ref(program), core.names
            self._parameters = {x: name for name, x in core.module.named_parameters()}
            for number in reversed(range(len(core.layers))):
                self._homes.update((x, number) for _, x in core.parameters[number])
            uses = Counter[Tensor](x for own in core.parameters for _, x in own)
            self._shared = tuple(name for x, name in self._parameters.items() if uses[x] > 1)
        return self._program() is program

    def _layer_of(self, tensor: Tensor, account: Account) -> int | None:
        """The layer at whose stage a tensor is; ``None`` for one that is used for the first time,
        which will be where it is used.
        """
        known = self._by_account.get(account)
        return self._homes.get(tensor) if known is None else known.layer

    def _note(self, tensor: Tensor, account: Account, layer: int, function: str | None) -> None:
        if account not in self._by_account:
            with without_torch_function_of_subclasses():
                shape, dtype, num_bytes = tuple(tensor.shape), str(tensor.dtype), tensor.nbytes
            is_needed_back, name = account.requires_grad, self._names[layer]
            found = FoundTensor(name, function, (), shape, dtype, num_bytes, is_needed_back)
            self._by_account[account] = _Tensor(layer, found, [])
            self._tensors.append(self._by_account[account])

    def _payload(self, boundary: int) -> tuple[FoundTensor, ...]:
        """What crosses a boundary.

        Args:
            boundary: the number of the layer behind it.
        """
        found = []
        for tensor in self._tensors:
            uses = [self._user(*use) for use in tensor.uses if use[0] >= boundary]
            if tensor.layer < boundary and uses:
                found.append(replace(tensor.found, needed_by=tuple(dict.fromkeys(uses))))
        return tuple(found)

    def _user(self, layer: int, place: int | None) -> str:
        """Who uses a tensor: see :attr:`_Tensor.uses`."""
        if place is None:
            return self._names[layer]
        if place == len(self._called):
            return END_OF_STEP
        if not place:
            return "code in front of all layers"
        return f"code behind {self._names[self._called[place - 1]]}"
