"""One rank's part of a pipeline: traces the user's step, plans, and runs its stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import compiled_in
from lightning_pipeshift.errors import LayerError, PipeShiftError, PlanError
from lightning_pipeshift.model.execution.measure import Figures, Stopwatch
from lightning_pipeshift.model.execution.microbatch import (
    size_or_one,
    split,
)
from lightning_pipeshift.model.execution.trees import address_of, leaves_of
from lightning_pipeshift.model.gates.gate import CurrentPass, Gate, Scope, install, remove
from lightning_pipeshift.model.gates.layers import (
    MOST_OPENED,
    compiled_around,
    find_layers,
    find_scopes,
    require_layers,
)
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, is_whole
from lightning_pipeshift.model.parameters.uses import (
    ParameterUse,
    modules_of_user_code,
    of_one_layer,
    parameter_uses,
)
from lightning_pipeshift.model.saved.saved_tensors import (
    bytes_of,
)
from lightning_pipeshift.model.trace.conditions import PlainValues
from lightning_pipeshift.model.trace.signature import ModuleSignature, module_signature
from lightning_pipeshift.model.trace.switches import require_only
from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.model.user_state.logs import LogRecorder
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.lanes import equal_shares, lanes_by_share
from lightning_pipeshift.plan.document.moves import Move, placement_after
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.flow import call_order
from lightning_pipeshift.plan.inputs.partition import num_layers_in
from lightning_pipeshift.plan.inputs.placement import Ownership, Placement
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.schedule.actions import Row, Schedule
from lightning_pipeshift.plan.schedule.communication import with_communication
from lightning_pipeshift.plan.schedule.schedules import (
    forward_only,
    schedule_named,
    with_recomputation,
)
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, Purpose
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.step_group import StepGroup
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.comm.turns import LaneTraffic, Urgency
from lightning_pipeshift.runtime.gradients.aggregation import (
    MOST_LANES_OF_COLLECTIVES,
    Aggregation,
    AllReduce,
    GradientGroup,
)
from lightning_pipeshift.runtime.gradients.device_rings import DeviceRings
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.gradients.replica_sync import (
    gradient_groups,
    match_replicas,
    pairs_that_share,
)
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.offload.weight_memory import may_wait
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.ownership.plan_change import Changes
from lightning_pipeshift.runtime.ownership.shared_updates import shared_weights
from lightning_pipeshift.runtime.planning.make_plan import (
    Settings,
    check_carried,
    check_order,
    stages_without_work,
)
from lightning_pipeshift.runtime.planning.move_parts import CutOver
from lightning_pipeshift.runtime.planning.prediction_check import PredictionCheck
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.runtime.step.checksum import (
    is_checked,
    require_same_batch,
    require_same_end,
)
from lightning_pipeshift.runtime.step.control_files import Answer, ControlFiles
from lightning_pipeshift.runtime.step.evaluations import Evaluations
from lightning_pipeshift.runtime.step.listeners import StepListener
from lightning_pipeshift.runtime.step.losses import Losses
from lightning_pipeshift.runtime.step.one_stage import OneStage
from lightning_pipeshift.runtime.step.reporting import Reporting
from lightning_pipeshift.runtime.step.stage import (
    WAIT,
    Microbatch,
    Profile,
    Stage,
    Step,
)
from lightning_pipeshift.runtime.step.step_report import Report, merge_reports
from lightning_pipeshift.runtime.step.trace_cache import Key, TraceCache
from lightning_pipeshift.runtime.step.training_batch import Accumulation, TrainingBatch, UserStep
from lightning_pipeshift.runtime.step.user_state import UserState
from lightning_pipeshift.runtime.step.votes import Votes
from lightning_pipeshift.timeline.recording import REPORT, What


@lru_cache(maxsize=512)
def _lowered(
    name: str, num_stages: int, num_microbatches: int, recomputing: frozenset[int] = frozenset()
) -> Schedule:
    make = forward_only if name == "forward" else schedule_named(name)
    schedule = make(num_stages, num_microbatches)
    return with_communication(with_recomputation(schedule, recomputing))


class Seen(NamedTuple):
    """A step that was followed before the first one ran.

    Args:
        trace: of the first microbatch.
        figures: of the layers that were timed.
        touched: the layers between which user code uses a parameter, by the parameter's id.
        called: the layers that steps call; ``None``: any may be called.
        idle: the layers that no step calls.
        uses: of the parameters.
    """

    trace: Trace
    figures: dict[int, Figures]
    touched: dict[int, set[int]]
    called: set[int] | None
    idle: frozenset[int]
    uses: list[ParameterUse]


class Pipeline:
    """One rank's part of one virtual machine's pipeline, from ``setup`` to ``teardown``.

    Args:
        root: the LightningModule, whole.
        channels: this stage's connections.
        replicas: the virtual machines.
        rings: this rank's part in their rings, where there are several.
        groups: the groups for sums over them.
        settings: the user's options.
        here: this rank's device.
        deferred: makes the tensors of the model that are on the meta device.
        ignored: names of attributes that belong to the framework.
        say: shows a message to the user at once.
        outside: requests from other processes; used on the first rank only.
        fail_from_thread: called in a thread that fails.
        profile: makes a context for the profiler, given the name of an action.
    """

    _sums_together = True
    """Whether all ranks are at the same step when gradients are summed."""

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
        ignored: frozenset[str],
        say: Callable[[str], None],
        outside: ControlFiles,
        fail_from_thread: Callable[[BaseException], None],
        profile: Profile = nullcontext,
    ) -> None:
        self._profile = profile
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
        self._groups = groups
        self._aggregation: Aggregation | None = None
        self.late_updates = LateUpdates()
        self.needs_norms = False
        """Whether the norms of gradients are needed before the optimizer steps."""
        """The layers that the last optimizer step has left for later."""
        # Messages about decisions, for the user.
        self.messages: list[str] = []
        self.settings = settings
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
        self.streams = RandomStreams(channels.device)
        self._current_pass = CurrentPass()
        num_layers = max(replicas.topology.stages_per_vm)
        if settings.core == "values":
            # Random streams are those of layers, so more stages must not mean more layers. (Numbers
            # that are left to the planner are measured on the other core.)
            given = settings.plan and len(settings.plan.layers)
            num_layers = given or num_layers_in(settings.partition) or MOST_OPENED
        layers = find_layers(root, num_layers)
        if replicas.topology.num_ranks > 1:
            require_layers(root, layers.values())
        elif not layers:
            layers = {type(root).__name__: root}
        gates = [
            Gate(name, layer, index, self._current_pass)
            for index, (name, layer) in enumerate(layers.items())
        ]
        gated = set(map(id, layers.values()))
        self._scopes = [
            Scope("", module, -1, self._current_pass)
            for module in find_scopes(root)
            if id(module) not in gated
        ]
        if uncompiled := compiled_around(root, layers.values()):
            say(
                f"PipeShift runs {', '.join(map(repr, uncompiled))} without compiling, as there are"
                " layers inside. Compile the layers instead, each by itself:"
                f" `{next(iter(layers))}.compile()`, and so on."
            )
        settings.check(gates, replicas.topology.stages_per_vm)
        self._gates = [*gates, *self._scopes]
        self._install()
        in_step = StepGroup(replicas.vm, replicas.count).in_force
        self._trace_cache = TraceCache(
            root,
            gates,
            self._current_pass,
            self.streams,
            channels.device,
            self.late_updates.finish,
            in_step,
        )
        self.one_stage = OneStage(root, self._current_pass, self.streams, channels.device)
        """Runs the steps of a single device: see :meth:`plain_training_step`."""
        self.changes = Changes(self.vm, self._trace_cache, self._move, self._put_in_force)
        self._recorder = LogRecorder(root)
        self._user_state = UserState(
            root,
            self._modules_outside_layers(),
            ignored,
            channels,
            lambda layer: self.plan.placement.stage_of(self.vm, layer),
        )
        self._reporting = Reporting(replicas, self._user_state)
        self._votes = Votes(
            replicas.world,
            self.changes,
            lambda: self.asks_to_end,
            lambda: self.planning.has_decided or outside.has_requests,
            self.planning.decisions.refuse,
        )
        self._listeners: Sequence[StepListener] = (self._votes, self.changes, self._user_state)
        """Those of training steps, in the order of the calls: all ranks have voted on a plan before
        its layers begin to move.
        """
        self._touched: dict[int, set[int]] = {}
        self._called: set[int] = set()
        """The layers known to be called by a training step."""
        self._said_of_work: str | None = None
        self._plan: Plan | None = None
        self._ownership: Ownership | None = None
        self.holdings: Holdings | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._held_twice: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        """By which :attr:`memory` has been told of layers that move."""
        self.memory: StageMemory | None = None
        if settings.memory is not None:
            self.memory = StageMemory(
                settings.memory,
                channels,
                [gate.name for gate in gates],
                self._threads,
                fail_from_thread,
                self.messages.append,
            )
        self.order: list[int] = []
        """The layers in the order in which the last forward pass called them."""
        self._is_final = False
        self._num_microbatches_done = 0
        self.num_steps_done = 0
        """How many batches of the run are done."""
        self.step_seconds: float | None = None
        """The seconds between the starts of the last two steps."""
        self._begun: float | None = None
        self._prediction_check = PredictionCheck(self.planning, self.messages)
        # Whether this rank requests the end of the run, and whether all ranks know that one does.
        self.asks_to_end = self.is_to_end = False
        self.recorder_of_actions: Recorder | None = None
        """Takes notes of the current step, if it is recorded: see :meth:`record_actions`."""
        self._stage = Stage(
            root,
            channels,
            self._current_pass,
            self.streams,
            self._recorder,
            self._user_state.resolve,
            profile,
            in_step,
        )
        self._evaluations = Evaluations(self._stage, channels, self._user_state)

    def _install(self) -> None:
        """Makes the layers call this pipeline."""
        install(self._gates)

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
        return {gate.name: gate.layer for gate in self._trace_cache.gates}

    @property
    def traces(self) -> list[Trace]:
        """The traces of the steps that have been traced, in that order; empty if no step had to be
        traced.
        """
        return self._trace_cache.traces()

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.channels.stage == self.channels.num_stages - 1

    def _modules_outside_layers(self) -> dict[str, nn.Module]:
        inside = {id(part) for gate in self._trace_cache.gates for part in gate.layer.modules()}
        return {
            name: module for name, module in self.root.named_modules() if id(module) not in inside
        }

    def _prepare(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        optimizers: Iterable[Optimizer],
        final: bool,
        trains: bool = False,
    ) -> None:
        """Makes the plan on the first batch, and prepares this stage for it.

        The sanity check before training makes a provisional plan from the calls of validation; the
        first training batch makes the final one, and only then does a stage free the layers that it
        does not own.
        """
        if self._plan is not None and (self._is_final or not final):
            return
        optimizers = list(optimizers)
        seen = self._look(key, step, batch, trains)
        gates, trace, uses = self._trace_cache.gates, seen.trace, seen.uses
        layers = [gate.layer for gate in gates]
        plan = self.planning.first_plan(
            self._measure(seen, batch, optimizers if trains else [], trains), seen.idle, trains
        )
        plan.require_layers([gate.name for gate in gates])
        self._reorder(plan)
        placement = plan.placement
        check_order(trace.flow, placement, self.vm, gates)
        stage_of = placement.stages(self.vm)
        self._plan = plan
        self._ownership = Ownership.of(placement)
        self._touched = seen.touched
        self._called = set(range(len(layers)) if seen.called is None else seen.called)
        if trains and self._traces_steps:
            self._say_who_has_no_work()
        of_user_code = modules_of_user_code(self.root, layers, uses, seen.called)
        self.holdings = Holdings(self.root, uses, layers, stage_of, self.channels, of_user_code)
        self._optimizers = optimizers
        self._note_state_on_host()
        if not self._was_whole:
            self.holdings.obtain(self._deferred)
        self.holdings.match_shared()
        self.match_replicas(parameters_too=True)
        self.holdings.settle(optimizers, final, self._deferred)
        if final:
            self._deferred.forget()
        if trains:
            self._follow_with_memory()
            self._connect_sharers(uses, placement)
        if trains and self.replicas.count > 1:
            self._aggregation = self._make_aggregation(uses, placement)
        self._is_final = final

    def measure(self, step_number: int, step: UserStep, batch: Any) -> Measured | None:
        """Measures the machines and the layers without training: the result is on the first rank.
        The optimizer is not known yet: it counts as one with two values for each parameter. Every
        rank calls this, before the first batch.

        Args:
            step_number: counts batches over the whole run.
            step: runs the user's ``training_step``.
            batch: one microbatch.
        """
        seen = self._look(self._key("train", step_number, 0), step, batch, trains=True)
        return self._measure(seen, batch, None, trains=True)

    def _look(self, key: Key, step: UserStep, batch: Any, trains: bool) -> Seen:
        """Follows a step, and times its layers if that is needed. The layers are in call order from
        then on.
        """
        stopwatch = None
        if self.planning.measures:
            stopwatch = Stopwatch(self.channels.device, self.streams, trains, leaves_of(batch))
        trace = Trace.empty()
        if self._traces_steps:
            trace = self._trace_cache.first(
                key, step, batch, module_signature(self.root), stopwatch
            )
        # The first trace puts them in call order.
        gates = self._trace_cache.gates
        called: set[int] | None = None
        if trains and trace.flow.calls and not trace.is_drawn:
            # Otherwise a layer that was not called now might be called in the next step.
            called = {call.layer for call in trace.flow.calls}
        # Layers that no step calls (a copy, a head that is switched off) need no compute.
        idle = set(range(len(gates))) - called if called is not None else set()
        if stopwatch is not None:
            stopwatch.figures |= dict.fromkeys(idle, Figures(0.0))
        # Parameters used outside of layers in the sanity check remain so: every stage holds them.
        touched = {key: trace.touched.get(key, set()) for key in self._touched | trace.touched}
        named = {n: touched[id(p)] for n, p in self.root.named_parameters() if id(p) in touched}
        # Every rank traced its own batch; the result of rank 0 counts.
        named, called = self.replicas.world.share_object((named, called), source=0)
        touched = {id(p): named[n] for n, p in self.root.named_parameters() if n in named}
        layers = [gate.layer for gate in gates]
        scopes = [scope.layer for scope in self._scopes]
        uses = parameter_uses(self.root, layers, touched, called, scopes)
        figures = stopwatch.figures if stopwatch is not None else {}
        return Seen(trace, figures, touched, called, frozenset(idle), uses)

    def _measure(
        self, seen: Seen, batch: Any, optimizers: Sequence[Optimizer] | None, trains: bool
    ) -> Measured | None:
        """The measurements before the first step, on the first rank. Every rank calls this.

        Args:
            seen: the result of :meth:`_look`.
            batch: one microbatch.
            optimizers: those of the run; ``None``: not known yet.
            trains: whether the run trains.
        """
        layers = [gate.layer for gate in self._trace_cache.gates]
        self.planning.shared = shared_weights(self.root, layers, seen.uses, self.channels.device)
        # No GPU has run this yet: there, only a user's own plan moves weights.
        may_move = self.channels.device.type == "cpu"
        self.planning.waiting_bytes = {
            layer: bytes_of(p for p in parameters if p.is_meta or may_wait(p))
            for layer, parameters in self._only_theirs(seen.uses).items()
            if may_move
        }
        return self.planning.measure(
            self._trace_cache.gates,
            seen.trace,
            seen.figures,
            optimizers,
            float(size_or_one(batch)),
            self._held_bytes(),
            bytes_of(x for x in leaves_of(batch) if self._is_here(x)),
            trains,
            self.memory if trains else None,
        )

    def _only_theirs(self, uses: Iterable[ParameterUse]) -> dict[int, list[nn.Parameter]]:
        """The parameters that one layer only uses, by layer, without those of compiled layers:
        their code may have taken a weight's memory for good, or runs again when it has changed.
        """
        compiled = set(compiled_in(self.root))
        gates = self._trace_cache.gates
        return {
            layer: parameters
            for layer, parameters in of_one_layer(uses).items()
            if compiled.isdisjoint(gates[layer].layer.modules())
        }

    def _reorder(self, plan: Plan) -> None:
        """Makes each rank the stage that it is under a plan. Every rank calls this, between two
        steps.
        """
        topology = Topology(plan.ranks)
        if topology == self.replicas.topology:
            return
        self._reporting.pass_on(self.channels)
        self.channels.settle()
        self.replicas.reorder(topology)
        self._stage.find_neighbours()
        if self.holdings is not None:
            self.holdings.place(plan.placement.stages(self.vm))

    def _say_who_has_no_work(self) -> None:
        topology, placement = self.replicas.topology, self.plan.placement
        has_moved = self._num_microbatches_done > 0
        said = stages_without_work(self.settings, placement, topology, self._called, has_moved)
        if said is not None and said != self._said_of_work:
            self.messages.append(said)
        self._said_of_work = said

    def _held_bytes(self) -> int:
        """The bytes of the model in this device's memory."""
        held = {
            address_of(tensor): tensor
            for tensor in [*self.root.parameters(), *self.root.buffers()]
            if self._is_here(tensor)
        }
        return bytes_of(held.values())

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.channels.device.type

    @property
    def plan_in_call_order(self) -> Plan:
        """The plan in force, with its layers in the order in which they are called. If no step was
        traced, that order is known after one has run.
        """
        plan, names = self.plan, [gate.name for gate in self._trace_cache.gates]
        if self._traces_steps or not self.order:
            return plan
        records = {record.name: record for record in plan.layers}
        order = call_order(self.order, len(names))
        return replace(plan, layers=tuple(records[names[layer]] for layer in order))

    # --- another plan ---

    @property
    def coming_plan(self) -> Plan:
        """The plan that will be in force when all requested changes are done."""
        return self.changes.last or self.plan

    def adopt(self, plan: Plan, from_microbatch: int | None = None) -> None:
        """Puts another plan in force after the next step; or part by part after the next steps, if
        its layers take long to transfer. Every rank calls this, with the same plan, between the
        same steps.

        Args:
            plan: the plan.
            from_microbatch: the first microbatch of the step after the next which runs under the
                new plan, in one part; ``None``: PipeShift chooses.

        Raises:
            PlanError: it is for another model, other virtual machines, or other settings of
                training: only the owners of layers, the order of the ranks and the recomputation
                can change. Or a device lacks memory for layers while they move.
        """
        now, coming = self.plan, self.coming_plan
        self.settings.require_contiguous(plan)
        plan.require_layers([gate.name for gate in self._trace_cache.gates])
        found = (plan.schedule, plan.microbatches, tuple(map(len, plan.placement.counts)))
        allowed = (now.schedule, now.microbatches, tuple(map(len, now.placement.counts)))
        if found != allowed:
            raise PlanError(
                "Only the owners of layers, the order of ranks and recomputation can change: the "
                f"new plan has (schedule, microbatches, stages of each virtual machine) {found}, "
                f"the one in force {allowed}. Start a run with the new plan instead."
            )
        if not 0 <= (from_microbatch or 0) < plan.microbatches:
            raise PlanError(
                f"a plan from microbatch {from_microbatch} on; a step has the microbatches 0 to "
                f"{plan.microbatches - 1}"
            )
        plan = replace(plan, ranks=plan.ranks or coming.ranks)
        if plan.ranks != coming.ranks:
            self._require_reorderable(plan, from_microbatch)
        if from_microbatch and self.memory is not None:
            raise PlanError(
                f"a plan from microbatch {from_microbatch} on, and a memory budget, which holds "
                "for whole steps: use from_microbatch=0, or train without MemoryCompression"
            )
        self._request(plan, from_microbatch)

    def _require_reorderable(self, plan: Plan, from_microbatch: int | None) -> None:
        ranks, now = ([list(machine) for machine in one.ranks] for one in (plan, self.coming_plan))
        order = f"a plan for the ranks {ranks}, and the stages are the ranks {now}"
        if not Topology(plan.ranks).has_machines_of(self.replicas.topology):
            raise PlanError(
                f"{order}: ranks cannot change their virtual machine during training. Start a run"
                " with the new plan instead."
            )
        if from_microbatch:
            raise PlanError(
                f"{order}: they change places between two steps, not from microbatch"
                f" {from_microbatch} on. Use from_microbatch=0."
            )
        if plan.is_asynchronous or self.memory is not None:
            what = "MemoryCompression" if self.memory is not None else "an asynchronous schedule"
            raise PlanError(
                f"{order}: with {what} they cannot change places during training. Start a run with"
                " the new plan instead."
            )

    def _request(self, plan: Plan, from_microbatch: int | None) -> None:
        if from_microbatch is None:
            self.changes.request(self.planning.cut_overs(self.changes.next or self.plan, plan))
        else:
            self.changes.request([CutOver(plan, from_microbatch)])

    def migrate(self, moves: Iterable[Move]) -> None:
        """Makes layers change their owners after the next step. Every rank calls this, with the
        same moves, between the same steps.

        Raises:
            PlanError: a move is impossible. Then nothing changes.
        """
        plan = self.coming_plan
        plan = plan.with_placement(placement_after(plan, moves, self.settings.core == "values"))
        self.planning.require_memory(plan)
        self.adopt(plan)

    def _move(self, plan: Plan, optimizers: Sequence[Optimizer]) -> Migration:
        """Prepares the move of layers for a plan."""
        assert self.holdings is not None
        # The stages that the new owners are now.
        now = self.replicas.topology.ranks[self.vm]
        stages = [now.index(rank) for rank in plan.ranks[self.vm]]
        stage_of = [stages[stage] for stage in plan.placement.stages(self.vm)]
        return Migration(self.holdings, stage_of, optimizers, self._threads, self._deferred)

    def _put_in_force(self, plan: Plan, first: int) -> None:
        """Puts a plan in force from a microbatch of the step on."""
        assert self.holdings is not None
        assert self._ownership is not None
        self._reorder(plan)
        begin = self._num_microbatches_done + first
        self._ownership = self._ownership.moved(plan.placement, begin)
        self._plan = plan
        self._follow_with_memory()
        self._connect_sharers(self.holdings.uses, plan.placement)
        if self._aggregation is not None:
            self._aggregation.close()
            self._aggregation = self._make_aggregation(
                self.holdings.uses, plan.placement, is_new=False
            )
        self.planning.decisions.came_into_force(plan, is_last=self.changes.last is None)

    def _follow_with_memory(self) -> None:
        if self.memory is None:
            return
        stage, on_host = self.channels.stage, self.plan.optimizer_on_host_of(self.vm)
        waiting = self.plan.weights_on_host_of(self.vm)
        own = self.plan.placement.layers_of(self.vm, stage)
        runs = {*own, *self._layers_on_their_way}
        window_bytes = self.planning.window_bytes([layer for layer in own if layer in waiting])
        self._held_twice = self.changes.held_twice
        self.memory.follow(
            self.plan,
            self.vm,
            self.planning.static_bytes(stage, self.channels.num_stages, runs, on_host, waiting),
            self.planning.profiler.expected_bytes,
            self.planning.bytes_held_twice(*self._held_twice, on_host, waiting)
            + window_bytes
            + self.planning.room_bytes(self.plan, self.vm, stage, runs),
        )
        self._note_state_on_host()
        gates = self._trace_cache.gates
        assert self.holdings is not None
        only_theirs = self._only_theirs(self.holdings.uses)
        self.memory.follow_with_state(
            self.plan,
            self.vm,
            self._optimizers,
            {layer: list(gates[layer].layer.parameters()) for layer in own},
            {layer: only_theirs.get(layer, []) for layer in own},
            window_bytes,
            self.planning.optimizer_bytes,
            self.planning.state_stays,
        )
        for gate in gates:
            comes_and_goes = gate.index in self.memory.weights.layers
            gate.weights = self.memory.weights if comes_and_goes else None

    def _note_state_on_host(self) -> None:
        """Tells the holdings which parameters' optimizer state is not to be on the device."""
        assert self.holdings is not None
        on_host, gates = self.plan.optimizer_on_host_of(self.vm), self._trace_cache.gates
        self.holdings.state_on_host = frozenset(
            id(parameter) for layer in on_host for parameter in gates[layer].layer.parameters()
        )

    @property
    def _layers_on_their_way(self) -> frozenset[int]:
        """The layers that come to this stage or leave it while minibatches are in flight."""
        return frozenset()

    def _follow_moves_with_memory(self) -> None:
        if self._held_twice != self.changes.held_twice:
            self._follow_with_memory()

    def match_replicas(self, parameters_too: bool) -> None:
        """Copies the values of the first virtual machine to all others: the state of layers other
        than parameters (running statistics), and optionally the parameters. Every rank calls this.
        """
        if self.replicas.count == 1 or self.holdings is None:
            return
        match_replicas(
            self.replicas,
            self.plan.placement,
            [gate.layer for gate in self._trace_cache.gates],
            self._modules_outside_layers(),
            self.holdings.uses if parameters_too else [],
        )

    def _connect_sharers(self, uses: list[ParameterUse], placement: Placement) -> None:
        if self.channels.backend != "gloo":
            pairs = pairs_that_share(uses, placement, self.replicas.topology)
            self._groups.want(Purpose.SHARED, pairs)

    def _make_aggregation(
        self, uses: list[ParameterUse], placement: Placement, is_new: bool = True
    ) -> Aggregation:
        assert self._rings is not None
        groups = gradient_groups(uses, placement, self.replicas.topology)
        mine = [group for group in groups if self.replicas.rank in group.members]
        owners = list(dict.fromkeys(tuple(group.members) for group in groups))
        kind, why = self.settings.aggregation(self.channels.backend, len(owners), placement)
        if is_new:
            self.messages.append(f"gradient_aggregation is {kind!r}: {why}.")
        device, watched = self.channels.device, self.channels.watched
        is_gloo = self.channels.backend == "gloo"
        agree = self.replicas.world.post_sum if self._sums_together and not is_gloo else None
        num_lanes = self._give_lanes(groups, placement.num_layers)
        if is_gloo:
            device = torch.device("cpu")
            if kind == "ring":
                if is_new:
                    self._rings.open_lanes(num_lanes)
                return Aggregation(
                    mine, self._rings.start, agree, len(uses), device, in_order=False
                )
        self._groups.want(Purpose.SUMS, owners, min(num_lanes, MOST_LANES_OF_COLLECTIVES))
        sums: Any = AllReduce(self._groups, watched)
        if kind == "ring":
            sums = DeviceRings(self._groups, self.replicas.rank, watched)
        return Aggregation(mine, sums.start, agree, len(uses), device, in_order=True)

    @property
    def lane_traffic(self) -> dict[str, LaneTraffic]:
        """Counts of the blocks that this rank has sent on each lane, by its name."""
        return self.channels.traffic

    def _give_lanes(self, groups: Sequence[GradientGroup], num_layers: int) -> int:
        """Sets the urgency of each group's messages. Returns how many lanes there is use for.

        Args:
            groups: all of them, in an order that is the same on every rank.
            num_layers: how many layers the model has.
        """
        # The same on every rank, or members of a ring would use different lanes: so parameters
        # count that the rank does not hold.
        sizes = [0] * num_layers
        for group in groups:
            if group.is_hooked:
                sizes[group.number] = bytes_of(group.trained)
        lanes = lanes_by_share(sizes, self.plan.lane_shares or equal_shares(sizes))
        for group in groups:
            # The step ends when the sums of shared parameters are there.
            if group.is_hooked:
                group.urgencies = tuple(
                    (part.end, Urgency(part.lane, group.number)) for part in lanes[group.number]
                )
        return len(equal_shares(sizes))

    @property
    def migration_seconds(self) -> float:
        """How long this stage has waited because of the last change of owners."""
        return self.changes.seconds

    @property
    def exposed_seconds(self) -> float:
        """How long the last step has waited for gradients of other virtual machines, in seconds,
        after its own compute.
        """
        return self._aggregation.exposed_seconds if self._aggregation is not None else 0.0

    @property
    def _traces_steps(self) -> bool:
        """Whether steps have to be traced before they run. A single stage runs them directly,
        unless they are measured.
        """
        return self.replicas.topology.num_ranks > 1 or self.planning.measures

    def _traces(
        self,
        keys: Sequence[Key],
        slices: Sequence[tuple[Any, int]],
        step: UserStep,
        state: ModuleSignature,
        in_flight: int,
    ) -> list[Trace | None]:
        """Returns the traces of a training step's microbatches.

        Args:
            keys: determine the random streams.
            slices: the microbatches, and their sizes.
            step: runs the user's step.
            state: the module's signature.
            in_flight: how many microbatches may be between their forward and backward at a time.
        """
        values = PlainValues(self.root, step.arguments)
        traces = []
        for key, (part, _) in zip(keys, slices, strict=True):
            trace = self._trace(key, step, part, state, values)
            traces.append(trace)
            if trace is not None and trace.changes.updates:
                values = values.after(trace.changes)
                state = state.with_attributes(values.attributes)
        if in_flight > 1:
            for trace in filter(None, traces):
                trace.require_equal_weights()
        return traces

    def _require_known_switches(
        self, traces: Iterable[Trace | None], state: ModuleSignature
    ) -> None:
        switches = [trace.switches for trace in traces if trace is not None]
        if switches:
            require_only(switches, state.flags, self.root)

    def _trace(
        self, key: Key, step: UserStep, batch: Any, state: ModuleSignature, values: PlainValues
    ) -> Trace | None:
        if not self._traces_steps:
            return None
        trace, is_new = self._trace_cache.trace(key, step, batch, state, values)
        if is_new:
            self._note_touched(trace)
        return trace

    def _note_touched(self, trace: Trace) -> None:
        assert self.holdings is not None
        for use in self.holdings.uses:
            layers = trace.touched.get(id(use.parameter))
            if layers is None or use.everywhere:
                continue
            if self._is_final and self.channels.num_stages > 1:
                raise LayerError(
                    f"The parameter {use.name!r} is used outside of its layer in this step but not"
                    " in the first one. Use it through its layer, or in every step."
                )
            self._touched.setdefault(id(use.parameter), set()).update(layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """A copy of a Trainer is of the same run: threads and connections cannot be copied."""
        return self

    # --- a single device ---

    @property
    def is_by_itself(self) -> bool:
        """Whether this is the only device, and its steps are not traced."""
        return not self._traces_steps

    @property
    def runs_plain_steps(self) -> bool:
        """Whether this is the only device, and a step has one microbatch."""
        stages_per_vm = self.replicas.topology.stages_per_vm
        return self.is_by_itself and self.settings.leaves_steps_whole(stages_per_vm)

    def begins_plain_step(
        self, batch: Any, step: UserStep, step_number: int, optimizers: Sequence[Optimizer]
    ) -> bool:
        """Whether the coming training step is the user's own, without additions: on one device, if
        the batch is not split, nothing is measured, and no layer is recomputed or moves. Makes the
        plan on the first batch, as the plan decides about recomputation.

        Args:
            batch: as for :meth:`training_step`, as are the others.
            step: runs the user's ``training_step``.
            step_number: counts batches over the whole run.
            optimizers: whose state follows the parameters.
        """
        if not self.runs_plain_steps:
            return False
        key = self._key("train", step_number, 0)
        self._prepare(key, step, batch, optimizers, final=True, trains=True)
        return not self.plan.recomputed(self.vm) and self.changes.last is None

    def plain_training_step(self, batch: Any, step: UserStep, step_number: int) -> Any:
        """Runs the forward of a training step, after :meth:`begins_plain_step` returned ``True``.
        Its backward runs in :meth:`plain_backward`.

        Returns:
            what the user's step returned.
        """
        self._note_begin()
        result = self._plain_forward(self._key("train", step_number, 0), step, batch)
        self.is_to_end = self.asks_to_end
        self._num_microbatches_done += 1
        if self._outside.has_requests:
            self._open_mail()
        self.num_steps_done = step_number + 1
        return result

    def plain_backward(self) -> AbstractContextManager[None]:
        """Context of the backward of the last :meth:`plain_training_step`."""
        assert self.holdings is not None
        return self.one_stage.backward(self.holdings)

    def plain_evaluation_step(
        self, batch: Any, step: UserStep, purpose: str, step_number: int, final: bool
    ) -> Any:
        """Runs an evaluation step on a single device, and returns its result.

        Args:
            batch: as for :meth:`evaluation_step`, as are the others.
            step: runs the user's step.
            purpose: the kind of the user's step, and its dataloader.
            step_number: counts its batches.
            final: whether a plan that is made now is final.
        """
        key = self._key(purpose, step_number, 0)
        self._prepare(key, step, batch, (), final)
        return self._plain_forward(key, step, batch)

    def _plain_forward(self, key: Key, step: UserStep, batch: Any) -> Any:
        assert self.holdings is not None
        self.channels.num_done += 1
        with self.section("[PipeShift] forward", What.ACTION, "F0"):
            result, self.order = self.one_stage.forward(
                step, batch, key, self.holdings, len(self._trace_cache.gates)
            )
        return result

    def meets(self) -> None:
        """Tells that this stage comes to where all wait for each other, outside of a step."""

    def _note_begin(self) -> None:
        now = time.perf_counter()
        self.step_seconds, self._begun = now - self._begun if self._begun else None, now
        self._prediction_check.note(self._plan, self.step_seconds)

    # --- training ---

    @purpose("a training step")
    def training_step(self, given: TrainingBatch) -> Report:
        """Runs a whole training step, forwards and backwards, and saves its gradients for
        :meth:`Strategy.backward`.

        Args:
            given: the batch.
        """
        self._note_begin()
        self.late_updates.suspend()
        # The objects sent in the last step have been received by now, so this hardly waits.
        self.channels.settle()
        self._check_batch(given.batch, given.batch_idx)
        slices = split(
            given.batch, self.settings.num_microbatches(self.replicas.topology.stages_per_vm)
        )
        keys = [self._key("train", given.step_number, number) for number in range(len(slices))]
        self.planning.note_samples(sum(size for _, size in slices))
        self._prepare(keys[0], given.step, slices[0][0], given.optimizers, final=True, trains=True)
        state = module_signature(self.root)
        traces = self._traces(keys, slices, given.step, state, in_flight=len(slices))
        for listener in self._listeners:
            listener.before_step(given, traces)
        self._follow_moves_with_memory()
        step = self._step(given, self._microbatches(keys, slices, traces))
        report = self._run(step, given)
        self._require_known_switches(traces, state)
        # Before the sums: the gradients of layers that have moved arrive with them.
        self._finish_change()
        self._collect_gradients(given, report)
        self._num_microbatches_done += len(slices)
        for listener in self._listeners:
            listener.after_step(given, traces, report)
        self._follow_moves_with_memory()
        self.is_to_end = self._votes.are_for_end
        self._replan(given.optimizers)
        if self._votes.are_for_requests:
            self._open_mail()
        self.num_steps_done = self.planning.decisions.step = given.step_number + 1
        return report

    def _check_batch(self, batch: Any, batch_idx: int) -> None:
        if self.channels.num_stages > 1 and is_checked(batch_idx):
            require_same_batch(batch, batch_idx, self.channels)

    def record_actions(self, recorder: Recorder | None) -> None:
        """Sets what takes notes of the coming steps; ``None``: nothing does."""
        self.recorder_of_actions = recorder
        store = self.memory.store if self.memory is not None else None
        parts: Any = (self.channels.turns, self._rings, self._aggregation, store, self.changes)
        for part in parts:
            if part is not None:
                part.recorder = recorder

    def section(self, profiled: str, what: str = What.SECTION, name: str = "") -> Any:
        """A context for the profiler, and for the recorder if there is one."""
        inner, recorder = self._profile(profiled), self.recorder_of_actions
        if recorder is None:
            return inner
        return recorder.section(what, name or profiled.removeprefix("[PipeShift] "), inner)

    # --- training: the plan's changes ---

    def _finish_change(self) -> None:
        if self.changes.finish():
            self._say_who_has_no_work()
            # Times under the old plan, and of this step, do not hold for the new plan.
            profiler = self.planning.profiler
            profiler.begin_anew(for_good=profiler.is_over)

    def _replan(self, optimizers: Sequence[Optimizer]) -> None:
        if self.changes.last is None and not self.plan.placement.owners:
            own = self.plan.placement.layers_of(self.vm, self.channels.stage)
            self.planning.after_step(self.plan, own, self._trace_cache.gates, optimizers)

    # --- training: the step ---

    def _microbatches(
        self,
        keys: Sequence[Key],
        slices: Sequence[tuple[Any, int]],
        traces: Sequence[Trace | None],
    ) -> list[Microbatch]:
        # Where the schedule has no recompute action, a layer runs again in the middle of the
        # backward.
        recompute = self.plan.recomputations(self.vm)
        return [
            self._microbatch(key, part, trace, size, recompute)
            for key, (part, size), trace in zip(keys, slices, traces, strict=True)
        ]

    def _sums(self, accumulation: Accumulation) -> Aggregation | None:
        """Sums a step's gradients over the virtual machines, if an optimizer step follows it."""
        return self._aggregation if not accumulation.goes_on else None

    def _step(self, given: TrainingBatch, microbatches: Sequence[Microbatch]) -> Step:
        assert self.holdings is not None
        profiler, migration = self.planning.profiler, self.changes.migration
        is_measured = self.planning.measures and not profiler.is_over
        sizes = [microbatch.size for microbatch in microbatches]
        losses = self._reporting.losses(sizes, given.loss_scale, self.plan.microbatches)
        sums = self._sums(given.accumulation)
        reports = partial(self._reporting.begin, given.wants_result, losses)
        return Step(
            function=given.step,
            microbatches=microbatches,
            trains=True,
            shared=self.holdings.shared,
            losses=losses,
            after_last_forward=reports if self.is_last else None,
            before_last_backward=(
                partial(sums.arm, migration.late if migration is not None else ())
                if sums is not None and not given.accumulation.has_begun
                else None
            ),
            is_in_flight=self.channels.num_stages > 1 and len(microbatches) > 1,
            timers=profiler.timers(sizes) if is_measured else {},
            observer=profiler.observer if is_measured and not profiler.num_steps else None,
            store=self.memory.store if self.memory is not None else None,
            migration=migration,
            late_updates=self.late_updates if self.late_updates.is_pending else None,
            recorder=self.recorder_of_actions,
        )

    def _run(self, step: Step, given: TrainingBatch) -> Report:
        """Runs this stage's actions. Returns the last stage's report of the step, on every
        stage.
        """
        assert self.holdings is not None
        again = self.plan.recomputing_stages(self.vm)
        row = self._row(self.plan.schedule, len(step.microbatches), again)
        source = self.channels.num_stages - 1
        self.holdings.set_gradients_aside(given.keeps_gradients)
        posted = None if self.is_last else self.channels.post_object(source)
        self.planning.profiler.begin_step()
        with self._waiting_weights():
            self._stage.run(row, step)
        self.planning.profiler.end_step()
        # Of layers that the step has not called.
        self.late_updates.finish()
        if step.migration is None:
            # Before this stage waits for others: they can use its sums now.
            with self.section("[PipeShift] sum gradients"):
                self.holdings.sum_shared()
        self.order = step.order or self.order
        report: Report | None = None
        if self.is_last:
            report = self._reporting.end(step.losses, given.is_last_batch)
            report.stops = given.stops()
            report = merge_reports(self.replicas.exchange(report), self.vm)
        with self.section(WAIT, What.WAIT, REPORT):
            report = self.channels.share_object(report, source, posted)
            self._stage.settle()
        assert report is not None
        require_same_end(given.is_last_batch, report.is_last_batch, given.batch_idx)
        return report

    def _waiting_weights(self) -> AbstractContextManager[None]:
        """A context in which weights that wait in host memory come to the device."""
        return self.memory.weights.in_step() if self.memory is not None else nullcontext()

    def _collect_gradients(self, given: TrainingBatch, report: Report) -> None:
        assert self.holdings is not None
        sums = self._sums(given.accumulation)
        finish = partial(self._finish_sums, sums, given, report) if sums is not None else None
        joins = sums is not None and given.accumulation.has_begun
        with self.section("[PipeShift] sum gradients"):
            self.holdings.collect_gradients(report.correction, finish, joins)

    def _finish_sums(
        self, sums: Aggregation, given: TrainingBatch, report: Report
    ) -> list[nn.Parameter]:
        """Waits for sums over the virtual machines. Returns the parameters with a later sum."""
        has_loss = report.loss is not None and bool(report.correction)
        assert self.holdings is not None
        measure = self.holdings.measure_norms if self.needs_norms else None
        groups = sums.finish(given.leaves_late and has_loss, measure)
        # Those of several batches are corrected before they are summed.
        correction = 1.0 if given.accumulation.has_begun else report.correction
        self.late_updates.take(sums, groups, correction)
        return [parameter for group in groups for parameter in group.parameters]

    def _open_mail(self) -> None:
        """Carries out requests from other processes, and decisions of the first rank."""
        has_decided = self.planning.has_decided
        asked = (self._outside.take_requests(), has_decided)
        requests, has_decided = self.replicas.world.share_object(asked, source=0)
        for request in requests:
            try:
                self.migrate(request.moves)
                answer = Answer(True, f"{request}, from step {self.num_steps_done + 2} on")
            except PipeShiftError as error:
                answer = Answer(False, f"nothing moves: {error}")
            self.messages.append(f"asked from outside: {answer.text}.")
            self._outside.answer(request, answer)
        if has_decided:
            decision = self.planning.announce(self.coming_plan)
            plan = Plan.from_json(decision.plan)
            if decision.is_new:
                try:
                    self.adopt(plan)
                except PlanError as error:
                    self.planning.decisions.refuse(str(error))
            elif self.changes.last is None:
                self._plan = plan

    def _key(self, purpose: str, step_number: int, microbatch: int) -> Key:
        return (self.settings.seed, purpose, step_number, microbatch, self.vm)

    def _microbatch(
        self,
        key: Key,
        part: Any,
        trace: Trace | None,
        size: int,
        recompute: Mapping[int, Set[int]] | None = None,
    ) -> Microbatch:
        assert self._ownership is not None
        placement = self._ownership.placement(self._num_microbatches_done + int(key[3]))
        if trace is not None and trace.checked is not placement:
            check_order(trace.flow, placement, self.vm, self._trace_cache.gates)
            trace.checked = placement
        # Batches that are evaluated follow each other like the microbatches of a step.
        is_first = not key[3] and key[1] == "train" and not self.plan.is_asynchronous
        if trace is not None and trace.carried and not is_first:
            check_carried(trace.carried, placement, self.vm, self._trace_cache.gates)
        layers = placement.layers_of(self.vm, self.channels.stage)
        assert isinstance(layers, range)
        return Microbatch(part, size, trace, layers, key, recompute or {})

    def _row(
        self, schedule: str, num_microbatches: int, recomputing: frozenset[int] = frozenset()
    ) -> Row:
        num_stages = self.channels.num_stages
        return _lowered(schedule, num_stages, num_microbatches, recomputing)[self.channels.stage]

    @property
    def recorder(self) -> LogRecorder:
        """The object that replaces the LightningModule's ``log`` while a step runs."""
        return self._recorder

    # --- evaluation ---

    @purpose("a step of an evaluation")
    def evaluation_step(
        self,
        batch: Any,
        batch_idx: int,
        step: UserStep,
        purpose: str,
        step_number: int,
        final: bool,
        wants_result: bool,
    ) -> Trace | None:
        """Runs this stage's part of a forward-only step. Its report is returned by
        :meth:`fetch_reports`. Until then only the result of the user's step is kept, in host
        memory, and only if ``wants_result``.
        """
        self._check_batch(batch, batch_idx)
        key = self._key(purpose, step_number, 0)
        # Optimizer state from an earlier training remains on its stage.
        self._prepare(key, step, batch, (), final)
        values = PlainValues(self.root, step.arguments)
        trace = self._trace(key, step, batch, module_signature(self.root), values)
        microbatch = self._microbatch(key, batch, trace, 1)
        assert self.holdings is not None
        todo = Step(
            function=step,
            microbatches=[microbatch],
            shared=self.holdings.shared,
            losses=Losses(sizes=[1]),
            is_in_flight=self.channels.num_stages > 1,
        )
        with self._waiting_weights():
            self._evaluations.run(self._row("forward", 1), todo, size_or_one(batch), wants_result)
        return microbatch.trace

    def fetch_reports(self) -> list[Report]:
        """Returns the reports of all evaluation steps since the last call, on every stage; waits
        for the last stage.
        """
        return self._evaluations.fetch_reports()

    @property
    def num_pending(self) -> int:
        """The number of evaluation steps whose reports have not been fetched."""
        return self._evaluations.num_pending

    def settle_values(self) -> None:
        """Makes what user code keeps of other stages' tensors common. Every stage calls this."""

    # --- the end ---

    def release_gates(self) -> None:
        """Restores the layers' own ``forward``."""
        self.changes.abandon()
        self.late_updates.abandon()
        if self._aggregation is not None:
            self._aggregation.close()
        if self.memory is not None:
            self.memory.close()
        self._threads.close()
        remove(self._gates)
        self._current_pass.value = None

    @purpose("the layers of the other stages, at the end of the run")
    def make_whole(self) -> None:
        """Gives every rank the whole model again, if it had it before. Every stage calls this."""
        if self.holdings is None:
            return
        self.changes.cancel()
        if self._was_whole:
            self.holdings.make_whole()
        else:
            self.holdings.to_cpu()
