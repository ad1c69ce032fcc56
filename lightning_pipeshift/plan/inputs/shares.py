"""Divides the samples of a global batch among virtual machines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_pipeshift.errors import ConfigurationError


def check_shares(shares: Sequence[float] | None, num_virtual_machines: int | None) -> None:
    """Raises ConfigurationError for impossible shares.

    Args:
        shares: one number for each virtual machine, or ``None`` for equal ones.
        num_virtual_machines: how many there are, ``None`` if not known yet.
    """
    if shares is None:
        return
    wrong = isinstance(shares, str) or not isinstance(shares, Sequence)
    if wrong or any(isinstance(s, bool) or not isinstance(s, int | float) for s in shares):
        raise ConfigurationError(
            f"batch_shares={shares!r}: give one number for each virtual machine, as in [3, 1]."
        )
    for vm, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):
            raise ConfigurationError(
                f"batch_shares={list(shares)} gives virtual machine {vm} the share {share!r}. Every"
                " virtual machine needs a share above 0; or remove the machine from the run."
            )
    if num_virtual_machines is not None and len(shares) != num_virtual_machines:
        raise ConfigurationError(
            f"batch_shares={list(shares)} has {len(shares)} entries; there are"
            f" {num_virtual_machines} virtual machines. Give one for each."
        )


def shared_out(size: int, shares: Sequence[float]) -> list[int]:
    """The number of ``size`` samples for each virtual machine: integers that add up to it, as near
    to the shares as possible (largest remainders first, then the lower index), and at least 1 if
    there are enough.
    """
    total = math.fsum(shares)
    exact = [size * share / total for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda vm: (counts[vm] - exact[vm], vm))
    for vm in by_remainder[: size - sum(counts)]:
        counts[vm] += 1
    while size >= len(shares) and min(counts) == 0:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts
