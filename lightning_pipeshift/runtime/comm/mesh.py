"""Connects every two ranks by TCP, for :mod:`~lightning_pipeshift.runtime.liveness.peers`."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.host import process_space
from lightning_pipeshift.runtime.comm.meeting import (
    GONE_SECONDS,
    is_there,
    read_when_there,
    telling,
)

_HELLO: Final = struct.Struct("!32sI")
_REACH_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2


class Mesh(NamedTuple):
    """A rank's connections to all other ranks, and handles of those ranks' processes.

    Args:
        connections: by rank.
        processes: file descriptors of the processes (``pidfd_open``), of ranks on this host.
    """

    connections: dict[int, socket.socket]
    processes: dict[int, int]


def connect_all(store: Any, rank: int, world_size: int, address: str, port: int) -> Mesh:
    """Connects every two ranks, all of which have come; every rank calls this.

    Args:
        store: the process group's, under a prefix of this call's own.
        rank: this rank.
        world_size: the number of ranks.
        address: that of the run's first host, as the ranks were told.
        port: that of the store, by which a rank finds which of its addresses leads there.

    Raises:
        StageFailedError: another rank cannot be reached, or has ended.
    """
    if world_size == 1:
        return Mesh({}, {})
    with telling(store):
        return _connected(store, rank, world_size, address, port)


def _connected(store: Any, rank: int, world_size: int, address: str, port: int) -> Mesh:
    if rank == 0:
        store.set("token", secrets.token_hex(16))
    token = read_when_there(store, "token", 0).encode()
    own = _own_address(address, port)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    found: dict[int, socket.socket] = {}
    space = process_space()
    with socket.create_server((own, 0), family=family, backlog=world_size + 8) as listener:
        entry = [own, listener.getsockname()[1], space, os.getpid()]
        store.set(f"at/{rank}", json.dumps(entry))
        for other in range(rank):
            where = json.loads(read_when_there(store, f"at/{other}", other))[:2]
            try:
                connection = socket.create_connection(tuple(where), _REACH_SECONDS)
            except OSError as error:
                raise StageFailedError(
                    f"Rank {rank} cannot reach rank {other} at {where[0]}, port {where[1]}:"
                    f" {error}. Every rank must be able to reach every other rank; if these are the"
                    " addresses of the wrong network, set GLOO_SOCKET_IFNAME to the name of the"
                    " right interface on each host."
                ) from error
            connection.sendall(_HELLO.pack(token, rank))
            found[other] = connection
        deadline = time.monotonic() + GONE_SECONDS
        listener.settimeout(_POLL_SECONDS)
        while len(found) < world_size - 1:
            missing = sorted(set(range(world_size)) - {rank, *found})
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                # Raises the error of a rank that has failed.
                is_there(store, "token")
                if time.monotonic() < deadline:
                    continue
                raise StageFailedError(
                    f"Rank(s) {', '.join(map(str, missing))} did not connect to rank {rank} at"
                    f" {own} within {GONE_SECONDS:g} s. Look at what these processes printed."
                ) from None
            connection.settimeout(5.0)
            said, other = b"", -1
            with suppress(OSError):
                said, other = _HELLO.unpack(_exactly(connection, _HELLO.size))
            # Other programs may connect to any port of a host.
            if secrets.compare_digest(said, token) and rank < other < world_size:
                found[other] = connection
            else:
                connection.close()
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    processes = {}
    for other in found:
        _, _, others, process = json.loads(read_when_there(store, f"at/{other}", other))
        if others == space is not None and process != os.getpid():
            with suppress(OSError, AttributeError):
                processes[other] = os.pidfd_open(process)
    return Mesh(found, processes)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise OSError("the connection ended")
        received += part
    return received


def _own_address(address: str, port: int) -> str:
    """The address by which the other ranks reach this one: that of the interface which leads to the
    first host; on the first host, the address that all were told.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted and (found := _address_of(wanted)) is not None:
        return found
    family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # No packet is sent: this only chooses the route.
        probe.connect(resolved)
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    try:
        import fcntl

        request = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])
