"""The network sees what each lane carries."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.hosts import CARD, Hosts, Link, hosts, why_not
from lightning_pipeshift.plan.inputs.traffic import CLASSES
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.gradients.rings import Rings
from tests.unit.runtime.stages import connect

# Bytes that travel on each lane, from one host to the other.
NUM_BYTES = {"pipeline": 400_000, "gradients-0": 1_200_000, "bulk": 800_000}


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2, Link(megabits=400.0)) as made:
        yield made


def pipeshift(on: Hosts, host: int, *arguments: str) -> str:
    """Runs the command on a host."""
    code = "import pipeshift_command; pipeshift_command.main()"
    argv = on.command(host, [sys.executable, "-c", code, *arguments])
    root = Path(__file__).parents[2]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sent_bytes(on: Hosts, host: int) -> dict[str, int]:
    """What a host has sent, by lane; ``""``: without a mark."""
    argv = on.command(host, ["tc", "-s", "class", "show", "dev", CARD])
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
    counts = dict(re.findall(r"class htb 1:(\d\d) .*\n Sent (\d+) bytes", shown))
    names = [*(one.name for one in CLASSES[:-1]), "", CLASSES[-1].name]
    return {name: int(counts[str(10 + place)]) for place, name in enumerate(names)}


def send_on_each(marks: dict[str, int] | None) -> None:
    channels, board = connect()
    lanes = Lanes(marks=marks)
    groups = lanes.between_stages(range(2))
    rings = Rings(lambda _: lanes.make(range(2), "gradients-0"), dist.get_rank(), board.watched)
    assert groups.bulk is not None
    for group, lane in ((groups.pipeline, "pipeline"), (groups.bulk, "bulk")):
        values = torch.zeros(NUM_BYTES[lane], dtype=torch.uint8)
        peer = 1 - dist.get_rank()
        transfers = group.control.send if dist.get_rank() == 0 else group.control.recv
        transfers([values], peer, 0).wait()
    rings.start(0, [0, 1], torch.zeros(NUM_BYTES["gradients-0"] // 4)).wait()
    channels.sum(torch.zeros(1))


def marked(on: Hosts, marks: dict[str, int] | None, arguments: Sequence[str] = ()) -> None:
    for host in range(2):
        assert "honours the lanes" in pipeshift(
            on, host, "doctor", "--lanes", CARD, "--rate", "400mbit", "--apply", *arguments
        )
    on.run(send_on_each, marks)


def test_each_lane_is_a_class_of_its_own_on_the_network(two_hosts: Hosts) -> None:
    before = pipeshift(two_hosts, 0, "doctor", "--lanes", CARD)
    assert "does not honour the lanes: eth0 has no HTB at its root" in before
    marked(two_hosts, {"bulk": 10}, ["--mark", "bulk=10"])
    found = sent_bytes(two_hosts, 0)
    for lane, expected in NUM_BYTES.items():
        assert expected < found[lane] < 1.2 * expected + 20_000, (lane, found)
    assert found["gradients-1"] == 0
    # The rendezvous, and what tells ranks that the others are alive.
    assert found[""] < 200_000
    now = pipeshift(two_hosts, 0, "doctor", "--lanes", CARD, "--mark", "bulk=10")
    assert "# eth0 honours the lanes." in now
    other = pipeshift(two_hosts, 0, "doctor", "--lanes", CARD, "--mark", "pipeline=41")
    assert "no filter of eth0 matches the mark of lane pipeline" in other


def test_without_marks_all_is_other_traffic(two_hosts: Hosts) -> None:
    marked(two_hosts, None)
    found = sent_bytes(two_hosts, 0)
    # Apart from the connections that every test has.
    assert found["bulk"] < 20_000
    assert found[""] > sum(NUM_BYTES.values())
