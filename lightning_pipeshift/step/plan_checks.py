"""Which plans may come into force while a run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.sharing import require_same_sharers
from lightning_pipeshift.values.core import Core


def adoptable(plan: Plan, now: Plan, coming: Plan, names: Sequence[str], has_memory: bool) -> Plan:
    """Returns a plan with which a run can go on, with its ranks.

    Args:
        plan: the new plan.
        now: the plan in force.
        coming: the one that will be in force when all requested changes are done.
        names: of the layers, in call order.
        has_memory: whether tensors are kept by a memory plan.

    Raises:
        PlanError: the plan is not for the same model, the same virtual machines and the same
            settings of training: only the owners of layers, the order of the ranks and
            recomputation can change.
    """
    plan.require_layers(list(names))
    found = (plan.schedule, plan.microbatches, tuple(map(len, plan.placement.counts)))
    allowed = (now.schedule, now.microbatches, tuple(map(len, now.placement.counts)))
    if found != allowed:
        raise PlanError(
            "Only the owners of layers, the order of ranks and recomputation can change: the "
            f"new plan has (schedule, microbatches, stages of each virtual machine) {found}, "
            f"the one in force {allowed}. Start a run with the new plan instead."
        )
    plan = replace(plan, ranks=plan.ranks or coming.ranks)
    if plan.ranks == coming.ranks:
        return plan
    ranks, before = ([list(machine) for machine in one.ranks] for one in (plan, coming))
    order = f"a plan for the ranks {ranks}, and the stages are the ranks {before}"
    if not Topology(plan.ranks).has_machines_of(Topology(coming.ranks)):
        raise PlanError(
            f"{order}: ranks cannot change their virtual machine during training. Start a run"
            " with the new plan instead."
        )
    if plan.is_asynchronous or has_memory:
        what = "MemoryCompression" if has_memory else "an asynchronous schedule"
        raise PlanError(
            f"{order}: with {what} they cannot change places during training. Start a run with"
            " the new plan instead."
        )
    return plan


def require_no_shared_moves(plan: Plan, now: Plan, vm: int, uses: Iterable[ParameterUse]) -> None:
    """Raises PlanError if layers move that have a parameter in common, of which only one stage has
    the optimizer's state: with manual optimization.

    Args:
        plan: the new plan.
        now: the plan in force.
        vm: this rank's virtual machine.
        uses: of the parameters.
    """
    old, new = (
        [each.ranks[vm][stage] for stage in each.placement.stages(vm)] for each in (now, plan)
    )
    if any(use.is_shared and any(old[layer] != new[layer] for layer in use.layers) for use in uses):
        raise PlanError(
            "With manual optimization, layers that share weights cannot move while training"
            " runs. Start a run with the new plan instead."
        )


def require_movable(
    parts: Sequence[Plan], now: Plan, vm: int, holdings: Holdings, core: Core, in_order: bool
) -> None:
    """Raises PlanError where plans cannot come into force one after the other while minibatches are
    in flight.

    Args:
        parts: the plans. A layer moves in one of them only.
        now: the plan in force.
        vm: this rank's virtual machine.
        holdings: the parameters and buffers of this stage.
        core: runs the steps.
        in_order: whether gradients are summed over the virtual machines by collectives.
    """
    plan, schedule = parts[-1], now.schedule
    for part in parts:
        if part.placement.owners:
            raise PlanError(
                f"schedule={schedule!r}: values would go back to an earlier stage, as the"
                f" layers would be on the stages {part.placement.owners}, in the order of their"
                " calls, for each virtual machine (replica of the pipeline). Move the layers"
                " between them, too, or use schedule='1f1b'."
            )
    if in_order:
        raise PlanError(
            f"schedule={schedule!r}: layers cannot move while their gradients are summed over"
            " the virtual machines by collectives, whose process groups all ranks have to make"
            " at the same time. Use Communication(gradient_aggregation='ring') with the gloo"
            " backend, virtual_machines=1, or schedule='1f1b'."
        )
    require_same_sharers(holdings.uses, now.placement, plan.placement, schedule)
    for part in parts:
        require_one_holder(part, now, vm, core)


def require_one_holder(plan: Plan, now: Plan, vm: int, core: Core) -> None:
    """Raises PlanError if a layer moves with a tensor of which another stage may have the newest
    values: that one is not asked while minibatches are in flight.

    Args:
        plan: the new plan.
        now: the plan in force.
        vm: this rank's virtual machine.
        core: runs the steps.
    """
    before, after = (each.placement.stages(vm) for each in (now, plan))
    elsewhere = {*core.shared_state(), *(x for x in core.written if not x.requires_grad)}
    for layer, name in zip(core.layers, core.names, strict=True) if elsewhere else ():
        number = core.number[layer]
        for inner, tensor in (*layer.named_buffers(), *layer.named_parameters()):
            if before[number] != after[number] and tensor in elsewhere:
                raise PlanError(
                    f"schedule={now.schedule!r}: steps write to `{name}.{inner}`, or several"
                    " layers have it, and no optimizer trains it. So the layer"
                    f" `{name}` cannot change its owner while minibatches are in flight. Leave"
                    " it where it is, or use schedule='1f1b'."
                )
