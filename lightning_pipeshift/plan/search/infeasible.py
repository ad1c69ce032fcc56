"""Explains why no plan fits in memory, and which changes would make one fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.plan.cost.layer_memory import momentary_bytes
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.schedule.schedules import (
    ASYNCHRONOUS,
    INTERLEAVED,
    SYNCHRONOUS,
    num_chunks,
)
from lightning_pipeshift.plan.search.ranges import narrowest
from lightning_pipeshift.plan.search.recomputation import Recomputation
from lightning_pipeshift.text import ceil_bytes_text


def nothing_fits(workload: Workload, recompute: str) -> PlanError:
    """The error for a workload of which no cut fits.

    Args:
        workload: the layers and stages.
        recompute: the user's option: ``"auto"``, ``"full"`` or ``"none"``.

    It shows the cut that minimises the largest lack of memory of any stage, and names every remedy
    that is enough by itself.
    """
    held = Recomputation(workload, recompute).held
    _, counts = narrowest(_lacking(workload, held))
    # Of several chunks of layers on each stage, one has too little memory.
    num_stages = workload.num_stages // num_chunks(workload.schedule, workload.num_stages)
    bounds = np.cumsum([0, *counts]).tolist()
    stages = []
    for s, (begin, end) in enumerate(pairwise(bounds)):
        usable, needed = float(workload.usable_bytes[s]), float(held[s, begin, end])
        if needed > usable:
            lacking, held_here, of = map(ceil_bytes_text, (needed - usable, needed, usable))
            stages.append(
                f"stage {s % num_stages} lacks {lacking} (it would hold {held_here}, of {of})"
            )
    return PlanError(
        f"No plan fits in memory with recompute={recompute!r}. In the cut that is nearest to "
        f"fitting, {list(counts)} layers, {some_of(stages)}. What would fit: "
        f"{'; '.join(_remedies(workload, recompute, held))}."
    )


def _remedies(workload: Workload, recompute: str, held: Numbers) -> Iterator[str]:
    if recompute != "auto" and _fits(workload, "auto"):
        yield "recompute='auto'"
    is_asynchronous = workload.schedule in ASYNCHRONOUS
    is_interleaved = workload.schedule in INTERLEAVED
    alike = ASYNCHRONOUS if is_asynchronous else SYNCHRONOUS.keys() - INTERLEAVED
    for schedule in () if is_interleaved else sorted(alike):
        other = replace(workload, schedule=schedule)
        if schedule != workload.schedule and _fits(other, recompute):
            yield f"schedule={schedule!r}"
    for factor in (2, 4, 8):
        number = factor * workload.microbatches
        smaller = _smaller(workload, factor)
        if not is_asynchronous:
            smaller = replace(smaller, microbatches=number, sizes=(1.0,))
        if _fits(smaller, recompute):
            yield (
                f"batches of 1/{factor} of the size"
                if is_asynchronous
                else f"{number} microbatches instead of {workload.microbatches} of the same batch"
            )
            break
    if is_asynchronous:
        # A batch that is split holds less, and no second version of the weights.
        number = 4 * workload.num_stages
        smaller = _smaller(workload, number)
        split = replace(smaller, microbatches=number, sizes=(1.0,), schedule="1f1b")
        if _fits(split, recompute):
            yield f"schedule='1f1b' with {number} microbatches, which trains otherwise"
    largest = float(workload.usable_bytes.max())
    most = 0 if is_interleaved else 2 * workload.num_stages + 2
    for num_stages in range(workload.num_stages + 1, most + 1):
        if _fits(_with_stages(workload, num_stages, largest), recompute):
            yield f"{num_stages} stages with {ceil_bytes_text(largest)} each"
            break
    yield f"devices with {ceil_bytes_text(narrowest(held)[0])} each"


def _smaller(workload: Workload, factor: float) -> Workload:
    """The same layers, with microbatches of ``1 / factor`` of the size; only their memory is
    used.
    """
    names = ("saved_bytes", "input_bytes", "outside_bytes", "payload_bytes", "batch_bytes")
    sizes = {name: getattr(workload, name) / factor for name in names}
    momentary = momentary_bytes(workload.momentary_bytes, workload.weight_bytes, 1 / factor)
    return replace(workload, momentary_bytes=momentary, **sizes)


def _with_stages(workload: Workload, num_stages: int, usable_bytes: float) -> Workload:
    """The same layers on more stages; only their memory is used."""
    by_layer = np.zeros((num_stages, workload.num_layers))
    by_boundary = np.zeros((num_stages - 1, workload.num_layers + 1))
    return replace(
        workload,
        forward=by_layer,
        backward=by_layer,
        forward_extra=by_layer[:, 0],
        backward_extra=by_layer[:, 0],
        payload_seconds=by_boundary,
        gradient_seconds=by_boundary,
        usable_bytes=np.full(num_stages, usable_bytes),
        sharers=(),
    )


def _fits(workload: Workload, recompute: str) -> bool:
    return narrowest(_lacking(workload, Recomputation(workload, recompute).held))[0] <= 0


def _lacking(workload: Workload, held: Numbers) -> Numbers:
    usable = workload.usable_bytes[:, None, None]
    lacking: Numbers = np.full_like(held, math.inf)
    np.subtract(held, usable, out=lacking, where=np.isfinite(held))
    return lacking
