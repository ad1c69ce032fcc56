"""Kinds of devices that a profile has not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.known_kinds import completed, gpus
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile

TIMES = KindProfile((1.0, 2.0), (2.0, 4.0), tail_forward=0.5)


def profile_of(*kinds: str) -> Profile:
    layers = (LayerProfile("a"), LayerProfile("b"))
    return Profile(layers, dict.fromkeys(kinds, TIMES), samples=1.0, microbatches=4)


def cluster_of(*kinds: str) -> Cluster:
    return Cluster(tuple(Device("host", kind) for kind in kinds))


def test_each_known_gpu_has_a_rate_and_its_source() -> None:
    assert len(set(gpus().values())) > 10
    for gpu in gpus().values():
        assert gpu.teraflops > 0
        assert gpu.source.startswith("NVIDIA ")


def test_a_device_without_a_kind_is_of_the_measured_one() -> None:
    cluster = replace(cluster_of("", ""), devices=(Device("a", "", speed=0.5), Device("b", "x86")))
    profile, named, estimates = completed(profile_of("x86"), cluster)
    assert [device.kind for device in named.devices] == ["x86", "x86"]
    assert named.devices[0].speed == 0.5
    assert profile == profile_of("x86")
    assert not estimates


def test_a_gpu_is_estimated_from_a_measured_one_and_that_is_said() -> None:
    measured = "NVIDIA GeForce RTX 4090"
    profile, _, (said,) = completed(profile_of(measured), cluster_of(measured, "rtx3090"))
    factor = gpus()["rtx4090"].teraflops / gpus()["rtx3090"].teraflops
    assert profile.kinds[measured] == TIMES
    assert profile.kinds["rtx3090"].backward == pytest.approx((2 * factor, 4 * factor))
    assert profile.kinds["rtx3090"].tail_forward == pytest.approx(0.5 * factor)
    assert "rtx3090 was not measured: estimated from NVIDIA GeForce RTX 4090" in said


@pytest.mark.parametrize(
    ("measured", "kind", "message"),
    [
        (("RTX 4090",), "RTX 4090 Laptop", "is not in the table of known GPUs: A10"),
        (("x86_64",), "rtx4090", "none of the measured kinds is a known GPU.*'x86_64'"),
        (("x86_64", "arm"), "", "devices without a `kind`, and the profile has measured x86_64"),
    ],
)
def test_what_cannot_be_estimated_is_an_error_with_advice(
    measured: tuple[str, ...], kind: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        completed(profile_of(*measured), cluster_of(kind))
