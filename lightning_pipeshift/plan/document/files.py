"""The two documents that describe machines and models, on disk.

A plan can be made for machines that aren't available: the user writes the cluster by hand, as YAML
with units, and takes the model's profile, as JSON, from a run that measured it.

A cluster::

    devices:
      - {host: lab1, kind: rtx4090, count: 2, memory: 24GB, host_memory: 30GB,
         host_bandwidth: 20 GB/s}
      - {host: lab2, kind: rtx3090, speed: 0.5, memory: 24 GB, free: 20GB}
      - {hosts: 128, host: node, kind: a100, count: 8, memory: 80GB}  # node0 ... node127, 8 on each
    links:
      inside: {latency: 5us, bandwidth: 200 Gbit/s}
      outside: {latency: 50us, bandwidth: 1 Gbit/s}
      between:
        - {hosts: [lab1, lab2], bandwidth: 200 Mbit/s, latency: 1ms}
        - {ranks: [0, 3], bandwidth: 50 Mbit/s}

Ranks are counted in the order of the devices. Numbers without a unit are bytes, bytes per second
and seconds. ``host_memory`` is the part of its host's memory that each of the devices may take for
tensors that do not fit its own, and ``host_bandwidth`` the bandwidth there and back. A field that a
link in ``between`` omits has the value that it has without that entry.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Set
from dataclasses import asdict, fields
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.files import parse_json
from lightning_pipeshift.plan.document.validation import Fields, read_document, shown, write_text
from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.plan.schedule.schedules import MOST_MICROBATCHES

PROFILE_VERSION: Final = 1
"""Increased when an older version of the package can no longer read the files of this one."""

MOST_DEVICES: Final = 10_000
"""The largest number of devices in a cluster: each rank is connected with every other."""

# Of YAML; a cluster of that many devices needs no more.
_MOST_YAML_BYTES: Final = 1 << 20
_MOST_ENTRIES: Final = 100_000
_MOST_DEPTH: Final = 20

# The base unit first. Decimals, so that 5us is the same number as 5e-6.
_BYTES: Final = {
    **{f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate(("", *"kMGT"))},
    **{f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate("KMG", 1)},
}
_BYTES_PER_SECOND: Final = {
    **{f"{prefix}B/s": Decimal(1000) ** power for power, prefix in enumerate(("", *"kMG"))},
    **{f"{prefix}bit/s": Decimal(1000) ** power / 8 for power, prefix in enumerate(("", *"kMG"))},
}
_SECONDS: Final = {
    "s": Decimal(1),
    "ms": Decimal(10) ** -3,
    "us": Decimal(10) ** -6,
    "\u00b5s": Decimal(10) ** -6,  # the micro sign
    "\u03bcs": Decimal(10) ** -6,  # the Greek letter
    "ns": Decimal(10) ** -9,
}
_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\S*)\s*")

# The C loader and dumper take a tenth of the time, and not every PyYAML has them.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


# --- a cluster ---


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster that a user or :func:`save_cluster` has written.

    Raises PlanError, naming the file and the field."""
    text = read_document(path, "the cluster", _MOST_YAML_BYTES)
    try:
        _require_limits(text)
        value = yaml.load(text, Loader=_Loader)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: for example, the 31st of February
        raise PlanError(f"{path}: the cluster is not a YAML document: {error}") from error
    try:
        return _cluster(value)
    except (PlanError, OverflowError) as error:  # OverflowError: a number of 400 digits
        raise PlanError(f"{path}: {error}") from error


def _require_limits(text: str) -> None:
    """Refuses YAML that is short on disk and endless in memory: entries that contain themselves,
    and nested references.

    Raises:
        PlanError: the text is such a document, or has too many entries.
    """
    sizes: dict[str, int] = {}
    # For each open list or object: its anchor, and its number of entries, counted again at each
    # reference.
    open_ones: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=_Loader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((anchor, 1))
            if len(open_ones) > _MOST_DEPTH:
                raise PlanError(f"the cluster has more than {_MOST_DEPTH} nested lists")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_ones.pop()
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == other for other, _ in open_ones):
                raise PlanError(f"the cluster: the entry &{anchor} contains itself")
            size = sizes.get(str(anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        outer, count = open_ones.pop()
        if count + size > _MOST_ENTRIES:
            raise PlanError(f"the cluster has more than {_MOST_ENTRIES:,} entries")
        open_ones.append((outer, count + size))


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes a cluster for :func:`load_cluster`, atomically; consecutive equal devices on one
    line.
    """
    document: dict[str, Any] = {
        "devices": [
            _device_entry(device, len(list(alike))) for device, alike in groupby(cluster.devices)
        ]
    }
    links: dict[str, Any] = {
        name: _link_entry(link)
        for name, link in (("inside", cluster.inside), ("outside", cluster.outside))
        if link != FREE
    }
    between = [
        *({"hosts": list(pair), **_link_entry(link)} for pair, link in cluster.hosts.items()),
        *({"ranks": list(ends), **_link_entry(link)} for ends, link in cluster.ranks.items()),
    ]
    if between:
        links["between"] = between
    if links:
        document["links"] = links
    text = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=1_000_000,  # one line per entry, however long
    )
    write_text(path, text)


def _cluster(value: object) -> Cluster:
    document = Fields(value, "the cluster", ["devices"], ["links"], instead="")
    devices: list[Device] = []
    for index, item in enumerate(document.items("devices")):
        devices += _devices(item, f"the cluster: devices[{index}]", MOST_DEVICES - len(devices))
    if not devices:
        document.fail("devices", "a list of at least 1 device")
    if "links" not in document:
        return Cluster(tuple(devices))

    where = "the cluster: links"
    links = Fields(document.value("links"), where, [], ["inside", "outside", "between"])
    inside, outside = (
        _link(links.value(name), f"{where}.{name}") if name in links else FREE
        for name in ("inside", "outside")
    )
    between = links.items("between") if "between" in links else []
    entries = [_between(item, f"{where}.between[{i}]") for i, item in enumerate(between)]

    # Hosts first: a link between two ranks takes missing fields from that of their hosts.
    of_hosts: dict[tuple[str, str], Link] = {}
    known = dict.fromkeys(device.host for device in devices).keys()
    for entry in entries:
        if "hosts" in entry:
            a, b = _two_hosts(entry, known)
            if (a, b) in of_hosts or (b, a) in of_hosts:
                entry.fail("hosts", "a pair that no other entry names")
            of_hosts[a, b] = _link_of(entry, inside if a == b else outside)
    without_ranks = Cluster(tuple(devices), inside, outside, of_hosts)
    of_ranks: dict[tuple[int, int], Link] = {}
    for entry in entries:
        if "ranks" in entry:
            ends = _two_ranks(entry, len(devices))
            if ends in of_ranks:
                entry.fail("ranks", "a pair that no other entry names")
            of_ranks[ends] = _link_of(entry, without_ranks.link(*ends))
    return Cluster(tuple(devices), inside, outside, of_hosts, of_ranks)


def _devices(item: object, where: str, most: int) -> list[Device]:
    """The devices of one entry: at most ``most``."""
    optional = ("hosts", "count", "speed", "memory", "free", "host_memory", "host_bandwidth")
    entry = Fields(item, where, ["host", "kind"], optional, instead="")
    host, kind = _name(entry, "host"), _name(entry, "kind")
    num_hosts = _count(entry, "hosts") if "hosts" in entry else 1
    count = _count(entry, "count") if "count" in entry else 1
    if num_hosts * count > most:
        name = next((name for name in ("count", "hosts") if name in entry), "host")
        entry.fail(name, f"omitted or less: a cluster has at most {MOST_DEVICES:,} devices in all")
    hosts = [f"{host}{n}" for n in range(num_hosts)] if "hosts" in entry else [host]
    speed = entry.number("speed") if "speed" in entry else 1.0
    if not (math.isfinite(speed) and speed > 0):
        entry.fail("speed", "a number above 0; omit a device that computes nothing")
    memory = round(_quantity(entry, "memory", _BYTES)) if "memory" in entry else 0
    free = round(_quantity(entry, "free", _BYTES)) if "free" in entry else 0
    if 0 < memory < free:
        entry.fail("free", f"at most the field 'memory', {memory} bytes")
    on_host = round(_quantity(entry, "host_memory", _BYTES)) if "host_memory" in entry else 0
    rate = 0.0
    if "host_bandwidth" in entry:
        rate = _quantity(entry, "host_bandwidth", _BYTES_PER_SECOND)
    if bool(on_host) != bool(rate):
        one, other = ("host_memory", "host_bandwidth")[:: 1 if on_host else -1]
        entry.fail(one, f"given together with {other!r}, both above 0, or not at all")
    return [
        Device(name, kind, speed, memory, free, on_host, rate)
        for name in hosts
        for _ in range(count)
    ]


def _between(item: object, where: str) -> Fields:
    """An entry of the links between hosts or ranks."""
    entry = Fields(item, where, [], ["hosts", "ranks", "latency", "bandwidth"])
    if ("hosts" in entry) == ("ranks" in entry):
        found = "both 'hosts' and 'ranks'" if "hosts" in entry else "neither 'hosts' nor 'ranks'"
        raise PlanError(f"{where} has {found}; it must have one of the two fields")
    if "latency" not in entry and "bandwidth" not in entry:
        raise PlanError(
            f"{where} has neither 'latency' nor 'bandwidth'; it must have at least one of the two"
            " fields"
        )
    return entry


def _two_hosts(entry: Fields, known: Set[str]) -> tuple[str, str]:
    hosts = [host for host in entry.items("hosts") if isinstance(host, str) and host in known]
    if len(entry.items("hosts")) != 2 or len(hosts) != 2:
        entry.fail("hosts", f"a list of 2 hosts that have devices: {some_of(list(known))}")
    return hosts[0], hosts[1]


def _two_ranks(entry: Fields, num_ranks: int) -> tuple[int, int]:
    # In Python, YAML's true is an int.
    ranks = [rank for rank in entry.items("ranks") if type(rank) is int and 0 <= rank < num_ranks]
    if len(entry.items("ranks")) != 2 or len(set(ranks)) != 2:
        entry.fail("ranks", f"a list of 2 different ranks, each from 0 to {num_ranks - 1}")
    return min(ranks), max(ranks)


def _link(item: object, where: str) -> Link:
    return _link_of(Fields(item, where, [], ["latency", "bandwidth"]), FREE)


def _link_of(entry: Fields, otherwise: Link) -> Link:
    """The link that an entry describes; missing fields are taken from ``otherwise``."""
    latency, bandwidth = otherwise.latency_seconds, otherwise.bandwidth
    if "latency" in entry:
        latency = _quantity(entry, "latency", _SECONDS)
    if "bandwidth" in entry:
        # A number may be infinite here: a link that takes no time is saved in this way.
        bandwidth = _quantity(entry, "bandwidth", _BYTES_PER_SECOND, most=math.inf)
        if bandwidth == 0:
            entry.fail("bandwidth", "above 0; write a very small one for a link that is down")
    return Link(latency, bandwidth)


def _name(entry: Fields, name: str) -> str:
    # YAML reads 4090 as a number.
    if not (isinstance(entry.value(name), str) and entry.value(name)):
        entry.fail(name, 'a text that is not empty; a number goes in quotes, as "4090"')
    return entry.text(name)


def _count(entry: Fields, name: str) -> int:
    count = entry.integer(name)
    if count < 1:
        entry.fail(name, "at least 1; omit devices that do not exist")
    return count


def _quantity(
    entry: Fields, name: str, units: Mapping[str, Decimal], most: float = sys.float_info.max
) -> float:
    """A number at least 0 and at most ``most``, with or without a unit, in the base unit."""
    value, found = entry.value(name), math.nan
    if type(value) in (int, float):
        found = entry.number(name)
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = match.groups()
        if not unit or unit in units:
            found = float(Decimal(number) * units.get(unit, 1))
    if not 0 <= found <= most:  # false for NaN too
        base, *others = units
        entry.fail(name, f"a number at least 0, in {base} or with a unit: {', '.join(others)}")
    return found


def _device_entry(device: Device, count: int) -> dict[str, Any]:
    """The fields that differ from an entry's defaults."""
    entry: dict[str, Any] = {"host": device.host, "kind": device.kind}
    if count > 1:
        entry["count"] = count
    if device.speed != 1:
        entry["speed"] = float(device.speed)
    for name, number in (
        ("memory", device.memory_bytes),
        ("free", device.free_bytes),
        ("host_memory", device.host_bytes if device.host_bandwidth else 0),
        ("host_bandwidth", float(device.host_bandwidth) if device.host_bytes else 0.0),
    ):
        if number:
            entry[name] = number
    return entry


def _link_entry(link: Link) -> dict[str, Any]:
    return {"latency": float(link.latency_seconds), "bandwidth": float(link.bandwidth)}


# --- a profile ---

_MEASURE: Final = "or measure the profile again"


def load_profile(path: str | Path) -> Profile:
    """Reads a profile that :func:`save_profile` has written.

    Raises PlanError, naming the file and the field, for a file that is damaged or of another
    version."""
    text = read_document(path, "the profile")
    try:
        value = parse_json(text)
    except ValueError as error:
        raise PlanError(
            f"{path}: the profile is not a JSON document: {error}; take an undamaged copy, or "
            "measure it again"
        ) from error
    try:
        return _profile(value)
    except (PlanError, OverflowError) as error:  # OverflowError: a number of 400 digits
        raise PlanError(f"{path}: {error}") from error


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile for :func:`load_profile`, atomically; one layer per line."""
    head = {
        "version": PROFILE_VERSION,
        "samples": profile.samples,
        "microbatches": profile.microbatches,
        "step_seconds": profile.step_seconds,
        "optimizer_seconds_per_byte": profile.optimizer_seconds_per_byte,
    }
    layers = [json.dumps(_written(layer)) for layer in profile.layers]
    kinds = [f"{json.dumps(kind)}: {json.dumps(asdict(of))}" for kind, of in profile.kinds.items()]
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    lines += ['  "layers": [', _listed(layers), "  ],", '  "kinds": {', _listed(kinds), "  }"]
    write_text(path, "\n".join(["{", *filter(None, lines), "}"]) + "\n")


def _written(layer: LayerProfile) -> dict[str, Any]:
    found = asdict(layer)
    if not layer.tensors:
        del found["tensors"]
    if not layer.joins_next:
        del found["joins_next"]
    return found


def _listed(items: list[str]) -> str:
    return ",\n".join(f"    {item}" for item in items)


def _profile(value: object) -> Profile:
    # Before the other fields: those of another version may have other names.
    if isinstance(value, dict) and value.get("version", PROFILE_VERSION) != PROFILE_VERSION:
        raise PlanError(
            f"the profile: field 'version' is {shown(value['version'])}; this PipeShift reads"
            f" version {PROFILE_VERSION}: measure the profile again, or use the version that"
            " measured it"
        )
    known = ["version", *(field.name for field in fields(Profile))]
    document = Fields(value, "the profile", known, instead=_MEASURE)
    samples, microbatches = document.number("samples"), document.integer("microbatches")
    if not (math.isfinite(samples) and samples > 0):
        document.fail("samples", "finite and above 0")
    if not 1 <= microbatches <= MOST_MICROBATCHES:
        document.fail("microbatches", f"1 to {MOST_MICROBATCHES}")
    return Profile(
        layers=tuple(
            _layer(item, f"the profile: layers[{index}]")
            for index, item in enumerate(document.items("layers"))
        ),
        kinds={
            kind: _times(item, f"the profile: kinds[{kind!r}]")
            for kind, item in document.entries("kinds").items()
        },
        samples=samples,
        microbatches=microbatches,
        step_seconds=_at_least_0(document, "step_seconds"),
        optimizer_seconds_per_byte=_at_least_0(document, "optimizer_seconds_per_byte"),
    )


def _layer(item: object, where: str) -> LayerProfile:
    optional = ["tensors", "joins_next"]
    names = [field.name for field in fields(LayerProfile) if field.name not in optional]
    entry = Fields(item, where, names, optional, instead=_MEASURE)
    counts = {name: entry.integer(name) for name in names if name != "name"}
    tensors = entry.items("tensors") if "tensors" in entry else []
    joins_next = "joins_next" in entry and entry.value("joins_next")
    if not isinstance(joins_next, bool):
        entry.fail("joins_next", "true or false")
    return LayerProfile(
        name=entry.text("name"),
        joins_next=joins_next,
        **counts,
        tensors=tuple(
            _tensor(tensor, f"{where}: tensors[{index}]") for index, tensor in enumerate(tensors)
        ),
    )


def _tensor(item: object, where: str) -> SavedTensor:
    entry = Fields(item, where, [field.name for field in fields(SavedTensor)], instead=_MEASURE)
    return SavedTensor(
        number=entry.integer("number"),
        num_bytes=entry.integer("num_bytes"),
        shape=entry.integers("shape"),
        dtype=entry.text("dtype"),
        maker=entry.text("maker"),
    )


def _times(item: object, where: str) -> KindProfile:
    names = [field.name for field in fields(KindProfile)]
    entry = Fields(item, where, names, instead=_MEASURE)
    forward, backward = entry.numbers(names[0]), entry.numbers(names[1])
    others = [_at_least_0(entry, name) for name in names[2:]]
    try:
        return KindProfile(forward, backward, *others)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def _at_least_0(entry: Fields, name: str) -> float:
    value = entry.number(name)
    if not (math.isfinite(value) and value >= 0):
        entry.fail(name, "finite and at least 0")
    return value
