"""One rank's part of a pipeline whose stages all run the whole of the user's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipeshift.errors import PipeShiftError, PlanError
from lightning_pipeshift.model.execution.microbatch import size_or_one
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, is_whole
from lightning_pipeshift.model.parameters.layers import (
    FEWEST_LAYERS,
    compiled_around,
    find_layers,
    require_layers,
)
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.user_state.logs import LoggedValue, LogRecorder, merge_logs
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.document.moves import Move, placement_after
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.flow import call_order, merged_order
from lightning_pipeshift.plan.inputs.partition import num_layers_in
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.plan.schedule.schedules import forward_only
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.comm.messages import Key as MessageKey
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.gradients.replica_sync import match_replicas
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.ownership.changes import Requests
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.planning.make_plan import Settings, stages_without_work
from lightning_pipeshift.runtime.planning.prediction_check import PredictionCheck
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.step.action_notes import ActionNotes
from lightning_pipeshift.step.checksum import is_checked, require_same_batch
from lightning_pipeshift.step.control_files import Answer, ControlFiles, Request
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.first_look import FirstLook
from lightning_pipeshift.step.gradient_sums import GradientSums
from lightning_pipeshift.step.plan_checks import adoptable, require_no_shared_moves
from lightning_pipeshift.step.reporting import Reporting
from lightning_pipeshift.step.step_memory import StepMemory
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.training_batch import Accumulation, Key, Profile, UserStep
from lightning_pipeshift.step.value_steps import ValueSteps
from lightning_pipeshift.values.calls import CallWatch
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gathering import kept
from lightning_pipeshift.values.value import running

EVALUATIONS_AHEAD = 4
"""How many batches of an evaluation a stage may be ahead of another one."""


@dataclass
class _Evaluated:
    """The result and the logs of an evaluation step, which may contain values."""

    result: Any
    logs: list[LoggedValue]
    size: int


class Pipeline:
    """One rank's part of one virtual machine's pipeline, from ``setup`` to ``teardown``: its plan,
    what it holds, and evaluation. How it trains is up to the subclasses.

    Args:
        root: the LightningModule, whole.
        channels: this stage's connections.
        replicas: the virtual machines.
        rings: this rank's part in their rings, where there are several.
        groups: the groups for sums over them.
        settings: the user's options.
        here: this rank's device.
        deferred: makes the tensors of the model that are on the meta device.
        say: shows a message to the user at once.
        outside: requests from other processes; used on the first rank only.
        fail_from_thread: called in a thread that fails.
        profile: makes a context for the profiler, given the name of an action.
    """

    _updates_apart = False
    """Whether stages make their updates at different times."""

    _engine_class = Engine
    """The class of the engine that carries out this pipeline's schedule."""

    changes: Requests
    """The plans that come into force after the present one."""

    def __init__(
        self,
        root: nn.Module,
        channels: Channels,
        replicas: Replicas,
        rings: Rings | None,
        groups: ProcessGroups,
        settings: Settings,
        here: Device,
        deferred: DeferredInit,
        say: Callable[[str], None],
        outside: ControlFiles,
        fail_from_thread: Callable[[BaseException], None],
        profile: Profile = nullcontext,
    ) -> None:
        self.root = root
        self._outside = outside
        self._deferred = deferred
        # A rank that owns every layer may have all values while other ranks lack some.
        lacking = replicas.world.sum(torch.tensor([0.0 if is_whole(root) else 1.0]))
        self._was_whole = not lacking
        self.channels = channels
        self.replicas = replicas
        self.vm = replicas.vm
        self._rings = rings
        self._aggregation: Aggregation | None = None
        self.late_updates = LateUpdates()
        self.needs_norms = False
        """Whether the norms of gradients are needed before the optimizer steps."""
        # Messages about decisions, for the user.
        self.messages: list[str] = []
        self.settings = settings
        are_together, tell = not self._updates_apart, self.messages.append
        self._gradient_sums = GradientSums(
            rings, groups, channels, replicas, settings, are_together, tell
        )
        self._threads = Threads("background", fail_from_thread)
        self.planning = Replanning(
            settings,
            replicas,
            here,
            channels.device,
            self.messages,
            say,
            self._threads,
            LinkMeter(channels.payload_sockets),
        )
        # Random streams are those of layers, so more stages must not mean more layers.
        given = settings.plan and len(settings.plan.layers)
        layers = find_layers(root, given or num_layers_in(settings.partition) or FEWEST_LAYERS)
        if replicas.topology.num_ranks > 1:
            require_layers(root, layers.values())
        elif not layers:
            layers = {type(root).__name__: root}
        self._layers = [
            NamedLayer(name, layer, index) for index, (name, layer) in enumerate(layers.items())
        ]
        if uncompiled := compiled_around(root, layers.values()):
            say(
                f"PipeShift runs {', '.join(map(repr, uncompiled))} without compiling, as there are"
                " layers inside. Compile the layers instead, each by itself:"
                f" `{next(iter(layers))}.compile()`, and so on."
            )
        settings.check(self._layers, replicas.topology.stages_per_vm)
        self.memory: StageMemory | None = None
        if settings.memory is not None:
            names = [layer.name for layer in self._layers]
            self.memory = StageMemory(
                settings.memory, channels, names, self._threads, fail_from_thread, tell
            )
        self._in_memory = StepMemory(
            root, self._layers, self.vm, channels, self.planning, self.memory
        )
        self._first_look = FirstLook(
            root, self._layers, channels, replicas, self.planning, self._in_memory
        )
        self._reporting = Reporting(replicas)
        self._called: set[int] = set()
        """The layers known to be called by a training step."""
        self._is_timed = False
        """Whether layers were timed before the first step."""
        self._said_of_work: str | None = None
        self._plan: Plan | None = None
        self.holdings: Holdings | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self.order: list[int] = []
        """The layers in the order in which the last forward pass called them."""
        self._num_microbatches_done = 0
        self.num_steps_done = 0
        """How many batches of the run are done."""
        self.step_seconds: float | None = None
        """The seconds between the starts of the last two steps."""
        self._begun: float | None = None
        self._prediction_check = PredictionCheck(self.planning, self.messages)
        # Whether this rank requests the end of the run, and whether all ranks know that one does.
        self.asks_to_end = self.is_to_end = False
        self._notes = ActionNotes(profile, channels, self._number_of)
        self.section = self._notes.section
        self.recorder = LogRecorder(self.root, kept, running)
        """Replaces the LightningModule's ``log`` while a step runs."""
        self._values: ValueSteps | None = None
        self._evaluated: list[_Evaluated] = []
        self.find_optimizers: Callable[[], Sequence[Optimizer]] = list
        """Those of the run."""
        self.user_step: UserStep | None = None
        """The user's step of training; ``None`` where the run does not train."""
        self.calls: CallWatch | None = None
        """Is told of all calls of layers and operations."""

    # --- the plan ---

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan."""
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        if self._plan is None:
            raise PlanError(
                "There is no plan yet: it is made at the first batch. Read"
                " `trainer.strategy.plan` from `on_train_batch_end` on, or after the run."
            )
        return self._plan

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers by their names, in the order in which the first step called them."""
        return {each.name: each.layer for each in self._layers}

    @property
    def core(self) -> Core | None:
        """Runs the steps, from the first one to the end of the run."""
        return self._values.core if self._values is not None else None

    @property
    def values(self) -> ValueSteps:
        """Runs the user's steps, from the first one to the end of the run."""
        assert self._values is not None
        return self._values

    @property
    def held(self) -> Holdings:
        """This stage's part of the model, from the first step on."""
        assert self.holdings is not None
        return self.holdings

    def _stage_of(self) -> list[int]:
        return self.plan.placement.stages(self.vm)

    def _prepare(self, key: Key, step: UserStep, batch: Any) -> None:
        """Makes the plan on the first batch, and prepares this stage for it."""
        if self._plan is not None:
            return
        optimizers = list(self.find_optimizers())
        trains = bool(optimizers)
        seen = self._first_look.look(key, step, batch, trains, self.user_step)
        uses, layers = seen.uses, [each.layer for each in self._layers]
        measured = self._first_look.measure(seen, batch, optimizers, trains)
        plan = self.planning.first_plan(measured, seen.idle, trains)
        plan.require_layers([each.name for each in self._layers])
        self._reorder(plan)
        self._plan = plan
        self._called = set(range(len(layers)) if seen.called is None else seen.called)
        holdings = self.holdings = Holdings(
            self.root, uses, layers, self._stage_of(), self.channels
        )
        self._optimizers = optimizers
        self._in_memory.note_state_on_host(plan, holdings)
        if not self._was_whole:
            holdings.obtain(self._deferred)
        holdings.match_shared()
        self.match_replicas(parameters_too=True)
        holdings.settle(optimizers, self._deferred)
        self._deferred.forget()
        if trains:
            self._follow_with_memory()
            self._gradient_sums.connect_sharers(uses, plan.placement)
        if trains and self.replicas.count > 1:
            self._aggregation = self._gradient_sums.aggregation(uses, plan)
        if any(plan.recompute) and not self.is_automatic:
            raise PlanError(
                "The plan recomputes layers, and with manual optimization the step calls `backward`"
                " itself, as soon as it has the loss. Use a plan without 'recompute', or"
                " `recompute='none'`; or checkpoint the layers in the step"
                " (`torch.utils.checkpoint`)."
            )
        if seen.idle:
            self._say_who_has_no_work()
        self._is_timed = seen.is_timed
        if self.settings.plan is None and not self._is_timed:
            # The layers' seconds were for the cut by bytes only: they predict nothing.
            records = tuple(replace(layer, forward_seconds=0.0) for layer in plan.layers)
            self._plan = replace(plan, layers=records, prediction=None)
        self._values = self._connect(holdings, seen.core)
        self.late_updates.await_before = self._values.core.await_before

    def _connect(self, holdings: Holdings, known: Core | None) -> ValueSteps:
        return ValueSteps(
            self.root,
            self._layers,
            self._stage_of(),
            holdings,
            self.channels,
            self.replicas,
            self.settings.seed,
            self._engine_class,
            self._updates_apart,
            self._around,
            self._notes,
            self._in_memory,
            self.recorder,
            self.messages.append,
            known,
            self.calls,
        )

    @property
    def is_automatic(self) -> bool:
        """Whether backwards and the optimizer's steps are Lightning's."""
        return getattr(self.root, "automatic_optimization", True)

    def measure(self, step_number: int, step: UserStep, batch: Any) -> Measured | None:
        """Measures the machines and the layers without training: the result is on the first rank.
        The optimizer is not known yet: it counts as one with two values for each parameter. Every
        rank calls this, before the first batch.

        Args:
            step_number: counts batches over the whole run.
            step: runs the user's ``training_step``.
            batch: one microbatch.
        """
        key = self._key("train", step_number)
        seen = self._first_look.look(key, step, batch, True, self.user_step)
        return self._first_look.measure(seen, batch, None, trains=True)

    def _reorder(self, plan: Plan) -> None:
        """Makes each rank the stage that it is under a plan. Every rank calls this, between two
        steps.
        """
        topology = Topology(plan.ranks)
        if topology == self.replicas.topology:
            return

        def reorder() -> None:
            self._reporting.pass_on(self.channels)
            self.channels.settle()
            self.replicas.reorder(topology)
            if self.holdings is not None:
                self.holdings.place(plan.placement.stages(self.vm))

        before = self.channels.ranks
        if self._values is not None and list(plan.ranks[self.vm]) != before:
            self._values.renumber(before, reorder)
        else:
            reorder()

    def _say_who_has_no_work(self) -> None:
        topology, placement = self.replicas.topology, self.plan.placement
        has_moved = self._num_microbatches_done > 0
        said = stages_without_work(self.settings, placement, topology, self._called, has_moved)
        if said is not None and said != self._said_of_work:
            self.messages.append(said)
        self._said_of_work = said

    @property
    def plan_in_call_order(self) -> Plan:
        """The plan in force, with its layers in the order in which they are called. If no step was
        traced, that order is known after one has run.
        """
        plan, names = self.plan, [each.name for each in self._layers]
        if not self.order:
            return plan
        records = {record.name: record for record in plan.layers}
        order = call_order(self.order, len(names))
        return replace(plan, layers=tuple(records[names[layer]] for layer in order))

    # --- another plan ---

    @property
    def coming_plan(self) -> Plan:
        """The plan that will be in force when all requested changes are done."""
        return self.changes.last or self.plan

    def adopt(self, plan: Plan, at_once: bool = False) -> None:
        """Puts another plan in force after the next step; or part by part after the next steps, if
        its layers take long to transfer. Every rank calls this, with the same plan, between the
        same steps.

        Args:
            plan: the plan.
            at_once: whether all layers change their owners in one part.

        Raises:
            PlanError: it is for another model, other virtual machines, or other settings of
                training: only the owners of layers, the order of the ranks and the recomputation
                can change. Or a device lacks memory for layers while they move.
        """
        coming, names = self.coming_plan, [each.name for each in self._layers]
        plan = adoptable(plan, self.plan, coming, names, self.memory is not None)
        if not self.is_automatic:
            require_no_shared_moves(plan, self.plan, self.vm, self.held.uses)
        self._request(plan, at_once)

    def _request(self, plan: Plan, at_once: bool) -> None:
        """Asks for a plan that may come into force."""
        raise NotImplementedError

    def migrate(self, moves: Iterable[Move]) -> None:
        """Makes layers change their owners after the next step. Every rank calls this, with the
        same moves, between the same steps.

        Raises:
            PlanError: a move is impossible. Then nothing changes.
        """
        plan = self.coming_plan
        plan = plan.with_placement(placement_after(plan, moves))
        self._require_memory(plan)
        self.adopt(plan)

    def _require_memory(self, plan: Plan) -> None:
        """Raises PlanError if a device lacks memory for a plan."""
        self.planning.require_memory(plan)

    def _carry_out(self, requests: Iterable[Request], when: str) -> None:
        """Makes the moves that other processes ask for, and answers them.

        Args:
            requests: of the processes.
            when: the step from which they hold, for the answer.
        """
        for request in requests:
            try:
                self.migrate(request.moves)
                answer = Answer(True, f"{request}, {when} on")
            except PipeShiftError as error:
                answer = Answer(False, f"nothing moves: {error}")
            self.messages.append(f"asked from outside: {answer.text}.")
            self._outside.answer(request, answer)

    def _follow_with_memory(self) -> None:
        """Keeps tensors on this stage as the plan in force says."""
        coming, twice = self.changes.on_their_way, self.changes.held_twice
        self._in_memory.follow(self.plan, self.held, self._optimizers, coming, twice)

    def match_replicas(self, parameters_too: bool) -> None:
        """Copies the values of the first virtual machine to all others: the state of layers other
        than parameters (running statistics), and optionally the parameters. Every rank calls this.
        """
        if self.replicas.count == 1:
            return
        # A layer may have put values into its buffers.
        self.settle_values()
        if self.holdings is None:
            return
        layers = [each.layer for each in self._layers]
        inside = {id(part) for layer in layers for part in layer.modules()}
        outside = {
            name: module for name, module in self.root.named_modules() if id(module) not in inside
        }
        uses = self.holdings.uses if parameters_too else []
        match_replicas(self.replicas, self.plan.placement, layers, outside, uses)
        if self._values is not None and self.vm:
            self._values.match_replaced_buffers()

    @property
    def exposed_seconds(self) -> float:
        """How long the last step has waited for gradients of other virtual machines, in seconds,
        after its own compute.
        """
        return self._aggregation.exposed_seconds if self._aggregation is not None else 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """A copy of a Trainer is of the same run: threads and connections cannot be copied."""
        return self

    # --- steps ---

    def _note_begin(self) -> None:
        now = time.perf_counter()
        self.step_seconds, self._begun = now - self._begun if self._begun else None, now
        self._prediction_check.note(self._plan, self.step_seconds)

    def _check_batch(self, batch: Any, batch_idx: int) -> None:
        if self.channels.num_stages > 1 and is_checked(batch_idx):
            require_same_batch(batch, batch_idx, self.channels)

    def _key(self, purpose: str, step_number: int) -> Key:
        return (self.settings.seed, purpose, step_number, 0, self.vm)

    def _run(self, kind: str, step: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs microbatches.

        Args:
            kind: of the step.
            step: its number.
            args: as for :meth:`Engine.run`, from the microbatches on.
            kwargs: likewise.
        """
        results = self.values.run(kind, step, self.find_optimizers(), *args, **kwargs)
        if not self._first_look.looks_ahead:
            self.order = merged_order(list(self.values.core.called.values()))
        return results

    def record_actions(self, recorder: Recorder | None) -> None:
        """Sets what takes notes of the coming steps; ``None``: nothing does."""
        self._notes.recorder = recorder
        store = self.memory.store if self.memory is not None else None
        parts: Any = (self.channels.turns, self._rings, self._aggregation, store)
        for part in parts:
            if part is not None:
                part.recorder = recorder
        self.changes.record(recorder)
        if self.core is not None:
            self._notes.record_messages(self.core.mailbox)

    def _number_of(self, key: MessageKey) -> int | None:
        """The number of a message's microbatch; ``None`` if it is of no microbatch."""
        return key.turn if key.turn >= 0 else None

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        """Context of an action; of a forward that was suspended, of each part."""
        recorder, core = self._notes.recorder, self.values.core
        with self._notes.profile(f"[PipeShift] {action.kind.name.lower()}"):
            if recorder is not None:
                recorder.begin_action(action)
            with self._in_memory.action(action, core.mailbox):
                yield
            if recorder is not None:
                recorder.end_action(core.computes)
        self.channels.num_done += 1

    def _sums(self, accumulation: Accumulation) -> Aggregation | None:
        """Sums a step's gradients over the virtual machines, if an optimizer step follows it."""
        return self._aggregation if not accumulation.goes_on else None

    def meets(self) -> None:
        """Tells that this stage comes to where all wait for each other, outside of a step."""
        if self._values is not None:
            self._values.meets()

    def settle_values(self, is_over: bool = False) -> None:
        """See :meth:`ValueSteps.settle`."""
        if self._values is not None:
            self._values.settle(is_over)

    # --- a single device ---

    @property
    def is_by_itself(self) -> bool:
        """Whether this is the only device: its steps end with plain tensors, and their backward is
        Lightning's.
        """
        return self.replicas.topology.num_ranks == 1

    def begins_plain_step(self, batch: Any, step: UserStep, step_number: int) -> bool:
        """Whether the coming training step is the user's own, without additions: on one device, if
        the batch is not split, nothing is measured, and no layer is recomputed or moves. Makes the
        plan on the first batch, as the plan decides about recomputation.

        Args:
            batch: the whole batch.
            step: runs the user's ``training_step``.
            step_number: counts batches over the whole run.
        """
        stages_per_vm = self.replicas.topology.stages_per_vm
        if not self.settings.leaves_steps_whole(stages_per_vm):
            return False
        self._prepare(self._key("train", step_number), step, batch)
        return not self.plan.recomputed(self.vm) and self.changes.last is None

    def plain_evaluation_step(
        self, batch: Any, step: UserStep, purpose: str, step_number: int
    ) -> Any:
        """Runs an evaluation step on a single device, and returns its result.

        Args:
            batch: as for :meth:`evaluation_step`, as are the others.
            step: runs the user's step.
            purpose: the kind of the user's step, and its dataloader.
            step_number: counts its batches.
        """
        self._prepare(self._key(purpose, step_number), step, batch)
        return self._plain_forward(purpose, step_number, step, batch)

    def _plain_forward(self, kind: str, number: int, step: UserStep, batch: Any) -> Any:
        if self._values is None:
            # The run is over, and user code asks the Trainer's loop for one more step.
            return step(self.root, batch)
        (row,) = forward_only(1, 1)

        def run(part: Any, _: int) -> Any:
            return step(self.root, part)

        (result,) = self._run(kind, number, [batch], run, row)
        return result

    # --- evaluation ---

    @purpose("a step of an evaluation")
    def evaluation_step(
        self,
        batch: Any,
        batch_idx: int,
        step: UserStep,
        purpose: str,
        step_number: int,
        wants_result: bool,
    ) -> bool:
        """Runs a forward-only step. Its report is returned by :meth:`fetch_reports`.

        Args:
            batch: the batch.
            batch_idx: its index.
            step: runs the user's step.
            purpose: the kind of the user's step, and its dataloader.
            step_number: counts its batches.
            wants_result: whether the step's result is needed.

        Returns:
            whether the step has logged values for the loggers at once.
        """
        self.meets()
        self._check_batch(batch, batch_idx)
        key = self._key(purpose, step_number)
        self._prepare(key, step, batch)
        row = forward_only(self.channels.num_stages, 1)[self.channels.stage]
        function = partial(self.values.logged, step)
        ((result, logs),) = self._run(
            purpose, step_number, [batch], function, row, num_ahead=EVALUATIONS_AHEAD
        )
        evaluated = _Evaluated(result if wants_result else None, logs, size_or_one(batch))
        self._evaluated.append(evaluated)
        return any(log.options.get("on_step") for log in logs)

    def fetch_reports(self) -> list[Report]:
        """The reports of all evaluation steps since the last call. Every stage calls this."""
        evaluated, self._evaluated = self._evaluated, []
        logs = [merge_logs([one.logs], [one.size], [float(one.size)]) for one in evaluated]
        gathering = self.values.gathering
        found = gathering.end(
            *gathering.begin(
                [(one.result, each) for one, each in zip(evaluated, logs, strict=True)]
            )
        )
        return [Report(result, logged) for result, logged in found]

    @property
    def num_pending(self) -> int:
        """The number of evaluation steps whose reports have not been fetched."""
        return len(self._evaluated)

    # --- the end ---

    def release(self) -> None:
        """Ends the threads and transfers of this rank, at the end of the run or after an error."""
        self.changes.abandon()
        self.late_updates.abandon()
        if self._aggregation is not None:
            self._aggregation.close()
        if self.memory is not None:
            self.memory.close()
        self._threads.close()
        if self._values is not None:
            self._values.release()

    @purpose("the layers of the other stages, at the end of the run")
    def make_whole(self) -> None:
        """Gives every rank the whole model again, if it had it before. Every stage calls this."""
        self.settle_values(is_over=True)
        if self._values is not None:
            self._values.close()
            self._values = None
        if self.holdings is None:
            return
        self.changes.cancel()
        if self._was_whole:
            self.holdings.make_whole()
        else:
            self.holdings.to_cpu()
