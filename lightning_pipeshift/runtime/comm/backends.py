"""Chooses the backends for communication between the ranks."""

from __future__ import annotations

import logging
import platform

import torch
import torch.distributed as dist

from lightning_pipeshift.devices.properties import device_name
from lightning_pipeshift.devices.shared_memory import Address, address_here
from lightning_pipeshift.host import network_host
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.runtime.comm.lane import gathered
from lightning_pipeshift.runtime.comm.waits import Watched

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


def device_of(device: torch.device) -> Device:
    """Returns the description of this rank's device for other ranks."""
    if device.type != "cpu":
        kind = device_name(device)
    else:
        kind = platform.processor() or platform.machine()
    return Device(host=network_host(), kind=kind)


def backend_of_sums(device: torch.device, asked: str | None, watched: Watched) -> str:
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
            "PipeShift: stages share a device, or their vendors differ, so NCCL does not sum"
            " gradients."
        )
    return "gloo" if shared or mixed else "nccl"


def payload_address(device: torch.device) -> Address | None:
    """The address of this process for ranks that send tensors through its device's memory; ``None``
    on a CPU, where gloo is as fast (measured up to 40 MB).

    Args:
        device: this rank's device.
    """
    return address_here(device) if device.type != "cpu" else None
