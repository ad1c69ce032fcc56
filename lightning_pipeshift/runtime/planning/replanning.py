"""Plans a run at its first batch, and once more when its first steps have been measured.

NUDT, "distributed parallel training method and system for heterogeneous computing clusters", trains
on the first samples to measure every layer, and on the remaining ones under the plan made from
these measurements. Here training does not stop in between: the second plan takes over at a step's
boundary, by changes of owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch.optim import Optimizer

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.measuring.measure import Figures
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.plan.inputs.profile import SharedWeights
from lightning_pipeshift.plan.search.boundaries import Crossing
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.comm.link_meter import Carried, LinkMeter, measured_links
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.planning.decisions import Decisions
from lightning_pipeshift.runtime.planning.delivered import Estimate
from lightning_pipeshift.runtime.planning.first_plan import in_best_order, with_samples
from lightning_pipeshift.runtime.planning.host_memory import host_memory
from lightning_pipeshift.runtime.planning.make_plan import Settings
from lightning_pipeshift.runtime.planning.move_decision import FEW_STEPS, Decider, Decision, Window
from lightning_pipeshift.runtime.planning.move_parts import parts_of
from lightning_pipeshift.runtime.planning.probe import probe
from lightning_pipeshift.runtime.planning.profile_fitting import RankFigures
from lightning_pipeshift.runtime.planning.profiling import Profiler, gather_figures, layers_of
from lightning_pipeshift.runtime.planning.run_model import RunModel
from lightning_pipeshift.runtime.planning.stage_bytes import StageBytes
from lightning_pipeshift.runtime.planning.update_memory import update_memory
from lightning_pipeshift.timeline.outcomes import UNDONE

T = TypeVar("T")


@dataclass
class _Coming:
    """This rank's measurements, until the first rank has those of all.

    Args:
        plan: the one in force.
        steps: how many were measured.
        mine: the measurements; the seconds of a step, by this rank's clock; and what the rank has
            sent to other stages meanwhile.
        is_early: whether they are :data:`FEW_STEPS`.
        age: how many steps old they are.
    """

    plan: Plan
    steps: int
    mine: tuple[RankFigures, Estimate, tuple[Carried, ...]]
    is_early: bool
    age: int


class Replanning:
    """Planning on one rank.

    Args:
        settings: the user's settings.
        replicas: the virtual machines.
        here: this rank's device.
        device: the same device, as torch names it.
        messages: messages that the user sees after the step.
        say: shows a message to the user at once.
        threads: the first rank looks for a better plan in one of them, while training continues.
        links: measures what this rank sends to other stages.
    """

    def __init__(
        self,
        settings: Settings,
        replicas: Replicas,
        here: Device,
        device: torch.device,
        messages: list[str],
        say: Callable[[str], None],
        threads: Threads,
        links: LinkMeter,
    ) -> None:
        self.profiler = Profiler(device, links)
        # On the first rank: the measurements of all ranks, as soon as there are any.
        self.measured: Measured | None = None
        self.model = RunModel(settings, replicas.topology, here)
        self._settings = settings
        self._replicas = replicas
        self._here = here
        self._device = device
        self._messages = messages
        self._say = say
        self._threads = threads
        # On the first rank: the decision being made, and the plan in force when that started.
        self._decision: tuple[Future[Decision], Plan] | None = None
        self._coming: _Coming | None = None
        self._decider = Decider(settings, replicas.topology)
        # Whether the next decision is to be made after a few steps.
        self._is_soon = self._decider.judges_memory
        # Whether the first rank is making a decision.
        self._is_deciding = False
        self.is_measured = False
        """Whether the first steps have been measured, and the first rank has the measurements of
        all ranks.
        """
        self.steps_left = math.inf
        """The number of steps over which a change can pay off."""
        self.decisions = Decisions(messages.append)
        """Those of the first rank, as far as this rank knows them."""

    @property
    def measures(self) -> bool:
        """Whether anything depends on measurements."""
        settings = self._settings
        is_pipeline = max(self._replicas.topology.stages_per_vm) > 1
        may_change = settings.is_free or settings.watch is not None
        is_needed = settings.only_measures or settings.memory is not None
        return is_needed or (may_change and is_pipeline)

    @property
    def _window(self) -> int:
        """How many steps to measure before a decision; 0 if nothing is measured."""
        watch = self._settings.watch
        if watch is not None and (self.is_measured or not self._settings.is_free):
            return watch.patience
        return self._settings.profile_steps

    def measure(
        self,
        gates: Sequence[NamedLayer],
        crossings: Sequence[Crossing],
        estimates: dict[int, Figures],
        optimizers: Sequence[Optimizer] | None,
        samples: float,
        held_bytes: int,
        batch_bytes: int,
        trains: bool,
        memory: StageMemory | None = None,
        shared: tuple[SharedWeights, ...] = (),
        waiting_bytes: Mapping[int, int] | None = None,
    ) -> Measured | None:
        """The measurements before the first step, on the first rank. Every rank calls this.

        Args:
            gates: of the layers, in call order.
            crossings: what crosses the boundary behind each of them.
            estimates: those of a stopwatch.
            optimizers: those of the run; ``None``: not known yet.
            samples: their number in the first microbatch.
            held_bytes: the device memory that the model takes now.
            batch_bytes: that of a microbatch's part of the batch.
            trains: whether the plan is for training.
            memory: this stage's memory, if saved tensors have a budget.
            shared: the weights that several layers use, or code between layers.
            waiting_bytes: by layer, of the weights that may wait in host memory.
        """
        if self.measures and trains:
            probed = probe(self._replicas.world, self._device, self._here, self._say)
            self.model.cluster = probed.cluster
            self.profiler.slow_rank.slice_seconds = probed.seconds[self._replicas.rank]
            self._messages.extend(probed.notes)
        self.profiler.estimates = estimates
        # Trying them takes a while; without measurements no plan asks for their memory.
        updates = update_memory((optimizers or ()) if self.measures else (), self._device)
        layers = layers_of(gates, crossings, optimizers, updates, waiting_bytes)
        self.model.begin(layers, samples, shared, batch_bytes, updates.at_once)
        self.profiler.held_bytes = held_bytes
        if memory is not None:
            traffic = memory.store.traffic
            self.profiler.waited_seconds = lambda: traffic.waited_seconds
            device = self.model.cluster.devices[self._replicas.rank]
            self.profiler.memory = memory.measure(
                device.free_bytes + held_bytes,
                host_memory()[1],
                sum(other.host == device.host for other in self.model.cluster.devices),
            )
        mine = self.profiler.figures((), gates, optimizers or ())
        figures = gather_figures(mine, self._replicas)
        if figures is not None:
            self.measured = self.model.measured(figures)
            self.model.cluster = self.measured.cluster
        return self.measured

    def first_plan(self, measured: Measured | None, idle: Collection[int], trains: bool) -> Plan:
        """The plan for the first steps, made on the first rank. Every rank calls this.

        Args:
            measured: the result of :meth:`measure`.
            idle: the layers that no step calls.
            trains: whether the plan is for training.

        Raises:
            PlanError: each virtual machine has as many samples as the plan is for in all.
        """
        found = None
        if measured is not None:
            settings, topology = self._settings, self._replicas.topology
            may_reorder = settings.may_reorder and self.measures and trains
            plan, first = in_best_order(
                settings, measured, topology, idle, may_reorder, self._messages.append
            )
            self._decider.first = first
            plan = replace(plan, ranks=plan.ranks or topology.ranks)
            found = plan.to_json(), first.change if first is not None else None
        text, change = self._replicas.world.share_object(found, source=0)
        self.decisions.changes += [change] if change is not None else []
        plan, samples = Plan.from_json(text), self.model.batch_samples
        if not trains or not samples:
            return plan
        return with_samples(plan, samples, self._replicas, self._say)

    def stage_bytes(self, plan: Plan, vm: int, stage: int) -> StageBytes:
        """Returns the account of the bytes of one stage under a plan, without saved tensors."""
        return StageBytes(self.model.profile, self.profiler.working_bytes, plan, vm, stage)

    def _from_first_rank(self, make: Callable[[], T]) -> T:
        """Returns on every rank what the first one makes. Every rank calls this.

        Raises:
            PlanError: with the message of the one that ``make`` has raised.
        """
        found: tuple[T | None, str] = None, ""
        if self._replicas.rank == 0:
            try:
                found = make(), ""
            except PlanError as error:
                found = None, str(error)
        made, problem = self._replicas.world.share_object(found, source=0)
        if problem:
            raise PlanError(problem)
        return cast(T, made)

    def predicted(self, plan: Plan) -> Plan:
        """A plan with the simulator's prediction. Every rank calls this."""
        if not plan.is_foreseen:
            raise PlanError(
                "The simulator knows no plans in which the layers of a stage are not contiguous:"
                " there is no prediction for it."
            )

        def predict() -> str:
            if self.measured is None or not self.is_measured:
                raise PlanError(
                    "Nothing has been measured of this run yet. With `partition='auto'` the first"
                    f" steps are (`profile_steps={self._settings.profile_steps}`): ask later."
                )
            return replace(plan, prediction=self.measured.prediction(plan)).to_json()

        return Plan.from_json(self._from_first_rank(predict))

    def parts_of(self, old: Plan, new: Plan) -> list[Plan]:
        """The plans by which one plan turns into another. Every rank calls this.

        Raises:
            PlanError: a device lacks memory for layers while they move.
        """
        if old.placement == new.placement or old.placement.owners or new.placement.owners:
            return [new]
        made = self._from_first_rank(lambda: [x.to_json() for x in self.parts_here(old, new)])
        return [Plan.from_json(text) for text in made]

    def parts_here(self, old: Plan, new: Plan) -> list[Plan]:
        """As :meth:`parts_of`, on the first rank only."""
        has_budget = self._settings.memory is not None
        measured = self.measured if self.measures else None
        checks_memory = self.is_measured or has_budget
        return parts_of(old, new, self.model.profile.layers, measured, checks_memory)

    def require_memory(self, plan: Plan, are_apart: bool = False) -> None:
        """Raises PlanError if a stage would have too little memory according to the measurements,
        if there are any.

        Args:
            plan: the plan.
            are_apart: whether no rank may ask another one: only the first one raises the error.
        """

        def check() -> None:
            measured = self.measured
            if measured is None or not self.is_measured or not plan.is_foreseen:
                return
            held = measured.prediction(plan).memory_bytes
            if not measured.fits(plan, held):
                raise PlanError(measured.lacking(plan, held))

        if not are_apart:
            self._from_first_rank(check)
        elif self._replicas.rank == 0:
            check()

    # --- once the first steps have been measured ---

    @property
    def has_decided(self) -> bool:
        """On the first rank: whether there is a decision that the others have not received."""
        return self._decision is not None and self._decision[0].done()

    def after_step(
        self,
        plan: Plan,
        own: Iterable[int],
        gates: Sequence[NamedLayer],
        optimizers: Sequence[Optimizer],
        lag: int = 0,
    ) -> None:
        """Makes the first rank start a decision when enough has been measured. Every rank calls
        this, with the same plan.

        Args:
            plan: the one in force.
            own: the layers that this rank owns.
            gates: of all layers.
            optimizers: those of the run.
            lag: by how many steps other ranks may be behind. The first rank does not wait for their
                measurements until they have surely sent them.
        """
        self._take_in(lag)
        steps = min(self._window, FEW_STEPS) if self._is_soon else self._window
        is_due = self.measures and steps and self.profiler.num_measured >= steps
        if not is_due or self._is_deciding or self._coming is not None:
            return
        own = list(own)
        took = self.profiler.took(steps)
        figures = self.profiler.figures(
            own, gates, optimizers, self._replicas.is_last_stage, fewest=steps
        )
        figures = self.profiler.slow_rank.probed(own, figures, self._window * took.mean)
        self._is_deciding = not self._settings.only_measures
        mine = figures, took, self.profiler.links.since()
        # If others may be behind, they are as far behind when this step ends.
        self._coming = _Coming(plan, steps, mine, self._is_soon, age=-1 if lag else 0)
        if self._replicas.rank:
            gather_figures(mine, self._replicas)
        self._take_in(lag)
        if self._is_deciding:
            self.profiler.next_window()

    def end_gathering(self) -> None:
        """Called when no rank is behind another one."""
        self._take_in(0)

    def _take_in(self, lag: int) -> None:
        """Makes the first rank take in the measurements of all ranks when they are ``lag`` steps
        old. On every rank they count as measured from then on.
        """
        coming = self._coming
        if coming is None:
            return
        coming.age += 1
        if coming.age <= lag:
            return
        self._coming = None
        if self._replicas.rank:
            self.is_measured = True
            return
        found_by_rank = gather_figures(coming.mine, self._replicas)
        assert found_by_rank is not None
        figures, all_took, carried = zip(*found_by_rank, strict=True)
        # Steps before a change of any rank do not count; and a step ends when its last rank does.
        took = min(all_took, key=lambda each: (each.num_steps, -each.mean))
        num_messages = coming.steps * coming.plan.microbatches
        self.model.cluster, links = measured_links(self.model.cluster, carried, num_messages)
        learned = self.model.measured(figures)
        self.measured = learned.compared(coming.plan, took.mean)
        self.model.cluster = learned.cluster
        # Another thread may ask for the measurements as soon as it is said that there are some.
        self.is_measured = True
        if self._is_deciding:
            # Planning takes longer than a small step.
            plain = None
            if self._decider.judges_memory:
                plain = self.model.measured([each.without_moves for each in figures])
            window = Window(
                coming.steps,
                took,
                self.measured,
                [each.error for each in figures],
                self.steps_left,
                links,
                plain,
                coming.is_early,
            )
            decide = partial(self._decider.decide, coming.plan, window)
            self._decision = self._threads.submit(decide), coming.plan

    def announce(self, plan: Plan) -> Decision:
        """Returns the first rank's decision on all ranks. Every rank calls this, when the first one
        :attr:`has_decided`.

        Args:
            plan: the one that the next step will run under.
        """
        found: Decision = self._replicas.world.share_object(self.take_decision(plan), source=0)
        self.accept(found)
        return found

    def take_decision(self, plan: Plan) -> Decision | None:
        """Returns the decision that has been made, on the first rank; ``None`` if there is none.

        Args:
            plan: the one that the next step will run under.
        """
        if self._decision is None:
            return None
        (future, before), self._decision = self._decision, None
        decision = future.result()
        if not before.is_like(plan):
            # Layers have changed their owners on request in the meantime.
            return Decision(plan.to_json(), False, "")
        layers = self.measured.profile.layers if self.measured is not None else ()
        working = {number: layer.working_bytes for number, layer in enumerate(layers)}
        return replace(decision, working_bytes=working)

    def accept(self, found: Decision) -> None:
        """Takes a decision of the first rank. Every rank calls this."""
        self._is_deciding, self._is_soon = False, found.is_soon
        self.profiler.of_others = found.working_bytes
        judged = found.judged
        # No change came before the first order.
        is_undone = judged is not None and judged.verdict == UNDONE and not judged.is_estimated
        self.profiler.slow_rank.is_undone = is_undone
        self.decisions.accept(found)
        if found.is_new or (self._settings.watch is None and not found.goes_on):
            self.profiler.begin_anew(for_good=not found.is_new)
