"""Looks at a host, and at what would disturb a run on it: for ``pipeshift doctor``."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lightning
import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from lightning_pipeshift.commands.lanes import missing
from lightning_pipeshift.devices.properties import device_name, memory_of
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.inputs.traffic import CLASSES
from lightning_pipeshift.text import bytes_text

_FEWEST_FILES: Final = 4096
_LEAST_SHARED_BYTES: Final = 1 << 30
_USUAL_MTU: Final = 1500


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        what: what was looked at.
        found: what was found.
        advice: what to do about it; empty if nothing has to be done.
    """

    what: str
    found: str
    advice: str = ""


def host_findings() -> list[Finding]:
    """All findings of this process's host."""
    return [*_devices(), *_software(), *_limits(), *_network()]


def _devices() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "CPU",
        f"{cores} cores, {bytes_text(memory.total)}, {bytes_text(memory.available)} free",
    )
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        yield Finding("accelerators", "none that torch can use: a run computes on CPUs")
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, index)
        total, free = memory_of(device)
        advice = ""
        if free < 0.9 * total:
            advice = "another process uses its memory: end it, or give the run a budget for less"
        found = f"{device_name(device)}, {bytes_text(total)}, {bytes_text(free)} free"
        yield Finding(str(device), found, advice)


def _software() -> Iterator[Finding]:
    yield Finding("torch", f"{torch.__version__}, Lightning {lightning.__version__}")
    there = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available()}
    advice = ""
    if not there["gloo"]:
        advice = "install a torch that has gloo: all control messages use it"
    elif torch.accelerator.is_available() and not there["NCCL"]:
        advice = "install a torch with NCCL: without it GPUs sum gradients by way of the host"
    yield Finding("backends", ", ".join(name for name, has in there.items() if has), advice)


def _limits() -> Iterator[Finding]:
    now, _most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = now not in (-1, resource.RLIM_INFINITY) and now < _FEWEST_FILES
    advice = f"`ulimit -n {_FEWEST_FILES}` before the run: each pair of ranks has several sockets"
    yield Finding("open files", f"at most {now}", advice if is_few else "")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        is_little = shared.free < _LEAST_SHARED_BYTES
        advice = (
            "give the container more (`docker run --shm-size=8g`): DataLoader workers, and tensors"
            " that ranks of one host lend each other, are kept there"
        )
        found = f"{bytes_text(shared.free)} of {bytes_text(shared.total)} free"
        yield Finding("shared memory", found, advice if is_little else "")


def _network() -> Iterator[Finding]:
    states = psutil.net_if_stats()
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wanted and wanted.split(",")[0] not in states:
        advice = f"set it to one of {', '.join(states)}"
        yield Finding("GLOO_SOCKET_IFNAME", f"{wanted}, which this host does not have", advice)
    for name, addresses in psutil.net_if_addrs().items():
        internet = [each.address for each in addresses if each.family == socket.AF_INET]
        state = states.get(name)
        if not internet or state is None or not state.isup or name == "lo":
            continue
        speed = f", {state.speed} Mbit/s" if state.speed else ""
        advice = ""
        if state.mtu < _USUAL_MTU:
            advice = f"`ip link set {name} mtu {_USUAL_MTU}`, if the network allows: small packets"
            advice += " cost processor time"
        yield Finding(name, f"{', '.join(internet)}, MTU {state.mtu}{speed}", advice)
        yield _lanes_on(name)
    yield _own_address()
    with suppress(OSError, ValueError):
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        low, high = map(int, text.split())
        yield Finding(
            "ports",
            f"ranks connect to each other on ports up to {high}; the kernel gives out those from"
            f" {low} on. A firewall between the hosts has to let TCP through",
        )


def _lanes_on(name: str) -> Finding:
    what = f"lanes on {name}"
    if not shutil.which("tc"):
        return Finding(what, "not known: the program `tc` is not here", "install `iproute2`")
    try:
        lacking = missing(name, CLASSES)
    except ConfigurationError as error:
        return Finding(what, f"not known: {error}", "run it as root, or outside of the container")
    if not lacking:
        return Finding(what, "honoured")
    advice = f"`pipeshift doctor --lanes {name}` says how"
    advice += "; it matters with several virtual machines (replicas of the pipeline)"
    return Finding(what, f"not honoured: {lacking[0]}", advice)


def _own_address() -> Finding:
    name = socket.gethostname()
    advice = f"give {name!r} its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and MASTER_ADDR"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("own name", f"{name} has no address: {error}", advice)
    is_loop = address.startswith("127.") and not os.environ.get("GLOO_SOCKET_IFNAME")
    found = f"{name} is {address}"
    if is_loop:
        return Finding("own name", f"{found}, which other hosts cannot reach", advice)
    return Finding("own name", found)
