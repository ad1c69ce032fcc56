"""Draws a plan as text: the owners of layers, and the predicted step.

It is the first output of PipeShift that a user sees, in a terminal or a log file: plain text, no
colour, at most 100 columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_pipeshift.errors import explained
from lightning_pipeshift.plan.document.text_timeline import (
    Scale,
    draw_row,
    legend,
    line_of,
    rows_of_stages,
)
from lightning_pipeshift.text import bytes_text, count_text, seconds_text

if TYPE_CHECKING:  # A plan draws itself with this module, so this one can't import it when it runs.
    from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
    from lightning_pipeshift.plan.inputs.saved_tensors import Swap

_WIDTH: Final = 100
_NAMES_WIDTH: Final = 47
_BAR_WIDTH: Final = 12
_GRID_WIDTH: Final = 82
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_NOT_MEASURED: Final = "no layer is measured yet: drawn as if all took equal time"


def draw(plan: Plan) -> str:
    """The plan as lines of text: for each virtual machine a table of its stages, then a step, or
    an asynchronous pipeline that fills, is full, and drains.
    """
    measured = plan.is_measured
    if not measured:
        # A drawing before the first profile: layers of equal time.
        layers = tuple(replace(layer, forward_seconds=1.0) for layer in plan.layers)
        plan = replace(plan, layers=layers, prediction=None)
    timelines = {vms: plan.timeline(vms[0]) for vms in _equal_machines(plan)}
    step_seconds = max(timeline.step_seconds for timeline in timelines.values())
    rows = [row for timeline in timelines.values() for row in timeline.rows]
    scale = Scale.fitting(
        rows,
        max(timeline.end_seconds for timeline in timelines.values()),
        _GRID_WIDTH,
    )

    split = count_text(plan.microbatches, "microbatch", "microbatches")
    lines = [
        f"PipeShift plan: {count_text(len(plan.layers), 'layer')}, schedule {plan.schedule}, "
        + ("minibatches not split" if plan.is_asynchronous else split),
        _prediction(plan, step_seconds) if measured else _NOT_MEASURED,
    ]
    for vms, timeline in timelines.items():
        title = f"── {_machine_names(vms)} ".ljust(_WIDTH, "─")
        lines += ["", title, *_stage_table(plan, vms[0]), ""]
        # Steps end together; of minibatches there are always more.
        end_seconds = timeline.end_seconds if plan.is_asynchronous else step_seconds
        for stage, row in enumerate(rows_of_stages(timeline, plan.placement.num_stages(vms[0]))):
            busy_seconds = timeline.step_seconds - timeline.idle_seconds[stage]
            drawing = draw_row(row, end_seconds, scale, _GRID_WIDTH)
            lines.append(line_of(stage, drawing, f"{1 - busy_seconds / step_seconds:4.0%} idle"))
        lines += _swaps(plan, vms[0])
    lines += _lanes(plan)
    lines += ["", *legend(plan.is_asynchronous, rows, any(plan.recompute))]
    return "\n".join(line.rstrip() for line in lines)


def _prediction(plan: Plan, step_seconds: float) -> str:
    what, each = ("pace", " a minibatch") if plan.is_asynchronous else ("step", "")
    if plan.prediction is not None:
        step = seconds_text(plan.prediction.step_seconds)
        exposed = plan.prediction.exposed_seconds
        waits = f", {seconds_text(exposed)} of it for sums of gradients"
        return f"predicted {what}: {step}{each}{waits if exposed else ''}"
    step = seconds_text(step_seconds)
    return f"predicted {what}: {step}{each} (a backward as 2 forwards, transfers as free)"


def _stage_table(plan: Plan, vm: int) -> list[str]:
    seconds = plan.stage_forward_seconds(vm)
    parameters = plan.stage_parameter_bytes(vm)
    payloads = [*map(bytes_text, plan.stage_payload_bytes(vm)), "-"]
    memory = None
    if plan.prediction is not None and plan.prediction.memory_bytes:
        memory = plan.prediction.memory_bytes[vm]
    # The column for the prediction's memory takes space from the names.
    width = _NAMES_WIDTH - (13 if memory else 0)
    rows = [("stage", "layers", "parameters", "peak memory", "forward time", "payload out")]
    for stage, layers in enumerate(plan.stage_layers(vm)):
        share = seconds[stage] / sum(seconds)
        bar = f"{_bar(share)} {share:4.0%}"
        peak = bytes_text(round(memory[stage])) if memory else ""
        names, held = _layer_names(layers, width), bytes_text(parameters[stage])
        rows.append((str(stage), names, held, peak, bar, payloads[stage]))
    return [
        f"{stage:>5}  {names:<{width}}  {held:>10}  "
        + (f"{peak:>11}  " if memory else "")
        + f"{bar:<{_BAR_WIDTH + 5}}  {payload:>11}"
        for stage, names, held, peak, bar, payload in rows
    ]


def _swaps(plan: Plan, vm: int) -> list[str]:
    """The tensors that each stage offloads between forward and backward."""
    found: dict[int, dict[str, list[Swap]]] = {}
    for swap in (swap for swap in plan.swapped(vm) if not swap.stays):
        to = "the host"
        if swap.stages:
            noun = "stage" if len(swap.stages) == 1 else "stages"
            to = f"{noun} {' and '.join(map(str, swap.stages))}"
        stage = plan.placement.stage_of(vm, swap.layer)
        found.setdefault(stage, {}).setdefault(to, []).append(swap)
    lines = []
    for stage, by_place in sorted(found.items()):
        parts = []
        for to, swaps in by_place.items():
            tensors = count_text(sum(len(swap.tensors) for swap in swaps), "tensor")
            layers = count_text(len({swap.layer for swap in swaps}), "layer")
            parts.append(f"{tensors} of {layers} to {to}")
        line = f"{stage:>5}  swaps {'; '.join(parts)}"
        lines.append(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")
    lines += _state_on_host(plan, vm)
    return ["", *lines] if lines else []


def _state_on_host(plan: Plan, vm: int) -> list[str]:
    """The layers of each stage whose optimizer state or weights are in host memory."""
    lines = []
    for stage in range(plan.placement.num_stages(vm)):
        own = plan.placement.layers_of(vm, stage)
        for what, on_host in (
            ("the optimizer's state", plan.optimizer_on_host_of(vm)),
            ("the waiting weights", plan.weights_on_host_of(vm)),
        ):
            if count := len(on_host.intersection(own)):
                layers = count_text(len(own), "layer")
                which = "all layers" if count == len(own) else f"{count} of {layers}"
                lines.append(f"{stage:>5}  has {what} of {which} in host memory")
    return lines


def _lanes(plan: Plan) -> list[str]:
    """The part of all gradient bytes that each lane carries."""
    shares = ", ".join(f"{share:.1%}" for share in plan.lane_shares)
    return ["", f"gradient lanes, the most urgent first: {shares} of the bytes"] if shares else []


def _equal_machines(plan: Plan) -> list[tuple[int, ...]]:
    """The virtual machines, grouped by equal cuts: one drawing for each group."""
    groups: dict[Hashable, list[int]] = {}
    for vm in range(plan.placement.num_virtual_machines):
        owners = tuple(plan.placement.stages(vm)), plan.placement.num_stages(vm)
        costs = plan.prediction.costs[vm] if plan.prediction is not None else None
        moved = plan.swapped(vm), plan.optimizer_on_host_of(vm), plan.weights_on_host_of(vm)
        key = owners, plan.recomputed(vm), moved, costs
        groups.setdefault(key, []).append(vm)
    return [tuple(vms) for vms in groups.values()]


def _machine_names(vms: Sequence[int]) -> str:
    if len(vms) == 1:
        names = f"virtual machine {vms[0]}"
    elif len(vms) > 2 and vms[-1] - vms[0] == len(vms) - 1:
        names = f"virtual machines {vms[0]} to {vms[-1]}"
    else:
        names = f"virtual machines {', '.join(map(str, vms[:-1]))[:40]} and {vms[-1]}"
    return names if vms[0] else explained(names)


def _layer_names(layers: Sequence[LayerRecord], width: int) -> str:
    """The first and the last name, with as much of each as fits."""
    if not layers:
        return "(none: passes the payload on)"
    if len(layers) == 1:
        return _shortened(layers[0].name, width)
    joint = " … "
    tail = f" ({len(layers)} layers)"
    room = width - len(joint) - len(tail)
    first, last = layers[0].name, layers[-1].name
    # One may use the space that the other leaves.
    first = _shortened(first, max(room // 2, room - len(last)))
    last = _shortened(last, room - len(first))
    return first + joint + last + tail


def _shortened(name: str, width: int) -> str:
    """Keeps the end of a name, which distinguishes it from its neighbours."""
    if len(name) <= width:
        return name
    end = name[1 - width :]
    # Whole words between the dots, if one fits.
    return "…" + (end.partition(".")[2] or end)


def _bar(share: float) -> str:
    full, rest = divmod(round(share * _BAR_WIDTH * 8), 8)
    return ("█" * full + _EIGHTHS[rest])[:_BAR_WIDTH].ljust(_BAR_WIDTH)
