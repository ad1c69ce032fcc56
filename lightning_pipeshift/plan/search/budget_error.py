"""Explains why no plan keeps a memory budget, and which changes would help."""

from __future__ import annotations

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.plan.cost.memory_model import Footprint
from lightning_pipeshift.plan.schedule.asynchronous import weight_versions
from lightning_pipeshift.plan.search.problem import Problem
from lightning_pipeshift.text import ceil_bytes_text


def over_budget(problem: Problem, found: Footprint) -> BudgetError:
    """The error for a problem of which nothing fits.

    Args:
        problem: the virtual machine's.
        found: the footprint of the plan that is nearest to fitting.
    """
    limits = problem.limits
    lacking = [on_device for on_device, _ in problem.lacking_bytes(found)]
    if not any(lacking):
        return _host_is_short(problem, found)
    stage = max(range(len(lacking)), key=lacking.__getitem__)
    static, budget = found.static_bytes[stage], limits[stage].budget_bytes
    workload = problem.workload
    pipeline = workload.schedule, workload.num_stages, workload.num_accumulated
    num_versions = weight_versions(*pipeline)[stage]
    weights = f"{num_versions} versions of the weights" if num_versions > 1 else "weights"
    remedies = [f"a budget of {ceil_bytes_text(max(found.peak_bytes))} would do"]
    fewest = weight_versions("async-2bw", len(lacking))[stage]
    if num_versions > fewest:
        remedies.append(f"so may schedule='async-2bw', which keeps {fewest} versions")
    if static >= budget:
        remedies.append("so would more stages, as weights and the optimizer's state fill it")
    else:
        remedies.append("so may smaller microbatches")
    host_lacks = any(
        trace.host_bytes > limit.host_bytes
        for trace, limit in zip(found.traces, limits, strict=True)
    )
    if host_lacks or not any(limit.host_bytes for limit in limits):
        remedies.append("or more host memory (`host_budget`)")
    parts = ["the weights of two layers at a time" if problem.weights_on_host else weights]
    parts.append("gradients")
    if not problem.optimizer_on_host and not problem.weights_on_host:
        stays = problem.profile.state_stays
        parts.append(
            "the optimizer's state" + f" (which stays on the device: {stays})" * bool(stays)
        )
    parts.append("messages between stages")
    for what, size in (
        ("batches", found.batches_bytes[stage]),
        ("what a layer takes for a moment while it runs", found.momentary_bytes[stage]),
    ):
        if size:
            parts.append(f"{what} ({ceil_bytes_text(size)})")
    has, peak, fixed = map(ceil_bytes_text, (budget, found.peak_bytes[stage], static))
    return BudgetError(
        f"No plan keeps the memory budget: stage {stage} has {has}, and needs {peak} in the"
        f" best plan found, {fixed} of it for {', '.join(parts[:-1])} and {parts[-1]}."
        f" What would help: {'; '.join(remedies)}."
    )


def _host_is_short(problem: Problem, found: Footprint) -> BudgetError:
    lacking = [
        trace.host_bytes - limit.host_bytes
        for trace, limit in zip(found.traces, problem.limits, strict=True)
    ]
    stage = max(range(len(lacking)), key=lacking.__getitem__)
    has, needs = map(
        ceil_bytes_text, (problem.limits[stage].host_bytes, found.traces[stage].host_bytes)
    )
    return BudgetError(
        f"No plan keeps the memory budget: the host of stage {stage} has {has} for swapped"
        f" tensors (`host_budget`), and the best plan found needs {needs}. What would help:"
        f" {needs} there, or a larger budget on the device, so that less has to move."
    )
