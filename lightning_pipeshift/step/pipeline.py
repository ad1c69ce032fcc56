"""One rank's part of a pipeline whose stages all run the whole of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.model.user_state.logs import LogRecorder
from lightning_pipeshift.plan.document.moves import Move, placement_after
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
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
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.runtime.ownership.changes import Changes
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.planning.make_plan import Settings
from lightning_pipeshift.runtime.planning.prediction_check import PredictionCheck
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.step.action_notes import ActionNotes
from lightning_pipeshift.step.checksum import is_checked, require_same_batch
from lightning_pipeshift.step.control_files import ControlFiles
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.evaluations import Evaluations
from lightning_pipeshift.step.flow import merged_order
from lightning_pipeshift.step.gradient_sums import GradientSums
from lightning_pipeshift.step.plan_checks import adoptable, require_no_shared_moves
from lightning_pipeshift.step.planned_stage import PlannedStage
from lightning_pipeshift.step.reporting import Reporting
from lightning_pipeshift.step.training_batch import Accumulation, Key, Profile, UserStep
from lightning_pipeshift.step.value_steps import ValueSteps
from lightning_pipeshift.values.calls import CallWatch
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.gathering import kept
from lightning_pipeshift.values.value import running


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

    changes: Changes
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

        self.planned = PlannedStage(
            root,
            channels,
            replicas,
            settings,
            self.planning,
            deferred,
            self._threads,
            fail_from_thread,
            say,
            tell,
        )
        self.memory, self._in_memory = self.planned.memory, self.planned.in_memory
        self.evaluations = Evaluations(self)
        self._reporting = Reporting(replicas)
        self.order: list[int] = []
        """The layers in the order in which the last forward pass called them."""
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
        self.find_optimizers: Callable[[], Sequence[Optimizer]] = list
        """Those of the run."""
        self.user_step: UserStep | None = None
        """The user's step of training; ``None`` where the run does not train."""
        self.calls: CallWatch | None = None
        """Is told of all calls of layers and operations."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.planned.plan

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
    def holdings(self) -> Holdings | None:
        """This stage's part of the model; ``None`` before the first step."""
        return self.planned.holdings

    @property
    def held(self) -> Holdings:
        """This stage's part of the model, from the first step on."""
        return self.planned.held

    def prepare(self, key: Key, step: UserStep, batch: Any) -> None:
        """Makes the plan on the first batch, and prepares this stage for it. Every rank calls this.

        Args:
            key: of the step's random stream.
            step: the user's step.
            batch: one microbatch.
        """
        if self.planned.has_plan:
            return
        optimizers = list(self.find_optimizers())
        plan, seen = self.planned.first_plan(key, step, batch, optimizers, self.user_step)
        self._reorder(plan)
        holdings = self.planned.hold(plan, seen, optimizers)
        if optimizers:
            self.planned.follow_with_memory(self.changes)
        if optimizers and self.replicas.count > 1:
            self._aggregation = self._gradient_sums.aggregation(seen.uses, plan)
        if any(plan.recompute) and not self.is_automatic:
            raise PlanError(
                "The plan recomputes layers, and with manual optimization the step calls `backward`"
                " itself, as soon as it has the loss. Use a plan without 'recompute', or"
                " `recompute='none'`; or checkpoint the layers in the step"
                " (`torch.utils.checkpoint`)."
            )
        if seen.idle:
            self.planned.say_who_has_no_work(has_moved=False)
        self._values = self._connect(holdings, seen.core)
        self.late_updates.await_before = self._values.core.await_before

    def _connect(self, holdings: Holdings, known: Core | None) -> ValueSteps:
        return ValueSteps(
            self.root,
            self.planned.layers,
            self.planned.stage_of(),
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
            if self.planned.holdings is not None:
                self.planned.holdings.place(plan.placement.stages(self.vm))

        before = self.channels.ranks
        if self._values is not None and list(plan.ranks[self.vm]) != before:
            self._values.renumber(before, reorder)
        else:
            reorder()

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
        coming, names = self.coming_plan, self.planned.names
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
        self.planning.require_memory(plan, are_apart=self._updates_apart)
        self.adopt(plan)

    def match_replicas(self, parameters_too: bool) -> None:
        """Copies the values of the first virtual machine to all others: the state of layers other
        than parameters (running statistics), and optionally the parameters. Every rank calls this.
        """
        if self.replicas.count == 1:
            return
        # A layer may have put values into its buffers.
        self.settle_values()
        self.planned.match_replicas(parameters_too)
        if self._values is not None and self.vm:
            self._values.match_replaced_buffers()

    @property
    def exposed_seconds(self) -> float:
        """The seconds that the last step has waited for other virtual machines' gradients."""
        return self._aggregation.exposed_seconds if self._aggregation is not None else 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """A copy of a Trainer is of the same run: threads and connections cannot be copied."""
        return self

    # --- steps ---

    def _note_begin(self) -> None:
        now = perf_counter()
        self.step_seconds, self._begun = now - self._begun if self._begun else None, now
        self._prediction_check.note(self.planned.known_plan, self.step_seconds)

    def check_batch(self, batch: Any, batch_idx: int) -> None:
        """Raises an error if the stages have not got the same batch. Every stage calls this."""
        if self.channels.num_stages > 1 and is_checked(batch_idx):
            require_same_batch(batch, batch_idx, self.channels)

    def key(self, purpose: str, step_number: int) -> Key:
        """The key of a step's random stream."""
        return (self.settings.seed, purpose, step_number, 0, self.vm)

    def run_step(self, kind: str, step: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs microbatches.

        Args:
            kind: of the step.
            step: its number.
            args: as for :meth:`Engine.run`, from the microbatches on.
            kwargs: likewise.
        """
        results = self.values.run(kind, step, self.find_optimizers(), *args, **kwargs)
        if not self.planned.first_look.looks_ahead:
            self.order = merged_order(list(self.values.core.called.values()))
        return results

    def record_actions(self, recorder: Recorder | None) -> None:
        """Sets what takes notes of the coming steps; ``None``: nothing does."""
        store = self.memory.store if self.memory is not None else None
        parts = self.channels.turns, self._rings, self._aggregation, store
        self._notes.record(recorder, parts)
        self.changes.record(recorder)

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
        """Whether this is the only device: the backward of its steps is Lightning's."""
        return self.replicas.topology.num_ranks == 1

    def plain_forward(self, kind: str, number: int, step: UserStep, batch: Any) -> Any:
        """Runs a step on a single device, and returns its result.

        Args:
            kind: of the step.
            number: its number.
            step: runs the user's step.
            batch: the batch.
        """
        if self._values is None:
            # The run is over, and user code asks the Trainer's loop for one more step.
            return step(self.root, batch)
        (row,) = forward_only(1, 1)

        def run(part: Any, _: int) -> Any:
            return step(self.root, part)

        (result,) = self.run_step(kind, number, [batch], run, row)
        return result

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
        if self.holdings is not None:
            self.changes.cancel()
            self.planned.make_whole()
