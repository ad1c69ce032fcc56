"""Plan for machines that you do not have, with a model that was never measured.

    python examples/plan_a_cluster.py     # two workstations: how slow a network is too slow?
    python examples/plan_a_cluster.py --hosts 128 --devices 8 --layers 96 --width 12288

The profile is calculated: a GPT's layers take as long as their matrix products at a part of the
GPU's peak rate. `pipeshift plan --config ...` measures a real one, and `pipeshift plan --cluster
... --profile ...` does with files what is done here in Python.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_pipeshift.commands.planning import make, report
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.known_kinds import gpus
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.request import PlanRequest

UTILISATION = 0.35
"""The part of its peak rate that a GPU reaches in training."""

MEGABITS = (100, 300, 1_000, 2_500, 10_000, 40_000)


def profile_of_gpt(kinds: dict[str, str], layers: int, width: int, length: int) -> Profile:
    """A GPT trained in bf16-mixed with Adam, one sequence in a microbatch.

    Args:
        kinds: the cluster's kinds, and their names in the table of known GPUs.
        layers: how many blocks, of 12 width^2 parameters each (Kaplan et al. 2020, section 2.1).
        width: of the residual stream.
        length: of a sequence, in tokens.
    """
    parameters = 12 * width**2
    # Two operations for each parameter and token, and attention's two products.
    operations = 2 * parameters * length + 4 * length**2 * width
    payload = 2 * length * width
    block = LayerProfile(
        "block",
        parameter_bytes=4 * parameters,
        gradient_bytes=4 * parameters,
        optimizer_bytes=8 * parameters,
        payload_bytes=payload,
        payload_gradient_bytes=payload,
        # Korthikanti et al. 2022, section 4.1, with attention that saves no scores.
        saved_bytes=34 * length * width,
        input_bytes=payload,
    )
    names = [replace(block, name=f"blocks.{n}") for n in range(layers)]

    def times(known: str) -> KindProfile:
        seconds = operations / (UTILISATION * gpus()[known].teraflops * 1e12)
        return KindProfile((seconds,) * layers, (2 * seconds,) * layers)

    measured = {kind: times(known) for kind, known in kinds.items()}
    return Profile(tuple(names), measured, samples=1.0, microbatches=16)


def two_workstations(megabits: float) -> Cluster:
    """An RTX 4090 with 24 GB and an RTX 3070 with 8 GB, on a network."""
    devices = (
        Device("one", "RTX 4090", memory_bytes=24 * 10**9),
        Device("two", "RTX 3070", memory_bytes=8 * 10**9),
    )
    return Cluster(devices, outside=Link(2e-4, megabits * 1e6 / 8))


def step_seconds(megabits: float, batch_size: int = 16) -> tuple[float, tuple[int, ...]]:
    """A step of a GPT that neither workstation holds alone (1.6 billion parameters, 16 bytes each),
    by the planner, and the blocks of each stage.
    """
    profile = profile_of_gpt({"RTX 4090": "rtx4090", "RTX 3070": "rtx3070"}, 36, 1920, 1024)
    request = PlanRequest(virtual_machines=1, batch_samples=batch_size)
    plan, best, _ = make(profile, two_workstations(megabits), request)
    return best.prediction.step_seconds, plan.placement.counts[0]


def main(
    hosts: int = 0,
    devices: int = 1,
    layers: int = 24,
    width: int = 2048,
    batch_size: int = 64,
) -> None:
    """Plan for two workstations and several networks, or for hosts of equal GPUs.

    Args:
        hosts: how many hosts of A100 GPUs with 80 GB; 0: the two workstations.
        devices: how many on each.
        layers: of the GPT.
        width: of the GPT.
        batch_size: samples of a virtual machine's batch.
    """
    if not hosts:
        print("blocks of each stage; the planner chooses which GPU is the first one")
        for megabits in MEGABITS:
            seconds, counts = step_seconds(megabits)
            print(f"{megabits:>6} Mbit/s   a step takes {seconds:5.2f} s   blocks {counts}")
        return
    device = Device("", "A100", memory_bytes=80 * 10**9)
    cluster = Cluster(
        tuple(replace(device, host=f"node{n}") for n in range(hosts) for _ in range(devices)),
        inside=Link(5e-6, 200e9),
        outside=Link(2e-5, 12.5e9),
    )
    profile = profile_of_gpt({"A100": "a100"}, layers, width, 2048)
    print(report(make(profile, cluster, PlanRequest(batch_samples=batch_size)), cluster))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
