"""One rank's part of a pipeline whose stages all run the whole of the user's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import compiled_in, without_compiling
from lightning_pipeshift.devices.properties import total_memory
from lightning_pipeshift.errors import BudgetError, PipeShiftError, PlanError
from lightning_pipeshift.model.execution.microbatch import size_or_one, split
from lightning_pipeshift.model.execution.transfer import to_device, to_host
from lightning_pipeshift.model.execution.trees import address_of, leaves_of
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, is_whole
from lightning_pipeshift.model.parameters.layers import (
    FEWEST_LAYERS,
    compiled_around,
    find_layers,
    require_layers,
)
from lightning_pipeshift.model.parameters.uses import (
    ParameterUse,
    modules_of_user_code,
    of_one_layer,
)
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.saved_tensors import (
    SavedTable,
    addresses_of,
    bytes_of,
    resident_in,
)
from lightning_pipeshift.model.user_state.logs import LoggedValue, LogRecorder, merge_logs
from lightning_pipeshift.model.user_state.metrics import BatchMetrics
from lightning_pipeshift.model.user_state.random_streams import stream_seed
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.layer_memory import SENDS_UNDER_WAY
from lightning_pipeshift.plan.document.moves import Move, placement_after
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.flow import call_order, merged_order
from lightning_pipeshift.plan.inputs.partition import num_layers_in
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.plan.schedule.schedules import forward_only, schedule_named
from lightning_pipeshift.runtime.comm.channels import Channels, PostedSum
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key as MessageKey
from lightning_pipeshift.runtime.comm.messages import Kind as Carries
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.step_group import StepGroup
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.comm.turns import LaneTraffic
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.gradients.replica_sync import match_replicas
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore
from lightning_pipeshift.runtime.offload.out_of_memory import explained
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.offload.weight_memory import may_wait
from lightning_pipeshift.runtime.ownership.changes import Changes
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.ownership.sharing import shared_weights
from lightning_pipeshift.runtime.ownership.user_copies import kept_by_user
from lightning_pipeshift.runtime.planning.make_plan import Settings, stages_without_work
from lightning_pipeshift.runtime.planning.prediction_check import PredictionCheck
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.step.checksum import (
    checksum,
    is_checked,
    require_same_batch,
    require_same_end,
)
from lightning_pipeshift.step.control_files import Answer, ControlFiles
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.first_look import FirstLook, Seen
from lightning_pipeshift.step.gathering import Gathering, of_its_own
from lightning_pipeshift.step.gradient_sums import GradientSums
from lightning_pipeshift.step.losses import Losses
from lightning_pipeshift.step.reporting import Reporting
from lightning_pipeshift.step.step_report import Report, merge_reports
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.step.training_batch import (
    WAIT,
    Accumulation,
    Key,
    Profile,
    TrainingBatch,
    UserStep,
)
from lightning_pipeshift.step.votes import Votes
from lightning_pipeshift.timeline.recording import REPORT, What
from lightning_pipeshift.values.calls import CallWatch
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gathering import Prefetch, Structure, kept
from lightning_pipeshift.values.microbatch import OUTSIDE, Microbatch
from lightning_pipeshift.values.saves import Saves, Where
from lightning_pipeshift.values.value import Value, run_by, running, set_program

EVALUATIONS_AHEAD = 4
"""How many batches of an evaluation a stage may be ahead of another one."""
_SENDS = {
    (Carries.VALUE, 1): Kind.SEND_PAYLOAD,
    (Carries.GRADIENT, -1): Kind.SEND_GRADIENT,
}


@dataclass
class _Evaluated:
    """The result and the logs of an evaluation step, which may contain values."""

    result: Any
    logs: list[LoggedValue]
    size: int


class Pipeline:
    """One rank's part of one virtual machine's pipeline, from ``setup`` to ``teardown``. Its stages
    run on values: see :mod:`lightning_pipeshift.values`.

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

    _sums_together = True
    """Whether all ranks are at the same step when gradients are summed."""

    _engine_class = Engine
    """The class of the engine that carries out this pipeline's schedule."""

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
        self._aggregation: Aggregation | None = None
        self.late_updates = LateUpdates()
        self.needs_norms = False
        """Whether the norms of gradients are needed before the optimizer steps."""
        # Messages about decisions, for the user.
        self.messages: list[str] = []
        self.settings = settings
        self._gradient_sums = GradientSums(
            rings, groups, channels, replicas, settings, self._sums_together, self.messages.append
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
        self._first_look = FirstLook(root, self._layers, channels, replicas, self.planning)
        settings.check(self._layers, replicas.topology.stages_per_vm)
        self.changes = Changes(self._move, self._put_in_force)
        self._reporting = Reporting(replicas)
        self._votes = Votes(
            replicas.world,
            lambda: self.asks_to_end,
            lambda: self.planning.has_decided or outside.has_requests,
        )
        self._called: set[int] = set()
        """The layers known to be called by a training step."""
        self._is_timed = False
        """Whether layers were timed before the first step."""
        self._said_of_work: str | None = None
        self._plan: Plan | None = None
        self.holdings: Holdings | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._held_twice: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()
        """By which :attr:`memory` has been told of layers that move."""
        self.memory: StageMemory | None = None
        if settings.memory is not None:
            self.memory = StageMemory(
                settings.memory,
                channels,
                [layer.name for layer in self._layers],
                self._threads,
                fail_from_thread,
                self.messages.append,
            )
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
        self.recorder_of_actions: Recorder | None = None
        """Takes notes of the current step, if it is recorded: see :meth:`record_actions`."""
        self.recorder = LogRecorder(self.root, kept, running)
        """Replaces the LightningModule's ``log`` while a step runs."""
        self.core: Core | None = None
        self._placed: AbstractContextManager[None] | None = None
        self._between: Microbatch | None = None
        self._evaluated: list[_Evaluated] = []
        self.find_optimizers: Callable[[], Sequence[Optimizer]] = list
        """Those of the run."""
        self.user_step: UserStep | None = None
        """The user's step of training; ``None`` where the run does not train."""
        self._store: ActivationStore | None = None
        """While a training step runs, what keeps its saved tensors within the budget."""
        self._places: dict[Action, int] = {}
        """Of the actions in the step's row."""
        self._where = Where()
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
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.channels.stage == self.channels.num_stages - 1

    def _modules_outside_layers(self) -> dict[str, nn.Module]:
        inside = {id(part) for each in self._layers for part in each.layer.modules()}
        return {
            name: module for name, module in self.root.named_modules() if id(module) not in inside
        }

    def _prepare(self, key: Key, step: UserStep, batch: Any) -> None:
        """Makes the plan on the first batch, and prepares this stage for it."""
        if self._plan is not None:
            return
        optimizers = list(self.find_optimizers())
        trains = bool(optimizers)
        seen = self._first_look.look(key, step, batch, trains, self.user_step)
        uses, layers = seen.uses, [each.layer for each in self._layers]
        plan = self.planning.first_plan(
            self._measure(seen, batch, optimizers, trains), seen.idle, trains
        )
        plan.require_layers([each.name for each in self._layers])
        self._reorder(plan)
        placement = plan.placement
        stage_of = placement.stages(self.vm)
        self._plan = plan
        self._called = set(range(len(layers)) if seen.called is None else seen.called)
        of_user_code = modules_of_user_code(self.root, layers, uses, seen.called)
        self.holdings = Holdings(
            self.root, uses, layers, stage_of, self.channels, of_user_code, seen.in_steps
        )
        self._optimizers = optimizers
        self._note_state_on_host()
        if not self._was_whole:
            self.holdings.obtain(self._deferred)
        self.holdings.match_shared()
        self.match_replicas(parameters_too=True)
        self.holdings.settle(optimizers, self._deferred)
        self._deferred.forget()
        if trains:
            self._follow_with_memory()
            self._gradient_sums.connect_sharers(uses, placement)
        if trains and self.replicas.count > 1:
            self._aggregation = self._gradient_sums.aggregation(uses, plan)
        if any(self.plan.recompute) and not self._is_automatic:
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
            records = tuple(replace(layer, forward_seconds=0.0) for layer in self.plan.layers)
            self._plan = replace(self.plan, layers=records, prediction=None)
        self._connect_core(seen.core)

    def measure(self, step_number: int, step: UserStep, batch: Any) -> Measured | None:
        """Measures the machines and the layers without training: the result is on the first rank.
        The optimizer is not known yet: it counts as one with two values for each parameter. Every
        rank calls this, before the first batch.

        Args:
            step_number: counts batches over the whole run.
            step: runs the user's ``training_step``.
            batch: one microbatch.
        """
        key = self._key("train", step_number, 0)
        seen = self._first_look.look(key, step, batch, True, self.user_step)
        return self._measure(seen, batch, None, trains=True)

    def _measure(
        self, seen: Seen, batch: Any, optimizers: Sequence[Optimizer] | None, trains: bool
    ) -> Measured | None:
        """The measurements before the first step, on the first rank. Every rank calls this.

        Args:
            seen: the result of :meth:`FirstLook.look`.
            batch: one microbatch.
            optimizers: those of the run; ``None``: not known yet.
            trains: whether the run trains.
        """
        layers = [each.layer for each in self._layers]
        # No GPU has run this yet: there, only a user's own plan moves weights.
        may_move = self.channels.device.type == "cpu"
        waiting_bytes = {
            layer: bytes_of(p for p in parameters if p.is_meta or may_wait(p))
            for layer, parameters in self._only_theirs(seen.uses).items()
            if may_move
        }
        return self.planning.measure(
            self._layers,
            seen.crossings,
            seen.figures,
            optimizers,
            float(size_or_one(batch)),
            self._held_bytes(),
            bytes_of(x for x in leaves_of(batch) if self._is_here(x)),
            trains,
            self.memory if trains else None,
            shared_weights(self.root, layers, seen.uses),
            waiting_bytes,
        )

    def _only_theirs(self, uses: Iterable[ParameterUse]) -> dict[int, list[nn.Parameter]]:
        """The parameters that one layer only uses, by layer, without those of compiled layers:
        their code may have taken a weight's memory for good, or runs again when it has changed.
        """
        compiled = set(compiled_in(self.root))
        return {
            layer: parameters
            for layer, parameters in of_one_layer(uses).items()
            if compiled.isdisjoint(self._layers[layer].layer.modules())
        }

    def _reorder(self, plan: Plan) -> None:
        """Makes each rank the stage that it is under a plan. Every rank calls this, between two
        steps.
        """
        core, before = self.core, self.channels.ranks
        topology = Topology(plan.ranks)
        if topology == self.replicas.topology:
            return
        is_renumbered = core is not None and list(plan.ranks[self.vm]) != before
        if is_renumbered:
            assert core is not None
            assert self._between is not None
            self._between.release()
            self.meets()
            core.mailbox.close()
        self._reporting.pass_on(self.channels)
        self.channels.settle()
        self.replicas.reorder(topology)
        if self.holdings is not None:
            self.holdings.place(plan.placement.stages(self.vm))
        if is_renumbered:
            assert core is not None
            core.renumber([self.channels.ranks.index(rank) for rank in before], self._mailbox())

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
        now, coming = self.plan, self.coming_plan
        plan.require_layers([each.name for each in self._layers])
        found = (plan.schedule, plan.microbatches, tuple(map(len, plan.placement.counts)))
        allowed = (now.schedule, now.microbatches, tuple(map(len, now.placement.counts)))
        if found != allowed:
            raise PlanError(
                "Only the owners of layers, the order of ranks and recomputation can change: the "
                f"new plan has (schedule, microbatches, stages of each virtual machine) {found}, "
                f"the one in force {allowed}. Start a run with the new plan instead."
            )
        plan = replace(plan, ranks=plan.ranks or coming.ranks)
        if plan.ranks != coming.ranks:
            self._require_reorderable(plan)
        if self._moves_shared(plan):
            raise PlanError(
                "With manual optimization, layers that share weights cannot move while training"
                " runs. Start a run with the new plan instead."
            )
        self._request(plan, at_once)

    def _require_reorderable(self, plan: Plan) -> None:
        ranks, now = ([list(machine) for machine in one.ranks] for one in (plan, self.coming_plan))
        order = f"a plan for the ranks {ranks}, and the stages are the ranks {now}"
        if not Topology(plan.ranks).has_machines_of(self.replicas.topology):
            raise PlanError(
                f"{order}: ranks cannot change their virtual machine during training. Start a run"
                " with the new plan instead."
            )
        if plan.is_asynchronous or self.memory is not None:
            what = "MemoryCompression" if self.memory is not None else "an asynchronous schedule"
            raise PlanError(
                f"{order}: with {what} they cannot change places during training. Start a run with"
                " the new plan instead."
            )

    def _request(self, plan: Plan, at_once: bool) -> None:
        # Owners change between two steps. No step waits for that: layers are sent while it runs.
        now = self.changes.next or self.plan
        self.changes.request([plan] if at_once else self.planning.parts_of(now, plan))

    def migrate(self, moves: Iterable[Move]) -> None:
        """Makes layers change their owners after the next step. Every rank calls this, with the
        same moves, between the same steps.

        Raises:
            PlanError: a move is impossible. Then nothing changes.
        """
        plan = self.coming_plan
        plan = plan.with_placement(placement_after(plan, moves))
        self.planning.require_memory(plan)
        self.adopt(plan)

    def _move(self, plan: Plan, optimizers: Sequence[Optimizer]) -> Migration:
        """Prepares the move of layers for a plan."""
        assert self.holdings is not None
        # The stages that the new owners are now.
        now = self.replicas.topology.ranks[self.vm]
        stages = [now.index(rank) for rank in plan.ranks[self.vm]]
        stage_of = [stages[stage] for stage in plan.placement.stages(self.vm)]
        return Migration(self.holdings, stage_of, optimizers, self._threads)

    def _put_in_force(self, plan: Plan) -> None:
        """Puts a plan in force, between two steps."""
        assert self.holdings is not None
        self._reorder(plan)
        self._plan = plan
        self._follow_with_memory()
        self._gradient_sums.connect_sharers(self.holdings.uses, plan.placement)
        if self._aggregation is not None:
            self._aggregation.close()
            self._aggregation = self._gradient_sums.aggregation(
                self.holdings.uses, plan, is_new=False
            )
        self.planning.decisions.came_into_force(plan, is_last=self.changes.last is None)
        core, between = self.core, self._between
        assert core is not None
        assert between is not None
        core.place(self._owners())
        core.note(between)
        self._begin_outside()
        self._begin_engine()

    def _follow_with_memory(self) -> None:
        if self.memory is None:
            return
        stage = self.channels.stage
        own = self.plan.placement.layers_of(self.vm, stage)
        runs = {*own, *self._layers_on_their_way}
        counted = self.planning.stage_bytes(self.plan, self.vm, stage)
        self._held_twice = self.changes.held_twice
        self.memory.follow(
            self.plan,
            self.vm,
            counted.taken(runs, *self._held_twice),
            self.planning.profiler.expected_bytes,
        )
        self._note_state_on_host()
        assert self.holdings is not None
        only_theirs = self._only_theirs(self.holdings.uses)
        self.memory.follow_with_state(
            self.plan,
            self.vm,
            self._optimizers,
            {layer: list(self._layers[layer].layer.parameters()) for layer in own},
            {layer: only_theirs.get(layer, []) for layer in own},
            counted.window,
            self.planning.model.optimizer_bytes,
            self.planning.model.state_stays,
        )
        for each in self._layers:
            comes_and_goes = each.index in self.memory.weights.layers
            each.weights = self.memory.weights if comes_and_goes else None

    def _note_state_on_host(self) -> None:
        """Tells the holdings which parameters' optimizer state is not to be on the device."""
        assert self.holdings is not None
        on_host, layers = self.plan.optimizer_on_host_of(self.vm), self._layers
        self.holdings.state_on_host = frozenset(
            id(parameter) for layer in on_host for parameter in layers[layer].layer.parameters()
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
        if self.replicas.count == 1:
            return
        # A layer may have put values into its buffers.
        self.settle_values()
        core = self.core
        if self.holdings is None:
            return
        match_replicas(
            self.replicas,
            self.plan.placement,
            [each.layer for each in self._layers],
            self._modules_outside_layers(),
            self.holdings.uses if parameters_too else [],
        )
        if core is None or not self.vm:
            return
        for number, layer in enumerate(core.layers):
            # Every stage has the buffers that a layer replaces, and only its owner got them.
            owner = core.owners(number, 0)
            mine = {each: each.get(layer) for each in core.states[number] if each.is_buffer}
            if mine:
                found = self._share(to_host(mine) if owner == self.channels.stage else None, owner)
                for attribute, buffer in to_device(found, self.channels.device).items():
                    attribute.set(layer, buffer)

    @property
    def lane_traffic(self) -> dict[str, LaneTraffic]:
        """Counts of the blocks that this rank has sent on each lane, by its name."""
        return self.channels.traffic

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """A copy of a Trainer is of the same run: threads and connections cannot be copied."""
        return self

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
            batch: as for :meth:`training_step`, as are the others.
            step: runs the user's ``training_step``.
            step_number: counts batches over the whole run.
        """
        stages_per_vm = self.replicas.topology.stages_per_vm
        if not (self.is_by_itself and self.settings.leaves_steps_whole(stages_per_vm)):
            return False
        self._prepare(self._key("train", step_number, 0), step, batch)
        return not self.plan.recomputed(self.vm) and self.changes.last is None

    def plain_training_step(self, batch: Any, step: UserStep, step_number: int) -> Any:
        """Runs the forward of a training step, after :meth:`begins_plain_step` returned ``True``.
        Its backward runs in ``plain_backward``.

        Returns:
            what the user's step returned.
        """
        self.meets()
        self._note_begin()
        result = self._plain_forward(self._key("train", step_number, 0), step, batch)
        self.is_to_end = self.asks_to_end
        self._num_microbatches_done += 1
        if self._outside.has_requests:
            self._open_mail()
        self.num_steps_done = step_number + 1
        return result

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
        key = self._key(purpose, step_number, 0)
        self._prepare(key, step, batch)
        return self._plain_forward(key, step, batch)

    def _plain_forward(self, key: Key, step: UserStep, batch: Any) -> Any:
        if self.core is None:
            # The run is over, and user code asks the Trainer's loop for one more step.
            return step(self.root, batch)
        _, kind, number, *_ = key
        (row,) = forward_only(1, 1)

        def run(part: Any, _: int) -> Any:
            return step(self.root, part)

        (result,) = self._in_step(str(kind), int(number), [batch], run, row)
        return result

    def _note_begin(self) -> None:
        now = time.perf_counter()
        self.step_seconds, self._begun = now - self._begun if self._begun else None, now
        self._prediction_check.note(self._plan, self.step_seconds)

    # --- training ---

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
        if self.core is not None:
            self._record_messages(self.core.mailbox)

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

    # --- training: the step ---

    def _sums(self, accumulation: Accumulation) -> Aggregation | None:
        """Sums a step's gradients over the virtual machines, if an optimizer step follows it."""
        return self._aggregation if not accumulation.goes_on else None

    def _collect_gradients(self, given: TrainingBatch, report: Report) -> None:
        assert self.holdings is not None
        sums = self._sums(given.accumulation)
        finish = partial(self._finish_sums, sums, given, report) if sums is not None else None
        joins = sums is not None and given.accumulation.has_begun
        with self.section("[PipeShift] sum gradients"):
            self.holdings.gradients.collect(report.correction, finish, joins)

    def _finish_sums(
        self, sums: Aggregation, given: TrainingBatch, report: Report
    ) -> list[nn.Parameter]:
        """Waits for sums over the virtual machines. Returns the parameters with a later sum."""
        has_loss = report.loss is not None and bool(report.correction)
        assert self.holdings is not None
        measure = self.holdings.gradients.measure_norms if self.needs_norms else None
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
        if self._placed is not None:
            self._placed.__exit__(None, None, None)
            self._placed = None
        if self._between is not None:
            self._between.release()
            self._between = None
        set_program(None, self.channels.device)

    @purpose("the layers of the other stages, at the end of the run")
    def make_whole(self) -> None:
        """Gives every rank the whole model again, if it had it before. Every stage calls this."""
        self.settle_values()
        if self.core is not None:
            self.core.mailbox.close()
            self.core = None
        if self.holdings is None:
            return
        self._cancel_changes()
        if self._was_whole:
            self.holdings.make_whole()
        else:
            self.holdings.to_cpu()

    def _cancel_changes(self) -> None:
        """Cancels changes of owners that are under way or asked for."""
        self.changes.cancel()

    def plain_backward(self) -> AbstractContextManager[None]:
        """Context of the backward of the last :meth:`plain_training_step`."""
        return run_by(None)

    def _mailbox(self) -> Mailbox:
        channels = self.channels
        members = [sorted(channels.ranks).index(rank) for rank in channels.ranks]
        mailbox = Mailbox(
            channels.control,
            members,
            channels.ranks,
            channels.stage,
            channels.watched,
            channels.device,
            channels.shares_memory_with,
        )
        mailbox.waiting = self._waiting
        if self.memory is not None:
            mailbox.most_large = SENDS_UNDER_WAY
        self._record_messages(mailbox)
        return mailbox

    def _record_messages(self, mailbox: Mailbox) -> None:
        is_recorded = self.recorder_of_actions is not None
        mailbox.on_send = self._note_send if is_recorded else None
        mailbox.on_take = self._note_taken if is_recorded else None

    def _note_taken(self) -> None:
        recorder, core = self.recorder_of_actions, self.core
        if recorder is not None and core is not None and not core.computes:
            recorder.begin_work()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context of a wait for a message."""
        recorder, core, waits_for = self.recorder_of_actions, self.core, self._engine.waits_for
        profiled = self._profile(WAIT)
        if recorder is None or core is None or (recorder.action or waits_for) is None:
            with profiled:
                yield
            return
        with recorder.waiting(str(waits_for), core.computes, profiled):
            yield
        core.computes = False

    def _note_send(self, to: int, key: MessageKey, num_bytes: int) -> None:
        """Notes a value on its way to the next stage, or a gradient to the one before."""
        recorder, channels = self.recorder_of_actions, self.channels
        kind = _SENDS.get((key.kind, to - channels.stage))
        number = self._number_of(key)
        if recorder is not None and kind is not None and number is not None:
            now = recorder.now()
            action = Action(kind, number)
            recorder.add(What.ACTION, str(action), now, now, channels.ranks[to], num_bytes)

    def _number_of(self, key: MessageKey) -> int | None:
        """The number of a message's microbatch; ``None`` if it is of no microbatch."""
        return key.turn if key.turn >= 0 else None

    def _connect_core(self, known: Core | None) -> None:
        """Connects the stages.

        Args:
            known: see :class:`Seen`.
        """
        channels, holdings = self.channels, self.holdings
        assert holdings is not None
        self.core = Core(
            self.root,
            [each.layer for each in self._layers],
            self._owners(),
            self._mailbox(),
            channels.device,
            stream_seed(self.settings.seed, self.vm),
            lambda tensor: holdings.holders_of(tensor) if holdings.knows(tensor) else (),
        )
        if known is not None:
            self.core.learn_from(known)
        self.core.calls, self.core.gates = self.calls, self._layers
        self.core.compares_floats = len(set(channels.gather_int(_arithmetic()))) == 1
        if not self._is_automatic:
            # Optimizers step in the middle of a step: one stage has the state of each parameter.
            for use in holdings.uses:
                self.core.parameter_owners.setdefault(use.parameter, 0)
                if len(holdings.holders_of(use.parameter)) > 1:
                    self.core.written.add(use.parameter)
        self._placed = self.core.placed()
        self._placed.__enter__()
        parameter_owners = self.core.parameter_owners
        holdings.is_common = lambda buffer: buffer not in parameter_owners
        self.late_updates.await_before = self.core.await_before
        self._begin_engine()
        self._gathering = Gathering(self.root, self.core, channels, self._share, self.meets)
        self._batch_metrics = BatchMetrics(self.root)
        self._begin_outside()

    @property
    def _is_automatic(self) -> bool:
        """Whether backwards and the optimizer's steps are Lightning's."""
        return getattr(self.root, "automatic_optimization", True)

    def _owners(self) -> Callable[[int, int], int]:
        stage_of = self.plan.placement.stages(self.vm)
        return lambda number, _: stage_of[number]

    def _begin_engine(self) -> None:
        """Begins to learn what steps use behind their reads, which depends on who owns what."""
        assert self.core is not None
        is_alone = self.channels.num_stages == 1
        self._tails = None
        if not is_alone:
            self._tails = Tails(self.core, self.messages.append, objects=_objects_around(self.root))
        self._engine = self._engine_class(self.core, self._tails, self._around)

    def _begin_outside(self) -> None:
        """Runs operations on values between two steps, from now on."""
        assert self.core is not None
        if self._between is not None:
            self._between.release()
        self._between = Microbatch(self.core, self.core.num_steps, self.core.num_steps, OUTSIDE)
        set_program(self._between, self.channels.device)

    def meets(self) -> None:
        """Tells that this stage comes to where all wait for each other, outside of a step."""
        if self.core is not None:
            self.core.mailbox.pass_phase()

    def _share(self, mine: Any, source: int) -> Any:
        self.meets()
        return self.channels.share_object(mine, source)

    def _logged(self, step: UserStep, batch: Any, _: int) -> tuple[Any, list[LoggedValue]]:
        """Runs a user's step; returns its result, and what it has logged."""
        result, program = step(self.root, batch), running()
        assert isinstance(program, Microbatch)
        if program.finite is not None and torch.is_grad_enabled():
            program.finite.loss(program.plain(result))
        return result, self.recorder.take()

    def _in_step(self, number: str, step: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs microbatches.

        Args:
            number: the kind of the step.
            step: its number.
            args: as for :meth:`Engine.run`, from the microbatches on.
            kwargs: likewise.
        """
        core, outside = self.core, running()
        assert core is not None
        assert isinstance(outside, Microbatch)
        core.step_number = step
        settings = [
            (name, x)
            for optimizer in self.find_optimizers()
            for group in optimizer.param_groups
            for name, x in group.items()
            if isinstance(x, int | float | tuple)
        ]
        outside.note("the optimizers", settings)
        core.note(outside)
        # Weights that wait in host memory come to the device.
        weights = self.memory.weights.in_step() if self.memory is not None else nullcontext()
        with weights, self._running_steps():
            results = self._engine.run(stream_seed(number, step), *args, **kwargs)
        if not self._first_look.looks_ahead:
            self.order = merged_order(list(core.called.values()))
        self._begin_outside()
        return results

    @contextmanager
    def _running_steps(self) -> Iterator[None]:
        assert self.core is not None
        in_step = StepGroup(self.vm, self.replicas.count).in_force()
        # A compiler follows neither values nor the parameters' class: see `Core.compiling`.
        with run_by(None), self.core.seeing_parameters(), in_step, without_compiling():
            yield

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        # Layers run again where their backward would.
        done = replace(action, kind=Kind.BACKWARD) if action.kind is Kind.RECOMPUTE else action
        place = self._places.get(done, 0)
        recorder, store = self.recorder_of_actions, self._store
        if self.late_updates.is_pending:
            self._update_before(action)
        with self._profile(f"[PipeShift] {action.kind.name.lower()}"):
            if recorder is not None:
                recorder.begin_action(action)
            if store is not None:
                if action.kind is Kind.BACKWARD and self.core is not None:
                    # The room of payloads is now that of gradients.
                    self.core.mailbox.await_sent(Carries.VALUE)
                store.begin_action(place, action)
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise self._explained(error, action) from error
            if store is not None:
                store.end_action(action)
            if recorder is not None and self.core is not None:
                recorder.end_action(self.core.computes)
        self.channels.num_done += 1

    def _begin_row(self, row: Row) -> None:
        """Called with a training step's actions on this stage, before the first of them."""
        self._store = self.memory.store if self.memory is not None else None
        if self._store is not None:
            self._store.begin_step(row)
            self._places = {action: place for place, action in enumerate(row)}

    def _end_row(self) -> None:
        self._store, self._places = None, {}

    def _explained(self, error: torch.OutOfMemoryError, action: Action) -> BudgetError:
        device, store = self.channels.device, self._store
        return explained(
            error,
            f"stage {self.channels.stage}",
            str(action),
            self._where.layer_under_way,
            store.device_bytes if store is not None else None,
            0.0 if device.type == "cpu" else total_memory(device),
        )

    def _update_before(self, action: Action) -> None:
        """Makes late updates that are due anyway; before a backward, all: of layers that the step
        has not called, too.
        """
        with run_by(None):
            if action.kind is Kind.FORWARD:
                self.late_updates.finish_complete()
            else:
                self.late_updates.finish()

    def _moves_shared(self, plan: Plan) -> bool:
        """Whether layers move that have a parameter in common whose optimizer's state one stage
        only has.
        """
        assert self.holdings is not None
        old, new = (
            [each.ranks[self.vm][stage] for stage in each.placement.stages(self.vm)]
            for each in (self.plan, plan)
        )
        return not self._is_automatic and any(
            use.is_shared and any(old[layer] != new[layer] for layer in use.layers)
            for use in self.holdings.uses
        )

    def _change_owners(self, given: TrainingBatch) -> None:
        """Puts the plan in force whose layers have been prepared for it, between two steps."""
        if self.changes.last is not None:
            self.late_updates.finish()
        if self.changes.next is not None:
            self._match_holders()
        self.changes.before_step(given.optimizers, given.keeps_gradients)
        core, migration = self.core, self.changes.migration
        assert core is not None
        if migration is None:
            return
        if not self._is_automatic or given.keeps_gradients:
            # The step itself updates the weights, or adds to the gradients.
            self._finish_change()
            return
        for layer in migration.awaited:
            core.await_before(layer, migration.await_layer)

    def _begin_step(self, given: TrainingBatch, part: Any) -> None:
        """Begins a training step.

        Args:
            given: the batch.
            part: its first microbatch.
        """
        self.meets()
        self._note_begin()
        self.late_updates.begin_step()
        self.channels.settle()
        self._check_batch(given.batch, given.batch_idx)
        self._prepare(self._key("train", given.step_number, 0), given.step, part)
        self._votes.before_step()
        self._change_owners(given)
        self._follow_moves_with_memory()

    def _end_step(self, given: TrainingBatch, num_microbatches: int) -> None:
        self._num_microbatches_done += num_microbatches
        self._votes.after_step()
        if given.accumulation.goes_on:
            self.changes.weights_are_final()
        self._follow_moves_with_memory()
        self.is_to_end = self._votes.are_for_end
        assert self.core is not None
        if self.core.result_bytes and not self._is_timed:
            self.planning.model.note_results(self.core.result_bytes, self.core.kinds)
        self.core.result_bytes.clear()
        if self.changes.last is None and not self.plan.placement.owners:
            own = self.plan.placement.layers_of(self.vm, self.channels.stage)
            self.planning.after_step(self.plan, own, self._layers, given.optimizers)
        if self._votes.are_for_requests:
            self._open_mail()
        self.num_steps_done = self.planning.decisions.step = given.step_number + 1

    @purpose("a training step")
    def training_step(self, given: TrainingBatch) -> Report:
        """Runs a whole training step, forwards and backwards, and saves its gradients for
        :meth:`Strategy.backward`.

        Args:
            given: the batch.
        """
        number = self.settings.num_microbatches(self.replicas.topology.stages_per_vm)
        slices = split(given.batch, number)
        self.planning.model.note_samples(sum(size for _, size in slices))
        self._begin_step(given, slices[0][0])
        report = self._run_microbatches(given, slices)
        if self.changes.migration is not None:
            # Optimizers' state may arrive until now, and weights of layers that were not called.
            self._finish_change()
        self._collect_gradients(given, report)
        self._end_step(given, len(slices))
        return report

    def _run_microbatches(self, given: TrainingBatch, slices: Sequence[tuple[Any, int]]) -> Report:
        assert self.holdings is not None
        sizes = [size for _, size in slices]
        losses = self._reporting.losses(sizes, given.loss_scale, self.plan.microbatches)
        sums = self._sums(given.accumulation)
        arms = sums is not None and not given.accumulation.has_begun
        row = schedule_named(self.plan.schedule)(self.channels.num_stages, len(slices))
        has_begun = False

        def begin_gradients(adds: bool) -> None:
            nonlocal has_begun
            if not has_begun:
                self._begin_gradients(given, adds)
            has_begun = True

        begun: list[tuple[Structure, PostedSum, Prefetch]] = []

        def run(part: Any, turn: int) -> Any:
            return self._logged(given.step, part, turn)

        def root_of(found: tuple[Any, list[LoggedValue]], turn: int) -> Any:
            losses.add(*found, self.channels.device)
            if not given.wants_result:
                losses.outcomes[-1].result = None
            if losses.is_complete:
                if len(slices) > 1:
                    self._batch_metrics.end()
                # They travel while the backwards run.
                everything = list(losses.outcomes), given.is_last_batch
                begun.append(self._gathering.begin(everything))
            loss = losses.outcomes[turn].loss
            if loss is None or not loss.requires_grad:
                return None
            begin_gradients(losses.outcomes[turn].weight is None)
            return self._weighed(loss, losses, turn, given)

        profiler = self.planning.profiler
        is_measured = self.planning.measures and not profiler.is_over
        if len(slices) > 1:
            self._batch_metrics.begin()
        profiler.begin_step()
        self._begin_row(row[self.channels.stage])
        self._in_step(
            "train",
            given.step_number,
            [part for part, _ in slices],
            run,
            row[self.channels.stage],
            root_of,
            sums.arm if arms and sums is not None else None,
            profiler.timers(sizes) if is_measured else {},
            lambda turn: self._saves(turn, slices[turn][0], is_first=not turn),
        )
        profiler.end_step()
        self._end_row()
        # Where there was no backward.
        self.late_updates.finish()
        begin_gradients(True)
        with self.section("[PipeShift] sum gradients"):
            self.holdings.gradients.sum_shared()
        return self._report(losses, given, *begun[0])

    def _saves(self, number: int, batch: Any, is_first: bool) -> Saves | None:
        """What keeps the tensors that autograd saves of a microbatch.

        Args:
            number: of the microbatch.
            batch: its part of the batch.
            is_first: whether it is the first one of the step.
        """
        recompute, profiler = self.plan.recomputations(self.vm), self.planning.profiler
        is_observed = self.planning.measures and not profiler.is_over and not profiler.num_steps
        observer = profiler.observer if is_observed and is_first else None
        if self._store is None and observer is None and not recompute:
            return None
        device = self.channels.device
        own = self.plan.placement.layers_of(self.vm, self.channels.stage)
        saves = Saves(self._layers, recompute, device, self._where, min(own, default=0))
        if self._store is not None or observer is not None:
            saves.look(
                SavedTable(number, self._store, addresses_of(batch), device),
                self._store,
                observer,
                resident_in(self.root, but=(Value,)),
            )
        return saves

    def _begin_gradients(self, given: TrainingBatch, adds: bool) -> None:
        """Called before the first backward of a step.

        Args:
            given: its batch.
            adds: whether its gradients need no factor when the step is over. Then the backwards add
                to the gradients of earlier batches: other sums have other bits.
        """
        core, holdings = self.core, self.holdings
        assert core is not None
        assert holdings is not None
        adds = adds and given.accumulation.has_begun and self.replicas.count == 1
        stage = self.channels.stage
        with run_by(None):
            holdings.gradients.set_aside(given.keeps_gradients, adds)
            for use in holdings.gradients.shared if adds else ():
                # All stages that hold it have the sum: one goes on with it.
                if core.parameter_owners.get(use.parameter, stage) != stage:
                    use.parameter.grad = None

    @purpose("a training step")
    def manual_step(self, given: TrainingBatch) -> Report:
        """Runs a training step that calls ``backward`` and the optimizers itself: with the whole
        batch, as one microbatch.
        """
        self._begin_step(replace(given, keeps_gradients=True), given.batch)
        row = forward_only(self.channels.num_stages, 1)[self.channels.stage]
        function = partial(self._logged, given.step)
        ((result, logged),) = self._in_step(
            "train", given.step_number, [given.batch], function, row
        )
        size = size_or_one(given.batch)
        logs = merge_logs([logged], [size], [float(size)])
        everything = result, logs, given.is_last_batch
        result, logs, is_last_batch = self._gathering.end(*self._gathering.begin(everything))
        require_same_end(given.is_last_batch, is_last_batch, given.batch_idx)
        report = Report(result, logs, is_last_batch, size=size, stops=given.stops())
        self._end_step(given, 1)
        return report

    def _weighed(self, loss: Tensor, losses: Losses, turn: int, given: TrainingBatch) -> Tensor:
        """A microbatch's part of the loss of the step."""
        first = losses.sizes[0]
        has_weight = losses.outcomes[turn].weight is not None
        if self.replicas.count == 1 and not has_weight and set(losses.sizes) == {first}:
            # As Lightning does, with the microbatches as its batches: a factor gives other bits.
            loss = loss / (len(losses.sizes) * given.num_accumulated)
            # To compare a tensor would wait for the device, and the bits are the same.
            is_plain = not isinstance(given.scale, Tensor) and given.scale == 1.0
            return loss if is_plain else loss * given.scale
        return loss * losses.factor(turn)

    def _report(
        self,
        losses: Losses,
        given: TrainingBatch,
        everything: Structure,
        posted: PostedSum,
        prefetch: Prefetch,
    ) -> Report:
        """The report of a step, on every stage."""
        with self.section(WAIT, What.WAIT, REPORT):
            found, is_last_batch = self._gathering.end(everything, posted, prefetch)
        require_same_end(given.is_last_batch, is_last_batch, given.batch_idx)
        report = self._reporting.report(losses, found, is_last_batch)
        report.stops = given.stops()
        self.meets()
        return merge_reports(self.replicas.gather(report), self.vm)

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
        key = self._key(purpose, step_number, 0)
        self._prepare(key, step, batch)
        row = forward_only(self.channels.num_stages, 1)[self.channels.stage]
        function = partial(self._logged, step)
        ((result, logs),) = self._in_step(
            purpose, step_number, [batch], function, row, num_ahead=EVALUATIONS_AHEAD
        )
        evaluated = _Evaluated(result if wants_result else None, logs, size_or_one(batch))
        self._evaluated.append(evaluated)
        return any(log.options.get("on_step") for log in logs)

    def fetch_reports(self) -> list[Report]:
        """The reports of all evaluation steps since the last call. Every stage calls this."""
        evaluated, self._evaluated = self._evaluated, []
        logs = [merge_logs([one.logs], [one.size], [float(one.size)]) for one in evaluated]
        found = self._gathering.end(
            *self._gathering.begin(
                [(one.result, each) for one, each in zip(evaluated, logs, strict=True)]
            )
        )
        return [Report(result, logged) for result, logged in found]

    @property
    def num_pending(self) -> int:
        """The number of evaluation steps whose reports have not been fetched."""
        return len(self._evaluated)

    # --- the end ---

    def _match_holders(self) -> None:
        """Gives parameters that steps have written to, and such buffers, to all stages that hold
        them.
        """
        core, holdings, stage = self.core, self.holdings, self.channels.stage
        assert core is not None
        assert holdings is not None
        written = [use.parameter for use in holdings.uses if use.parameter in core.written]
        with run_by(None), torch.no_grad():
            for tensor in (*written, *core.shared_state()):
                owner = core.parameter_owners[tensor]
                found = self._share(to_host(tensor) if owner == stage else None, owner)
                if not tensor.is_meta:
                    tensor.copy_(found)

    def settle_values(self) -> None:
        """Makes values that user code keeps common tensors, and gives parameters that steps have
        written to, to all stages that hold them. Every stage calls this, between two steps.
        """
        core, stage = self.core, self.channels.stage
        if core is None:
            return
        self._match_holders()
        with run_by(None), torch.no_grad():
            mine = {
                node.value.account.name: node.value
                for node in kept_by_user(self.root, set(map(id, self.root.parameters())))
                if isinstance(node.value, Value)
            }
            here = {
                name: value.account.tensor
                for name, value in mine.items()
                if value.account.owner == stage
            }
            for owner in range(self.channels.num_stages):
                found = self._share(to_host(here) if owner == stage else None, owner)
                for name, tensor in found.items():
                    if name in mine:
                        common = to_device(tensor, self.channels.device)
                        torch.utils.swap_tensors(mine[name], of_its_own(common))


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
