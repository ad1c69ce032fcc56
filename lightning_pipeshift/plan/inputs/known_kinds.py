"""Kinds of devices that a profile has not measured.

A profile has the kinds of the machines on which it was measured. A cluster may leave a kind out: it
is then the measured one. A GPU of another kind is estimated from a measured one by the ratio of
their peak rates of dense FP16 matrix products with FP32 accumulation, in 10^12 operations per
second. The rates and their sources are in ``gpus.csv``. Layers that wait for memory rather than for
arithmetic differ by less than this ratio, so measure where you can.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType

from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.profile import KindProfile, Profile, scaled


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row of ``gpus.csv``.

    Args:
        kind: its usual name.
        names: other names, torch's (``torch.cuda.get_device_name``) among them.
        teraflops: its peak rate, see above.
        source: of the rate.
    """

    kind: str
    names: tuple[str, ...]
    teraflops: float
    source: str


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """The GPUs whose rates are known, by their names without case, spaces and hyphens."""
    table = resources.files("lightning_pipeshift.plan.inputs").joinpath("gpus.csv")
    found = {}
    for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        names = tuple(row["names"].split(";"))
        gpu = Gpu(row["kind"], names, float(row["teraflops"]), row["source"])
        found.update({_key(name): gpu for name in (gpu.kind, *names)})
    return MappingProxyType(found)


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def completed(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster, list[str]]:
    """The profile with estimates for all kinds of the cluster, and the cluster with a kind for
    each device; and a sentence for each estimate.

    Raises PlanError for a kind that was not measured and cannot be estimated, or for a device
    without a kind where several were measured."""
    if any(not device.kind for device in cluster.devices):
        if len(profile.kinds) != 1:
            raise PlanError(
                "the cluster has devices without a `kind`, and the profile has measured"
                f" {some_of(list(profile.kinds))}. Give each device one of these"
            )
        (only,) = profile.kinds
        devices = tuple(replace(one, kind=one.kind or only) for one in cluster.devices)
        cluster = replace(cluster, devices=devices)
    missing = [kind for kind in cluster.kinds if kind not in profile.kinds]
    estimates = {kind: _estimate(profile, kind) for kind in missing}
    kinds = {**profile.kinds, **{kind: times for kind, (times, _) in estimates.items()}}
    return replace(profile, kinds=kinds), cluster, [text for _, text in estimates.values()]


def _estimate(profile: Profile, kind: str) -> tuple[KindProfile, str]:
    known = gpus().get(_key(kind))
    found = ((kind, gpus().get(_key(kind))) for kind in profile.kinds)
    measured = next(((kind, gpu) for kind, gpu in found if gpu is not None), None)
    if known is None or measured is None:
        missing = (
            f"{kind!r} is not in the table of known GPUs:"
            f" {some_of(sorted({gpu.kind for gpu in gpus().values()}))}"
            if known is None
            else "none of the measured kinds is a known GPU"
        )
        have = some_of([repr(kind) for kind in profile.kinds])
        raise PlanError(
            f"the profile has no measurements of the kind {kind!r}, and they cannot be estimated:"
            f" {missing}. Omit `kind` if one kind was measured, or name a measured kind ({have})"
            " and give the device a `speed` relative to that"
        )
    name, gpu = measured
    factor = gpu.teraflops / known.teraflops
    text = (
        f"{kind} was not measured: estimated from {name}, which takes {1 / factor:.2f} times as"
        f" long by the rates of their data sheets ({gpu.teraflops:g} and {known.teraflops:g}"
        " TFLOPS). Give the device a measured kind and a `speed` if you know better."
    )
    return scaled(profile.kinds[name], factor), text
