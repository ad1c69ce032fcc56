"""Moves, one by one and together."""

import itertools
import random

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.document.moves import Move, in_parts, placement_after
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.placement import Placement

LAYERS = tuple(LayerRecord(name, 1, 0.0, 1) for name in "abcdef")


def after(counts, *moves):
    plan = Plan(LAYERS, Placement(counts), "1f1b", 4)
    found = []
    for text in moves:
        layer, stage, *machine = text.split()
        vm = int(machine[0]) if machine else None
        found.append(Move(layer=layer, stage=int(stage), virtual_machine=vm))
    return placement_after(plan, found).counts


@pytest.mark.parametrize(
    ("counts", "moves", "expected"),
    [
        (((2, 2, 2),), [], ((2, 2, 2),)),
        (((2, 2, 2),), ["c 0"], ((3, 1, 2),)),
        (((2, 2, 2),), ["d 2"], ((2, 1, 3),)),
        # Any stage to any stage, as long as all are in order in the end.
        (((2, 2, 2),), ["c 0", "d 0", "e 0"], ((5, 0, 1),)),
        (((2, 2, 2),), ["c 2", "d 2"], ((2, 0, 4),)),
        (((6, 0, 0),), ["f 2"], ((5, 0, 1),)),
        # In every virtual machine or in one.
        (((3, 3), (3, 3)), ["d 0"], ((4, 2), (4, 2))),
        (((3, 3), (3, 3)), ["d 0 1"], ((3, 3), (4, 2))),
        (((3, 3), (3, 3)), ["d 0 1", "c 1 0"], ((2, 4), (4, 2))),
        # Where it is already.
        (((3, 3),), ["a 0"], ((3, 3),)),
    ],
)
def test_moves(counts, moves, expected):
    assert after(counts, *moves) == expected


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (["x 0"], "the layer 'x'; the layers are 'a', 'b'"),
        (["a 3"], r"stage 3; virtual machine 0 \(.*\) has the stages 0 to 2"),
        (["a -1"], "stage -1"),
        (["a 0 2"], r"in virtual machine 2 \(.*\); there are 1"),
        (["c 0", "c 2"], "two moves of the layer 'c'"),
    ],
)
def test_what_cannot_be(moves, words):
    with pytest.raises(PlanError, match=words):
        after(((2, 2, 2),), *moves)


def random_placement(draw, depths, joined, num_layers):
    counts = []
    for depth in depths:
        cuts = sorted(
            draw.choice([cut for cut in range(num_layers + 1) if cut - 1 not in joined])
            for _ in range(depth - 1)
        )
        counts.append(tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers))))
    return Placement(tuple(counts))


@pytest.mark.parametrize("seed", range(60))
def test_parts_of_a_change_move_each_layer_once_and_no_link_is_busy_for_long(seed):
    draw = random.Random(seed)
    num_layers, depths = (
        draw.randint(2, 12),
        [draw.randint(2, 5) for _ in range(draw.randint(1, 2))],
    )
    joined = {layer for layer in range(num_layers - 1) if draw.random() < 0.2}
    old, new = (random_placement(draw, depths, joined, num_layers) for _ in range(2))
    sizes = [draw.choice([1.0, 2.0, 9.0]) for _ in range(num_layers)]
    most = draw.choice([1.0, 4.0, 1e9])
    parts = in_parts(old, new, lambda vm, layer, source, to: sizes[layer], most, joined)
    assert parts[-1] == new
    assert len(parts) == 1 or most < 1e9
    num_moves = 0
    for before, after_it in itertools.pairwise([old, *parts]):
        links: dict[tuple[int, int, int], list[int]] = {}
        for vm in range(len(depths)):
            owners = zip(before.stages(vm), after_it.stages(vm), strict=True)
            for layer, (source, to) in enumerate(owners):
                if source != to:
                    assert (source, to) == (old.stages(vm)[layer], new.stages(vm)[layer])
                    links.setdefault((vm, source, to), []).append(layer)
                    num_moves += 1
            for layer in joined:
                assert after_it.stage_of(vm, layer) == after_it.stage_of(vm, layer + 1)
        for layers in links.values():
            # More than a link may carry is only what cannot be apart.
            together = sorted(layers)
            is_one = all(layer in joined for layer in together[:-1])
            assert is_one or sum(sizes[layer] for layer in layers) <= most
    assert num_moves == sum(
        a != b
        for vm in range(len(depths))
        for a, b in zip(old.stages(vm), new.stages(vm), strict=True)
    )


def test_stages_whose_layers_are_not_contiguous():
    plan = Plan(LAYERS, Placement(((2, 2, 2),)), "1f1b", 4)
    moves = [Move(layer="a", stage=2), Move(layer="f", stage=0)]
    plan = plan.with_placement(placement_after(plan, moves))
    assert plan.placement.stages(0) == [2, 0, 1, 1, 2, 0]
    assert [[layer.name for layer in stage] for stage in plan.stage_layers(0)] == [
        ["b", "f"],
        ["c", "d"],
        ["a", "e"],
    ]
    # A layer sends what it returns where the next one is elsewhere.
    assert plan.stage_payload_bytes(0) == (1, 1)
    assert Plan.from_json(plan.to_json()) == plan
    assert not plan.is_like(plan.with_placement(Placement(plan.placement.counts)))
    back = [Move(layer="a", stage=0), Move(layer="f", stage=2)]
    assert placement_after(plan, back) == Placement(((2, 2, 2),))
