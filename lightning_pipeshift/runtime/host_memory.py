"""How much memory a process may use: what the host has, and what its container or job is given.

A container sees all of its host's memory, and is killed at its own limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = _CGROUPS, own: Path = OWN_CGROUPS) -> tuple[int, int]:
    """What memory this host, or this container of it, has, and what is free of it, in bytes.

    Args:
        cgroups: where control groups are mounted.
        own: the file that names this process's.
    """
    seen = psutil.virtual_memory()
    total, free = int(seen.total), int(seen.available)
    for limit, used in memory_limits(cgroups, own):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def memory_limits(cgroups: Path = _CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[tuple[int, int]]:
    """The limits of the control groups that this process is in, with what is used of each, in
    bytes. All of them hold. Nothing where there are no control groups.

    Source: the Linux kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    # In a container, the mount is often the container's own, whatever the file says.
    groups = {cgroups: _VERSION_2, cgroups / "memory": _VERSION_1}
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            version = None if controllers else _VERSION_2
            mount = cgroups
            if "memory" in controllers.split(","):
                version, mount = _VERSION_1, cgroups / "memory"
            if version is None:
                continue
            group = mount / path.lstrip("/")
            # A group's ancestors limit it, too: a batch system sets its limit on the job.
            while group != mount and group != group.parent:
                groups[group] = version
                group = group.parent
    for group, (limit_name, used_name, cache_name) in groups.items():
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            limit, used = int((group / limit_name).read_text()), 0
            with suppress(OSError, ValueError):
                used = int((group / used_name).read_text())
                stat = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
                # Files that nobody reads now give way at once.
                used = max(used - int(stat.get(cache_name, 0)), 0)
            yield limit, used


# The names of the limit and of what is used, and that of unread files in memory.stat.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
