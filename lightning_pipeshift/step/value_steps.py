"""Runs the user's steps on values on one stage, and what user code does between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.module_private import without_compiling
from lightning_pipeshift.compat.torch_private import (
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.model.parameters.absent import swap
from lightning_pipeshift.model.random.random_streams import stream_seed
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.tensors.transfer import to_device, to_host
from lightning_pipeshift.model.user_state.logs import LoggedValue, LogRecorder
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.step_group import StepGroup
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.kept_tensors import Node, kept_by_user
from lightning_pipeshift.step.action_notes import ActionNotes
from lightning_pipeshift.step.checksum import checksum
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.gathering import Gathering, of_its_own
from lightning_pipeshift.step.step_memory import StepMemory
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.step.training_batch import UserStep
from lightning_pipeshift.values.account import SEVERAL
from lightning_pipeshift.values.calls import CallWatch
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.kept import KeptOfLayer, by_memory, memory_of
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.program import OUTSIDE
from lightning_pipeshift.values.value import Value, run_by, running, set_program


class ValueSteps:
    """The core of one stage, the engine that runs steps on it, and the program between two steps.

    Args:
        root: the LightningModule, whole.
        layers: its layers, in call order.
        stage_of: the stage of each layer.
        holdings: the parameters and buffers of this stage.
        channels: this stage's connections.
        replicas: the virtual machines.
        seed: of the run.
        engine_class: of the engine that carries out the schedule.
        updates_apart: whether stages make their updates at different times. Then a trained
            parameter that several stages hold is the first one's, and the core sums its gradients.
        around: makes the context of an action.
        notes: takes notes of messages.
        memory: bounds the messages' memory.
        recorder: replaces the LightningModule's ``log`` while a step runs.
        say: takes a message for the user.
        known: has contracts from the run on fake tensors; ``None`` without one.
        watch: is told of all calls of layers and operations.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[NamedLayer],
        stage_of: Sequence[int],
        holdings: Holdings,
        channels: Channels,
        replicas: Replicas,
        seed: int,
        engine_class: type[Engine],
        updates_apart: bool,
        around: Callable[[Action], AbstractContextManager[Any]],
        notes: ActionNotes,
        memory: StepMemory,
        recorder: LogRecorder,
        say: Callable[[str], None],
        known: Core | None,
        watch: CallWatch | None,
    ) -> None:
        self._root = root
        self._holdings = holdings
        self._channels = channels
        self._replicas = replicas
        self._engine_class = engine_class
        self._updates_apart = updates_apart
        self._around = around
        self._notes = notes
        self._memory = memory
        self._recorder = recorder
        self._say = say
        self.before_meeting: Callable[[], None] = lambda: None
        """Called before this stage comes to where all wait for each other, outside of a step."""
        self.core = core = Core(
            root,
            [each.layer for each in layers],
            _owners(stage_of),
            self._mailbox(),
            channels.device,
            stream_seed(seed, replicas.vm),
            lambda tensor: holdings.holders_of(tensor) if holdings.knows(tensor) else (),
        )
        if known is not None:
            core.learn_from(known)
        core.calls, core.gates = watch, layers
        core.compares_floats = len(set(channels.gather(_arithmetic()))) == 1
        if not getattr(root, "automatic_optimization", True):
            # Optimizers step in the middle of a step: one stage has the state of each parameter.
            for use in holdings.uses:
                core.parameter_owners.setdefault(use.parameter, 0)
                if len(holdings.holders_of(use.parameter)) > 1:
                    core.written.add(use.parameter)
        self._place_trained()
        self._placed = ExitStack()
        self._placed.enter_context(core.placed())
        holdings.is_common = lambda buffer: buffer not in core.parameter_owners
        holdings.gradients.sums_shared = not updates_apart
        self.gathering = Gathering(root, core, channels, self.share, self.meets)
        notes.core, notes.waits_for = core, lambda: self.engine.waits_for
        self._between: Microbatch | None = None
        self.learn()
        self.begin_between()

    def _mailbox(self) -> Mailbox:
        mailbox = self._channels.mailbox()
        mailbox.waiting = self._notes.waiting
        self._holdings.gradients.mailbox = mailbox
        self._memory.bound_sends(mailbox)
        self._notes.record_messages(mailbox)
        return mailbox

    # --- another plan ---

    def place(self, stage_of: Sequence[int]) -> None:
        """Gives layers their new owners, between two steps.

        Args:
            stage_of: the stage of each layer.
        """
        assert self._between is not None
        self._between.release()
        before = [self.core.owners(number, 0) for number in range(len(stage_of))]
        self.core.place(_owners(stage_of))
        self._place_trained()
        pairs = enumerate(zip(before, stage_of, strict=True))
        self._move_kept({number: pair for number, pair in pairs if pair[0] != pair[1]})
        self.core.note(self._between)
        self.leave_tails()
        self.begin_between()
        self.learn()

    def _move_kept(self, moves: Mapping[int, tuple[int, int]]) -> None:
        """Moves what user code keeps of the parameters of layers, averages for example, with them.
        Every stage calls this.

        Args:
            moves: of each layer, its owner until now and the next one.
        """
        core, channels = self.core, self._channels
        for number, (source, to) in moves.items():
            with run_by(None), without_torch_function_of_subclasses(), torch.no_grad():
                moving = KeptOfLayer(core, number, source)
                if self._updates_apart:
                    # Stages come here at different times. Averages stay at the old owner.
                    moving.require_no_views()
                    continue
                sent: dict[Any, Any] = {}
                if channels.stage == source:
                    channels.send_values(moving.packed(), to)
                elif channels.stage == to:
                    sent = dict(channels.receive_values(source))
                moving.arrive(to, sent)

    def _place_trained(self) -> None:
        if not self._updates_apart:
            return
        for use in self._holdings.uses:
            holders = self._holdings.holders_of(use.parameter)
            if len(holders) > 1 and use.parameter.requires_grad:
                self.core.parameter_owners[use.parameter] = holders[0]
                self.core.written.add(use.parameter)

    def renumber(self, before: Sequence[int], reorder: Callable[[], None]) -> None:
        """Gives stages other numbers, between two steps.

        Args:
            before: the ranks of the stages until now.
            reorder: gives this rank its new number.
        """
        assert self._between is not None
        self._between.release()
        self.meets()
        # Until all have come here, one may still ask this stage for a value.
        self._channels.gather(None)
        self.core.mailbox.close()
        reorder()
        numbers = [self._channels.ranks.index(rank) for rank in before]
        self.core.renumber(numbers, self._mailbox())

    def learn(self) -> None:
        """Begins to learn what steps use behind their reads, which depends on who owns what."""
        is_alone = self._channels.num_stages == 1
        objects = {} if is_alone else _objects_around(self._root)
        self.tails = None if is_alone else Tails(self.core, self._say, objects=objects)
        self.engine = self._engine_class(self.core, self.tails, self._around)

    def leave_tails(self) -> None:
        """Ends the watch of what steps use."""
        if self.tails is not None:
            self.tails.leave()

    # --- steps ---

    def logged(self, step: UserStep, batch: Any, _: int) -> tuple[Any, list[LoggedValue]]:
        """Runs a user's step; returns its result, and what it has logged."""
        result, program = step(self._root, batch), running()
        assert isinstance(program, Microbatch)
        if program.finite is not None and torch.is_grad_enabled():
            program.finite.loss(program.plain(result))
        return result, self._recorder.take()

    def run(
        self,
        kind: str,
        step: int,
        optimizers: Sequence[Optimizer],
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs microbatches, and returns their results.

        Args:
            kind: of the step.
            step: its number.
            optimizers: those of the run, whose settings have to be the same on all ranks.
            args: as for :meth:`Engine.run`, from the microbatches on.
            kwargs: likewise.
        """
        core, outside = self.core, running()
        assert isinstance(outside, Microbatch)
        core.step_number = step
        settings = [
            (name, x)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for name, x in group.items()
            if isinstance(x, int | float | tuple)
        ]
        outside.note("the optimizers", settings)
        core.note(outside)
        with self._memory.weights_in_step(), self.running():
            results = self.engine.run(stream_seed(kind, step), *args, **kwargs)
        self.begin_between()
        return results

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which steps run."""
        in_step = StepGroup(self._replicas.vm, self._replicas.count).in_force()
        # A compiler follows neither values nor the class of parameters: see `layer_calls.py`.
        with run_by(None), self.core.seeing_parameters(), in_step, without_compiling():
            yield

    # --- between two steps ---

    def begin_between(self) -> None:
        """Runs operations on values between two steps, from now on."""
        self.core.aliases.forget()
        if self._between is not None:
            self._between.release()
        number = self.core.num_steps
        self._between = Microbatch(self.core, number, number, OUTSIDE)
        set_program(self._between, self._channels.device)

    def meets(self) -> None:
        """Tells that this stage comes to where all wait for each other, outside of a step."""
        self.before_meeting()
        self.core.mailbox.pass_phase()

    def share(self, mine: Any, source: int) -> Any:
        """Returns what one stage has, on all of them. Every stage calls this.

        Args:
            mine: this stage's; counts on the source only.
            source: the stage.
        """
        self.meets()
        return self._channels.share_object(mine, source)

    def match_holders(self) -> None:
        """Gives parameters that steps have written to, and such buffers, to all stages that hold
        them.
        """
        core, stage = self.core, self._channels.stage
        written = [use.parameter for use in self._holdings.uses if use.parameter in core.written]
        with run_by(None), torch.no_grad():
            for tensor in (*written, *core.shared_state()):
                owner = core.parameter_owners[tensor]
                found = self.share(to_host(tensor) if owner == stage else None, owner)
                if not tensor.is_meta:
                    tensor.copy_(found)

    def match_replaced_buffers(self) -> None:
        """Gives the buffers that a layer has replaced to all stages: only its owner got them."""
        core, stage = self.core, self._channels.stage
        for number, (layer, placed) in enumerate(zip(core.layers, core.placed_layers, strict=True)):
            owner = core.owners(number, 0)
            mine = {each: each.get(layer) for each in placed.state if each.is_buffer}
            if mine:
                found = self.share(to_host(mine) if owner == stage else None, owner)
                for attribute, buffer in to_device(found, self._channels.device).items():
                    attribute.set(layer, buffer)

    def settle(self, is_over: bool = False) -> None:
        """Makes values that user code keeps common tensors, and gives parameters that steps have
        written to, to all stages that hold them. What hooks have computed of parameters, averages
        for example, and is not small, remains on its stage during the run. Every stage calls this,
        between two steps.

        Args:
            is_over: whether the run is over; then the tensors are in host memory.
        """
        stage = self._channels.stage
        self.match_holders()
        with run_by(None), torch.no_grad():
            mine: dict[Any, list[Value]] = {}
            for _, x in self._kept():
                if isinstance(x, Value) and (is_over or not self._remains(x)):
                    mine.setdefault(x.account.name, []).append(x)
            here = {
                name: cast(Tensor, x.account.tensor)
                for name, (x, *_) in mine.items()
                if x.account.owner == stage
            }
            for owner in range(self._channels.num_stages):
                for places in self.share(by_memory(here) if owner == stage else None, owner):
                    # One memory at a time; of one that a single value has, only its part.
                    tensor = here[next(iter(places))] if owner == stage else None
                    if tensor is not None and len(places) > 1:
                        tensor = memory_of(tensor)
                    found = self.share(to_host(tensor) if owner == stage else None, owner)
                    place = torch.device("cpu") if is_over else self._channels.device
                    common = of_its_own(to_device(found, place))
                    for name, where in places.items():
                        for value in mine.get(name, ()):
                            is_alone = len(places) == 1
                            fresh = common.detach() if is_alone else where.within(common)
                            if isinstance(value, nn.Parameter):
                                fresh = nn.Parameter(fresh, value.requires_grad)
                            swap(value, fresh)

    def _remains(self, value: Value) -> bool:
        """Whether a value remains one at the end of an epoch: an average, or what has the memory of
        a parameter, and not a loss in a list.
        """
        account = value.account
        assert account.name is not None
        _, turn, _ = account.name
        is_view = account.memory.of is not None
        is_small = value.numel() * value.element_size() <= _SMALL_BYTES
        is_of_several = account.layer in (None, SEVERAL) or not value.dim()
        return is_view or (turn == OUTSIDE and not (is_small and is_of_several))

    def _kept(self) -> Iterator[Node]:
        """The objects that user code keeps, except the model's own parameters."""
        return kept_by_user(self._root, set(map(id, self.core.own_parameters())))

    # --- the end ---

    def release(self) -> None:
        """Runs no more operations on values: at the end of the run, or after an error."""
        self._placed.close()
        if self._between is not None:
            self._between.release()
            self._between = None
        set_program(None, self._channels.device)

    def close(self) -> None:
        """Ends the connection to the other stages' cores."""
        self._notes.core, self._notes.waits_for = None, lambda: None
        self.core.mailbox.close()


def _owners(stage_of: Sequence[int]) -> Callable[[int, int], int]:
    return lambda number, _: stage_of[number]


# So much of what hooks have computed from several layers every stage gets at an epoch's end.
_SMALL_BYTES = 4096


def _objects_around(module: Any) -> dict[str, Any]:
    """What a step may use besides its module, by descriptions."""
    trainer = getattr(module, "_trainer", None)
    found = {"the Trainer": trainer, "the data module": getattr(trainer, "datamodule", None)}
    for name in ("callbacks", "loggers"):
        for each in getattr(trainer, name, ()):
            found[f"the {name[:-1]} `{type(each).__name__}`"] = each
    return {what: x for what, x in found.items() if x is not None}


def _arithmetic() -> int:
    """A number that differs where two CPUs compute other bits: by their kernels, say."""
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    found = x @ x, x.exp(), x.sin(), x.tanh(), x.softmax(0), x.norm()
    return checksum([*found, torch.__version__, torch.get_num_threads()])
