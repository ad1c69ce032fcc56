"""A batch of 10 in 4 microbatches is cut into 3, 3, 2 and 2 samples, and each takes its own time
and memory.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipeshift.model.tensors.microbatch import split
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import relative_sizes, workload_of
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link
from lightning_pipeshift.plan.inputs.profile import LayerProfile
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, INTERLEAVED, SCHEDULES
from lightning_pipeshift.plan.search.measurements import Measured
from tests.unit.plan.clusters import devices, profile
from tests.unit.plan.workloads import all_counts, random_workload

# The reference does not divide backwards.
SYNCHRONOUS = sorted(set(SCHEDULES) - set(ASYNCHRONOUS) - INTERLEAVED - {"zb-h1"})


@pytest.mark.parametrize("samples", range(1, 20))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7])
def test_sizes_are_those_of_a_run(samples, microbatches):
    cut = [size for _, size in split(torch.zeros(samples, 1), microbatches)]
    sizes = relative_sizes(samples, len(cut))
    assert np.allclose(np.array(sizes) * samples / len(cut), cut if len(sizes) > 1 else cut[0])
    assert len(sizes) == 1 or len(sizes) == len(cut)


def test_each_microbatch_takes_its_own_time():
    """Two layers of 1 s for a sample forward and 2 s backward, a stage each. With 3 and 2 samples:
    F0 0-3, F1 3-5 on the first; F0 3-6, B0 6-12, F1 12-14, B1 14-18 on the last; the first ends
    with B0 12-18 and B1 18-22. With two microbatches of 2.5 samples it would end after 22.5 s.
    """
    model = replace(profile(2), samples=1.0)
    cluster = Cluster(devices("a:X a:X"))
    workload = workload_of(model, cluster, [0, 1], "1f1b", 2, 2.5)
    first, last = workload.timeline(Cut((1, 1))).rows
    forwards, backwards = model.kinds["X"].forward, model.kinds["X"].backward
    ends = [(str(span.action), span.end) for span in last]
    f, b = forwards[1], backwards[1]
    start = 3 * forwards[0]
    assert ends == [
        ("F0", start + 3 * f),
        ("B0", start + 3 * (f + b)),
        ("F1", start + 3 * (f + b) + 2 * f),
        ("B1", start + 5 * (f + b)),
    ]
    assert first[-1].end == start + 5 * (f + b) + 2 * backwards[0]


def test_what_an_action_takes_once_does_not_depend_on_the_size():
    once = {"action_forward": 0.5, "action_backward": 0.25}
    model = profile(2)
    kinds = {kind: replace(times, **once) for kind, times in model.kinds.items()}
    layers = tuple(replace(each, payload_bytes=8) for each in model.layers)
    model = replace(model, kinds=kinds, layers=layers, samples=1.0)
    cluster = Cluster(devices("a:X a:X"), inside=Link(0.125, 16.0))
    row, _ = workload_of(model, cluster, [0, 1], "gpipe", 2, 2.5).timeline(Cut((1, 1))).rows
    forward, backward = model.kinds["X"].forward[0], model.kinds["X"].backward[0]
    seconds = {str(span.action): span.end - span.start for span in row}
    assert seconds["F0"] == pytest.approx(3 * forward + 0.5)
    assert seconds["F1"] == pytest.approx(2 * forward + 0.5)
    assert seconds["B0"] == pytest.approx(3 * backward + 0.25)
    sent = workload_of(model, cluster, [0, 1], "gpipe", 2, 2.5).timeline(Cut((1, 1))).transfers[0]
    assert [span.end - span.start for span in sent] == pytest.approx([0.125 + 1.5, 0.125 + 1.0])


def unequal(seed, schedule=None):
    """A random workload with microbatches of two sizes."""
    draw = np.random.default_rng(seed)
    schedule = schedule or str(draw.choice(SYNCHRONOUS))
    found = random_workload(seed, schedule=schedule, microbatches=int(draw.integers(2, 7)))
    count = found.microbatches
    samples = int(draw.integers(1, 4)) * count + int(draw.integers(1, count))
    once = 0.3 * np.array([found.forward_extra, found.backward_extra, np.zeros(found.num_stages)])
    return replace(found, sizes=relative_sizes(samples, count), once_seconds=once)


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_that_of_a_slow_reference(seed):
    workload = unequal(seed)
    counts = list(all_counts(workload))
    cuts = [Cut(counts[n]) for n in np.random.default_rng(seed).integers(0, len(counts), 3)]
    found = workload.step_seconds(cuts)
    assert found == pytest.approx([workload.timeline(cut).step_seconds for cut in cuts])
    assert found == pytest.approx([slowly(workload, cut) for cut in cuts])


def slowly(workload, cut):
    """The end of a step: every action starts when all that it needs has ended. Repeated until
    nothing changes.
    """
    sizes, last = workload.sizes, workload.num_stages - 1
    rows = [row.actions for row in workload.timeline(cut).computed]

    def takes(stage, action):
        begin, end = cut.bounds[stage], cut.bounds[stage + 1]
        size, runs = sizes[action.microbatch], begin < end or stage == last
        is_forward = action.kind is Kind.FORWARD
        layers = (workload.forward if is_forward else workload.backward)[stage, begin:end].sum()
        extra = (workload.forward_extra if is_forward else workload.backward_extra)[stage] * runs
        once = workload.once_seconds[0 if is_forward else 1][stage] * runs
        return size * (layers + extra - once) + once

    def travels(table, boundary, microbatch):
        return sizes[microbatch] * table[boundary, cut.bounds[boundary + 1]]

    ends: dict[Any, float] = {}
    while True:
        before, sent = dict(ends), dict[Any, float]()
        for stage, row in enumerate(rows):
            free = 0.0
            for action in row:
                number = action.microbatch
                start = max(free, before.get(("arrives", stage, action), 0.0))
                free = ends[stage, action] = start + takes(stage, action)
                is_forward = action.kind is Kind.FORWARD
                there = stage + 1 if is_forward else stage - 1
                if 0 <= there <= last:
                    table = workload.payload_seconds if is_forward else workload.gradient_seconds
                    link = stage, there
                    leaves = max(free, sent.get(link, 0.0))
                    sent[link] = leaves + travels(table, min(link), number)
                    ends["arrives", there, action] = sent[link]
        if ends == before:
            return max(end for key, end in ends.items() if key[0] != "arrives")


def test_the_larger_microbatches_need_more_memory():
    """GPipe holds all 10 samples; the last stage of 1F1B holds one microbatch, of 3."""
    model = replace(profile(2), samples=3.0, microbatches=4, batch_samples=10.0)
    layers = tuple(LayerProfile(each.name, saved_bytes=30) for each in model.layers)
    measured = Measured(replace(model, layers=layers), Cluster(devices("a:X a:X")), [[0, 1]])
    of: dict[str, Any] = {}
    for schedule in ("gpipe", "1f1b"):
        prediction = measured.plan(schedule, 4, [Cut((1, 1))]).prediction
        assert prediction is not None
        of[schedule] = prediction.memory_bytes
    assert of["gpipe"] == (pytest.approx((100, 100)),)
    assert of["1f1b"] == (pytest.approx((60, 30)),)
