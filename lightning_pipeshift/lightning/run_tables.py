"""The tables that a run shows: its stages at the start, the traffic of its lanes at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.comm.turns import LaneTraffic
from lightning_pipeshift.text import bytes_text, layers_text, seconds_text, table


def stages_table(plan: Plan, topology: Topology, hosts: Sequence[str]) -> str:
    """Returns the stages of each virtual machine, with the names of their hosts and layers."""
    lines: list[str] = []
    for vm, ranks in enumerate(topology.ranks):
        rows = [["stage", "rank", "host", "parameters", "layers"]]
        for stage, (rank, layers) in enumerate(zip(ranks, plan.stage_layers(vm), strict=True)):
            megabytes = sum(layer.parameter_bytes for layer in layers) / 1e6
            names = layers_text([layer.name for layer in layers])
            rows.append([str(stage), str(rank), hosts[rank], f"{megabytes:,.2f} MB", names])
        lines += [f"the stages of virtual machine {vm}", *table(rows)]
    return "\n".join(lines)


def lanes_table(lanes: Mapping[str, LaneTraffic]) -> str:
    """Returns what each lane of the first rank has carried, given by the lane's name."""
    rows = [["lane", "sent", "throughput", "blocks waited"]]
    for name, lane in lanes.items():
        speed = f"{bytes_text(lane.bytes_per_second)}/s"
        rows.append([name, bytes_text(lane.num_bytes), speed, seconds_text(lane.queueing_seconds)])
    return "\n".join(["what the first rank's gradient lanes carried", *table(rows)])
