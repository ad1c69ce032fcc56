import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.runtime.comm import sends
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.planning import link_probe
from lightning_pipeshift.runtime.planning.host_memory import host_memory, memory_limits
from lightning_pipeshift.runtime.planning.link_probe import levelled, rounds_of
from lightning_pipeshift.runtime.planning.probe import (
    Found,
    ProbeResult,
    assess,
    probe,
    time_slices,
    with_speeds,
)
from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.runtime.stages import connect

GB = 10**9

# --- from raw figures to what is measured ---


def found(host="a", kind="k", rate=100.0, **changes):
    """A rank alone on its processor, unless ``processor`` says else."""
    usual = Found(Device(host, kind), "", 1.0, 1 / rate, 1 / rate, host, 8 * GB, 4 * GB)
    return replace(usual, **{"processor": f"{host} {random.random()}", **changes})


def all_found(rates, **changes):
    return [found(host=f"host{n}", rate=rate, **changes) for n, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([3], [3]),
        ([100, 75, 90], [100, 100, 100]),
        ([74, 100], [74, 100]),
        ([50, 100, 52, 76, 40], [52, 100, 52, 100, 52]),
        ([10, 38, 100], [10, 38, 100]),
    ],
)
def test_levels(values, expected):
    assert levelled(values, 0.75) == expected


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [
        ([100.0], [1.0]),
        ([100.0, 100.0], [1.0, 1.0]),
        ([100.0, 76.0, 93.0], [1.0, 1.0, 1.0]),  # noise
        ([100.0, 74.0], [1.0, 0.74]),
        ([50.0, 100.0, 48.0, 98.0], [0.5, 1.0, 0.5, 1.0]),
        ([1e-9, 1e15], [1e-24, 1.0]),
    ],
)
def test_like_devices_have_like_speeds(rates, speeds):
    measured = assess(all_found(rates), {})
    assert [device.speed for device in measured.cluster.devices] == pytest.approx(speeds)
    alone = with_speeds(all_found(rates))
    assert [device.speed for device in alone] == pytest.approx(speeds)
    # Not nearly 1: orders and groups compare.
    assert [speed == 1 for speed in speeds] == [d.speed == 1 for d in measured.cluster.devices]


def test_a_speed_is_relative_to_its_own_kind():
    ranks = [
        found(kind="fast", rate=800.0),
        found(kind="slow", rate=100.0),
        found(kind="slow", rate=50.0),
    ]
    measured = assess(ranks, {})
    assert [device.speed for device in measured.cluster.devices] == [1.0, 1.0, 0.5]


def test_ranks_on_the_same_processor_are_equally_fast():
    """The one that computed while the other was interrupted is no faster."""
    ranks = [
        found(rate=100.0, processor="both"),
        found(rate=40.0, processor="both"),
        found(rate=100.0),
    ]
    measured = assess(ranks, {})
    assert [device.speed for device in measured.cluster.devices] == [1.0, 1.0, 1.0]
    assert measured.notes == ()


def test_ranks_share_the_memory_that_they_draw_on():
    ranks = [
        found("a", memory_bytes=9 * GB, free_bytes=5 * GB),
        found("b", memory_bytes=8 * GB, free_bytes=7 * GB),
        found("a", memory_bytes=9 * GB, free_bytes=4 * GB),
        found("a", pool="a card of its own", memory_bytes=2 * GB, free_bytes=GB),
    ]
    devices = assess(ranks, {}).cluster.devices
    assert [device.memory_bytes for device in devices] == [4.5 * GB, 8 * GB, 4.5 * GB, 2 * GB]
    assert [device.free_bytes for device in devices] == [2 * GB, 7 * GB, 2 * GB, GB]


def test_full_memory_is_not_unknown_memory():
    (full,) = assess([found(free_bytes=0)], {}).cluster.devices
    assert full.usable_bytes == 1
    (unknown,) = assess([found(memory_bytes=0, free_bytes=0)], {}).cluster.devices
    assert unknown.usable_bytes == math.inf


def test_a_steady_rank_of_usual_speed_has_no_note():
    assert assess(all_found([100.0, 51.0, 100.0]), {}).notes == ()
    assert assess([found(median_seconds=0.03)], {}).notes == ()


def test_a_note_on_a_rank_that_was_interrupted():
    ranks = [found(), found("lab2/boot/4026531840", kind="rtx", median_seconds=0.031)]
    (note,) = assess(ranks, {}).notes
    assert note.startswith("rank 1 on host lab2 (rtx): the same computation took 10.00 ms at best")
    assert "31.00 ms in the median" in note
    assert "another job may run there" in note


def test_a_note_on_a_slow_rank():
    (note,) = assess(all_found([100.0, 45.0, 95.0]), {}).notes
    assert note.startswith("rank 1 on host host1 (k): computes at 47% of the median of its kind")
    assert "throttled" in note
    # Of two, the faster one is the usual one.
    (note,) = assess(all_found([100.0, 45.0]), {}).notes
    assert note.startswith("rank 1")


def test_one_note_on_all_ranks_of_a_processor():
    ranks = [found(processor="same", median_seconds=1.0) for _ in range(3)]
    (note,) = assess(ranks, {}).notes
    assert note.startswith("ranks 0, 1, 2 on host a")


# --- links ---


def cluster_of(hosts: Iterable[str], links: dict[tuple[int, int], Link]) -> Cluster:
    return assess([found(host) for host in hosts], links).cluster


def test_without_measured_links_every_way_is_free():
    cluster = cluster_of("a", {})
    assert (cluster.inside, cluster.outside, cluster.hosts, cluster.ranks) == (FREE, FREE, {}, {})


def test_links_that_differ_by_noise_are_one_link():
    random.seed(0)
    noisy = {
        pair: Link(1e-4 * (1 + random.random()), 1e9 / (1 + 0.4 * random.random()))
        for pair in combinations(range(6), 2)
    }
    cluster = cluster_of("abcdef", noisy)
    assert (cluster.inside, cluster.hosts, cluster.ranks) == (FREE, {}, {})
    assert cluster.outside.bandwidth == max(link.bandwidth for link in noisy.values())
    assert cluster.outside.latency_seconds == pytest.approx(
        min(link.latency_seconds for link in noisy.values())
    )


def test_a_cluster_says_where_links_differ():
    fast, lan, far, bad = Link(1e-5, 5e9), Link(1e-4, 1e8), Link(1e-2, 1e7), Link(1e-4, 1e6)
    hosts = "aabbc"
    links = {(0, 1): fast, (2, 3): fast}
    links |= dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3), (2, 4), (3, 4)], lan)
    links |= {(0, 4): far, (1, 4): far, (1, 3): bad}
    cluster = cluster_of(hosts, links)
    for pair, link in links.items():
        assert cluster.link(*pair).bandwidth == link.bandwidth, pair
        assert cluster.link(*pair).latency_seconds == pytest.approx(link.latency_seconds), pair
    assert set(cluster.hosts) == {("a", "c")}
    assert set(cluster.ranks) == {(1, 3)}


def test_a_cluster_has_the_names_that_people_give_hosts():
    """Other properties that distinguish hosts, as clones and containers share names, are not shown
    to users.
    """
    cluster = cluster_of(["lab/1/7", "lab/1/7", "lab/2/7", "gpu/3/7"], {})
    assert [device.host for device in cluster.devices] == ["lab", "lab", "lab (2)", "gpu"]


def test_pairs_that_were_not_measured_are_like_those_of_their_hosts():
    hosts = [host for host in "abc" for _ in range(4)]
    measured = {(0, 4): Link(1e-3, 1e8), (4, 8): Link(1e-3, 1e8), (0, 8): Link(1e-3, 1e6)}
    measured |= {(0, 1): Link(1e-5, 1e9), (4, 5): Link(1e-5, 1e9), (8, 9): Link(1e-5, 1e7)}
    cluster = cluster_of(hosts, measured)
    assert cluster.link(3, 11).bandwidth == 1e6
    assert cluster.link(2, 7).bandwidth == 1e8
    assert cluster.link(2, 3).bandwidth == 1e9
    assert cluster.link(10, 11).bandwidth == 1e7
    assert cluster.ranks == {}


@pytest.mark.parametrize(
    "hosts", ["a", "ab", "aa", "abc", "abab", "aabbc", "abcdefgh", "aaaaaaaa", "aaaaaaab"]
)
def test_every_link_of_few_ranks_is_measured_once(hosts):
    pairs = [pair for pairs in rounds_of(hosts) for pair in pairs]
    between = [(a, b) for a, b in combinations(range(len(hosts)), 2) if hosts[a] != hosts[b]]
    inside = [(a, b) for a, b in pairs if hosts[a] == hosts[b]]
    assert sorted(set(pairs) - set(inside)) == between
    assert len(inside) == sum(hosts.count(host) > 1 for host in set(hosts))
    assert len(pairs) == len(set(pairs))
    assert all(a < b for a, b in pairs)


@pytest.mark.parametrize(
    "hosts",
    [
        "abc",
        "abcd",
        "aabbccdd",
        [n // 8 for n in range(64)],
        [n % 5 for n in range(33)],
        [0] * 9,
        list(range(31)),
    ],
)
def test_no_nic_is_shared_in_a_round(hosts):
    hosts = [str(host) for host in hosts]
    rounds = rounds_of(hosts)
    for pairs in rounds:
        users = [host for one, other in pairs for host in {hosts[one], hosts[other]}]
        assert len(users) == len(set(users)), pairs
    if len(hosts) > 8:
        num = len(set(hosts))
        measured = sorted(
            tuple(sorted((hosts[one], hosts[other]))) for pairs in rounds for one, other in pairs
        )
        crowded = [(host, host) for host in set(hosts) if hosts.count(host) > 1]
        assert measured == sorted([*combinations(sorted(set(hosts)), 2), *crowded])
        # As many as a host has partners, with one more for the pair inside.
        assert len(rounds) <= num


# --- memory ---


def limits(tmp_path, own, files):
    """The limits that are read from control groups, given as the kernel shows them."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return sorted(memory_limits(tmp_path, tmp_path / "own"))


def test_a_container_with_control_groups_of_its_own(tmp_path):
    """Version 2: what is mounted is the container's, and its name is /."""
    found = limits(
        tmp_path,
        "0::/\n",
        {
            "memory.max": "1000\n",
            "memory.current": "700\n",
            "memory.stat": "anon 300\ninactive_file 250\nactive_file 20\n",
        },
    )
    assert found == [(1000, 450)]


def test_a_container_in_version_1(tmp_path):
    """The mounted group is the container's, and its name is the host's name for it."""
    found = limits(
        tmp_path,
        "9:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "2000",
            "memory/memory.usage_in_bytes": "500",
            "memory/memory.stat": "cache 1\ntotal_inactive_file 100",
        },
    )
    assert found == [(2000, 400)]


def test_a_job_whose_ancestors_have_limits(tmp_path):
    found = limits(
        tmp_path,
        "0::/system.slice/job_7/step_0\n",
        {
            "system.slice/memory.max": "9000",
            "system.slice/job_7/memory.max": "4000",
            "system.slice/job_7/memory.current": "100",
            "system.slice/job_7/step_0/memory.max": "max\n",
            "system.slice/job_8/memory.max": "1",
        },
    )
    assert found == [(4000, 100), (9000, 0)]


def test_a_job_of_version_1(tmp_path):
    found = limits(
        tmp_path,
        "3:cpu,memory:/slurm/job_7\n0::/ignored\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/slurm/job_7/memory.limit_in_bytes": "4000",
            "memory/slurm/job_7/memory.usage_in_bytes": "5000",
        },
    )
    assert found == [(4000, 5000), (9223372036854771712, 0)]


def test_no_control_groups_and_strange_ones(tmp_path):
    assert list(memory_limits(tmp_path / "nothing", tmp_path / "nowhere")) == []
    assert limits(tmp_path, "what is this?\n", {"memory.max": "many"}) == []
    assert limits(tmp_path, "0::/../../elsewhere\n", {"memory.max": "5"}) == [(5, 0)]


def test_the_lowest_limit_holds(tmp_path):
    total = psutil.virtual_memory().total
    own = tmp_path / "own"
    assert host_memory(tmp_path, own)[0] == total
    (tmp_path / "memory.max").write_text(str(2 * total))
    assert host_memory(tmp_path, own)[0] == total
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    (tmp_path / "memory.stat").write_text("inactive_file 0")
    assert host_memory(tmp_path, own) == (1_000_000, 600_000)
    (tmp_path / "memory.current").write_text("1000001")
    assert host_memory(tmp_path, own) == (1_000_000, 0)


# --- processes ---


def measure(hosts: str, threads: tuple[int, ...] = ()) -> tuple[ProbeResult, bool, list[str]]:
    """Ranks whose slices take a microsecond for each of their threads."""
    channels, _ = connect()
    torch.set_num_threads(threads[channels.stage] if threads else 1)
    state = torch.get_rng_state()
    told: list[str] = []
    device, here = torch.device("cpu"), Device(hosts[channels.stage], "k")
    seconds = 1e-6 * torch.get_num_threads()
    measured = probe(channels, device, here, told.append, lambda _: [seconds, 1.1 * seconds])
    # Nothing is left behind that the next message would be taken for.
    assert channels.share_object("next", 0) == "next"
    assert channels.gather(channels.stage) == list(range(channels.num_stages))
    channels.settle()
    return measured, torch.equal(torch.get_rng_state(), state), told


def check(results: list[tuple[ProbeResult, bool, list[str]]]) -> ProbeResult:
    """Checks that hold for any machine's measurements."""
    measured = results[0][0]
    assert all(each == measured for each, _, _ in results)
    assert all(untouched for _, untouched, _ in results)
    assert len(measured.seconds) == len(measured.cluster.devices) == len(results)
    for device in measured.cluster.devices:
        assert 0 < device.free_bytes <= device.memory_bytes
    for pair in combinations(range(len(results)), 2):
        link = measured.cluster.link(*pair)
        assert 0 < link.latency_seconds < 10
        assert 1e3 < link.bandwidth < 1e13
    return measured


def test_two_ranks_of_a_host():
    measured = check(run_ranks(measure, 2, "aa"))
    one, other = measured.cluster.devices
    assert one == other
    assert one.speed == 1.0
    assert one.memory_bytes <= psutil.virtual_memory().total // 2
    assert measured.cluster.ranks == {}
    assert measured.notes == ()


def test_three_ranks_of_two_hosts():
    measured = check(run_ranks(measure, 3, "aba"))
    assert [device.host for device in measured.cluster.devices] == ["a", "b", "a"]
    assert [device.speed for device in measured.cluster.devices] == [1.0, 1.0, 1.0]
    memory = [device.memory_bytes for device in measured.cluster.devices]
    assert memory[0] == memory[2] == memory[1] // 2


def test_a_slower_rank():
    measured = check(run_ranks(measure, 2, "aa", (1, 4)))
    assert [device.speed for device in measured.cluster.devices] == [1.0, 0.25]
    (note,) = measured.notes
    assert note.startswith("rank 1 on host a (k): computes at 25%")


def test_a_rank_alone():
    (result,) = run_ranks(measure, 1, "a")
    assert check([result]).cluster.devices[0].speed == 1.0


def by_device() -> tuple[ProbeResult, bool, list[str]]:
    """Between devices that need not go through the host."""
    channels, _ = connect(shares_memory=True)

    def refuse(*_):
        raise AssertionError("a link between devices is measured by way of the host")

    state = torch.get_rng_state()
    told: list[str] = []
    for name in ("send_tensor", "receive_tensor"):
        setattr(Lane, name, refuse)
    vars(sends)["Sends"]._send_behind = refuse
    here = Device("a" if channels.stage else "b", "k")
    measured = probe(channels, torch.device("cpu"), here, told.append, lambda _: [1e-6])
    return measured, torch.equal(torch.get_rng_state(), state), told


def test_links_between_devices_are_measured_as_payloads_travel():
    check(run_ranks(by_device, 3))


class OnAnotherDevice:
    """A rank whose tensors are on the meta device, and its mailbox."""

    device, ranks, shares_memory_with = torch.device("meta"), [0, 1], frozenset({1})

    def __init__(self):
        self.sent = []

    def send_object(self, *_):
        pass

    def settle(self):
        pass

    def send_labelled(self, to, label, tensor):
        self.sent.append((tensor.device.type, tensor.numel()))

    def take_labelled(self, source, label):
        return SimpleNamespace(tensor=lambda *_: torch.zeros(1))


def test_a_link_is_measured_with_tensors_of_the_device(monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(link_probe, "time", clock)
    world: Any = OnAnotherDevice()
    link_probe._measure_link(world, world, 1)
    assert {device for device, _ in world.sent} == {"meta"}
    # A fast link needs more than a network does.
    assert max(length for _, length in world.sent) == 1 << 26


def as_it_is() -> tuple[ProbeResult, bool, list[str]]:
    channels, _ = connect()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    told: list[str] = []
    # As if everything took longer than a second.
    link_probe._REPORT_SECONDS = 0.0
    here = Device("a" if channels.stage else "b", "k")
    measured = probe(channels, torch.device("cpu"), here, told.append)
    return measured, torch.equal(torch.get_rng_state(), state), told


def test_what_is_measured_on_this_machine():
    results = run_ranks(as_it_is, 3)
    measured = check(results)
    assert all(told[-1] == "measuring links: 3 of 3" for _, _, told in results)
    # One system under two names: the cores are the same.
    assert [device.speed for device in measured.cluster.devices] == [1.0, 1.0, 1.0]


def test_slices_take_time():
    seconds = time_slices(torch.device("cpu"))
    assert len(seconds) >= 3
    assert all(math.isfinite(each) and each > 0 for each in seconds)


class Alone:
    """The connections of a rank without others."""

    stage = 0

    def __init__(self, others_end):
        self._others_end = others_end

    def sum(self, vector):
        self._others_end()
        return vector

    def gather(self, mine):
        return [mine]

    def settle(self): ...


def test_what_the_computation_leaves_in_the_cache_is_free_memory(monkeypatch):
    """Torch keeps the memory of tensors that are gone; so does a rank that shares the GPU."""
    used = {"mine": 0, "another's": 3 * GB}

    def slices(device):
        used["mine"] = 2 * GB
        return [0.001]

    def others_end():
        # They are at this point too: what they have left before it is given back.
        if used["mine"] == 0:
            used["another's"] = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: used.update(mine=0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * GB - sum(used.values()), 8 * GB))
    used["mine"] = GB
    device = torch.device("cuda", 0)
    world = Alone(others_end)
    measured = probe(world, device, Device("a", "gpu"), slices=slices)  # type: ignore[arg-type]
    assert measured.cluster.devices[0].free_bytes == 8 * GB
