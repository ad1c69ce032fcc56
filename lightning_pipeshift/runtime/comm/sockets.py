"""Marks the packets of connections, and shuts connections down for good.

A process group's connections stay open as long as any operation on them is referred to, and after a
failure tracebacks refer to some. Waiting peers would continue to wait; so the sockets themselves
are shut down. This needs Linux's ``/proc``; on other systems a failed rank's connections close when
its process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import time
from typing import Any, Final

from lightning_pipeshift.plan.inputs.traffic import TrafficClass

_PATIENCE_SECONDS: Final = 1.0
_UNSENT_BYTES: Final = 128 * 1024

Opened = frozenset[tuple[int, int]]
"""Sockets by file descriptor and inode; the descriptor alone may meanwhile belong to another file.
"""


def open_sockets() -> Opened:
    """The sockets that this process has open."""
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return frozenset(found)


def shut_down(sockets: Opened) -> None:
    """Ends the connections of sockets that are still open; the other ends notice at once."""
    for descriptor, _ in sockets & open_sockets():
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(descriptor)) as connection,
        ):
            # If a listener is shut down, gloo ends the process.
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def mark(sockets: Opened, traffic: TrafficClass) -> str | None:
    """Marks the packets of sockets that are still open, from now on.

    Args:
        sockets: the sockets.
        traffic: the class of what they carry.

    Returns:
        why the system refused it; ``None`` if it did not.
    """
    refused = None
    for descriptor, _ in sockets & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                _mark(connection, traffic)
            except OSError as error:
                refused = str(error)
    return refused


def _mark(connection: socket.socket, traffic: TrafficClass) -> None:
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, traffic.tos)
        # It may carry packets of IPv4, which not every system lets it mark.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic.tos)
    elif connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic.tos)
    else:
        return
    # The kernel derives a priority from the mark, so this comes last.
    if hasattr(socket, "SO_PRIORITY"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, traffic.priority)


def keep_short(sockets: Opened) -> None:
    """Lets the system queue few bytes in sockets that are still open: what is in a socket cannot be
    overtaken any more. (What the network has not acknowledged comes on top, as the speed needs it.)
    """
    option: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        return
    for descriptor, _ in sockets & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES)


def give_up_after(sockets: Opened, seconds: float) -> None:
    """Makes the system break connections whose other end does not answer, rather than after a
    quarter of an hour (tcp(7), ``TCP_USER_TIMEOUT``).

    Args:
        sockets: the sockets, if they are still open.
        seconds: after how long; 0: the system's default.
    """
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_USER_TIMEOUT": int(1000 * seconds)}
    for descriptor, _ in sockets & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            for name, value in options.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(seconds > 0))


def ends_soon(work: Any) -> bool:
    """Whether an operation of a group whose connections are shut down ends at once, as it should.

    If an operation's first send fails before gloo itself has noticed the closed connection, gloo
    loses the operation, which then waits for half an hour. With torch 2.13 a collective cannot be
    cancelled.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def keep_for_ever(group: Any) -> None:
    """Prevents the destruction of a process group, which would wait for its operations in progress.
    The group's threads end with the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
