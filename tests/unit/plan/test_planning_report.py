"""The text of `pipeshift plan` says which depths were tried, and why one was chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from examples.plan_a_cluster import profile_of_gpt
from lightning_pipeshift.commands.planning import make, report
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import PlanRequest
from tests.unit.plan.clusters import unlike

NUM_LAYERS, WIDTH = 24, 1600


def test_a_model_that_no_device_holds_gets_stages_and_the_text_says_why() -> None:
    """24 blocks of 16 bytes for each of 12 width^2 parameters are 11.8 GB: two devices of 8 GB hold
    them, and one does not.
    """
    profile = profile_of_gpt({"A100": "a100"}, NUM_LAYERS, WIDTH, 1024)
    needed = sum(layer.static_bytes for layer in profile.layers)
    device = Device("", "A100", memory_bytes=8 * 10**9)
    assert device.memory_bytes < needed < 2 * device.memory_bytes
    cluster = Cluster(
        tuple(Device(f"node{n // 2}", "A100", memory_bytes=8 * 10**9) for n in range(8)),
        inside=Link(5e-6, 200e9),
        outside=Link(2e-5, 12.5e9),
    )
    made = make(profile, cluster, PlanRequest(batch_samples=16))
    _, best, _ = made
    depth = max(map(len, best.ranks))
    assert depth >= 2
    text = report(made, cluster)
    assert f"PipeShift plan: {NUM_LAYERS} layers" in text
    _, why = " ".join(text.split()).split("before tensors are swapped: ")
    why = why.split(" samples per second, by")[0]
    tried = re.findall(r"(\d+) stages?( \(chosen\))? ([\d.]+), ([^;]+)", why)
    rates = {int(number): float(rate) for number, _, rate, _ in tried}
    assert [int(number) for number, chosen, *_ in tried if chosen] == [depth]
    assert len(rates) > 1, "other depths were tried, too"
    assert rates[depth] == max(rates.values())
    assert all(limit.strip() for *_, limit in tried)
    assert "1 stage: does not fit in memory" in why


@pytest.mark.parametrize("seed", [5, 6, 11])
def test_what_is_said_of_a_depth_comes_from_the_model_that_chooses(seed: int) -> None:
    """For four stages, the closed form has 10 to 18 % less than the simulator."""
    model, cluster, request = unlike(seed, num_ranks=4, num_layers=8)
    best = arrange(model, cluster, request)
    rates = {tried.num_stages: tried.samples_per_second for tried in best.tried}
    deepest = arrange(model, cluster, replace(request, virtual_machines=1))
    assert rates[4] == pytest.approx(deepest.samples_per_second, rel=0.05)
    assert max(rates.values()) == best.samples_per_second
