"""What tells hosts apart."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Names the running system, which containers have in common and clones do not.

    Raises:
        OSError: the system does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
