"""How ranks communicate. Imports neither torch nor Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.traffic import with_marks

_WORDS: Final = {
    "process_group_backend": (None, "nccl", "gloo"),
    "gradient_aggregation": ("auto", "ring", "allreduce"),
}


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How the ranks of a run communicate: the argument ``communication`` of
    :class:`~lightning_pipeshift.PipeShiftStrategy`.

    Args:
        gradient_aggregation: how gradients are summed over the virtual machines: ``"ring"``, a ring
            for each layer that starts as soon as its gradient is ready; ``"allreduce"``, torch's
            own collectives; ``"auto"``, rings on gloo and collectives on NCCL.
        process_group_backend: ``"nccl"`` or ``"gloo"``, which sums gradients over the virtual
            machines; by default chosen by the devices. gloo does so by way of the host.
        timeout: how long a rank waits for other ranks at the start; and, if longer than half an
            hour, in each later operation.
        heartbeat_timeout: after how many seconds without a heartbeat a rank counts as gone, and the
            run ends on all others; at least 1. A thread of each rank sends the heartbeats. A longer
            timeout is needed only if single calls hold Python's lock for longer.
        stall_timeout: after how many seconds without a completed action on any rank the first rank
            reports which rank the others wait for, and its activity; 0: never.
        lane_marks: whether the packets of each lane (payloads, gradients, bulk) get a DSCP value,
            by which a network can carry urgent ones first: see ``pipeshift doctor --lanes``. A dict
            replaces values by the lane's name: ``{"pipeline": 46}``.
        overlap_updates: whether the optimizer updates a layer when its own gradient is summed over
            the virtual machines, so that the next step's forward begins while other sums are still
            on their way. ``False``: all layers are updated together. The bits are the same.

    Raises:
        ConfigurationError: a value that is not allowed; the message lists those that are.
    """

    gradient_aggregation: Literal["auto", "ring", "allreduce"] = "auto"
    process_group_backend: Literal["nccl", "gloo"] | None = None
    timeout: timedelta | None = timedelta(minutes=30)
    heartbeat_timeout: float = 10.0
    stall_timeout: float = 60.0
    lane_marks: bool | Mapping[str, int] = True
    overlap_updates: bool = True

    def __post_init__(self) -> None:
        for name, allowed in _WORDS.items():
            require_word(name, getattr(self, name), allowed)
        _check_seconds("heartbeat_timeout", self.heartbeat_timeout, 1.0)
        _check_seconds("stall_timeout", self.stall_timeout, 0.0)
        with_marks(self.marks or {})

    @property
    def marks(self) -> Mapping[str, int] | None:
        """The DSCP values of lanes that differ from the usual ones; ``None``: no lane has one."""
        if isinstance(self.lane_marks, bool):
            return {} if self.lane_marks else None
        return self.lane_marks


def require_word(name: str, word: Any, allowed: tuple[Any, ...]) -> None:
    """Raises ConfigurationError if an option is none of its few words.

    Args:
        name: of the option.
        word: its value.
        allowed: the words.
    """
    if word not in allowed:
        raise ConfigurationError(f"{name}={word!r}: allowed are {', '.join(map(repr, allowed))}.")


def _check_seconds(name: str, seconds: Any, least: float) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds >= least:
        raise ConfigurationError(
            f"{name}={seconds!r}: pass a number of seconds, {least:g} or more."
        )
