"""The status of a run, for other processes: the owners of all layers, and the speed of stages."""

from __future__ import annotations

from typing import Any

from lightning_pipeshift.runtime.planning.waits import waits_of
from lightning_pipeshift.step.pipeline import Pipeline


def status_of(pipeline: Pipeline) -> dict[str, Any]:
    """Returns the status as known on the first rank; called in a thread, concurrently with the
    steps.
    """
    status: dict[str, Any] = {
        "step": pipeline.num_steps_done,
        "step_seconds": pipeline.step_seconds,
        "decisions": [each.entries for each in pipeline.planning.decisions.changes],
        "virtual_machines": [],
        "waits": [],
    }
    if not pipeline.planned.has_plan:
        return status
    # Each is an immutable value; a step may replace it meanwhile by another one.
    plan, planning = pipeline.plan, pipeline.planning
    is_known = planning.is_measured and not plan.placement.owners
    measured = planning.measured if is_known else None
    if measured is not None:
        status["waits"] = [str(wait) for wait in waits_of(plan, measured)]
    expected = measured.prediction(plan) if measured is not None else None
    fastest: dict[str, float] = {}
    for each in measured.cluster.devices if measured is not None else ():
        fastest[each.kind] = max(each.speed, fastest.get(each.kind, 0.0))
    for vm, ranks in enumerate(plan.ranks):
        payloads = plan.stage_payload_bytes(vm)
        stages = []
        for stage, rank in enumerate(ranks):
            own = plan.placement.layers_of(vm, stage)
            entry: dict[str, Any] = {"rank": rank, "layers": [plan.layers[i].name for i in own]}
            if measured is not None and expected is not None:
                costs, device = expected.costs[vm], measured.cluster.devices[rank]
                forward, backward = costs.forward_seconds[stage], costs.backward_seconds[stage]
                entry |= {
                    "host": device.host,
                    "kind": device.kind,
                    "forward_seconds": forward,
                    "backward_seconds": backward,
                    "delivers": device.speed / fastest[device.kind],
                    "busy": plan.microbatches * (forward + backward) / expected.step_seconds,
                }
                if stage + 1 < len(ranks):
                    # Beside the stages' own times it says whether a stage waits for a link.
                    link = measured.cluster.link(rank, ranks[stage + 1])
                    entry["payload_seconds"] = link.seconds(payloads[stage])
            stages.append(entry)
        status["virtual_machines"].append(stages)
    return status
