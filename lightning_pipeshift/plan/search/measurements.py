"""The measurements of a run: the model, the machines, and the ranks of the stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.layer_memory import passing_bytes, window_bytes
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.cost.prediction import Pipelines, Prediction
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.policies import Policy
from lightning_pipeshift.plan.inputs.profile import Profile, shared_bytes
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.schedule.schedules import in_chunks
from lightning_pipeshift.plan.search.problem import Problem
from lightning_pipeshift.plan.search.request import Arrangement

Memory = Sequence[Sequence[float]]
"""Peaks in bytes, per virtual machine and stage."""


@dataclass(frozen=True)
class Measured:
    """The measured input of planning.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order; those of a plan take precedence.
        waited_seconds: how long the compute of each rank has waited in a step for swapped tensors;
            empty without swaps.
        ran: of each rank, as in `RankFigures`.
    """

    profile: Profile
    cluster: Cluster
    ranks: Sequence[Sequence[int]]
    waited_seconds: Sequence[float] = ()
    ran: Sequence[float | None] = ()

    def ranks_of(self, plan: Plan) -> Sequence[Sequence[int]]:
        """The ranks of each virtual machine under a plan, in stage order."""
        return plan.ranks or self.ranks

    def plan(
        self,
        schedule: str,
        microbatches: int,
        cuts: Sequence[Cut],
        swaps: tuple[tuple[Swap, ...], ...] = (),
    ) -> Plan:
        """The plan with known cuts, with its prediction if the layers' times are known.

        Args:
            schedule: by name.
            microbatches: of a virtual machine's batch.
            cuts: one for each virtual machine.
            swaps: of saved tensors, for each of them.
        """
        first = self.profile.times_on(self.cluster.devices[self.ranks[0][0]])

        def of_each(name: str) -> tuple[tuple[int, ...], ...]:
            layers = tuple(tuple(sorted(getattr(cut, name))) for cut in cuts)
            return layers if any(layers) else ()

        plan = Plan(
            layers=tuple(
                LayerRecord(layer.name, layer.parameter_bytes, seconds, layer.payload_bytes)
                for layer, seconds in zip(self.profile.layers, first.forward, strict=True)
            ),
            placement=Placement.interleaved(
                [cut.counts for cut in cuts], list(map(len, self.ranks))
            ),
            schedule=schedule,
            microbatches=microbatches,
            recompute=of_each("recompute"),
            swaps=swaps if any(swaps) else (),
            optimizer_on_host=of_each("optimizer_on_host"),
            weights_on_host=of_each("weights_on_host"),
        )
        if any(first.forward):
            plan = replace(plan, prediction=self.prediction(plan))
        return plan

    def prediction(self, plan: Plan) -> Prediction:
        """The simulator's prediction of a plan."""
        swaps = [plan.swapped(vm) for vm in range(len(self.ranks_of(plan)))]
        return self._pipelines(plan).predicted(swaps)

    def problems(
        self, schedule: str, microbatches: int, policy: Policy | None, recompute: str = "auto"
    ) -> list[Problem]:
        """The input of the search for the cut of each virtual machine.

        Args:
            schedule: by name.
            microbatches: of a virtual machine's batch.
            policy: see :class:`~lightning_pipeshift.plan.search.problem.Problem`, as for
                ``recompute``.
        """
        profile, cluster = self.profile, self.cluster
        found = []
        for machine in self.ranks:
            ranks = in_chunks(machine, schedule)
            workload = workload_of(profile, cluster, ranks, schedule, microbatches)
            found.append(Problem.of(profile, workload, cluster, ranks, policy, recompute))
        return found

    def compared(self, plan: Plan, step_seconds: float) -> Measured:
        """The same measurements, plus the time by which a real step exceeded the simulated one: for
        messages passing through the system, and for waiting for a core. It is added for every plan.

        Args:
            plan: under which the step ran.
            step_seconds: the time of the step.
        """
        more = step_seconds - self.prediction(plan).step_seconds
        if more <= 0:
            return self
        profile = replace(self.profile, step_seconds=self.profile.step_seconds + more)
        return replace(self, profile=profile)

    def move_seconds(self, old: Plan, new: Plan) -> float:
        """How long the transfers of all layers that change their owners take in sequence."""
        seconds = 0.0
        places = zip(self.ranks_of(old), self.ranks_of(new), strict=True)
        for vm, (before, after) in enumerate(places):
            for index, layer in enumerate(self.profile.layers):
                source = before[old.placement.stage_of(vm, index)]
                to = after[new.placement.stage_of(vm, index)]
                seconds += self.cluster.link(source, to).seconds(layer.static_bytes)
        return seconds

    def fits(self, plan: Plan, memory_bytes: Memory) -> bool:
        """Whether every device has the memory that its stage takes under a plan."""
        return all(held <= usable for _, _, held, usable in self._places(plan, memory_bytes))

    def lacking(self, plan: Plan, memory_bytes: Memory) -> str:
        """A message about the stage that lacks the most memory under a plan."""
        places = [
            (held - usable, vm, stage, held)
            for vm, stage, held, usable in self._places(plan, memory_bytes)
        ]
        lacks, vm, stage, held = max(places)
        return (
            f"stage {stage} of virtual machine {vm} would hold {held / 1e6:.1f} MB, which is "
            f"{lacks / 1e6:.1f} MB more than it has; give it fewer layers, or recompute more of "
            "them"
        )

    def lacking_during(self, old: Plan, new: Plan) -> str:
        """A message about the device that lacks the most memory while layers change their owners,
        even if what most layers save leaves the device; empty if none does.

        In the step before, a new owner has memory for the weights that come, and the old one has
        copies of them; in the step in which the layers change their owners, the old owner still
        holds them. In an asynchronous pipeline minibatches of both owners are in flight: both hold
        all that a layer takes permanently, with every version of its weights, and a stage that gets
        no layer holds no more than before.

        Args:
            old: the plan before.
            new: the plan after. It has the same ranks.
        """
        places = [(0.0, 0, 0, 0.0, 0.0)]
        how = new.schedule, new.microbatches
        for vm, ranks in enumerate(self.ranks_of(old)):
            workload = workload_of(self.profile, self.cluster, ranks, *how)
            for stage, usable in enumerate(workload.usable_bytes.tolist()):
                had, has = (set(each.placement.layers_of(vm, stage)) for each in (old, new))
                for plan, own in ((old, had), (new, has)):
                    if not new.is_asynchronous:
                        runs = own
                        comes = sum(self._weights(old, vm, layer) for layer in had ^ has)
                        stays = sum(self._weights_and_state(old, vm, layer) for layer in had - has)
                        twice = float(comes if plan is old else stays)
                    elif has <= had:
                        continue
                    else:
                        runs = had | has
                        twice = self._static(workload, plan, vm, stage, runs - own)
                    total = self._held(workload, plan, vm, stage, runs) + twice
                    places.append((total - usable, vm, stage, total, twice))
        lacks, vm, stage, total, twice = max(places)
        if lacks <= 0:
            return ""
        return (
            f"while layers move, stage {stage} of virtual machine {vm} would hold"
            f" {total / 1e6:.1f} MB or more for a step, {twice / 1e6:.1f} MB of them for layers"
            " that another stage has, too; that is"
            f" {lacks / 1e6:.1f} MB more than it has. Move other layers, or give it more memory"
        )

    def _held(
        self, workload: Workload, plan: Plan, vm: int, stage: int, runs: Collection[int]
    ) -> float:
        """The bytes that a stage cannot do without: weights, gradients, optimizer state, payloads,
        batches, what a layer that runs takes for a moment, and the larger of what one layer saves
        and of its state in host memory.
        """
        own, layers = plan.placement.layers_of(vm, stage), self.profile.layers
        waiting = [n for n in own if n in plan.weights_on_host_of(vm)]
        at_once = [workload.saved_bytes[n] for n in own]
        at_once += [workload.optimizer_bytes[n] for n in own if n in plan.optimizer_on_host_of(vm)]
        payloads = (0, *plan.stage_payload_bytes(vm), 0)
        return float(
            self._static(workload, plan, vm, stage, own)
            + shared_bytes(layers, self.profile.shared, own, plan.optimizer_on_host_of(vm))
            + window_bytes([workload.waiting_bytes[n] for n in waiting])
            + max(at_once, default=0.0)
            + passing_bytes(*payloads[stage : stage + 2])
            + workload.memory.batches_bytes[stage]
            + max((workload.momentary_bytes[n] for n in runs), default=0.0)
        )

    @staticmethod
    def _static(
        workload: Workload, plan: Plan, vm: int, stage: int, layers: Collection[int]
    ) -> float:
        """The bytes that layers take permanently on a stage's device under a plan."""
        on_host, waiting = plan.optimizer_on_host_of(vm), plan.weights_on_host_of(vm)
        held = workload.memory.fixed_bytes[stage, list(layers)].sum()
        held -= sum(workload.optimizer_bytes[n] for n in layers if n in on_host)
        return float(held - sum(workload.waiting_bytes[n] for n in layers if n in waiting))

    def _pipelines(self, plan: Plan) -> Pipelines:
        how = plan.schedule, plan.microbatches
        ranks = [in_chunks(machine, plan.schedule) for machine in self.ranks_of(plan)]
        workloads = [workload_of(self.profile, self.cluster, machine, *how) for machine in ranks]
        cuts = [plan.cut(vm) for vm in range(len(ranks))]
        return Pipelines(self.profile, self.cluster, ranks, workloads, cuts)

    def _weights(self, plan: Plan, vm: int, layer: int) -> int:
        on_host = layer in plan.weights_on_host_of(vm)
        return self.profile.layers[layer].weights_bytes(on_host)

    def _weights_and_state(self, plan: Plan, vm: int, layer: int) -> int:
        on_host = layer in plan.optimizer_on_host_of(vm)
        state = 0 if on_host else self.profile.layers[layer].optimizer_bytes
        return self._weights(plan, vm, layer) + state

    def _places(self, plan: Plan, memory_bytes: Memory) -> list[tuple[int, int, float, float]]:
        return [
            (vm, stage, held, self.cluster.devices[rank].usable_bytes)
            for vm, (ranks, peaks) in enumerate(zip(self.ranks_of(plan), memory_bytes, strict=True))
            for stage, (rank, held) in enumerate(zip(ranks, peaks, strict=True))
        ]


def plan_of_arrangement(found: Arrangement, profile: Profile, cluster: Cluster) -> Plan:
    """A planner's result as a plan with its ranks and their kinds, for another run to use."""
    plan = Measured(profile, cluster, found.ranks).plan(
        found.schedule, found.microbatches, found.cuts
    )
    kinds = [[cluster.devices[rank].kind for rank in ranks] for ranks in found.ranks]
    return replace(
        plan,
        swaps=found.swaps,
        ranks=found.ranks,
        kinds=tuple(map(tuple, kinds)),
        batch_shares=found.batch_shares or (),
        prediction=found.prediction,
    )
