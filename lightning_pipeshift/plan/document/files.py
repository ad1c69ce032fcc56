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

A device without a ``kind`` is of the one that the profile has measured. Ranks are counted in the
order of the devices. Numbers without a unit are bytes, bytes per second
and seconds. ``host_memory`` is the part of its host's memory that each of the devices may take for
tensors that do not fit its own, and ``host_bandwidth`` the bandwidth there and back. Where the
processor makes these copies, each takes ``copy_time``, and ``copy_time_per_byte`` for each byte,
from the compute. A field that a link in ``between`` omits has the value that it has without that
entry.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import yaml  # type: ignore[import-untyped]
from pydantic import PlainValidator

from lightning_pipeshift.documents import (
    Document,
    Entry,
    Number,
    Text,
    Whole,
    as_json,
    check,
    read_document,
    refusal,
    shown,
)
from lightning_pipeshift.errors import PlanError, some_of
from lightning_pipeshift.files import write_text
from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import (
    KindProfile,
    LayerProfile,
    Profile,
    SharedWeights,
)
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
        return _cluster(_CLUSTER.read(value))
    except PlanError as error:
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


def _quantity(units: Mapping[str, Decimal], most: float = sys.float_info.max) -> PlainValidator:
    """Metadata of a field's type: a number at least 0, with or without a unit, becomes a float in
    the base unit.
    """
    base, *others = units
    allowed = f"a number at least 0, in {base} or with a unit: {', '.join(others)}"

    def read(value: object) -> float:
        found = math.nan
        if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
            number, unit = match.groups()
            if not unit or unit in units:
                found = float(Decimal(number) * units.get(unit, 1))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):
                found = float(value)
        if not 0 <= found <= most:  # false for NaN too
            raise refusal(allowed)
        return found

    return PlainValidator(read)


_Name = Annotated[Text, check(bool, "a text that is not empty")]
_Count = Annotated[Whole, check(lambda n: n >= 1, "at least 1; omit devices that do not exist")]
_Speed = Annotated[
    Number,
    check(lambda n: 0 < n < math.inf, "a number above 0; omit a device that computes nothing"),
]
_Bytes = Annotated[float, _quantity(_BYTES)]
_Bandwidth = Annotated[float, _quantity(_BYTES_PER_SECOND)]
_LinkBandwidth = Annotated[
    float,
    # A number may be infinite here: a link that takes no time is saved in this way.
    _quantity(_BYTES_PER_SECOND, most=math.inf),
    check(bool, "above 0; write a very small one for a link that is down"),
]
_Latency = Annotated[float, _quantity(_SECONDS)]


@dataclass(frozen=True)
class _DevicesEntry:
    """Equal devices: ``count`` on the host, or on each of ``hosts`` hosts with numbered names."""

    host: _Name
    kind: Text = ""
    hosts: _Count | None = None
    count: _Count = 1
    speed: _Speed = 1.0
    memory: _Bytes = 0.0
    free: _Bytes = 0.0
    host_memory: _Bytes = 0.0
    host_bandwidth: _Bandwidth = 0.0
    copy_time: _Latency = 0.0
    copy_time_per_byte: _Latency = 0.0

    def __post_init__(self) -> None:
        if 0 < self.memory < self.free:
            raise PlanError(
                f"field 'free' is {self.free:.0f} bytes; it must be at most the field 'memory',"
                f" {self.memory:.0f} bytes"
            )
        if bool(self.host_memory) != bool(self.host_bandwidth):
            one, other = ("host_memory", "host_bandwidth")[:: 1 if self.host_memory else -1]
            raise PlanError(
                f"field {one!r} is {getattr(self, one):.0f}; it must be given together with"
                f" {other!r}, both above 0, or not at all"
            )

    @property
    def num_devices(self) -> int:
        return (self.hosts or 1) * self.count

    def devices(self) -> list[Device]:
        """The devices, in the order of their ranks."""
        names = [f"{self.host}{n}" for n in range(self.hosts)] if self.hosts else [self.host]
        return [
            Device(
                host=name,
                kind=self.kind,
                speed=self.speed,
                memory_bytes=round(self.memory),
                free_bytes=round(self.free),
                host_bytes=round(self.host_memory),
                host_bandwidth=self.host_bandwidth,
                copy_seconds=self.copy_time,
                copy_seconds_per_byte=self.copy_time_per_byte,
            )
            for name in names
            for _ in range(self.count)
        ]


@dataclass(frozen=True, kw_only=True)
class _LinkEntry:
    """The properties of a link that are given. One that is omitted keeps its value."""

    latency: _Latency | None = None
    bandwidth: _LinkBandwidth | None = None

    def link(self, otherwise: Link) -> Link:
        """The link that it describes, which is ``otherwise`` without it."""
        return Link(
            otherwise.latency_seconds if self.latency is None else self.latency,
            otherwise.bandwidth if self.bandwidth is None else self.bandwidth,
        )


@dataclass(frozen=True, kw_only=True)
class _BetweenEntry(_LinkEntry):
    """A link between two hosts or two ranks."""

    hosts: tuple[Text, ...] | None = None
    ranks: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        if (self.hosts is None) == (self.ranks is None):
            found = "neither 'hosts' nor" if self.hosts is None else "both 'hosts' and"
            raise PlanError(f"it has {found} 'ranks'; it must have one of the two fields")
        if self.latency is None and self.bandwidth is None:
            raise PlanError(
                "it has neither 'latency' nor 'bandwidth'; it must have at least one of the two"
                " fields"
            )


@dataclass(frozen=True)
class _LinksEntry:
    inside: _LinkEntry = _LinkEntry()
    outside: _LinkEntry = _LinkEntry()
    between: tuple[_BetweenEntry, ...] = ()


@dataclass(frozen=True)
class _ClusterEntry:
    devices: tuple[_DevicesEntry, ...]
    links: _LinksEntry = _LinksEntry()

    def __post_init__(self) -> None:
        count = sum(entry.num_devices for entry in self.devices)
        if not 1 <= count <= MOST_DEVICES:
            raise PlanError(
                f"field 'devices' has {count:,} devices; a cluster has at least 1 device, and at"
                f" most {MOST_DEVICES:,} devices in all"
            )


_CLUSTER: Final = Document(_ClusterEntry, "the cluster")


def _cluster(entry: _ClusterEntry) -> Cluster:
    devices = tuple(device for entries in entry.devices for device in entries.devices())
    hosts = dict.fromkeys(device.host for device in devices)
    between = entry.links.between
    of_hosts = _by_ends(
        between,
        "hosts",
        lambda ends: len(ends) == 2 and hosts.keys() >= {*ends},
        f"a list of 2 hosts that have devices: {some_of(list(hosts))}",
    )
    of_ranks = _by_ends(
        between,
        "ranks",
        lambda ends: len(ends) == len({*ends}) == 2 and min(ends) >= 0 and max(ends) < len(devices),
        f"a list of 2 different ranks, each from 0 to {len(devices) - 1}",
    )
    inside, outside = entry.links.inside.link(FREE), entry.links.outside.link(FREE)
    without_ranks = Cluster(
        devices,
        inside,
        outside,
        {(a, b): link.link(inside if a == b else outside) for (a, b), link in of_hosts.items()},
    )
    # A link between two ranks takes missing fields from that of their hosts.
    ranks = {
        (min(ends), max(ends)): link.link(without_ranks.link(*ends))
        for ends, link in of_ranks.items()
    }
    return replace(without_ranks, ranks=ranks)


def _by_ends(
    entries: Sequence[_BetweenEntry],
    field: str,
    is_pair: Callable[[Sequence[Any]], bool],
    allowed: str,
) -> dict[tuple[Any, Any], _BetweenEntry]:
    """The links whose ends are given in a field, by these ends."""
    found: dict[tuple[Any, Any], _BetweenEntry] = {}
    for index, entry in enumerate(entries):
        if (ends := getattr(entry, field)) is None:
            continue
        if not is_pair(ends) or {ends, ends[::-1]} & found.keys():
            instead = "a pair that no other entry names" if is_pair(ends) else allowed
            raise PlanError(
                f"the cluster: links.between[{index}]: field {field!r} is {shown(ends)}; it must be"
                f" {instead}"
            )
        found[ends] = entry
    return found


def _device_entry(device: Device, count: int) -> dict[str, Any]:
    """The fields that differ from an entry's defaults."""
    entry: dict[str, Any] = {"host": device.host}
    if device.kind:
        entry["kind"] = device.kind
    if count > 1:
        entry["count"] = count
    if device.speed != 1:
        entry["speed"] = float(device.speed)
    for name, number in (
        ("memory", device.memory_bytes),
        ("free", device.free_bytes),
        ("host_memory", device.host_bytes if device.host_bandwidth else 0),
        ("host_bandwidth", float(device.host_bandwidth) if device.host_bytes else 0.0),
        ("copy_time", device.copy_seconds),
        ("copy_time_per_byte", device.copy_seconds_per_byte),
    ):
        if number:
            entry[name] = number
    return entry


def _link_entry(link: Link) -> dict[str, Any]:
    return {"latency": float(link.latency_seconds), "bandwidth": float(link.bandwidth)}


# --- a profile ---

_Seconds = Annotated[Number, check(lambda s: 0 <= s < math.inf, "finite and at least 0")]
_FromOne = Annotated[Whole, check(lambda n: n >= 1, "at least 1")]
_WHERE_THERE: Final = (
    "tensors",
    "joins_next",
    "waiting_bytes",
    "working_bytes",
    "buffer_bytes",
    "update_bytes",
)
"""The fields of a layer that are written where there is something to write."""
_Tensor = Annotated[SavedTensor, Entry(("spares",))]
_Layer = Annotated[LayerProfile, Entry(_WHERE_THERE, tensors=tuple[_Tensor, ...])]
_PROFILE: Final = Document(
    Profile,
    "the profile",
    "measure the profile again",
    PROFILE_VERSION,
    optional=(
        "num_accumulated",
        "num_gradients",
        "shared",
        "overlaps_updates",
        "state_stays",
        "batch_bytes",
        "updates_at_once",
        "batch_samples",
    ),
    layers=tuple[_Layer, ...],
    kinds=dict[str, Annotated[KindProfile, Entry(())]],
    samples=Annotated[Number, check(lambda n: 0 < n < math.inf, "finite and above 0")],
    microbatches=Annotated[
        Whole, check(lambda n: 1 <= n <= MOST_MICROBATCHES, f"1 to {MOST_MICROBATCHES}")
    ],
    step_seconds=_Seconds,
    optimizer_seconds_per_byte=_Seconds,
    num_accumulated=_FromOne,
    num_gradients=_FromOne,
    shared=tuple[Annotated[SharedWeights, Entry(("num_bytes", "is_trained", "everywhere"))], ...],
    batch_bytes=Annotated[Whole, check(lambda n: n >= 0, "at least 0")],
    batch_samples=Annotated[Number, check(lambda n: 0 <= n < math.inf, "finite and at least 0")],
)


def load_profile(path: str | Path) -> Profile:
    """Reads a profile that :func:`save_profile` has written.

    Raises PlanError, naming the file and the field, for a file that is damaged or of another
    version."""
    return _PROFILE.load(path)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile for :func:`load_profile`, atomically; one layer per line."""
    document = {
        "version": PROFILE_VERSION,
        "samples": profile.samples,
        "microbatches": profile.microbatches,
        "step_seconds": profile.step_seconds,
        "optimizer_seconds_per_byte": profile.optimizer_seconds_per_byte,
        "num_accumulated": profile.num_accumulated,
        "num_gradients": profile.num_gradients,
        "shared": [asdict(each) for each in profile.shared],
        "overlaps_updates": profile.overlaps_updates,
        "state_stays": profile.state_stays,
        "batch_bytes": profile.batch_bytes,
        "updates_at_once": profile.updates_at_once,
        "batch_samples": profile.batch_samples,
        "layers": [_written(layer) for layer in profile.layers],
        "kinds": {kind: asdict(times) for kind, times in profile.kinds.items()},
    }
    write_text(path, as_json(document, ("layers", "kinds")))


def _written(layer: LayerProfile) -> dict[str, Any]:
    found = asdict(layer)
    for tensor in found["tensors"]:
        if not tensor["spares"]:
            del tensor["spares"]
    for name in _WHERE_THERE:
        if not found[name]:
            del found[name]
    return found
