"""Identifies the host, and the processes that know each other by their numbers."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def boot_id() -> str:
    """Names the running system, which containers have in common and clones do not.

    Raises:
        OSError: the system does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_names(identities: Sequence[str]) -> list[str]:
    """The names of hosts, for people: those that different hosts share are numbered.

    Args:
        identities: a name and what else tells hosts apart, separated by ``/``; see
            :func:`~lightning_pipeshift.runtime.comm.backends.device_of`.
    """
    numbered: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for identity in dict.fromkeys(identities):
        name = identity.partition("/")[0]
        counts[name] += 1
        numbered[identity] = name if counts[name] == 1 else f"{name} ({counts[name]})"
    return [numbered[identity] for identity in identities]


def process_space() -> str:
    """Names the user, the host, and the set of processes in which a process has its number.

    Raises:
        OSError: the system does not say.
    """
    numbers = os.readlink("/proc/self/ns/pid")
    return f"{boot_id()} {socket.gethostname()} {numbers} {os.getuid()}"
