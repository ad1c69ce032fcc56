import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.document.files import (
    load_cluster,
    load_profile,
    save_cluster,
    save_profile,
)
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor

# What the README of somebody's laboratory may say of its machines.
BY_HAND = """
devices:
  - {host: lab1, kind: rtx4090, count: 2, memory: 24GB, host_memory: 30GB, host_bandwidth: 20 GB/s}
  - {host: lab2, kind: rtx3090, speed: 0.5, memory: 24 GB, free: 20GB, copy_time: 0.1 ms,
     copy_time_per_byte: 1e-9}
  - {hosts: 128, host: node, kind: a100, count: 8, memory: 80GB}   # node0 ... node127
links:
  inside: {latency: 5us, bandwidth: 200 Gbit/s}
  outside: {latency: 50us, bandwidth: 1 Gbit/s}
  between:
    - {ranks: [3, 0], bandwidth: 50 Mbit/s}
    - {ranks: [0, 2], latency: 3ms}
    - {hosts: [lab1, lab2], bandwidth: 200 Mbit/s, latency: 1ms}
"""


def written(folder, text):
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def loaded(text, tmp_path):
    return load_cluster(written(tmp_path, text))


def test_a_cluster_written_by_hand(tmp_path):
    cluster = loaded(BY_HAND, tmp_path)
    assert cluster.num_ranks == 2 + 1 + 128 * 8
    assert cluster.devices[:4] == (
        Device("lab1", "rtx4090", 1.0, 24 * 10**9, 0, 30 * 10**9, 20e9),
        Device("lab1", "rtx4090", 1.0, 24 * 10**9, 0, 30 * 10**9, 20e9),
        Device(
            "lab2",
            "rtx3090",
            0.5,
            24 * 10**9,
            20 * 10**9,
            copy_seconds=1e-4,
            copy_seconds_per_byte=1e-9,
        ),
        Device("node0", "a100", 1.0, 80 * 10**9),
    )
    assert cluster.devices[10] == cluster.devices[3]
    assert cluster.devices[11].host == "node1"
    assert cluster.devices[-1].host == "node127"
    assert cluster.link(0, 1) == Link(5e-6, 25e9)
    assert cluster.link(3, 11) == Link(50e-6, 125e6)
    assert cluster.link(1, 2) == Link(1e-3, 25e6)


def test_a_link_is_what_it_is_otherwise_but_for_what_is_said(tmp_path):
    cluster = loaded(BY_HAND, tmp_path)
    assert cluster.link(0, 3) == Link(50e-6, 6.25e6)  # else as outside
    assert cluster.link(0, 2) == Link(3e-3, 25e6)  # else as between their hosts


def test_without_links_every_way_is_free(tmp_path):
    cluster = loaded("devices: [{host: a, kind: k}, {host: b, kind: k}]", tmp_path)
    assert cluster.link(0, 1) == FREE


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("24 GB", 24 * 10**9),
        ("1.5kB", 1500),
        ("2MB", 2 * 10**6),
        ("2TB", 2 * 10**12),
        ("3KiB", 3 * 1024),
        ("3 MiB", 3 * 1024**2),
        ("0.5GiB", 2**29),
        ("7B", 7),
        ("7", 7),
        ("8e9", 8 * 10**9),
        ("8.0e+9", 8 * 10**9),
        ("0", 0),
    ],
)
def test_units_of_memory(memory, expected, tmp_path):
    cluster = loaded(f"devices: [{{host: a, kind: k, memory: {memory}}}]", tmp_path)
    assert cluster.devices[0].memory_bytes == expected


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("bandwidth", "8 bit/s", 1.0),
        ("bandwidth", "8 kbit/s", 1e3),
        ("bandwidth", "100Mbit/s", 12.5e6),
        ("bandwidth", "2.5 Gbit/s", 312.5e6),
        ("bandwidth", "3 B/s", 3.0),
        ("bandwidth", "3 MB/s", 3e6),
        ("bandwidth", "3 GB/s", 3e9),
        ("bandwidth", "3", 3.0),
        ("bandwidth", ".inf", math.inf),
        ("latency", "2s", 2.0),
        ("latency", "2 ms", 2e-3),
        ("latency", "5us", 5e-6),
        ("latency", "5\u00b5s", 5e-6),
        ("latency", "5\u03bcs", 5e-6),
        ("latency", "100ns", 1e-7),
        ("latency", "0.25", 0.25),
        ("latency", "1e-3", 1e-3),
    ],
)
def test_units_of_links(field, text, expected, tmp_path):
    document = f"{{devices: [{{host: a, kind: k}}], links: {{outside: {{{field}: {text}}}}}}}"
    link = loaded(document, tmp_path).outside
    assert {"bandwidth": link.bandwidth, "latency": link.latency_seconds}[field] == expected


CLUSTERS = {
    "one device": Cluster((Device("a", "k"),)),
    "texts that YAML would take for something else": Cluster(
        (Device("123", "yes"), Device("null", "1e3"), Device("a: b", "# x"), Device("ü/-", " "))
    ),
    "runs of like devices": Cluster(
        (Device("a", "k", 1.0, 7), Device("a", "k", 1.0, 7), Device("b", "k"), Device("a", "k"))
    ),
    "figures without end": Cluster(
        (
            Device("a", "k", 1 / 3, 10**15 + 1, 10**9 + 1),
            Device("b", "k", 1e-7, 0, 0, 10**11 + 1, 2e10 / 3),
        ),
        inside=Link(1 / 3, 1e9 / 3),
        outside=Link(1e-7, math.inf),
    ),
    "links of all sorts": Cluster(
        tuple(Device(host, "k") for host in "aabbc"),
        inside=Link(0.0, 5e9),
        hosts={("b", "a"): Link(1e-3, 1.0), ("c", "c"): FREE, ("a", "c"): Link(1.0)},
        ranks={(0, 1): Link(0.5, 3), (2, 4): FREE},
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_saved_cluster_is_the_same(name, tmp_path):
    path = tmp_path / "new" / "cluster.yaml"
    save_cluster(CLUSTERS[name], path)
    assert load_cluster(path) == CLUSTERS[name]


def test_a_saved_cluster_has_a_line_for_like_devices(tmp_path):
    path = tmp_path / "cluster.yaml"
    save_cluster(loaded(BY_HAND, tmp_path), path)
    text = path.read_text()
    assert "- {host: node17, kind: a100, count: 8, memory: 80000000000}\n" in text
    assert "outside: {latency: 5.0e-05, bandwidth: 125000000.0}\n" in text
    assert load_cluster(path) == loaded(BY_HAND, tmp_path)


def test_a_thousand_devices_are_loaded(tmp_path):
    devices = tuple(Device(f"node{n // 8}", "a100", 1 + n / 1e4) for n in range(1024))
    path = tmp_path / "cluster.yaml"
    save_cluster(Cluster(devices), path)
    assert load_cluster(path).devices == devices


def cluster_with(links="", **device):
    entry = {"host": "a", "kind": "k"} | device
    return f"devices: [{json.dumps(entry)}, {{host: b, kind: k}}]\nlinks: {links or '{}'}"


def between(entry):
    return cluster_with(f"{{between: [{entry}]}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the cluster is null; it must be an object"),
        ("{", "the cluster is not a YAML document"),
        ("devices: 2024-02-31", "the cluster is not a YAML document"),
        ("links: {}", "the cluster has no field 'devices'; add it$"),
        ("devices: []", "field 'devices' has 0 devices; a cluster has at least 1 device"),
        ("devices: 2024-02-28", "field 'devices' is .2024-02-28.; it must be a list"),
        ("{devices: [], link: 1}", "unknown field 'link'; remove it"),
        ("devices: [3]", r"devices\[0\] is 3; it must be an object"),
        ("devices: [{kind: k}]", r"devices\[0\] has no field 'host'; add it$"),
        (cluster_with(cout=2), r"devices\[0\] has an unknown field 'cout'; remove it"),
        (
            cluster_with(kind=4090),
            "field 'kind' is 4090; it must be a text; a number goes in quotes",
        ),
        (cluster_with(host=""), "field 'host' is \"\"; it must be a text that is not empty"),
        (cluster_with(count=0), r"devices\[0\]: field 'count' is 0; it must be greater than 0"),
        (cluster_with(count=True), "field 'count' is true; it must be a whole number"),
        (cluster_with(hosts=-1), "field 'hosts' is -1; it must be greater than 0"),
        (cluster_with(speed=0), "field 'speed' is 0; it must be greater than 0"),
        (cluster_with(host_memory="1GB"), "'host_memory' is 1000000000; it must be given together"),
        (cluster_with(host_bandwidth=5), "'host_bandwidth' is 5; it must be given together"),
        (cluster_with(speed="fast"), "field 'speed' is \"fast\"; it must be a number"),
        (cluster_with(memory="24 gigs"), "field 'memory' is \"24 gigs\"; .* in B or .*GB.*GiB"),
        (cluster_with(memory="1 ms"), "field 'memory' is \"1 ms\"; it must be a number"),
        (cluster_with(memory=-1), "field 'memory' is -1; it must be a number at least 0"),
        (cluster_with(memory="-1 GB"), "field 'memory' is \"-1 GB\"; .* at least 0"),
        ("devices: [{host: a, kind: k, memory: .inf}]", "'memory' is Infinity; it must be"),
        (cluster_with(memory="9e999"), "field 'memory' is \"9e999\"; it must be"),
        (
            cluster_with(memory="1GB", free="2GB"),
            "field 'free' is 2000000000 bytes; .*at most .*'memory', 1000",
        ),
        (cluster_with("[]"), r"links is \[\]; it must be an object"),
        (cluster_with("{in: {}}"), "links has an unknown field 'in'"),
        (cluster_with("{inside: {delay: 1}}"), "links.inside has an unknown field 'delay'"),
        (cluster_with("{inside: {bandwidth: 1 Gb}}"), "'bandwidth' is \"1 Gb\"; .*Gbit/s"),
        (cluster_with("{inside: {bandwidth: 0}}"), "'bandwidth' is 0; it must be greater than 0"),
        (cluster_with("{inside: {bandwidth: .nan}}"), "'bandwidth' is NaN; it must be"),
        (cluster_with("{outside: {latency: -1us}}"), "links.outside: field 'latency' is \"-1us\""),
        (cluster_with("{outside: {latency: .inf}}"), "'latency' is Infinity; it must be"),
        (cluster_with("{between: {}}"), "field 'between' is {}; it must be a list"),
        (between("{latency: 1}"), r"links.between\[0\]: it has neither 'hosts' nor 'ranks'"),
        (between("{hosts: [a, b], ranks: [0, 1], latency: 1}"), "has both 'hosts' and 'ranks'"),
        (between("{hosts: [a, b]}"), "has neither 'latency' nor 'bandwidth'"),
        (between("{hosts: [a, c], latency: 1}"), "'hosts' is .* that have devices: a, b"),
        (between("{hosts: [a], latency: 1}"), "a list of 2 hosts"),
        (between("{hosts: [a, [b]], latency: 1}"), r"'hosts\[1\]' is \[\"b\"\]; it must be a text"),
        (between("{ranks: [0, 2], latency: 1}"), "'ranks' is .*2 different ranks.* 0 to 1"),
        (between("{ranks: [0, -1], latency: 1}"), "2 different ranks, each from 0 to 1"),
        (between("{ranks: [1, 1], latency: 1}"), "2 different ranks"),
        (between("{ranks: [false, 1], latency: 1}"), r"'ranks\[0\]' is false; it must be a whole"),
        (
            between("{hosts: [a, b], latency: 1}, {hosts: [b, a], latency: 2}"),
            r"between\[1\]: field 'hosts' is .* a pair that no other entry names",
        ),
        (
            between("{ranks: [0, 1], latency: 1}, {ranks: [1, 0], latency: 2}"),
            r"between\[1\]: field 'ranks' is .* a pair that no other entry names",
        ),
    ],
)
def test_a_wrong_cluster_is_named(text, message, tmp_path):
    with pytest.raises(PlanError, match=message) as error:
        loaded(text, tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'cluster.yaml'}: the cluster")


PROFILE = Profile(
    layers=(
        LayerProfile("wte", 4000, 4000, 8000, 100, 100, 0, 0),
        LayerProfile(
            "h.0", 1000, 1000, 2000, 200, 200, 5000, 100, working_bytes=300, buffer_bytes=24
        ),
    ),
    kinds={
        "NVIDIA A100": KindProfile((0.1, 1 / 3), (0.2, 0.6), 1e-5, 2e-5, 0.001, 0.002),
        'a "B"': KindProfile((0.0, 1.0), (0.0, 2.0)),
    },
    samples=2.5,
    microbatches=8,
    step_seconds=0.01,
    optimizer_seconds_per_byte=1e-11,
    batch_bytes=64,
)


@pytest.mark.parametrize("profile", [PROFILE, Profile(PROFILE.layers)])
def test_a_saved_profile_is_the_same(profile, tmp_path):
    path = tmp_path / "new" / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile


def test_a_saved_profile_has_a_layer_per_line(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    lines = path.read_text().splitlines()
    assert '  "version": 1,' in lines
    (line,) = [line for line in lines if '"wte"' in line]
    assert json.loads(line.rstrip(",")) == {
        "name": "wte",
        "parameter_bytes": 4000,
        "gradient_bytes": 4000,
        "optimizer_bytes": 8000,
        "payload_bytes": 100,
        "payload_gradient_bytes": 100,
    }


def test_a_profile_of_before_takes_nothing_for_a_moment(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    document = edit(json.loads(path.read_text()), "batch_bytes", ...)
    path.write_text(json.dumps(edit(document, "layers/1/working_bytes", ...)))
    found = load_profile(path)
    assert (found.batch_bytes, found.layers[1].working_bytes) == (0, 0)


def edit(value: Any, place: str, new: Any) -> Any:
    """Sets, or with ``...`` removes, what is found under keys parted by slashes."""
    *way, last = place.split("/")
    part = value
    for key in way:
        part = part[int(key) if isinstance(part, list) else key]
    if new is ...:
        del part[last]
    else:
        part[last] = new
    return value


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        ("version", 2, "field 'version' is 2; this PipeShift reads version 1"),
        (
            "version",
            ...,
            "field 'version' is null; .* version 1: measure the profile again",
        ),
        ("layers", ..., "the profile has no field 'layers'"),
        ("layers", [], "a profile of 0 layers"),
        ("layer", 1, "unknown field 'layer'; remove it"),
        ("samples", 0, "field 'samples' is 0; it must be greater than 0"),
        ("microbatches", 0, "field 'microbatches' is 0; it must be greater than 0"),
        ("microbatches", 1.5, "field 'microbatches' is 1.5; it must be a whole number"),
        ("step_seconds", -1, "field 'step_seconds' is -1; it must be greater than or equal to 0"),
        (
            "step_seconds",
            math.inf,
            "field 'step_seconds' is Infinity; .* finite",
        ),
        ("optimizer_seconds_per_byte", "1", "'optimizer_seconds_per_byte' is \"1\"; .* a number"),
        ("layers/1/name", ..., r"layers\[1\] has no field 'name'; add it, or measure the profile"),
        ("layers/1/saved_bytes", -5, "layer 'h.0': field 'saved_bytes' is -5; .* at least 0"),
        ("layers/1/saved_bytes", 0.5, r"layers\[1\]: field 'saved_bytes' is 0.5; .* whole number"),
        ("layers/0/name", "", "a layer with an empty name"),
        ("layers/0/size", 1, r"layers\[0\] has an unknown field 'size'"),
        ("kinds", [], r"field 'kinds' is \[\]; it must be an object"),
        ("kinds/NVIDIA A100", 3, r"kinds\['NVIDIA A100'\] is 3; it must be an object"),
        ("kinds/NVIDIA A100/forward", [1], "a profile of 1 forwards and 2 backwards"),
        (
            "kinds/NVIDIA A100/forward",
            [1, "2"],
            r"field 'forward\[1\]' is .2.; it must be a number",
        ),
        ("kinds/NVIDIA A100/forward", [1, -2], "a profile contains -2.0 in forward"),
        (
            "kinds/NVIDIA A100/tail_forward",
            -2,
            "a profile contains -2.0 in tail_forward; seconds are finite",
        ),
        ("batch_bytes", -1, "field 'batch_bytes' is -1; it must be greater than or equal to 0"),
        ("layers/1/working_bytes", -5, "layer 'h.0': field 'working_bytes' is -5; .* at least 0"),
        ("samples", 10**400, "it must be a number that is finite"),
    ],
)
def test_a_wrong_profile_is_named(place, new, message, tmp_path):
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    path.write_text(json.dumps(edit(json.loads(path.read_text()), place, new)))
    with pytest.raises(PlanError, match=message) as error:
        load_profile(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_profile_that_is_no_json(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"version": 1,')
    with pytest.raises(
        PlanError, match=r"the profile is not a JSON document: .*; take an undamaged"
    ):
        load_profile(path)
    path.write_text("[1]")
    with pytest.raises(PlanError, match=r"the profile is \[1\]; it must be an object"):
        load_profile(path)


@pytest.mark.parametrize("load", [load_cluster, load_profile])
def test_a_file_that_cannot_be_read(load, tmp_path):
    with pytest.raises(PlanError, match=r"nowhere' cannot be read: .*No such file"):
        load(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"binary' cannot be read: .*utf-8"):
        load(tmp_path / "binary")


def test_what_is_no_plain_value_is_refused(tmp_path):
    """A cluster may come from anybody: reading it must not run anything."""
    with pytest.raises(PlanError, match="not a YAML document"):
        loaded("devices: !!python/object/apply:os.system ['true']", tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "cluster.yaml"
    save_cluster(CLUSTERS["one device"], path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_cluster(CLUSTERS["links of all sorts"], path)
    assert load_cluster(path) == CLUSTERS["one device"]
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.yaml"]


WITH_TENSORS = replace(
    PROFILE,
    layers=(
        PROFILE.layers[0],
        replace(
            PROFILE.layers[1],
            tensors=(
                SavedTensor(0, 4000, (10, 100), "float32", "attn: MmBackward0"),
                SavedTensor(1, 0),
                SavedTensor(3, 1000, (1000,), "bool", 'a "mask"'),
            ),
        ),
    ),
)


def test_a_saved_profile_has_its_tensors(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(WITH_TENSORS, path)
    assert load_profile(path) == WITH_TENSORS
    lines = path.read_text().splitlines()
    (line,) = [line for line in lines if '"h.0"' in line]
    assert json.loads(line.rstrip(","))["tensors"][0] == {
        "number": 0,
        "num_bytes": 4000,
        "shape": [10, 100],
        "maker": "attn: MmBackward0",
    }
    (line,) = [line for line in lines if '"wte"' in line]
    assert "tensors" not in json.loads(line.rstrip(","))


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        ("", 5, r"layers\[1\]: field 'tensors' is 5; it must be a list"),
        ("", [5], r"layers\[1\].tensors\[0\] is 5; it must be an object"),
        (
            "/0/num_bytes",
            ...,
            r"tensors\[0\] has no field 'num_bytes'; add it, or measure the profile again",
        ),
        ("/0/size", 5, r"layers\[1\].tensors\[0\] has an unknown field 'size'; remove it"),
        ("/2/num_bytes", 0.5, r"tensors\[2\]: field 'num_bytes' is 0.5; it must be a whole number"),
        ("/2/num_bytes", -5, "a saved tensor with number 3 and -5 bytes; both are at least 0"),
        ("/0/number", -1, "a saved tensor with number -1 and 4000 bytes"),
        ("/0/shape", [10, "100"], r"field 'shape\[1\]' is .100.; it must be a whole number"),
        ("/0/maker", None, "field 'maker' is null; it must be a text"),
    ],
)
def test_a_wrong_tensor_is_named(place, new, message, tmp_path):
    path = tmp_path / "profile.json"
    save_profile(WITH_TENSORS, path)
    document = edit(json.loads(path.read_text()), f"layers/1/tensors{place}", new)
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=message) as error:
        load_profile(path)
    assert str(error.value).startswith(f"{path}: ")


# --------------------------------------------------------------------------------------------------
# Made to take for ever
# --------------------------------------------------------------------------------------------------

DEVICE = "{host: a, kind: b"
MANY_REFERENCES = "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"devices: [{DEVICE}, count: 1000000000000}}]", "at most 10,000 devices in all"),
        (f"devices: [{DEVICE}, hosts: 200, count: 200}}]", "at most 10,000 devices in all"),
        (f"devices: [{', '.join([DEVICE + ', count: 9000}'] * 2)}]", "at most 10,000 devices"),
        ("devices: &a [*a]", "refers to an entry as *a; write the entry itself"),
        ("devices: &a\n  - &b {<<: *a}", "refers to an entry as *a"),
        ("- &a0 [1]\n" + MANY_REFERENCES, "refers to an entry as *a0"),
        ("[" * 5000, "more than 20 nested lists"),
        ("{a: " * 5000, "more than 20 nested lists"),
        ("x" * (1 << 21), "has more than 1,048,576 bytes"),
        (f"devices: [{DEVICE}, count: 0x{'f' * 10_000}}}]", "Exceeds the limit"),
    ],
)
def test_a_cluster_that_is_large_only_in_memory(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PlanError, match=re.escape(message)):
        load_cluster(path)


@pytest.mark.parametrize("load", [load_profile, Plan.load])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "too deeply nested lists or objects"),
        ("9" * 5000, "not a JSON document"),
        ('{"version": ' + "9" * 4000 + "}", "reads version"),
    ],
)
def test_a_document_that_json_does_not_take(
    load: Any, text: str, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PlanError, match=message) as error:
        load(path)
    assert len(str(error.value)) < 500


def test_a_pipe_is_no_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for load in (load_cluster, load_profile, Plan.load):
        with pytest.raises(PlanError, match="is not a regular file"):
            load(tmp_path / "pipe")
