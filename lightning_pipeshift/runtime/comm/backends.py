"""Chooses the backends for communication between the ranks."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipeshift.devices.properties import device_name
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.host import network_host
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.runtime.comm.lane import gathered
from lightning_pipeshift.runtime.comm.waits import Watched
from lightning_pipeshift.runtime.offload.shared_memory import Address, address_here

log = logging.getLogger(__name__)


def backends(device: torch.device, asked: str | None) -> str:
    """The backends of the default process group, as torch spells them.

    Unless NCCL is asked for, that is gloo, which carries tensors on a GPU too: Lightning itself
    broadcasts one at every batch, and stages that share a GPU could not do that with NCCL.

    Args:
        device: this rank's device.
        asked: the user's choice: ``"nccl"``, ``"gloo"``, or ``None`` for what the devices allow.
    """
    if device.type == "cuda" and asked == "nccl":
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def store_of_this_start(
    rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> dist.Store:
    """A store without entries of earlier starts.

    Under torchrun the agent gives the same store to the ranks of every restart, and without
    torchrun a process that starts a second run, after one has failed, finds its first store. Old
    entries in it (addresses, a failure's reason) would look like those of living ranks.

    Args:
        rank: that of this process.
        world_size: the number of ranks.
        address: that of the store.
        port: likewise.
        timeout: how long to wait for the other ranks.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if rank:
            _await_listener(address, port, deadline)
        try:
            store = dist.TCPStore(
                address,
                port,
                world_size,
                is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
            name = _agreed_name(store, rank, world_size, timeout)
            return dist.PrefixStore(f"pipeshift/{name}", store)
        except dist.DistNetworkError:
            # This store may be that of an earlier start of rank 0, which has just ended.
            if rank == 0 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _await_listener(address: str, port: int, deadline: float) -> None:
    """Waits until the first rank listens. A store that is refused pauses for several hundred
    milliseconds before it tries again, and ranks that start together often come before the first.
    """
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        except OSError:  # the store says what is wrong
            return
        else:
            return


def _agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a new name from rank 0. Rank 0 answers every request for the name, and waits until
    every rank has acknowledged it; old requests of dead ranks are never acknowledged.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"pipeshift/asks/{rank}", name)
        store.wait([f"pipeshift/answer/{name}"], timeout)
        answer: str = store.get(f"pipeshift/answer/{name}").decode()
        store.set(f"pipeshift/taken/{name}/{answer}", "")
        return answer
    waiting, deadline = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while waiting:
        for other in sorted(waiting):
            if not store.check([f"pipeshift/asks/{other}"]):
                continue
            asks = store.get(f"pipeshift/asks/{other}").decode()
            store.set(f"pipeshift/answer/{asks}", name)
            if store.check([f"pipeshift/taken/{asks}/{name}"]):
                waiting.discard(other)
        if time.monotonic() > deadline:
            raise StageFailedError(
                f"Rank(s) {', '.join(map(str, sorted(waiting)))} did not connect within"
                f" {timeout.total_seconds():g} s. Look at what these processes printed."
            )
        time.sleep(0.01)
    return name


def device_of(device: torch.device) -> Device:
    """Returns the description of this rank's device for other ranks."""
    if device.type != "cpu":
        kind = device_name(device)
    else:
        kind = platform.processor() or platform.machine()
    return Device(host=network_host(), kind=kind)


def payload_backend(device: torch.device, asked: str | None, watched: Watched) -> str:
    """Returns ``"nccl"`` if every rank has its own GPU and all GPUs are of the same vendor,
    otherwise ``"gloo"``, which copies through host memory. Every rank calls this.

    Args:
        device: this rank's device.
        asked: as for :func:`backends`.
        watched: the context to communicate in.
    """
    if device.type != "cuda" or asked == "gloo":
        return "gloo"
    properties = torch.cuda.get_device_properties(device)
    mine = (str(getattr(properties, "uuid", "")), torch.version.hip is not None)
    devices = gathered(mine, dist.group.WORLD, watched)
    shared = len({uuid for uuid, _ in devices}) < len(devices)
    mixed = len({is_hip for _, is_hip in devices}) > 1
    if (shared or mixed) and asked is None:
        log.info(
            "PipeShift: stages share a device, or their vendors differ, so NCCL does not carry"
            " payloads."
        )
    return "gloo" if shared or mixed else "nccl"


def payload_address(device: torch.device) -> Address | None:
    """The address of this process for ranks that send tensors through its device's memory; ``None``
    on a CPU, where gloo is as fast (measured up to 40 MB).

    Args:
        device: this rank's device.
    """
    return address_here(device) if device.type != "cpu" else None
