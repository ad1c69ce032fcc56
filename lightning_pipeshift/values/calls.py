"""Calls of layers and operations: each runs at one stage, and all know what it gave and did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.random.random_streams import drawing_from, numbered_seed
from lightning_pipeshift.values.account import SEVERAL
from lightning_pipeshift.values.arguments import Arguments, Outcome, State, applied, copied_call
from lightning_pipeshift.values.common_tensors import CommonTensors
from lightning_pipeshift.values.contract import (
    Contract,
    kept_simply,
    require_kept,
    specs_of,
)
from lightning_pipeshift.values.functions import DRAW_BY_VALUES
from lightning_pipeshift.values.graphs import Graph
from lightning_pipeshift.values.reads import copy_offers, offer
from lightning_pipeshift.values.value import (
    PLACED,
    Spec,
    StepBuffer,
    Value,
    run_by,
    user_line,
    versions_in,
)
from lightning_pipeshift.values.writes import (
    require_own,
    require_writable,
)

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core

_NOTHING = Outcome((), ())


class Call(NamedTuple):
    """A call of a layer or an operation.

    Args:
        function: runs it at its stage, on plain tensors: ``(parameters of other stages by name,
            args, kwargs)``.
        args: its arguments, as the user gave them.
        kwargs: its keyword arguments.
        arguments: what is in them.
        contract: ``None`` if what it gives depends on values.
        stage: where it runs.
        label: names it in messages.
        stream: of its random numbers: a seed, and its number among those with this seed; ``None``:
            every stage's generators go on.
        parameters: the layer's, by name.
        layer: its number; ``None`` for an operation.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: Arguments
    contract: Contract | None
    stage: int
    label: str
    stream: tuple[int, int] | None
    parameters: Sequence[tuple[str, Tensor]] = ()
    layer: int | None = None


class CallWatch(Protocol):
    """Is told of what steps run."""

    def called(self, program: Calls, call: Call, result: Any) -> None:
        """A layer or an operation has been called.

        Args:
            program: which called it.
            call: the call.
            result: with values.
        """

    def read(self, program: Calls, label: str) -> None:
        """Values are read into Python.

        Args:
            program: which reads them.
            label: the name of the function that does.
        """


def described(tensor: Tensor) -> Any:
    """The properties of a tensor that the shapes of a call's results may depend on."""
    if type(tensor) is Value:
        return tensor.geometry, tensor.account.requires_grad
    with without_torch_function_of_subclasses():
        return (tensor.shape, tensor.stride(), tensor.dtype), tensor.requires_grad


def modes_of(core: Core) -> tuple[bool, torch.dtype | None]:
    """The modes of torch that a call's result may depend on: whether gradients are computed, and
    the type that autocast computes in.
    """
    kind, is_cast = core.device_kind, torch.is_autocast_enabled(core.device_kind)
    return torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if is_cast else None


class Calls(CommonTensors):
    """A program whose calls run at one stage each."""

    def call(self, call: Call) -> Any:
        """Runs a call at its stage; returns its result, with values. Every stage calls this."""
        result = self._called_at_stage(call)
        if self.core.calls is not None:
            self.core.calls.called(self, call, result)
        return result

    def _called_at_stage(self, call: Call) -> Any:
        contract, arguments, stage = call.contract, call.arguments, call.stage
        with_gradient = torch.is_grad_enabled() and (contract is None or contract.needs_gradient)
        for at, needs in contract.written.items() if contract is not None else ():
            target = arguments.tensors[at]
            if type(target) not in PLACED:
                require_own(self.core, target, call.label, needs and torch.is_grad_enabled())
                self._adopt(target, stage)
        self.graphs.entered = None
        here: dict[int, Tensor] = {}
        for at, tensor in enumerate(arguments.tensors):
            if contract is not None and at not in contract.used:
                continue
            if type(tensor) not in PLACED:
                if with_gradient and tensor.requires_grad:
                    entered = self._with_gradient(tensor, call)
                    if entered is not None:
                        here[at] = entered
                elif contract is not None:
                    # Without a contract, a call may be one that fills uninitialised memory.
                    self._note_common(tensor)
            if type(tensor) in PLACED:
                if contract is not None and at in contract.written:
                    require_writable(self, call, at, with_gradient)
                plain = self.bring(tensor, stage, with_gradient, call.label)
                if plain is not None:
                    here[at] = plain
        others: dict[str, Tensor] = {}
        for name, parameter in call.parameters:
            account = self.accounts.get(parameter)
            if account is not None:
                account.refresh()
            has_left = account is not None and account.has_left
            if has_left or self.core.parameter_owners[parameter] != stage:
                plain = self.bring(parameter, stage, with_gradient, call.label)
                if plain is not None:
                    others[name] = plain
        if self.stage != stage:
            if contract is None:
                return self._told(call, here, None)
            if call.stream is None and call.label not in DRAW_BY_VALUES:
                self._draw_likewise(call)
            return self._given(call, here, [None] * len(contract.specs))
        self.core.computes = True
        if contract is None or contract.written:
            # What is on its way must not change.
            self.mailbox.flush()
            for at in range(len(arguments.tensors)) if contract is None else contract.written:
                if type(arguments.tensors[at]) in PLACED:
                    copy_offers(self.mailbox, self.account_of(arguments.tensors[at]).memory)
        tensors = [here.get(at, x) for at, x in enumerate(arguments.tensors)]
        with without_torch_function_of_subclasses():
            with run_by(None):
                result, nodes, before, written = self._run(call, tensors, others)
                is_unchanged = not nodes and not written
                if contract is not None and is_unchanged and kept_simply(contract, result, tensors):
                    return self._made(call, contract.specs[0], result, ())
                after = Outcome(nodes, tensors, result)
            if contract is not None:
                require_kept(contract, call.label, tensors, before, after, written)
                return self._given(call, here, after.new)
            specs = specs_of(after.new, tensors)
            needs_gradient = {at: tensors[at].requires_grad for at in written}
            for at in written:
                if at not in here:
                    require_own(self.core, tensors[at], call.label, needs_gradient[at])
            told = after.result, after.changes_from(before), specs, needs_gradient
            return self._told(call, here, (told, after.new))

    def _run(
        self, call: Call, tensors: list[Tensor], others: dict[str, Tensor]
    ) -> tuple[Any, list[Any], Outcome, list[int]]:
        """Runs a call at its stage; returns its result, the containers and objects that it got,
        what these held before, and the numbers of the tensors that it has written to.

        Args:
            call: the call.
            tensors: those in its arguments, plain.
            others: the parameters of other stages, by name.
        """
        arguments, contract, nodes = call.arguments, call.contract, []
        number_of = arguments.number_of
        if arguments.is_flat:
            args = tuple([tensors[number_of(x)] if isinstance(x, Tensor) else x for x in call.args])
            kwargs = call.kwargs and {
                name: tensors[number_of(x)] if isinstance(x, Tensor) else x
                for name, x in call.kwargs.items()
            }
        else:
            memo: dict[int, Any] = {}
            args, kwargs = copied_call(
                call.args, call.kwargs, lambda x: tensors[number_of(x)], memo
            )
            nodes = [memo[id(node)] for node in arguments.nodes]
        before = Outcome(nodes, tensors) if nodes else _NOTHING
        versions = versions_in(tensors)
        if call.stream is None or (contract is not None and not contract.draws):
            result = call.function(others, args, kwargs)
        else:
            draws_on_host = contract is None or contract.draws_on_host
            with drawing_from(self.core.generators, draws_on_host, numbered_seed(*call.stream)):
                result = call.function(others, args, kwargs)
        now, written = versions_in(tensors), []
        if now != versions:
            written = [at for at, version in enumerate(now) if version != versions[at]]
        return result, nodes, before, written

    def _draw_likewise(self, call: Call) -> None:
        """Draws as many random numbers as the call's stage does."""
        with run_by(None), without_torch_function_of_subclasses(), torch.no_grad():
            args, kwargs = copied_call(call.args, call.kwargs, self._any_values, {})
            call.function({}, args, kwargs)

    def _any_values(self, tensor: Tensor) -> Tensor:
        found = self.without_values(tensor)
        # Probabilities, and weights.
        return found if found is tensor else found.fill_(0.5 if found.is_floating_point() else 1)

    def without_values(self, tensor: Tensor) -> Tensor:
        """A tensor of this stage with the shape and the type of a value or a parameter."""
        if type(tensor) not in PLACED:
            return tensor
        shape, device = tuple(tensor.shape), self.core.device
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def _given(self, call: Call, here: dict[int, Tensor], new: Sequence[Tensor | None]) -> Any:
        """The result of a call with a contract: see :meth:`_values`."""
        contract = call.contract
        assert contract is not None
        if contract.gives_one:
            return self._made(call, contract.specs[0], new[0], ())
        written = {at: needs and torch.is_grad_enabled() for at, needs in contract.written.items()}
        return self._values(
            call, here, new, contract.result, contract.changes, contract.specs, written
        )

    def _made(
        self,
        call: Call,
        spec: Spec,
        tensor: Tensor | None,
        before: Sequence[Value],
        graph: Graph | None = None,
    ) -> Value:
        """The value of a tensor that a call has made.

        Args:
            call: the call.
            spec: of the tensor.
            tensor: at the call's stage.
            before: the values of the call's tensors before this one.
            graph: of what needs a gradient; ``None``: that of the arguments.
        """
        memory = None
        if spec.shares is not None:
            is_new, at = spec.shares < 0, spec.shares
            shared = before[-1 - at] if is_new else call.arguments.tensors[at]
            memory = self.account_of(shared).memory if type(shared) in PLACED else None
        account = self.new_account(call.stage, spec.requires_grad, tensor, memory)
        if account.memory.of is not None:
            self.core.views.add(account)
        if self.is_outside:
            account.layer = self._layer_of(call)
        if spec.requires_grad:
            if graph is None and not self.is_alone:
                graph = self._graph_of(call)
            account.graph, account.segment = graph, self.graphs.segment
        if tensor is not None:
            # A layer may return a buffer, and write to it later.
            is_buffer = call.layer is not None and bool(self.core.buffers[call.layer])
            offer(self.mailbox, account, is_buffer)
        return self.new_value(spec, account)

    def _graph_of(self, call: Call) -> Graph:
        """The graph of what a call returns that needs a gradient."""
        keys: set[int] | None = None
        if self.graphs.is_divided and self.stage == call.stage:
            core = self.core
            keys = set() if call.layer is None else {core.groups[call.layer]}
            used = (*call.arguments.tensors, *(x for _, x in call.parameters))
            keys.update(self.group_of(x) for x in used if x in core.parameter_numbers)
        return self.graphs.joined(call, self.accounts, keys)

    def _values(
        self,
        call: Call,
        here: dict[int, Tensor],
        new: Sequence[Tensor | None],
        result: Any,
        changes: dict[int, State],
        specs: Sequence[Spec],
        written: dict[int, bool],
    ) -> Any:
        """Makes the values of a call's results, notes its writes, and applies its changes.

        Args:
            call: the call.
            here: at its stage, the plain tensors of the values among its arguments.
            new: at its stage, the tensors that it has made.
            result: what it has returned, encoded.
            changes: in the containers and objects among its arguments.
            specs: of the tensors that it has made.
            written: the numbers of those that it has written to, and whether each needs a gradient.
        """
        values: list[Value] = []
        has_gradient = any(spec.requires_grad for spec in specs) or any(written.values())
        is_joined = has_gradient and not self.is_alone
        graph = self._graph_of(call) if is_joined else None
        for spec, tensor in zip(specs, new, strict=True):
            values.append(self._made(call, spec, tensor, values, graph))
        for at, needs_gradient in written.items():
            self._note_write(call, at, needs_gradient, here, graph)
        return applied(result, changes, call.arguments, values)

    def _note_write(
        self,
        call: Call,
        at: int,
        needs_gradient: bool,
        here: dict[int, Tensor],
        graph: Graph | None,
    ) -> None:
        """Notes that a call has written to a tensor.

        Args:
            call: the call.
            at: the number of the tensor.
            needs_gradient: whether it needs a gradient now.
            here: see :meth:`_values`.
            graph: of what needs a gradient.
        """
        target = call.arguments.tensors[at]
        if type(target) not in PLACED:
            self._adopt(target, call.stage)
        account = self.account_of(target)
        sharing = account.memory.write(call.stage)
        begins = needs_gradient and not account.requires_grad
        if begins and any(x is not account and not x.requires_grad for x in sharing):
            # A view's base would need one from here on, and not a tensor that is detached.
            raise LayerError(
                f"`{call.label}` ({user_line()}) writes what needs a gradient into memory that"
                " several tensors share, and that needed none so far. Write into the whole"
                " tensor (`x[:, :2] = y` in place of `x[:, :2].copy_(y)`), or use an operation"
                " that returns a new one (`torch.cat`, `torch.where`)."
            )
        account.requires_grad = account.requires_grad or needs_gradient
        if needs_gradient and graph is not None:
            # Other tensors have the same memory, perhaps, and from now on the same history.
            graph.keep_whole()
            for each in (account, *(x for x in sharing if x.requires_grad)):
                each.graph = graph if each.graph is None else graph.join(each.graph)
        kept = here.get(at, account.tensor) if self.stage == call.stage else None
        # Through a view, too, or through `x.data`.
        placed = [x for x, each in self.accounts.items() if each.memory is account.memory]
        viewed = account.memory.of
        if viewed is not None and not any(x is viewed for x in placed):
            # Through a view that user code has kept since another step.
            placed.append(viewed)
            self.account_of(viewed).memory.write(call.stage)
        if placed:
            self.writes_placed()
        if isinstance(target, StepBuffer):
            self.core.move_buffer(target, call.stage, kept)
            kept = None if kept is None else target
        account.begin(call.stage, kept)
        if account.name is not None:
            self._name(account)
        if self.is_outside:
            layer = self._layer_of(call)
            for each in sharing:
                each.layer = layer
        for x in placed:
            self.core.writes_to(x)
        self.core.changed(placed, account.memory)
        for other in sharing:
            if other.owner == call.stage:
                other.refresh()
                if self.stage == call.stage:
                    offer(self.mailbox, other)
        if isinstance(target, Value):
            target.has_history = target.has_history or needs_gradient
            if target.requires_grad != account.requires_grad:
                with without_torch_function_of_subclasses():
                    target.requires_grad_(account.requires_grad)

    def _layer_of(self, call: Call) -> int | None:
        """See :attr:`Account.layer`."""
        found: set[int] = set()
        for x in call.arguments.tensors:
            if isinstance(x, Value):
                found.update(() if x.account.layer is None else (x.account.layer,))
            elif type(x) in PLACED:
                found.update(self.core.layers_with.get(x, (SEVERAL,)))
        if len(found) > 1:
            return SEVERAL
        return found.pop() if found else None

    def _told(
        self, call: Call, here: dict[int, Tensor], ran: tuple[Any, Sequence[Tensor]] | None
    ) -> Any:
        """The result of a call that depends on values: its stage tells it to the others.

        Args:
            call: the call.
            here: see :meth:`_values`.
            ran: at its stage, what to tell, and the tensors that it has made.
        """
        told, new = ran or (None, ())
        result, changes, specs, written = self.tell(told, call.stage, call.label)
        made: Sequence[Tensor | None] = new or [None] * len(specs)
        return self._values(call, here, made, result, changes, specs, written)
