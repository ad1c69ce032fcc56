"""What lanes are worth on a network that honours them.

    python -m benchmarks.lanes

Two hosts with 200 Mbit/s between them (network namespaces: `benchmarks/hosts.py`; needs root), set
up by `pipeshift doctor --lanes DEVICE --apply`. A rank sends on the lane `pipeline` and on `bulk`
at the same time, as fast as it can.
What part of the link does each get, of what `pipeline` gets alone? With and
without the lanes' marks, in turns; without them all traffic is one class, first come, first served.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hosts import CARD, Hosts, Link, hosts, why_not
from benchmarks.measuring import arguments, interval, print_table, save, shown
from lightning_pipeshift.runtime.comm.groups import Lanes
from tests.unit.runtime.stages import connect

MEGABITS = 200.0
FLOOR = 0.02
LANES, NONE = "lanes", "no marks"
CONTENDERS = (LANES, NONE)
# Of a flow's messages.
_CHUNK_BYTES = 512 * 1024
_NUM_POSTED = 4


def honour(made: Hosts, megabits: float = MEGABITS) -> None:
    """Makes all hosts honour the lanes on links of this rate."""
    code = "import pipeshift_command; pipeshift_command.main()"
    for host in range(len(made.namespaces)):
        # A little below the link's rate, so that packets wait where their order is decided.
        rate = f"{0.97 * megabits:.0f}mbit"
        options = ["doctor", "--lanes", CARD, "--rate", rate, "--floor", str(FLOOR), "--apply"]
        subprocess.run(
            made.command(host, [sys.executable, "-c", code, *options]),
            check=True,
            capture_output=True,
        )


# --- two flows ---


def flow(lanes: Sequence[str], has_marks: bool, num_bytes: int) -> dict[str, float]:
    """Sends from rank 0 to rank 1, as many bytes on each lane; returns the bytes per second that
    arrive on each while the first one has some left.
    """
    connect()
    maker = Lanes(marks={} if has_marks else None)
    groups = [maker.make(range(2), lane).control for lane in lanes]
    dist.barrier()
    begin = time.monotonic()
    ends: dict[str, list[float]] = {}

    def run(lane: str, group: Any) -> None:
        transfer = group.send if dist.get_rank() == 0 else group.recv
        buffers = [torch.zeros(_CHUNK_BYTES, dtype=torch.uint8) for _ in range(_NUM_POSTED)]
        posted: deque[Any] = deque()
        ends[lane] = []
        for number in range(num_bytes // _CHUNK_BYTES):
            if len(posted) == _NUM_POSTED:
                posted.popleft().wait()
                ends[lane].append(time.monotonic())
            posted.append(transfer([buffers[number % _NUM_POSTED]], 1 - dist.get_rank(), 0))
        for work in posted:
            work.wait()
            ends[lane].append(time.monotonic())

    threads = [threading.Thread(target=run, args=one) for one in zip(lanes, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = ends[lanes[0]][-1]
    return {
        lane: sum(end <= last for end in ends[lane]) * _CHUNK_BYTES / (last - begin)
        for lane in lanes
    }


def report_flows(made: Hosts, num_rounds: int, num_bytes: int) -> dict[str, Any]:
    """Measures two flows, and prints what each gets."""
    shares: dict[str, dict[str, list[float]]] = {
        name: {"pipeline": [], "bulk": []} for name in CONTENDERS
    }
    for _ in range(num_rounds):
        alone = made.run(flow, ["pipeline"], True, num_bytes)[1]["pipeline"]
        for name in CONTENDERS:
            found = made.run(flow, ["pipeline", "bulk"], name == LANES, num_bytes)[1]
            for lane, rate in found.items():
                shares[name][lane].append(rate / alone)
    rows = [
        [name, *(shown(interval(shares[name][lane])) for lane in ("pipeline", "bulk"))]
        for name in CONTENDERS
    ]
    header = ["", "pipeline, of what it gets alone", "bulk"]
    print_table(f"Two flows through one link; the floor is {FLOOR:g}", header, rows)
    return {name: {k: interval(v) for k, v in found.items()} for name, found in shares.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--flow-megabytes", type=float, default=100.0, help="of each flow")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    with hosts(2, Link(megabits=MEGABITS)) as made:
        honour(made)
        flows = report_flows(made, options.num_rounds, round(options.flow_megabytes * 1e6))
    figures = {"megabits": MEGABITS, "floor": FLOOR, "flows": flows}
    save(options.json, figures)


if __name__ == "__main__":
    main()
