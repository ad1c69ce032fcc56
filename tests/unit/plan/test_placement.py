import pytest

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.inputs.placement import Placement


def test_what_a_placement_answers():
    placement = Placement(((3, 0, 2), (1, 4)))
    assert placement.num_virtual_machines == 2
    assert placement.num_layers == 5
    assert [placement.num_stages(vm) for vm in range(2)] == [3, 2]
    assert placement.bounds(0) == (0, 3, 3)
    assert placement.bounds(1) == (0, 1)
    assert [placement.stage_of(0, layer) for layer in range(5)] == [0, 0, 0, 2, 2]
    assert [placement.stage_of(1, layer) for layer in range(5)] == [0, 1, 1, 1, 1]
    assert [placement.layers_of(0, stage) for stage in range(3)] == [
        range(3),
        range(3, 3),
        range(3, 5),
    ]


@pytest.mark.parametrize("counts", [(4,), (0, 4), (4, 0), (0, 0, 4, 0), (2, 0, 0, 2), (1, 1, 1, 1)])
def test_stage_of_and_layers_of_agree(counts):
    placement = Placement((counts,))
    owners = {
        layer: stage
        for stage in range(placement.num_stages(0))
        for layer in placement.layers_of(0, stage)
    }
    assert owners == {layer: placement.stage_of(0, layer) for layer in range(4)}


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((), "no virtual machine"),
        (((1,), ()), r"virtual machine 1 \(.*\) has no stage"),
        (((2, -1),), "places -1 layers on stage 1"),
        (((2, 1.0),), "places 1.0 layers on stage 1"),
        (((True,),), "places True layers"),
        (((5, 4), (6, 2)), r"virtual machine 1 \(.*\) places 8 layers.*virtual machine 0 9"),
        (((0, 0),), "0 layers"),
    ],
)
def test_impossible_placements(counts, words):
    with pytest.raises(PartitionError, match=words):
        Placement(counts)


@pytest.mark.parametrize("layer", [-1, 5])
def test_an_unknown_layer(layer):
    with pytest.raises(PartitionError, match=rf"layer {layer}.*0 to 4"):
        Placement(((3, 2),)).stage_of(0, layer)


def test_layers_of_a_stage_that_are_not_contiguous():
    placement = Placement.of([[0, 1, 0, 2], [0, 0, 1, 1]], [3, 2])
    assert placement.counts == ((2, 1, 1), (2, 2))
    assert [placement.stages(vm) for vm in range(2)] == [[0, 1, 0, 2], [0, 0, 1, 1]]
    assert [placement.stage_of(0, layer) for layer in range(4)] == [0, 1, 0, 2]
    assert [list(placement.layers_of(0, stage)) for stage in range(3)] == [[0, 2], [1], [3]]
    assert placement != Placement(placement.counts)
    # Where all are, nothing else is said of them.
    assert Placement.of([[0, 0, 1]], [3]) == Placement(((2, 1, 0),))


@pytest.mark.parametrize("owners", [((0, 0, 1),), ((0, 1, 1),), ((1, 0, 3),), ((1, 0, 0),) * 2])
def test_owners_that_disagree_with_the_counts(owners):
    with pytest.raises(PartitionError, match=r"layers are on the stages"):
        Placement(((2, 1),), owners)
