"""Identifies the host, and the processes that share process numbers."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def boot_id() -> str:
    """Names the running system; equal in containers of one host, different in cloned machines.

    Raises:
        OSError: the system does not tell.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_names(identities: Sequence[str]) -> list[str]:
    """The names of hosts, for people; equal names of different hosts are numbered.

    Args:
        identities: a name and further properties that distinguish hosts, separated by ``/``; see
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
    """Names the user, the host, and the set of processes in which process numbers are unique.

    Raises:
        OSError: the system does not tell.
    """
    numbers = os.readlink("/proc/self/ns/pid")
    return f"{boot_id()} {socket.gethostname()} {numbers} {os.getuid()}"
