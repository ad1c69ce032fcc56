"""The integer programme can be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.arrange.evaluator import Evaluator
from lightning_pipeshift.plan.arrange.planner import arrange
from lightning_pipeshift.plan.arrange.request import PlanRequest
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.policies import KeepAll
from lightning_pipeshift.plan.partition.integer_programming import joint_optimum
from tests.unit.plan.clusters import devices, profile, unlike


@pytest.mark.parametrize("room", [None, 1.1])
def test_the_cuts_are_those_of_the_integer_programme(room: float | None) -> None:
    model, cluster, request = unlike(2, num_ranks=3, num_layers=6, room=room)
    request = replace(request, solver="milp", virtual_machines=((0, 1, 2),))
    found = arrange(model, cluster, request)
    placer = Evaluator(model, cluster, request)
    [workload] = placer.placed(found.ranks, found.microbatches).workloads
    assert found.cuts == (joint_optimum(workload),)
    searched = arrange(model, cluster, replace(request, solver="search"))
    assert workload.estimate(found.cuts[0]) <= workload.estimate(searched.cuts[0]) * (1 + 1e-9)


def test_a_large_pipeline_is_refused_with_the_limit() -> None:
    model, cluster = profile(65), Cluster(devices("a:X a:X"))
    request = PlanRequest(solver="milp", virtual_machines=1, microbatches=4)
    with pytest.raises(PlanError, match=r"65 layers on 2 stages.*at most 128"):
        arrange(model, cluster, request)
    shallower = replace(request, virtual_machines="auto")
    assert arrange(model, cluster, shallower).ranks == ((0,), (1,)), "one of one stage each fits"


@pytest.mark.parametrize(
    "given",
    [{"policy": KeepAll()}, {"recompute": "none"}, {"partition": "uniform"}, {"solver": ""}],
)
def test_what_it_cannot_solve_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="solver="):
        PlanRequest(**{"solver": "milp", **given})
