"""Builds a plan from the solvers' results, with the simulator's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipeshift.plan.arrange.request import Arrangement
from lightning_pipeshift.plan.cost.prediction import Pipelines, Prediction
from lightning_pipeshift.plan.cost.workload import Cut, Workload, workload_of
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.inputs.saved_tensors import Swap


def plan_of(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    schedule: str,
    microbatches: int,
    cuts: Sequence[Cut],
    swaps: tuple[tuple[Swap, ...], ...] = (),
) -> Plan:
    """Builds a plan from known cuts.

    Args:
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
        schedule: by name.
        microbatches: of a virtual machine's batch.
        cuts: one for each of them.
        swaps: of saved tensors, for each of them.
    """
    first = profile.times_on(cluster.devices[ranks[0][0]])
    plan = Plan(
        layers=tuple(
            LayerRecord(layer.name, layer.parameter_bytes, seconds, layer.payload_bytes)
            for layer, seconds in zip(profile.layers, first.forward, strict=True)
        ),
        placement=Placement(tuple(cut.counts for cut in cuts)),
        schedule=schedule,
        microbatches=microbatches,
        recompute=tuple(tuple(sorted(cut.recompute)) for cut in cuts)
        if any(cut.recompute for cut in cuts)
        else (),
        swaps=swaps if any(swaps) else (),
        optimizer_on_host=tuple(tuple(sorted(cut.optimizer_on_host)) for cut in cuts)
        if any(cut.optimizer_on_host for cut in cuts)
        else (),
        weights_on_host=tuple(tuple(sorted(cut.weights_on_host)) for cut in cuts)
        if any(cut.weights_on_host for cut in cuts)
        else (),
    )
    if any(first.forward):
        plan = replace(plan, lane_shares=lane_shares_of(plan, profile, cluster, ranks))
        plan = replace(plan, prediction=prediction_of(plan, profile, cluster, ranks))
    return plan


def plan_of_arrangement(arrangement: Arrangement, profile: Profile, cluster: Cluster) -> Plan:
    """Builds a plan with its ranks and their kinds, for another run to use."""
    plan = plan_of(
        profile,
        cluster,
        arrangement.ranks,
        arrangement.schedule,
        arrangement.microbatches,
        arrangement.cuts,
    )
    kinds = [[cluster.devices[rank].kind for rank in ranks] for ranks in arrangement.ranks]
    return replace(
        plan,
        swaps=arrangement.swaps,
        ranks=arrangement.ranks,
        kinds=tuple(map(tuple, kinds)),
        batch_shares=arrangement.batch_shares or (),
        prediction=arrangement.prediction,
    )


def cut_of(plan: Plan, vm: int) -> Cut:
    """A plan's cut of a virtual machine."""
    return Cut(
        plan.placement.counts[vm],
        plan.recomputed(vm),
        plan.optimizer_on_host_of(vm),
        plan.weights_on_host_of(vm),
    )


def workloads_of(
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    schedule: str,
    microbatches: int,
) -> list[Workload]:
    """The workload of each virtual machine, for the number of samples in the measurements."""
    return [workload_of(profile, cluster, machine, schedule, microbatches) for machine in ranks]


def lane_shares_of(
    plan: Plan, profile: Profile, cluster: Cluster, ranks: Sequence[Sequence[int]]
) -> tuple[float, ...]:
    """The part of all gradient bytes that each lane is to carry, so that a plan's step is shortest;
    empty if the step waits for all gradients, or there are none to send.

    Args:
        plan: the plan.
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
    """
    if not profile.overlaps_updates or len(ranks) == 1 or plan.is_asynchronous:
        return ()
    return _pipelines(plan, profile, cluster, ranks).best_lane_shares()


def prediction_of(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
) -> Prediction:
    """The simulator's prediction of a plan, by the measurements.

    Args:
        plan: the plan.
        profile: of the model.
        cluster: the machines.
        ranks: of each virtual machine, in stage order.
    """
    swaps = [plan.swapped(vm) for vm in range(len(ranks))]
    return _pipelines(plan, profile, cluster, ranks).predicted(swaps, plan.lane_shares)


def _pipelines(
    plan: Plan, profile: Profile, cluster: Cluster, ranks: Sequence[Sequence[int]]
) -> Pipelines:
    workloads = workloads_of(profile, cluster, ranks, plan.schedule, plan.microbatches)
    cuts = [cut_of(plan, vm) for vm in range(len(ranks))]
    return Pipelines(profile, cluster, ranks, workloads, cuts)
