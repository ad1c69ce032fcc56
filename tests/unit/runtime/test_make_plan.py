"""The cuts of `partition="auto"` for measured layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.planning.make_plan import (
    Settings,
    Watch,
    make_plan,
    stages_without_work,
)


def counts(seconds: Sequence[float], payload_bytes: Sequence[int]) -> tuple[int, ...]:
    """Of two equal devices; what crosses each boundary, with the two ends."""
    layers = tuple(
        LayerProfile(f"layer{i}", 100, 100, payload_bytes=payload)
        for i, payload in enumerate(payload_bytes[1:])
    )
    kinds = {"cpu": KindProfile(tuple(seconds), tuple(2 * s for s in seconds))}
    cluster = Cluster((Device("here", "cpu"),) * 2)
    plan = make_plan(
        Settings(microbatches=8, partition="auto"),
        Profile(layers, kinds, 1.0, 8),
        cluster,
        Topology(((0, 1),)),
    )
    return plan.placement.counts[0]


def test_virtual_machines_of_unequal_depth_are_refused_before_the_first_step() -> None:
    with pytest.raises(PlanError, match="a deeper pipeline uses older weights"):
        Settings(schedule="async").check([], (2, 1))


def test_blocks_stay_whole() -> None:
    payload = [0, 1, 2, 2, 1, 2, 2, 1, 1, 0]
    assert counts([1.0] * 9, payload) == (4, 5)


def test_a_block_is_cut_where_whole_blocks_would_be_much_slower() -> None:
    payload = [0, 1, 2, 3, 4, 5, 6, 7, 6, 5, 4, 3, 2, 1, 0]
    # Beside the top of this U-Net one stage would take 10 of the 14 layers.
    assert counts([1.0] * 14, payload) == (7, 7)
    # With light layers at the top, beside it is as good.
    first, _ = counts([1.0] * 4 + [0.1] * 6 + [1.0] * 4, payload)
    assert first in (4, 10)


@pytest.mark.parametrize(
    ("partition", "counts", "called", "words"),
    [
        ("auto", (2, 2), range(4), None),
        ("auto", (2, 2), [1, 2], None),
        ("auto", (4, 0), range(4), "stage 1 (rank 0) has nothing to compute: by the measurements"),
        ("auto", (4, 0), [2], "a step calls 1 layer, and there are 2 stages. Name smaller layers"),
        ([0, 4], (0, 4), range(4), "stage 0 (rank 1) has nothing to compute: the `partition`"),
        ([2, 2], (2, 2), [2, 3], "Change the `partition`, or use fewer devices"),
    ],
)
def test_who_has_no_work(partition, counts, called, words) -> None:
    settings = Settings(microbatches=8, partition=partition)
    said = stages_without_work(settings, Placement((counts,)), Topology(((1, 0),)), called)
    assert (said is None) == (words is None)
    assert said is None or words in said


def test_a_stage_whose_layers_have_moved_is_no_mistake_of_the_partition() -> None:
    settings = Settings(microbatches=8, partition=[2, 2])
    given = (Placement(((4, 0),)), Topology(((1, 0),)), range(4))
    by_hand = stages_without_work(settings, *given, has_moved=True)
    assert by_hand is not None
    assert "its layers have moved to other stages. Move layers back" in by_hand
    watched = stages_without_work(replace(settings, watch=Watch(0.05, 10)), *given, has_moved=True)
    assert watched is not None
    assert "It gets layers again if it becomes fast enough" in watched
