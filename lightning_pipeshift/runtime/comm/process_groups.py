"""The process groups for the sums over the virtual machines: a rank's all in one place.

Three things concern all of them together:

- A group costs a communicator on the device, and a stream of it. Where the same ranks already have
  one it is used again, and one that no plan needs any more is destroyed.
- NCCL's streams come from torch's pool of 32 streams of high priority, and nothing else of this
  package's does: a copy on a side stream never queues after a receive that waits for another rank.
- After a failure, kernels of NCCL wait for ever, and all that runs on the device waits behind them:
  a `loss.cpu()`, the destruction of a group. Aborting a communicator first tells its kernels to
  leave (``ncclCommAbort`` sets a flag), and then frees memory, which waits for every kernel on the
  device, those of other communicators too. So all are aborted at the same time, each in a thread.
  (NCCL's group calls cannot do that: they hold for one thread, and ``ProcessGroupNCCL::abort``
  starts another.)
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_pipeshift.compat.torch_distributed_private import (
    backend_of,
    forget_all_groups,
    set_options_timeout,
    set_traffic_class,
)
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.traffic import GRADIENTS
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.comm.sockets import keep_for_ever
from lightning_pipeshift.runtime.comm.waits import Watched

# How long a rank that fails waits for its communicators to be aborted.
_PATIENCE_SECONDS: Final = 10.0
# Read when a group is made; torchrun sets it to 1.
_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


Ranks = tuple[int, ...]


class ProcessGroups:
    """One rank's process groups of a backend. Every rank makes and changes them in the same way.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        device: this rank's device.
        watched: the context to communicate in.
        lanes: makes the groups of gloo, and has the timeout of all.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        watched: Watched,
        lanes: Lanes | None = None,
    ) -> None:
        self.backend = backend
        self._lanes = lanes or Lanes()
        self.device = device
        self.watched = watched
        self._groups: dict[tuple[Ranks, int], Any] = {}
        """By members, and the number of the lane."""
        self._lock = threading.Lock()
        self._aborts: list[threading.Thread] | None = None

    def want(self, sets: Iterable[Iterable[int]], num_lanes: int = 1) -> None:
        """Makes the missing groups, and destroys those that are no longer needed. Every rank of the
        job calls this with the same arguments, member or not, when no operation is in progress in
        the groups.

        Args:
            sets: the ranks of each group.
            num_lanes: how many groups the same ranks get, the most urgent lane first.
        """
        # In one order on all ranks: both are collective.
        members = sorted({tuple(sorted(ranks)) for ranks in sets})
        wanted = [(ranks, lane) for ranks in members for lane in range(num_lanes)]
        known = sorted(self._groups)
        with self.watched(None):
            for each in known:
                if each not in wanted:
                    dist.destroy_process_group(self._groups.pop(each))
            for each in wanted:
                if each not in known:
                    self._groups[each] = self._made(*each)

    def _made(self, ranks: Ranks, lane: int) -> Any:
        name = GRADIENTS[lane].name
        if self.backend == "gloo":
            return self._lanes.make(ranks, name).control
        options = nccl_options(self._lanes.timeout, self._lanes.tos(name))
        with nccl_environment():
            group = dist.new_group(
                list(ranks), timeout=self._lanes.timeout, backend=self.backend, pg_options=options
            )
        _abort_of(group, self.device)
        return group

    def group(self, ranks: Iterable[int], lane: int = 0) -> Any:
        """The group of some ranks, in any order, of which this rank is one.

        Args:
            ranks: its members.
            lane: the number of its lane; if there is no such lane, the last one.
        """
        members = tuple(sorted(ranks))
        while (members, lane) not in self._groups and lane:
            lane -= 1
        return self._groups[members, lane]

    # --- a failure ---

    def error(self) -> str | None:
        """Describes an error of a group's connections between devices; ``None`` if there is none.
        Any thread may call this.
        """
        for (ranks, _), group in list(self._groups.items()):
            found = _error_of(group, self.device) if self.backend == "nccl" else None
            if found is not None:
                return (
                    f"reports an error of NCCL ({found}) between the ranks"
                    f" {', '.join(map(str, ranks))}, which sum gradients. The variable"
                    " NCCL_DEBUG=WARN lets NCCL print the cause"
                )
        return None

    def abort(self) -> None:
        """Starts to abort everything in progress on the device, in all groups at once, and returns
        at once. Any thread may call this, several times.
        """
        with self._lock:
            if self._aborts is not None:
                return
            groups = list(self._groups.values()) if self.backend == "nccl" else []
            if dist.is_initialized():
                groups.append(dist.group.WORLD)
            aborts = {id(group): _abort_of(group, self.device) for group in groups}
            for group in groups:
                if aborts[id(group)] is not None:
                    # Its destruction would wait for torch's own threads.
                    keep_for_ever(group)
            self._aborts = [
                threading.Thread(target=_quietly, args=(abort,), name="abort", daemon=True)
                for abort in aborts.values()
                if abort is not None
            ]
            for thread in self._aborts:
                thread.start()

    def end_all(self) -> None:
        """Ends all process groups of this process, after a failure."""
        self.abort()
        assert self._aborts is not None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._aborts:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._groups.clear()
        if not self._aborts:
            dist.destroy_process_group()
        elif not any(thread.is_alive() for thread in self._aborts):
            forget_all_groups()
        else:
            warnings.warn(
                "PipeShift: communicators of this rank's GPU did not abort within"
                f" {_PATIENCE_SECONDS:g} s after a failure, so this process cannot train again."
                " Start a new one.",
                stacklevel=2,
            )


@contextmanager
def nccl_environment() -> Iterator[None]:
    """Context in which NCCL groups are made: torch's watchdog must not end this process when an
    operation fails or takes long, for whatever reason. Heartbeats tell which ranks are alive, and
    :meth:`ProcessGroups.error` checks for errors. The user's variable is restored.
    """
    before = os.environ.get(_ERROR_HANDLING)
    if hasattr(getattr(dist, "ProcessGroupNCCL", None), "get_error"):
        os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        os.environ.pop(_ERROR_HANDLING, None)
        if before is not None:
            os.environ[_ERROR_HANDLING] = before


def _quietly(abort: Callable[[], None]) -> None:
    # Nobody reads an error here: the run has failed already, with its reason.
    with suppress(Exception):
        abort()


# --- what NCCL's groups offer beyond torch.distributed ---


def nccl_options(timeout: timedelta, tos: int | None = None) -> Any:
    """Returns the options of an NCCL group.

    Args:
        timeout: that of its operations.
        tos: the traffic class of its packets on InfiniBand and RoCE, where this NCCL can set it;
            ``None`` for its own.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    set_options_timeout(options, timeout)
    if tos is not None:
        set_traffic_class(options, tos)
    return options


def _backend_of(group: Any, device: torch.device) -> Any:
    """The backend object that runs a group's operations on a device; ``None`` if this rank is no
    member, or if that is gloo.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    try:
        backend = backend_of(group, device)
    except RuntimeError:
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps each group in one that cannot abort.
    backend = getattr(backend, "wrapped_pg", backend)
    return None if backend.name() == "gloo" else backend


def _abort_of(group: Any, device: torch.device) -> Callable[[], None] | None:
    """Returns a function that aborts a group's operations on a device; ``None`` if none is needed.

    Raises:
        ConfigurationError: this torch has no way to abort them.
    """
    backend = _backend_of(group, device)
    if backend is None:
        return None
    found: Callable[[], None] | None = getattr(backend, "abort", None)
    if found is None:
        raise ConfigurationError(
            f"torch {torch.__version__} cannot abort operations of the backend {backend.name()!r},"
            " so a rank that fails would leave the others waiting for ever. Install torch 2.10 or"
            " newer, or use `PipeShiftStrategy(communication=Communication("
            "process_group_backend='gloo'))`."
        )
    return found


def _error_of(group: Any, device: torch.device) -> str | None:
    """The name of the error that torch's watchdog has found in a group, or ``None``."""
    backend = _backend_of(group, device)
    get_error = getattr(backend, "get_error", None)
    name = "SUCCESS" if get_error is None else str(get_error().name)
    return None if name == "SUCCESS" else name
