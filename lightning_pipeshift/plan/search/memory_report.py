"""Reports a plan's use of memory: each stage's peak, and every saved tensor in a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.memory_model import parts_of, tensors_of
from lightning_pipeshift.plan.cost.memory_timeline import HOST, Links
from lightning_pipeshift.plan.inputs.policies import TensorRecord
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.search.policy_choices import records
from lightning_pipeshift.plan.search.problem import Compressed, Problem
from lightning_pipeshift.text import bytes_text, seconds_text, table


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
    """The tables of one virtual machine.

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


def _time_text(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "no way"
