"""The memory of this host, or of the container that this process runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = _CGROUPS, own: Path = OWN_CGROUPS) -> tuple[int, int]:
    """The memory of this host, or of this container, and its free part, in bytes.

    Args:
        cgroups: where control groups are mounted.
        own: the file that names the control groups of this process.
    """
    seen = psutil.virtual_memory()
    total, free = int(seen.total), int(seen.available)
    for limit, used in memory_limits(cgroups, own):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def memory_limits(cgroups: Path = _CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[tuple[int, int]]:
    """Yields the memory limits of the control groups of this process, each with the used part, in
    bytes. All of these limits apply. Yields nothing where there are no control groups.

    Source: the Linux kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    # In a container, the mount is often the container's own group, whatever the file contains.
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
            # The limits of a group's ancestors apply as well: a batch system limits the whole job.
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
                # Cached files that are not in use are evicted at once when memory is needed.
                used = max(used - int(stat.get(cache_name, 0)), 0)
            yield limit, used


# The names of the limit, of the used bytes, and of inactive cached files in memory.stat.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
