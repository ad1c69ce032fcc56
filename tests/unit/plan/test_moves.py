"""Moves, one by one and together."""

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.document.moves import Move, placement_after
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
        (["a 3"], "stage 3; virtual machine 0 has the stages 0 to 2"),
        (["a -1"], "stage -1"),
        (["a 0 2"], "in virtual machine 2; there are 1"),
        (["c 0", "c 2"], "two moves of the layer 'c'"),
        (["a 2"], "'b' would be on stage 0, and 'a', .* on stage 2.*between them too"),
        (["d 0"], "'d' would be on stage 0, and 'c'"),
    ],
)
def test_what_cannot_be(moves, words):
    with pytest.raises(PlanError, match=words):
        after(((2, 2, 2),), *moves)
