"""Small random workloads, and all their cuts: what the planner's solvers are tested with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, INTERLEAVED, SCHEDULES


def workload(
    forward,
    speeds=(1, 1),
    *,
    backward=2.0,
    extra=0.0,
    payload=0.0,
    static=0.0,
    weight=0.0,
    saved=0.0,
    state=0.0,
    inputs=0.0,
    outside=0.0,
    momentary=0.0,
    batch=0.0,
    payload_bytes=0.0,
    room=np.inf,
    schedule="1f1b",
    microbatches=8,
    allowed=None,
):
    """A workload by hand: seconds of the layers at speed 1, backwards so many times as long, and
    the same payload everywhere, or one for each boundary.
    """
    forward, speeds = np.asarray(forward, float), np.asarray(speeds, float)
    num_stages, num_layers = len(speeds), len(forward)
    travel = np.zeros((num_stages - 1, num_layers + 1))
    travel[:] = payload
    travel[:, 0] = 0.0
    return Workload(
        forward=forward / speeds[:, None],
        backward=backward * forward / speeds[:, None],
        forward_extra=np.full(num_stages, extra, float),
        backward_extra=np.full(num_stages, extra, float),
        payload_seconds=travel,
        gradient_seconds=travel,
        static_bytes=np.broadcast_to(np.asarray(static, float), num_layers),
        optimizer_bytes=np.broadcast_to(np.asarray(state, float), num_layers),
        waiting_bytes=np.zeros(num_layers),
        weight_bytes=np.broadcast_to(np.asarray(weight, float), num_layers),
        sent_bytes=np.zeros((2, num_layers)),
        saved_bytes=np.broadcast_to(np.asarray(saved, float), num_layers),
        input_bytes=np.broadcast_to(np.asarray(inputs, float), num_layers),
        outside_bytes=np.broadcast_to(np.asarray(outside, float), num_layers),
        momentary_bytes=np.broadcast_to(np.asarray(momentary, float), num_layers),
        batch_bytes=batch,
        payload_bytes=_inside(payload_bytes, num_layers),
        shared_bytes=np.zeros((num_layers + 1, num_layers + 1)),
        usable_bytes=np.broadcast_to(np.asarray(room, float), num_stages),
        schedule=schedule,
        microbatches=microbatches,
        allowed=allowed,
    )


def _inside(payload_bytes, num_layers):
    """Payloads of all boundaries; nothing crosses the ends of the model."""
    found = np.zeros(num_layers + 1)
    found[:] = payload_bytes
    found[[0, -1]] = 0.0
    return found


def random_workload(
    seed: int,
    *,
    num_stages: int | None = None,
    num_layers: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    tight: bool | None = None,
) -> Workload:
    """Devices of speeds 1, 0.5 and 0.25, layers that are equal or not, links from free to slower
    than any stage; in a part of the cases not every boundary may be cut. ``tight``: memory may be
    short. What is not given is random.
    """
    draw = np.random.default_rng(seed)
    num_stages = num_stages or int(draw.integers(2, 5))
    num_layers = num_layers or int(draw.integers(2, 9))
    microbatches = microbatches or int(draw.choice([1, 2, 4, 8, 16]))
    schedule = schedule or str(draw.choice(sorted(SCHEDULES.keys() - INTERLEAVED)))
    if schedule in ASYNCHRONOUS:
        microbatches = 1
    speeds = draw.choice([1, 0.5, 0.25], num_stages)
    forward = np.exp(draw.choice([0.0, 0.4, 0.9]) * draw.normal(size=num_layers))
    backward = forward * (2.0 if draw.random() < 0.5 else draw.uniform(1, 3, num_layers))
    mean = forward.mean()
    sizes = np.append(0.0, draw.choice([1, 1, 2, 4] if draw.random() < 0.5 else [1], num_layers))
    slowness = draw.choice([0, 0.01, 0.1, 0.5, 1, 2], num_stages - 1) * mean
    latency = draw.choice([0, 0, 0.02, 0.2]) * mean
    payload = np.where(sizes > 0, latency + sizes * slowness[:, None], 0.0)
    extra = draw.choice([0, 0.01, 0.1]) * mean / speeds
    extra[-1] += draw.choice([0, 0.2, 1]) * mean / speeds[-1]
    static, saved = draw.integers(1, 50, (2, num_layers)).astype(float)
    allowed = None
    if draw.random() < 0.25:
        allowed = frozenset(b for b in range(1, num_layers) if draw.random() < 0.7)
    boundless = Workload(
        forward=forward / speeds[:, None],
        backward=backward / speeds[:, None],
        forward_extra=extra,
        backward_extra=2 * extra,
        payload_seconds=payload,
        gradient_seconds=payload * draw.choice([0, 1, 1]),
        static_bytes=static,
        optimizer_bytes=np.zeros(num_layers),
        waiting_bytes=np.zeros(num_layers),
        # No further draw, which would change what comes after it.
        weight_bytes=np.floor(static / 3),
        sent_bytes=np.zeros((2, num_layers)),
        saved_bytes=saved,
        input_bytes=np.minimum(saved, draw.integers(1, 10, num_layers)),
        outside_bytes=np.zeros(num_layers),
        momentary_bytes=np.floor(saved / 4),
        batch_bytes=0.25,
        payload_bytes=_inside(sizes, num_layers),
        shared_bytes=np.zeros((num_layers + 1, num_layers + 1)),
        usable_bytes=np.full(num_stages, np.inf),
        schedule=schedule,
        microbatches=microbatches,
        allowed=allowed,
    )
    held = (
        boundless.memory.fixed_bytes.mean(axis=0).sum() + np.mean(boundless.in_flight) * saved.sum()
    )
    even = held / num_stages
    room = (even * draw.uniform(0.6, 2.0) * draw.uniform(0.7, 1.5, num_stages)).round()
    is_tight = draw.random() < 0.5 if tight is None else tight
    return replace(boundless, usable_bytes=room) if is_tight else boundless


def all_cuts(workload: Workload, recompute: str = "auto") -> list[Cut]:
    """Every cut that is allowed and fits, with everything that may be recomputed."""
    return [
        cut
        for counts in all_counts(workload)
        for cut in _with_recomputation(workload, counts, recompute)
        if workload.is_allowed(cut) and workload.fits(cut)
    ]


def all_counts(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Every choice of counts."""
    ends = range(workload.num_layers + 1)
    for inner in itertools.combinations_with_replacement(ends, workload.num_stages - 1):
        bounds = (0, *inner, workload.num_layers)
        yield tuple(end - begin for begin, end in itertools.pairwise(bounds))


def _with_recomputation(workload: Workload, counts, recompute: str) -> Iterator[Cut]:
    everything = workload.everything_recomputed(counts)
    if recompute == "full":
        yield everything
        return
    yield Cut(counts)
    # Where memory is boundless, recomputation only costs.
    if recompute == "auto" and np.isfinite(workload.usable_bytes).any():
        layers = sorted(everything.recompute)
        for num in range(1, len(layers) + 1):
            for chosen in itertools.combinations(layers, num):
                yield Cut(counts, frozenset(chosen))
