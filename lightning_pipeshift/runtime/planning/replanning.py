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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Final

import torch
from torch.optim import Optimizer

from lightning_pipeshift.errors import BudgetError, PlanError, without_stack
from lightning_pipeshift.model.execution.measure import Figures
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.plan.arrange.measurements import Measured
from lightning_pipeshift.plan.cost.workload import batches_held, window_bytes
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import (
    LayerProfile,
    SharedWeights,
    shared_bytes,
)
from lightning_pipeshift.plan.inputs.profile_fitting import (
    RankFigures,
    Times,
    estimates_by_kind,
    profile_of,
)
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.partition.boundaries import Crossing
from lightning_pipeshift.plan.schedule.asynchronous import shared_copies, weight_versions
from lightning_pipeshift.runtime.comm.link_meter import Carried, LinkMeter, measured_links
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.offload.stage_memory import StageMemory
from lightning_pipeshift.runtime.planning.decisions import Decisions
from lightning_pipeshift.runtime.planning.delivered import Estimate, ProbeTimes, recent
from lightning_pipeshift.runtime.planning.make_plan import Settings, best_topology, make_plan
from lightning_pipeshift.runtime.planning.move_decision import (
    FEW_STEPS,
    Decider,
    Decision,
    Window,
    ranks_text,
)
from lightning_pipeshift.runtime.planning.move_parts import parts_of
from lightning_pipeshift.runtime.planning.probe import host_memory, probe, time_slices
from lightning_pipeshift.runtime.planning.profiling import Profiler, gather_figures, layers_of
from lightning_pipeshift.runtime.planning.update_memory import update_memory
from lightning_pipeshift.timeline.outcomes import UNDONE, Change

_SURE_GAIN: Final = 0.2
"""By which fraction a step has to get shorter for another order of the ranks, as long as devices
have been measured for a moment only: equal ones may look so different then.
"""

_SLOWER: Final = 1.1
"""A rank that was so many times as slow before layers were taken from it may be fast again. By a
probe that takes no longer than this it is.
"""


@dataclass
class _Coming:
    """This rank's measurements, until the first rank has those of all.

    Args:
        plan: the one in force.
        steps: how many were measured.
        took: the seconds of one, by this rank's clock.
        mine: the measurements.
        carried: what the rank has sent to other stages meanwhile.
        is_early: whether they are :data:`FEW_STEPS`.
        age: how many steps old they are.
        is_sent: whether they have left this rank.
    """

    plan: Plan
    steps: int
    took: Estimate
    mine: RankFigures
    carried: tuple[Carried, ...]
    is_early: bool = False
    age: int = 0
    is_sent: bool = False


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
        self._cluster = Cluster((Device(here.host, here.kind),) * replicas.topology.num_ranks)
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
        # Seconds of a slice of the probe on this rank at the start; and how many times as long it
        # took when the rank was probed, since layers were taken from it.
        self._slice_seconds: float | None = None
        self._probe_times = ProbeTimes()
        self._slowdown: float | None = None
        self._doubt = 0.0  # the relative standard error of that
        # Whether the first rank is making a decision.
        self._is_deciding = False
        self._layers: tuple[LayerProfile, ...] = ()
        self._kinds: Sequence[int] = ()
        self._estimates: dict[int, Times] = {}
        self._samples, self._batch_bytes = 1.0, 0
        # The samples of a virtual machine's batch, the largest so far; 0: not known yet.
        self._batch_samples = 0.0
        self._updates_at_once = False
        self.shared: tuple[SharedWeights, ...] = ()
        """The weights that several layers use, or code between layers, once they are known."""
        self.waiting_bytes: Mapping[int, int] = {}
        """By layer, of the weights that may wait in host memory."""
        self.overlaps_updates = False
        """Whether layers are updated one by one while the next step begins."""
        self.state_stays = ""
        """Why the optimizer's state cannot be in host memory between two steps; empty if it can."""
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

    def note_samples(self, number: float) -> None:
        """Called before each batch. The last one of an epoch may have fewer than the others.

        Args:
            number: the samples of a virtual machine's batch.
        """
        self._batch_samples = max(self._batch_samples, float(number))

    def note_results(self, num_bytes: Mapping[int, int], kinds: Sequence[int]) -> None:
        """Takes what a step has shown of layers, if none ran on fake tensors before the first.

        Args:
            num_bytes: of what they have returned, by layer.
            kinds: the kind of each layer, a number.
        """
        self._kinds = kinds
        self._layers = tuple(
            replace(layer, payload_bytes=found, payload_gradient_bytes=found)
            if (found := num_bytes.get(index)) is not None
            else layer
            for index, layer in enumerate(self._layers)
        )

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
        """
        if self.measures and trains:
            probed = probe(self._replicas.world, self._device, self._here, self._say)
            self._cluster = probed.cluster
            self._slice_seconds = probed.seconds[self._replicas.rank]
            self._messages.extend(probed.notes)
        self.profiler.estimates = estimates
        # Trying them takes a while; without measurements no plan asks for their memory.
        updates = update_memory((optimizers or ()) if self.measures else (), self._device)
        self._updates_at_once = updates.at_once
        self._layers = layers_of(gates, crossings, optimizers, updates, self.waiting_bytes)
        self._samples, self._batch_bytes = samples, batch_bytes
        self.profiler.held_bytes = held_bytes
        if memory is not None:
            traffic = memory.store.traffic
            self.profiler.waited_seconds = lambda: traffic.waited_seconds
            device = self._cluster.devices[self._replicas.rank]
            self.profiler.memory = memory.measure(
                device.free_bytes + held_bytes,
                host_memory()[1],
                sum(other.host == device.host for other in self._cluster.devices),
            )
        mine = self.profiler.figures((), gates, optimizers or ())
        figures = gather_figures(mine, self._replicas)
        if figures is not None:
            self.measured = self._learned(figures)
            self._cluster = self.measured.cluster
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
            topology = self._replicas.topology
            plan, change = self._in_first_order(measured, topology, idle, trains)
            found = replace(plan, ranks=plan.ranks or topology.ranks).to_json(), change
        text, change = self._replicas.world.share_object(found, source=0)
        self.decisions.changes += [change] if change is not None else []
        plan = Plan.from_json(text)
        return self._with_samples(plan) if trains and self._batch_samples else plan

    def _with_samples(self, plan: Plan) -> Plan:
        """The plan with the samples of a step, compared with those that it was made for."""
        planned, count = plan.step_samples, self._replicas.count
        mine = self._batch_samples * self._replicas.is_last_stage
        total = float(self._replicas.world.sum(torch.tensor([mine])))
        if planned in (0.0, total):
            return replace(plan, step_samples=total)
        text = (
            f"the plan was made for steps of {planned:g} samples, and the first step of this run"
            f" has {total:g}: {total / count:g} for each virtual machine (replica of the pipeline),"
            f" of which there {'is 1' if count == 1 else f'are {count}'}. Set the DataLoader's"
            f" `batch_size` to {planned / count:g}; or, if you want steps of {total:g} samples, the"
            f" plan's field 'step_samples' to {total:g}"
        )
        if count > 1 and total == count * planned:
            # The user did not choose the number of virtual machines: the plan did.
            raise PlanError(text)
        self._say(f"{text}.")
        return plan

    def _in_first_order(
        self, measured: Measured, topology: Topology, idle: Collection[int], trains: bool
    ) -> tuple[Plan, Change | None]:
        """The plan for the ranks in their own order; or in another one, if steps are clearly
        shorter in it, and what is expected of that.
        """
        settings, profile, cluster = self._settings, measured.profile, measured.cluster
        make = partial(make_plan, settings, profile, cluster, idle=idle)
        try:
            first = make(topology)
        except (PlanError, BudgetError) as error:
            first, problem = None, without_stack(error)
        best = first
        if settings.may_reorder and self.measures and trains:
            with suppress(PlanError, BudgetError):
                order = best_topology(settings, profile, cluster, topology)
                best = first if order == topology else make(order)
        if best is None:
            raise problem
        if first is None:
            self._messages.append(
                f"the stages are the ranks {ranks_text(best.ranks)}: no plan for the order"
                f" {ranks_text(topology.ranks)} fits in memory."
            )
            return best, None
        then, now = first.prediction, best.prediction
        if then is None or now is None or then.step_seconds < (1 + _SURE_GAIN) * now.step_seconds:
            return first, None
        orders = ranks_text(best.ranks), ranks_text(first.ranks)
        what = "the stages are the ranks {} and not {}".format(*orders)
        change = Change(what, then.step_seconds, now.step_seconds, is_estimated=True)
        self._decider.first = change, first, best
        self._messages.append(f"{change}, by a short measurement of devices and links.")
        return best, change

    def _learned(self, figures: Sequence[RankFigures]) -> Measured:
        topology = self._replicas.topology
        microbatches = self._settings.num_microbatches(topology.stages_per_vm)
        if self._kinds:
            # Until here they were those of bytes.
            self._estimates = estimates_by_kind(figures, self._kinds) | self._estimates
            figures = [replace(mine, estimates=self._estimates) for mine in figures]
        profile, cluster = profile_of(
            self._layers, self._cluster, figures, self._samples, microbatches
        )
        profile = replace(
            profile,
            num_accumulated=self._settings.num_accumulated,
            num_gradients=1 + self._settings.accumulates,
            shared=self.shared,
            overlaps_updates=self.overlaps_updates,
            state_stays=self.state_stays,
            batch_bytes=self._batch_bytes,
            batch_samples=self._batch_samples,
            updates_at_once=self._updates_at_once,
        )
        waited = tuple(each.waited_seconds for each in figures)
        ran = [each.ran for each in figures]
        return Measured(profile, cluster, topology.ranks, waited if any(waited) else (), ran)

    @property
    def optimizer_bytes(self) -> dict[int, int]:
        """The expected bytes of each layer's optimizer state."""
        return {index: layer.optimizer_bytes for index, layer in enumerate(self._layers)}

    def bytes_held_twice(
        self,
        leaving: Iterable[int],
        copied: Iterable[int],
        on_host: Collection[int],
        waiting: Collection[int],
    ) -> int:
        """The bytes that layers take on a stage because they move, as
        :meth:`Measured.lacking_during` counts them.

        Args:
            leaving: those that the stage still holds, and another one owns already.
            copied: those of which it holds the weights in addition.
            on_host: those whose optimizer state is in host memory.
            waiting: those whose weights wait there.
        """
        layers = self._layers
        weights = (layers[n].weights_bytes(n in waiting) for n in (*leaving, *copied))
        return sum(weights) + sum(layers[n].optimizer_bytes for n in leaving if n not in on_host)

    def static_bytes(
        self,
        stage: int,
        num_stages: int,
        own: Collection[int],
        on_host: Collection[int] = (),
        waiting: Collection[int] = (),
    ) -> float:
        """The bytes that layers take permanently on a stage: as in a ``Workload``.

        Args:
            stage: the stage.
            num_stages: of its virtual machine.
            own: the layers.
            on_host: the layers whose optimizer state is in host memory.
            waiting: the layers whose weights wait there.
        """
        settings = self._settings
        pipeline = settings.schedule, num_stages, settings.num_accumulated
        num_more = weight_versions(*pipeline)[stage] - 1 + settings.accumulates
        found = shared_bytes(self._layers, self.shared, own, on_host)
        for index in own:
            layer = self._layers[index]
            found += layer.static_bytes + num_more * layer.gradient_bytes
            found -= layer.optimizer_bytes if index in on_host else 0
            found -= layer.waiting_bytes if index in waiting else 0
        as_first, as_other = shared_copies(*pipeline)[stage]
        for shared in self.shared:
            if not set(shared.layers) - set(own):
                continue
            for place, user in enumerate(shared.layers):
                found += (user in own) * (as_other if place else as_first) * shared.sent_bytes
        return found

    def room_bytes(self, plan: Plan, vm: int, stage: int, layers: Iterable[int]) -> int:
        """The bytes that a stage leaves free for its batches, and for the layer that runs.

        Args:
            plan: the plan in force.
            vm: the virtual machine.
            stage: the stage.
            layers: those that run on it.
        """
        num_stages, working = plan.placement.num_stages(vm), self.profiler.working_bytes
        num_held = batches_held(plan.schedule, num_stages, plan.microbatches)[stage]
        return num_held * self._batch_bytes + max((working.get(n, 0) for n in layers), default=0)

    def window_bytes(self, waiting: Iterable[int]) -> float:
        """The device's memory for the weights of layers that wait in host memory.

        Args:
            waiting: these layers of a stage, in order.
        """
        return window_bytes([self._layers[layer].waiting_bytes for layer in waiting])

    def predicted(self, plan: Plan) -> Plan:
        """A plan with the simulator's prediction. Every rank calls this."""
        text = None
        if plan.placement.owners:
            raise PlanError(
                "The simulator knows no plans in which the layers of a stage are not contiguous:"
                " there is no prediction for it."
            )
        if self.measured is not None and self.is_measured:
            text = replace(plan, prediction=self.measured.prediction(plan)).to_json()
        text = self._replicas.world.share_object(text, source=0)
        if text is None:
            raise PlanError(
                "Nothing has been measured of this run yet. With `partition='auto'` the first steps"
                f" are (`profile_steps={self._settings.profile_steps}`): ask later."
            )
        return Plan.from_json(text)

    def parts_of(self, old: Plan, new: Plan) -> list[Plan]:
        """The plans by which one plan turns into another. Every rank calls this.

        Raises:
            PlanError: a device lacks memory for layers while they move.
        """
        if old.placement == new.placement or old.placement.owners or new.placement.owners:
            return [new]
        found: list[str] | str = ""
        if self._replicas.rank == 0:
            try:
                found = [each.to_json() for each in self.parts_here(old, new)]
            except PlanError as error:
                found = str(error)
        found = self._replicas.world.share_object(found, source=0)
        if isinstance(found, str):
            raise PlanError(found)
        return [Plan.from_json(text) for text in found]

    def parts_here(self, old: Plan, new: Plan) -> list[Plan]:
        """As :meth:`parts_of`, on the first rank only."""
        has_budget = self._settings.memory is not None
        measured = self.measured if self.measures else None
        checks_memory = self.is_measured or has_budget
        return parts_of(old, new, self._layers, measured, checks_memory)

    def require_memory(self, plan: Plan, is_here: bool = False) -> None:
        """Raises PlanError if a stage would have too little memory according to the measurements,
        if there are any.

        Args:
            plan: the plan.
            is_here: whether only the first rank calls this; otherwise every rank does.
        """
        problem, measured = "", self.measured
        if measured is not None and self.is_measured and not plan.placement.owners:
            held = measured.prediction(plan).memory_bytes
            problem = "" if measured.fits(plan, held) else measured.lacking(plan, held)
        if not is_here:
            problem = self._replicas.world.share_object(problem, source=0)
        if problem:
            raise PlanError(problem)

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
        self._gather(lag)
        steps = min(self._window, FEW_STEPS) if self._is_soon else self._window
        is_due = self.measures and steps and self.profiler.num_measured >= steps
        if not is_due or self._is_deciding or self._coming is not None:
            return
        own = list(own)
        took = self.profiler.took(steps)
        figures = self.profiler.figures(
            own, gates, optimizers, self._replicas.is_last_stage, fewest=steps
        )
        mine = self._probed(own, figures, took)
        self._is_deciding = not self._settings.only_measures
        carried = self.profiler.links.since()
        self._coming = _Coming(plan, steps, took, mine, carried, self._is_soon)
        if lag:
            # The others may be as far behind when this step ends.
            self._coming.age = -1
        self._gather(lag)
        if self._is_deciding:
            self.profiler.next_window()

    def _probed(self, own: Sequence[int], figures: RankFigures, took: Estimate) -> RankFigures:
        """The figures of this rank. If it counts as slow since layers were taken from it, and does
        not look slow now, it is probed now and then, until it has recovered.
        """
        before, now = (
            sum(sum(times[layer]) for layer in own if layer in times)
            for times in (figures.earlier, figures.times)
        )
        is_held = bool(figures.earlier) or (not own and not self.profiler.has_recovered)
        if own and not is_held:
            self._slowdown = None
        is_slow = bool(before) and before < _SLOWER * now
        seconds = self._probe_times.seconds(is_held, is_slow, self._window * took.mean)
        if seconds and self._slice_seconds:
            slices: list[float] = []
            taken, limit = 0.0, _SLOWER * self._slice_seconds
            while more := self._probe_times.lasts(slices, taken, seconds, limit):
                slices += time_slices(self._device, more)
                taken += more
            # For a rank that counts as slow even one pause is evidence. What other programs add now
            # and then is in the times of all ranks' layers.
            found, mean = recent(slices, len(slices)), fmean(slices)
            self._slowdown = mean / self._slice_seconds if mean > limit else 1.0
            self._doubt = found.error / found.mean if found.mean else 0.0
            self.profiler.has_recovered = mean <= limit
        if self._slowdown is None or is_slow:
            return figures
        # Without layers, the few operations around them do not say how fast the rank is.
        error = figures.error if own else self._doubt
        return replace(figures, earlier={}, slowdown=self._slowdown, error=error)

    def end_gathering(self) -> None:
        """Called when no rank is behind another one."""
        self._gather(0)

    def _gather(self, lag: int) -> None:
        """Sends this rank's measurements to the first rank at once, which takes them in when they
        are ``lag`` steps old. On every rank they count as measured from then on.
        """
        coming = self._coming
        if coming is None:
            return
        coming.age += 1
        is_first, is_over = self._replicas.rank == 0, coming.age > lag
        found_by_rank = None
        if is_over if is_first else not coming.is_sent:
            mine = coming.mine, coming.took, coming.carried
            found_by_rank = gather_figures(mine, self._replicas)
            coming.is_sent = True
        if is_over:
            self._coming = None
            self.is_measured |= not is_first
        if found_by_rank is None:
            return
        figures, all_took, carried = zip(*found_by_rank, strict=True)
        # Steps before a change of any rank do not count; and a step ends when its last rank does.
        took = min(all_took, key=lambda each: (each.num_steps, -each.mean))
        num_messages = coming.steps * coming.plan.microbatches
        self._cluster, links = measured_links(self._cluster, carried, num_messages)
        learned = self._learned(figures)
        self.measured = learned.compared(coming.plan, took.mean)
        self._cluster = learned.cluster
        # Another thread may ask for the measurements as soon as it is said that there are some.
        self.is_measured = True
        if self._is_deciding:
            # Planning takes longer than a small step.
            plain = None
            if self._decider.judges_memory:
                plain = self._learned([each.without_moves for each in figures])
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
        self.profiler.is_undone = is_undone
        self.decisions.accept(found)
        if found.is_new or (self._settings.watch is None and not found.goes_on):
            self.profiler.begin_anew(for_good=not found.is_new)
