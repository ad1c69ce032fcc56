"""One microbatch's step on one rank: where each operation runs, and what is sent for it."""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pipeshift.compat.torch_private import (
    USES_OF_ONE,
    BackwardHook,
    base_of,
    has_hooks,
    storage_use_count,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.trees import map_leaves
from lightning_pipeshift.model.user_state.random_streams import drawing_from
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Message, Place, packed
from lightning_pipeshift.values.account import Account, Memory
from lightning_pipeshift.values.arguments import (
    Arguments,
    Outcome,
    State,
    applied,
    copied,
    given,
)
from lightning_pipeshift.values.contract import Contract, require_kept, spec_of, specs_of
from lightning_pipeshift.values.functions import READS
from lightning_pipeshift.values.gradients import Way, gradient_from_later, gradient_to_earlier
from lightning_pipeshift.values.layer_contracts import (
    call_hooks,
    flags_of,
    hearing,
    is_heard,
    with_backward_hooks,
)
from lightning_pipeshift.values.layer_state import Attribute, recomputed, with_state
from lightning_pipeshift.values.special import SPECIAL
from lightning_pipeshift.values.value import (
    NO_LINE,
    PLACED,
    Spec,
    StepBuffer,
    StepParameter,
    Value,
    name_of,
    run_by,
    user_line,
    version_in,
)

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core

# Functions whose results' shapes depend on floats.
_SHAPED_BY_FLOATS = frozenset({functional.interpolate})
DIGEST_MASK = (1 << 48) - 1
OUTSIDE = -1
"""The turn of what runs outside of steps."""
# Values up to this size are kept to the end of the next run, for stages that read them alone.
_KEPT_BYTES = 4096
# Of a common tensor, about so many elements are compared between the stages.
_MOST_ELEMENTS = 1 << 14


class _Call(NamedTuple):
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
        stream: the key of its random numbers.
        parameters: the layer's, by name.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: Arguments
    contract: Contract | None
    stage: int
    label: str
    stream: tuple[int | str, ...]
    parameters: Sequence[tuple[str, Tensor]] = ()


class Microbatch:
    """The step of one microbatch on this rank. Every rank runs the same one.

    Args:
        core: what all microbatches share.
        run_number: of the run of a schedule; the same on all ranks.
        step: the number of the step, for the random streams.
        turn: the microbatch's number in the run.
    """

    def __init__(self, core: Core, run_number: int, step: int, turn: int) -> None:
        self.core, self.mailbox, self.stage = core, core.mailbox, core.stage
        self._run_number, self._step, self.turn = run_number, step, turn
        # Of messages, of calls of layers, and of operations that run at one stage.
        self._serial = self._num_layers = self._num_operations = self._num_values = 0
        self.digest = core.digest
        self.last = "", ""
        """The latest operation or layer, and the user's line."""
        # The tensors that every stage has whose content is in the digest, with their versions.
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.accounts: dict[Tensor, Account] = {}
        self.is_in_backward = False
        self.has_later_backward = False
        """Whether the schedule runs the backward, some time after the step."""
        self.gradients: dict[Tensor, Tensor | None] | None = None
        """Those of all parameters, as values; ``None`` if they may have changed since they were
        asked for. What changes them by other means than operations has to set it to ``None``."""
        self._num_backwards = 0
        self._recomputes = False
        self._is_alone = core.mailbox.num_stages == 1
        self._living: list[weakref.ref[Value]] = []
        """On the only stage, all values."""
        self._new_token()

    def release(self) -> None:
        """Lets go of all tensors. On the only stage, values that other code still has become their
        tensors: nothing else differs from a step without this core.
        """
        living = [value for each in self._living if (value := each()) is not None]
        # Those that refer to a tensor must be gone when it is swapped.
        self._living.clear()
        with without_torch_function_of_subclasses(), torch.enable_grad():
            for value in living:
                tensor = value.account.tensor
                assert tensor is not None
                # What autograd has saved cannot be swapped, but what shares its memory can.
                view = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
                torch.utils.swap_tensors(value, view)
        self._new_token()
        self.gradients = None
        self.accounts.clear()

    def _new_token(self) -> None:
        self._token = torch.zeros((), device=self.core.device, requires_grad=True)
        self._has_ends = False
        self.first_gradient: tuple[Key, Place] | None = None
        """The gradient that this stage's backward waits for first; ``None`` if it can begin."""

    # --- the program ---

    def note(self, label: str, *what: object) -> None:
        """Adds an operation to the digest of the program, and what else must be equal on all ranks:
        numbers, modes, shapes.
        """
        self.digest = _rolled(self.digest, repr((label, what)).encode())
        line = NO_LINE if label == "backward" else user_line()
        if line != NO_LINE:
            self.last = label, line

    def note_generators(self) -> None:
        """Adds the state of torch's generators to the digest. NumPy's and Python's draws are in it
        where numbers and tensors meet values: other threads draw from these generators, too.
        """
        self.digest = self._with_generators()

    def _with_generators(self) -> int:
        states = (
            state.numpy().tobytes()
            for state in (generator.get_state() for generator in self.core.generators)
        )
        return _rolled(self.digest, *states)

    def _note_common(self, tensor: Tensor) -> None:
        """Adds the content of a tensor that every stage has to the digest, where that is cheap."""
        version = version_in(tensor)
        if self._known.get(tensor) != version:
            self._known[tensor] = version
            content = content_of(tensor, self.core.compares_floats)
            self.digest = _rolled(self.digest, repr(tensor.shape).encode(), content)

    def _note_values(self, arguments: Arguments) -> None:
        """Adds the values that an operation uses to the digest: each by its name."""
        for x in arguments.tensors:
            if isinstance(x, Value) and x.account.name is not None:
                self.digest = (self.digest * 31 + sum(x.account.name)) & DIGEST_MASK

    def _key(self, source: int, kind: Kind) -> Key:
        self._serial += 1
        return Key(source, self._run_number, self.turn, kind, self._num_backwards, self._serial)

    def _place(self, label: str) -> Place:
        return Place(label, self._with_generators(), user_line())

    def receive(self, key: Key, place: Place) -> Message:
        """Waits for a message."""
        return self.mailbox.take(key, place)

    # --- where values are ---

    def account_of(self, tensor: Tensor) -> Account:
        """The account of a value or a parameter."""
        if isinstance(tensor, Value):
            return tensor.account
        account = self.accounts.get(tensor)
        if account is None:
            owner = self.core.parameter_owners[tensor]
            account = self.accounts[tensor] = Account(owner, tensor.requires_grad, None)
            self._begin_parameter(tensor, account)
        return account

    def _begin_parameter(self, tensor: Tensor, account: Account) -> None:
        """Resets the account of a parameter or buffer to the stages that hold it."""
        holders = {account.owner}
        if tensor not in self.core.written:
            holders.update(self.core.holders(tensor))
        account.begin(account.owner, tensor if self.stage in holders else None)
        account.holders = holders

    def bring(self, tensor: Tensor, stage: int, with_gradient: bool, label: str) -> Tensor | None:
        """Brings a value to a stage.

        Args:
            tensor: the value or parameter.
            stage: which uses it.
            with_gradient: whether its gradient is needed.
            label: of what uses it.

        Returns:
            the plain tensor at that stage, ``None`` at the others.
        """
        account = self.account_of(tensor)
        account.refresh()
        if stage not in account.holders:
            self._send(account, tensor, stage, label)
        if with_gradient and account.requires_grad:
            self._require_new(tensor, label)
            if account.last != stage:
                self._lead_chain(account, stage, label)
            return account.link if self.stage == stage else None
        return account.tensor if self.stage == stage else None

    def _require_new(self, tensor: Tensor, label: str) -> None:
        """Raises LayerError for a value whose way back an earlier backward has used."""
        if isinstance(tensor, Value) and tensor.account.era not in (None, self._era):
            raise LayerError(
                f"`{label}` ({user_line()}) needs the gradient of a value that was computed before"
                " an earlier `backward`, or in an earlier step. With several stages a `backward`"
                " uses up all ways back: compute the value again, `detach()` it, or call `backward`"
                " once for the sum of the losses."
            )

    @property
    def _era(self) -> tuple[int, int, int]:
        return self._run_number, self.turn, self._num_backwards

    def _send(self, account: Account, tensor: Tensor, stage: int, label: str) -> None:
        key = self._key(account.owner, Kind.VALUE)
        if self.stage == account.owner:
            with without_torch_function_of_subclasses():
                self.mailbox.send(stage, key, self._place(label), account.tensor)
        elif self.stage == stage:
            message = self.receive(key, self._place(label))
            with without_torch_function_of_subclasses():
                account.tensor = message.tensor(tensor.dtype, tensor.shape).to(self.core.device)
        account.holders.add(stage)

    def _lead_chain(self, account: Account, stage: int, label: str) -> None:
        """Leads the chain of a value's consumers to another stage."""
        last, account.last = account.last, stage
        account.has_left = True
        key = self._key(stage, Kind.GRADIENT)
        if self.stage not in (last, stage):
            return
        way = Way(self, key, self._place(label), last)
        self._has_ends = True
        with without_torch_function_of_subclasses():
            if self.stage == last:
                assert account.link is not None
                self._token = gradient_from_later(self._token, account.link, way)
                self.first_gradient = key, way.place
            else:
                assert account.tensor is not None
                self._token, account.link = gradient_to_earlier(self._token, account.tensor, way)
                self.first_gradient = None

    # --- operations between layers ---

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch, one of whose arguments is a value or a parameter."""
        special = SPECIAL.get(function)
        if special is not None:
            return special(self, *args, **kwargs)
        if function in READS:
            return self._read_by(function, args, kwargs)
        core = self.core
        arguments = Arguments(given(args, kwargs), _described, function in _SHAPED_BY_FLOATS)
        placed = [x for x in arguments.tensors if isinstance(x, PLACED)]
        self._place_parameters(placed)
        key = function, torch.is_grad_enabled(), *_autocast(core.device), arguments.key
        try:
            contract = core.contracts[key]
        except KeyError:
            contract = core.finder.find(function, args, kwargs)
            core.keep(key, contract)
        label = name_of(function)
        self.note(label, key[1:-1], arguments.numbers)
        self._note_values(arguments)
        self._num_operations += 1
        stage = self._stage_of(contract, arguments)
        if stage is None:
            return self._everywhere(function, args, kwargs)

        def run(_: Any, run_args: Any, run_kwargs: Any) -> Any:
            core.operation = label
            try:
                return function(*run_args, **run_kwargs)
            finally:
                core.operation = None

        stream = "operation", core.seed, self._step, self.turn, self._num_operations
        return self._call(_Call(run, args, kwargs, arguments, contract, stage, label, stream))

    def plain(self, tree: Any) -> Any:
        """A structure with the tensors of this stage in the place of values."""
        return map_leaves(lambda x: x.account.tensor if isinstance(x, Value) else x, tree)

    # --- reads ---

    def _read_by(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function that reads values into Python, on this rank. Other ranks need not read
        them: so this is no operation of the program.
        """
        label = name_of(function)
        arguments = Arguments(given(args, kwargs), id)
        placed = [x for x in arguments.tensors if isinstance(x, PLACED)]
        plain = {id(x): self._read_here(x, label) for x in placed}
        with run_by(None), without_torch_function_of_subclasses():
            plain_args, *plain_kwargs = copied(
                given(args, kwargs), lambda x: plain.get(id(x), x), {}
            )
            return function(*plain_args, **dict(plain_kwargs))

    def _read_here(self, tensor: Tensor, label: str) -> Tensor:
        """A value's tensor without its gradient. The owner tells it to all stages; another stage
        asks for it, since the owner may not read it.
        """
        if isinstance(tensor, StepParameter) and tensor not in self.core.parameter_owners:
            # No operation has used it, so every stage has it. A read must not place it: the other
            # stages may not read it.
            with without_torch_function_of_subclasses():
                return tensor.detach()
        account = self.account_of(tensor)
        account.refresh()
        here, key = account.tensor, self._read_key(account, tensor)
        if account.owner == self.stage:
            assert here is not None
            with without_torch_function_of_subclasses():
                here = here.detach()
                self.mailbox.tell(key, self._place(label), here)
        elif here is None and account.seen is not None and account.seen[0] == account.version:
            here = account.seen[1]
        elif here is None:
            place = self._place(label)
            if not self.mailbox.has(key):
                self.mailbox.ask(key, place)
            message = self.receive(key, place)
            with without_torch_function_of_subclasses():
                here = message.tensor(tensor.dtype, tensor.shape).to(self.core.device)
            account.seen = account.version, here
        return here.detach()

    def _read_key(self, account: Account, tensor: Tensor) -> Key:
        if account.name is None:
            # A parameter: it changes between two steps, but not in one.
            number = -1 - self.core.parameter_numbers[tensor]
            part = self._num_backwards
            return Key(account.owner, self._run_number, self.turn, Kind.READ, part, number)
        return key_of(account)

    def offer(self, account: Account) -> None:
        """Lets other stages ask for a value of this one, if it is small."""
        tensor = account.tensor
        if account.name is None or tensor is None or self.mailbox.num_stages == 1:
            return
        is_small = tensor.nbytes <= _KEPT_BYTES
        self.mailbox.offer(key_of(account), tensor.detach() if is_small else None)

    def _place_parameters(self, placed: Sequence[Tensor]) -> None:
        parameters = [x for x in placed if isinstance(x, StepParameter)]
        if parameters:
            owners = [x.account.owner for x in placed if isinstance(x, Value)]
            self.core.place_parameters(parameters, owners)

    def _stage_of(self, contract: Contract | None, arguments: Arguments) -> int | None:
        """Where an operation runs; ``None`` for everywhere: it uses only shapes."""
        tensors = arguments.tensors
        for at in () if contract is None else contract.places:
            if isinstance(tensors[at], PLACED):
                return self.account_of(tensors[at]).owner
        used = range(len(tensors)) if contract is None else contract.used
        placed = [tensors[at] for at in used if isinstance(tensors[at], PLACED)]
        return max([self.account_of(x).owner for x in placed], default=None)

    def _everywhere(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that uses only the shapes of values, on every stage."""

        def without_values(x: Tensor) -> Tensor:
            if not isinstance(x, PLACED):
                return x
            return torch.empty_strided(
                tuple(x.shape), x.stride(), dtype=x.dtype, device=self.core.device
            )

        with without_torch_function_of_subclasses():
            plain_args, *plain_kwargs = copied(given(args, kwargs), without_values, {})
            return function(*plain_args, **dict(plain_kwargs))

    # --- layers ---

    def layer(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer."""
        self.enters_layer(number)
        self._num_layers += 1
        return self._called(number, args, kwargs, self.core.backward_hooks.pop(number, None))

    def enters_layer(self, number: int) -> None:
        """Called before a layer."""

    def _called(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: BackwardHook | None
    ) -> Any:
        core = self.core
        stage, layer = core.owners(number, self.turn), core.layers[number]
        label = core.names[number]
        modules = core.modules[number]
        hooked = tuple(name for name, module in modules if name and is_heard(module))
        kind, watch = core.kind_of(number)
        state, recomputes = core.states[number], self._recomputes
        all_args = tuple(attribute.get(layer) for attribute in state), *args
        arguments = Arguments(given(all_args, kwargs), _described, exact=True)
        self._note_values(arguments)
        core.place_parameters(
            [x for x in arguments.tensors if isinstance(x, StepParameter)], [stage]
        )
        parameters = core.parameters[number]
        flags = flags_of(
            [module for _, module in modules], [parameter for _, parameter in parameters]
        )
        key = (
            kind,
            flags,
            torch.is_grad_enabled(),
            *_autocast(core.device),
            arguments.key,
            hooked,
            core.own_hooks(number),
        )
        self.note(label, key[1:-3], arguments.numbers)
        try:
            contract = core.contracts[key]
        except KeyError:
            contract, fake = None, core.fake_of(number)
            if fake is not None:
                changed: set[Attribute] = set()
                heard_forward = hearing(fake, core.plain_forward(number, fake), hooked)
                forward = with_state(fake, heard_forward, state, core.watch(number, fake), changed)
                contract = core.finder.find(forward, all_args, kwargs, is_layer=True)
                if core.add_state(number, changed):
                    return self._called(number, args, kwargs, hooks)
            core.keep(key, contract)

        def run(others: dict[str, Tensor], run_args: Any, run_kwargs: Any) -> Any:
            changed: set[Attribute] = set()
            forward = core.forwards[number]
            if hooks is not None:
                forward = with_backward_hooks(forward, hooks)
            forward = hearing(layer, forward, hooked)
            if recomputes:
                # The second run, in the backward, needs the tensors of other stages, too.
                again = partial(_called_with, layer, forward, others) if others else forward
                forward = recomputed(layer, again, state)
            forward = with_state(layer, forward, state, watch, changed)
            if others and not recomputes:
                # Around the state: a layer may replace a buffer that was brought here.
                forward = partial(_called_with, layer, forward, others)
            versions = list(map(version_in, others.values()))
            result = forward(*run_args, **run_kwargs)
            if contract is not None and changed:
                names = ", ".join(
                    f"`{path}.{name}`".replace("`.", "`") for path, name, _ in changed
                )
                raise LayerError(
                    f"`{label}` has changed its attribute {names}, which it did not in its run"
                    " without values. Every stage has a layer's attributes, and only one runs it:"
                    " assign the attribute in every call, or return what it keeps, and not only if"
                    " values, or things outside of the layer, say so."
                )
            if versions != list(map(version_in, others.values())):
                raise LayerError(
                    f"`{label}` writes in place to a parameter that another stage holds, since a"
                    " layer there has it, too. Write to it between layers."
                )
            return result

        stream = "layer", core.seed, self._step, self.turn, self._num_layers
        call = _Call(run, all_args, kwargs, arguments, contract, stage, label, stream, parameters)
        (result, heard), after, more = self._call(call)
        for attribute, value in (*zip(state, after, strict=True), *more):
            attribute.set(layer, value)
        core.add_state(number, {attribute for attribute, _ in more})
        for buffer in core.buffers[number]:
            # The layer may have written to it.
            account = self.accounts.get(buffer)
            if account is not None:
                is_here = account.owner == self.stage
                account.begin(account.owner, account.tensor if is_here else None)
        call_hooks(layer, label, heard)
        return result

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context of layers that the backward runs again, in place of what they would keep."""
        before, self._recomputes = self._recomputes, True
        try:
            yield
        finally:
            self._recomputes = before

    # --- calls ---

    def _call(self, call: _Call) -> Any:
        contract, arguments, stage = call.contract, call.arguments, call.stage
        with_gradient = torch.is_grad_enabled() and (contract is None or contract.needs_gradient)
        for at, needs in contract.written.items() if contract is not None else ():
            target = arguments.tensors[at]
            if not isinstance(target, PLACED):
                self._require_own(target, call.label, needs)
                self._adopt(target, stage)
        here: dict[int, Tensor] = {}
        for at, tensor in enumerate(arguments.tensors):
            if contract is not None and at not in contract.used:
                continue
            if with_gradient and not isinstance(tensor, PLACED) and tensor.requires_grad:
                self._require_leaf(tensor, call)
                self._adopt(tensor, stage)
            if not isinstance(tensor, PLACED):
                if contract is not None:
                    # If nobody knows what a call does, it may fill uninitialised memory.
                    self._note_common(tensor)
            else:
                if contract is not None and at in contract.written:
                    self._require_writable(call, at, with_gradient)
                plain = self.bring(tensor, stage, with_gradient, call.label)
                if plain is not None:
                    here[at] = plain
        others: dict[str, Tensor] = {}
        for name, parameter in call.parameters:
            account = self.accounts.get(parameter)
            has_left = account is not None and account.has_left
            if self.core.parameter_owners[parameter] != stage or has_left:
                plain = self.bring(parameter, stage, with_gradient, call.label)
                if plain is not None:
                    others[name] = plain
        if self.stage != stage:
            return self._expected(call) if contract is not None else self._told(call, here, None)
        if contract is None or contract.written:
            # What is on its way must not change.
            self.mailbox.flush()
        before, after, written = self._run(call, here, others)
        if contract is None:
            return self._told(call, here, (before, after, written))
        tensors = [here.get(at, x) for at, x in enumerate(arguments.tensors)]
        require_kept(contract, call.label, tensors, before, after, written)
        return self._given(call, here, after.new)

    def _run(
        self, call: _Call, here: dict[int, Tensor], others: dict[str, Tensor]
    ) -> tuple[Outcome, Outcome, list[int]]:
        """Runs a call at its stage; returns what its arguments held before, what it gave, and the
        numbers of the tensors that it has written to.
        """
        arguments, memo = call.arguments, {}  # type: ignore[var-annotated]

        def plain(tensor: Tensor) -> Tensor:
            return here.get(arguments.number_of(tensor), tensor)

        with run_by(None), without_torch_function_of_subclasses():
            args, *kwargs = copied(given(call.args, call.kwargs), plain, memo)
            nodes = [memo[id(node)] for node in arguments.nodes]
            tensors = list(map(plain, arguments.tensors))
            before = Outcome(nodes, tensors)
            versions = list(map(version_in, tensors))
            draws_on_host = call.contract is None or call.contract.draws_on_host
            with drawing_from(self.core.generators, draws_on_host, *call.stream):
                result = call.function(others, args, dict(kwargs))
            after = Outcome(nodes, tensors, result)
            written = [at for at, x in enumerate(tensors) if version_in(x) != versions[at]]
        return before, after, written

    def _expected(self, call: _Call) -> Any:
        """What stands for the results of a call at another stage, by its contract."""
        assert call.contract is not None
        return self._given(call, {}, [None] * len(call.contract.specs))

    def _given(self, call: _Call, here: dict[int, Tensor], new: Sequence[Tensor | None]) -> Any:
        """Makes the values of a call's results, notes its writes, and applies its changes."""
        contract = call.contract
        assert contract is not None
        written = {at: needs and torch.is_grad_enabled() for at, needs in contract.written.items()}
        return self._values(
            call, here, contract.specs, new, contract.result, contract.changes, written
        )

    def _values(
        self,
        call: _Call,
        here: dict[int, Tensor],
        specs: Sequence[Spec],
        new: Sequence[Tensor | None],
        result: Any,
        changes: dict[int, State],
        written: dict[int, bool],
    ) -> Any:
        values: list[Value] = []
        memories: list[Memory] = []
        for spec, tensor in zip(specs, new, strict=True):
            memory = Memory()
            if spec.shares is not None and spec.shares < 0:
                memory = memories[-1 - spec.shares]
            elif spec.shares is not None:
                shared = call.arguments.tensors[spec.shares]
                if isinstance(shared, PLACED):
                    memory = self.account_of(shared).memory
            memories.append(memory)
            account = self.new_account(call.stage, spec.requires_grad, tensor, memory)
            account.era = self._era
            if tensor is not None:
                with without_torch_function_of_subclasses():
                    self.offer(account)
            values.append(self.new_value(spec, account))
        for at, needs_gradient in written.items():
            target = call.arguments.tensors[at]
            if not isinstance(target, PLACED):
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
            kept = here.get(at, account.tensor) if self.stage == call.stage else None
            if isinstance(target, StepBuffer):
                self.core.move_buffer(target, call.stage, kept)
                kept = None if kept is None else target
            account.begin(call.stage, kept)
            if account.name is not None:
                self._name(account)
            if target in self.accounts:
                self.core.written.add(target)
            for other in sharing:
                if other.owner == call.stage:
                    other.refresh()
                    if self.stage == call.stage:
                        with without_torch_function_of_subclasses():
                            self.offer(other)
            if isinstance(target, Value):
                target.has_history = target.has_history or needs_gradient
                if target.requires_grad != account.requires_grad:
                    with without_torch_function_of_subclasses():
                        target.requires_grad_(account.requires_grad)
        return applied(result, changes, call.arguments, values)

    def _told(
        self,
        call: _Call,
        here: dict[int, Tensor],
        ran: tuple[Outcome, Outcome, list[int]] | None,
    ) -> Any:
        """What a call gives whose stage tells the others: it depends on values."""
        told, new = None, None
        if ran is not None:
            before, after, written = ran
            tensors = [here.get(at, x) for at, x in enumerate(call.arguments.tensors)]
            with without_torch_function_of_subclasses():
                specs = specs_of(after.new, tensors)
                needs = {at: tensors[at].requires_grad for at in written}
            for at in written:
                if at not in here:
                    self._require_own(tensors[at], call.label, needs[at])
            told = after.result, after.changes_from(before), specs, needs
            new = after.new
        result, changes, specs, written_to = self.tell(told, call.stage, call.label)
        return self._values(
            call, here, specs, new or [None] * len(specs), result, changes, written_to
        )

    def new_account(
        self, owner: int, requires_grad: bool, tensor: Tensor | None, memory: Memory
    ) -> Account:
        """The account of the microbatch's next value."""
        account = Account(owner, requires_grad, tensor, memory)
        self._name(account)
        return account

    def new_value(self, spec: Spec, account: Account) -> Value:
        """The value of an account."""
        value = Value(spec, self.core.device, account)
        if self._is_alone:
            self._living.append(weakref.ref(value))
        return value

    def _name(self, account: Account) -> None:
        self._num_values += 1
        # With the digest: where another stage runs other operations, it has no value of this name,
        # and a read ends with an error in place of another value's number.
        number = (self.digest << 15) + (self._num_values & 0x7FFF)
        account.name = self._run_number, self.turn, number

    def tell(self, told: Any, stage: int, label: str) -> Any:
        """Sends what one stage knows to all; returns it."""
        key = self._key(stage, Kind.TOLD)
        if self.stage != stage:
            message = self.receive(key, self._place(label))
            assert message.data is not None
            return pickle.loads(message.data.numpy().tobytes())
        data = pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL)
        for other in range(self.mailbox.num_stages):
            if other != stage:
                self.mailbox.send(other, key, self._place(label), data)
        return told

    def _require_writable(self, call: _Call, at: int, with_gradient: bool) -> None:
        """Raises LayerError if a write would reach a copy only: of a tensor with views, or with a
        history that stays elsewhere.
        """
        assert call.contract is not None
        target = call.arguments.tensors[at]
        account = self.account_of(target)
        stays = isinstance(target, StepParameter) or (isinstance(target, Value) and target.stays)
        if stays and account.owner != call.stage:
            raise LayerError(
                f"`{call.label}` ({user_line()}) writes to parameters or gradients of several"
                " stages at once, or in a layer of another stage. Write to each by itself"
                " (`foreach=False`, or `for p in ...: p.mul_(2)`)."
            )
        others = [
            self.account_of(call.arguments.tensors[other])
            for other in call.contract.used - {at}
            if isinstance(call.arguments.tensors[other], PLACED)
        ]
        is_away = account.owner != call.stage
        has_views = account.memory.num_tensors > 1
        if (
            (is_away and any(other.memory is account.memory for other in others))
            or (is_away and account.requires_grad and not with_gradient)
            or (not is_away and has_views and account.has_left)
        ):
            raise LayerError(
                f"`{call.label}` ({user_line()}) writes in place to a value that other tensors"
                " share, or whose gradient another stage computes. Use an operation that returns a"
                " new tensor (`x = x * 2` in place of `x.mul_(2)`)."
            )

    def _require_own(self, tensor: Tensor, label: str, needs_gradient: bool) -> None:
        """Raises LayerError if a common tensor, with the tensor that it is a view of, cannot become
        a value of one stage: others that share its memory would not.
        """
        storage, base = tensor.untyped_storage(), base_of(tensor)
        is_view = base is not None and type(base) is Tensor and not needs_gradient
        is_shared = storage_use_count(storage) > USES_OF_ONE + is_view
        if type(tensor) is not Tensor or is_shared or tensor.requires_grad:
            raise LayerError(
                f"`{label}` ({user_line()}) writes a value of one stage into a tensor that every"
                " stage has, and whose memory other tensors or arrays share, or that needs a"
                " gradient, or whose class is not `Tensor`. Write into a tensor of its own"
                " (`x.clone()`), before others share it, write by index (`x[i] = value`), or use an"
                " operation that returns a new tensor (`torch.where`, `torch.cat`)."
            )

    def _require_leaf(self, tensor: Tensor, call: _Call) -> None:
        """Raises LayerError if a common tensor that needs a gradient cannot become a value of the
        stage that its gradient comes to: others have a part in its gradient.
        """
        is_plain = type(tensor) is Tensor and tensor.is_leaf
        if not is_plain or tensor.grad is not None or has_hooks(tensor):
            raise LayerError(
                f"`{call.label}` ({user_line()}) runs at stage {call.stage} only, and uses a tensor"
                " that every stage has, and whose gradient would come to that stage only. Make it a"
                " parameter of the module, or a tensor without history, hooks and gradient"
                " (`x.detach().clone().requires_grad_()`)."
            )

    def _adopt(self, tensor: Tensor, stage: int) -> None:
        """Makes a common tensor a value of one stage: that writes into it, or gets the gradient of
        what is a leaf.
        """
        base = base_of(tensor)
        if base is not None and not tensor.requires_grad:
            # A write reaches what it is a view of. What has a view cannot be swapped.
            shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
            torch.utils.swap_tensors(tensor, torch.empty(0))
            self._adopt(base, stage)
            view = base.as_strided(shape, stride, offset)
            if self._is_alone:
                # What a weak reference refers to cannot be swapped either.
                self._living.pop()
            torch.utils.swap_tensors(tensor, view)
            if self._is_alone:
                self._living.append(weakref.ref(cast(Value, tensor)))
            return
        spec = spec_of(tensor)
        account = self.new_account(stage, spec.requires_grad, None, Memory())
        account.era = self._era if spec.requires_grad else None
        value = Value(spec, self.core.device, account)
        torch.utils.swap_tensors(tensor, value)
        # Now the user's object is the value, and the other one has the memory.
        if self._is_alone:
            self._living.append(weakref.ref(cast(Value, tensor)))
        if self.stage == stage:
            self.account_of(tensor).begin(stage, value)

    # --- the backward ---

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Runs this stage's part of the backward. Every rank calls this; arguments as those of
        ``Tensor.backward``.
        """
        has_options = create_graph or retain_graph or inputs is not None
        if not self._is_alone and (has_options or isinstance(gradient, Value)):
            raise LayerError(
                "`backward` with `create_graph`, `retain_graph`, `inputs` or a gradient that one"
                " stage owns is not supported across layers. Call `backward` once for the sum of"
                " the losses; compute second derivatives inside of one layer."
            )
        self.note("backward")
        self._require_new(loss, "backward")
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if self._has_ends:
            roots, gradients = [self._token], [torch.zeros_like(self._token)]
        link: Tensor | None = loss
        if isinstance(loss, PLACED):
            account = self.account_of(loss)
            account.refresh()
            link = account.link if account.last == self.stage else None
        if link is not None:
            roots.append(link)
            gradients.append(self.plain(gradient))
        if roots:
            self.is_in_backward = True
            try:
                with run_by(None), without_torch_function_of_subclasses():
                    torch.autograd.backward(
                        roots, gradients, retain_graph, create_graph, inputs=self.plain(inputs)
                    )
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise LayerError(
                    f"{error} With several stages the backward also goes through what another stage"
                    " has used and the loss does not depend on. Use an operation that returns a new"
                    " tensor (`x = x * 2` in place of `x.mul_(2)`)."
                ) from error
            finally:
                self.is_in_backward = False
        self.gradients = None
        if self._is_alone:
            # There is no other way back than autograd's, which tells if it was used up.
            return
        self._num_backwards += 1
        self._new_token()
        for tensor, account in self.accounts.items():
            self._begin_parameter(tensor, account)


def key_of(account: Account) -> Key:
    """Of the message that carries a value to a stage that reads it."""
    assert account.name is not None
    run, turn, number = account.name
    return Key(account.owner, run, turn, Kind.READ, account.version, number)


def _rolled(digest: int, *contents: Any) -> int:
    for content in contents:
        digest = digest * 31 + zlib.crc32(content)
    return digest & DIGEST_MASK


def content_of(tensor: Tensor, with_floats: bool = True) -> bytes:
    """The bytes of a plain tensor in host memory; of a large one, those of a part of its elements.

    Args:
        tensor: of another kind or device: nothing.
        with_floats: whether to take tensors of floats.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_float = tensor.is_floating_point() or tensor.is_complex()
    if not is_plain or tensor.device.type != "cpu" or (is_float and not with_floats):
        return b""
    tensor = tensor.detach()
    if tensor.numel() > _MOST_ELEMENTS:
        most = round(_MOST_ELEMENTS ** (1 / tensor.dim()))
        tensor = tensor[tuple(slice(None, None, -(-size // most)) for size in tensor.shape)]
    data, _ = packed(tensor)
    return data.numpy().tobytes()


def _described(tensor: Tensor) -> Any:
    """What of a tensor the shapes of a call's results may depend on."""
    with without_torch_function_of_subclasses():
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _autocast(device: torch.device) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled(device.type):
        return (None,)
    return (torch.get_autocast_dtype(device.type),)


def _called_with(
    layer: torch.nn.Module, forward: Any, others: dict[str, Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer with tensors in place of some of its parameters."""
    bare = _Bare(layer, forward)
    named = {f"layer.{name}": tensor for name, tensor in others.items()}
    return torch.func.functional_call(bare, named, args, kwargs)


class _Bare(torch.nn.Module):
    """Calls a layer's forward without the hooks of the layer, which have been called."""

    def __init__(self, layer: torch.nn.Module, forward: Any) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self._forward(*args, **kwargs)
