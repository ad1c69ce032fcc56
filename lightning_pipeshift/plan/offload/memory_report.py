"""Reports a plan's use of memory: every saved tensor in a table, and bytes over time as a picture
in text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Final

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_model import parts_of, tensors_of
from lightning_pipeshift.plan.cost.memory_timeline import HOST, Links, StageTrace
from lightning_pipeshift.plan.inputs.policies import TensorRecord
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.offload.policy_choices import records
from lightning_pipeshift.plan.offload.problem import Compressed, Problem
from lightning_pipeshift.text import bytes_text, seconds_text, table

_WIDTH: Final = 82
_HEIGHT: Final = 6
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class _Line:
    """One row of the table: a tensor. Layers with equal rows are merged, regardless of their idle
    times.
    """

    tensor: tuple[str, ...]
    choice: str
    costs: str
    idle_seconds: float = field(compare=False, hash=False)


def report(problem: Problem, found: Compressed) -> str:
    """The table and the pictures of one virtual machine.

    Args:
        problem: the virtual machine's.
        found: its cut, and how its saved tensors are handled.
    """
    parts, of_tensors = [], list(records(problem, found.cut.counts))
    for stage in range(len(problem.limits)):
        parts += ["", *_stage(problem, found, of_tensors, stage)]
    step, before = found.seconds, found.uncompressed.seconds
    what = "a step" if found.footprint.timeline.is_one_step else "a minibatch"
    parts += [
        "",
        f"{what}: {step:.4g} s by the simulator, {before:.4g} s if all stays on the devices"
        f" ({step / before - 1:+.1%})"
        if before
        else f"{what}: no layer has been measured",
    ]
    return "\n".join(line.rstrip() for line in parts[1:])


def _stage(
    problem: Problem, compressed: Compressed, of_tensors: Sequence[TensorRecord], stage: int
) -> Iterator[str]:
    found, before = compressed.footprint, compressed.uncompressed
    budget = problem.limits[stage].budget_bytes
    limit = f" of {bytes_text(budget)}" if math.isfinite(budget) else ""
    yield (
        f"── stage {stage}: at most {bytes_text(found.peak_bytes[stage])}{limit}"
        f" ({bytes_text(found.static_bytes[stage])} weights, gradients, optimizer, messages,"
        f" {bytes_text(found.batches_bytes[stage])} batch and"
        f" {bytes_text(found.momentary_bytes[stage])} for a moment;"
        f" {bytes_text(before.peak_bytes[stage])} if all stays) "
    ).ljust(100, "─")
    yield from _state_on_host(problem, compressed.cut, stage)
    yield from _table(problem, compressed, of_tensors, stage)
    yield ""
    yield from picture(
        found.traces[stage],
        found.timeline.end_seconds,
        budget,
        found.static_bytes[stage],
    )


def _state_on_host(problem: Problem, cut: Cut, stage: int) -> Iterator[str]:
    """The optimizer state and weights that are in host memory, in words."""
    own, layers = range(*cut.bounds[stage : stage + 2]), problem.profile.layers
    for what, sizes, when in (
        (
            "the optimizer's state",
            [layers[n].optimizer_bytes for n in own if n in cut.optimizer_on_host],
            "is on the host between steps: {} each way, in every update",
        ),
        (
            "the weights",
            [layers[n].waiting_bytes for n in own if n in cut.weights_on_host],
            "wait on the host: {} in every forward and backward, and each way in every update",
        ),
    ):
        if sizes:
            seconds = sum(problem.links.seconds(stage, HOST, size) for size in sizes)
            yield (
                f"{what} of {len(sizes)} of {len(own)} layers ({bytes_text(sum(sizes))})"
                f" {when.format(_time_text(seconds))}; the largest layer's have"
                f" {bytes_text(max(sizes))}"
            )


# --- the table ---


def _table(
    problem: Problem, found: Compressed, of_tensors: Sequence[TensorRecord], stage: int
) -> Iterator[str]:
    begin, end = found.cut.bounds[stage : stage + 2]
    rows = [("layers", "tensor", "made by", "shape", "bytes", "idle for", "", "costs")]
    layers = [
        (index, tuple(_lines(problem, found, of_tensors, index))) for index in range(begin, end)
    ]
    for lines, alike in groupby(layers, key=lambda pair: pair[1]):
        group = list(alike)
        indices = [index for index, _ in group]
        idle_seconds = [[line.idle_seconds for line in shown] for _, shown in group]
        names = problem.profile.layers[indices[0]].name
        if len(indices) > 1:
            last = problem.profile.layers[indices[-1]].name
            names = f"{names} … {last} ({len(indices)})"
        least = [min(idle) for idle in zip(*idle_seconds, strict=True)]
        for number, (line, idle) in enumerate(zip(lines, least, strict=True)):
            name = names if not number else ""
            rows.append((name, *line.tensor, _time_text(idle), line.choice, line.costs))
    yield from table(rows, right=(1, 4, 5))


def _lines(
    problem: Problem, found: Compressed, of_tensors: Sequence[TensorRecord], layer: int
) -> Iterator[_Line]:
    ways = {number: swap for swap in found.swaps if swap.layer == layer for number in swap.tensors}
    of_layer = {r.number: r for r in of_tensors if r.index == layer}
    profile = problem.profile.layers[layer]
    again = layer in found.cut.recompute
    for tensor in tensors_of(profile):
        if not tensor.num_bytes:
            continue
        record = of_layer[tensor.number]
        choice, costs = "stays", ""
        if tensor.number in ways:
            if not ways[tensor.number].stays:
                choice, costs = _swapped(problem.links, record, ways[tensor.number])
        elif again and not tensor.is_outside:
            choice, costs = "made again", f"{_time_text(record.recompute_seconds)} for the layer"
        shape = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
        yield _Line(
            (
                "·" if tensor.is_outside else str(tensor.number),
                tensor.maker,
                shape,
                bytes_text(tensor.num_bytes),
            ),
            choice,
            costs,
            record.interval_seconds,
        )


def _swapped(links: Links, record: TensorRecord, swap: Swap) -> tuple[str, str]:
    seconds = max(
        links.seconds(record.stage, to, part * record.num_bytes) for to, part in parts_of(swap)
    )
    where = "the host"
    if swap.stages:
        where = f"stage{'s' if len(swap.stages) > 1 else ''} {', '.join(map(str, swap.stages))}"
    return f"to {where}", f"{_time_text(seconds)} each way"


# --- the picture ---


def picture(
    trace: StageTrace, step_seconds: float, budget_bytes: float, static_bytes: float
) -> Iterator[str]:
    """Draws a stage's memory over a step, as bars of text.

    Args:
        trace: of a stage; of a long step its first part.
        step_seconds: how long the trace is.
        budget_bytes: of the stage, drawn if it lies within the picture.
        static_bytes: what the stage holds all the time, or keeps free for a moment: weights,
            gradients, optimizer, messages, the batch, and what a running layer takes.
    """
    columns = [static_bytes + held for held in columns_of(trace, step_seconds, _WIDTH)]
    top = max(static_bytes + trace.peak_bytes, 1.0)
    if math.isfinite(budget_bytes) and budget_bytes <= 1.5 * top:
        top = max(top, budget_bytes)
    for row in reversed(range(_HEIGHT)):
        low, high = (top * level / _HEIGHT for level in (row, row + 1))
        cells = []
        for held in columns:
            part = (held - low) / (high - low)
            cells.append(_EIGHTHS[round(8 * min(1.0, max(0.0, part)))])
        label = bytes_text(top) if row == _HEIGHT - 1 else ""
        mark = " ← budget" if low < budget_bytes <= high else ""
        yield f"{label:>10} │{''.join(cells)}│{mark}"


def columns_of(trace: StageTrace, step_seconds: float, count: int) -> list[float]:
    """The peak memory in each of ``count`` equal parts of a step."""
    if not len(trace.times) or not step_seconds:
        return [0.0] * count
    edges = np.linspace(0.0, min(step_seconds, float(trace.times[-1])), count + 1)
    columns = []
    for begin, end in pairwise(edges):
        first = int(np.searchsorted(trace.times, begin, side="right")) - 1
        last = int(np.searchsorted(trace.times, end, side="left"))
        held = trace.held_bytes[max(first, 0) : last]
        columns.append(float(held.max()) if len(held) else 0.0)
    return columns


def _time_text(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "no way"
