"""Hosts with a network between them, on one machine.

Processes of one machine exchange gigabytes in a second, and nothing that a network would change can
be measured. Here every host is a network namespace, joined by a veth pair to a bridge in a
namespace of its own, the switch. A token bucket at either end of the pair gives the host's link the
same rate in both directions. The hosts share the machine's processors and its clock.

Needs Linux, root and iproute2; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_pipeshift.testing.processes import free_port
from lightning_pipeshift.testing.ranks import run_ranks

# The network card's name in every host.
CARD = "eth0"

_PREFIX = "pipeshift"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class HostsError(RuntimeError):
    """The hosts could not be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's connection to the switch, the same in both directions.

    Args:
        megabits: its rate per second, which counts Ethernet's headers too.
        mtu: the longest IP packet; clusters use 9000 (jumbo frames), the internet 1500.
        burst_bytes: what may follow a pause at once.
        queue_seconds: how long a packet waits before the next ones are dropped.
        congestion: TCP's congestion control, one that the kernel has.
    """

    megabits: float = 200.0
    mtu: int = 9000
    burst_bytes: int = 64 * 1024
    queue_seconds: float = 0.05
    congestion: str = "cubic"

    @property
    def bytes_per_second(self) -> float:
        """The rate in one direction."""
        return self.megabits * 1e6 / 8


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up: what :func:`hosts` yields.

    Args:
        links: of each host.
        namespaces: the hosts' network namespaces.
        switch: the namespace that they are joined in.
    """

    links: Sequence[Link]
    namespaces: Sequence[str]
    switch: str
    _port: int = field(default_factory=free_port)

    @property
    def link(self) -> Link:
        """The one that all hosts have."""
        (link,) = set(self.links)
        return link

    def address(self, host: int) -> str:
        """A host's IP address."""
        return f"10.77.0.{host + 1}"

    @property
    def port(self) -> int:
        """A free port for the store."""
        return self._port

    def set_cable(self, host: int, is_up: bool) -> None:
        """Pulls a host's cable, at the switch, or plugs it in again."""
        _run(f"ip -n {self.switch} link set port{host} {'up' if is_up else 'down'}")

    def set_direction(self, host: int, way: str, is_up: bool) -> None:
        """Loses all packets to a host, or from it, without a word to the sender.

        Args:
            host: its number.
            way: ``"in"`` or ``"out"``.
            is_up: whether packets get through.
        """
        where = f"-n {self.switch} qdisc replace dev port{host}"
        if way == "out":
            where = f"-n {self.namespaces[host]} qdisc replace dev {CARD}"
        # A bucket that is never full enough for a packet.
        bucket = _bucket(self.links[host]) if is_up else "rate 8bit burst 10 limit 1"
        _run(f"tc {where} root tbf {bucket}")

    def set_rate(self, host: int, megabits: float) -> None:
        """Gives a host's link another rate, in both directions."""
        bucket = _bucket(replace(self.links[host], megabits=megabits))
        _run(f"tc -n {self.switch} qdisc replace dev port{host} root tbf {bucket}")
        _run(f"tc -n {self.namespaces[host]} qdisc replace dev {CARD} root tbf {bucket}")

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on a host."""
        return ["ip", "netns", "exec", self.namespaces[host], *argv]

    def environment(self, rank: int, per_host: int = 1) -> dict[str, str]:
        """The environment variables that a launcher sets for a rank; the first host has the store.

        Args:
            rank: the rank; those of a host follow each other.
            per_host: the number of ranks on each host.
        """
        host, local_rank = divmod(rank, per_host)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "NODE_RANK": str(host),
            "GROUP_RANK": str(host),
            "WORLD_SIZE": str(len(self.namespaces) * per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": CARD,
        }

    def run(
        self, function: Callable[..., Any], *args: Any, per_host: int = 1, **options: Any
    ) -> list[Any]:
        """Calls a function as so many ranks on each host; ``options`` are those of
        :func:`lightning_pipeshift.testing.run_ranks`.
        """
        (found,) = self.run_jobs(1, function, *args, per_host=per_host, **options)
        return found

    def run_jobs(
        self,
        num_jobs: int,
        function: Callable[..., Any],
        *args: Any,
        per_host: int = 1,
        **options: Any,
    ) -> list[list[Any]]:
        """Calls a function as several jobs at the same time, each as :meth:`run` does; returns the
        ranks' results of each job.
        """
        num_ranks = len(self.namespaces) * per_host
        ports = [self._port, *(free_port() for _ in range(num_jobs - 1))]
        places = [
            (
                self.namespaces[rank // per_host],
                {**self.environment(rank, per_host), "MASTER_PORT": str(port)},
            )
            for port in ports
            for rank in range(num_ranks)
        ]
        found = run_ranks(_call_on_host, len(places), places, function, args, **options)
        return [found[begin : begin + num_ranks] for begin in range(0, len(found), num_ranks)]


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be made here, or None if they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if absent:
        return f"iproute2's {' and '.join(absent)} cannot be found"
    try:
        with hosts(1):
            return None
    except HostsError as error:
        return str(error)


@contextmanager
def hosts(num_hosts: int, link: Link | Sequence[Link] | None = None) -> Iterator[Hosts]:
    """Hosts on one switch, which are removed on leaving, however it comes to that.

    Args:
        num_hosts: how many.
        link: of all of them, or one for each, of the same MTU.

    Those that a killed process has left behind are removed first. For the main thread alone.

    Raises:
        HostsError: a command failed; the message shows it and what it said.
    """
    _remove(name for name in _ours() if not _lives(name))
    prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    made = Hosts(
        links=[link or Link()] * num_hosts if isinstance(link, Link | None) else link,
        namespaces=[f"{prefix}-{host}" for host in range(num_hosts)],
        switch=f"{prefix}-switch",
    )
    # SIGTERM alone would end the process without a word to the namespaces.
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        _make(made)
        yield made
    finally:
        signal.signal(signal.SIGTERM, before)
        # A namespace takes its end of a veth pair along, and that end the other one.
        _remove(name for name in (*made.namespaces, made.switch) if name in _ours())


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _make(made: Hosts) -> None:
    _run(f"ip netns add {made.switch}")
    at_switch = f"ip -n {made.switch} link"
    _run(f"{at_switch} add bridge mtu {made.links[0].mtu} type bridge mcast_snooping 0")
    # No IPv6 address anywhere, and so no packets that look for neighbours.
    _run(f"{at_switch} set bridge addrgenmode none up")
    for host, name in enumerate(made.namespaces):
        link = made.links[host]
        bucket = _bucket(link)
        _run(f"ip netns add {name}")
        port = f"port{host}"
        pair = f"{port} mtu {link.mtu} type veth peer name {CARD} mtu {link.mtu} netns {name}"
        _run(f"{at_switch} add {pair}")
        _run(f"{at_switch} set {port} master bridge addrgenmode none up")
        _run(f"tc -n {made.switch} qdisc add dev {port} root tbf {bucket}")
        _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {name} link set {CARD} addrgenmode none up")
        _run(f"tc -n {name} qdisc add dev {CARD} root tbf {bucket}")
        address = made.address(host)
        _run(f"ip -n {name} address add {address}/24 dev {CARD} noprefixroute")
        _run(f"ip -n {name} route add 10.77.0.0/24 dev {CARD} congctl {link.congestion}")


def _bucket(link: Link) -> str:
    rate = f"rate {link.megabits * 1e6:.0f}bit burst {link.burst_bytes}"
    return f"{rate} latency {link.queue_seconds * 1e3:.0f}ms"


def _run(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        raise HostsError(f"`{command}` failed: {result.stderr.strip()}")


def _ours() -> list[str]:
    """The namespaces of this module, by whichever process."""
    return [path.name for path in _FOLDER.glob(f"{_PREFIX}-*-*")]


def _lives(name: str) -> bool:
    return Path("/proc", name.split("-")[1]).exists()


def _remove(names: Iterable[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


def _call_on_host(
    places: Sequence[tuple[str, Mapping[str, str]]],
    function: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    rank = int(os.environ["RANK"])
    name, environment = places[rank]
    # What `ip netns exec` does, but for a process that runs already. It has one thread so far, and
    # later ones stay in the namespace of the thread that starts them.
    libc = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise HostsError(f"rank {rank} cannot enter its host: {os.strerror(number)}")
    os.environ.update(environment)
    return function(*args)
