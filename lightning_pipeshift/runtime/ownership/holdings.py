"""The tensors that a stage holds: the parameters and buffers of its own layers, the shared ones,
and their gradients.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import (
    buffers_of,
    storage_key,
    storage_key_of,
    version_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.transfer import to_host
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.parameters.gradients import added, is_alone
from lightning_pipeshift.model.parameters.remote_tensor import RemoteTensor, set_owner_lookup, swap
from lightning_pipeshift.model.parameters.uses import (
    ParameterUse,
    flat_weights_forgotten,
    give_gradient,
    hold,
    release,
    slots_of,
    state_to_send,
    take_other_state,
)
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.lane import Lane, Sent
from lightning_pipeshift.runtime.ownership.user_copies import (
    CopyFinder,
    exchange,
    kept_by_user,
    nowhere,
)

log = logging.getLogger(__name__)

_CLIPPED_NORM = 2.0


class Holdings:
    """The parameters and buffers of one stage.

    Args:
        root: the LightningModule.
        uses: all its parameters.
        layers: its layers, in call order.
        stage_of: the stage of each layer.
        channels: the stage's connections.
        of_user_code: the identities of modules inside of layers whose buffers every stage holds.
        in_steps: the paths of the tensors of user code that every stage keeps, since steps use
            them.
    """

    def __init__(
        self,
        root: nn.Module,
        uses: list[ParameterUse],
        layers: Sequence[nn.Module],
        stage_of: list[int],
        channels: Channels,
        of_user_code: Collection[int] = (),
        in_steps: Collection[str] = (),
    ) -> None:
        self._in_steps = in_steps
        self.uses = uses
        self.root = root
        self.channels = channels
        self.device = channels.device
        self._modules = list(layers)
        self._of_user_code = frozenset(of_user_code)
        self._has_let_go = False
        self._aliases: dict[int, list[Tensor]] | None = None
        # By memory: the original's name.
        self._copies: dict[int, str] | None = None
        # The smallest number of elements of a parameter or buffer, by whether it is of a floating
        # type.
        self._smallest = {
            is_float: min(
                (
                    tensor.numel()
                    for tensors in (root.parameters(), root.buffers())
                    for tensor in tensors
                    if tensor.is_floating_point() is is_float
                ),
                default=sys.maxsize,
            )
            for is_float in (True, False)
        }
        # By identity of a parameter held on another stage: the gradient that user code sees.
        self._shown: dict[int, Tensor] = {}
        self._are_shown = False
        self._holders: dict[int, list[int]] = {}
        self._posted: dict[tuple[str, int], list[Sent]] = {}
        """By parameter and stage, the gradients of shared parameters on their way there."""
        self._are_summed = False
        self.held: list[ParameterUse] = []
        self.state_on_host: frozenset[int] = frozenset()
        """The identities of parameters whose optimizer state is in host memory between steps."""
        self.is_common: Callable[[Tensor], bool] | None = None
        """Whether every stage has a buffer of a layer; ``None``: only the layer's owner has."""
        self.sums_shared = True
        """Whether stages add up the gradients of the parameters that they share."""
        self.shared: list[ParameterUse] = []
        """The parameters held here whose gradients stages add up."""
        self._norms: dict[int, _Norm] = {}
        self.place(stage_of)
        self._fresh: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._withdrawn: list[tuple[nn.Parameter, Tensor]] = []
        self._replaces = self._adds = False

    @property
    def stage(self) -> int:
        """This stage."""
        return self.channels.stage

    def is_known(self, parameter: nn.Parameter) -> bool:
        """Whether the model had the parameter when its layers were distributed."""
        return id(parameter) in self._holders

    def place(self, stage_of: Sequence[int], keeps_old: bool = False) -> None:
        """Sets the stage of each layer, without moving anything.

        Args:
            stage_of: the stage of each layer.
            keeps_old: whether the stage also goes on using what it holds now, until it is placed
                again: minibatches that run under the old placement need it.
        """
        before = self._holders if keeps_old else {}
        self.layers = list(zip(self._modules, stage_of, strict=True))
        # The stages that hold a parameter, lowest first, by the parameter's identity.
        self._holders = {
            id(use.parameter): holders
            for use, holders in zip(self.uses, self.all_holders(stage_of), strict=False)
        }
        self.held = [
            use
            for use in self.uses
            if self.stage in (*self._holders[id(use.parameter)], *before.get(id(use.parameter), ()))
        ]
        self.shared = [use for use in self.held if use.is_shared and self.sums_shared]
        number_of = {id(use.parameter): number for number, use in enumerate(self.uses)}
        # Under all names, those of tied parameters too.
        self._use_named = {
            name: number_of[id(parameter)]
            for name, parameter in self.root.named_parameters(remove_duplicate=False)
            if id(parameter) in number_of
        }
        index_of = {id(layer): index for index, layer in enumerate(self._modules)}
        self._layer_named = {
            f"{name}.": index_of[id(module)]
            for name, module in self.root.named_modules(remove_duplicate=False)
            if id(module) in index_of
        }

    def knows(self, value: Any) -> bool:
        """Whether a value is one of the model's parameters."""
        return id(value) in self._holders

    def holders_of(self, parameter: Tensor) -> list[int]:
        """The stages that hold a parameter, lowest first; all stages, if it was added later."""
        return self._holders.get(id(parameter), list(range(self.channels.num_stages)))

    def _buffers(self) -> list[tuple[Tensor, bool]]:
        """The buffers that the model has now (a layer may replace its own at any time), and whether
        this stage holds each. One that several layers refer to is held by the stages of all.
        """
        inside: dict[int, tuple[Tensor, bool]] = {}
        for layer, stage in self.layers:
            for module in layer.modules():
                is_here = stage == self.stage or self.is_of_user_code(module)
                for buffer in buffers_of(module).values():
                    if buffer is not None:
                        _, is_held = inside.get(id(buffer), (buffer, False))
                        is_common = self.is_common is not None and self.is_common(buffer)
                        inside[id(buffer)] = (buffer, is_held or is_here or is_common)
        outside = {id(buffer): (buffer, True) for buffer in self.root.buffers()}
        return list((outside | inside).values())

    def _tensors(self) -> list[tuple[Tensor, bool]]:
        """All parameters and buffers, and whether this stage holds each."""
        parameters: list[tuple[Tensor, bool]] = [
            (use.parameter, self.stage in self.holders_of(use.parameter)) for use in self.uses
        ]
        return parameters + self._buffers()

    # --- tensors on other stages ---

    def stages_of(self, names: Collection[str], stage_of: Sequence[int] | None = None) -> set[int]:
        """The stages that hold all of these parameters and buffers.

        Args:
            names: as in the whole model; a name that it does not have counts as held by all stages.
            stage_of: the stage of each layer, if it differs from the present one.
        """
        stages = [stage for _, stage in self.layers] if stage_of is None else list(stage_of)
        found = set(range(self.channels.num_stages))
        for name in names:
            number = self._use_named.get(name)
            if number is not None:
                found &= set(self.uses[number].holders(stages, self.channels.num_stages))
                continue
            for prefix, layer in self._layer_named.items():
                if name.startswith(prefix):
                    found &= {stages[layer]}
        return found

    @property
    def copied_layers(self) -> dict[int, str]:
        """The layers of which user code keeps copies outside the model, each with the name of a
        parameter or buffer that it has copied. The same on every stage.
        """
        found: dict[int, str] = {}
        for _, name in self._found_copies():
            number = self._use_named.get(name)
            layers = self.uses[number].layers if number is not None else ()
            for prefix, layer in self._layer_named.items():
                if layer in layers or name.startswith(prefix):
                    found.setdefault(layer, name)
        return found

    def is_of_user_code(self, module: nn.Module) -> bool:
        """Whether a module belongs to user code, which keeps its buffers on every stage."""
        return id(module) in self._of_user_code

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a parameter, gradient or layer's buffer of this
        stage.
        """
        memory = storage_key_of(tensor)
        own: list[Tensor | None] = []
        for use in self.uses:
            own += [use.parameter, use.parameter.grad]
        for layer, _ in self.layers:
            for module in layer.modules():
                if not self.is_of_user_code(module):
                    own += buffers_of(module).values()
        return any(one is not None and storage_key_of(one) == memory for one in own)

    def aliases(self, tensor: Tensor, afresh: bool = False) -> list[Tensor]:
        """The tensors kept by user code that have the same memory.

        Args:
            tensor: its memory is compared.
            afresh: whether to search again, instead of once in a step.
        """
        if self._aliases is None or afresh:
            self._aliases = {}
            for kept in self._kept().values():
                memory = storage_key_of(kept)
                self._aliases.setdefault(memory, []).append(kept)
        return self._aliases.get(storage_key_of(tensor), [])

    def copied(self, tensor: Tensor) -> str | None:
        """The name of the parameter or buffer of which user code keeps a copy in this tensor's
        memory, or ``None``.
        """
        storage = tensor.untyped_storage()
        # Averages of all kinds mix in counters and weights in every step: these are too small to be
        # copies.
        num_elements = storage.nbytes() // tensor.element_size()
        if num_elements < self._smallest[tensor.is_floating_point()]:
            return None
        memory = storage_key(storage)
        if self._copies is not None and memory not in self._copies:
            return None
        # Searched once in a step, and again for memory that may have been reused for another
        # tensor.
        self._copies = {
            storage_key_of(copy): name for copy, name in self._found_copies() if not copy.is_meta
        }
        return self._copies.get(memory)

    def _found_copies(self) -> Iterator[tuple[Tensor, str]]:
        originals = CopyFinder(self.root)
        for node in kept_by_user(self.root, self._own()):
            yield from originals.of(node.value)

    def _own(self) -> set[int]:
        """The identities of the model's parameters, and of the other tensors of its layers."""
        own = {id(use.parameter) for use in self.uses}
        for layer, _ in self.layers:
            for module in layer.modules():
                if not self.is_of_user_code(module):
                    own.update(map(id, buffers_of(module).values()))
        return own

    def _kept(self) -> dict[str, Tensor]:
        """The tensors that user code keeps, by path."""
        nodes = kept_by_user(self.root, self._own())
        return {node.path: node.value for node in nodes if isinstance(node.value, Tensor)}

    def _changing_kept(self) -> AbstractContextManager[None]:
        """Context in which tensors kept by user code may change their memory."""
        nodes = kept_by_user(self.root, self._own())
        modules = [node.value for node in nodes if isinstance(node.value, nn.RNNBase)]
        return flat_weights_forgotten(*modules)

    def _let_go_of_copies(self) -> None:
        """Drops the copies that user code made while the whole model was here, except copies of
        tensors that this stage holds: values computed from copies are computed on the stages of the
        originals.
        """
        kept = self._kept()
        in_steps = {id(x) for path, x in kept.items() if path in self._in_steps}
        for tensor, name in self._found_copies():
            if (
                id(tensor) in in_steps
                or tensor.is_meta
                or self.stage in self.stages_of([name])
                or self.is_held(tensor)
            ):
                continue
            try:
                swap(tensor, RemoteTensor.like(tensor, [name]))
            except RuntimeError as error:
                log.warning("PipeShift: a copy of %s remains on this stage: %s", name, error)

    def pass_copies_on(self, stage_of: Sequence[int]) -> bool:
        """Sends the copies of parameters that user code keeps to the stages that will hold these
        parameters, and drops them on all others. Every stage calls this.

        Args:
            stage_of: the new stage of each layer.

        Returns:
            whether there are any; the same on every stage.
        """
        kept = self._kept()
        found = exchange(self.channels, kept, lambda names: self.stages_of(names, stage_of))
        if not found.asked:
            return False
        with torch.no_grad(), self._changing_kept():
            for path, what in found.asked.items():
                tensor = kept.get(path)
                if tensor is None:
                    continue
                stages = self.stages_of(what.computed_from, stage_of)
                is_elsewhere = what.computed_from and stages and self.stage not in stages
                if path in found.received:
                    hold(tensor, found.received[path])
                elif is_elsewhere and not tensor.is_meta:
                    swap(tensor, RemoteTensor.like(tensor, what.computed_from))
        return True

    # --- where the values are stored ---

    def obtain(self, deferred: DeferredInit) -> None:
        """Gets the values that this stage is to hold and lacks: from a stage that has them from an
        earlier run, or by initialising them. Every stage calls this.

        Raises:
            LayerError: no stage has them, and it is not known how to initialise them.
        """
        with torch.no_grad(), flat_weights_forgotten(self.root):
            self._fetch(deferred)
            for tensor, is_held in self._tensors():
                if is_held and deferred.knows(tensor):
                    hold(tensor, deferred.values(tensor))
            self.pass_copies_on([stage for _, stage in self.layers])

    def _fetch(self, deferred: DeferredInit) -> None:
        channels = self.channels

        def is_lacking(tensor: Tensor) -> bool:
            return tensor.is_meta and not deferred.knows(tensor)

        parameters = [use.parameter for use in self.uses]
        lacking = [is_lacking(parameter) for parameter in parameters]
        for layer, _ in self.layers:
            lacking.append(any(map(is_lacking, [*layer.parameters(), *layer.buffers()])))
        there = torch.zeros(channels.num_stages, len(lacking))
        there[self.stage] = 1 - torch.tensor(lacking, dtype=torch.float32)
        # Each entry is one stage's value plus zeros.
        there = channels.sum(there.flatten()).view_as(there)
        for number, stages in enumerate(self.all_holders()):
            targets = [stage for stage in stages if not there[stage, number]]
            if not targets:
                continue
            sources = there[:, number].nonzero().flatten().tolist()
            if not sources:
                name = self.uses[number].name if number < len(parameters) else "a layer's buffer"
                raise LayerError(
                    f"No stage has the values of {name}: it is on the meta device everywhere, and "
                    "was not created in `configure_model`. Make the whole model there, or give "
                    "every parameter values in `__init__`."
                )
            for to in targets:
                self._pass(number, sources[0], to)

    def all_holders(self, stage_of: Sequence[int] | None = None) -> list[list[int]]:
        """The stages that hold each parameter, and then those that hold each layer's other state.

        Args:
            stage_of: the stage of each layer, if it differs from the present one.
        """
        stages = [stage for _, stage in self.layers] if stage_of is None else list(stage_of)
        holders = [use.holders(stages, self.channels.num_stages) for use in self.uses]
        return holders + [[stage] for stage in stages]

    def _pass(self, number: int, source: int, to: int) -> None:
        """Sends one entry of the list of :meth:`all_holders` to another stage."""
        channels = self.channels
        if number < len(self.uses):
            parameter = self.uses[number].parameter
            if self.stage == source:
                channels.send_tensor(parameter, to)
            elif self.stage == to:
                hold(parameter, channels.receive_tensor(parameter, source))
            return
        layer, _ = self.layers[number - len(self.uses)]
        if self.stage == source:
            channels.send_values(state_to_send(layer), to)
        elif self.stage == to:
            take_other_state(layer, dict(channels.receive_values(source)))

    def state_of(self, layer: nn.Module) -> dict[tuple[str, str], Any]:
        """A layer's state other than parameters, as far as only its owner has it."""
        state, is_common = state_to_send(layer), self.is_common
        if is_common is None:
            return state
        # Every stage has the attributes that a module's extra state is made of.
        return {path: x for path, x in state.items() if path[1] and (x is None or not is_common(x))}

    def settle(self, optimizers: Iterable[Optimizer], final: bool, deferred: DeferredInit) -> None:
        """Moves the tensors that this stage holds to its device; with ``final``, frees the
        others.
        """
        device = self.channels.device
        names = {id(use.parameter): use.name for use in self.uses}
        names |= {id(buffer): name for name, buffer in self.root.named_buffers()}
        with torch.no_grad(), flat_weights_forgotten(self.root):
            for tensor, is_held in self._tensors():
                if is_held:
                    if tensor.device != device and not tensor.is_meta:
                        tensor.data = tensor.data.to(device)
                elif final:
                    self._release(tensor, names[id(tensor)])
        if final:
            set_owner_lookup(self)
            if self.channels.num_stages > 1 and not self._has_let_go:
                self._has_let_go = True
                with torch.no_grad(), self._changing_kept():
                    self._let_go_of_copies()
            for optimizer in optimizers:
                for parameter in list(optimizer.state):
                    if self.stage not in self.holders_of(parameter):
                        del optimizer.state[parameter]
                # State restored from a checkpoint, or made by the optimizer's constructor.
                optimizer_to_device(optimizer, device, deferred, self.state_on_host)

    def _release(self, tensor: Tensor, name: str) -> None:
        try:
            release(tensor, name)
        except RuntimeError as error:
            # Torch refuses while there is a weak reference to the tensor. That only costs memory.
            log.warning("PipeShift: a tensor of another stage remains here: %s", error)

    def make_whole(self) -> None:
        """Gives every stage the whole model again, on the CPU, one tensor at a time. Every stage
        calls this.
        """
        with torch.no_grad(), flat_weights_forgotten(self.root):
            for number, holders in enumerate(self.all_holders()):
                for to in range(self.channels.num_stages):
                    if to not in holders:
                        self._pass(number, holders[0], to)
            kept = self._kept()
            everywhere = set(range(self.channels.num_stages))
            found = exchange(self.channels, kept, lambda _: everywhere)
            with self._changing_kept():
                for path, values in found.received.items():
                    hold(kept[path], values)
        if found.nowhere and self.stage == 0:
            log.warning("PipeShift: %s", nowhere(found.nowhere))
        self.to_cpu()

    def to_cpu(self) -> None:
        """Moves the tensors that this stage holds to the CPU, and stops tracking which stage holds
        which tensor.
        """
        set_owner_lookup(None)
        self._aliases = self._copies = None
        for slot in slots_of(self.root):
            tensor = slot.get()
            if tensor is not None and not tensor.is_meta and tensor.device.type != "cpu":
                tensor.data = tensor.data.cpu()

    def match_shared(self) -> None:
        """Gives every holder of a shared parameter the lowest holder's values. Every stage calls
        this.
        """
        for use in self.uses:
            holders = self.holders_of(use.parameter)
            if not use.is_shared or len(holders) < 2 or self.stage not in holders:
                continue
            if self.stage == holders[0]:
                for to in holders[1:]:
                    self.channels.send_tensor(use.parameter, to)
            else:
                values = self.channels.receive_tensor(use.parameter, holders[0])
                with torch.no_grad():
                    use.parameter.copy_(values)

    # --- gradients ---

    def put_gradient_aside(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Saves a parameter's gradient from before the step, if it arrives during the step."""
        self._aside.append((parameter, gradient))

    def return_gradients_aside(self) -> None:
        """Gives parameters the gradients of :meth:`put_gradient_aside`, before the step begins."""
        for parameter, gradient in self._aside:
            give_gradient(parameter, gradient)
        self._aside = []

    def set_gradients_aside(self, keep: bool, adds: bool = False) -> None:
        """Saves the present gradients, so that the step's own start empty.

        Args:
            keep: whether the present gradients are still needed.
            adds: the step adds its own to them, as a plain loop does: they stay where they are.
        """
        self._aside, self._adds = [], adds
        self._aliases = self._copies = None
        self._are_summed = False
        for use in self.held if not adds else ():
            if use.parameter.grad is not None and keep:
                self._aside.append((use.parameter, use.parameter.grad))
            use.parameter.grad = None

    def collect_gradients(
        self,
        correction: float,
        sum_over_replicas: Callable[[], Collection[nn.Parameter]] | None,
        joins: bool,
    ) -> None:
        """Saves the step's gradients, and restores those from before the step.

        Shared parameters get the sum over all stages. Every stage calls this.

        Args:
            correction: a factor; 0 if the whole step has no weight, so that no gradient remains.
            sum_over_replicas: sums the gradients over the virtual machines, that of a shared
                parameter on its first holder. Returns the parameters whose sums come later.
            joins: whether the sum over the virtual machines covers all steps since the last
                optimizer step; each virtual machine has accumulated these steps itself.
        """
        if not self._are_summed:
            self.sum_shared()
        self._replaces = joins or self._adds
        if joins:
            self._join(correction)
            correction = 1.0
        late: set[int] = set()
        if sum_over_replicas is not None:
            late.update(map(id, sum_over_replicas()))
        self.pass_shared_around()
        self._fresh = {}
        for use in self.held:
            gradient = use.parameter.grad
            if not self._adds:
                use.parameter.grad = None
            if gradient is not None and correction:
                fresh = gradient if correction == 1.0 else gradient.mul_(correction)
                self._fresh[id(use.parameter)] = (use.parameter, fresh)
        held = {id(use.parameter) for use in self.held}
        for parameter, gradient in self._aside:
            if id(parameter) in held and id(parameter) not in late:
                give_gradient(parameter, gradient)
        self._aside = []

    @torch.no_grad()
    def _join(self, correction: float) -> None:
        earlier = {id(parameter): gradient for parameter, gradient in self._aside}
        for use in self.held:
            fresh, before = use.parameter.grad, earlier.get(id(use.parameter))
            fresh = fresh * correction if fresh is not None and correction else None
            if use.is_shared and self._sharers(use.parameter)[0] != self.stage:
                continue
            if before is not None:
                fresh = before.clone() if fresh is None else fresh + before
            give_gradient(use.parameter, fresh)

    def hand_gradients_over(self) -> None:
        """Adds the step's gradients to the parameters' own."""
        self.hide_gradients()
        for parameter, gradient in self._fresh.values():
            if parameter.grad is None or self._replaces:
                give_gradient(parameter, gradient)
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)
        self._fresh = {}

    def withdraw_gradients(self) -> None:
        """Hides the gradients from Lightning and the optimizer, until :meth:`return_gradients`."""
        for use in self.held:
            if use.parameter.grad is not None:
                self._withdrawn.append((use.parameter, use.parameter.grad))
                use.parameter.grad = None

    def drop_gradients(self) -> None:
        """Forgets the gradients, as an optimizer has used them."""
        for use in self.held:
            use.parameter.grad = None

    def return_gradients(self) -> None:
        """Undoes :meth:`withdraw_gradients`."""
        self.hide_gradients()
        for parameter, gradient in self._withdrawn:
            give_gradient(parameter, gradient)
        self._withdrawn = []

    @contextmanager
    def only_gradients(
        self, gradients: Sequence[tuple[nn.Parameter, Tensor]], keeps: bool
    ) -> Iterator[None]:
        """Context in which some parameters have gradients, and no others.

        Args:
            gradients: the parameters that have none now, and their gradients.
            keeps: whether they still have them afterwards.
        """
        self.hide_gradients()
        self.withdraw_gradients()
        for parameter, gradient in gradients:
            give_gradient(parameter, gradient)
        yield
        for parameter, _ in gradients if not keeps else ():
            parameter.grad = None
        for parameter, gradient in self._withdrawn:
            give_gradient(parameter, gradient)
        self._withdrawn = []

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Context in which gradients are shown (:meth:`show_gradients`), and hidden again unless
        they were shown before.
        """
        are_shown = self._are_shown
        try:
            self.show_gradients()
            yield
        finally:
            if not are_shown:
                self.hide_gradients()

    def show_gradients(self) -> None:
        """Gives parameters that are held on other stages a placeholder as their gradient.

        User code that reads gradients must not see ``None`` for those of other stages: it would,
        for example, compute a wrong sum. Optimizers must not see these placeholders.
        """
        with without_torch_function_of_subclasses():
            for parameter in self._lacking():
                if not (isinstance(parameter, RemoteTensor) and parameter.requires_grad):
                    continue
                shown, like = self._shown.get(id(parameter)), (parameter.shape, parameter.dtype)
                if shown is None or (shown.shape, shown.dtype) != like:
                    shown = self._shown[id(parameter)] = torch.empty_like(parameter).detach()
                parameter.grad = shown
        self._are_shown = True

    def hide_gradients(self) -> None:
        """Undoes :meth:`show_gradients`."""
        with without_torch_function_of_subclasses():
            for parameter in self._lacking():
                parameter.grad = None
        self._are_shown = False

    def _lacking(self) -> list[nn.Parameter]:
        """The parameters that other stages hold, and this one does not."""
        held = {id(use.parameter) for use in self.held}
        return [use.parameter for use in self.uses if id(use.parameter) not in held]

    def sum_shared(self) -> None:
        """Adds up the gradients of shared parameters from the last holder to the first, which has
        the sum.
        """
        self._are_summed = True
        for use in self.shared:
            if not use.parameter.requires_grad:
                continue
            holders = self._sharers(use.parameter)
            place = holders.index(self.stage)
            start = None
            if self.stage != holders[-1]:
                start = self._receive_optional(use, holders[place + 1])
            total, use.parameter.grad = use.parameter.grad, None
            if start is not None:
                total = start if total is None else added(start, total)
            if place:
                self._send_optional(use.name, total, holders[place - 1])
            elif total is not None:
                use.parameter.grad = total if is_alone(total) else total.clone()

    def _sharers(self, parameter: Tensor) -> list[int]:
        """The stages that add up a shared parameter's gradients, this one included. One that only
        ends what it has begun with a layer adds up its own.
        """
        holders = self.holders_of(parameter)
        return holders if self.stage in holders else [self.stage]

    def pass_shared_around(self) -> None:
        """Sends the first holder's gradient of a shared parameter to every holder."""
        for use in self.shared:
            if not use.parameter.requires_grad:
                continue
            first, *others = self._sharers(use.parameter)
            if self.stage == first:
                for to in others:
                    self._send_optional(use.name, use.parameter.grad, to)
            else:
                use.parameter.grad = self._receive_optional(use, first)
                # Whoever has sent the sum has received this stage's part: that is freed now.
                for key in [key for key in self._posted if key[0] == use.name]:
                    for sent in self._posted.pop(key):
                        sent.wait()

    def _send_optional(self, name: str, tensor: Tensor | None, to: int) -> None:
        if to < self.stage and not self.channels.is_direct(to):
            # The earlier stage has taken those before.
            for sent in self._posted.pop((name, to), ()):
                sent.wait()
            self._posted[name, to] = self.channels.shared.post_values({"": tensor}, to)
            return
        lane: Lane = self.channels
        if to < self.stage:
            # On the other lane, that stage may await the step's report. What this lane sent before
            # has been received by now.
            lane = self.channels.shared
            lane.settle()
        lane.send_object(tensor is not None, to)
        if tensor is not None:
            self.channels.post_on_device(tensor, to)

    def _receive_optional(self, use: ParameterUse, source: int) -> Tensor | None:
        if source > self.stage and not self.channels.is_direct(source):
            ((_, received),) = self.channels.shared.receive_values(source)
            return received.to(self.device) if received is not None else None
        lane = self.channels.shared if source > self.stage else self.channels
        if not lane.receive_object(source):
            return None
        return self.channels.receive_on_device(use.parameter, source)

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """The norms of all parameters' gradients, in the model's order, bitwise equal on all
        stages.

        A parameter that several stages hold counts once; one without a gradient has norm 0. Every
        stage calls this.

        Args:
            parameters: those to include; all others have norm 0.
            norm_type: the order of the norm.

        Returns:
            A float64 vector on the CPU with one entry for each of ``uses``.
        """
        chosen = {id(parameter) for parameter in parameters}
        found: dict[int, Tensor] = {}
        for number, use in enumerate(self.uses):
            gradient = use.parameter.grad
            counted = self.stage == self.holders_of(use.parameter)[0]
            if (
                counted
                and gradient is not None
                and not gradient.is_meta
                and id(use.parameter) in chosen
            ):
                known = self._norms.get(number)
                found[number] = (
                    known.value
                    if known is not None and known.is_of(gradient, norm_type)
                    else torch.linalg.vector_norm(gradient.detach(), norm_type)
                )
        norms = torch.zeros(len(self.uses), dtype=torch.float64)
        for number, norm in to_host(found).items():
            norms[number] = norm
        # Each entry is one stage's value plus zeros: the sum is exact in any order.
        return self.channels.sum(norms)

    def measure_norms(self, places: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        """Computes the norms of gradients that are complete while others are still being summed,
        for :meth:`gradient_norms`. Until then nothing may change them unnoticed, as code does that
        writes into their ``data``.

        Args:
            places: the parameters' indices in ``uses``.
            parameters: those whose gradients are complete.
        """
        for place, parameter in zip(places, parameters, strict=True):
            if parameter.grad is not None:
                self._norms[place] = _Norm.of(parameter.grad)

    def have_gradients(self) -> list[bool]:
        """For each of ``uses``, whether its parameter has a gradient. Every stage calls this."""
        flags = torch.zeros(len(self.uses))
        for number, use in enumerate(self.uses):
            gradient = use.parameter.grad
            flags[number] = gradient is not None and not gradient.is_meta
        return [bool(flag) for flag in self.channels.sum(flags)]


class _Norm(NamedTuple):
    """The norm of a gradient, unless the gradient has changed since."""

    gradient: weakref.ref[Tensor]
    version: int
    value: Tensor

    @classmethod
    def of(cls, gradient: Tensor) -> _Norm:
        """The norm that gradients are clipped by."""
        value = torch.linalg.vector_norm(gradient.detach(), _CLIPPED_NORM)
        return cls(weakref.ref(gradient), version_of(gradient), value)

    def is_of(self, gradient: Tensor, norm_type: float) -> bool:
        """Whether it is this gradient's norm of this type."""
        return (
            norm_type == _CLIPPED_NORM
            and self.gradient() is gradient
            and version_of(gradient) == self.version
        )


def optimizer_to_device(
    optimizer: Optimizer,
    device: torch.device,
    deferred: DeferredInit,
    on_host: Collection[int] = (),
) -> None:
    """Moves an optimizer's state, and initialises deferred tensors. Step counters are on the CPU,
    unless a kernel of the optimizer reads them (``fused`` and ``capturable``).

    Args:
        optimizer: the optimizer.
        device: where its state is to be.
        deferred: has the values of tensors that are on the meta device.
        on_host: the identities of parameters whose state remains where it is.
    """
    kernel_counts = {
        parameter
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for parameter, entry in optimizer.state.items():
        if isinstance(entry, MutableMapping):
            for name, value in entry.items():
                if not isinstance(value, Tensor):
                    continue
                if deferred.knows(value):
                    entry[name] = value = deferred.values(value)
                stays = id(parameter) in on_host and value.numel() > 1
                if value.is_meta or stays or (name == "step" and parameter not in kernel_counts):
                    continue
                entry[name] = value.to(device)
