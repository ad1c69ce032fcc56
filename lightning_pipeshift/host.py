"""Identifies the host, and the processes that share process numbers."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Names the running system; equal in containers of one host, different in cloned machines.

    Raises:
        OSError: the system does not tell.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network_host() -> str:
    """Names what shares a network card: the host's name, and further properties that distinguish
    hosts, separated by ``/``.
    """
    # Containers on one host share the boot id and have different network namespaces; cloned
    # machines share the name.
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(boot_id())
        marks.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(marks)


def host_names(identities: Sequence[str]) -> list[str]:
    """The names of hosts, for people; equal names of different hosts are numbered.

    Args:
        identities: as :func:`network_host` returns them.
    """
    numbered: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for identity in dict.fromkeys(identities):
        name = identity.partition("/")[0]
        counts[name] += 1
        numbered[identity] = name if counts[name] == 1 else f"{name} ({counts[name]})"
    return [numbered[identity] for identity in identities]


def process_space() -> str | None:
    """Names the user, the host, and the set of processes in which process numbers are unique;
    ``None`` if the system does not tell.
    """
    with suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
        return f"{boot_id()} {socket.gethostname()} {numbers} {os.getuid()}"
    return None
