"""Checks that the fields of a plan, which a user may have edited, do not contradict each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_pipeshift.documents import shown
from lightning_pipeshift.errors import ConfigurationError, PlanError, ScheduleError, some_of
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.inputs.shares import check_shares
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.inputs.traffic import NUM_GRADIENT_CLASSES
from lightning_pipeshift.plan.schedule.asynchronous import require_equal_depths
from lightning_pipeshift.plan.schedule.schedules import (
    INTERLEAVED,
    MOST_MICROBATCHES,
    num_chunks,
    schedule_named,
)

if TYPE_CHECKING:  # A plan checks itself with this module, so this one can't import it.
    from lightning_pipeshift.plan.document.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raises PlanError, naming the field, if fields of a plan contradict each other."""
    _check_model(plan)
    _check_machines(plan)
    _check_lanes(plan)


def _check_model(plan: Plan) -> None:
    if len(plan.layers) != plan.placement.num_layers:
        raise PlanError(
            f"the field 'placement' places {plan.placement.num_layers} layers, and 'layers' "
            f"lists {len(plan.layers)}; change the counts until they add up to that"
        )
    counts = Counter(layer.name for layer in plan.layers)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise PlanError(
            f"the field 'layers' lists {some_of([*map(repr, twice)])} more than once; a name is"
            " unique"
        )
    try:
        schedule_named(plan.schedule)
    except ScheduleError as error:
        raise PlanError(f"the field 'schedule': {error}") from error
    if not 1 <= plan.microbatches <= MOST_MICROBATCHES:
        raise PlanError(
            f"the field 'microbatches' is {shown(plan.microbatches)}; it must be 1 to"
            f" {MOST_MICROBATCHES}"
        )
    if not (math.isfinite(plan.step_samples) and plan.step_samples >= 0):
        raise PlanError(
            f"the field 'step_samples' is {plan.step_samples}; it must be finite and above 0,"
            " or omitted"
        )
    if plan.is_asynchronous and plan.microbatches > 1:
        raise PlanError(
            f"the field 'microbatches' is {plan.microbatches}; it must be 1, as an asynchronous"
            f" pipeline ({plan.schedule!r}) does not split a batch"
        )


def _check_machines(plan: Plan) -> None:
    count = plan.placement.num_virtual_machines
    depths = [plan.placement.num_stages(vm) for vm in range(count)]
    require_equal_depths(plan.schedule, depths)
    costs = plan.prediction.costs if plan.prediction is not None else ()
    found: dict[str, Sequence[Any]] = {
        "recompute": plan.recompute,
        "swaps": plan.swaps,
        "optimizer_on_host": plan.optimizer_on_host,
        "weights_on_host": plan.weights_on_host,
        "ranks": plan.ranks,
        "kinds": plan.kinds,
        "batch_shares": plan.batch_shares,
        "prediction": costs,
    }
    for name, value in found.items():
        if value and len(value) != count:
            raise PlanError(
                f"the field {name!r} has entries for {len(value)} virtual machines, and"
                f" 'placement' has {count}; give one for each, or omit the field"
            )
    for name, lengths in (
        ("ranks", [len(ranks) for ranks in plan.ranks]),
        ("kinds", [len(kinds) for kinds in plan.kinds]),
        (
            "prediction",
            [cost.num_stages // num_chunks(plan.schedule, cost.num_stages) for cost in costs],
        ),
    ):
        if lengths and lengths != depths:
            raise PlanError(
                f"the field {name!r} is for virtual machines of {lengths} stages, and "
                f"'placement' has {depths}; give one entry for each stage, or omit the field"
            )
    for name in ("recompute", "optimizer_on_host", "weights_on_host"):
        for vm, layers in enumerate(getattr(plan, name)):
            wrong = [layer for layer in layers if not 0 <= layer < len(plan.layers)]
            if wrong or len(set(layers)) < len(layers):
                raise PlanError(
                    f"the field {name!r} of virtual machine {vm} is {list(layers)}; it lists"
                    f" layers from 0 to {len(plan.layers) - 1}, each once"
                )
    for name in ("optimizer_on_host", "weights_on_host"):
        if any(getattr(plan, name)) and plan.is_asynchronous:
            raise PlanError(
                f"the field {name!r} is for synchronous schedules: {plan.schedule!r} updates"
                " the layers after each backward. Omit the field, or choose another 'schedule'"
            )
    for name in ("recompute", "swaps", "optimizer_on_host", "weights_on_host"):
        if any(getattr(plan, name)) and plan.schedule in INTERLEAVED:
            raise PlanError(
                f"the field {name!r} is for schedules in which each stage has one range of layers,"
                f" and the schedule is {plan.schedule!r}. Omit the field, or choose another"
                " 'schedule'"
            )
    for vm, swaps in enumerate(plan.swaps):
        _check_swaps(plan, vm, swaps, depths[vm])
    try:
        if plan.ranks:
            Topology(plan.ranks)
        check_shares(plan.batch_shares or None, count)
    except ConfigurationError as error:
        name = "ranks" if "rank" in str(error) else "batch_shares"
        raise PlanError(f"the field {name!r}: {error}") from error


def _check_swaps(plan: Plan, vm: int, swaps: Sequence[Swap], depth: int) -> None:
    seen: set[tuple[int, int]] = set()
    for swap in swaps:
        named = {(swap.layer, number) for number in swap.tensors}
        problem = ""
        if not 0 <= swap.layer < len(plan.layers):
            problem = f"there are the layers 0 to {len(plan.layers) - 1}"
        elif swap.stays and swap.layer not in plan.recomputed(vm):
            problem = "the layer is not recomputed, so all of its other tensors stay; omit them"
        elif named & seen:
            problem = "a tensor has one target"
        elif any(stage >= depth for stage in swap.stages):
            problem = f"there are the stages 0 to {depth - 1}"
        if problem:
            raise PlanError(
                f"the field 'swaps' of virtual machine {vm} has tensors"
                f" {list(swap.tensors)} of layer {swap.layer}"
                f"{f' on stages {list(swap.stages)}' if swap.stages else ''}: {problem}"
            )
        seen |= named


def _check_lanes(plan: Plan) -> None:
    shares = plan.lane_shares
    is_whole = not shares or math.isclose(math.fsum(shares), 1.0, abs_tol=1e-3)
    if len(shares) > NUM_GRADIENT_CLASSES or not is_whole or min(shares, default=1.0) <= 0:
        raise PlanError(
            f"the field 'lane_shares' is {list(shares)}; it has at most {NUM_GRADIENT_CLASSES}"
            " parts, each above 0, and they add up to 1; omit it for equal parts"
        )
