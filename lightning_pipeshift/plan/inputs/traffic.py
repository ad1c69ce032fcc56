"""Classes of traffic, which tell the network what to carry first.

Tsinghua's "method and system for accelerating distributed machine learning", and the paper of the
same authors (Geryon, INFOCOM 2020): several connections between any two ranks, each with a priority
that every host and switch on the way honours. A sender that only orders its own messages cannot do
that: it does not see those of other hosts, or of other processes, on the same link.

The mark is the DSCP field of IP packets (RFC 2474), here with values between the class selectors 1
and 5, which network equipment orders by default: above ordinary traffic (0) all but bulk, which is
below it (as RFC 3662 proposes for class selector 1). ``pipeshift doctor --lanes`` prints what
makes a Linux host honour them. Imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_pipeshift.errors import ConfigurationError


@dataclass(frozen=True)
class TrafficClass:
    """The traffic of one lane.

    Args:
        name: of the lane.
        dscp: the mark of its packets, 0 to 63.
        priority: inside of the sending host, 0 to 6; a higher one goes first (``SO_PRIORITY``).
        carries: what travels on the lane, for people.
    """

    name: str
    dscp: int
    priority: int
    carries: str

    @property
    def tos(self) -> int:
        """The byte in the header of IPv4 (type of service) and IPv6 (traffic class)."""
        return self.dscp << 2


NUM_GRADIENT_CLASSES: Final = 5

PIPELINE: Final = TrafficClass(
    "pipeline", 40, 6, "payloads between stages, their gradients, swapped tensors that come back"
)
GRADIENTS: Final = tuple(
    TrafficClass(
        f"gradients-{number}",
        32 - 4 * number,
        max(2, 5 - number),
        "gradients between virtual machines" + (", the most urgent" if number == 0 else ""),
    )
    for number in range(NUM_GRADIENT_CLASSES)
)
BULK: Final = TrafficClass("bulk", 8, 1, "layers that move, tensors swapped out, checkpoints")

CLASSES: Final = (PIPELINE, *GRADIENTS, BULK)
"""All of them, the most urgent first."""


def with_marks(marks: Mapping[str, int]) -> tuple[TrafficClass, ...]:
    """The classes with other marks, where the network's owner has given these values a meaning.

    Args:
        marks: the DSCP value by a lane's name.

    Raises:
        ConfigurationError: a name or a value is not allowed, or two lanes have the same value.
    """
    known = {one.name: one for one in CLASSES}
    for name, dscp in marks.items():
        if name not in known:
            raise ConfigurationError(
                f"no lane is named {name!r}; there are {', '.join(map(repr, known))}"
            )
        if not isinstance(dscp, int) or isinstance(dscp, bool) or not 0 <= dscp <= 63:
            raise ConfigurationError(
                f"the mark {dscp!r} for lane {name!r}: a DSCP value is an integer from 0 to 63"
            )
        known[name] = TrafficClass(name, dscp, known[name].priority, known[name].carries)
    names_by_mark: dict[int, str] = {}
    for one in known.values():
        other = names_by_mark.setdefault(one.dscp, one.name)
        if other != one.name:
            raise ConfigurationError(
                f"the lanes {other!r} and {one.name!r} have the same mark, {one.dscp}, so no host"
                " could tell them apart: give each a DSCP value of its own"
            )
    return tuple(known.values())
