"""Carries out the memory plan while one stage runs its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipeshift.compat.module_private import compiled_in
from lightning_pipeshift.devices.properties import total_memory
from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.model.parameters.uses import ParameterUse, of_one_layer
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.saved_tensors import SavedTable, addresses_of, resident_in
from lightning_pipeshift.plan.cost.layer_memory import SENDS_UNDER_WAY
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Kind as Carries
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore
from lightning_pipeshift.runtime.offload.out_of_memory import explained
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Moving
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.values.saves import Saves, Where
from lightning_pipeshift.values.value import Value


class StepMemory:
    """Keeps one stage within its budget while steps run, and layers as the plan wants them kept.

    Args:
        root: the LightningModule.
        layers: its layers, in call order once there is a plan.
        vm: this rank's virtual machine.
        channels: this stage's connections.
        planning: counts the bytes, and observes the first steps.
        memory: where tensors may be put; ``None``: everything stays on the device.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: list[NamedLayer],
        vm: int,
        channels: Channels,
        planning: Replanning,
        memory: StageMemory | None,
    ) -> None:
        self._root = root
        self._layers = layers
        self._vm = vm
        self._channels = channels
        self._planning = planning
        self.memory = memory
        self.moving = Moving()
        """The layers that move, when the memory was last told of the plan."""
        self._store: ActivationStore | None = None
        """While a training step runs, what keeps its saved tensors within the budget."""
        self._places: dict[Action, int] = {}
        """Of the actions in the step's row."""
        self._where = Where()

    # --- between two steps ---

    def follow(
        self,
        plan: Plan,
        holdings: Holdings,
        optimizers: Sequence[Optimizer],
        moving: Moving,
    ) -> None:
        """Keeps tensors as a plan says, from now on.

        Args:
            plan: the plan in force.
            holdings: the parameters and buffers of this stage.
            optimizers: those of the run.
            moving: the layers that take memory because they move.
        """
        self.moving = moving
        memory = self.memory
        if memory is None:
            return
        stage = self._channels.stage
        own = plan.placement.layers_of(self._vm, stage)
        counted = self._planning.stage_bytes(plan, self._vm, stage)
        memory.follow(
            plan,
            self._vm,
            counted.taken({*own, *moving.run}, moving.leaving, moving.copied),
            counted.working({*own, *moving.run}),
            self._planning.profiler.expected_bytes,
        )
        self.note_state_on_host(plan, holdings)
        only_theirs = self.only_theirs(holdings.uses)
        memory.follow_with_state(
            plan,
            self._vm,
            optimizers,
            {layer: list(self._layers[layer].layer.parameters()) for layer in own},
            {layer: only_theirs.get(layer, []) for layer in own},
            counted.window,
            self._planning.model.optimizer_bytes,
            self._planning.model.state_stays,
        )
        for each in self._layers:
            comes_and_goes = each.index in memory.weights.layers
            each.weights = memory.weights if comes_and_goes else None

    def note_state_on_host(self, plan: Plan, holdings: Holdings) -> None:
        """Tells the holdings which parameters' optimizer state is not to be on the device."""
        holdings.state_on_host = frozenset(
            id(parameter)
            for layer in plan.optimizer_on_host_of(self._vm)
            for parameter in self._layers[layer].layer.parameters()
        )

    def only_theirs(self, uses: Iterable[ParameterUse]) -> dict[int, list[nn.Parameter]]:
        """The parameters that one layer only uses, by layer, without those of compiled layers:
        their code may have taken a weight's memory for good, or runs again when it has changed.
        """
        compiled = set(compiled_in(self._root))
        return {
            layer: parameters
            for layer, parameters in of_one_layer(uses).items()
            if compiled.isdisjoint(self._layers[layer].layer.modules())
        }

    def bound_sends(self, mailbox: Mailbox) -> None:
        """Bounds the payloads on their way, for which the plan reserves memory."""
        if self.memory is not None:
            mailbox.most_large = SENDS_UNDER_WAY

    # --- while a step runs ---

    def weights_in_step(self) -> AbstractContextManager[Any]:
        """Context of a step: weights that wait in host memory come to the device."""
        return self.memory.weights.in_step() if self.memory is not None else nullcontext()

    def begin_row(self, row: Row) -> None:
        """Called with a training step's actions on this stage, before the first of them."""
        self._store = self.memory.store if self.memory is not None else None
        if self._store is not None:
            self._store.begin_step(row)
            self._places = {action: place for place, action in enumerate(row)}

    def end_row(self) -> None:
        """Called after the last of these actions."""
        self._store, self._places = None, {}

    @contextmanager
    def action(self, action: Action, mailbox: Mailbox) -> Iterator[None]:
        """Context of one action of a step.

        Raises:
            BudgetError: it lacks memory.
        """
        store = self._store
        if store is not None:
            if action.kind is Kind.BACKWARD:
                # The room of payloads is now that of gradients.
                mailbox.await_sent(Carries.VALUE)
            # Layers run again where their backward would.
            again = action.kind is Kind.RECOMPUTE
            done = Action(Kind.BACKWARD, action.microbatch) if again else action
            store.begin_action(self._places.get(done, 0), action)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._explained(error, action) from error
        if store is not None:
            store.end_action(action)

    def _explained(self, error: torch.OutOfMemoryError, action: Action) -> BudgetError:
        device, store = self._channels.device, self._store
        return explained(
            error,
            f"stage {self._channels.stage}",
            str(action),
            self._where.layer_under_way,
            store.device_bytes if store is not None else None,
            0.0 if device.type == "cpu" else total_memory(device),
        )

    def saves(self, plan: Plan, number: int, batch: Any, is_first: bool) -> Saves | None:
        """What keeps the tensors that autograd saves of a microbatch; ``None``: autograd itself.

        Args:
            plan: the plan in force.
            number: of the microbatch.
            batch: its part of the batch.
            is_first: whether it is the first one of the step.
        """
        recompute, profiler = plan.recomputations(self._vm), self._planning.profiler
        is_observed = self._planning.measures and not profiler.is_over and not profiler.num_steps
        observer = profiler.observer if is_observed and is_first else None
        if self._store is None and observer is None and not recompute:
            return None
        device = self._channels.device
        own = plan.placement.layers_of(self._vm, self._channels.stage)
        saves = Saves(self._layers, recompute, device, self._where, min(own, default=0))
        if self._store is not None or observer is not None:
            saves.look(
                SavedTable(number, self._store, addresses_of(batch), device),
                self._store,
                observer,
                resident_in(self._root, but=(Value,)),
            )
        return saves
