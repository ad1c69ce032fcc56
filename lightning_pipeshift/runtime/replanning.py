"""Plans a run at its first batch, and once more when its first steps have been measured.

NUDT, "distributed parallel training method and system for heterogeneous computing clusters", trains
on the first samples to measure every layer, and on the others under the plan made of that. Here
nothing stops in between: the second plan is a change of owners at a step's boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.gate import Gate
from lightning_pipeshift.model.measure import Figures
from lightning_pipeshift.model.trace import Trace
from lightning_pipeshift.plan.cluster import Cluster, Device
from lightning_pipeshift.plan.draft import prediction_of
from lightning_pipeshift.plan.figures import profile_of
from lightning_pipeshift.plan.placement import Placement
from lightning_pipeshift.plan.plan import Plan
from lightning_pipeshift.plan.prediction import Prediction
from lightning_pipeshift.plan.profile import LayerProfile, Profile
from lightning_pipeshift.runtime.planning import Settings, make_plan
from lightning_pipeshift.runtime.probe import probe
from lightning_pipeshift.runtime.profiling import Profiler, gather_figures, layers_of
from lightning_pipeshift.runtime.replicas import Replicas
from lightning_pipeshift.runtime.threads import Threads

_INSISTENCE: Final = 2
"""How often in a row a better plan has to be found, once the one in force was measured. Twice as
often after each decision that took an earlier one back: a device whose speed swings does not make
layers swing.
"""

MIN_GAIN: Final = 0.05
"""By how much a step has to get shorter for layers to change their owners."""


@dataclass(frozen=True)
class Decision:
    """What the first rank has decided, for all.

    Args:
        plan: as a document.
        is_new: whether it is another than the one in force.
        message: what the user is told; empty for nothing.
        expected_gain: how many times as fast a step is to get.
        took: seconds of a step when it was decided.
    """

    plan: str
    is_new: bool
    message: str
    expected_gain: float = 1.0
    took: float | None = None


class Replanning:
    """One rank's part in planning.

    Args:
        settings: what the user asked for.
        replicas: the virtual machines.
        here: this rank's device.
        device: likewise, as torch names it.
        news: what the user is told after the step.
        say: tells the user at once.
        threads: where the first rank looks for a better plan, while training goes on.
    """

    def __init__(
        self,
        settings: Settings,
        replicas: Replicas,
        here: Device,
        device: torch.device,
        news: list[str],
        say: Callable[[str], None],
        threads: Threads,
    ) -> None:
        self.profiler = Profiler(device, is_last=replicas.is_last_stage)
        # On the first rank: what is known, as soon as anything is.
        self.profile: Profile | None = None
        self.cluster = Cluster((Device(here.host, here.kind),) * replicas.topology.num_ranks)
        self._settings = settings
        self._replicas = replicas
        self._here = here
        self._device = device
        self._news = news
        self._say = say
        self._threads = threads
        # On the first rank: what it thinks about, and which plan was in force when it began.
        self._thought: tuple[Future[Decision], Plan] | None = None
        # Whether the first rank thinks about what has been measured.
        self._is_thinking = False
        self._layers: tuple[LayerProfile, ...] = ()
        self._samples = 1.0
        # What a step took before the plan changed, and how many times as fast it was to get.
        self._before: tuple[float, float] | None = None
        # How often in a row another plan was found to be worth it.
        self._insistence = 0
        # By virtual machine and layer, the stages that decisions have taken it from; and how many
        # decisions gave one back.
        self._left: dict[tuple[int, int], set[int]] = {}
        self._num_reversals = 0
        self.is_measured = False
        """Whether the first steps have been measured."""
        self.steps_left = math.inf
        """For how many steps a change can pay."""
        self.decisions: list[dict[str, float]] = []
        """What was expected of changes of the plan, and what came of them."""

    @property
    def _is_first(self) -> bool:
        return self._replicas.world.stage == 0

    @property
    def measures(self) -> bool:
        """Whether anything depends on what is measured."""
        settings = self._settings
        is_pipeline = max(self._replicas.topology.stages_per_vm) > 1
        may_change = settings.is_free or settings.watch is not None
        return settings.only_measures or (may_change and is_pipeline)

    @property
    def _window(self) -> int:
        """How many steps to measure before they are looked at; 0: none are."""
        watch = self._settings.watch
        if watch is not None and (self.is_measured or not self._settings.is_free):
            return watch.patience
        return self._settings.profile_steps

    def first_plan(
        self,
        gates: Sequence[Gate],
        trace: Trace,
        guesses: dict[int, Figures],
        optimizers: Sequence[Optimizer],
        samples: float,
        held_bytes: int,
        trains: bool,
    ) -> Plan:
        """The plan for the first steps: the first rank's, on all. Every rank calls this.

        Args:
            gates: of the layers, in call order.
            trace: of a microbatch.
            guesses: what a stopwatch found.
            optimizers: those of the run.
            samples: of a microbatch.
            held_bytes: what the model takes of this device's memory now.
            trains: whether the plan is for training.
        """
        if self.measures and trains:
            measured = probe(self._replicas.world, self._device, self._here, self._say)
            # It counts places in the connections, which need not be in the order of the ranks.
            self.cluster = measured.cluster.renumbered(self._replicas.world.ranks)
            self._news.extend(measured.notes)
        self.profiler.take_guesses(guesses)
        self._layers = layers_of(gates, trace, optimizers)
        self._samples = samples
        mine = replace(self.profiler.figures((), gates, optimizers), held_bytes=held_bytes)
        figures = gather_figures(mine, self._replicas)
        text = None
        if figures is not None:
            self._learn(figures)
            assert self.profile is not None
            plan = make_plan(self._settings, self.profile, self.cluster, self._replicas.topology)
            text = plan.to_json()
        return Plan.from_json(self._replicas.world.share_object(text, source=0))

    def _learn(self, figures: Sequence[Any]) -> None:
        microbatches = self._settings.num_microbatches(self._replicas.topology.stages_per_vm)
        self.profile, self.cluster = profile_of(
            self._layers, self.cluster, figures, self._samples, microbatches
        )

    def _compare(self, plan: Plan) -> None:
        """Takes in what a step took beyond what the simulator makes of its parts: the way of a
        message through the system, the wait for a core. It counts for every plan alike.
        """
        assert self.profile is not None
        took = self.profiler.step_seconds
        found = self.prediction(plan)
        if took is not None and took > found.step_seconds:
            more = self.profile.step_seconds + took - found.step_seconds
            self.profile = replace(self.profile, step_seconds=more)

    def prediction(self, plan: Plan) -> Prediction:
        """What the simulator says of a plan, on the first rank, by what has been measured."""
        assert self.profile is not None
        ranks = self._replicas.topology.ranks
        return prediction_of(plan, self.profile, self.cluster, ranks)

    def predicted(self, plan: Plan) -> Plan:
        """A plan with what the simulator says of it. Every rank calls this."""
        text = None
        if self._is_first and self.is_measured:
            text = replace(plan, prediction=self.prediction(plan)).to_json()
        text = self._replicas.world.share_object(text, source=0)
        if text is None:
            raise PlanError(
                "Nothing has been measured of this run yet. With `partition='auto'` the first steps"
                f" are (`profile_steps={self._settings.profile_steps}`): ask later."
            )
        return Plan.from_json(text)

    def require_room(self, plan: Plan) -> None:
        """Raises PlanError where a stage would have too little memory, by what has been measured.
        Every rank calls this; while nothing has been measured, it raises nothing.
        """
        problem = ""
        if self._is_first and self.is_measured:
            memory_bytes = self.prediction(plan).memory_bytes
            if not self._fits(memory_bytes):
                problem = self._lacks(memory_bytes)
        problem = self._replicas.world.share_object(problem, source=0)
        if problem:
            raise PlanError(problem)

    def _lacks(self, memory_bytes: Sequence[Sequence[float]]) -> str:
        """Where a plan takes most beyond what there is."""
        places = [
            (held - self.cluster.devices[rank].room_bytes, vm, stage, held)
            for vm, (ranks, peaks) in enumerate(
                zip(self._replicas.topology.ranks, memory_bytes, strict=True)
            )
            for stage, (rank, held) in enumerate(zip(ranks, peaks, strict=True))
        ]
        lacking, vm, stage, held = max(places)
        return (
            f"stage {stage} of virtual machine {vm} would hold {held / 1e6:.1f} MB, which is"
            f" {lacking / 1e6:.1f} MB more than it has room for; leave it fewer layers, or let more"
            " of them be recomputed"
        )

    # --- once the first steps have been measured ---

    @property
    def has_decided(self) -> bool:
        """On the first rank: whether there is a decision that the others have not heard."""
        return self._thought is not None and self._thought[0].done()

    def after_step(
        self, plan: Plan, own: Iterable[int], gates: Sequence[Gate], optimizers: Sequence[Optimizer]
    ) -> None:
        """Lets the first rank think when enough has been measured. Every rank calls this, with the
        same plan.

        Args:
            plan: the one in force.
            own: the layers that this rank owns.
            gates: of all layers.
            optimizers: those of the run.
        """
        steps = self._window
        is_due = self.measures and steps and self.profiler.num_measured >= steps
        if not is_due or self._is_thinking:
            return
        goes_on = self._settings.watch is not None
        if self._before is not None:
            self._say_what_was_gained()
            self._before = None
            self.profiler.begin_anew(for_good=not goes_on)
            return
        figures = gather_figures(self.profiler.figures(own, gates, optimizers), self._replicas)
        # The first plan was a guess; later ones were measured, and are not given up so easily.
        is_first_look = not self.is_measured and self._settings.is_free
        self.is_measured = True
        if figures is not None:
            self._learn(figures)
            self._compare(plan)
        if self._settings.only_measures:
            return
        self._is_thinking = True
        if figures is not None:
            # Planning takes longer than a small step does.
            think = partial(self._decide, plan, steps, is_first_look, self.profiler.step_seconds)
            self._thought = self._threads.submit(think), plan

    def announce(self, plan: Plan) -> Decision:
        """What the first rank has decided, on all. Every rank calls this, when the first one
        :attr:`has_decided`.

        Args:
            plan: the one that the next step will run under.
        """
        decision = None
        if self._thought is not None:
            (thought, before), self._thought = self._thought, None
            decision = thought.result()
            if (before.placement, before.recompute) != (plan.placement, plan.recompute):
                # The layers have changed their owners on request in the meantime.
                decision = Decision(plan.to_json(), False, "")
            elif decision.is_new:
                self._note_left(before, Plan.from_json(decision.plan))
        found: Decision = self._replicas.world.share_object(decision, source=0)
        self._is_thinking = False
        if found.message:
            self._news.append(found.message)
        if found.is_new and found.took is not None:
            self._before = (found.took, found.expected_gain)
            self.decisions.append(
                {"expected_gain": found.expected_gain, "step_seconds": found.took}
            )
        goes_on = self._settings.watch is not None
        self.profiler.begin_anew(for_good=not (found.is_new or goes_on))
        return found

    def _decide(
        self, plan: Plan, num_steps: int, is_first_look: bool, took: float | None
    ) -> Decision:
        """Runs beside the steps, on the first rank."""
        decision = replace(self._best(plan, num_steps, took), took=took)
        self._insistence = self._insistence + 1 if decision.is_new else 0
        if not decision.is_new:
            return decision
        best = Plan.from_json(decision.plan)
        takes_back = any(
            new in self._left.get((vm, layer), ())
            for vm, layer, _, new in _changes(plan.placement, best.placement)
        )
        needed = _INSISTENCE * 2 ** (self._num_reversals + takes_back)
        if not is_first_look and self._insistence < needed:
            return replace(decision, plan=plan.to_json(), is_new=False, message="")
        self._insistence = 0
        self._num_reversals += takes_back
        return decision

    def _note_left(self, old: Plan, new: Plan) -> None:
        for vm, layer, before, _ in _changes(old.placement, new.placement):
            self._left.setdefault((vm, layer), set()).add(before)

    def _best(self, plan: Plan, num_steps: int, took: float | None) -> Decision:
        assert self.profile is not None
        watch, settings = self._settings.watch, self._settings
        if watch is not None:
            settings = settings.let_free(plan)
        topology = self._replicas.topology
        now = self.prediction(plan)
        kept = replace(plan, prediction=now)
        try:
            best = make_plan(settings, self.profile, self.cluster, topology, plan)
        except PlanError as error:
            # The run goes on as it is: it has fitted so far.
            return Decision(kept.to_json(), False, f"the plan stays: {error}")
        then = best.prediction
        same = (best.placement, best.recompute) == (plan.placement, plan.recompute)
        if then is None or same:
            return Decision(kept.to_json(), False, "")
        gain = now.step_seconds / then.step_seconds - 1
        # Over what is left of the run, the move included.
        cost = self._cost(plan, best) / self.steps_left if self.steps_left else math.inf
        promised = now.step_seconds / (then.step_seconds + cost) - 1
        min_gain = watch.min_gain if watch is not None else MIN_GAIN
        if promised < min_gain and self._fits(now.memory_bytes):
            return Decision(kept.to_json(), False, "")
        took = took or now.step_seconds
        message = (
            f"{num_steps} steps have been measured, and the layers change their"
            f" owners: {_counts(plan)} becomes {_counts(best)}. A step took {took:.3g} s"
            f" ({now.step_seconds:.3g} s by the simulator); {then.step_seconds:.3g} s are expected,"
            f" {1 + gain:.2f} times as fast."
        )
        return Decision(best.to_json(), True, message, 1 + gain)

    def _cost(self, old: Plan, new: Plan) -> float:
        """How long the layers that change their owners are under way, in seconds, one by one."""
        assert self.profile is not None
        seconds = 0.0
        for vm, ranks in enumerate(self._replicas.topology.ranks):
            for index, layer in enumerate(self.profile.layers):
                source = ranks[old.placement.stage_of(vm, index)]
                to = ranks[new.placement.stage_of(vm, index)]
                seconds += self.cluster.link(source, to).seconds(layer.static_bytes)
        return seconds

    def _fits(self, memory_bytes: Sequence[Sequence[float]]) -> bool:
        devices, topology = self.cluster.devices, self._replicas.topology
        return all(
            held <= devices[rank].room_bytes
            for ranks, peaks in zip(topology.ranks, memory_bytes, strict=True)
            for rank, held in zip(ranks, peaks, strict=True)
        )

    def _say_what_was_gained(self) -> None:
        took = self.profiler.step_seconds
        if took is None or self._before is None:
            return
        before, expected = self._before
        self.decisions.append({"measured_gain": before / took, "step_seconds": took})
        self._news.append(
            f"a step takes {took:.3g} s since the layers have changed their owners, and took"
            f" {before:.3g} s before: {before / took:.2f} times as fast, {expected:.2f} times was"
            " expected."
        )


def _counts(plan: Plan) -> str:
    different = list(dict.fromkeys(plan.placement.counts))
    shown = [list(counts) for counts in different]
    text = str(shown[0]) if len(shown) == 1 else str(shown)
    return text + (" (with recomputation)" if any(plan.recompute) else "")


def _changes(old: Placement, new: Placement) -> Iterator[tuple[int, int, int, int]]:
    """Virtual machine, layer, old and new stage of each layer that changes its owner."""
    for vm in range(old.num_virtual_machines):
        for layer in range(old.num_layers):
            before, after = old.stage_of(vm, layer), new.stage_of(vm, layer)
            if before != after:
                yield vm, layer, before, after
