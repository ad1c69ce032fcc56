"""One rank's part of the model, under the plan in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit, is_whole
from lightning_pipeshift.model.parameters.layers import (
    FEWEST_LAYERS,
    compiled_around,
    find_layers,
    require_layers,
)
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.search.given_partition import num_layers_in
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.gradients.replica_sync import match_replicas
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.ownership.changes import Changes
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.planning.make_plan import Settings, stages_without_work
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.step.first_look import FirstLook, Seen
from lightning_pipeshift.step.flow import call_order
from lightning_pipeshift.step.step_memory import StepMemory
from lightning_pipeshift.step.training_batch import Key, UserStep


class PlannedStage:
    """One rank's layers, parameters and memory, and the plan in force.

    Args:
        root: the LightningModule, whole.
        channels: this stage's connections.
        replicas: the virtual machines.
        settings: the user's options.
        planning: makes plans.
        deferred: makes the tensors of the model that are on the meta device.
        threads: those of the run.
        fail_from_thread: called in a thread that fails.
        say: shows a message to the user at once.
        tell: shows a message to the user later.
    """

    def __init__(
        self,
        root: nn.Module,
        channels: Channels,
        replicas: Replicas,
        settings: Settings,
        planning: Replanning,
        deferred: DeferredInit,
        threads: Threads,
        fail_from_thread: Callable[[BaseException], None],
        say: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._root, self._deferred, self._tell = root, deferred, tell
        self._channels, self._replicas = channels, replicas
        self._settings, self._planning = settings, planning
        # A rank that owns every layer may have all values while other ranks lack some.
        lacking = replicas.world.sum(torch.tensor([0.0 if is_whole(root) else 1.0]))
        self._was_whole = not lacking
        # Random streams are those of layers, so more stages must not mean more layers.
        given = settings.plan and len(settings.plan.layers)
        layers = find_layers(root, given or num_layers_in(settings.partition) or FEWEST_LAYERS)
        if replicas.topology.num_ranks > 1:
            require_layers(root, layers.values())
        elif not layers:
            layers = {type(root).__name__: root}
        self.layers = [
            NamedLayer(name, layer, index) for index, (name, layer) in enumerate(layers.items())
        ]
        """From :meth:`first_plan` on in the order in which the first step called them."""
        if uncompiled := compiled_around(root, layers.values()):
            say(
                f"PipeShift runs {', '.join(map(repr, uncompiled))} without compiling, as there are"
                " layers inside. Compile the layers instead, each by itself:"
                f" `{next(iter(layers))}.compile()`, and so on."
            )
        settings.check(self.layers, replicas.topology.stages_per_vm)
        self.memory: StageMemory | None = None
        if settings.memory is not None:
            self.memory = StageMemory(
                settings.memory, channels, self.names, threads, fail_from_thread, tell
            )
        self.in_memory = StepMemory(root, self.layers, replicas.vm, channels, planning, self.memory)
        self.first_look = FirstLook(root, self.layers, channels, replicas, planning, self.in_memory)
        self.known_plan: Plan | None = None
        """The plan in force; ``None`` before the first batch."""
        self.holdings: Holdings | None = None
        self.optimizers: Sequence[Optimizer] = ()
        self.is_timed = False
        """Whether layers were timed before the first step."""
        self._called: set[int] = set()
        """The layers known to be called by a training step."""
        self._said_of_work: str | None = None

    @property
    def layers_by_name(self) -> dict[str, nn.Module]:
        """The modules of the layers, by the layers' names."""
        return {each.name: each.layer for each in self.layers}

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return [each.name for each in self.layers]

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan."""
        return self.known_plan is not None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        if self.known_plan is None:
            raise PlanError(
                "There is no plan yet: it is made at the first batch. Read"
                " `trainer.strategy.plan` from `on_train_batch_end` on, or after the run."
            )
        return self.known_plan

    @property
    def held(self) -> Holdings:
        """This stage's part of the model, from the first step on."""
        assert self.holdings is not None
        return self.holdings

    def stage_of(self) -> list[int]:
        """The stage of each layer."""
        return self.plan.placement.stages(self._replicas.vm)

    # --- the first plan ---

    def first_plan(
        self,
        key: Key,
        step: UserStep,
        batch: object,
        optimizers: Sequence[Optimizer],
        user_step: UserStep | None,
    ) -> tuple[Plan, Seen]:
        """Makes a plan, and returns it with the properties of the user's steps. Every rank calls
        this.

        Args:
            key: as for :meth:`FirstLook.look`, as are the others.
            step: the user's step that comes first.
            batch: one microbatch.
            optimizers: those of the run.
            user_step: the user's step of training.
        """
        trains = bool(optimizers)
        seen = self.first_look.look(key, step, batch, trains, user_step)
        measured = self.first_look.measure(seen, batch, optimizers, trains)
        plan = self._planning.first_plan(measured, seen.idle, trains)
        plan.require_layers(self.names)
        return plan, seen

    def measure(
        self, key: Key, step: UserStep, batch: object, user_step: UserStep | None
    ) -> Measured | None:
        """Measures the machines and the layers without training: the result is on the first rank.
        The optimizer is not known yet: it counts as one with two values for each parameter. Every
        rank calls this, before the first batch.

        Args:
            key: as for :meth:`first_plan`, as are the others.
            step: runs the user's ``training_step``.
            batch: one microbatch.
            user_step: the user's step of training.
        """
        seen = self.first_look.look(key, step, batch, True, user_step)
        return self.first_look.measure(seen, batch, None, trains=True)

    def hold(self, plan: Plan, seen: Seen, optimizers: Sequence[Optimizer]) -> Holdings:
        """Puts the first plan in force: from here on, this rank holds what it says, and nothing
        else. If layers were not timed, the plan predicts nothing. Every rank calls this.

        Args:
            plan: the plan.
            seen: the properties of the user's steps.
            optimizers: those of the run.
        """
        self.known_plan, self.optimizers = plan, optimizers
        layers = [each.layer for each in self.layers]
        self._called = set(range(len(layers)) if seen.called is None else seen.called)
        holdings = self.holdings = Holdings(
            self._root, seen.uses, layers, self.stage_of(), self._channels
        )
        self.in_memory.note_state_on_host(plan, holdings)
        if not self._was_whole:
            holdings.obtain(self._deferred)
        holdings.match_shared()
        self.match_replicas(parameters_too=True)
        holdings.settle(optimizers, self._deferred)
        self._deferred.forget()
        self.is_timed = seen.is_timed
        if self._settings.plan is None and not self.is_timed:
            # The layers' seconds were for the cut by bytes only: they predict nothing.
            records = tuple(replace(layer, forward_seconds=0.0) for layer in plan.layers)
            self.known_plan = replace(plan, layers=records, prediction=None)
        return holdings

    # --- under a plan ---

    def follow_with_memory(self, changes: Changes) -> None:
        """Keeps tensors on this stage as the plan in force says.

        Args:
            changes: the plans that come into force next.
        """
        self.in_memory.follow(self.plan, self.held, self.optimizers, changes.moving)

    def follow_moves_with_memory(self, changes: Changes) -> None:
        """As :meth:`follow_with_memory`, if other layers move than when it was called last."""
        if self.in_memory.moving != changes.moving:
            self.follow_with_memory(changes)

    def say_who_has_no_work(self, has_moved: bool) -> None:
        """Tells the user which stages have nothing to compute.

        Args:
            has_moved: whether layers have moved since the first plan.
        """
        topology, placement = self._replicas.topology, self.plan.placement
        said = stages_without_work(self._settings, placement, topology, self._called, has_moved)
        if said is not None and said != self._said_of_work:
            self._tell(said)
        self._said_of_work = said

    def plan_in_order(self, calls: Sequence[int]) -> Plan:
        """The plan in force, with its layers in the order of their calls.

        Args:
            calls: the layers that a step has called; empty if that is not known.
        """
        plan, names = self.plan, self.names
        if not calls:
            return plan
        records = {record.name: record for record in plan.layers}
        order = call_order(calls, len(names))
        return replace(plan, layers=tuple(records[names[layer]] for layer in order))

    def match_replicas(self, parameters_too: bool) -> None:
        """See :meth:`Pipeline.match_replicas`."""
        if self.holdings is None or self._replicas.count == 1:
            return
        layers = [each.layer for each in self.layers]
        inside = {id(part) for layer in layers for part in layer.modules()}
        outside = {
            name: module for name, module in self._root.named_modules() if id(module) not in inside
        }
        uses = self.holdings.uses if parameters_too else []
        match_replicas(self._replicas, self.plan.placement, layers, outside, uses)

    def make_whole(self) -> None:
        """Gives every rank the whole model again, if it had it before. Every stage calls this."""
        if self._was_whole:
            self.held.make_whole()
        else:
            self.held.to_cpu()
