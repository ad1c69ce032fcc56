"""The plan for a run's first steps: in which order the ranks are its stages, and for how many
samples it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch

from lightning_pipeshift.errors import BudgetError, PlanError, without_stack
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.comm.replicas import Replicas
from lightning_pipeshift.runtime.planning.make_plan import Settings, best_topology, make_plan
from lightning_pipeshift.timeline.outcomes import Change

_SURE_GAIN: Final = 0.2
"""By which fraction a step has to get shorter for another order of the ranks, as long as devices
have been measured for a moment only: equal ones may look so different then.
"""


class FirstOrder(NamedTuple):
    """A run begins with the ranks in another order than their own.

    Args:
        change: what it expects of that.
        own: the plan for their own order.
        plan: the plan in force.
    """

    change: Change
    own: Plan
    plan: Plan


def in_best_order(
    settings: Settings,
    measured: Measured,
    topology: Topology,
    idle: Collection[int],
    may_reorder: bool,
    say: Callable[[str], None],
) -> tuple[Plan, FirstOrder | None]:
    """The plan for the ranks in their own order; or in another one, if steps are clearly shorter in
    it, and what is expected of that.

    Args:
        settings: the user's settings.
        measured: before the first step.
        topology: the virtual machines, with the ranks in their own order.
        idle: the layers that no step calls.
        may_reorder: whether other orders are looked at.
        say: shows a message to the user after the step.
    """
    profile, cluster = measured.profile, measured.cluster
    make = partial(make_plan, settings, profile, cluster, idle=idle)
    try:
        first = make(topology)
    except (PlanError, BudgetError) as error:
        first, problem = None, without_stack(error)
    best = first
    if may_reorder:
        with suppress(PlanError, BudgetError):
            order = best_topology(settings, profile, cluster, topology)
            best = first if order == topology else make(order)
    if best is None:
        raise problem
    if first is None:
        say(
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
    say(f"{change}, by a short measurement of devices and links.")
    return best, FirstOrder(change, first, best)


def with_samples(
    plan: Plan, batch_samples: float, replicas: Replicas, say: Callable[[str], None]
) -> Plan:
    """The plan with the samples of a step, compared with those that it was made for. Every rank
    calls this.

    Args:
        plan: the plan.
        batch_samples: of this virtual machine's batch.
        replicas: the virtual machines.
        say: shows a message to the user at once.

    Raises:
        PlanError: each virtual machine has as many samples as the plan is for in all.
    """
    planned, count = plan.step_samples, replicas.count
    total = float(replicas.world.sum(torch.tensor([batch_samples * replicas.is_last_stage])))
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
    say(f"{text}.")
    return plan


def ranks_text(rows: Sequence[Sequence[int]]) -> str:
    """The ranks, or numbers of layers, of each virtual machine; without a list around a single
    one.
    """
    shown = [list(row) for row in rows]
    return str(shown[0]) if len(shown) == 1 else str(shown)
