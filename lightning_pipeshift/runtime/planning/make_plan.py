"""Makes the plan of a run from the user's settings and the measurements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.plan.cost.workload import Sharers
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.schedule.asynchronous import require_equal_depths
from lightning_pipeshift.plan.schedule.schedules import INTERLEAVED, num_chunks
from lightning_pipeshift.plan.search.cut_search import best_split
from lightning_pipeshift.plan.search.given_partition import resolve
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.text import count_text


@dataclass(frozen=True)
class Watch:
    """When to change the owners of layers without a request.

    Args:
        min_gain: the fraction by which a step has to get shorter.
        patience: for how many consecutive steps the gain has to be found.
    """

    min_gain: float
    patience: int


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """The user's options, and what a run adds to them.

    Args:
        seed: the seed of all random streams.
        only_measures: whether the only purpose of the run is to measure it.
        watch: when to change the owners of layers without a request, in addition to after
            ``profile_steps``.
        memory: settings for saved tensors.
        num_accumulated: how many batches make an update, at least.
        accumulates: whether several batches make one, in any epoch.
    """

    seed: int = 0
    only_measures: bool = False
    watch: Watch | None = None
    memory: MemoryRequest | None = None
    num_accumulated: int = 1
    accumulates: bool = False

    def let_free(self, plan: Plan) -> Settings:
        """Returns the same settings, but with the owners chosen by PipeShift: for the search for a
        better plan with the same schedule and microbatches.
        """
        return replace(
            self,
            plan=None,
            partition="auto",
            schedule=plan.schedule,
            microbatches=plan.microbatches,
        )

    def leaves_steps_whole(self, stages_per_vm: Sequence[int]) -> bool:
        """Whether there is a single device, which runs the user's steps without additions."""
        return (
            sum(stages_per_vm) == 1
            and self.num_microbatches(stages_per_vm) == 1
            and self.schedule != "async-2bw"
            and self.recompute != "full"
            and self.memory is None
            and not self.only_measures
        )

    def check(self, gates: Sequence[NamedLayer], stages_per_vm: tuple[int, ...]) -> None:
        """Raises PartitionError or PlanError where the model's layers and the stages do not fit,
        and ConfigurationError where the schedule and other settings do not.
        """
        if self.memory is not None and self.schedule in INTERLEAVED:
            raise ConfigurationError(
                f"schedule={self.schedule!r} and `MemoryCompression`: what moves saved tensors"
                " knows one range of layers for each stage. Remove the plugin, or use"
                " schedule='1f1b'."
            )
        if self.plan is not None:
            self.plan.require_layers([gate.name for gate in gates])
            planned = tuple(map(len, self.plan.placement.counts))
            if planned != stages_per_vm:
                raise PlanError(
                    f"The plan is for {_stages(planned)}, and this run has"
                    f" {_stages(stages_per_vm)}. Use `Trainer(devices={sum(planned)})`, or make a"
                    " plan for the stages there are."
                )
            for name, what in (
                ("swaps", "saved tensors"),
                ("optimizer_on_host", "the optimizer's state"),
                ("weights_on_host", "weights"),
            ):
                if any(getattr(self.plan, name)) and self.memory is None:
                    raise PlanError(
                        f"The plan moves {what} (its field {name!r}), but this run has no "
                        "plugin that does so. Add `MemoryCompression(...)` to the Trainer's "
                        "`plugins`, or remove the field from the plan."
                    )
        else:
            require_equal_depths(self.schedule, stages_per_vm)
            names = [gate.name for gate in gates]
            counted = self.counted(stages_per_vm)
            resolve(self.partition, num_layers=len(names), stages_per_vm=counted, names=names)

    def counted(self, stages_per_vm: tuple[int, ...]) -> tuple[int, ...]:
        """For how many numbers of layers ``partition`` asks on each virtual machine: one for each
        chunk of layers on each stage.
        """
        return tuple(depth * num_chunks(self.schedule, depth) for depth in stages_per_vm)

    def aggregation(
        self, backend: str, num_owner_sets: int, placement: Placement
    ) -> tuple[str, str]:
        """Returns how gradients are summed over virtual machines, ``"ring"`` or ``"allreduce"``,
        and the reason.

        Args:
            backend: that of the devices.
            num_owner_sets: how many different sets of owners the layers have.
            placement: the owners of the layers.
        """
        if self.gradient_aggregation != "auto":
            return self.gradient_aggregation, "you asked for it"
        # NCCL's own collectives are rings already, on the GPU; those of gloo have to run in the
        # same order on all ranks, and wait for each other.
        kind = "ring" if backend == "gloo" else "allreduce"
        why = f"the backend is {backend}"
        if num_owner_sets > max(map(len, placement.counts)):
            # Collectives would need a process group for each set, and keep one order in all of
            # them; rings need neither.
            kind = "ring"
            why += f", and layers have {num_owner_sets} different sets of owners"
        return kind, why


def make_plan(
    settings: Settings,
    profile: Profile,
    cluster: Cluster,
    topology: Topology,
    current: Plan | None = None,
    idle: Collection[int] = (),
) -> Plan:
    """Returns the plan for a model on the given virtual machines.

    Args:
        settings: the user's settings.
        profile: of the model.
        cluster: the machines.
        topology: the virtual machines.
        current: the plan in force, to start from. With an asynchronous schedule only plans are
            found to which it can change.
        idle: the layers that no step calls.

    Raises:
        PlanError: no allowed plan fits in memory.
    """
    if settings.plan is not None:
        return settings.plan
    microbatches = settings.num_microbatches(topology.stages_per_vm)
    counted = settings.counted(topology.stages_per_vm)
    fixed: Sequence[tuple[int, ...]] | None = None
    if settings.partition != "auto" or max(topology.stages_per_vm) == 1:
        fixed = resolve(
            settings.partition,
            num_layers=profile.num_layers,
            stages_per_vm=counted,
            idle=idle,
            possible=profile.possible_cuts,
        ).counts
    policy = settings.memory.policy if settings.memory is not None else None
    recompute = "none" if settings.schedule in INTERLEAVED else settings.recompute
    measured = Measured(profile, cluster, topology.ranks)
    found = []
    for vm, problem in enumerate(
        measured.problems(settings.schedule, microbatches, policy, recompute)
    ):
        if current is not None and settings.is_asynchronous:
            sharers = sharers_of(profile, current.placement.stages(vm))
            problem = replace(problem, workload=replace(problem.workload, sharers=sharers))
        counts = fixed[vm] if fixed is not None else None
        found.append(best_split(problem, counts, [current.cut(vm)] if current is not None else []))
    cuts, swaps = [each.cut for each in found], tuple(each.swaps for each in found)
    made = measured.plan(settings.schedule, microbatches, cuts, swaps)
    return replace(made, ranks=topology.ranks)


def best_topology(
    settings: Settings, profile: Profile, cluster: Cluster, topology: Topology
) -> Topology:
    """The same virtual machines, with their ranks in the stage order that the planner finds best.

    Args:
        settings: the user's settings.
        profile: of the model.
        cluster: the machines.
        topology: the virtual machines.

    Raises:
        PlanError: no order has a plan that fits in memory.
    """
    request = replace(
        settings.request(
            profile.num_samples,
            settings.memory.policy if settings.memory is not None else None,
        ),
        virtual_machines=topology.ranks,
        microbatches=settings.num_microbatches(topology.stages_per_vm),
        # The shares of a run's data are fixed.
        batch_shares=tuple(settings.batch_shares or [1.0] * topology.num_virtual_machines),
        may_reorder=True,
    )
    return Topology(arrange(profile, cluster, request).ranks)


def sharers_of(profile: Profile, stage_of: Sequence[int]) -> tuple[Sharers, ...]:
    """The layers that share a parameter, with the stages that have them; an asynchronous pipeline
    cannot change these.

    Args:
        profile: of the model.
        stage_of: the stage of each layer.
    """
    return tuple(
        (shared.layers, frozenset(stage_of[layer] for layer in shared.layers))
        for shared in profile.shared
        if shared.is_trained and not shared.everywhere
    )


def stages_without_work(
    settings: Settings,
    placement: Placement,
    topology: Topology,
    called: Collection[int],
    has_moved: bool = False,
) -> str | None:
    """A message about devices that a cut leaves without work, with the reason and a remedy;
    ``None`` if all have work.

    Args:
        settings: the user's settings.
        placement: the owners of the layers.
        topology: the virtual machines.
        called: the layers that a step calls.
        has_moved: whether layers have changed their owners since training began.
    """
    without = [
        topology.ranks[vm][stage]
        for vm, num_stages in enumerate(topology.stages_per_vm)
        for stage in range(num_stages)
        if not any(layer in called for layer in placement.layers_of(vm, stage))
    ]
    if not without:
        return None
    deepest = max(topology.stages_per_vm)
    if len(called) < deepest:
        why = f"a step calls {count_text(len(called), 'layer')}, and there are {deepest} stages"
        what = "Name smaller layers in `configure_layers()`, or use fewer devices"
    elif has_moved:
        why = "its layers have moved to other stages"
        what = "Move layers back to it, or use fewer devices the next time"
        if settings.watch is not None:
            what = "It gets layers again if it becomes fast enough"
    elif settings.plan is not None or settings.partition not in ("auto", "uniform"):
        source = "plan" if settings.plan is not None else "partition"
        why = f"the `{source}` that you gave has none of the layers that a step calls for it"
        what = f"Change the `{source}`, or use fewer devices"
    else:
        why = "by the measurements, using it would not make a step shorter"
        what = "Use fewer devices, or `partition='uniform'` to compare"
    names = ", ".join(map(topology.name_of, without))
    has = "has" if len(without) == 1 else "have"
    return f"{names} {has} nothing to compute: {why}. {what}."


def _stages(stages_per_vm: Sequence[int]) -> str:
    if len(stages_per_vm) == 1:
        return f"{stages_per_vm[0]} stages"
    return f"virtual machines of {', '.join(map(str, stages_per_vm))} stages"
