"""Identifies the host, and the processes that know each other by their numbers."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def boot_id() -> str:
    """Names the running system, which containers have in common and clones do not.

    Raises:
        OSError: the system does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_space() -> str:
    """Names the user, the host, and the set of processes in which a process has its number.

    Raises:
        OSError: the system does not say.
    """
    numbers = os.readlink("/proc/self/ns/pid")
    return f"{boot_id()} {socket.gethostname()} {numbers} {os.getuid()}"
