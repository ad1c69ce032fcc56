"""How fast the rings sum gradients over a network, and what they send besides.

    python -m benchmarks.rings

Four hosts, a rank on each, with a network of 200 Mbit/s in both directions between them (network
namespaces: `benchmarks/hosts.py`; needs root). Three questions:

* How near are the rings to the bandwidth bound, 2 (m - 1) / m x bytes / rate? The rate is the
  nominal one, headers included, so that 1.0 cannot be reached: `TCP` says how much a plain stream
  between two hosts gets in the same run, and `TCP, all hosts` how much when every host sends to
  the next one at the same time, as in a ring.
* How long does a step take that makes gradients, against torch's DistributedDataParallel? Both
  sides train one model, whose layers are independent of each other and sleep before they give
  their gradient, and wait for the sums at the end. DDP is measured with several bucket sizes, of
  which the best counts, for each case anew. In the case `in order` all ranks give their gradients
  at the same times; `permuted`: each rank in an order of its own; `permuted, one late`: the last
  rank takes twice as long for every second layer, too.
* What goes over the wire, by the counters of the hosts' queues and of TCP, and to whom? Rank 0 has
  the store: nothing may go through it once the connections are there.

The hosts share this machine's processors; other programs on it slow all contenders down, less so
with `--first-in-line`. Their network has a rate, but no latency of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import CARD, Hosts, Link, hosts, why_not
from benchmarks.measuring import (
    arguments,
    interval,
    print_table,
    put_session_first,
    ratios,
    save,
    shown,
)
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.gradients.rings import Rings
from tests.unit.runtime.stages import connect

NUM_HOSTS = 4
RINGS, DEFAULT_DDP = "rings", "DDP, default buckets"
# Before and after a stretch that is counted: everything else has come to rest.
_REST_SECONDS = 0.5

# When a contender's turn began and ended on this rank. The hosts have one clock.
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The summed tensors, and the number of timings."""

    num_layers: int
    layer_bytes: int
    layer_seconds: float
    bucket_mb: tuple[float | None, ...]
    num_rounds: int
    seed: int
    first_in_line: bool

    @property
    def gradient_bytes(self) -> int:
        """Of the whole model."""
        return self.num_layers * self.layer_bytes

    @property
    def sent_bytes(self) -> float:
        """The least number of bytes that each host sends."""
        return 2 * (NUM_HOSTS - 1) / NUM_HOSTS * self.gradient_bytes


def make_rings(first_in_line: bool) -> Rings:
    """Connects this rank with all others; the rings get connections of their own."""
    if first_in_line:
        put_session_first(True)
    _, board = connect()
    groups = Lanes().make(range(dist.get_world_size()), "gradients-0")
    return Rings(lambda _: groups, dist.get_rank(), board.watched)


def timed(run: Callable[[], None]) -> Span:
    """Lets all ranks begin together."""
    dist.barrier()
    begin = time.monotonic()
    run()
    return begin, time.monotonic()


# --- against the bound ---


class Streams:
    """A TCP stream from each host to the next, and nothing but TCP."""

    def __init__(self, num_bytes: int) -> None:
        rank, next_rank = dist.get_rank(), (dist.get_rank() + 1) % NUM_HOSTS
        server = socket.create_server(("", 0))
        ports: list[Any] = [None] * NUM_HOSTS
        dist.all_gather_object(ports, server.getsockname()[1])
        # Hosts' addresses end in their number, from 1.
        network = os.environ["MASTER_ADDR"].rpartition(".")[0]
        self._out = socket.create_connection((f"{network}.{next_rank + 1}", ports[next_rank]))
        self._in, _ = server.accept()
        server.close()
        self._rank = rank
        self._num_bytes = num_bytes

    def one(self) -> None:
        """Rank 0 sends to rank 1."""
        if self._rank == 0:
            self._send()
        elif self._rank == 1:
            self._receive()

    def all(self) -> None:
        """Every rank sends to the next."""
        sender = threading.Thread(target=self._send)
        sender.start()
        self._receive()
        sender.join()

    def _send(self) -> None:
        part = bytes(1 << 18)
        for _ in range(self._num_bytes >> 18):
            self._out.sendall(part)

    def _receive(self) -> None:
        buffer = bytearray(1 << 18)
        missing = self._num_bytes >> 18 << 18
        while missing:
            missing -= self._in.recv_into(buffer)


def measure_bound(config: Config) -> dict[str, list[Span]]:
    """On each rank: the spans of each contender."""
    rings = make_rings(config.first_in_line)
    streams = Streams(int(config.sent_bytes))
    members = list(range(NUM_HOSTS))
    length = config.gradient_bytes // 4

    def ring(num_layers: int) -> Callable[[], None]:
        gradients = torch.ones(length).chunk(num_layers)

        def run() -> None:
            for ring in [rings.start(i, members, part) for i, part in enumerate(gradients)]:
                ring.wait()

        return run

    contenders = {
        "TCP": streams.one,
        "TCP, all hosts": streams.all,
        f"{config.num_layers} layers": ring(config.num_layers),
        "1 layer": ring(1),
    }
    warm_up = torch.ones(1000)
    rings.start(0, members, warm_up).wait()
    spans: dict[str, list[Span]] = {name: [] for name in contenders}
    for _ in range(config.num_rounds):
        for name, run in contenders.items():
            spans[name].append(timed(run))
    return spans


# --- against DistributedDataParallel ---


@dataclass(frozen=True, slots=True)
class Readiness:
    """When a rank's layers give their gradients: in which order, and how long each sleeps."""

    order: list[int]
    seconds: list[float]


def readiness(case: str, rank: int, config: Config) -> Readiness:
    """A rank's part in one of ``CASES``."""
    order = list(range(config.num_layers))
    seconds = [config.layer_seconds] * config.num_layers
    if case != "in order":
        random.Random(f"{config.seed} {rank}").shuffle(order)
    if case == "permuted, one late" and rank == NUM_HOSTS - 1:
        seconds[::2] = [2 * config.layer_seconds] * len(seconds[::2])
    return Readiness(order, seconds)


CASES = ("in order", "permuted", "permuted, one late")


def ideal_seconds(case: str, config: Config, link: Link) -> float:
    """A step of rings at the bandwidth bound, none of which begins before all ranks can.

    In truth a member begins when it can. That saves little: the last one's own gradient has to pass
    all the others.
    """
    there = [0.0] * config.num_layers
    for rank in range(NUM_HOSTS):
        ready = readiness(case, rank, config)
        now = 0.0
        for layer in ready.order:
            now += ready.seconds[layer]
            there[layer] = max(there[layer], now)
    end = 0.0
    for begin in sorted(there):
        end = max(end, begin) + config.sent_bytes / config.num_layers / link.bytes_per_second
    return end


class _Layer(torch.autograd.Function):
    """Gives its weight's gradient after a time that costs no processor."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, value: float) -> Tensor:
        ctx.length, ctx.seconds, ctx.value = len(weight), seconds, value
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return torch.full((ctx.length,), ctx.value), None, None


class Model(nn.Module):
    """Layers side by side, whose backwards run in any order."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        length = config.layer_bytes // 4
        weights = [nn.Parameter(torch.zeros(length)) for _ in range(config.num_layers)]
        self.weights = nn.ParameterList(weights)

    def forward(self, ready: Readiness) -> Tensor:
        # Of branches that wait for nothing, autograd first runs the one that was made last.
        total = torch.zeros(())
        for layer in reversed(ready.order):
            value = float(dist.get_rank() + layer)
            total = total + _Layer.apply(self.weights[layer], ready.seconds[layer], value)
        return total

    def take_gradients(self) -> None:
        """Checks that they are the mean over the ranks, and drops them."""
        for layer, weight in enumerate(self.weights):
            assert weight.grad is not None
            mean = layer + (NUM_HOSTS - 1) / 2
            assert (weight.grad == mean).all(), f"layer {layer}: {weight.grad[:3]}, not {mean}"
            weight.grad = None


class RingContender:
    """Starts a layer's ring when its gradient is there."""

    def __init__(self, config: Config, rings: Rings) -> None:
        self.model = Model(config)
        self._members = list(range(NUM_HOSTS))
        self._rings = rings
        self._started: list[Any] = []
        for number, weight in enumerate(self.model.weights):
            weight.register_post_accumulate_grad_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def start(weight: Tensor) -> None:
            assert weight.grad is not None
            self._started.append(self._rings.start(number, self._members, weight.grad))

        return start

    def step(self, ready: Readiness) -> None:
        self.model(ready).backward()
        for ring in self._started:
            ring.wait()
        self._started.clear()
        for weight in self.model.weights:
            assert weight.grad is not None
            weight.grad /= NUM_HOSTS


class DDPContender:
    """The usual solution: torch's DistributedDataParallel.

    Args:
        config: the model's.
        bucket_mb: the buckets' size. None is torch's default: 25 MiB, and a first one of 1 MiB;
            with any number, 25 too, there is no smaller first one.
    """

    def __init__(self, config: Config, bucket_mb: float | None) -> None:
        self.model = Model(config)
        self._ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_mb, process_group=dist.new_group(backend="gloo")
        )

    def step(self, ready: Readiness) -> None:
        self._ddp(ready).backward()


def measure_ddp(config: Config) -> dict[str, dict[str, list[Span]]]:
    """On each rank, for each case: the spans of each contender."""
    rings = make_rings(config.first_in_line)
    result = {}
    for case in CASES:
        ready = readiness(case, dist.get_rank(), config)
        # New for each case: DDP makes its buckets in the order of the first gradients.
        contenders: dict[str, RingContender | DDPContender] = {RINGS: RingContender(config, rings)}
        for bucket_mb in config.bucket_mb:
            name = DEFAULT_DDP if bucket_mb is None else f"DDP, {bucket_mb:g} MB"
            contenders[name] = DDPContender(config, bucket_mb)
        for contender in contenders.values():
            contender.step(Readiness(ready.order, [0.01] * config.num_layers))
            contender.model.take_gradients()
        spans: dict[str, list[Span]] = {name: [] for name in contenders}
        names = list(contenders)
        for number in range(config.num_rounds):
            # Nobody always goes first.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                contender = contenders[name]
                spans[name].append(timed(partial(contender.step, ready)))
                contender.model.take_gradients()
        result[case] = spans
    return result


# --- what is on the wire ---


@dataclass(frozen=True, slots=True)
class Wire:
    """The traffic that a host has sent so far.

    Args:
        num_bytes: of packets with all their headers.
        num_packets: how many.
        acknowledged: bytes of TCP's payload that each rank has acknowledged.
        store: bytes of TCP's payload over the store's port, in both directions.
    """

    num_bytes: int
    num_packets: int
    acknowledged: Counter[int]
    store: int


def wire() -> Wire:
    """Asks this host's queue and its TCP connections."""
    tc = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", CARD], capture_output=True, timeout=20
    )
    (queue,) = [each for each in json.loads(tc.stdout) if each.get("kind") == "tbf"]
    shown = subprocess.run(["ss", "-tniHO"], capture_output=True, text=True, timeout=20).stdout
    acknowledged: Counter[int] = Counter()
    store = 0
    for line in shown.splitlines():
        ends = re.findall(r"(\d+\.\d+\.\d+\.(\d+))\]?:(\d+)", line)
        (own, _, own_port), (peer, number, peer_port) = ends[:2]
        sent, received = (_counter(name, line) for name in ("bytes_acked", "bytes_received"))
        if own != peer:
            acknowledged[int(number) - 1] += sent
        if os.environ["MASTER_PORT"] in (own_port, peer_port):
            store += sent + received
    return Wire(queue["bytes"], queue["packets"], acknowledged, store)


def _counter(name: str, line: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", line)
    return int(found[1]) if found else 0


def measure_wire(config: Config) -> dict[str, tuple[Wire, Wire]]:
    """On each rank: what was sent before and after some rings, and before and after a rest."""
    rings = make_rings(config.first_in_line)
    model = RingContender(config, rings)
    ready = Readiness(list(range(config.num_layers)), [0.0] * config.num_layers)

    def stretch(run: Callable[[], None]) -> tuple[Wire, Wire]:
        dist.barrier()
        time.sleep(_REST_SECONDS)
        before = wire()
        # Nobody sends while another one still counts, and nobody asks anybody whether he does.
        time.sleep(2 * _REST_SECONDS)
        run()
        time.sleep(2 * _REST_SECONDS)
        return before, wire()

    model.step(ready)
    assert wire().store > 0, "the store's connections are not among those that are counted"
    return {
        RINGS: stretch(lambda: model.step(ready)),
        "rest": stretch(lambda: time.sleep(_REST_SECONDS)),
    }


# --- tables ---


def seconds_of(ranks: list[list[Span]]) -> list[float]:
    """From the first rank's begin to the last one's end, for each round."""
    return [
        max(end for _, end in spans) - min(begin for begin, _ in spans)
        for spans in zip(*ranks, strict=True)
    ]


def report_bound(made: Hosts, config: Config) -> dict[str, Any]:
    """Against the bandwidth bound."""
    ranks = made.run(measure_bound, config, timeout=600)
    bound = config.sent_bytes / made.link.bytes_per_second
    figures: dict[str, Any] = {"bound_seconds": bound}
    rows = []
    for name in ranks[0]:
        seconds = seconds_of([rank[name] for rank in ranks])
        parts = interval([bound / each for each in seconds])
        rate = made.link.megabits * parts["median"]
        rows.append([name, bound, median(seconds), shown(parts), rate])
        figures[name] = {"seconds": seconds, "bound_over_time": parts}
    print_table(
        f"{config.gradient_bytes >> 20} MiB over {NUM_HOSTS} hosts, {describe(made.link)}:"
        f" {config.num_rounds} rounds",
        ["", "bound s", "s", "bound / time", "Mbit/s"],
        rows,
    )
    print("\nThe rings are to reach 0.95 of the bound.")
    return figures


def report_ddp(made: Hosts, config: Config) -> dict[str, Any]:
    """Against DistributedDataParallel."""
    ranks = made.run(measure_ddp, config, timeout=2400)
    figures: dict[str, Any] = {}
    rows = []
    for case in CASES:
        seconds = {
            name: seconds_of([rank[case][name] for rank in ranks]) for name in ranks[0][case]
        }
        medians = {name: median(each) for name, each in seconds.items()}
        best = min((name for name in medians if name != RINGS), key=medians.__getitem__)

        over_rings = {
            name: interval(ratios(each, seconds[RINGS])) for name, each in seconds.items()
        }

        ideal = ideal_seconds(case, config, made.link)
        for name in seconds:
            note = "best DDP" if name == best else ""
            rows.append([case, name, ideal, medians[name], shown(over_rings[name]), note])
        figures[case] = {
            "ideal_seconds": ideal,
            "seconds": seconds,
            "best_ddp": best,
            "rings_seconds": interval(seconds[RINGS]),
            "best_ddp_seconds": interval(seconds[best]),
            "best_ddp_over_rings": over_rings[best],
            "default_ddp_seconds": interval(seconds[DEFAULT_DDP]),
            "default_ddp_over_rings": over_rings[DEFAULT_DDP],
        }
    print_table(
        f"{config.num_layers} layers of {config.layer_bytes >> 20} MiB that take"
        f" {config.layer_seconds * 1e3:.0f} ms each in the backward, {describe(made.link)}:"
        f" {config.num_rounds} rounds",
        ["gradients", "", "rings' ideal s", "s a step", "time / rings'", ""],
        rows,
    )
    print("\nThe rings' ideal: each at the bandwidth bound, once all ranks have the gradient.")
    print("Best DDP's time / rings' is to reach 0.98 in order, and 1.15 with permuted gradients.")
    return figures


def report_wire(made: Hosts, config: Config) -> dict[str, Any]:
    """The traffic in addition to the gradients."""
    ranks = made.run(measure_wire, config, timeout=300)
    rows = []
    figures: dict[str, Any] = {"gradient_bytes": config.sent_bytes}
    for stretch in ranks[0]:
        for rank, stretches in enumerate(ranks):
            before, after = stretches[stretch]
            sent = after.acknowledged - before.acknowledged
            must = int(config.sent_bytes) if stretch == RINGS else 0
            num_bytes = after.num_bytes - before.num_bytes
            payload = sum(sent.values())
            rows.append(
                [
                    stretch,
                    rank,
                    must,
                    *(sent[(rank + place) % NUM_HOSTS] for place in (1, 2, 3)),
                    num_bytes,
                    after.num_packets - before.num_packets,
                    f"{payload / must - 1:.3%}" if must else "",
                    f"{num_bytes / must - 1:.2%}" if must else "",
                    after.store - before.store,
                ]
            )
            figures[f"{stretch}, rank {rank}"] = {
                "to_ranks": dict(sent),
                "wire_bytes": num_bytes,
                "to_previous_bytes": sent[(rank - 1) % NUM_HOSTS],
                "payload_excess": payload / must - 1 if must else None,
                "wire_excess": num_bytes / must - 1 if must else None,
                "wire_packets": after.num_packets - before.num_packets,
                "store_bytes": after.store - before.store,
            }
    print_table(
        "Bytes that each rank sends in a step after the first one, and in a rest; the store is on"
        " rank 0",
        [
            "",
            "rank",
            "gradients",
            "to next",
            "to opposite",
            "to last",
            "on the wire",
            "packets",
            "payload excess",
            "wire excess",
            "store",
        ],
        rows,
    )
    by_rank = [figures[f"{RINGS}, rank {rank}"] for rank in range(NUM_HOSTS)]
    figures["largest"] = {
        name: max(each[name] for each in by_rank)
        for name in ("payload_excess", "wire_excess", "to_previous_bytes", "store_bytes")
    }
    return figures


def describe(link: Link) -> str:
    """A link in the tables' titles."""
    return f"{link.megabits:g} Mbit/s, MTU {link.mtu}, TCP {link.congestion}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", default=["bound", "ddp", "wire"])
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--layer-mb", type=int, default=4)
    parser.add_argument("--layer-seconds", type=float, default=0.25, help="a layer's backward")
    parser.add_argument(
        "--bucket-mb", type=float, nargs="*", default=[4.0, 8.0], help="beside DDP's default"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the permutations")
    parser.add_argument(
        "--first-in-line", action="store_true", help="run before this machine's other programs"
    )
    parser.add_argument("--megabits", type=float, default=200.0)
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--congestion", default="cubic")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return

    config = Config(
        num_layers=options.num_layers,
        layer_bytes=options.layer_mb << 20,
        layer_seconds=options.layer_seconds,
        bucket_mb=(None, *options.bucket_mb),
        num_rounds=options.num_rounds,
        seed=options.seed,
        first_in_line=options.first_in_line,
    )
    link = Link(megabits=options.megabits, mtu=options.mtu, congestion=options.congestion)
    reports = {"bound": report_bound, "ddp": report_ddp, "wire": report_wire}
    figures: dict[str, Any] = {"config": asdict(config), "link": asdict(link)}
    with hosts(NUM_HOSTS, link) as made:
        for part in options.parts:
            figures[part] = reports[part](made, config)
    save(options.json, figures)


if __name__ == "__main__":
    main()
