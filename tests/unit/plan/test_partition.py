import pytest

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.search.given_partition import resolve

NAMES = ("embed", *(f"blocks.{n}" for n in range(7)), "head")


def counts(spec, stages_per_vm=(2,), num_layers=9, idle=(), names=()):
    return resolve(
        spec, num_layers=num_layers, stages_per_vm=stages_per_vm, idle=idle, names=names
    ).counts


def test_words():
    assert counts("uniform", (2, 3)) == ((5, 4), (3, 3, 3))
    assert counts("auto", (2, 3)) == ((5, 4), (3, 3, 3))
    assert counts("uniform", (4,), num_layers=2) == ((1, 1, 0, 0),)


def test_layers_that_no_step_calls_do_not_count():
    assert counts("uniform", idle=range(6, 9)) == ((3, 6),)
    assert counts("uniform", idle=range(3)) == ((6, 3),)
    assert counts("uniform", (3,), idle=(1, 2, 4, 6, 7)) == ((5, 3, 1),)
    assert counts("uniform", (3,), num_layers=4, idle=(0, 3)) == ((2, 2, 0),)
    assert counts([5, 4], idle=range(6)) == ((5, 4),)


def test_lists():
    assert counts([5, 4]) == ((5, 4),)
    assert counts((5, 4), (2, 2)) == ((5, 4), (5, 4))
    assert counts([[5, 4], [6, 3]], (2, 2)) == ((5, 4), (6, 3))
    assert counts([[5, 4], [3, 3, 3]], (2, 3)) == ((5, 4), (3, 3, 3))
    assert counts([9, 0]) == ((9, 0),)


@pytest.mark.parametrize(
    ("spec", "stages_per_vm", "words"),
    [
        (
            [5, 5],
            (2,),
            r"\[5, 5\] of virtual machine 0 \(.*\) adds up to 10 layers; the model has 9",
        ),
        ([[5, 4], [5, 5]], (2, 2), r"virtual machine 1 \(.*\) adds up to 10"),
        ([3, 3, 3], (2,), "has 3 counts; the virtual machine has 2 stages for 9 layers: give a"),
        ([9], (2,), "has 1 counts; the virtual machine has 2 stages"),
        (
            [5, 4],
            (2, 3),
            r"of virtual machine 1 \(.*\) has 2 counts; the virtual machine has 3 stages",
        ),
        ([10, -1], (2,), "has a -1; a count is a whole number, 0 or more"),
        ([4.5, 4.5], (2,), "has a 4.5; a count is a whole number"),
        ([True, 8], (2,), "has a True"),
        (["5", "4"], (2,), "has a '5'"),
        ([[5, 4]], (2, 2), r"lists for 1 virtual machines \(.*\); there are 2"),
        ([[5, 4], 9], (2, 2), "one number per stage.*or one list per virtual machine"),
        ([], (2,), "one number per stage"),
        ("even", (2,), "'even'; allowed are 'auto', 'uniform', a list"),
        (5, (2,), "5, a int; allowed are"),
        (None, (2,), "NoneType; allowed are"),
    ],
)
def test_wrong_partitions(spec, stages_per_vm, words):
    with pytest.raises(PartitionError, match=words):
        counts(spec, stages_per_vm)


@pytest.mark.parametrize("spec", [[5, 5], [3, 3, 3], [[9, 1]]])
def test_the_layers_are_listed_by_name(spec):
    with pytest.raises(PartitionError, match=rf"9 layers \({', '.join(NAMES)}\): "):
        counts(spec, names=NAMES)
