"""Private names of ``torch.distributed``. See :mod:`~lightning_pipeshift.compat.torch_private`."""

from __future__ import annotations

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
    """Context in which functions of ``torch.distributed`` that are given no group use this one, on
    all threads.
    """
    world: Any = dist.distributed_c10d._world
    before = world.default_pg
    world.default_pg = group
    _replaced.append(before)
    # What `get_backend` asks.
    world.pg_map[group] = world.pg_map[before]
    try:
        yield
    finally:
        del world.pg_map[group]
        world.default_pg = _replaced.pop()


_replaced: list[Any] = []


def num_collectives() -> int:
    """How many collectives this rank has begun on the job's default process group."""
    group: Any = _replaced[0] if _replaced else dist.distributed_c10d._world.default_pg
    return 0 if group is None else int(group._get_sequence_number_for_group())
