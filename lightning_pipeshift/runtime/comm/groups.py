"""Makes the gloo groups of a job. A lane between ranks is a group of its own: it has its own
connections, whose packets have the lane's mark.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from lightning_pipeshift.plan.inputs.traffic import BULK, PIPELINE, with_marks
from lightning_pipeshift.runtime.comm.sockets import Opened, keep_short, mark, open_sockets

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """A process group.

    Args:
        control: torch's.
        sockets: its connections.
    """

    control: Any
    sockets: Opened


@dataclass(frozen=True)
class StageGroups:
    """The groups in which the stages of a virtual machine communicate.

    Args:
        pipeline: for messages that have to arrive soon.
        swaps: for swapped tensors that come back.
        bulk: for large transfers that are not urgent, so that they delay no other message.
    """

    pipeline: Group
    swaps: Group | None = None
    bulk: Group | None = None


class Lanes:
    """Makes groups. Every rank of the job makes the same ones, in the same order, whether it is a
    member or not.

    Args:
        timeout: of the groups' operations; at least gloo's default.
        marks: see :func:`~lightning_pipeshift.plan.inputs.traffic.with_marks`; ``None``: packets
            get no marks.
    """

    def __init__(
        self, timeout: timedelta | None = None, marks: Mapping[str, int] | None = None
    ) -> None:
        self.timeout = group_timeout(timeout)
        self._classes = {} if marks is None else {one.name: one for one in with_marks(marks)}
        self._is_refused = False

    def make(self, ranks: Iterable[int], lane: str) -> Group:
        """Makes a group.

        Args:
            ranks: the members.
            lane: the name of the lane that it is.
        """
        _never_collect_groups_in_children()
        before = open_sockets()
        control = dist.new_group(list(ranks), backend="gloo", timeout=self.timeout)
        sockets = open_sockets() - before
        keep_short(sockets)
        traffic = self._classes.get(lane)
        refused = mark(sockets, traffic) if traffic is not None else None
        if refused is not None and not self._is_refused:
            self._is_refused = True
            log.warning(
                "PipeShift: the system refuses to mark packets with their lane (%s), so the"
                " network cannot carry urgent ones first. Training goes on without marks.",
                refused,
            )
        return Group(control, sockets)

    def tos(self, lane: str) -> int | None:
        """The byte that marks a lane's packets in their IP header; ``None`` if they get no mark."""
        traffic = self._classes.get(lane)
        return traffic.tos if traffic is not None else None

    def between_stages(self, ranks: Iterable[int], has_transfers: bool = True) -> StageGroups:
        """Makes the groups of a virtual machine.

        Args:
            ranks: those of its stages.
            has_transfers: whether tensors are swapped and layers move between them.
        """
        members = list(ranks)
        # Those that come back are as urgent as payloads: Linux's HTB has no more priorities.
        lanes = (PIPELINE, PIPELINE, BULK) if has_transfers else (PIPELINE,)
        return StageGroups(*(self.make(members, lane.name) for lane in lanes))


def group_timeout(timeout: timedelta | None) -> timedelta:
    """Returns the timeout of a group's operations: at least gloo's default; NCCL's own default is a
    third of that. A rank that stalls is alive, so a short timeout that the user sets for the start
    does not apply later.
    """
    default: timedelta = dist.default_pg_timeout
    return default if timeout is None else max(timeout, default)


@cache
def _never_collect_groups_in_children() -> None:
    """Leaves what is garbage at a fork alone in the forked process, such as a loader's worker. A
    group waits for its threads when it is destroyed, and a forked process has none of them: it
    would wait for ever, or crash. A failed run leaves such garbage: its errors refer to frames.
    """
    os.register_at_fork(after_in_child=gc.freeze)
