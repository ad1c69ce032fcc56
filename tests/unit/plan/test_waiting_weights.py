"""Weights of layers that wait in host memory, as the planner sees them: they move where nothing
else keeps the budget, as few as are needed; and what the compute does not hide of their transfer
makes the step longer.
"""

from __future__ import annotations

import pytest

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.plan.cost.layer_memory import window_bytes
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.cut_search import best_split
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.plan.search.problem import Compressed, Problem

MB = 10**6
NUM_LAYERS, NUM_MICROBATCHES = 8, 2
FORWARD, BACKWARD = 0.010, 0.020


def best(budget: float, rate: float, waiting: int = 10 * MB) -> Compressed:
    """The best plan for one device and layers of 10 MB of weights, as much of gradients, and twice
    as much of optimizer state.

    Args:
        budget: in MB.
        rate: to the host and back, in MB per second.
        waiting: the bytes of each layer's weights that may wait.
    """
    layers = tuple(
        LayerProfile(
            f"l{n}",
            parameter_bytes=10 * MB,
            gradient_bytes=10 * MB,
            optimizer_bytes=20 * MB,
            waiting_bytes=waiting,
        )
        for n in range(NUM_LAYERS)
    )
    times = KindProfile((FORWARD,) * NUM_LAYERS, (BACKWARD,) * NUM_LAYERS)
    profile = Profile(layers, {"cpu": times}, microbatches=NUM_MICROBATCHES)
    device = Device(
        "h", "cpu", memory_bytes=int(budget * MB), host_bytes=10**12, host_bandwidth=rate * MB
    )
    cluster = Cluster((device,))
    workload = workload_of(profile, cluster, (0,), "1f1b", NUM_MICROBATCHES)
    return best_split(Problem.of(profile, workload, cluster, (0,), Planned()), [NUM_LAYERS])


def test_the_memory_for_weights_is_that_of_two_neighbours() -> None:
    assert window_bytes([]) == 0
    assert window_bytes([3]) == 3
    assert window_bytes([3, 1, 4, 1, 5]) == 6


@pytest.mark.parametrize(
    ("budget", "num_state", "num_weights"), [(330, 0, 0), (200, 7, 0), (160, 8, 3), (130, 8, 6)]
)
def test_as_few_move_as_are_needed(budget: float, num_state: int, num_weights: int) -> None:
    """With n layers' weights on the host there are 10 (8 - n) + 20 MB of weights and 80 MB of
    gradients; an update needs 20 MB of state and 10 MB of weights, 10 MB more than these 20.
    """
    found = best(budget, rate=10**6)
    assert len(found.cut.weights_on_host) == num_weights
    assert len(found.cut.optimizer_on_host) == num_state
    assert found.footprint.peak_bytes[0] <= budget * MB


def test_what_the_compute_hides_takes_no_time() -> None:
    everything = best(320, rate=10**9).seconds
    # 10 MB take about as long as a forward of the layer before.
    hidden = best(130, rate=1100)
    assert hidden.footprint.timeline.end_seconds == pytest.approx(everything)
    # Twice as long: in each forward five of six layers wait for half of that. The first one is
    # prefetched while the last ones run, which stay.
    slow = best(130, rate=500)
    waits = slow.footprint.timeline.end_seconds - everything
    assert waits == pytest.approx(NUM_MICROBATCHES * 5 * FORWARD, rel=0.2)
    assert slow.seconds > slow.footprint.timeline.end_seconds


def test_an_error_says_what_would_do() -> None:
    with pytest.raises(BudgetError, match=r"for the weights of two layers at a time, gradients"):
        best(90, rate=1000)
    with pytest.raises(BudgetError, match=r"for weights, gradients and messages"):
        best(150, rate=1000, waiting=0)


def test_a_plan_keeps_them_and_says_so() -> None:
    found = best(160, rate=1000)
    layers = tuple(LayerProfile(f"l{n}") for n in range(NUM_LAYERS))
    times = KindProfile((FORWARD,) * NUM_LAYERS, (BACKWARD,) * NUM_LAYERS)
    profile = Profile(layers, {"cpu": times}, microbatches=NUM_MICROBATCHES)
    cluster = Cluster((Device("h", "cpu"),))
    plan = Measured(profile, cluster, ((0,),)).plan("1f1b", NUM_MICROBATCHES, (found.cut,))
    assert plan.cut(0) == found.cut
    assert Plan.from_json(plan.to_json()) == plan
    assert "the waiting weights of 3 of 8 layers in host memory" in str(plan)
