"""What one rank's part of a pipeline has besides its steps: plans, and a single device's steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.torch_private import compiled_in
from lightning_pipeshift.errors import PipeShiftError, PlanError
from lightning_pipeshift.model.execution.measure import Figures
from lightning_pipeshift.model.execution.microbatch import (
    size_or_one,
)
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
    bytes_of,
)
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.lanes import equal_shares, lanes_by_share
from lightning_pipeshift.plan.document.moves import Move, placement_after
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.flow import call_order
from lightning_pipeshift.plan.inputs.partition import num_layers_in
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.partition.boundaries import Crossing
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.link_meter import LinkMeter
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups, Purpose
from lightning_pipeshift.runtime.comm.replicas import Replicas
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
from lightning_pipeshift.runtime.ownership.sharing import shared_weights
from lightning_pipeshift.runtime.planning.make_plan import (
    Settings,
    stages_without_work,
)
from lightning_pipeshift.runtime.planning.prediction_check import PredictionCheck
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.step.checksum import (
    is_checked,
    require_same_batch,
)
from lightning_pipeshift.step.control_files import Answer, ControlFiles
from lightning_pipeshift.step.reporting import Reporting
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.training_batch import (
    Accumulation,
    Key,
    Profile,
    TrainingBatch,
    UserStep,
)
from lightning_pipeshift.step.votes import Votes
from lightning_pipeshift.timeline.recording import What


class Seen(NamedTuple):
    """What is known of steps before the first one runs.

    Args:
        figures: of the layers.
        called: the layers that steps call; ``None``: any may be called.
        idle: the layers that no step calls.
        uses: of the parameters.
        crossings: what crosses the boundary behind each layer.
        in_steps: the paths of the tensors that user code keeps and steps use.
    """

    figures: dict[int, Figures]
    called: frozenset[int] | None
    idle: frozenset[int]
    uses: list[ParameterUse]
    crossings: Sequence[Crossing]
    in_steps: frozenset[str] = frozenset()


class Pipeline(ABC):
    """One rank's part of one virtual machine's pipeline, from ``setup`` to ``teardown``: all but
    its steps.

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
        self.changes = Changes(self._move, self._put_in_force)
        self._reporting = Reporting(replicas)
        self._votes = Votes(
            replicas.world,
            lambda: self.asks_to_end,
            lambda: self.planning.has_decided or outside.has_requests,
        )
        self._called: set[int] = set()
        """The layers known to be called by a training step."""
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

    def _prepare(
        self,
        key: Key,
        step: UserStep,
        batch: Any,
        optimizers: Iterable[Optimizer],
        trains: bool = False,
    ) -> None:
        """Makes the plan on the first batch, and prepares this stage for it."""
        optimizers = list(optimizers)
        seen = self._look(key, step, batch, trains)
        uses, layers = seen.uses, [each.layer for each in self._layers]
        plan = self.planning.first_plan(
            self._measure(seen, batch, optimizers if trains else [], trains), seen.idle, trains
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
        self.holdings.settle(optimizers, True, self._deferred)
        self._deferred.forget()
        if trains:
            self._follow_with_memory()
            self._connect_sharers(uses, placement)
        if trains and self.replicas.count > 1:
            self._aggregation = self._make_aggregation(uses, placement)

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

    @abstractmethod
    def _look(self, key: Key, step: UserStep, batch: Any, trains: bool) -> Seen:
        """Finds out what steps do, and times their layers if that is needed. The layers are in call
        order from then on.
        """

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
        layers = [each.layer for each in self._layers]
        self.planning.shared = shared_weights(self.root, layers, seen.uses)
        # No GPU has run this yet: there, only a user's own plan moves weights.
        may_move = self.channels.device.type == "cpu"
        self.planning.waiting_bytes = {
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
        topology = Topology(plan.ranks)
        if topology == self.replicas.topology:
            return
        self._reporting.pass_on(self.channels)
        self.channels.settle()
        self.replicas.reorder(topology)
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
        return Migration(self.holdings, stage_of, optimizers, self._threads, self._deferred)

    def _put_in_force(self, plan: Plan) -> None:
        """Puts a plan in force, between two steps."""
        assert self.holdings is not None
        self._reorder(plan)
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
        assert self.holdings is not None
        only_theirs = self._only_theirs(self.holdings.uses)
        self.memory.follow_with_state(
            self.plan,
            self.vm,
            self._optimizers,
            {layer: list(self._layers[layer].layer.parameters()) for layer in own},
            {layer: only_theirs.get(layer, []) for layer in own},
            window_bytes,
            self.planning.optimizer_bytes,
            self.planning.state_stays,
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
        if self.replicas.count == 1 or self.holdings is None:
            return
        match_replicas(
            self.replicas,
            self.plan.placement,
            [each.layer for each in self._layers],
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
        self._prepare(key, step, batch, optimizers, trains=True)
        return not self.plan.recomputed(self.vm) and self.changes.last is None

    def plain_training_step(self, batch: Any, step: UserStep, step_number: int) -> Any:
        """Runs the forward of a training step, after :meth:`begins_plain_step` returned ``True``.
        Its backward runs in ``plain_backward``.

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
        self._prepare(key, step, batch, ())
        return self._plain_forward(key, step, batch)

    @abstractmethod
    def _plain_forward(self, key: Key, step: UserStep, batch: Any) -> Any:
        """Runs a step with a whole batch; returns its result."""

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
            self.planning.after_step(self.plan, own, self._layers, optimizers)

    # --- training: the step ---

    def _sums(self, accumulation: Accumulation) -> Aggregation | None:
        """Sums a step's gradients over the virtual machines, if an optimizer step follows it."""
        return self._aggregation if not accumulation.goes_on else None

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

    # --- the end ---

    def release(self) -> None:
        """Ends what runs beside the steps."""
        self.changes.abandon()
        self.late_updates.abandon()
        if self._aggregation is not None:
            self._aggregation.close()
        if self.memory is not None:
            self.memory.close()
        self._threads.close()

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
