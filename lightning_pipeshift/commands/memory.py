"""``pipeshift memory``: measures a model without training, plans its memory, and shows its use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_pipeshift.commands.measuring import measured_strategy, plugin_of
from lightning_pipeshift.commands.planning import add_budgets
from lightning_pipeshift.lightning.precision.memory_compression import MemoryCompression
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.search.memory_report import report
from lightning_pipeshift.plan.search.problem import Compressed, Problem
from lightning_pipeshift.runtime.planning.make_plan import make_plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeshift memory",
        description="Shows every tensor that layers save for their backward, how each is handled "
        "under a budget, and the peak of each stage's memory. Takes the arguments of `pipeshift "
        "fit` (--config ...), measures some steps and does not train.",
        add_help=False,
        allow_abbrev=False,
    )
    add_budgets(parser)
    return parser


def main(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift memory``."""
    parser = _parser()
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return
    options, rest = parser.parse_known_args(list(arguments))
    plugin = plugin_of(options) or MemoryCompression()
    strategy = measured_strategy(rest, "memory", plugin)
    machines = machines_of(strategy)
    if machines is None:
        return
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
