"""One microbatch's step on one rank: where each operation runs, and what is sent for it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_pipeshift.compat.torch_private import (
    transform_runs,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.measuring.finite import finite_check
from lightning_pipeshift.model.measuring.timing import Timer
from lightning_pipeshift.model.random.random_streams import stream_seed
from lightning_pipeshift.model.tensors.trees import map_leaves
from lightning_pipeshift.values.arguments import Arguments, copied_call, given
from lightning_pipeshift.values.backward import run_backward
from lightning_pipeshift.values.calls import Call, Calls, described, modes_of
from lightning_pipeshift.values.contract import Contract
from lightning_pipeshift.values.functions import DRAW_BY_VALUES, READS
from lightning_pipeshift.values.layer_calls import call_layer
from lightning_pipeshift.values.special import SPECIAL
from lightning_pipeshift.values.value import (
    PLACED,
    StepParameter,
    Value,
    name_of,
    user_line,
)

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core
# Functions whose results' shapes depend on floats.
_SHAPED_BY_FLOATS = frozenset({functional.interpolate})


@cache
def _seed_of(name: str) -> int:
    return zlib.crc32(name.encode()) << 31


class Microbatch(Calls):
    """The step of one microbatch on this rank. Every rank runs the same one.

    Args:
        core: what all microbatches share.
        run_number: of the run of a schedule; the same on all ranks.
        step: the number of the step, for the random streams.
        turn: the microbatch's number in the run.
    """

    def __init__(self, core: Core, run_number: int, step: int, turn: int) -> None:
        super().__init__(core, run_number, turn)
        self._seed = stream_seed("calls", core.seed, step, turn)
        # By the function's name: on the only stage, what a step has kept are plain tensors in the
        # next one, and functions of them do not count. Others draw the same numbers all the same.
        self._num_calls: dict[str, int] = {}
        self.is_in_backward = False
        self.has_later_backward = False
        """Whether the schedule runs the backward, some time after the step."""
        self.gradients: dict[Tensor, Tensor | None] | None = None
        """Those of all parameters, as values; ``None`` if they may have changed since they were
        asked for. What changes them by other means than operations has to set it to ``None``."""
        self.sets_gradients = False
        """Whether user code has replaced a gradient."""
        self.recomputes = False
        """Whether layers are run again by the backward, in place of what they would keep."""
        self.timer: Timer | None = None
        """Times the layers that this stage runs, if that is wanted."""
        self.finite = finite_check(turn, core.step_number, core.stage)
        """With torch's anomaly mode: looks for values that are no numbers."""

    def release(self) -> None:
        """Lets go of all tensors."""
        super().release()
        self.gradients = None

    # --- operations between layers ---

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch, one of whose arguments is a value or a parameter."""
        special = SPECIAL.get(function)
        if special is not None:
            return special(self, *args, **kwargs)
        if function in READS:
            if self.core.calls is not None:
                self.core.calls.read(self, name_of(function))
            return self._read_by(function, args, kwargs)
        return self.operate(function, args, kwargs)

    def operate(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stage: int | None = None,
    ) -> Any:
        """Runs a function at one stage.

        Args:
            function: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            stage: the stage; by default that of the values it uses, or the last of several.
        """
        core = self.core
        arguments = Arguments(given(args, kwargs), described, function in _SHAPED_BY_FLOATS)
        self.place_parameters(arguments.tensors)
        modes = modes_of(core)
        key = function, modes, arguments.key
        known = core.known.contracts.get(key)
        if known is None:
            contract = core.finder.find(function, args, kwargs)
            known = core.known.keep(key, contract, name_of(function), modes)
        contract, label, digest = known
        self.note_call(label, digest, arguments)
        draws = contract is not None and contract.draws
        # Between two steps, what user code draws is the next of the generators' own numbers.
        stream = None if draws and self.is_outside else self.next_stream(label)
        if stage is None:
            stage = self._stage_of(contract, arguments)
        if stage is None:
            return self._everywhere(function, args, kwargs)

        def run(_: Any, run_args: Any, run_kwargs: Any) -> Any:
            core.operation = label
            try:
                if self.saves is not None:
                    return self.saves.operation(function, run_args, run_kwargs)
                return function(*run_args, **run_kwargs)
            finally:
                core.operation = None

        call = Call(run, args, kwargs, arguments, contract, stage, label, stream)
        if stream is not None or label not in DRAW_BY_VALUES:
            return self.call(call)
        generators = core.generators
        before = [generator.get_state() for generator in generators]
        result = self.call(call)
        after = [generator.get_state() for generator in generators]
        # What a message says of the program has to be the same on all stages.
        _set_states(generators, before)
        _set_states(generators, self.tell(after, stage, label))
        return result

    def read_number(self, value: Tensor) -> Any:
        """See :class:`Program`."""
        return self._read_by(Tensor.item, (value,), {})

    def read_whole(self, value: Tensor) -> Tensor:
        """See :class:`Program`."""
        return self._read_here(value, "pickle", self.core.device)

    def next_stream(self, name: str) -> tuple[int, int]:
        """The random stream of the next call of a name: see :class:`Call`."""
        number = self._num_calls[name] = self._num_calls.get(name, 0) + 1
        return self._seed ^ _seed_of(name), number

    def plain(self, tree: Any) -> Any:
        """A structure with the tensors of this stage in the place of values."""
        return map_leaves(lambda x: x.account.tensor if isinstance(x, Value) else x, tree)

    def place_parameters(self, placed: Sequence[Tensor]) -> None:
        """Places parameters outside of layers where an operation uses them first.

        Args:
            placed: the tensors of the operation.
        """
        parameters = [x for x in placed if type(x) is StepParameter]
        if parameters:
            owners = [x.account.owner for x in placed if isinstance(x, Value)]
            self.core.place_parameters(parameters, owners)

    def _stage_of(self, contract: Contract | None, arguments: Arguments) -> int | None:
        """Where an operation runs; ``None`` for everywhere: it uses only shapes."""
        tensors = arguments.tensors
        for at in () if contract is None else contract.places:
            if type(tensors[at]) in PLACED:
                return self.account_of(tensors[at]).owner
        used = range(len(tensors)) if contract is None else contract.used
        placed = [tensors[at] for at in used if type(tensors[at]) in PLACED]
        return max([self.account_of(x).owner for x in placed], default=None)

    def _everywhere(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that uses only the shapes of values, on every stage."""
        with without_torch_function_of_subclasses():
            args, kwargs = copied_call(args, kwargs, self.without_values, {})
            return function(*args, **kwargs)

    # --- layers ---

    def layer(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer."""
        if transform_runs():
            raise LayerError(
                f"The layer `{self.core.names[number]}` is called ({user_line()}) inside of a"
                " function of `torch.func` (`vmap`, `grad`, `jacrev`), which does not see the"
                " layers of other stages. Put that call into a module of its own, which is a layer"
                " then."
            )
        if self.is_alone:
            self.core.called.setdefault(self.turn, []).append(number)
        self.enters_layer(number)
        hooks = self.core.backward_hooks.pop(number, None)
        return call_layer(self, self.core.placed_layers[number], args, kwargs, hooks)

    def enters_layer(self, number: int) -> None:
        """Called before a layer."""

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context of layers that the backward runs again, in place of what they would keep."""
        before, self.recomputes = self.recomputes, True
        try:
            yield
        finally:
            self.recomputes = before

    # --- the backward ---

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """See :func:`run_backward`."""
        run_backward(self, *args, **kwargs)

    def begins_backward(self) -> None:
        """Called before a backward over several stages."""

    def finish_gradients(self) -> None:
        """Called before a backward: what earlier ones have left for later is added first."""

    def owned(self, tensor: Tensor) -> Tensor | None:
        """The tensor of a value or a parameter, at its owner."""
        account = self.account_of(tensor)
        account.refresh()
        return account.tensor if account.owner == self.stage else None


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
