"""The memory of each stage over a step: by the plan, if everything stayed, and the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from lightning_pipeshift.pictures.figure import new_figure
from lightning_pipeshift.plan.offload.memory_report import MachineMemory
from lightning_pipeshift.text import bytes_text

_UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_TIMES: Final = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def memory_chart(machines: Sequence[MachineMemory]) -> Any:
    """The chart as a ``matplotlib.figure.Figure``: a row for each stage. What is drawn is all that
    the stage holds, as in the text of ``pipeshift memory``: so is the budget.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    rows = [(vm, s) for vm, m in enumerate(machines) for s in range(len(m.budget_bytes))]
    figure = new_figure(10.0, 1.6 + 1.8 * len(rows))
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    peaks = [max((*m.footprint.peak_bytes, *m.uncompressed.peak_bytes)) for m in machines]
    unit, size = _fitting(max(peaks), _UNITS)
    seconds = [float(t.times[-1]) for m in machines for t in m.footprint.traces if len(t.times)]
    time, length = _fitting(max(seconds, default=1.0), _TIMES)
    lines: dict[str, Any] = {}
    for axis, (vm, stage) in zip(axes, rows, strict=True):
        machine = machines[vm]
        for found, label in ((machine.uncompressed, "if all stays"), (machine.footprint, "plan")):
            trace, static = found.traces[stage], found.static_bytes[stage]
            held = [(static + held) / size for held in trace.held_bytes]
            times = [float(each) / length for each in trace.times]
            (lines[label],) = axis.step(times, held, where="post", label=label, linewidth=1.2)
        peak, budget = machine.footprint.peak_bytes[stage], machine.budget_bytes[stage]
        title = f"stage {stage}" if len(machines) == 1 else f"virtual machine {vm}, stage {stage}"
        limit = ""
        if math.isfinite(budget):
            limit = f" of {bytes_text(budget)}"
            lines["budget"] = axis.axhline(
                budget / size, color="black", linewidth=1, linestyle="--", label="budget"
            )
        axis.set_title(f"{title}: at most {bytes_text(peak)}{limit}", loc="left", fontsize="medium")
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
        axis.margins(y=0.12)
    axes[-1].set_xlabel(f"{time} since the step started")
    figure.suptitle("PipeShift: each device's memory over a step, by the simulator")
    figure.legend(
        handles=list(lines.values()), loc="outside lower center", ncols=len(lines), frameon=False
    )
    return figure


def _fitting(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit of which there is at least one; else the smallest."""
    return next(((unit, size) for unit, size in units if value >= size), units[-1])
