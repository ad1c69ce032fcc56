"""The status of a run, for other processes: the owners of all layers, and the speed of stages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning_pipeshift.runtime.pipeline import Pipeline


def status_of(pipeline: Pipeline) -> dict[str, Any]:
    """The status as known on the first rank; called in a thread beside the steps."""
    status: dict[str, Any] = {
        "step": pipeline.num_steps_done,
        "step_seconds": pipeline.step_seconds,
        "decisions": list(pipeline.planning.decisions),
        "virtual_machines": [],
    }
    if not pipeline.has_plan:
        return status
    # Each is a value; a step may replace it meanwhile by another one.
    plan, planning = pipeline.plan, pipeline.planning
    measured = planning.measured if planning.is_measured else None
    expected = measured.prediction(plan) if measured is not None else None
    for vm, ranks in enumerate(pipeline.replicas.topology.ranks):
        stages = []
        for stage, rank in enumerate(ranks):
            own = plan.placement.layers_of(vm, stage)
            entry: dict[str, Any] = {"rank": rank, "layers": [plan.layers[i].name for i in own]}
            if measured is not None and expected is not None:
                costs, device = expected.costs[vm], measured.cluster.devices[rank]
                forward, backward = costs.forward_seconds[stage], costs.backward_seconds[stage]
                entry |= {
                    "host": device.host.partition("/")[0],
                    "kind": device.kind,
                    "forward_seconds": forward,
                    "backward_seconds": backward,
                    "busy": plan.microbatches * (forward + backward) / expected.step_seconds,
                }
            stages.append(entry)
        status["virtual_machines"].append(stages)
    return status


def shown(status: Mapping[str, Any], is_alive: bool) -> str:
    """A status as text.

    Args:
        status: the entries of :func:`status_of`, and those that the writer of the file adds.
        is_alive: whether the process is known to exist.
    """
    heard = max(0.0, time.time() - status["time"])
    if status["is_over"]:
        state = "has ended"
    elif is_alive and heard < 60:
        state = "is running"
    else:
        state = f"was last heard of {heard:.0f} s ago"
    lines = [
        f"The run (process {status['process']} on {status['host']}) {state};"
        f" {status['step']} steps are done"
        + (f", the last took {status['step_seconds']:.3g} s." if status["step_seconds"] else ".")
    ]
    if not status["virtual_machines"]:
        lines.append("Its first batch has not come yet: there is no plan.")
    header = ["stage", "rank", "host", "device", "forward", "backward", "busy", "layers"]
    for vm, stages in enumerate(status["virtual_machines"]):
        rows = [header]
        for number, stage in enumerate(stages):
            rows.append(
                [
                    str(number),
                    str(stage["rank"]),
                    stage.get("host", "-"),
                    stage.get("kind", "-"),
                    _milliseconds(stage.get("forward_seconds")),
                    _milliseconds(stage.get("backward_seconds")),
                    f"{stage['busy']:.0%}" if "busy" in stage else "-",
                    _layers(stage["layers"]),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", f"virtual machine {vm} (seconds are those of a microbatch)"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    if any("busy" not in s for stages in status["virtual_machines"] for s in stages):
        lines.append(
            "\nHow fast they are is measured where layers are watched, and takes some steps."
        )
    for decision in status["decisions"]:
        if "expected_gain" in decision:
            lines.append(f"\nLayers moved: {decision['expected_gain']:.2f} times as fast expected.")
        if "measured_gain" in decision:
            lines.append(f"It became {decision['measured_gain']:.2f} times as fast.")
    return "\n".join(lines)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _layers(names: list[str]) -> str:
    if len(names) < 3:
        return ", ".join(names) or "none"
    return f"{names[0]} to {names[-1]} ({len(names)})"
