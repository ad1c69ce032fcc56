"""The figures of a recording that loggers get, by their names."""

from __future__ import annotations

from typing import Final

from lightning_pipeshift.timeline.recording import Recording
from lightning_pipeshift.timeline.shares import mean, shares_of

PREFIX: Final = "pipeshift/"


def metrics_of(recording: Recording) -> dict[str, float]:
    """The figures of one step; of several minibatches, those of one of them on average.

    ``bubble``, ``exposed_comm`` and ``recompute`` are fractions of the step's time, means over all
    stages (:class:`~lightning_pipeshift.timeline.shares.Shares`). ``stage_seconds/V.S`` is how
    long stage ``S`` of virtual machine ``V`` computes in a step, ``memory/V.S`` the largest number
    of bytes in use on its device in the step.
    """
    shares = mean(shares_of(recording))
    found = {
        "step_seconds": recording.seconds / recording.num_steps,
        "bubble": shares.bubble,
        "exposed_comm": shares.exposed,
        "recompute": shares.recompute,
    }
    for record in recording.ranks:
        where = f"{record.vm}.{record.stage}"
        found[f"stage_seconds/{where}"] = record.compute_seconds / recording.num_steps
        if record.memory:
            found[f"memory/{where}"] = float(record.peak_bytes)
    return {PREFIX + name: value for name, value in found.items()}
