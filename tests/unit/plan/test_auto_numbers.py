"""The numbers of virtual machines and microbatches, where they are left to the planner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from lightning_pipeshift.errors import ConfigurationError, PlanError
from lightning_pipeshift.plan.inputs.cluster import Cluster, Link
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.plan.search.auto_numbers import ChosenNumbers, RunNumbers, choose_numbers
from lightning_pipeshift.plan.search.evaluator import Evaluator
from lightning_pipeshift.plan.search.options import Options
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import PlanRequest
from tests.unit.plan.clusters import devices, partitions, profile, unlike

BOTH: Any = {"virtual_machines": "auto", "microbatches": "auto"}
SAMPLES = 12.0


def chosen(
    model: Any, cluster: Cluster, saved: RunNumbers | None = None, **options: Any
) -> ChosenNumbers:
    given = Options(**options)
    topology = Topology((tuple(range(cluster.num_ranks)),))
    if given.named_ranks is not None:
        topology = Topology(tuple(map(tuple, given.named_ranks)))
    return choose_numbers(model, cluster, given, topology, SAMPLES, saved=saved)


def samples_per_second(model: Any, cluster: Cluster, ranks: Any, microbatches: int) -> float:
    request = PlanRequest(
        virtual_machines=ranks, microbatches=microbatches, batch_samples=SAMPLES, may_share=False
    )
    return arrange(model, cluster, request).samples_per_second


def best_of_all(model: Any, cluster: Cluster) -> float:
    """All groupings in all orders, with all numbers of microbatches, and equal shares."""
    placer = Evaluator(model, cluster, PlanRequest(batch_samples=SAMPLES))
    best = 0.0
    for groups in partitions(list(range(cluster.num_ranks))):
        for ranks in itertools.product(*map(itertools.permutations, groups)):
            for count in range(1, int(SAMPLES) + 1):
                placed = placer.placed(ranks, count)
                try:
                    cuts = placer.cuts(placed)
                except PlanError:
                    continue
                best = max(best, placer.rate(placed, cuts))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_numbers_are_nearly_the_best_of_all(seed: int) -> None:
    model, cluster, _ = unlike(seed, num_ranks=3, num_layers=5, room=1.2 if seed % 2 else None)
    found = chosen(model, cluster, **BOTH)
    rate = samples_per_second(model, cluster, found.topology.ranks, found.microbatches)
    assert rate >= 0.975 * best_of_all(model, cluster), "0.99, and 1.01 for fewer microbatches"


SLOW_LINKS = Cluster(devices("a:X b:X c:X d:X"), outside=Link(1e-4, 1e6))
NO_LINKS = Cluster(devices("a:X a:X a:X a:X"))


def test_gradients_or_bubbles_decide() -> None:
    heavy = profile(8, gradient=10_000_000, payload=1000, seconds=0.1)
    found = chosen(heavy, SLOW_LINKS, **BOTH)
    assert found.topology.num_virtual_machines == 1
    assert 1 < found.microbatches <= SAMPLES, "a batch has no more slices than samples"
    light = profile(8, gradient=1000, payload=10_000_000, seconds=0.1)
    found = chosen(light, SLOW_LINKS, **BOTH)
    assert found.topology.num_virtual_machines == 4
    assert found.microbatches == 1
    assert "virtual_machines='auto' is 4" in found.message
    assert "with 1 virtual machine" in found.message
    assert "A step has 48 samples" in found.message


def test_what_the_user_gives_stays() -> None:
    model = profile(8, gradient=1000, payload=1000, seconds=0.1)
    found = chosen(model, NO_LINKS, virtual_machines=[[3, 1], [0, 2]], microbatches="auto")
    assert found.topology.ranks == ((3, 1), (0, 2))
    assert "virtual_machines" not in found.message
    given: Any
    for given in ({"microbatches": 3}, {"partition": [5, 3]}, {"batch_shares": [1, 1, 2]}):
        found = chosen(model, NO_LINKS, **{"virtual_machines": "auto", **given})
        depths = found.topology.stages_per_vm
        assert found.microbatches == given.get("microbatches", Options().num_microbatches(depths))
        is_default = "microbatches" not in given and found.microbatches > 1
        default = f"microbatches={found.microbatches} is the default for so many stages"
        assert (default in found.message) is is_default
        if "partition" in given:
            assert depths == (2, 2)
        if "batch_shares" in given:
            assert len(depths) == 3


def test_an_asynchronous_pipeline_begins_with_the_first_rank() -> None:
    model = profile(8, gradient=100_000, payload=1000, seconds=0.1)
    machines = Cluster(devices("a:X b:Y c:Y d:X"))
    model = replace(model, kinds={**model.kinds, "Y": model.kinds["X"]})
    found = chosen(model, machines, schedule="async", **BOTH)
    assert found.topology.ranks[0][0] == 0
    assert len(set(found.topology.stages_per_vm)) == 1
    assert found.microbatches == 1
    assert not Options(schedule="async", microbatches="auto").leaves_numbers


def test_the_numbers_of_a_checkpoint_stay_on_other_machines() -> None:
    model = profile(8, gradient=1000, payload=10_000_000, seconds=0.1)
    assert chosen(model, SLOW_LINKS, **BOTH).topology.num_virtual_machines == 4
    found = chosen(model, SLOW_LINKS, RunNumbers(2, 5), **BOTH)
    assert (found.topology.num_virtual_machines, found.microbatches) == (2, 5)
    assert "as in the run that saved the checkpoint" in found.message
    found = chosen(model, SLOW_LINKS, RunNumbers(3, 5), virtual_machines="auto")
    assert sorted(found.topology.stages_per_vm) == [1, 1, 2], "bits do not depend on the depths"
    assert found.microbatches == 5
    with pytest.raises(ConfigurationError, match=r"(?s)5 virtual machines.*these 4.*devices"):
        chosen(model, SLOW_LINKS, RunNumbers(5, 5), **BOTH)
