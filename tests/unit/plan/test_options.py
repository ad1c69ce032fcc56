import dataclasses

import pytest

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.search.options import Options

PLAN = Plan(
    layers=tuple(LayerRecord(f"h.{number}", 1000, 1.0, 200) for number in range(4)),
    placement=Placement(((2, 2), (1, 3))),
    schedule="1f1b",
    microbatches=4,
    batch_shares=(3, 1),
)


def test_options_are_a_value():
    options = Options(microbatches=3)
    assert options == Options(microbatches=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.microbatches = 4  # type: ignore[misc]


def test_a_plans_shares_come_before_those_that_were_given():
    assert Options(plan=PLAN, batch_shares=[1, 1]).batch_shares == [3, 1]
    without = dataclasses.replace(PLAN, batch_shares=())
    assert Options(plan=without, batch_shares=[1, 2]).batch_shares == [1, 2]
    # A search for another plan of the same run keeps them.
    assert dataclasses.replace(Options(plan=PLAN), plan=None).batch_shares == [3, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gradient_aggregation": "tree"},
            "gradient_aggregation='tree': allowed are 'auto', 'ring', 'allreduce'",
        ),
        ({"recompute": "some"}, "recompute='some': allowed are 'auto', 'full', 'none'"),
        ({"profile_steps": -1}, "profile_steps=-1: pass a whole number"),
        ({"profile_steps": 2.5}, "profile_steps=2.5"),
        ({"process_group_backend": "mpi"}, "process_group_backend='mpi': allowed are None, 'nccl'"),
        ({"heartbeat_timeout": 0.5}, "heartbeat_timeout=0.5: pass a number of seconds, 1 or more"),
        (
            {"schedule": "async", "virtual_machines": [[1, 0]]},
            "the ranks [[1, 0]]: with an asynchronous schedule rank 0 is the first stage",
        ),
        ({"stall_timeout": float("nan")}, "stall_timeout=nan: pass a number of seconds, 0 or more"),
    ],
)
def test_a_value_that_is_not_allowed(changes, words):
    with pytest.raises(ConfigurationError) as caught:
        dataclasses.replace(Options(), **changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "depths"),
    [
        (Options(), None),
        (Options(partition=[5, 4]), None),
        (Options(partition=[[5, 4], [3, 3, 3]]), [2, 3]),
        (Options(plan=PLAN, partition=[5, 4]), [2, 2]),
    ],
)
def test_what_fixes_the_number_of_stages(options, depths):
    assert options.depths == depths
