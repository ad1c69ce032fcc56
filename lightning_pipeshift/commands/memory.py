"""Prints the tables of ``pipeshift plan --tensors``: every saved tensor with the place that a plan
gives it under a budget, and the peak memory of each stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.search.memory_report import report
from lightning_pipeshift.plan.search.problem import Compressed, Problem
from lightning_pipeshift.runtime.planning.make_plan import make_plan


def show_tensors(strategy: Any) -> None:
    """Prints, on the first rank, the tensors and the peaks of the memory of all stages.

    Args:
        strategy: of a run that has been measured, with ``MemoryCompression``.
    """
    machines = machines_of(strategy) or ()
    for vm, (problem, found) in enumerate(machines):
        if len(machines) > 1:
            print(f"\n════ virtual machine {vm} (one replica of the pipeline) ".ljust(100, "═"))
        print(report(problem, found))


def machines_of(strategy: Any) -> list[tuple[Problem, Compressed]] | None:
    """Returns the arguments of :func:`report` for each virtual machine, on the first rank; ``None``
    on others.
    """
    pipeline = strategy.pipeline
    measured, settings = pipeline.planning.measured, pipeline.settings
    if measured is None:
        return None
    profile, cluster, topology = measured.profile, measured.cluster, pipeline.replicas.topology
    plan = make_plan(replace(settings, plan=None), profile, cluster, topology)
    problems = replace(measured, ranks=topology.ranks).problems(
        plan.schedule, plan.microbatches, Planned()
    )
    found = []
    for vm, problem in enumerate(problems):
        cut, swaps, of = plan.cut(vm), plan.swapped(vm), problem.footprints.of
        found.append((problem, Compressed(cut, swaps, of(cut, swaps), of(Cut(cut.counts)))))
    return found
