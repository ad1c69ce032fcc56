"""The layers of a module, their owners, and what all microbatches on this rank share."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.module_private import BackwardHook
from lightning_pipeshift.compat.torch_private import (
    preserved_version_counters,
    storage_key_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.devices.properties import generators_of
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.values.account import Account, Memory
from lightning_pipeshift.values.aliases import Aliases
from lightning_pipeshift.values.calls import CallWatch
from lightning_pipeshift.values.contract_finder import ContractFinder
from lightning_pipeshift.values.interception import data_intercepted, functions_intercepted
from lightning_pipeshift.values.known_calls import KnownCalls
from lightning_pipeshift.values.layer_state import shared_buffers
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.placed_layer import PlacedLayer
from lightning_pipeshift.values.program import DIGEST_MASK
from lightning_pipeshift.values.value import StepBuffer, StepParameter, run_by

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
        self.number = {layer: at for at, layer in enumerate(self.layers)}
        names = {each: name for name, each in module.named_modules()}
        self.names = [names[layer] for layer in self.layers]
        self.placed_layers = [
            PlacedLayer(layer, at, name)
            for at, (layer, name) in enumerate(zip(self.layers, self.names, strict=True))
        ]
        for placed, shared in zip(self.placed_layers, shared_buffers(self.layers), strict=True):
            placed.shared = shared
        self.known = KnownCalls(self.placed_layers)
        self.parameters = [layer.parameters for layer in self.placed_layers]
        self.buffers = [layer.buffers for layer in self.placed_layers]
        self.switched: dict[Tensor, bool] = {}
        """The parameters that steps of this run have frozen or thawed, and whether they were
        trained before."""
        self.parameter_owners: dict[Tensor, int] = {}
        """The stages that hold the parameters, and the buffers of layers; a parameter outside of
        layers gets its stage at its first use."""
        self.layers_with: dict[Tensor, list[int]] = {}
        """The numbers of the layers that have a parameter or a buffer."""
        for layer in self.placed_layers:
            for tensor in layer.tensors:
                self.layers_with.setdefault(tensor, []).append(layer.number)
        self.groups = _groups(self.layers_with, len(self.layers))
        """A number for each layer; layers that share a parameter have the same."""
        self.awaited: dict[int, dict[Callable[[int], object], None]] = {}
        """What the next use of a layer awaits, by its number: see :meth:`await_before`."""
        self.chunks: dict[int, int] = {}
        """Of this stage's layers: those that follow each other have one number."""
        self.place(owners)
        self.holders = holders
        self.written: set[Tensor] = set()
        """The parameters that steps have written to: only their owners have the new bytes."""
        self.parameter_numbers = {
            tensor: at for at, tensor in enumerate((*module.parameters(), *self.parameter_owners))
        }
        self.views: weakref.WeakSet[Account] = weakref.WeakSet()
        """Of the values that have the memory of a parameter or a buffer (`x.data`): user code may
        keep them."""
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
        # The parameters and buffers, and the classes that they have in steps: found once in a run.
        self._placed: list[tuple[Tensor, type]] = []
        # The classes that they have elsewhere, and the same by tensor if anything asks for it.
        self._classes: list[tuple[Tensor, type]] = []
        self._own_classes: dict[Tensor, type] = {}
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
        # Buffers that user code has replaced, and may still have.
        self._former: list[Tensor] = []
        self.unwatched: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context of code in which no one watches attributes of modules."""
        self.calls: CallWatch | None = None
        """Is told of all calls."""
        self.gates: Sequence[NamedLayer] = ()
        """The layers by their numbers, if their weights may be elsewhere while they wait."""
        self.computes = False
        """Whether the action that runs now has computed since it began, or waited last: a forward
        may only send and wait."""
        self.aliases = Aliases()
        """Finds the common tensors with the memory of one that becomes a value."""
        self.operation: str | None = None
        """The operation that runs at this stage now."""

    def learn_from(self, other: Core) -> None:
        """Takes what another core of the same layers, in any order, knows of calls."""
        self.known.learn_from(other.known)
        self.finder.fake_mode = other.finder.fake_mode

    def place(self, owners: Owners) -> None:
        """Changes the owners of layers. Every stage calls this between two runs, when the tensors
        of these layers are where the new owners are.
        """
        self.owners = owners
        self.chunks = _chunks([owners(layer.number, 0) for layer in self.placed_layers], self.stage)
        for layer in self.placed_layers:
            layer.forget_owners()
        # Of layers that share a tensor, the first one's stage owns it.
        for layer in reversed(self.placed_layers):
            for tensor in layer.tensors:
                self.parameter_owners[tensor] = owners(layer.number, 0)

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
        self.awaited.setdefault(number, {})[wait] = None

    def before_layer(self, number: int) -> None:
        """Called before a layer is used at this stage: see :meth:`await_before`."""
        with run_by(None), without_torch_function_of_subclasses():
            for wait in self.awaited.pop(number, ()):
                wait(number)

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
        shared = [x for layer in self.placed_layers for x in layer.shared.values()]
        return list(dict.fromkeys([*shared, *away]))

    @property
    def kinds(self) -> list[int]:
        """The number of each layer's kind, when it was called last."""
        return [layer.kind for layer in self.placed_layers]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Context in which layers run at their owners. Outside of it the module is as it was."""
        self._place_layers()
        with ExitStack() as stack:
            for layer in self.placed_layers:
                stack.callback(layer.restore)
            stack.enter_context(data_intercepted())
            yield

    def _take_replaced_buffers(self) -> None:
        """A tensor that user code has put in the place of a layer's buffer is a buffer from now on:
        its owner alone has the bytes that the layer writes to it. Every stage calls this at the
        same place of the program.
        """
        for layer in self.placed_layers:
            for before, now in layer.replaced_buffers():
                if now in self.parameter_owners:
                    continue
                self.parameter_owners[now] = self.owners(layer.number, 0)
                self.layers_with[now] = [layer.number]
                self.parameter_numbers[now] = 1 + max(self.parameter_numbers.values())
                self._placed, self._memories = [], None
                self._former.append(before)
        if self._former:
            self._forget_former()

    def _forget_former(self) -> None:
        """Forgets the buffers that were replaced and that nothing else has any more."""
        tables: Any = self.parameter_owners, self.layers_with, self.parameter_numbers
        held = {id(x) for layer in self.placed_layers for x in layer.buffers}
        kept: list[Tensor] = []
        while self._former:
            buffer = self._former.pop()
            # The tables have it, this function, and the call that counts.
            if id(buffer) in held or sys.getrefcount(buffer) > len(tables) + 2:
                kept.append(buffer)
                continue
            for table in tables:
                table.pop(buffer, None)
        self._former = kept

    def _place_layers(self) -> None:
        for layer in self.placed_layers:
            layer.place(self)

    @contextmanager
    def seeing_parameters(self) -> Iterator[None]:
        """Context of code that may use parameters as values: in it these have another class."""
        if self.sees_parameters:
            yield
            return
        self._place_layers()
        if not self._placed:
            placed = {*self.own_parameters(), *self.parameter_owners}
            self._placed = [
                (x, StepParameter if isinstance(x, nn.Parameter) else StepBuffer) for x in placed
            ]
        # A move has changed some, perhaps.
        self._classes = classes = [(tensor, type(tensor)) for tensor, _ in self._placed]
        self._own_classes = {}
        for tensor, cls in self._placed:
            tensor.__class__ = cls
        self.sees_parameters = True
        try:
            with functions_intercepted():
                yield
        finally:
            self.sees_parameters = False
            for tensor, cls in classes:
                tensor.__class__ = cls
            self._take_replaced_buffers()

    @property
    def own_classes(self) -> dict[Tensor, type]:
        """The classes that parameters and buffers have outside of steps."""
        if len(self._own_classes) != len(self._classes):
            self._own_classes = dict(self._classes)
        return self._own_classes

    def is_in_layer(self, tensor: Tensor) -> bool:
        """Whether a plain tensor of this stage shares its memory with a parameter or a buffer of a
        layer.
        """
        if self._memories is None:
            held = (x for layer in self.placed_layers for x in layer.tensors)
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
        self._placed = []
        self._take_replaced_buffers()
        self.changed()
        self.called.clear()
        self.num_steps += 1
        self.mailbox.forget(self.num_steps - num_under_way - num_ahead)
        if not num_under_way:
            self.mailbox.pass_phase()
            self.switched.clear()

    def changed(self, tensors: Sequence[Tensor] | None = None, but: Memory | None = None) -> None:
        """Parameters have changed, by an optimizer or in another program: copies at other stages of
        what user code keeps of their memory are old. Every stage calls this.

        Args:
            tensors: the parameters; ``None``: any.
            but: the memory that is known to have changed.
        """
        for account in self.views:
            memory = account.memory
            if memory is not but and (tensors is None or any(memory.of is x for x in tensors)):
                memory.write(account.owner)

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

    def own_parameters(self) -> list[Tensor]:
        """The module's parameters, without those of copies that it has got since the run began."""
        return [x for x in self.module.parameters() if x in self.parameter_numbers]

    def all_parameters(self) -> list[Tensor]:
        """The parameters of all stages."""
        self.place_parameters(self.own_parameters(), ())
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


def _groups(layers_with: dict[Tensor, list[int]], num_layers: int) -> list[int]:
    found = list(range(num_layers))
    for numbers in layers_with.values():
        joined = {found[number] for number in numbers}
        if len(joined) > 1:
            found = [min(joined) if each in joined else each for each in found]
    return found


def _chunks(owners: Sequence[int], stage: int) -> dict[int, int]:
    """The chunk of each of a stage's layers: those that follow each other are one."""
    found: dict[int, int] = {}
    count = 0
    for number, owner in enumerate(owners):
        if owner == stage:
            count += number - 1 not in found
            found[number] = count - 1
    return found
