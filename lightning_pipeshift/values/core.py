"""The layers of a module, their owners, and what all microbatches on this rank share."""

from __future__ import annotations

import copy
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_pipeshift.compat.torch_private import (
    COMPILED_CALL,
    BackwardHook,
    apply_function,
    backward_hooks_by,
    checkpointing_by,
    hook_tables,
    plain_call,
    preserved_version_counters,
    set_hook_tables,
    storage_key_of,
    with_compiling,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.devices.properties import generators_of
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.values.account import Account
from lightning_pipeshift.values.calls import CallWatch
from lightning_pipeshift.values.contract import Contract, ContractFinder
from lightning_pipeshift.values.layer_contracts import (
    NoBackwardHook,
    fake_copy,
    flagged_in,
    flags_of,
    is_heard,
    kind_of,
    set_flags,
)
from lightning_pipeshift.values.layer_state import (
    Attribute,
    Watch,
    replaced_parameters,
    shared_buffers,
)
from lightning_pipeshift.values.microbatch import OUTSIDE, Microbatch
from lightning_pipeshift.values.program import DIGEST_MASK
from lightning_pipeshift.values.value import (
    PLACED,
    SeenData,
    StepBuffer,
    StepParameter,
    run_by,
    running,
)

# How many contracts, kinds and fake copies of layers are kept: a layer that counts its calls has
# a contract for each, and a setting that changes in each step makes a kind each.
_MOST_CONTRACTS, _MOST_KINDS = 4096, 64
Owners = Callable[[int, int], int]
"""The owner of a layer for a microbatch: ``(number of the layer, turn) -> stage``."""


class Core:
    """One rank's part of the steps of a module.

    Args:
        module: the whole module. Every rank has all of it; only a layer's owner uses the layer.
        layers: the modules that are placed, in order.
        owners: tells who owns which layer.
        mailbox: connects the stages.
        device: where this stage computes.
        seed: of the random streams.
        holders: tells which stages have a parameter's bytes, besides the one that owns it.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        owners: Owners,
        mailbox: Mailbox,
        device: torch.device,
        seed: int = 0,
        holders: Callable[[Tensor], Iterable[int]] = lambda _: (),
    ) -> None:
        self.module, self.layers, self.owners = module, list(layers), owners
        self.mailbox, self.stage, self.device, self.seed = mailbox, mailbox.stage, device, seed
        self.device_kind, self.generators = device.type, generators_of(device)
        self.finder = ContractFinder(device)
        self.contracts: dict[Any, tuple[Contract | None, str, int]] = {}
        """By a call's key: its contract, its name, and a digest of what else has to be the same on
        all ranks."""
        self.number = {layer: at for at, layer in enumerate(self.layers)}
        names = {each: name for name, each in module.named_modules()}
        self.names = [names[layer] for layer in self.layers]
        self._own = [layer.__dict__.get("forward") for layer in self.layers]
        self.forwards: list[Callable[..., Any]] = [layer.forward for layer in self.layers]
        self._replaced: list[tuple[str, Any]] = [("forward", own) for own in self._own]
        # What layers of one kind have in common has a number, which is faster to compare.
        self._kinds: dict[Any, int] = {}
        self._num_kinds = 0
        self._kind_numbers = [0] * len(self.layers)
        self._fakes: dict[int, nn.Module | None] = {}
        self.parameters = [list(layer.named_parameters()) for layer in self.layers]
        self.buffers = [list(layer.buffers()) for layer in self.layers]
        self.modules = [list(layer.named_modules()) for layer in self.layers]
        self.flagged = list(map(flagged_in, self.layers))
        self._foreign: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        self.states: list[list[Attribute]] = [[] for _ in self.layers]
        """The attributes that each layer changes when it is called, as far as they are known."""
        self.replaced: list[tuple[Attribute, ...]] = [()] * len(self.layers)
        """Where other tensors are in the places of each layer's parameters now."""
        self._families = [
            tuple((name, type(module)) for name, module in modules) for modules in self.modules
        ]
        self._shared = shared_buffers(self.layers)
        self._watches: list[Watch | None] = [None] * len(self.layers)
        self.switched: dict[Tensor, bool] = {}
        """The parameters that steps of this run have frozen or thawed, and whether they were
        trained before."""
        self.parameter_owners: dict[Tensor, int] = {}
        """The stages that hold the parameters, and the buffers of layers; a parameter outside of
        layers gets its stage at its first use."""
        self._layers_with: dict[Tensor, list[int]] = {}
        for number in range(len(self.layers)):
            for tensor in (*(x for _, x in self.parameters[number]), *self.buffers[number]):
                self._layers_with.setdefault(tensor, []).append(number)
        self._awaited: dict[int, dict[Callable[[int], object], None]] = {}
        self.place(owners)
        self.holders = holders
        self.written: set[Tensor] = set()
        """The parameters that steps have written to: only their owners have the new bytes."""
        self.parameter_numbers = {
            tensor: at for at, tensor in enumerate((*module.parameters(), *self.parameter_owners))
        }
        self.kept: weakref.WeakSet[Account] = weakref.WeakSet()
        """Of the values of programs that are over, and that other code still has."""
        self.num_steps = self.step_number = 0
        """How many runs have begun; the number of the user's step that runs, for messages."""
        self.digest = 0
        """Of all operations of the runs before: with it, the next run's are compared."""
        self.backward_hooks: dict[int, BackwardHook] = {}
        """By the number of a layer that is being called."""
        self.sees_parameters = False
        """Whether parameters have another class now."""
        self._classes: dict[Tensor, type] = {}
        """Their own."""
        self.last = "", ""
        """See :class:`Microbatch`; of the runs before."""
        self.compares_floats = True
        """Whether all stages compute the same bits, so that tensors of floats which every stage has
        have to be equal."""
        self.result_bytes: dict[int, int] = {}
        """Of what the layers that are timed have returned last."""
        self.called: dict[int, list[int]] = {}
        """On the only stage, the layers that the latest step has called, by microbatch."""
        self._memories: set[int] | None = None
        self.unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context of code in which no one watches attributes of modules."""
        self.calls: CallWatch | None = None
        """Is told of all calls."""
        self.gates: Sequence[NamedLayer] = ()
        """The layers by their numbers, if their weights may be elsewhere while they wait."""
        self.computes = False
        """Whether the action that runs now has computed since it began, or waited last: a forward
        may only send and wait."""
        self.operation: str | None = None
        """The operation that runs at this stage now."""

    def learn_from(self, other: Core) -> None:
        """Takes what another core of the same layers, in any order, knows of calls."""
        self.contracts, self._fakes = other.contracts, other._fakes
        self._kinds, self._num_kinds = other._kinds, other._num_kinds
        self.finder.fake_mode = other.finder.fake_mode
        for layer, state in zip(other.layers, other.states, strict=True):
            self.add_state(self.number[layer], set(state))

    def place(self, owners: Owners) -> None:
        """Changes the owners of layers. Every stage calls this between two runs, when the tensors
        of these layers are where the new owners are.
        """
        self.owners = owners
        self._foreign.clear()
        # Of layers that share a tensor, the first one's stage owns it.
        for number in reversed(range(len(self.layers))):
            for tensor in (*(x for _, x in self.parameters[number]), *self.buffers[number]):
                self.parameter_owners[tensor] = owners(number, 0)

    def renumber(self, numbers: Sequence[int], mailbox: Mailbox) -> None:
        """Gives the stages other numbers: each rank keeps what it has. Every stage calls this
        between two runs, in front of :meth:`place`, when the program between them is released.

        Args:
            numbers: the new number of each stage.
            mailbox: connects the stages under their new numbers.
        """
        mailbox.take_offers(self.mailbox, numbers)
        self.mailbox, self.stage = mailbox, mailbox.stage
        for tensor, owner in self.parameter_owners.items():
            self.parameter_owners[tensor] = numbers[owner]
        for account in self.kept:
            account.renumber(numbers)
        for memory in {account.memory for account in self.kept}:
            memory.renumber(numbers)

    # --- what the first use of a layer awaits ---

    def await_before(self, number: int, wait: Callable[[int], object]) -> None:
        """Makes the next use of a layer at this stage wait: for the update of its weights, or for
        its weights themselves, from another stage or from the host.

        A use is a call of the layer, also between two steps, and an operation on, a read of, or the
        sending of one of its parameters and buffers, by whatever code has it. It is the first that
        waits; who wants the one after to wait, too, calls this again. Other code than steps (hooks
        between two of them, the optimizer, a checkpoint) uses the tensors without the core: who
        calls this sees to that, as :class:`LateUpdates` does, which watches torch's functions.

        Args:
            number: of the layer.
            wait: called once, with this number, before the use: it returns when the layer can be
                used. No step runs in it (tensors are plain), and it may write to the layer's
                tensors, but not call layers; what of torch's modes the step has set is in force.
                What it raises ends the step. Given twice, it is called once.
        """
        self._awaited.setdefault(number, {})[wait] = None

    @property
    def awaits(self) -> bool:
        """Whether the use of any layer has to wait."""
        return bool(self._awaited)

    def before_layer(self, number: int) -> None:
        """Called before a layer is used at this stage: see :meth:`await_before`."""
        with run_by(None), without_torch_function_of_subclasses():
            for wait in self._awaited.pop(number, ()):
                wait(number)

    def before_parameter(self, tensor: Tensor) -> None:
        """Called before a parameter or a buffer is used as a value at this stage."""
        for number in self._layers_with.get(tensor, ()):
            self.before_layer(number)

    def shared_state(self) -> list[Tensor]:
        """The buffers that several layers have, or that a stage has written to which does not own
        their layer: not all stages that hold them have the same bytes.
        """
        homes = enumerate(self.buffers)
        away = [
            x
            for at, x in ((at, x) for at, own in homes for x in own)
            if self.parameter_owners[x] != self.owners(at, 0)
        ]
        shared = [x for own in self._shared for x in own.values() if x in self.parameter_owners]
        return list(dict.fromkeys([*shared, *away]))

    def kind_of(self, number: int) -> tuple[int, Watch]:
        """The number of a layer's kind, found again if its settings have changed, and what watches
        its attributes.
        """
        watch, layer, state = self._watches[number], self.layers[number], self.states[number]
        if watch is None or watch.look() or watch.are_parameters_replaced():
            if watch is None:
                watch = self._watches[number] = self.watch(number, layer)
            if self.add_state(number, watch.values):
                return self.kind_of(number)
            self.find_flagged(number)
            self.replaced[number] = tuple(replaced_parameters(layer))
            kind = self.replaced[number], kind_of(layer, self._own[number], state)
            if kind not in self._kinds:
                self._num_kinds += 1
                _put(self._kinds, kind, self._num_kinds, _MOST_KINDS)
            self._kind_numbers[number] = self._kinds[kind]
        return self._kind_numbers[number], watch

    @property
    def kinds(self) -> list[int]:
        """The number of each layer's kind, when it was called last."""
        return list(self._kind_numbers)

    def find_flagged(self, number: int) -> bool:
        """Finds a layer's modules and parameters again; returns whether they are others now."""
        before, now = self.flagged[number], flagged_in(self.layers[number])
        self.flagged[number] = now
        return [list(map(id, each)) for each in before] != [list(map(id, each)) for each in now]

    def watch(self, number: int, layer: nn.Module) -> Watch:
        """What watches the attributes of a layer, or of a copy of it."""
        return Watch(layer, self.states[number], self._shared[number])

    def fake_of(self, number: int) -> nn.Module | None:
        """A fake copy of a layer, or of one of its kind; ``None`` if there can be none."""
        kind, layer = self._kind_numbers[number], self.layers[number]
        if kind not in self._fakes:
            forward, state = self._own[number], self.states[number]
            fake = fake_copy(layer, forward, self.finder.fake_mode, self.device, state)
            _put(self._fakes, kind, fake, _MOST_KINDS)
        fake = self._fakes[kind]
        if fake is not None:
            with without_torch_function_of_subclasses():
                set_flags(flagged_in(fake), flags_of(self.flagged[number]))
        return fake

    def add_state(self, number: int, changed: set[Attribute]) -> bool:
        """Adds to the state of a layer and of those with the same modules; returns whether there
        was anything new.
        """
        new = changed.difference(self.states[number])
        if not new:
            return False
        buffers = {id(self._shared[number].get(attribute)) for attribute in new}
        for at, family in enumerate(self._families):
            more = {name for name, x in self._shared[at].items() if id(x) in buffers}
            if family == self._families[number]:
                more |= new
            if more - set(self.states[at]):
                self.states[at] = sorted(more.union(self.states[at]))
                self._watches[at] = None
        return True

    def keep(
        self, key: Any, contract: Contract | None, name: str, what: object
    ) -> tuple[Contract | None, str, int]:
        """Keeps a contract for other calls.

        Args:
            key: of these calls.
            contract: theirs.
            name: theirs.
            what: what has to be the same on all ranks; it follows from the key.
        """
        known = contract, name, zlib.crc32(repr((name, what)).encode())
        _put(self.contracts, key, known, _MOST_CONTRACTS)
        return known

    def hooked(self, number: int) -> tuple[str, ...]:
        """The names of the modules inside of a layer with hooks that look at what they get or
        return.
        """
        return tuple([name for name, module in self.modules[number] if name and is_heard(module)])

    def foreign(self, number: int, stage: int) -> list[tuple[str, Tensor]]:
        """The parameters of a layer, by name, that another stage owns than that which runs it."""
        found = self._foreign.get((number, stage))
        if found is None:
            owners, named = self.parameter_owners, self.parameters[number]
            found = self._foreign[number, stage] = [
                each for each in named if owners[each[1]] != stage
            ]
        return found

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Context in which layers run at their owners. Outside of it the module is as it was."""
        self._place_forwards()
        # Of the base class, unless another core of this process is in such a context.
        data = Tensor.__dict__.get("data")
        Tensor.data = SeenData()  # type: ignore[assignment]
        try:
            yield
        finally:
            if data is None:
                del Tensor.data
            else:
                Tensor.data = data
            for number in range(len(self.layers)):
                self._restore(number)

    def own_forward(self, layer: nn.Module) -> Any:
        """The forward that user code has given to a layer itself; ``None``: that of its class."""
        return self._own[self.number[layer]]

    def _place_forwards(self) -> None:
        """Puts a forward into each layer that has none of this class: user code may set its own
        between two steps. It replaces the whole call of a compiled layer.
        """
        for number, layer in enumerate(self.layers):
            slot = COMPILED_CALL if layer.__dict__.get(COMPILED_CALL) else "forward"
            own = layer.__dict__.get(slot)
            if not isinstance(own, _PlacedForward):
                self._restore(number)
                self._own[number] = layer.__dict__.get("forward")
                self._replaced[number] = slot, own
                self.forwards[number] = own or self.plain_forward(number, layer)
                self._watches[number] = None
                layer.__dict__[slot] = _PlacedForward(self, layer)

    def own_hooks(self, number: int) -> tuple[int, ...]:
        """Identifies the hooks that an owner runs with a layer."""
        if self._replaced[number][0] == "forward":
            return ()
        return tuple(
            id(hook) for table in hook_tables(self.layers[number]) for hook in table.values()
        )

    def plain_forward(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        """What an owner runs of a layer, not compiled; or the same of a copy of the layer."""
        if self._replaced[number][0] == "forward":
            return layer.forward
        set_hook_tables(layer, hook_tables(self.layers[number]))
        return plain_call(layer)

    def _restore(self, number: int) -> None:
        attributes, (slot, own) = self.layers[number].__dict__, self._replaced[number]
        if isinstance(attributes.get(slot), _PlacedForward):
            del attributes[slot]
            if own is not None:
                attributes[slot] = own

    @contextmanager
    def seeing_parameters(self) -> Iterator[None]:
        """Context of code that may use parameters as values: in it these have another class."""
        if self.sees_parameters:
            yield
            return
        self._place_forwards()
        placed = {*self.module.parameters(), *self.parameter_owners}
        self._classes = classes = {tensor: type(tensor) for tensor in placed}
        # As it is in the class: bound to the class, it would call no subclass's forward.
        before = torch.autograd.Function.__dict__["apply"]
        for tensor, cls in classes.items():
            # A class is faster to look at: `isinstance` is torch's own for parameters.
            is_parameter = cls is nn.Parameter or isinstance(tensor, nn.Parameter)
            tensor.__class__ = StepParameter if is_parameter else StepBuffer
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
        torch.cond, condition = _chosen, torch.cond
        self.sees_parameters = True
        try:
            with checkpointing_by(_recomputing), backward_hooks_by(_hook_backward):
                yield
        finally:
            self.sees_parameters = False
            torch.autograd.Function.apply = before  # type: ignore[method-assign]
            torch.cond = condition
            for tensor, cls in classes.items():
                tensor.__class__ = cls

    @contextmanager
    def compiling(self, number: int) -> Iterator[None]:
        """Context in which code of a layer may be compiled: its tensors have their own classes."""
        own = [x for _, x in self.parameters[number]] + self.buffers[number]
        classes = [(tensor, type(tensor)) for tensor in own]
        for tensor in own:
            tensor.__class__ = self._classes.get(tensor, type(tensor))
        try:
            with self.unwatched(), with_compiling():
                yield
        finally:
            for tensor, cls in classes:
                tensor.__class__ = cls

    def is_in_layer(self, tensor: Tensor) -> bool:
        """Whether a plain tensor of this stage shares its memory with a parameter or a buffer of a
        layer.
        """
        if self._memories is None:
            named = (x for each in self.parameters for _, x in each)
            held = (*named, *(x for each in self.buffers for x in each))
            self._memories = {storage_key_of(x) for x in held if not x.is_meta}
        return storage_key_of(tensor) in self._memories

    def begin(self, num_under_way: int = 0, num_ahead: int = 1) -> None:
        """Begins a run of microbatches. Every stage calls this.

        Args:
            num_under_way: how many runs before it may not be over, here or on another stage.
            num_ahead: how many runs a stage may be ahead of another one, besides. By default, code
                behind a run may still run elsewhere.
        """
        self._memories = None
        self.called.clear()
        self.num_steps += 1
        self.mailbox.forget(self.num_steps - num_under_way - num_ahead)
        if not num_under_way:
            self.mailbox.pass_phase()
            self.switched.clear()

    @contextmanager
    def trained_as(self, flags: dict[Tensor, bool]) -> Iterator[None]:
        """Context in which parameters need a gradient, or not, as they did behind a microbatch's
        step: until its backward, other steps may have frozen or thawed them.
        """
        now = {parameter: parameter.requires_grad for parameter in self.switched}
        for parameter, before in self.switched.items():
            parameter.requires_grad_(flags.get(parameter, before))
        try:
            yield
        finally:
            for parameter, flag in now.items():
                parameter.requires_grad_(flag)

    def end(self, microbatches: Sequence[Microbatch]) -> None:
        """Ends a run; its microbatches are in their order.

        Raises:
            LayerError: another stage sent what this one never asked for.
        """
        for microbatch in microbatches:
            self.note(microbatch)
        self.mailbox.pass_phase()
        self.mailbox.finish(self.num_steps)

    def note(self, program: Microbatch) -> None:
        """Adds the digest of a program that has run to that of all runs."""
        self.digest = (self.digest * 31 + program.digest) & DIGEST_MASK
        self.last = program.last

    def held(self) -> dict[str, Tensor]:
        """The parameters that this stage holds, by name. Those that nothing has used so far are
        placed at stage 0, for good; so every stage calls this at the same time.
        """
        self.all_parameters()
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if self.parameter_owners[parameter] == self.stage
        }

    def place_parameters(self, parameters: Sequence[Tensor], values: Sequence[int]) -> None:
        """Places parameters outside of layers where an operation uses them first.

        Args:
            parameters: of the operation.
            values: the owners of its values.
        """
        for parameter in parameters:
            self.parameter_owners.setdefault(parameter, max(values, default=0))

    def writes_to(self, tensor: Tensor) -> None:
        """Notes that an operation has given a parameter or a buffer of a layer other bytes at its
        owner.
        """
        self.written.add(tensor)
        self._memories = None

    def all_parameters(self) -> list[Tensor]:
        """The parameters of all stages."""
        self.place_parameters(list(self.module.parameters()), ())
        return [x for x in self.parameter_owners if isinstance(x, nn.Parameter)]

    def move_buffer(self, buffer: Tensor, stage: int, held: Tensor | None) -> None:
        """Makes a stage the owner of a buffer that it has written to; ``held``: there, what it has
        written.
        """
        self.parameter_owners[buffer] = stage
        if held is not None and held is not buffer:
            # A backward may have saved it: in a plain loop, too, that would find it changed.
            plain = without_torch_function_of_subclasses()
            with plain, preserved_version_counters([buffer]), torch.no_grad():
                buffer.copy_(held)


def _put(table: dict[Any, Any], key: Any, x: Any, most: int) -> None:
    """Adds to a table of limited size."""
    if len(table) >= most:
        del table[next(iter(table))]
    table[key] = x


class _PlacedForward:
    """The ``forward`` of a layer that its owner runs."""

    # Without a `__dict__`, in the arguments of a call, it is no object with tensors in it.
    __slots__ = ("_core", "_layer", "_number")

    def __init__(self, core: Core, layer: nn.Module) -> None:
        self._core, self._layer, self._number = core, layer, core.number[layer]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        core, number = self._core, self._number
        microbatch = running()
        if microbatch is not None:
            assert isinstance(microbatch, Microbatch)
            if microbatch.turn == OUTSIDE and self._averages((*args, *kwargs.values())):
                return core.forwards[number](*args, **kwargs)
            if core.sees_parameters:
                return microbatch.layer(number, args, kwargs)
            with core.seeing_parameters():
                return microbatch.layer(number, args, kwargs)
        is_elsewhere = core.owners(number, 0) != core.stage
        # On fake tensors an operation could not use the layer's weights, which one stage has.
        if core.finder.is_running or (core.operation is not None and is_elsewhere):
            raise LayerError(
                f"`{core.operation}` calls the layer `{core.names[number]}`, which stage"
                f" {core.owners(number, 0)} owns, and runs at stage {core.stage}. Make the module"
                " that contains both one layer."
            )
        return core.forwards[number](*args, **kwargs)

    def _averages(self, given: Iterable[Any]) -> bool:
        """Whether a call between steps is a part of the code there: of a module that has no
        parameters and is given others. Each stage works on what it has of them.
        """
        is_given = any(isinstance(x, nn.Module) for x in given)
        return is_given and not self._core.parameters[self._number]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For a copy of the layer: its own forward."""
        own = self._core.own_forward(self._layer)
        if own is not None:
            return copy.deepcopy(own, memo)
        copied = memo.get(id(self._layer))
        return self if copied is None else MethodType(type(copied).forward, copied)


_cond = torch.cond


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``autograd.Function.apply``: with values, one operation. Torch asks no subclass there."""
    microbatch = running()
    recomputing = _recomputing() if cls is CheckpointFunction else None
    if recomputing is not None:
        function, _preserves, *rest = args
        with recomputing:
            return function(*rest)
    if microbatch is None or not any(type(x) in PLACED for x in args):
        return _Applied(cls)(*args, **kwargs)
    return microbatch.operation(_Applied(cls), args, kwargs)


def _chosen(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """``torch.cond``, which compiles its functions: between layers its predicate is read."""
    if running() is None:
        return _cond(pred, true_fn, false_fn, operands)
    return (true_fn if pred else false_fn)(*operands)


def _hook_backward(module: nn.Module, *hooks: Any) -> Any:
    """What is put around the call of a module for the hooks on its backward."""
    found, microbatch = BackwardHook(module, *hooks), running()
    if not isinstance(microbatch, Microbatch):
        return found
    number = microbatch.core.number.get(module)
    if number is None:
        raise LayerError(
            f"`{type(module).__name__}` has a hook on its backward, and several layers in it: their"
            " gradients are at several stages. Register the hook on its layers, or on a tensor"
            " between them (`x.register_hook`)."
        )
    microbatch.core.backward_hooks[number] = found
    return NoBackwardHook()


def _recomputing() -> AbstractContextManager[None] | None:
    """What ``torch.utils.checkpoint`` does where the user's step calls it: the layers in it are
    recomputed, each at its stage. ``None`` inside of a layer.
    """
    microbatch = running()
    return microbatch.recomputing() if isinstance(microbatch, Microbatch) else None


def _keep_undefined(result: Any) -> None:
    """Makes a function's backward give no gradients if it gets none. Torch does not call it then:
    but the gradient of a value that another stage uses comes even if it is not defined. The
    function would get zeros instead, and parameters before it a gradient.
    """
    outputs = result if isinstance(result, tuple) else (result,)
    nodes = [x.grad_fn for x in outputs if isinstance(x, Tensor)]
    own = [x for x in nodes if isinstance(x, torch.autograd.function.BackwardCFunction)]
    if not own:
        return
    is_defined = [True]

    def before(gradients: Any) -> None:
        is_defined[0] = any(x is not None for x in gradients)

    def after(gradients: Any, _: Any) -> Any:
        return None if is_defined[0] else (None,) * len(gradients)

    node: Any = own[0]
    node.register_prehook(before)
    node.register_hook(after)


class _Applied:
    """A user's autograd function as an operation; equal for equal classes."""

    def __init__(self, cls: Any) -> None:
        self._cls, self.__name__ = cls, f"{cls.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = apply_function.__get__(None, self._cls)(*args, **kwargs)
        _keep_undefined(result)
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Applied) and other._cls is self._cls

    def __hash__(self) -> int:
        return hash(self._cls)
