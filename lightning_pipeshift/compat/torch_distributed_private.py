"""Private names of ``torch.distributed``. See :mod:`~lightning_pipeshift.compat.torch_private`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> Any:
    """The store of the default process group, whoever has made it. Torch returns none publicly."""
    return dist.distributed_c10d._get_default_store()


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the timeout in a backend's options. ``new_group(timeout=...)`` is ignored where options
    are given.
    """
    options._timeout = timeout


def set_traffic_class(options: Any, tos: int) -> None:
    """Sets the traffic class of an NCCL group's packets in its options, if its NCCL (from 2.26 on)
    and this torch have one.
    """
    config: Any = getattr(options, "config", None)
    if hasattr(config, "traffic_class"):
        config.traffic_class = tos


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend object that carries a group's operations on a device: it can abort them.

    Raises:
        RuntimeError: the group has none for this device.
    """
    return group._get_backend(device)


def forget_all_groups() -> None:
    """Lets torch forget all process groups, without waiting for the operations under way as
    ``destroy_process_group`` does; as that does where this torch has no other function.
    """
    forget = getattr(dist.distributed_c10d, "_abort_process_group", None)
    (forget or dist.destroy_process_group)()


@contextmanager
def default_group(group: Any) -> Iterator[None]:
    """Context in which functions of ``torch.distributed`` that are given no group use this one: on
    this thread, and on those of torch's own that run a backward. Other threads, which may save a
    checkpoint meanwhile, still find the job's group: from it torch computes a rank's number in any
    other group too.
    """
    world: Any = dist.distributed_c10d._world
    if not isinstance(world, _ByThread):
        # It stays: another thread may be in its code when the context ends.
        world.__class__ = type("World", (_ByThread, type(world)), {})
    before, of_step = world.default_pg, world.of_step
    # What `get_backend` asks.
    world.pg_map[group] = world.pg_map[before]
    world.of_step = threading.get_ident(), group
    try:
        yield
    finally:
        world.of_step = of_step
        world.pg_map.pop(group, None)


class _ByThread:
    """A base of the class of torch's table of process groups: the default group depends on the
    thread.
    """

    _default_pg: Any
    of_step: tuple[int, Any] | None = None

    @property
    def default_pg(self) -> Any:
        """The job's group; in a step the step's."""
        # Read once: the step may end meanwhile.
        of_step = self.of_step
        if of_step is None:
            return self._default_pg
        ident, group = of_step
        is_of_step = threading.get_ident() == ident or isinstance(
            threading.current_thread(), threading._DummyThread
        )
        return group if is_of_step else self._default_pg

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg = group


def num_collectives() -> int:
    """How many collectives this rank has begun on the job's default process group."""
    group: Any = dist.distributed_c10d._world._default_pg
    return 0 if group is None else int(group._get_sequence_number_for_group())
